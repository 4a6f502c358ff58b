"""Whether the books add up: for tests and audits, between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonstep.config import CaptureMode
from moonstep.groups import GroupKind, block_names
from moonstep.scheduler.slots import FREE, PLANNED, WRITTEN, SlotState

if TYPE_CHECKING:
    from moonstep.scheduler.index import HostIndex
    from moonstep.scheduler.scheduler import MooncakeStoreScheduler
    from moonstep.scheduler.sparse import SparsePlanner
    from moonstep.scheduler.tracker import RequestTracker


def check_index(index: HostIndex) -> None:
    """Raise AssertionError unless states, names, pins and free slots add up.

    Audits ask after every step: sets and lists, and no loop over the slots but in C.
    """
    states, names = index._states.tolist(), index._name.tolist()
    groups = index._group.tolist()
    free, planned, written, doomed = (
        {slot for slot, state in enumerate(states) if state == wanted}
        for wanted in (FREE, PLANNED, WRITTEN, int(SlotState.DOOMED))
    )
    assert sorted(index._free) == sorted(free)
    assert free == {slot for slot, name in enumerate(names) if name is None}
    named: set[int] = set()
    for group, slot_of in enumerate(index._slot_of):
        slots = list(slot_of.values())
        assert [names[slot] for slot in slots] == list(slot_of), f"names of group {group}"
        assert {groups[slot] for slot in slots} <= {group}, f"slots of group {group}"
        named.update(slots)
    assert named <= planned | written, "a name of a slot that is free or doomed"
    assert written <= named, f"written without a name: {written - named}"
    assert planned - named == set(index._nameless), "planned without a name"
    assert index._planned_count == len(planned)
    assert min(index._pins.values(), default=1) > 0, "a pin that does not count"
    assert written | doomed >= set(index._pins), "pins on what is not there"
    assert len(doomed) <= len(index._pins), "doomed without a pin"
    assert index._passing.isdisjoint(index._free), "kept in passing, but free"


def check_scheduler(half: MooncakeStoreScheduler) -> None:
    """Raise AssertionError unless slots, pins and lives have an owner, and tables cover them."""
    half.index.check()
    owned = len(half._ledger) + half.tier.owned_slots
    assert half.index.planned_count == owned, "planned slots without an owner"
    assert not half._admitted, f"admissions left over: {list(half._admitted)}"
    if half.tier.is_idle and not half._loads and not half._loads.resting_slots:
        assert not half.index.pinned_count, "pins without an owner"
    for request_id, tracker in half.lives.items():
        for group in half._groups:
            if group.kind is GroupKind.RECURRENT_STATE:
                continue  # its table is sparse, and read by nobody
            covered = len(tracker.tables.by_group[group.index]) * group.block_tokens
            assert tracker.token_len <= covered, (request_id, tracker.token_len, covered)
        if _keeps_windows(half):
            check_windows(half.index, half._sparse, tracker)


def _keeps_windows(half: MooncakeStoreScheduler) -> bool:
    """Whether windows that are kept for good are seen to be: not while the engine has them."""
    sparse = half._sparse
    return not (sparse.takes_states or sparse.mode is CaptureMode.LAZY or _has_lost(half))


def _has_lost(half: MooncakeStoreScheduler) -> bool:
    """Whether anything that was to be kept may not be: another life may pass it by since then.

    With a store, what a fetch was to bring is not captured beside it, and the fetch may fail.
    """
    if half._rests:
        return True
    counts, stats = half.index.counts, half.stats
    return bool(counts.evicted or counts.refused or stats.failed_blocks or stats.unvouched_blocks)


def check_windows(index: HostIndex, planner: SparsePlanner, tracker: RequestTracker) -> None:
    """Raise AssertionError if a window that a life keeps for good is kept in passing only.

    Where there are no states: beside them it is decided anew at each boundary.
    """
    if tracker.trail is None or not tracker.saves:
        return
    for group in planner.groups:
        stop = tracker.next_block[group.index]
        kept = planner.boundaries.kept_positions(group, 0, stop, tracker.trail.of_request)
        names = block_names(tracker.request.block_hashes, group)
        slots = {index._slot_of[group.index].get(names[at]): at for at in kept}
        given_up = [slots[slot] for slot in index._passing.intersection(slots)]
        assert not given_up, f"{tracker.request_id}: blocks {given_up} of group {group.index}"
