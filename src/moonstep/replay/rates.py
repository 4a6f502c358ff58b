"""Hit rates by tokens, and the plain LRU caches that a replay is compared with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass

from moonstep.replay.traces import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Rates:
    """Share of prompt tokens that were hits: over the whole trace, and over its second half.

    The second half is that of the requests, after a cache has warmed up on the first.
    """

    whole: float
    second_half: float


def rates(trace: Trace, hit_blocks: Sequence[int]) -> Rates:
    """Rates of a replay in which each request hit so many of its leading blocks."""
    hits = [
        hit_tokens(request, blocks, trace.block_tokens)
        for request, blocks in zip(trace.requests, hit_blocks, strict=True)
    ]
    inputs = [request.input_tokens for request in trace.requests]
    half = len(inputs) // 2
    return Rates(sum(hits) / sum(inputs), sum(hits[half:]) / sum(inputs[half:]))


def hit_tokens(request: TraceRequest, blocks: int, block_tokens: int) -> int:
    """Tokens in the first ``blocks`` blocks of a request, of which the last may be partial.

    >>> hit_tokens(TraceRequest(0.0, 700, (1, 2)), 2, 512)
    700
    """
    return min(blocks * block_tokens, request.input_tokens)


def lru_hits(trace: Trace, capacity_blocks: int) -> list[int]:
    """Leading blocks that each request finds in an LRU cache of ``capacity_blocks``.

    All blocks of a request enter when it arrives; the tail of a prefix leaves before its head.
    """
    cached: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in trace.requests:
        hits.append(leading(request.blocks, cached))
        for block in reversed(request.blocks):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > capacity_blocks:
            cached.popitem(last=False)
    return hits


def leading(blocks: Sequence[object], cached: Container[object]) -> int:
    """Length of the leading run of ``blocks`` that is cached."""
    for position, block in enumerate(blocks):
        if block not in cached:
            return position
    return len(blocks)
