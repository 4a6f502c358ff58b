"""Append or replace is what the scheduler says of this very step: the founding bug and its kin.

The case, to the letter: a request of 64 prompt tokens in blocks 1 to 4 decodes into block 5; it is
preempted, another request takes blocks 1 to 5; it comes back with blocks 7 to 11, then gets block
12. Each check is also run against the old behaviours, which it has to catch.
"""

from __future__ import annotations

import pytest

from moonstep.engine import SchedulerOutput
from moonstep.scheduler.scheduler import MooncakeStoreScheduler
from moonstep.scheduler.tables import BlockTables
from moonstep.wire import StepPlan
from tests.scheduler.stock import BLOCK_TOKENS, Hand, blocks_of, make_request

BEFORE = [1, 2, 3, 4, 5]
AFTER = [7, 8, 9, 10, 11]
LAST = 12

RUNNERS = pytest.mark.parametrize("v2", [False, True], ids=["runner-v1", "runner-v2"])
KEPT = pytest.mark.parametrize("kept", [True, False], ids=["kept", "captures-failed"])


class AppendsOnResume(MooncakeStoreScheduler):
    """The old behaviour: a request that is known goes on with its table, resumed or not."""

    def _start_life(self, request_id: str, *args: object) -> None:
        old = self._old_tables.get(request_id)
        super()._start_life(request_id, *args)  # type: ignore[arg-type]
        if old is not None:
            life = self.lives[request_id]
            whole = [o + n for o, n in zip(old, life.tables.by_group, strict=True)]
            life.tables = BlockTables(whole)

    def build_connector_meta(self, output: SchedulerOutput) -> StepPlan:
        self._old_tables: dict[str, list[list[int]]] = getattr(self, "_old_tables", {})
        plan = super().build_connector_meta(output)
        for request_id, tracker in self.lives.items():
            self._old_tables[request_id] = [list(ids) for ids in tracker.tables.by_group]
        return plan


class ReplacesOneStepLate(MooncakeStoreScheduler):
    """The old behaviour: a set of preempted ids of its own, asked in the wrong step.

    The table is replaced by the first new blocks after the step that resumed the request.
    """

    def build_connector_meta(self, output: SchedulerOutput) -> StepPlan:
        self._preempted: set[str] = getattr(self, "_preempted", set())
        cached = output.scheduled_cached_reqs
        for request_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            late = request_id in self._preempted and request_id not in cached.resumed_req_ids
            if late and ids is not None:
                self._preempted.discard(request_id)
                self.lives[request_id].tables = BlockTables([[] for _ in ids])
        self._preempted |= output.preempted_req_ids or set()
        return super().build_connector_meta(output)


def hand_with_preempted(
    half: type[MooncakeStoreScheduler], *, kept: bool, checks: bool = True
) -> Hand:
    """R has run to 80 tokens in blocks 1 to 5, was preempted, and S took its blocks.

    ``kept``: whether the ranks have R's first blocks, or failed every capture so far.
    """
    hand = Hand(half, checks=checks)
    r = make_request("r", 64)
    hand.admit(r, BEFORE[:4])
    plan = hand.step({"r": 64}, new=["r"])
    assert blocks_of(plan.captures) == BEFORE[:4]
    hand.report(captured=kept)
    r.append_output_token_ids(9)
    hand.step({"r": 1}, appended={"r": BEFORE[4:]})
    for _ in range(14):
        r.append_output_token_ids(9)
        hand.step({"r": 1})
    r.append_output_token_ids(9)
    assert (r.num_tokens, r.num_computed_tokens) == (80, 79)
    assert hand.table("r") == BEFORE
    s = make_request("s", 80, family=2)
    hand.preempt("r")
    hand.admit(s, BEFORE)
    plan = hand.step({"s": 80}, new=["s"], preempted=["r"])
    assert list(hand.half.lives) == ["s"]
    assert blocks_of(plan.captures) == BEFORE
    hand.report()
    return hand


def resume(hand: Hand, *, v2: bool, kept: bool) -> StepPlan:
    """R comes back with blocks 7 to 11 and computes the rest of its 80 tokens."""
    r = hand.requests["r"]
    promised = hand.admit(r, AFTER)
    assert promised == (64 if kept else 0)
    plan = hand.step({"r": 80 - promised}, resumed=["r"], v2=v2)
    hand.report()
    return plan


def go_on(hand: Hand) -> list[StepPlan]:
    """R decodes 16 more tokens into block 12."""
    r = hand.requests["r"]
    r.append_output_token_ids(9)
    return [hand.step({"r": 1}, appended={"r": [LAST]}), *hand.decode("r", 15)]


