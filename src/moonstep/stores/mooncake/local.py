"""A Mooncake Store of one machine: a master, and a process that gives memory, kept by a record.

``start`` leaves two processes behind that outlive whoever called; a record in the state folder says
which they are, so that ``stop`` ends those and no others.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import psutil

from moonstep.stores.base import StoreUnwell
from moonstep.stores.mooncake import process
from moonstep.stores.mooncake.master import Address
from moonstep.stores.mooncake.metrics import read_status
from moonstep.stores.mooncake.process import MasterFailed, MasterPlan

STOP_S: Final = 10.0
POOL_READY_S: Final = 60.0


class AlreadyUp(RuntimeError):
    """A master of this state folder runs already."""


class Process(msgspec.Struct, frozen=True):
    """One process, told from a later one of the same number by when it began."""

    pid: int
    began: float

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        """It, if it still runs."""
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(self.pid)
            # A process that ended and was not waited for is no process any more.
            if found.create_time() == self.began and found.status() != psutil.STATUS_ZOMBIE:
                return found
        return None


class Record(msgspec.Struct, frozen=True):
    """What was started: the master, where it listens, and who gives it memory, if anybody."""

    master: Process
    host: str
    port: int
    metrics_port: int
    log: str
    pool: Process | None = None
    pool_bytes: int = 0
    http_metadata: int | None = None

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)

    @property
    def metrics(self) -> Address:
        return Address(self.host, self.metrics_port)

    @property
    def processes(self) -> tuple[Process, ...]:
        return (self.master,) if self.pool is None else (self.pool, self.master)

    def url(self, segment: str) -> str:
        """The URL of the store, for a server that gives so much memory."""
        url = f"mooncake://{self.address}?segment={segment}"
        if self.http_metadata is not None:
            url += f"&metadata=http://{Address(self.host, self.http_metadata)}/metadata"
        return url


@dataclass(frozen=True, slots=True)
class StateFolder:
    """Where the record and the logs of one machine's store lie."""

    path: Path

    @classmethod
    def default(cls) -> StateFolder:
        """``$XDG_STATE_HOME/moonstep``, or what stands for it."""
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return cls(Path(base) / "moonstep")

    @property
    def _record(self) -> Path:
        return self.path / "mooncake.json"

    def read(self) -> Record | None:
        """The record, if there is one that can be read."""
        try:
            return msgspec.json.decode(self._record.read_bytes(), type=Record)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def write(self, record: Record) -> None:
        beside = self._record.with_suffix(".new")
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        beside.replace(self._record)

    def forget(self) -> None:
        self._record.unlink(missing_ok=True)

    def log(self, name: str) -> Path:
        return self.path / f"{name}.log"


def start(folder: StateFolder, plan: MasterPlan, pool_bytes: int) -> Record:
    """Start a master and, if it is to give any memory, a pool; return once both can be used.

    Whatever happens before that, also a Ctrl-C, ends what was started.

    Raises:
        AlreadyUp: when the last one of this folder still runs.
        MasterFailed: when one of them does not start, with its last words.
        PackageMissing: when Mooncake is not installed.
    """
    known = folder.read()
    if known is not None and known.master.find():
        raise AlreadyUp(f"a master runs already at {known.address} (process {known.master.pid})")
    folder.path.mkdir(parents=True, exist_ok=True)
    log = folder.log("master")
    with _ended_on_error() as started:
        master = process.start(plan, log, detached=True)
        started.append(master)
        record = Record(
            master=Process.of(master.pid),
            host=plan.host,
            port=plan.port,
            metrics_port=plan.metrics_port,
            log=str(log),
            http_metadata=plan.http_metadata,
        )
        if pool_bytes:
            pool = _start_pool(folder, record, pool_bytes)
            started.append(pool)
            _wait_for_pool(pool, record, folder.log("pool"))
            record = msgspec.structs.replace(
                record, pool=Process.of(pool.pid), pool_bytes=pool_bytes
            )
        folder.write(record)
    return record


def stop(folder: StateFolder, stop_s: float = STOP_S) -> Record | None:
    """End what ``start`` started; what was in its memory is gone. The record, if there was one."""
    record = folder.read()
    if record is None:
        return None
    running = [found for each in record.processes if (found := each.find())]
    for found in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            # One that is stopped would take a polite request only once it goes on.
            found.resume()
            found.terminate()
    _, left = psutil.wait_procs(running, timeout=stop_s)
    for found in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.kill()
    psutil.wait_procs(left, timeout=stop_s)
    folder.forget()
    return record


@contextlib.contextmanager
def _ended_on_error() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    except BaseException:
        for each in reversed(started):
            each.kill()
            each.wait()
        raise


def _start_pool(folder: StateFolder, record: Record, pool_bytes: int) -> subprocess.Popen[bytes]:
    with folder.log("pool").open("ab") as sink:
        return subprocess.Popen(
            [sys.executable, "-m", "moonstep.stores.mooncake.pool", record.url(str(pool_bytes))],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )


def _wait_for_pool(pool: subprocess.Popen[bytes], record: Record, log: Path) -> None:
    if not process.becomes(
        lambda: _has_memory(record), pool, "the pool", log, POOL_READY_S, every_s=0.1
    ):
        raise MasterFailed(f"the pool was not ready within {POOL_READY_S:.0f} s; see {log}")


def _has_memory(record: Record) -> bool:
    with contextlib.suppress(StoreUnwell):
        return read_status(record.metrics).capacity_bytes > 0
    return False
