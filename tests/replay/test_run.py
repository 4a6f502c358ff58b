"""Replays of Moonstep's own scheduler half: what it keeps is what the engine has dropped."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moonstep.config import CaptureMode
from moonstep.replay.engine import ReplayEngine
from moonstep.replay.pool import EnginePool
from moonstep.replay.report import as_table, outcome, parse_sizes
from moonstep.replay.run import ReplayPlan, _scheduler, references, replay
from moonstep.replay.traces import Trace

ENGINE_BLOCKS = 2000


@pytest.mark.parametrize("mode", CaptureMode)
def test_a_host_cache_of_the_engine_s_size_is_worth_nearly_its_memory(
    trace: Trace, mode: CaptureMode
) -> None:
    """An inclusive LRU host cache of this size adds exactly nothing."""
    plan = ReplayPlan(ENGINE_BLOCKS, ENGINE_BLOCKS, mode)
    found, plain = replay(trace, plan), references(trace, plan)
    assert found.engine == plain.engine_alone
    gain = found.both.second_half - found.engine.second_half
    ideal_gain = plain.joined.second_half - plain.engine_alone.second_half
    assert ideal_gain > 0.03
    assert gain >= 0.85 * ideal_gain


def test_lazy_capture_copies_far_less_than_eager(trace: Trace) -> None:
    short = Trace(trace.block_tokens, trace.requests[:1000])
    lazy, eager = (
        replay(short, ReplayPlan(ENGINE_BLOCKS, ENGINE_BLOCKS, mode)).captured_blocks
        for mode in (CaptureMode.LAZY, CaptureMode.EAGER)
    )
    assert lazy < 0.75 * eager


def test_wrong_bytes_end_a_replay() -> None:
    plan = ReplayPlan(engine_blocks=8, host_blocks=64, capture=CaptureMode.EAGER)
    trace = Trace(16, ())
    engine = ReplayEngine(EnginePool(8), _scheduler(trace, plan), 64, 16, step_blocks=4)
    one, two = ([bytes([n, depth]) * 16 for depth in range(6)] for n in (1, 2))
    engine.run(one)
    engine.run(two)
    for slot in engine._in_slot:
        engine._in_slot[slot] = b"something else"
    with pytest.raises(RuntimeError, match="another one's bytes"):
        engine.run(one)


def test_restored_blocks_are_counted_and_shown(trace: Trace) -> None:
    short = Trace(trace.block_tokens, trace.requests[:300])
    found = outcome(short, ReplayPlan(300, 3000), lambda done: None)
    assert found.figures.restored_blocks > 0
    assert as_table("a trace", short, [found]).row_count == 1


@pytest.mark.parametrize("text", ["3000", "a+b", "0+5", "1+2+3"])
def test_sizes_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="3000\\+3000"):
        parse_sizes(text)


def test_a_replay_needs_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, moonstep.replay.report;"
        "assert not {'vllm', 'torch', 'mooncake'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
