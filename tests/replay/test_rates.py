"""The plain caches that a replay is compared with are what they are said to be."""

from __future__ import annotations

import random

import pytest

from moonstep.replay.rates import hit_tokens, lru_hits, rates
from moonstep.replay.traces import Trace, TraceRequest


def naive_lru_hits(trace: Trace, capacity_blocks: int) -> list[int]:
    """The definition, in a list whose front is the next to leave."""
    cached: list[int] = []
    hits = []
    for request in trace.requests:
        run = 0
        while run < len(request.blocks) and request.blocks[run] in cached:
            run += 1
        hits.append(run)
        for block in reversed(request.blocks):
            if block in cached:
                cached.remove(block)
            cached.append(block)
        del cached[: max(0, len(cached) - capacity_blocks)]
    return hits


def small_trace(seed: int) -> Trace:
    rng = random.Random(seed)
    requests = []
    for number in range(80):
        chain = rng.randrange(6)
        length = rng.randrange(1, 9)
        blocks = tuple(100 * chain + depth for depth in range(length))
        requests.append(TraceRequest(float(number), 10 * length - rng.randrange(10), blocks))
    return Trace(10, tuple(requests))


@pytest.mark.parametrize("capacity", [1, 5, 12, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_the_lru_cache_hits_what_the_definition_says(seed: int, capacity: int) -> None:
    trace = small_trace(seed)
    assert lru_hits(trace, capacity) == naive_lru_hits(trace, capacity)


def test_a_partial_last_block_counts_only_its_tokens() -> None:
    request = TraceRequest(0.0, 25, (1, 2, 3))
    assert [hit_tokens(request, blocks, 10) for blocks in range(4)] == [0, 10, 20, 25]


def test_the_second_half_is_that_of_the_requests() -> None:
    requests = [TraceRequest(float(n), tokens, (n,)) for n, tokens in enumerate([10, 10, 10, 30])]
    found = rates(Trace(30, tuple(requests)), [1, 0, 0, 1])
    assert found.whole == pytest.approx(40 / 60)
    assert found.second_half == pytest.approx(30 / 40)


def test_golden_rates_of_the_real_trace_s_head(trace: Trace) -> None:
    """A change here is a change of the reader or of the cache, and no other golden figure holds."""
    found = {size: rates(trace, lru_hits(trace, size)) for size in (500, 1000, 4000, 10**9)}
    assert {size: round(100 * rate.whole, 2) for size, rate in found.items()} == GOLDEN_WHOLE
    assert {size: round(100 * rate.second_half, 2) for size, rate in found.items()} == GOLDEN_HALF


GOLDEN_WHOLE = {500: 3.85, 1000: 4.10, 4000: 8.76, 10**9: 30.61}
GOLDEN_HALF = {500: 4.06, 1000: 4.46, 4000: 9.64, 10**9: 37.57}
