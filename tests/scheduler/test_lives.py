"""Lives in the real scheduler: ids that end, come back and are used again, all in one step."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from moonstep.audit.history import Abort, Arrive, Close, Extend, Reset, Step
from moonstep.audit.shape import Shape
from tests.scheduler.engine import open_engine
from tests.scheduler.stock import Hand, blocks_of, make_request

Runner = Literal["v1", "v2"]

RUNNERS = pytest.mark.parametrize("runner", ["v1", "v2"])
CAPTURE = pytest.mark.parametrize("capture", ["eager", "lazy"])

SHAPE = Shape(blocks=40, max_tokens=64, budget_tokens=96)
TIGHT = Shape(blocks=18, seats=4, max_tokens=64)


@RUNNERS
@CAPTURE
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_and_admitted_again_in_one_step(
    runner: Runner, capture: str, caching: bool
) -> None:
    """A reset of running requests preempts all, and the next step has them back."""
    shape = replace(SHAPE, runner=runner, prefix_caching=caching)
    with open_engine(shape, capture=capture) as watched:
        watched.apply(Arrive("a", 1, 30, 30, output=12), Arrive("b", 2, 22, 22, output=12), Step(4))
        before = {name: tracker.life for name, tracker in watched.half.lives.items()}
        for _ in range(3):
            watched.apply(Reset(running=True), Step())
            assert watched.last.preempted_req_ids == {"a", "b"}
            assert set(watched.last.num_scheduled_tokens) == {"a", "b"}
            assert watched.half.lives["a"].life not in before.values()
            watched.apply(Step(2))
        watched.settle()
        assert watched.engine.counts.resumes >= 6
        restored = watched.run(id="c", family=1, tokens=30, shared=30)
        assert restored == (0 if caching else 28)  # the engine's own cache has it, or nobody but us


@RUNNERS
@CAPTURE
def test_finished_and_used_again_in_one_step(runner: Runner, capture: str) -> None:
    """The id of an aborted request comes with another prompt before the next step is built."""
    with open_engine(replace(SHAPE, runner=runner), capture=capture) as watched:
        watched.apply(Arrive("a", 1, 30, 30, output=30), Step(3))
        first = watched.half.lives["a"].life
        watched.apply(Abort("a"), Arrive("a", 2, 19, 19, output=20), Step())
        assert watched.last.finished_req_ids == {"a"}
        assert [new.req_id for new in watched.last.scheduled_new_reqs] == ["a"]
        assert watched.half.lives["a"].life != first
        assert watched.half.lives["a"].request.num_prompt_tokens == 19
        watched.apply(Step(9))


@RUNNERS
def test_aborted_before_it_was_ever_admitted(runner: Runner) -> None:
    with open_engine(replace(SHAPE, runner=runner, seats=1)) as watched:
        watched.apply(Arrive("a", 1, 30, 30, output=8), Step(2), Arrive("b", 2, 30, 30), Abort("b"))
        watched.apply(Step())
        assert watched.last.finished_req_ids == {"b"}
        assert set(watched.half.lives) == {"a"}


@RUNNERS
@CAPTURE
def test_a_streaming_session_comes_among_the_new_while_it_lives(
    runner: Runner, capture: str
) -> None:
    """It comes back under its old id, computed up to the middle of a block, by no preemption."""
    with open_engine(replace(SHAPE, runner=runner), capture=capture) as watched:
        watched.apply(Arrive("s", 1, 11, 11, output=3, streaming=True), Step(4))
        lives = {watched.half.lives["s"].life} if "s" in watched.half.lives else set()
        for variant in (1, 2):
            watched.apply(Extend("s", 10, variant, output=3), Step())
            assert [new.req_id for new in watched.last.scheduled_new_reqs] == ["s"]
            assert not watched.last.preempted_req_ids
            assert not watched.last.finished_req_ids
            assert watched.half.lives["s"].life not in lives
            lives.add(watched.half.lives["s"].life)
            watched.apply(Step(4))
        watched.apply(Close("s"), Step(3))
        assert len(lives) >= 2


@pytest.mark.parametrize("v2", [False, True])
def test_a_session_that_comes_back_with_fewer_hashes(v2: bool) -> None:
    """What the last turn sampled is taken back, and with it a block's name."""
    hand = Hand()
    s = make_request("s", 40)
    hand.admit(s, [1, 2, 3, 4])
    hand.step({"s": 40}, new=["s"], v2=v2)
    hand.decode("s", 8)
    s.append_output_token_ids(7)
    assert len(s.block_hashes) == 3
    assert hand.half.lives["s"].next_block == [3]
    del s._all_token_ids[44:], s._output_token_ids[4:], s.block_hashes[2:]
    s.num_computed_tokens = 44
    hand.half.update_state_after_alloc(s, hand_blocks(hand, [1, 2, 3, 4]), 0)
    hand.pool.blocks[3].reset_hash()
    s.append_output_token_ids([8] * 20)
    plan = hand.step({"s": 20}, new=["s"], v2=v2)
    assert blocks_of(plan.captures) == [3, 4]
    assert hand.half.lives["s"].token_len == 64


def hand_blocks(hand: Hand, block_ids: list[int]) -> KVCacheBlocks:
    return KVCacheBlocks((tuple(hand.pool.blocks[block] for block in block_ids),))


@RUNNERS
@CAPTURE
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_storm_of_preemptions_restores_what_it_takes(
    runner: Runner, capture: str, policy: Literal["fcfs", "priority"]
) -> None:
    """More requests than blocks; every victim comes back with its prefix, its output included."""
    shape = replace(TIGHT, runner=runner, policy=policy)
    with open_engine(shape, capture=capture) as watched:
        for index in range(8):
            watched.apply(Arrive(f"r{index}", index, 20, 20, output=24, priority=-index), Step(2))
        watched.settle()
        stats = watched.half.stats
        assert watched.engine.counts.preemptions >= 4
        assert stats.resumed_restored_tokens > 0
        back = stats.resumed_restored_tokens + stats.resumed_local_tokens
        assert back >= 0.9 * stats.victim_tokens


def test_a_request_no_one_admitted_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    hand = Hand()
    request = make_request("r", 64)
    hand.give(request, [1, 2, 3, 4])
    hand.requests["r"] = request
    plan = hand.step({"r": 64}, new=["r"])
    assert plan.is_empty
    assert "request r runs without having been admitted" in caplog.text
    assert hand.decode("r", 17)[-1].is_empty
