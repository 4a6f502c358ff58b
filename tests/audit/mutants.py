"""Mutants: one small defect each, switched on in Moonstep for the time of a ``with``.

Every one is a way in which a connector of this kind has gone wrong, or nearly did. The audit has
to find each of them; `test_mutants.py` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from moonstep.scheduler import scheduler
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.fetches import FetchPlanner
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.jobs import JobLedger
from moonstep.scheduler.lives import Lives
from moonstep.scheduler.loads import LoadQueue, Restore
from moonstep.scheduler.lookup import JointLookup
from moonstep.scheduler.scheduler import MooncakeStoreScheduler
from moonstep.scheduler.tables import BlockTables
from moonstep.scheduler.tier import StoreTier
from moonstep.scheduler.tracker import RequestTracker
from moonstep.scheduler.witness import NOBODY, Witness
from moonstep.worker.worker import MooncakeStoreWorker

Mutant = Callable[[], AbstractContextManager[None]]
MUTANTS: dict[str, Mutant] = {}


def mutant(body: Callable[[], Iterator[None]]) -> Mutant:
    """Register a mutant under its function's name."""
    made = contextmanager(body)
    MUTANTS[body.__name__] = made
    return made


class _Remembered:
    """What the founding defect kept: tables of requests that were preempted, by id."""

    def __init__(self) -> None:
        self.tables: dict[str, list[list[int]]] = {}
        self.end, self.start = Lives.end, Lives.start

    def note_end(self, lives: Lives, request_id: str) -> RequestTracker | None:
        tracker = self.end(lives, request_id)
        if tracker is not None:
            self.tables[request_id] = [list(table) for table in tracker.tables.by_group]
        return tracker

    def appended(self, request: Any, block_ids: Any) -> Any:
        old = self.tables.get(request.request_id)
        if old is None or not request.num_preemptions:
            return block_ids
        return [[*table, *ids] for table, ids in zip(old, block_ids, strict=True)]


@mutant
def append_on_resume() -> Iterator[None]:
    """A resumed request's blocks are appended to the table it had before."""
    memory = _Remembered()

    def end(self: Lives, request_id: str) -> Any:
        return memory.note_end(self, request_id)

    def start(self: Lives, request: Any, block_ids: Any, computed: int, *, saves: bool) -> Any:
        return memory.start(
            self, request, memory.appended(request, block_ids), computed, saves=saves
        )

    with patch.object(Lives, "end", end), patch.object(Lives, "start", start):
        yield


@mutant
def replace_one_step_late() -> Iterator[None]:
    """A resumed request's table is appended to in its first step, and replaced in the next."""
    memory = _Remembered()
    late: dict[str, Any] = {}
    fresh: set[str] = set()  # began in the step that is being built
    extend = Lives.extend

    def end(self: Lives, request_id: str) -> Any:
        late.pop(request_id, None)
        return memory.note_end(self, request_id)

    def start(self: Lives, request: Any, block_ids: Any, computed: int, *, saves: bool) -> Any:
        wrong = memory.appended(request, block_ids)
        tracker = memory.start(self, request, wrong, computed, saves=saves)
        if wrong is not block_ids:
            late[request.request_id] = [list(ids) for ids in block_ids]
            fresh.add(request.request_id)
        return tracker

    def extended(self: Lives, cached: Any) -> Any:
        for request_id in [name for name in late if name not in fresh]:
            tracker = self.by_id.get(request_id)
            if tracker is not None:
                tracker.tables = BlockTables(late.pop(request_id))
        fresh.clear()
        return extend(self, cached)

    with (
        patch.object(Lives, "end", end),
        patch.object(Lives, "start", start),
        patch.object(Lives, "extend", extended),
    ):
        yield


@mutant
def end_lives_after_the_new_ones_began() -> Iterator[None]:
    """What a step ends is taken off after what it begins was taken over."""
    end_lives, plan = MooncakeStoreScheduler._end_lives, MooncakeStoreScheduler._plan_captures

    def none_yet(self: Any, output: Any) -> list[Any]:
        return []

    def ended_late(self: Any, output: Any, victims: Any) -> Any:
        return plan(self, output, end_lives(self, output))

    with (
        patch.object(MooncakeStoreScheduler, "_end_lives", none_yet),
        patch.object(MooncakeStoreScheduler, "_plan_captures", ended_late),
    ):
        yield


@mutant
def new_for_a_known_id_ignored() -> Iterator[None]:
    """A request among the new ones whose id has a life already goes on with its old table."""
    start = MooncakeStoreScheduler._start_life

    def start_life(self: Any, request_id: str, block_ids: Any, computed: int) -> None:
        if request_id not in self.lives:
            start(self, request_id, block_ids, computed)

    with patch.object(MooncakeStoreScheduler, "_start_life", start_life):
        yield


@mutant
def table_not_copied() -> Iterator[None]:
    """The engine's own lists are kept as tables; runner V1 goes on to extend them."""

    def keep(self: BlockTables, block_ids: Any) -> None:
        self._by_group = list(block_ids)
        self.complete = None

    with patch.object(BlockTables, "__init__", keep):
        yield


