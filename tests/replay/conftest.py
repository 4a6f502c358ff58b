"""A cut of a real trace, read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonstep.replay.traces import Trace, read_trace

TRACE = Path(__file__).parents[1] / "data" / "mooncake_conversation_head.jsonl.xz"


@pytest.fixture(scope="session")
def trace() -> Trace:
    return read_trace(TRACE)
