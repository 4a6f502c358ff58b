"""Readers of published request traces: which blocks each request has, in the order of arrival.

Two formats are told apart by the fields of the first line: Mooncake's (one request a line, ids
shared by the whole file) and kv-cache-tester's (one session a line, ids of the session alone).
"""

from __future__ import annotations

import heapq
import json
import lzma
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MOONCAKE_BLOCK_TOKENS: Final = 512
SESSION_SPACING_S: Final = 60.0


class TraceError(ValueError):
    """A file that is not a trace, or not one of the known kinds. One line, with the file's name."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. ``blocks`` name its prompt's blocks from the head; the last may be partial."""

    time_s: float
    input_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order in which they arrive; ties keep the order of the file."""

    block_tokens: int
    requests: tuple[TraceRequest, ...]

    @property
    def input_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """The trace in ``path`` (JSON lines, ``.xz`` or plain), at most its first ``limit`` requests.

    Raises:
        TraceError: the file cannot be read as a trace.
    """
    try:
        lines = list(_lines(path))
        trace = parse_trace(lines)
    except (OSError, EOFError, lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"moonstep: {path} is no trace this can read: {error}") from error
    return Trace(trace.block_tokens, trace.requests[:limit])


def parse_trace(lines: Iterable[Mapping[str, Any]]) -> Trace:
    """A trace from decoded lines.

    >>> line = {"timestamp": 1500, "input_length": 700, "output_length": 1, "hash_ids": [4, 5]}
    >>> parse_trace([line]).requests
    (TraceRequest(time_s=1.5, input_tokens=700, blocks=(4, 5)),)
    """
    listed = list(lines)
    if not listed:
        raise ValueError("it is empty")
    if "requests" in listed[0]:
        return _sessions(listed)
    requests = [
        TraceRequest(line["timestamp"] / 1000, line["input_length"], tuple(line["hash_ids"]))
        for line in listed
    ]
    requests.sort(key=lambda request: request.time_s)
    return Trace(MOONCAKE_BLOCK_TOKENS, tuple(requests))


def _sessions(lines: list[Mapping[str, Any]]) -> Trace:
    """Distinct sessions that start ``SESSION_SPACING_S`` apart, their ids made distinct."""
    seen: set[tuple[Any, ...]] = set()
    streams: list[list[TraceRequest]] = []
    for line in lines:
        identity = tuple((r["in"], r["out"], tuple(r["hash_ids"])) for r in _flat(line["requests"]))
        if identity not in seen:
            seen.add(identity)
            streams.append(list(_session(line, len(streams))))
    merged = heapq.merge(*streams, key=lambda request: request.time_s)
    return Trace(int(lines[0]["block_size"]), tuple(merged))


def _session(line: Mapping[str, Any], number: int) -> Iterator[TraceRequest]:
    start_s = number * SESSION_SPACING_S
    known: dict[int, int] = {}  # one object an id: a long session repeats each id in every request
    requests = [
        TraceRequest(
            start_s + request["t"],
            request["in"],
            tuple(known.setdefault(b, (number << 32) + b) for b in request["hash_ids"]),
        )
        for request in _flat(line["requests"])
    ]
    yield from sorted(requests, key=lambda request: request.time_s)


def _flat(requests: Iterable[Mapping[str, Any]], start_s: float = 0.0) -> Iterator[dict[str, Any]]:
    """Requests with those of subagents among them, whose times count from their own start."""
    for request in requests:
        time_s = start_s + float(request["t"])
        if "requests" in request:
            yield from _flat(request["requests"], time_s)
        else:
            yield {**request, "t": time_s}


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)
