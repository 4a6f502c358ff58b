"""The scheduler half of the connector: what is promised, restored and captured in each step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from moonstep.config import RequestOptions, SettingError, Settings
from moonstep.engine import (
    AllocatedBlocks,
    BlockPool,
    CachedRequests,
    Request,
    SchedulerOutput,
)
from moonstep.groups import Group
from moonstep.scheduler.index import HostIndex, Placement
from moonstep.scheduler.ledger import CaptureLedger
from moonstep.scheduler.lookup import host_hit_tokens
from moonstep.scheduler.policies import LruPolicy
from moonstep.scheduler.stats import SchedulerStats
from moonstep.scheduler.tables import BlockTables
from moonstep.scheduler.tracker import Admission, LoadSpec, RequestTracker, full_blocks
from moonstep.scheduler.wheel import Wheel, steps_to_fill
from moonstep.scheduler.witness import Witness, block_key
from moonstep.wire import ReqMeta, StepPlan, WorkerReport, make_rows

logger = logging.getLogger(__name__)


class MooncakeStoreScheduler:
    """Decides, step by step, for the whole engine. Every method runs on the scheduler's thread.

    Slots change hands in ``build_connector_meta`` and ``update_connector_output`` only, so an
    answer of ``get_num_new_matched_tokens`` holds until the plan of the same step is built.
    """

    def __init__(
        self,
        settings: Settings,
        groups: Sequence[Group],
        rank_count: int,
        tokens_per_decode: int = 1,
    ) -> None:
        self.stats = SchedulerStats()
        self.index = HostIndex(len(groups), LruPolicy())
        self.lives: dict[str, RequestTracker] = {}
        self._settings = settings
        self._groups = tuple(groups)
        self._rank_count = rank_count
        self._tokens_per_decode = tokens_per_decode
        self._slots_by_rank: dict[int, int] = {}
        self._ledger = CaptureLedger(rank_count)
        self._witness = Witness()
        self._wheel: Wheel[RequestTracker] = Wheel()
        self._step = 0
        self._life_count = 0
        # Said by the engine within the step that is being built; emptied when its plan is made.
        self._local_tokens: dict[str, int] = {}
        self._admitted: dict[str, Admission] = {}

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Take the engine's block pool as a witness. Once, before the first step."""
        self._witness.bind(pool)

    # What the engine asks and says while it builds a step.

    def on_new_request(self, request: Request) -> None:
        """A request has arrived. What it asks of the cache is checked here, so it is said once."""
        try:
            RequestOptions.parse(request.kv_transfer_params)
        except SettingError as error:
            logger.warning("request %s: %s; the defaults apply", request.request_id, error)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens beyond the engine's own hit that can be restored in this step.

        ``num_computed_tokens`` is that hit, a multiple of the block size. May be asked again in
        every step; changes nothing but the note of what was asked.
        """
        self._local_tokens[request.request_id] = num_computed_tokens
        if request.skip_reading_prefix_cache or not _options(request).load:
            return 0
        hit = host_hit_tokens(self.index, self._groups[0], request, num_computed_tokens)
        return hit if hit >= self._settings.min_hit_tokens else 0

    def update_state_after_alloc(
        self, request: Request, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """A request is admitted in this step, with its tables and with what it is to be given.

        ``num_external_tokens`` may be less than was answered, down to 0.
        """
        request_id = request.request_id
        load = None
        if num_external_tokens:
            load = LoadSpec(self._local_tokens[request_id], num_external_tokens)
        self._admitted[request_id] = Admission(request, blocks.get_block_ids(), load)

    def request_finished(self, request: Request) -> bool:
        """A request has ended. True would keep its blocks from being freed: never needed here."""
        del request  # its life ends with the next step, which names it
        return False

    def build_connector_meta(self, output: SchedulerOutput) -> StepPlan:
        """The plan of the step that ``output`` describes.

        Order is everything: lives end before anything of this step is taken over, so a preempted,
        re-used or resumed id starts clean.
        """
        self._step += 1
        self.stats.steps += 1
        self._end_lives(output)
        self._start_lives(output)
        self._extend_tables(output.scheduled_cached_reqs)
        restores, restores_of = self._plan_restores()
        captures = self._plan_captures(output)
        self._local_tokens.clear()
        self._admitted.clear()
        return StepPlan(
            step=self._step,
            restores=make_rows(restores),
            captures=make_rows([(p.group, b, p.slot, p.generation) for p, b in captures]),
            restores_of=restores_of,
        )

    def update_connector_output(self, report: WorkerReport) -> None:
        """Take in what the ranks report: the slots they have, the captures that have arrived."""
        if not self.index.slot_count:
            self._count_slots(report)
        for settled in self._ledger.settle(report.by_rank):
            for placement in settled.placements:
                self._settle_capture(placement, captured=settled.captured)

    def reset_cache(self) -> bool:
        """Forget all that is kept; what running requests computed before is not kept later."""
        self.index.reset()
        self._witness.forget()
        for tracker in self.lives.values():
            tracker.saves = False
            self._wheel.leave(tracker)
        return True

    def check(self) -> None:
        """Raise AssertionError unless the books add up. For tests and audits, between steps."""
        self.index.check()
        assert self.index.planned_count == len(self._ledger), "captures without an owner"
        assert not self._admitted, f"admissions left over: {list(self._admitted)}"
        for request_id, tracker in self.lives.items():
            for group, table in zip(self._groups, tracker.tables.by_group, strict=True):
                covered = len(table) * group.block_tokens
                assert tracker.token_len <= covered, (request_id, tracker.token_len, covered)

    # Lives and their tables.

    def _end_lives(self, output: SchedulerOutput) -> None:
        for request_id in output.preempted_req_ids or ():
            self._end_life(request_id)
        for request_id in output.finished_req_ids:
            self._end_life(request_id)

    def _end_life(self, request_id: str) -> None:
        tracker = self.lives.pop(request_id, None)
        if tracker is not None:
            self._wheel.leave(tracker)

    def _start_lives(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            self._start_life(new.req_id, new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request_id in cached.resumed_req_ids:
            position = cached.req_ids.index(request_id)
            block_ids = cached.new_block_ids[position] or ()
            self._start_life(request_id, block_ids, cached.num_computed_tokens[position])

    def _start_life(
        self, request_id: str, block_ids: Sequence[Sequence[int]], num_computed_tokens: int
    ) -> None:
        """Start the life of a request that this step admits, with these tables and no others."""
        self._end_life(request_id)
        admission = self._admitted.get(request_id)
        if admission is None:
            logger.error("request %s runs without having been admitted: not kept", request_id)
            return
        self._life_count += 1
        self.stats.lives += 1
        request = admission.request
        local_tokens = admission.load.local_tokens if admission.load else num_computed_tokens
        self.stats.admitted_tokens += request.num_tokens - local_tokens
        tables = BlockTables(block_ids)
        for group, table in zip(self._groups, tables.by_group, strict=True):
            self._witness.saw_allocated(table[local_tokens // group.block_tokens :])
        saves = _options(request).save
        own = [num_computed_tokens // group.block_tokens for group in self._groups]
        tracker = RequestTracker(self._life_count, request, tables, own, saves=saves)
        self.lives[request_id] = tracker
        for group, count in zip(self._groups, own, strict=True):
            self.index.use(tracker.life, group.index, request.block_hashes[:count])
        if saves:
            self._wheel.enter(tracker, self._step)

    def _extend_tables(self, cached: CachedRequests) -> None:
        """Append this step's new blocks to the tables of running requests."""
        new_block_ids = cached.new_block_ids
        if new_block_ids.count(None) == len(new_block_ids):
            return  # one comparison an entry, in C: nothing is new for those who merely run
        for request_id, block_ids in zip(cached.req_ids, new_block_ids, strict=True):
            if block_ids is None or request_id in cached.resumed_req_ids:
                continue
            tracker = self.lives.get(request_id)
            for ids in block_ids:
                self._witness.saw_allocated(ids)
            if tracker is not None:
                tracker.tables.append(block_ids)

    # Restores.

    def _plan_restores(self) -> tuple[list[tuple[int, int, int, int]], tuple[ReqMeta, ...]]:
        rows: list[tuple[int, int, int, int]] = []
        restores_of: list[ReqMeta] = []
        for request_id, admission in self._admitted.items():
            if admission.load is None:
                continue
            start = len(rows)
            for group in self._groups:
                rows.extend(self._restore_rows(request_id, admission, admission.load, group))
            restores_of.append(ReqMeta(request_id, start, len(rows)))
            self.stats.restored_tokens += admission.load.external_tokens
        return rows, tuple(restores_of)

    def _restore_rows(
        self, request_id: str, admission: Admission, load: LoadSpec, group: Group
    ) -> list[tuple[int, int, int, int]]:
        """Rows that fill the request's own blocks of ``group`` from the slots it was promised."""
        names = admission.request.block_hashes
        table = admission.tables[group.index]
        first = load.local_tokens // group.block_tokens
        stop = load.stop_tokens // group.block_tokens
        rows = []
        for position in range(first, stop):
            name = names[position]
            placement = self.index.locate(group.index, name)
            if placement is None:
                raise RuntimeError(
                    f"moonstep: request {request_id} was promised block {position} of group "
                    f"{group.index}, which no slot holds: promises and slots have drifted apart"
                )
            block = table[position]
            rows.append((group.index, block, placement.slot, placement.generation))
            self._witness.saw_computed(block, block_key(name, group.index))
        return rows

    # Captures.

    def _plan_captures(self, output: SchedulerOutput) -> list[tuple[Placement, int]]:
        """What this step's forward pass fills, and which slot each block goes to."""
        captures: list[tuple[Placement, int]] = []
        for tracker in self._wheel.due(self._step):
            scheduled = output.num_scheduled_tokens.get(tracker.request.request_id)
            if scheduled is None:
                self._wheel.enter(tracker, self._step + 1)
                continue
            tracker.settle(scheduled)
            for group in self._groups:
                captures.extend(self._capture_filled(tracker, group))
            self._wheel.enter(tracker, self._step + self._steps_to_next_block(tracker, scheduled))
        if captures:
            self._ledger.open(self._step, [placement for placement, _ in captures])
        return captures

    def _capture_filled(self, tracker: RequestTracker, group: Group) -> list[tuple[Placement, int]]:
        names = tracker.request.block_hashes
        table = tracker.tables.by_group[group.index]
        first = tracker.next_block[group.index]
        stop = full_blocks(tracker.token_len, group.block_tokens, len(names))
        captures = []
        for position in range(first, stop):
            placement = self._capture_block(tracker, group, position, table[position])
            if placement is not None:
                captures.append((placement, table[position]))
        if self.index.slot_count:  # before the ranks have reported, look again in the next step
            tracker.next_block[group.index] = max(first, stop)
        return captures

    def _capture_block(
        self, tracker: RequestTracker, group: Group, position: int, block: int
    ) -> Placement | None:
        name = tracker.request.block_hashes[position]
        key = block_key(name, group.index)
        if position >= tracker.first_own_block[group.index]:
            self._witness.saw_computed(block, key)
        if self.index.holds(group.index, name):
            return None
        if not self._witness.vouches(block, key):
            self.stats.unvouched_blocks += 1
            return None
        return self.index.plan(tracker.life, group.index, name)

    def _steps_to_next_block(self, tracker: RequestTracker, num_scheduled_tokens: int) -> int:
        request = tracker.request
        prefilling = request.num_computed_tokens + num_scheduled_tokens < request.num_tokens
        missing = min(
            (tracker.next_block[group.index] + 1) * group.block_tokens - tracker.token_len
            for group in self._groups
        )
        return steps_to_fill(missing, prefilling, self._tokens_per_decode)

    # What the ranks report.

    def _count_slots(self, report: WorkerReport) -> None:
        """The index gets the smallest number of slots, and none before every rank has spoken."""
        for rank, rank_report in report.by_rank.items():
            self._slots_by_rank[rank] = rank_report.slots
        if len(self._slots_by_rank) == self._rank_count:
            self.index.resize(min(self._slots_by_rank.values()))

    def _settle_capture(self, placement: Placement, *, captured: bool) -> None:
        if not captured:
            self.index.abandon(placement)
            self.stats.failed_blocks += 1
        elif self.index.acknowledge(placement):
            self.stats.saved_blocks += 1
            self.stats.saved_tokens += self._groups[placement.group].block_tokens


def _options(request: Request) -> RequestOptions:
    """The request's own wishes; what it got wrong was said when it arrived."""
    if not request.kv_transfer_params:
        return _DEFAULT_OPTIONS
    try:
        return RequestOptions.parse(request.kv_transfer_params)
    except SettingError:
        return _DEFAULT_OPTIONS


_DEFAULT_OPTIONS = RequestOptions()
