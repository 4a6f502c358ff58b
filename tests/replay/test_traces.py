"""Traces are read as their authors wrote them."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from moonstep.replay.traces import SESSION_SPACING_S, TraceError, parse_trace, read_trace


def mooncake_line(time_ms: int, ids: list[int]) -> dict[str, Any]:
    return {
        "timestamp": time_ms,
        "input_length": 500 * len(ids),
        "output_length": 7,
        "hash_ids": ids,
    }


def session(*requests: dict[str, Any]) -> dict[str, Any]:
    return {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": list(requests)}


def turn(time_s: float, ids: list[int]) -> dict[str, Any]:
    return {"t": time_s, "type": "n", "in": 60 * len(ids), "out": 1, "hash_ids": ids}


def test_requests_come_in_the_order_of_time_and_ties_keep_the_order_of_the_file() -> None:
    trace = parse_trace([mooncake_line(9, [1]), mooncake_line(5, [2]), mooncake_line(5, [3])])
    assert [request.blocks for request in trace.requests] == [(2,), (3,), (1,)]
    assert trace.block_tokens == 512
    assert trace.input_tokens == 1500


def test_ids_of_sessions_never_meet() -> None:
    trace = parse_trace([session(turn(0, [1, 2])), session(turn(0, [1, 3]))])
    first, second = (set(request.blocks) for request in trace.requests)
    assert not first & second


def test_sessions_start_one_after_the_other() -> None:
    trace = parse_trace([session(turn(0, [1])), session(turn(2, [2]))])
    assert [request.time_s for request in trace.requests] == [0, SESSION_SPACING_S + 2]


def test_a_copy_of_a_session_is_left_out() -> None:
    trace = parse_trace([session(turn(0, [1])), session(turn(0, [1])), session(turn(0, [2]))])
    assert len(trace.requests) == 2


def test_requests_of_a_subagent_stand_where_they_were_sent() -> None:
    agent = {"t": 10.0, "type": "subagent", "requests": [turn(1.0, [7])]}
    trace = parse_trace([session(turn(0, [1]), agent, turn(12.0, [2]))])
    assert [request.time_s for request in trace.requests] == [0, 11, 12]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.xz"])
def test_a_file_is_read_plain_or_compressed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = "\n".join(json.dumps(mooncake_line(time, [time])) for time in range(5))
    path.write_bytes(lzma.compress(text.encode()) if name.endswith("xz") else text.encode())
    assert len(read_trace(path, limit=3).requests) == 3


@pytest.mark.parametrize("text", ["", "no json", '{"other": 1}', '{"timestamp": 1}', "[1, 2]"])
def test_what_is_no_trace_is_refused_in_one_line_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"^moonstep: .*other\.jsonl") as raised:
        read_trace(path)
    assert "\n" not in str(raised.value)
