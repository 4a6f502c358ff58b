"""One engine in a child process that never outlives the demo."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

_TEARDOWN_S: Final = 60.0
"""A child that has said its last word may still take this long to let go of its memory."""
_END_GRACE_S: Final = 5.0


class EngineFailed(RuntimeError):
    """The child ended without its figures. The message names its log and shows the log's end."""


class ChildPlan(Protocol):
    """What a child process is started with."""

    def to_json(self) -> dict[str, Any]: ...
    def environment(self) -> dict[str, str]: ...


@contextlib.contextmanager
def engine_events(
    plan: ChildPlan, log: Path, child_module: str = "moonstep.demo.child"
) -> Iterator[Iterator[dict[str, Any]]]:
    """Start the engine of ``plan`` and give its events, one dictionary each, until it ends.

    The child has a session of its own, so a Ctrl-C reaches only this process, which then ends the
    child and all it started on the way out of the ``with`` block. What the engine prints goes to
    ``log``.
    """
    reader, writer = os.pipe()
    command = [sys.executable, "-m", child_module, str(writer)]
    with log.open("wb") as sink:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=sink,
            env={**os.environ, **plan.environment()},
            pass_fds=(writer,),
            start_new_session=True,
        )
    os.close(writer)
    try:
        assert child.stdin is not None
        child.stdin.write(json.dumps(plan.to_json()).encode())
        child.stdin.close()
        with os.fdopen(reader, encoding="utf-8") as events:
            yield (json.loads(line) for line in events)
        if child.wait(timeout=_TEARDOWN_S) != 0:
            raise EngineFailed(_last_words(log))
    finally:
        end_group(child)


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End the child's whole process group: politely first, then for certain."""
    for signal_number, wait_s in ((signal.SIGTERM, _END_GRACE_S), (signal.SIGKILL, _END_GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal_number)
        deadline = time.monotonic() + wait_s
        while _group_lives(child) and time.monotonic() < deadline:
            time.sleep(0.02)


def _group_lives(child: subprocess.Popen[bytes]) -> bool:
    child.poll()
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    # What Moonstep itself has to say is the cause; otherwise the end of the log is the best guess.
    own = [line for line in lines if "moonstep:" in line][-1:]
    return "\n".join([f"the engine ended early; its log is {log}", *(own or lines[-15:])])
