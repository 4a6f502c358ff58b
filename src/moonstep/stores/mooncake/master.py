"""The master of a Mooncake Store, as a process on the network."""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Final
from urllib.parse import urlsplit

DEFAULT_PORT: Final = 50051

# A request of Mooncake's RPC protocol for a function that does not exist: magic, version,
# serialisation, kind, sequence number, function, length, attached length. A master that runs says
# so at once, and logs nothing; one that is stopped says nothing.
_REQUEST: Final = struct.pack("<BBBBIIII", 21, 0, 0, 0, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port of a master."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def answers(master: Address, timeout_s: float) -> bool:
    """Whether the master answers a request within ``timeout_s``. Lets the GIL go meanwhile.

    Mooncake's own client holds the GIL while it is set up or closed, for up to a minute when the
    master is stopped; so ask here first. Any answer will do, also the end of the connection.
    """
    try:
        with socket.create_connection((master.host, master.port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(_REQUEST)
            connection.recv(64)
    except OSError:
        return False
    return True


def metadata_answers(url: str, timeout_s: float) -> bool:
    """Whether the metadata server of an HTTP address answers; others are not asked.

    Any answer will do. As with the master: a client is only set up when there is one.
    """
    split = urlsplit(url)
    if split.scheme != "http" or not split.hostname:
        return True
    connection = HTTPConnection(split.hostname, split.port, timeout=timeout_s)
    try:
        connection.request("GET", split.path or "/")
        connection.getresponse()
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
    return True


def route_to(master: Address) -> str:
    """The address of this machine under which the master's network reaches it."""
    family = socket.AF_INET6 if ":" in master.host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((master.host, master.port))  # sends nothing
        return str(probe.getsockname()[0])
    return socket.gethostname()