def check_running(half: type[MooncakeStoreScheduler], *, v2: bool, kept: bool = True) -> None:
    """A running request's new blocks extend its table, also right after it was resumed."""
    hand = hand_with_preempted(half, kept=kept)
    resume(hand, v2=v2, kept=kept)
    plans = go_on(hand)
    assert hand.table("r") == [*AFTER, LAST], "the table of a running request"
    captured = [block for plan in plans for block in blocks_of(plan.captures)]
    assert captured == [LAST]
    check_coverage(hand)


def check_resumed(half: type[MooncakeStoreScheduler], *, v2: bool, kept: bool = True) -> None:
    """A resumed request's blocks are its table; nothing of the earlier life is read."""
    hand = hand_with_preempted(half, kept=kept)
    plan = resume(hand, v2=v2, kept=kept)
    assert hand.table("r") == AFTER, "the table of a resumed request"
    assert blocks_of(plan.restores) == (AFTER[:4] if kept else [])
    assert blocks_of(plan.captures) == (AFTER[4:] if kept else AFTER)
    check_coverage(hand)


def check_coverage(hand: Hand) -> None:
    for tracker in hand.half.lives.values():
        for table in tracker.tables.by_group:
            assert tracker.token_len <= len(table) * BLOCK_TOKENS
    hand.half.check()


@RUNNERS
@KEPT
def test_running_request_not_in_resumed_req_ids_appends_blocks(v2: bool, kept: bool) -> None:
    check_running(MooncakeStoreScheduler, v2=v2, kept=kept)
    with pytest.raises((AssertionError, IndexError)):
        check_running(ReplacesOneStepLate, v2=v2, kept=kept)


@RUNNERS
@KEPT
def test_resumed_request_in_resumed_req_ids_replaces_blocks(v2: bool, kept: bool) -> None:
    check_resumed(MooncakeStoreScheduler, v2=v2, kept=kept)
    with pytest.raises(AssertionError, match="the table of a resumed request"):
        check_resumed(AppendsOnResume, v2=v2, kept=kept)


def test_the_late_replacement_runs_off_the_end_as_it_did_in_the_field() -> None:
    """Without the books being checked, the short table is walked with an absolute length."""
    hand = hand_with_preempted(ReplacesOneStepLate, kept=True, checks=False)
    resume(hand, v2=False, kept=True)
    with pytest.raises(IndexError, match="list index out of range"):
        go_on(hand)


@RUNNERS
def test_both_runners_keep_the_same_set(v2: bool) -> None:
    hand = hand_with_preempted(MooncakeStoreScheduler, kept=True)
    resume(hand, v2=v2, kept=True)
    go_on(hand)
    index = hand.half.index
    r, s = hand.requests["r"], hand.requests["s"]
    assert [index.holds(0, name) for name in r.block_hashes] == [True] * 6
    assert [index.holds(0, name) for name in s.block_hashes] == [True] * 5
    assert index.written_count == 11


@RUNNERS
@pytest.mark.parametrize("chunks", [(64, 16), (48, 32), (16, 16, 16, 16, 16), (80,)])
def test_the_prefill_of_a_resumed_request_ends_at_its_output_not_at_its_prompt(
    v2: bool, chunks: tuple[int, ...]
) -> None:
    """Blocks of prompt *and* output are captured in the step of the prefill that fills them."""
    hand = hand_with_preempted(MooncakeStoreScheduler, kept=False)
    hand.admit(hand.requests["r"], AFTER)
    done = 0
    for chunk in chunks:
        plan = hand.step({"r": chunk}, resumed=["r"] if done == 0 else [], v2=v2)
        start, done = done, done + chunk
        assert blocks_of(plan.captures) == AFTER[start // BLOCK_TOKENS : done // BLOCK_TOKENS]
    assert hand.half.lives["r"].token_len == 80


@RUNNERS
def test_a_life_that_is_preempted_again_at_once_leaves_nothing_behind(v2: bool) -> None:
    """Resumed and preempted over and over: each life has the tables of its own step, no others."""
    hand = hand_with_preempted(MooncakeStoreScheduler, kept=False)
    r = hand.requests["r"]
    hand.step(finished=["s"])
    lives = set()
    for first in (20, 30, 40):
        table = list(range(first, first + 5))
        hand.admit(r, table)
        hand.step({"r": 16}, resumed=["r"], v2=v2)
        assert hand.table("r") == table
        lives.add(hand.half.lives["r"].life)
        hand.preempt("r")
        hand.step(preempted=["r"])
        assert hand.half.lives == {}
    assert len(lives) == 3
