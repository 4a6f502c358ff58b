"""Retention intervals on traces: what is kept at few boundaries is what the rules say."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonstep.cli.bench import app
from moonstep.groups import Group
from moonstep.replay.rates import lru_hits
from moonstep.replay.retention import RetentionCache, RetentionPlan, states, windows
from moonstep.replay.traces import Trace, TraceRequest
from tests.replay.conftest import TRACE

BLOCK = 16
SPARSE = (windows(BLOCK, window_tokens=40, layers=2), states(BLOCK, state_tokens=16))


def branching(seed: int) -> Trace:
    """Prompts that share prefixes of any length with some that came before."""
    rng = random.Random(seed)
    requests: list[TraceRequest] = []
    for number in range(60):
        blocks = list(rng.choice(requests).blocks) if requests and rng.random() < 0.8 else []
        del blocks[rng.randint(0, len(blocks)) :]
        blocks += [1000 * number + depth for depth in range(rng.randint(1, 20))]
        requests.append(TraceRequest(float(number), BLOCK * len(blocks), tuple(blocks)))
    return Trace(BLOCK, tuple(requests))


def hits(trace: Trace, sparse: Group, interval_tokens: int, blocks: int | None = None) -> list[int]:
    cache = RetentionCache(trace.block_tokens, RetentionPlan(sparse, interval_tokens, blocks))
    return [cache.run(request) for request in trace.requests]


@pytest.mark.parametrize("sparse", SPARSE, ids=lambda group: group.layer_names[0])
@pytest.mark.parametrize("seed", range(4))
def test_without_limits_an_interval_loses_less_than_itself(seed: int, sparse: Group) -> None:
    trace = branching(seed)
    most = [
        min(run, (request.input_tokens - 1) // BLOCK)
        for run, request in zip(lru_hits(trace, 1 << 30), trace.requests, strict=True)
    ]
    assert hits(trace, sparse, BLOCK) == most
    for interval_blocks in (4, 8):
        found = hits(trace, sparse, interval_blocks * BLOCK)
        lost = [best - hit for best, hit in zip(most, found, strict=True)]
        assert 0 < max(lost) < interval_blocks
        assert min(lost) == 0


@pytest.mark.parametrize("sparse", SPARSE, ids=lambda group: group.layer_names[0])
def test_longer_intervals_keep_less(sparse: Group) -> None:
    trace = branching(5)
    shares = []
    for interval_blocks in (1, 4, 8, 0):
        cache = RetentionCache(BLOCK, RetentionPlan(sparse, interval_blocks * BLOCK, None))
        for request in trace.requests:
            cache.run(request)
        shares.append(cache.kept_share)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1] > 0


@pytest.mark.parametrize("sparse", SPARSE, ids=lambda group: group.layer_names[0])
@pytest.mark.parametrize("blocks", [8, 40, 200])
def test_a_small_memory_stays_within_itself(blocks: int, sparse: Group) -> None:
    trace = branching(6)
    cache = RetentionCache(BLOCK, RetentionPlan(sparse, 4 * BLOCK, blocks))
    for request in trace.requests:
        cache.run(request)
        kept = sum(BLOCK if kind == 0 else sparse.block_bytes for kind, _ in cache._cached)
        assert kept == cache._used_bytes <= blocks * (BLOCK + sparse.block_bytes)


def test_a_prompt_sent_again_hits_what_it_left() -> None:
    request = TraceRequest(0.0, 10 * BLOCK + 3, tuple(range(11)))
    cache = RetentionCache(BLOCK, RetentionPlan(SPARSE[0], 0, None))
    assert [cache.run(request), cache.run(request)] == [0, 10]
    assert {block for kind, block in cache._cached if kind == 1} == {7, 8, 9}


def test_the_command_has_a_row_an_interval(tmp_path: Path) -> None:
    path = tmp_path / "retention.json"
    arguments = ["retention", "--trace", str(TRACE), "--limit", "300", "--blocks", "100"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert result.output.count("windows") == result.output.count("states") == 8
    outcomes = json.loads(path.read_text())["outcomes"]
    assert len(outcomes) == 2 * 8 * 2
    shares = [one["figures"]["kept_share"] for one in outcomes]
    assert 0 < min(shares) < max(shares) <= 1
