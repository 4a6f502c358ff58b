"""The scheduler half of the connector: what is promised, restored and captured in each step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from moonstep.config import CaptureMode, Settings
from moonstep.engine import AllocatedBlocks, BlockPool, CacheManager, Request, SchedulerOutput
from moonstep.groups import Group
from moonstep.scheduler.allocations import Allocations
from moonstep.scheduler.boundaries import Boundaries
from moonstep.scheduler.captures import Capture, CapturePlanner, capture_mode
from moonstep.scheduler.checks import check_scheduler
from moonstep.scheduler.fills import FillClock
from moonstep.scheduler.holds import Holds
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.ledger import CaptureLedger
from moonstep.scheduler.lives import Lives, changes_nothing, starts_of
from moonstep.scheduler.loads import LoadQueue, slice_bytes
from moonstep.scheduler.lookahead import LookAhead
from moonstep.scheduler.misses import NOTHING_FOUND, Look, overruled
from moonstep.scheduler.notier import NoTier
from moonstep.scheduler.objects import ObjectPlan
from moonstep.scheduler.options import options_of, reads_store, what_is_wrong
from moonstep.scheduler.policies import LruPolicy
from moonstep.scheduler.promises import Promises
from moonstep.scheduler.residency import Residency
from moonstep.scheduler.restores import restores_of
from moonstep.scheduler.sparse import SparsePlanner
from moonstep.scheduler.stats import SchedulerStats
from moonstep.scheduler.tier import Tier, TierMaker
from moonstep.scheduler.tracker import Admission, LoadSpec, RequestTracker
from moonstep.scheduler.witness import NOBODY, Witness
from moonstep.wire import Job, StepPlan, WorkerReport, join_rows

logger = logging.getLogger(__name__)


class MooncakeStoreScheduler:
    """Decides, step by step, for the whole engine. Every method runs on the scheduler's thread.

    Slots change hands in ``build_connector_meta`` and ``update_connector_output`` only, so an
    answer of ``get_num_new_matched_tokens`` holds until the plan of the same step is built.
    ``hashes_lag`` says that a request's hashes may come later than its tokens are scheduled (async
    scheduling), so that it can end with a block that the engine never named. ``store`` makes the
    tier behind the host cache, if there is one.
    """

    def __init__(
        self,
        settings: Settings,
        groups: Sequence[Group],
        rank_count: int,
        tokens_per_decode: int = 1,
        *,
        hashes_lag: bool = False,
        store: TierMaker | None = None,
    ) -> None:
        self.stats = SchedulerStats()
        self._lookahead = LookAhead()
        unit_tokens = ObjectPlan.of(groups, settings.chunk_tokens).unit_tokens if store else 0
        boundaries = Boundaries.of(groups, settings.retention_interval, unit_tokens)
        strides = boundaries.strides
        residency = Residency(self._lookahead.passed_on)
        self.index = HostIndex(len(strides), LruPolicy(), residency, strides)
        self._settings = settings
        self._groups = tuple(groups)
        self._promises = Promises(settings, groups, boundaries.align_tokens, self.index)
        self._lives = Lives(groups)
        self._rank_count = rank_count
        self._mode = capture_mode(settings, groups)
        self._slots_by_rank: dict[int, int] = {}
        self._witness = Witness()
        self._allocations = Allocations(groups, self._witness, self._lookahead)
        self._stirred = True  # something was said or is owed: the next plan may not be empty
        self._planner = CapturePlanner(
            groups, self.index, self._witness, self._lookahead, self.stats
        )
        self._sparse = SparsePlanner(groups, boundaries, self.index, self._witness, self.stats)
        # A store's jobs go by the clock as well, and states come when they come.
        self._never_idle = store is not None or self._sparse.takes_states
        self._holds = Holds(groups)
        self._hashes_lag = hashes_lag
        self._ledger = CaptureLedger(rank_count)
        self._rests = store is not None
        self._loads = LoadQueue(self.index, self._witness, rests=self._rests)
        self.tier: Tier = store(self.index) if store else NoTier()
        self._sliced: dict[str, LoadSpec] = {}  # promised in slices, and no life has begun yet
        self._outdated: set[str] = set()  # of these, those from before a reset
        self._looks: dict[str, Look] = {}  # of requests whose lives have not begun yet
        self._fills = FillClock(groups, tokens_per_decode)
        self._step = 0
        # Said, as promises are, within the step that is being built; emptied when its plan is made.
        self._admitted: dict[str, Admission] = {}

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Take the engine's block pool as a witness. Once, before the first step.

        An engine without prefix caching forgets a block when it frees it, so there is no later
        moment at which to capture it: everything is captured as it fills.
        """
        self._witness.bind(pool)
        self._holds.bind(pool)
        self._lookahead.bind(pool)
        self.index.residency.bind(pool)
        if not pool.enable_caching:
            self._mode = CaptureMode.EAGER
        self._sparse.mode = self._mode

    def bind_cache_manager(self, manager: CacheManager) -> None:
        """As ``bind_block_pool``; tables vouch for window blocks that the pool has no name for."""
        self.bind_block_pool(manager.block_pool)
        self._sparse.bind(manager)

    # What the engine asks and says while it builds a step.

    def on_new_request(self, request: Request) -> None:
        """A request has arrived. What it asks of the cache is checked here, so it is said once."""
        if wrong := what_is_wrong(request):
            logger.warning("request %s: %s; the defaults apply", request.request_id, wrong)
        if reads_store(request):
            self.tier.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond the engine's own hit that can be restored, and whether in slices.

        ``num_computed_tokens`` is that hit, a multiple of the block size. ``None``: bytes are on
        their way from the store, ask again in the next step. Changes nothing but what it notes.
        """
        if self.tier.is_pending(request):
            return None, False
        self._stirred = True
        is_alone = not (self.lives or self._admitted or self._loads)
        promise = self._promises.make(request, num_computed_tokens, is_alone=is_alone)
        return promise.external_tokens, promise.sliced

    def update_state_after_alloc(
        self, request: Request, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """A request is admitted in this step, with its tables and with what it is to be given.

        ``num_external_tokens`` may be less than was answered, down to 0. A sliced load comes here
        twice: when its blocks are allocated, and with 0 when it runs at last.
        """
        load, self._stirred = None, True
        look, said = self.tier.admitted(request.request_id), self._promises.get(request.request_id)
        look = overruled(look, request, said, num_external_tokens)
        self._looks.setdefault(request.request_id, look)
        if num_external_tokens:
            load = self._promises.keep(request.request_id, num_external_tokens)
        self._admitted[request.request_id] = Admission(request, blocks.get_block_ids(), load)

    def request_finished(self, request: Request) -> bool:
        """A request has ended; its life does with the next step, which names it.

        True would keep all its blocks from being freed: what has to be kept is held by itself.
        """
        self.tier.finished(request)  # now: its id may arrive again before that step
        # Before the ranks have told how many slots they have, its blocks were not captured at all.
        left = self._hashes_lag or not self.index.slot_count
        tracker = self._lives.by_id.get(request.request_id) if left else None
        if tracker is not None and tracker.saves and tracker.request is request:
            self._holds.hold(tracker)
            self._stirred = True
        return False

    def build_connector_meta(self, output: SchedulerOutput) -> StepPlan:
        """The plan of the step that ``output`` describes.

        Order is everything: lives end before anything of this step is taken over, so a preempted,
        re-used or resumed id starts clean. Slots are promised before any is given away.
        """
        self._step += 1
        self.stats.steps += 1
        if self._has_nothing_to_do(output):
            return StepPlan(self._step)
        victims, finished = self._end_lives(output)
        for request_id, block_ids, num_computed_tokens in starts_of(output):
            self._start_life(request_id, block_ids, num_computed_tokens)
        for grown in self._lives.extend(output.scheduled_cached_reqs):
            self._allocations.grew(grown)
        if self._admitted:
            self._start_loads()
        self._loads.advance(slice_bytes(self._settings, is_idle=not self.lives))
        self._loads.end_step()
        self._sparse.end(finished)
        captures = self._plan_captures(output, victims)
        for request, boundary in self._sparse.take_reached():
            self.tier.kept(request, boundary)
        self.tier.saw(output)
        jobs = self.tier.plan(self._lives.new_number)
        self._promises.clear()
        self._admitted.clear()
        self._stirred = self._never_idle or bool(self._loads)
        return self._plan(captures, jobs)

    def _has_nothing_to_do(self, output: SchedulerOutput) -> bool:
        """Whether nothing is new and nothing is owed, as in most steps of a decoding engine."""
        return not (
            self._stirred or self._fills.has_due(self._step) or self._lookahead.has_news
        ) and changes_nothing(output)

    def _plan(self, captures: Sequence[Capture], jobs: tuple[Job, ...]) -> StepPlan:
        if not (captures or jobs or self._loads.has_plans):
            return StepPlan(self._step)
        rows, restores_of, received = self._loads.take()
        return StepPlan(
            step=self._step,
            restores=rows,
            captures=join_rows([capture.placed.rows for capture in captures]),
            restores_of=restores_of,
            received=received,
            jobs=jobs,
        )

    def update_connector_output(self, report: WorkerReport) -> None:
        """Take in what the ranks report: the slots they have, the captures that have arrived."""
        if not self.index.slot_count:
            self._count_slots(report)
        for settled in self._ledger.settle(report.by_rank):
            for capture in settled.captures:
                self._settle_capture(capture, captured=settled.captured)
        self.tier.report(report.by_rank)

    def reset_cache(self) -> bool:
        """Forget all that is kept; what running requests computed before is not kept later."""
        self.index.reset()
        self._witness.forget()
        self._lookahead.forget()
        self._holds.outdate()
        self.tier.reset()
        self._loads.outdate()
        self._outdated.update(self._sliced)
        self._lives.decoders.forget_sources()
        for tracker in self.lives.values():
            tracker.saves = False
            tracker.sources = [NOBODY] * len(tracker.sources)
            self._fills.leave(tracker)
        return True

    def check(self) -> None:
        """Raise AssertionError unless the books add up. For tests and audits, between steps."""
        check_scheduler(self)

    @property
    def _follows(self) -> bool:
        """Whether lives are looked at as they fill blocks, and not only when they end."""
        is_lazy = self._mode is CaptureMode.LAZY and not self._sparse.groups
        return not (is_lazy and self.index.slot_count)

    @property
    def lives(self) -> Mapping[str, RequestTracker]:
        """The lives under way, by request id."""
        return self._lives.by_id

    @property
    def is_idle(self) -> bool:
        """Whether no capture and no load is under way, and no block is held."""
        return self.tier.is_idle and not (self._ledger or self._loads or self._holds)

    def has_pending_push_work(self) -> bool:
        """Whether the engine should step although no request needs it: a push may yet come."""
        return self.tier.has_push_work() or (self._rests and bool(self._ledger))

    # Lives and their tables.

    def _end_lives(self, output: SchedulerOutput) -> tuple[list[RequestTracker], ...]:
        """End the lives this step ends: those it preempts, and those that leave a trail behind."""
        ended = [self._end_life(request_id) for request_id in output.preempted_req_ids or ()]
        finished: list[RequestTracker] = []
        for request_id in output.finished_req_ids:
            tracker = self._end_life(request_id, self._lives.computed_tokens(request_id))
            if tracker is not None and tracker.trail is not None:
                finished.append(tracker)
            self._loads.cancel(request_id)
            self._forget_sliced(request_id)
            self._looks.pop(request_id, None)
        victims = [tracker for tracker in ended if tracker is not None]
        for tracker in victims:
            is_gone = tracker.request_id in (output.finished_req_ids | self._admitted.keys())
            if not is_gone and reads_store(tracker.request):
                self.tier.arrived(tracker.request)
        return victims, finished

    def _forget_sliced(self, request_id: str) -> LoadSpec | None:
        self._outdated.discard(request_id)
        return self._sliced.pop(request_id, None)

    def _end_life(self, request_id: str, limit_tokens: int | None = None) -> RequestTracker | None:
        tracker = self._lives.end(request_id)
        if tracker is not None:
            self._fills.leave(tracker)
            self._allocations.end(tracker, limit_tokens)
        return tracker

    def _start_life(
        self, request_id: str, block_ids: Sequence[Sequence[int]], num_computed_tokens: int
    ) -> None:
        """Start the life of a request that this step admits."""
        admission = self._admitted.get(request_id)
        load = admission.load if admission else None
        local_tokens = load.local_tokens if load else num_computed_tokens
        self._end_life(request_id, local_tokens)
        if admission is None:
            logger.error("request %s runs without having been admitted: not kept", request_id)
            return
        request = admission.request
        saves = options_of(request).save and request_id not in self._outdated
        tracker = self._lives.start(request, block_ids, num_computed_tokens, saves=saves)
        self._sparse.begin(tracker, num_computed_tokens)
        self._take_over_tables(tracker, local_tokens, num_computed_tokens)
        sliced = self._forget_sliced(request_id)
        look = self._looks.pop(request_id, NOTHING_FOUND)
        self.stats.count_life(request, load or sliced, num_computed_tokens, look, self._groups[0])
        if saves:
            self._fills.enter(tracker, self._step)
            self.tier.went_on(request, num_computed_tokens)

    def _take_over_tables(
        self, tracker: RequestTracker, local_tokens: int, num_computed_tokens: int
    ) -> None:
        """Note which blocks are new, which the engine had, which slots this life goes on from."""
        self._allocations.begin(tracker, local_tokens)
        for group in self._groups:
            table = tracker.tables.by_group[group.index]
            local_blocks = local_tokens // group.block_tokens
            names, at = self._sparse.passed(tracker, group, num_computed_tokens)
            self.index.use(tracker.life, group.index, names, table[:local_blocks], at)

    # Restores.

    def _start_loads(self) -> None:
        """Begin what the requests admitted in this step were promised."""
        for request_id, admission in self._admitted.items():
            load, life = admission.load, self.lives.get(request_id)
            if load is not None and load.sliced:
                self._allocations.handed_out_beyond(admission.tables, load.local_tokens)
                life_number = self._lives.new_number()
                restores = restores_of(self._groups, self.index, admission, load, life_number)
                self._loads.enqueue(request_id, restores)
                self._sliced[request_id] = load
                self.stats.sliced_loads += 1
            elif load is not None and life is not None:
                restores = restores_of(self._groups, self.index, admission, load, life.life)
                self._loads.restore_now(request_id, restores)
            elif life is None:
                # Another connector loads into these blocks: whatever they held is going.
                self._allocations.handed_out_beyond(admission.tables, 0)

    # Captures.

    def _plan_captures(
        self, output: SchedulerOutput, victims: Sequence[RequestTracker]
    ) -> list[Capture]:
        """What this step's forward pass fills, what it preempts, what it may next overwrite."""
        if victims:
            self.stats.count_victims(victims, self._groups[0].block_tokens)
            saving = [tracker for tracker in victims if tracker.saves]
            self._planner.victims(saving, self._settings.victim_bytes)
        if self._holds:
            self._planner.leftovers(self._holds.release())
        self._sparse.handed_over(output, self.lives)
        if running := self._fills.due(self._step, output.num_scheduled_tokens):
            self._planner.fills(running, self._mode)
            self._sparse.fills(running)
            if not self._follows:
                running = self._lives.let_decode(running)
            self._fills.enter_again(running, self._step)
        if self._lookahead.has_news:
            self._planner.leavers(self._settings.leaver_bytes)
        captures = self._planner.take() + self._sparse.take()
        if captures:
            self._ledger.open(self._step, captures)
        return captures

    # What the ranks report.

    def _count_slots(self, report: WorkerReport) -> None:
        """The index gets the smallest number of slots, and none before every rank has spoken."""
        for rank, rank_report in report.by_rank.items():
            self._slots_by_rank[rank] = rank_report.slots
        if len(self._slots_by_rank) == self._rank_count:
            self.index.resize(min(self._slots_by_rank.values()))

    def _settle_capture(self, capture: Capture, *, captured: bool) -> None:
        placed = capture.placed
        if not captured:
            self.index.abandon(placed)
            self._lookahead.look_again(placed.columns.blocks)
            self.stats.failed_blocks += len(placed)
            return
        kept = self.index.acknowledge(placed)
        self.tier.captured(placed.columns, self._lives.request_of)
        if capture.engine_keeps and kept == len(placed):
            self.index.residency.note(placed.slots, placed.columns.blocks)
        self.stats.saved_blocks += kept
        self.stats.saved_tokens += kept * self._groups[placed.columns.group].block_tokens
