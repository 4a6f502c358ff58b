"""A master process of one's own: what ``moonstep up`` starts, and what tests run against."""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from moonstep.stores.mooncake.master import DEFAULT_PORT, Address, answers
from moonstep.stores.mooncake.package import PackageMissing, missing

LOOPBACK: Final = "127.0.0.1"
DEFAULT_METRICS_PORT: Final = 9003
READY_S: Final = 20.0
_PR_SET_PDEATHSIG: Final = 1


class MasterFailed(RuntimeError):
    """A master that did not start; the message is one line, with its own last words."""


@dataclass(frozen=True, slots=True)
class MasterPlan:
    """How to start a master. ``flags`` are its own, such as ``{"default_kv_lease_ttl": "5s"}``.

    ``http_metadata`` has it serve the clients' metadata over HTTP as well, on that port of all the
    machine's addresses: Mooncake gives no choice there.
    """

    host: str = LOOPBACK
    port: int = DEFAULT_PORT
    metrics_port: int = DEFAULT_METRICS_PORT
    http_metadata: int | None = None
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)

    @property
    def metrics(self) -> Address:
        return Address(self.host, self.metrics_port)

    def command(self, program: Path) -> list[str]:
        """The command line.

        >>> MasterPlan(flags={"client_ttl": "5"}).command(Path("mooncake_master"))[-1]
        '--client_ttl=5'
        """
        own = {
            "rpc_address": self.host,
            "rpc_port": str(self.port),
            "metrics_host": self.host,
            "metrics_port": str(self.metrics_port),
        }
        if self.http_metadata is not None:
            own |= {
                "enable_http_metadata_server": "true",
                "http_metadata_server_host": self.host,
                "http_metadata_server_port": str(self.http_metadata),
            }
        return [
            str(program),
            *(f"--{name}={value}" for name, value in {**own, **self.flags}.items()),
        ]

    def taken(self) -> list[Address]:
        """Those of its addresses on which somebody listens already, or which are not ours."""
        ports = [self.port, self.metrics_port]
        ports += [] if self.http_metadata is None else [self.http_metadata]
        return [Address(self.host, port) for port in ports if not is_free(Address(self.host, port))]


def program() -> Path:
    """Mooncake's master program. Raises ``PackageMissing`` when the package is not installed."""
    spec = find_spec("mooncake")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "mooncake_master"
        if path.is_file():
            return path
    raise PackageMissing(missing())


def is_free(address: Address) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def start(
    plan: MasterPlan, log: Path, *, detached: bool = False, ends_with_us: bool = False
) -> subprocess.Popen[bytes]:
    """Start a master and return once it answers. ``log`` takes what it writes, appended.

    ``detached`` gives it a session of its own, so that Ctrl-C at the terminal does not reach it.
    Whatever happens before it answers, it is ended again. With ``ends_with_us`` Linux ends it when
    the calling thread is gone, whatever ended that.

    Raises:
        MasterFailed: when a port is taken, when it ends by itself, when it does not answer in time.
        PackageMissing: when there is no program to start.
    """
    taken = plan.taken()
    if taken:
        raise MasterFailed(f"{taken[0]} is taken; choose another port")
    with log.open("ab") as sink:
        process = subprocess.Popen(
            plan.command(program()),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=detached,
            preexec_fn=_end_with_parent if ends_with_us else None,
        )
    try:
        _wait_ready(process, plan, log)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_ready(process: subprocess.Popen[bytes], plan: MasterPlan, log: Path) -> None:
    if not becomes(
        lambda: answers(plan.address, 0.5), process, "the master", log, READY_S, every_s=0.02
    ):
        raise MasterFailed(f"the master did not answer within {READY_S:.0f} s: {last_line(log)}")


def becomes(
    is_ready: Callable[[], object],
    process: subprocess.Popen[bytes],
    who: str,
    log: Path,
    within_s: float,
    every_s: float,
) -> bool:
    """Wait until a process that was started is ready; False when it is not in time.

    Raises:
        MasterFailed: when it ends meanwhile, with its last words.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise MasterFailed(f"{who} ended with {process.returncode}: {last_line(log)}")
        if is_ready():
            return True
        time.sleep(every_s)
    return False


def last_line(log: Path) -> str:
    """The end of a log, for an error message."""
    lines = log.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
