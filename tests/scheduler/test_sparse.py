"""Which blocks of windows and states are captured: what the engine vouches for, and no other.

A planner driven by hand, with the installed vLLM's own pool, blocks, requests and outputs.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput

from moonstep.config import CaptureMode
from moonstep.groups import Group, GroupKind
from moonstep.scheduler.boundaries import Boundaries
from moonstep.scheduler.captures import CapturePlanner
from moonstep.scheduler.checks import check_windows
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.lookahead import LookAhead
from moonstep.scheduler.policies import LruPolicy
from moonstep.scheduler.sparse import SparsePlanner
from moonstep.scheduler.stats import SchedulerStats
from moonstep.scheduler.tables import BlockTables
from moonstep.scheduler.tracker import RequestTracker
from moonstep.scheduler.witness import Witness
from tests.scheduler.stock import BLOCK_TOKENS, make_request

FULL = Group(0, GroupKind.FULL_ATTENTION, BLOCK_TOKENS, 1024, ("full",))
WINDOW = Group(1, GroupKind.SLIDING_WINDOW, BLOCK_TOKENS, 1024, ("window",), window_tokens=20)
STATE = Group(1, GroupKind.RECURRENT_STATE, BLOCK_TOKENS, 1024, ("state",))
SECOND = Group(2, GroupKind.RECURRENT_STATE, BLOCK_TOKENS, 1024, ("second",))
BESIDE = Group(2, GroupKind.SLIDING_WINDOW, BLOCK_TOKENS, 1024, ("window",), window_tokens=20)

PROMPT_TOKENS = 70


class Desk:
    """A planner, a real pool, and one request R that computes its prompt in the step at hand."""

    def __init__(
        self,
        *groups: Group,
        interval: int = 0,
        mode: CaptureMode = CaptureMode.EAGER,
        slots: int = 64,
    ) -> None:
        self.groups = groups
        self.pool = BlockPool(100, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.index = HostIndex(3, LruPolicy())
        if slots:
            self.index.resize(slots)
        self.stats = SchedulerStats()
        self.witness = Witness()
        self.witness.bind(self.pool)
        boundaries = Boundaries.of(groups, interval)
        self.planner = SparsePlanner(groups, boundaries, self.index, self.witness, self.stats)
        self.planner.mode = mode
        self.block_pool: Any = self.pool
        self.planner.bind(self)
        self.request = make_request("r", PROMPT_TOKENS)
        count = -(-PROMPT_TOKENS // BLOCK_TOKENS)
        self.live: list[list[Any]] = [self.pool.get_new_blocks(count) for _ in range(3)]
        tables = BlockTables([[block.block_id for block in table] for table in self.live])
        self.tracker = RequestTracker(1, self.request, tables, [0, 0, 0], saves=True)
        self.planner.begin(self.tracker, 0)
        self.offers: list[tuple[int, int, int]] = []

    def get_blocks(self, request_id: str) -> Any:
        """The engine's tables of this moment."""
        assert request_id == "r"
        return KVCacheBlocks(tuple(self.live))

    def name(self, group: Group, position: int) -> None:
        """The pool names the block at a position, as when it is cached."""
        self.live[group.index][position].reset_hash()
        name = make_block_hash_with_group_id(self.request.block_hashes[position], group.index)
        self.live[group.index][position].set_block_hash(name)

    def offer(self, group: Group, position: int, *, named: bool = True) -> Any:
        """The engine hands over the state at the end of a block; the block that has it."""
        if named:
            self.name(group, position)
        block = self.live[group.index][position]
        self.offers.append((group.index, block.block_id, (position + 1) * BLOCK_TOKENS))
        return block

    def hand_over(self, *, scheduled: int = PROMPT_TOKENS) -> dict[int, list[int]]:
        """Run the step: the captured positions of each group."""
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {"r": scheduled} if scheduled else {}
        output.kv_connector_block_state = KVConnectorBlockState(
            {"r"}, lambda _: (), {"r": self.offers}
        )
        self.offers = []
        self.planner.handed_over(output, {"r": self.tracker})
        return self.captured()

    def fill(self, tokens: int) -> dict[int, list[int]]:
        """A step settles the request at ``tokens`` tokens: the captured positions."""
        self.tracker.token_len = tokens
        self.planner.fills([self.tracker])
        return self.captured()

    def captured(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for capture in self.planner.take():
            columns = capture.placed.columns
            table = self.live[columns.group]
            assert columns.blocks == [table[at].block_id for at in columns.depths]
            found.setdefault(columns.group, []).extend(columns.depths)
            self.index.acknowledge(capture.placed)
        self.index.check()
        return found

    def kept(self, group: Group) -> list[int]:
        """Positions of the request's blocks that have slots."""
        names = self.request.block_hashes
        return [at for at, name in enumerate(names) if self.index.holds(group.index, name)]


# States.


def test_a_state_is_captured_where_the_engine_hands_it_over() -> None:
    desk = Desk(FULL, STATE)
    desk.offer(STATE, 3)
    assert desk.hand_over() == {1: [3]}


def test_a_state_from_before_the_ranks_have_spoken_is_captured_when_they_have() -> None:
    desk = Desk(FULL, STATE, slots=0)
    desk.offer(STATE, 3)
    assert desk.hand_over() == {}
    desk.index.resize(64)
    assert desk.hand_over() == {1: [3]}
    assert desk.hand_over() == {}
    late = Desk(FULL, STATE, slots=0)
    block = late.offer(STATE, 3)
    late.hand_over()
    late.index.resize(64)
    block.reset_hash()
    assert late.hand_over() == {}, "its block is someone else's by now"


def test_a_state_is_never_looked_for_in_a_table() -> None:
    desk = Desk(FULL, STATE)
    for position in range(4):
        desk.name(STATE, position)
    assert desk.hand_over() == {}
    assert desk.fill(PROMPT_TOKENS) == {}


def test_what_the_engine_no_longer_vouches_for_is_dropped() -> None:
    desk = Desk(FULL, STATE)
    desk.offer(STATE, 3, named=False)
    assert desk.hand_over() == {}, "without a name"
    desk.pool.free_blocks([desk.offer(STATE, 3)])
    assert desk.hand_over() == {}, "nobody holds it"
    assert desk.stats.unvouched_blocks == 2
    other = Desk(FULL, STATE)
    block = other.offer(STATE, 3, named=False)
    block.set_block_hash(make_block_hash_with_group_id(other.request.block_hashes[2], 1))
    assert other.hand_over() == {}, "another boundary's state"


def test_a_request_that_does_not_run_in_this_step_hands_nothing_over() -> None:
    desk = Desk(FULL, STATE)
    desk.offer(STATE, 3)
    assert desk.hand_over(scheduled=0) == {}


def test_a_boundary_that_this_step_does_not_settle_is_dropped() -> None:
    desk = Desk(FULL, STATE)
    desk.offer(STATE, 3)
    assert desk.hand_over(scheduled=63) == {}
    desk.offer(STATE, 3)
    assert desk.hand_over(scheduled=64) == {1: [3]}


def test_a_boundary_inside_a_block_is_no_boundary_of_ours() -> None:
    fine = Group(1, GroupKind.RECURRENT_STATE, 2 * BLOCK_TOKENS, 1024, (), BLOCK_TOKENS)
    desk = Desk(FULL, fine)
    block = desk.live[1][1]
    block.set_block_hash(make_block_hash_with_group_id(desk.request.block_hashes[2], 1))
    desk.offers.append((1, block.block_id, 3 * BLOCK_TOKENS))
    assert desk.hand_over() == {}


@pytest.mark.parametrize("missing", [STATE, SECOND])
def test_all_states_of_a_boundary_are_kept_or_none(missing: Group) -> None:
    desk = Desk(FULL, STATE, SECOND)
    for group in (STATE, SECOND):
        desk.offer(group, 3, named=group is not missing)
    assert desk.hand_over() == {}
    for group in (STATE, SECOND):
        desk.offer(group, 3)
    assert desk.hand_over() == {1: [3], 2: [3]}


def test_states_on_the_way_are_given_up_but_for_the_last_two() -> None:
    desk = Desk(FULL, STATE)
    for position in range(4):
        desk.offer(STATE, position)
        assert desk.hand_over() == {1: [position]}
    # The prompt's end, at 64, is kept for good; of the others the last before it.
    assert desk.kept(STATE) == [2, 3]
    desk.request.num_computed_tokens = PROMPT_TOKENS
    desk.planner.finished(desk.tracker)
    assert desk.kept(STATE) == [3]
    assert not desk.index._passing


def test_the_window_before_a_state_is_kept_with_it() -> None:
    desk = Desk(FULL, STATE, BESIDE)
    desk.tracker.next_block = [4, 4, 4]
    desk.offer(STATE, 3)
    assert desk.hand_over() == {1: [3], 2: [2, 3]}
    assert desk.fill(PROMPT_TOKENS) == {}, "windows alone are worth nothing"


def test_without_the_window_before_it_a_state_is_worth_nothing() -> None:
    desk = Desk(FULL, STATE, BESIDE)
    desk.offer(STATE, 3)
    desk.live[2][2] = desk.pool.null_block
    assert desk.hand_over() == {}


# Windows.


def test_a_window_is_captured_where_boundaries_need_it() -> None:
    desk = Desk(FULL, WINDOW)
    assert desk.fill(PROMPT_TOKENS) == {1: [2, 3]}
    assert desk.stats.unvouched_blocks == 0


def test_an_interval_keeps_windows_in_between() -> None:
    desk = Desk(FULL, WINDOW, interval=32)
    assert desk.fill(PROMPT_TOKENS) == {1: [0, 1, 2, 3]}
    assert Desk(FULL, WINDOW, interval=48).fill(50) == {1: [1, 2]}


def test_a_block_that_has_left_the_window_is_never_read() -> None:
    """The engine's table says so: it has the null block there, or a block of someone else's."""
    desk = Desk(FULL, WINDOW)
    desk.live[1][2] = desk.pool.null_block
    assert desk.fill(PROMPT_TOKENS) == {1: [3]}
    desk = Desk(FULL, WINDOW)
    desk.live[1][2], desk.live[1][3] = desk.live[1][3], desk.live[1][2]
    desk.planner.fills([desk.tracker])
    desk.tracker.token_len = PROMPT_TOKENS
    desk.planner.fills([desk.tracker])
    assert desk.planner.take() == []
    assert desk.stats.unvouched_blocks == 2


def test_a_table_that_has_drifted_is_found_out_by_the_pools_name() -> None:
    desk = Desk(FULL, WINDOW)
    block = desk.live[1][2]
    block.set_block_hash(make_block_hash_with_group_id(desk.request.block_hashes[1], 1))
    assert desk.fill(PROMPT_TOKENS) == {1: [3]}


def test_the_null_block_of_an_admission_is_never_captured() -> None:
    desk = Desk(FULL, WINDOW)
    desk.tracker.tables.by_group[1][2] = 0
    desk.live[1][2] = desk.pool.null_block
    assert desk.fill(PROMPT_TOKENS) == {1: [3]}


def test_a_window_rolls_and_what_it_left_is_given_up() -> None:
    desk = Desk(FULL, WINDOW)
    desk.request.num_prompt_tokens = 5  # all of it is decoded
    desk.tracker.trail = None
    desk.planner.begin(desk.tracker, 0)
    held = []
    for tokens in range(16, PROMPT_TOKENS, 16):
        desk.fill(tokens)
        held.append(desk.kept(WINDOW))
    # The windows before the last two boundaries at the last look, and what came since.
    assert held == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    desk.request.num_computed_tokens = PROMPT_TOKENS - 1
    desk.planner.finished(desk.tracker)
    assert desk.kept(WINDOW) == [1, 2, 3], "of the last boundary, and of the one before it"
    assert not desk.index._passing


def test_a_window_at_a_prompts_end_stays_when_the_life_moves_on() -> None:
    desk = Desk(FULL, WINDOW)
    desk.request.num_prompt_tokens = 2 * BLOCK_TOKENS
    desk.planner.begin(desk.tracker, 0)
    for tokens in range(16, PROMPT_TOKENS, 16):
        desk.fill(tokens)
        check_windows(desk.index, desk.planner, desk.tracker)
    assert desk.kept(WINDOW) == [0, 1, 2, 3], "16 and 32 for good, of the rest the last two"
    desk.request.num_computed_tokens = PROMPT_TOKENS - 1
    desk.planner.finished(desk.tracker)
    assert desk.kept(WINDOW) == [0, 1, 2, 3]
    desk.index.pass_by(desk.index.locate(1, desk.request.block_hashes[:1])[0])
    with pytest.raises(AssertionError):
        check_windows(desk.index, desk.planner, desk.tracker)


def test_lazy_leaves_to_the_engine_what_it_has_a_name_for() -> None:
    desk = Desk(FULL, WINDOW, mode=CaptureMode.LAZY)
    desk.name(WINDOW, 2)
    assert desk.fill(PROMPT_TOKENS) == {1: [3]}


def test_what_lazy_left_to_the_engine_is_kept_though_another_life_passes_it_by() -> None:
    """It is in the index when the engine gives it up, and has to stay when that life moves on."""
    desk = Desk(FULL, WINDOW, mode=CaptureMode.LAZY)
    desk.name(WINDOW, 2)
    assert desk.fill(PROMPT_TOKENS) == {1: [3]}
    name = desk.request.block_hashes[2]
    placed = desk.index.plan(Columns(1, [2], [2], [name], [99]))
    assert placed is not None
    desk.index.acknowledge(placed)
    desk.index.pass_by(placed.slots)
    lookahead = LookAhead()
    lookahead.bind(desk.block_pool)
    planner = CapturePlanner(desk.groups, desk.index, desk.witness, lookahead, desk.stats)
    desk.pool.get_new_blocks(desk.pool.get_num_free_blocks())
    desk.pool.free_blocks([desk.live[1][2]])
    planner.leavers(1 << 20)
    assert planner.take() == []
    desk.index.give_up(1, [name])
    assert desk.index.holds(1, name)


def test_what_another_life_passes_by_is_kept_once_it_is_wanted() -> None:
    desk = Desk(FULL, WINDOW)
    desk.request.num_prompt_tokens = 5
    desk.planner.begin(desk.tracker, 0)
    desk.fill(64)
    assert desk.index._passing
    other = RequestTracker(
        2, make_request("r", PROMPT_TOKENS), desk.tracker.tables, [0, 0, 0], saves=True
    )
    desk.planner.begin(other, 0)
    other.token_len = PROMPT_TOKENS
    desk.planner.fills([other])
    desk.captured()
    assert not desk.index._passing
    assert desk.kept(WINDOW) == [2, 3]


def test_what_another_life_is_about_to_pass_by_is_kept_once_a_life_begins_beyond_it() -> None:
    """Its capture is still under way, so it cannot be used yet."""
    desk = Desk(FULL, WINDOW)
    desk.request.num_prompt_tokens = 5
    desk.planner.begin(desk.tracker, 0)
    desk.tracker.token_len = 64
    desk.planner.fills([desk.tracker])
    assert desk.index._passing
    request = make_request("r", PROMPT_TOKENS)
    other = RequestTracker(2, request, desk.tracker.tables, [4, 4, 4], saves=True)
    desk.planner.begin(other, 64)
    desk.planner.passed(other, WINDOW, 64)
    desk.captured()
    check_windows(desk.index, desk.planner, other)
    for tokens in (PROMPT_TOKENS, PROMPT_TOKENS):
        desk.fill(tokens)
    desk.planner.finished(desk.tracker)
    assert desk.kept(WINDOW) == [2, 3]