@mutant
def unsettled_token_captured() -> Iterator[None]:
    """A token counts as computed one step before its KV is there."""
    settle = RequestTracker.settle

    def settle_early(self: RequestTracker, num_scheduled_tokens: int) -> None:
        settle(self, num_scheduled_tokens + 1)

    with patch.object(RequestTracker, "settle", settle_early):
        yield


@mutant
def hash_believed() -> Iterator[None]:
    """A block counts as computed because it carries a hash."""

    def computed(self: Witness, group: int, blocks: Any, keys: Any) -> Columns:
        columns = Columns(group)
        for depth, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            columns.add(0, depth, key[: -len(columns.suffix)], block)
        return columns

    def vouched(self: Witness, columns: Columns, keys: Any) -> Columns:
        pairs = zip(columns.blocks, keys, strict=True)
        return columns.only(self.pool_agrees((block,), [key]) for block, key in pairs)

    with patch.object(Witness, "computed", computed), patch.object(Witness, "vouched", vouched):
        yield


@mutant
def pool_not_asked() -> Iterator[None]:
    """What was computed into a block counts, whatever the engine has put there since."""

    note = Witness.saw_allocated

    def saw_allocated(self: Witness, blocks: Any, *whose: Any) -> None:
        at = self._places(blocks)
        before = self._of[at]
        note(self, blocks, *whose)
        self._of[at[before != NOBODY]] = before[before != NOBODY]

    def computed(self: Witness, group: int, blocks: Any, keys: Any) -> Columns:
        columns = Columns(group)
        for block in blocks:
            source, depth = divmod(int(self._of[block]), 1 << 32)
            noted = self._sources[source]
            (name,) = noted.names_at([depth])
            if name is not None and noted.group == group:
                columns.add(noted.life, depth, name, block)
        return columns

    with (
        patch.object(Witness, "saw_allocated", saw_allocated),
        patch.object(Witness, "computed", computed),
    ):
        yield


@mutant
def capture_skipped_on_one_rank() -> Iterator[None]:
    """The last rank copies nothing and reports the capture all the same."""
    start = MooncakeStoreWorker._start_capture

    def start_capture(self: Any, rows: Any) -> Any:
        return start(self, rows[:0] if self._rank else rows)

    def with_generations(self: Any, rows: Any) -> Any:
        ticket = start_capture(self, rows)
        self.arena.generation[rows[:, 2]] = rows[:, 3]
        return ticket

    with patch.object(MooncakeStoreWorker, "_start_capture", with_generations):
        yield


@contextmanager
def flaky_captures() -> Iterator[None]:
    """No defect of Moonstep: every fourth capture fails on its rank. The audit stays clean."""
    start = MooncakeStoreWorker._start_capture
    count = 0

    def start_capture(self: Any, rows: Any) -> Any:
        nonlocal count
        count += 1
        if count % 4 == 0:
            self.arena.generation[rows[:, 2]] = -1
            raise OSError("this capture was told to fail")
        return start(self, rows)

    with patch.object(MooncakeStoreWorker, "_start_capture", start_capture):
        yield


@mutant
def planned_slot_promised() -> Iterator[None]:
    """A slot is promised before its capture was reported; captures fail now and then."""

    def located(self: HostIndex, group: int, names: Any) -> Any:
        slots = [self._slot_of[group][name] for name in names]
        return slots, self._generation[slots]

    def found(self: HostIndex, group: int, names: Any, start: int, stop: int) -> int:
        there = [*self.which_held(group, names[start:stop]), False]
        return there.index(False)

    with (
        flaky_captures(),
        patch.object(HostIndex, "locate", located),
        patch.object(HostIndex, "written_run", found),
    ):
        yield


@mutant
def failed_capture_acknowledged() -> Iterator[None]:
    """A capture that failed on some rank counts as kept; captures fail now and then."""
    settle = MooncakeStoreScheduler._settle_capture

    def settled(self: Any, capture: Any, *, captured: bool) -> None:
        settle(self, capture, captured=True)

    with flaky_captures(), patch.object(MooncakeStoreScheduler, "_settle_capture", settled):
        yield


@mutant
def less_restored_than_promised() -> Iterator[None]:
    """The last block of a promise is not restored."""
    restores = scheduler.restores_of

    def shorter(*args: Any) -> list[Restore]:
        return [
            Restore(r.columns.part(0, n), r.slots[:n], r.generations[:n], r.block_bytes)
            for r in restores(*args)
            for n in [len(r.slots) - 1]
        ]

    with patch.object(scheduler, "restores_of", shorter):
        yield


@mutant
def restored_from_the_wrong_position() -> Iterator[None]:
    """A promise beyond the engine's own hit is restored as if that hit were not there."""
    advance = LoadQueue.restore_now

    def shifted(self: LoadQueue, request_id: str, restores: list[Restore]) -> None:
        turned = [
            Restore(r.columns, r.slots[1:] + r.slots[:1], r.generations, r.block_bytes)
            for r in restores
        ]
        for restore in turned:
            generations = self._index._generation[restore.slots]
            object.__setattr__(restore, "generations", generations)
        advance(self, request_id, turned)

    with patch.object(LoadQueue, "restore_now", shifted):
        yield


