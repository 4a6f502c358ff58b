"""What a ``mooncake://`` URL says, parsed once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from moonstep.stores.mooncake import configfile
from moonstep.stores.mooncake.master import DEFAULT_PORT, Address
from moonstep.stores.urls import StoreUrl, Use

PARAMETERS: Final = (
    "segment",
    "protocol",
    "device",
    "metadata",
    "host",
    "buffer",
    "replicas",
    "preferred_segment",
    "soft_pin",
    "tenant",
    "config",
)
PROTOCOLS: Final = ("tcp", "rdma")
PEER_TO_PEER: Final = "P2PHANDSHAKE"
DEFAULT_TENANT: Final = "default"
OWN_SEGMENT: Final = "own"
DEFAULT_BUFFER_BYTES: Final = 16 << 20
EXAMPLE: Final = "mooncake://10.0.0.5:50051?segment=32GiB"


class SoftPin(Enum):
    """Which objects the master keeps longer than others when room gets scarce."""

    NONE = "none"
    HEADS = "heads"
    """Objects that begin a chain: what most prompts begin with."""
    ALL = "all"


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """How a client joins a Mooncake Store, and how it stores objects there.

    ``segment_bytes`` is the memory that this client gives to the pool; none in a client that only
    uses what others give. ``buffer_bytes`` is Mooncake's own staging memory in this process.
    ``metadata`` is where clients find each other: from peer to peer, or an HTTP address. ``host``
    is the address under which other clients reach this one; ``None``: whatever leads to the master.
    ``preferred_segment`` names the segment in which objects are to be put, ``own`` this client's.
    """

    master: Address
    segment_bytes: int = 0
    protocol: str = "tcp"
    device: str = ""
    metadata: str = PEER_TO_PEER
    host: str | None = None
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    replicas: int = 1
    preferred_segment: str | None = None
    soft_pin: SoftPin = SoftPin.NONE
    tenant: str = DEFAULT_TENANT

    @classmethod
    def of_url(cls, url: StoreUrl, environ: Mapping[str, str] = os.environ) -> MooncakeOptions:
        """The options of a URL. Raises ``SettingError`` for what cannot be.

        ``mooncake://?config=FILE`` reads vLLM's file; ``mooncake://`` the one that the environment
        names. The URL's own parameters go before the file's. Only a client that serves gives a
        segment, whatever they say.
        """
        url.check_params(PARAMETERS)
        url = _with_file(url, environ)
        if url.path not in ("", "/"):
            raise url.error(f'a Mooncake Store has no path: "{EXAMPLE}"')
        master = _address(url)
        segment_bytes = url.size("segment")
        if segment_bytes is None and not url.inspecting:
            raise url.error(
                'say how much memory each rank gives to the pool: "?segment=32GiB", '
                'or "?segment=0" to use only what others give'
            )
        buffer_bytes = url.size("buffer")
        return cls(
            master=master,
            segment_bytes=(segment_bytes or 0) if url.use is Use.SERVE else 0,
            protocol=_one_of(url, "protocol", PROTOCOLS),
            device=url.params.get("device", ""),
            metadata=url.params.get("metadata", PEER_TO_PEER),
            host=url.params.get("host"),
            buffer_bytes=DEFAULT_BUFFER_BYTES if buffer_bytes is None else buffer_bytes,
            replicas=_count(url, "replicas"),
            preferred_segment=url.params.get("preferred_segment"),
            soft_pin=SoftPin(_one_of(url, "soft_pin", tuple(pin.value for pin in SoftPin))),
            tenant=url.params.get("tenant", DEFAULT_TENANT),
        )


def _with_file(url: StoreUrl, environ: Mapping[str, str]) -> StoreUrl:
    """The URL with what a configuration file says, if it names none and no master."""
    path = url.params.get("config") or environ.get(configfile.VARIABLE)
    if url.host and "config" in url.params:
        raise url.error("the file names the master: write mooncake://?config=FILE")
    if url.host or not path:
        return url
    try:
        params = configfile.read(Path(path))
    except configfile.BadConfigFile as error:
        raise url.error(str(error)) from error
    return replace(url, host=params.pop("master"), params={**params, **url.params})


def _address(url: StoreUrl) -> Address:
    try:
        split = urlsplit(f"//{url.host}")
        host, port = split.hostname, split.port
    except ValueError as error:
        raise url.error(f"its host and port cannot be read: {error}") from error
    if not host or "@" in url.host:
        raise url.error(
            f'name the master: "{EXAMPLE}"; or a configuration file: "mooncake://?config=FILE", '
            f"or {configfile.VARIABLE} in the environment"
        )
    return Address(host, DEFAULT_PORT if port is None else port)


def _one_of(url: StoreUrl, name: str, known: tuple[str, ...]) -> str:
    """The value of a parameter; the first known one when it is not given."""
    value = url.params.get(name, known[0])
    if value not in known:
        raise url.error(f"parameter {name!r} is one of: {', '.join(known)}")
    return value


def _count(url: StoreUrl, name: str) -> int:
    value = url.params.get(name, "1")
    if not value.isascii() or not value.isdigit() or not int(value):
        raise url.error(f"parameter {name!r} is a whole number, one or more")
    return int(value)
