"""A Mooncake Store for a measurement: a master, and a process that gives the memory.

    python -m moonstep.bench.mooncake_pool URL

gives the segment that the URL names, says ``ready``, and ends with its standard input.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from moonstep.stores.base import Store, StoreUnwell
from moonstep.stores.mooncake import process
from moonstep.stores.mooncake.package import PackageMissing
from moonstep.stores.mooncake.process import MasterFailed, MasterPlan
from moonstep.stores.urls import Use, open_store

_MODULE: Final = "moonstep.bench.mooncake_pool"
SEGMENT: Final = "1GiB"
READY_S: Final = 30.0
STOP_S: Final = 10.0


def opened(url: str, use: Use = Use.SERVE, within_s: float = READY_S) -> Store:
    """A store of ``url`` that answers. Raises ``StoreUnwell`` when it does not come to that."""
    store = open_store(url, use)
    stop_s = time.monotonic() + within_s
    while True:
        try:
            store.contains([])
            return store
        except StoreUnwell:
            if time.monotonic() > stop_s:
                store.close()
                raise
            time.sleep(0.05)


def url_of(plan: MasterPlan) -> str:
    """The store of a master, for clients that give no memory."""
    return f"mooncake://{plan.address}?segment=0"


@contextmanager
def own_master() -> Iterator[MasterPlan]:
    """A master that answers, and ends with the block.

    Raises ``ValueError`` with one line when none can be started.
    """
    plan = MasterPlan(port=process.free_port(), metrics_port=process.free_port())
    with tempfile.TemporaryDirectory(prefix="moonstep-master-") as folder:
        log = Path(folder, "master.log")
        try:
            master = process.start(plan, log, detached=True, ends_with_us=True)
        except (PackageMissing, MasterFailed) as error:
            raise ValueError(f"moonstep: {error}") from error
        try:
            yield plan
        finally:
            master.terminate()
            master.wait(STOP_S)


@contextmanager
def open_pool(url: str, segment: str = SEGMENT) -> Iterator[None]:
    """A process that gives memory to the store of ``url``."""
    giving = url.replace("segment=0", f"segment={segment}")
    command = [sys.executable, "-m", _MODULE, giving]
    pool = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert pool.stdout is not None
        if pool.stdout.readline() != "ready\n":
            raise StoreUnwell("the process that was to give the memory did not start")
        yield
    finally:
        if pool.stdin is not None:
            pool.stdin.close()
        try:
            pool.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pool.kill()
            pool.wait()
        if pool.stdout is not None:
            pool.stdout.close()


def _give(url: str) -> None:
    store = opened(url, Use.SERVE)
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    _give(sys.argv[1])
