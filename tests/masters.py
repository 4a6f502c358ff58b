"""A real Mooncake master for tests, on free loopback ports, and never left behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from moonstep.stores.mooncake import package, process
from moonstep.stores.mooncake.metrics import read_status
from moonstep.stores.mooncake.process import MasterPlan


def need_mooncake() -> None:
    """Skip the test, with the reason, where Mooncake cannot be loaded."""
    try:
        package.load()
        process.program()
    except package.PackageMissing as error:
        pytest.skip(f"no real Mooncake Store to test against: {error}")


class Master:
    """One master, or, after ``restart``, one that knows nothing, at the same address.

    ``flags`` are Mooncake's, such as ``{"default_kv_lease_ttl": "1s"}``. Leaving the ``with`` block
    ends it, stopped or not.
    """

    def __init__(self, folder: Path, flags: Mapping[str, str] | None = None) -> None:
        self.plan = MasterPlan(
            port=process.free_port(), metrics_port=process.free_port(), flags=flags or {}
        )
        self._log = folder / f"master-{self.plan.port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def url(self, segment: str = "256MiB", **params: object) -> str:
        """What to write into ``store``."""
        rest = "".join(f"&{name}={value}" for name, value in params.items())
        return f"mooncake://{self.plan.address}?segment={segment}{rest}"

    def keys(self) -> int:
        """How many objects its clients have put."""
        return read_status(self.plan.metrics).objects

    def start(self) -> None:
        self._process = process.start(self.plan, self._log)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def freeze(self) -> None:
        """Stop it as it is; its sockets stay open and nobody answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.send_signal(number)