@mutant
def slot_counts_differ() -> Iterator[None]:
    """The index believes in two slots more than the ranks have."""
    resize = HostIndex.resize

    def larger(self: HostIndex, slot_count: int) -> None:
        resize(self, slot_count + 2)

    with patch.object(HostIndex, "resize", larger):
        yield


@mutant
def last_token_promised() -> Iterator[None]:
    """A prompt that ends with a block is promised whole."""

    hit_tokens = JointLookup.hit_tokens

    def one_token_more(self: JointLookup, index: HostIndex, request: Any, local: int) -> int:
        longer: Any = SimpleNamespace(
            num_tokens=request.num_tokens + 1, block_hashes=request.block_hashes
        )
        return hit_tokens(self, index, longer, local)

    with patch.object(JointLookup, "hit_tokens", one_token_more):
        yield


@mutant
def cancelled_load_never_reported() -> Iterator[None]:
    """A load in slices whose request has ended is dropped, and the engine is not told."""

    def cancel(self: LoadQueue, request_id: str) -> None:
        load = self._loads.pop(request_id, None)
        if load is not None:
            self._index.unpin(load.slots)

    with patch.object(LoadQueue, "cancel", cancel):
        yield


@mutant
def load_reported_before_its_last_slice() -> Iterator[None]:
    """A load in slices is reported as received with the step before its last slice."""
    advance = LoadQueue.advance

    def early(self: LoadQueue, slice_bytes: int) -> None:
        advance(self, slice_bytes)
        for load in self._loads.values():
            left = sum(len(r.slots) for r in load.restores) - load.block
            if left == 1 and load.request_id not in self._received:
                self._received.append(load.request_id)

    with patch.object(LoadQueue, "advance", early):
        yield


@mutant
def pinned_slot_evicted() -> Iterator[None]:
    """A slot that a load in slices still needs is given to another block."""

    def pin(self: HostIndex, slots: Any) -> None:
        del slots

    with patch.object(HostIndex, "pin", pin), patch.object(HostIndex, "unpin", pin):
        yield


@mutant
def reset_forgotten() -> Iterator[None]:
    """A reset of the caches leaves the host cache as it was."""

    def reset_cache(self: Any) -> bool:
        return True

    with patch.object(MooncakeStoreScheduler, "reset_cache", reset_cache):
        yield


@mutant
def held_block_never_freed() -> Iterator[None]:
    """A block that was held for its capture keeps its reference."""
    from moonstep.scheduler.holds import Holds

    def release(self: Holds) -> Any:
        from vllm.v1.core.block_pool import BlockPool

        with patch.object(BlockPool, "free_blocks", lambda pool, blocks: None):
            return _release(self)

    _release = Holds.release
    with patch.object(Holds, "release", release):
        yield


@mutant
def damaged_object_accepted() -> Iterator[None]:
    """What a store gives back is taken as it comes: short, of another key, with flipped bits."""
    with patch("moonstep.stores.checked.verify", lambda *args: None):
        yield


@mutant
def failed_fetch_acknowledged() -> Iterator[None]:
    """A fetch that did not bring its objects counts as written."""
    ended = FetchPlanner.ended

    def always_done(self: FetchPlanner, entry: Any) -> Any:
        entry.done = [True] * len(entry.done)
        return ended(self, entry)

    with patch.object(FetchPlanner, "ended", always_done):
        yield


@mutant
def abandoned_slots_used_again() -> Iterator[None]:
    """A fetch past its deadline gives its slots back at once; its call may come back later."""
    plan = StoreTier.plan

    def without_quarantine(self: StoreTier, new_life: Any) -> Any:
        for entry in self._fetch_jobs.abandon_late(self._clock()):
            entry.done = [False] * len(entry.done)
            del self._fetch_jobs._open[entry.job.number]
            self.fetches.ended(entry)
        return plan(self, new_life)

    with patch.object(StoreTier, "plan", without_quarantine):
        yield


@mutant
def job_end_credited_by_request() -> Iterator[None]:
    """The end of a job is credited to the oldest open job of the same request id."""
    opened, settle = JobLedger.open, JobLedger.settle
    request_of: dict[int, str] = {}

    def note(self: Any, job: Any, *args: Any) -> None:
        request_of[job.number] = job.request_id
        opened(self, job, *args)

    def credit(self: Any, by_rank: Any) -> Any:
        oldest: dict[str, int] = {}
        for number, entry in self._open.items():
            oldest.setdefault(entry.job.request_id, number)
        credited = {}
        for rank, report in by_rank.items():
            ends = [
                end._replace(number=oldest.get(request_of.get(end.number, ""), end.number))
                for end in report.ended_jobs
            ]
            credited[rank] = replace(report, ended_jobs=tuple(ends))
        return settle(self, credited)

    with patch.object(JobLedger, "open", note), patch.object(JobLedger, "settle", credit):
        yield
