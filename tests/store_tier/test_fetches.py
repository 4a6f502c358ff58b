"""Fetches: bytes first and promise later, each prefix once, no wait beyond the deadline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonstep.config import Role
from moonstep.groups import GroupKind
from moonstep.scheduler.lookup import JointLookup
from moonstep.wire import SCRATCH
from tests.scheduler.stock import BLOCK_TOKENS, GROUPS, make_request
from tests.store_tier.rig import Rig

MOST_OBJECTS = 4  # in one job


def test_a_prefix_is_promised_when_its_bytes_have_arrived() -> None:
    rig = Rig()
    request = make_request("r", 65)
    rig.arrive(request)
    assert rig.tier.is_pending(request)
    ((_, keys),) = rig.looks.asked
    hashes = request.block_hashes
    assert keys == [rig.keys.current.key(0, 0, hashes[at]) for at in (1, 3)]
    rig.looks.answer(True)
    assert rig.tier.is_pending(request)
    (job,) = rig.fetches()
    assert [each.name for each in job.objects] == [hashes[1], hashes[3]]
    assert [each.parent for each in job.objects] == [None, hashes[1]]
    assert rig.written(request) == 0
    assert rig.tier.is_pending(request)
    rig.end(job)
    assert rig.written(request) == 4
    assert not rig.tier.is_pending(request)
    assert rig.index.pinned_count == 4, "what came has to stay until its request takes it"
    rig.tier.admitted("r")
    assert rig.index.pinned_count == 0
    rig.tier.finished(request)
    assert rig.tier.is_idle


def test_every_rank_is_asked_and_has_to_bring_its_part() -> None:
    rig = Rig(ranks=2)
    request = make_request("r", 97)
    rig.arrive(request)
    ((_, keys),) = rig.looks.asked
    assert [key.split("/")[2] for key in keys] == ["0.0", "0.1"] * 3
    rig.looks.answer([True, True, True, False, True, True])
    (job,) = rig.fetches_without_more()
    assert len(job.objects) == 1, "an object counts if all ranks have it, a prefix up to a gap"
    rig.end(job, True, ranks=[0])
    assert rig.written(request) == 0
    rig.end(job, False, ranks=[1])
    assert rig.written(request) == 0
    assert rig.index.free_count == rig.index.slot_count
    assert not rig.tier.is_pending(request)


def test_a_producer_looks_for_nothing_and_keeps_nobody_waiting() -> None:
    rig = Rig(role=Role.PRODUCER)
    request = make_request("r", 65)
    rig.arrive(request)
    assert not rig.looks.asked
    assert not rig.tier.is_pending(request)
    assert rig.tier.is_idle


def test_the_last_token_is_never_fetched() -> None:
    """An object that ends with it is read all the same, for the blocks before it."""
    for tokens, hit_blocks, objects in (
        (32, 0, 0),
        (33, 2, 1),
        (48, 2, 1),
        (49, 3, 2),
        (64, 3, 2),
        (65, 4, 2),
    ):
        rig = Rig()
        request = make_request("r", tokens)
        rig.arrive(request)
        assert [len(keys) for _, keys in rig.looks.asked] == [objects] * (objects > 0)
        if objects:
            rig.looks.answer(True)
        jobs = rig.fetches()
        assert sum(len(job.objects) for job in jobs) == objects
        for job in jobs:
            rig.end(job)
        hit = JointLookup(GROUPS, BLOCK_TOKENS).hit_tokens(rig.index, request, 0)
        assert hit == hit_blocks * BLOCK_TOKENS


def test_blocks_that_are_here_are_read_into_scratch() -> None:
    rig = Rig()
    request = make_request("r", 97)
    rig.write(request.block_hashes[:3])
    (job,) = rig.find(request)
    first, second = job.objects
    assert first.name == request.block_hashes[3]
    assert first.slots[0] == SCRATCH
    assert SCRATCH not in (first.slots[1], *second.slots)
    rig.end(job)
    assert rig.written(request) == 6


def test_blocks_on_their_way_into_slots_are_not_fetched_a_second_time() -> None:
    rig = Rig()
    request = make_request("r", 65)
    placed = rig.place(request.block_hashes[1:2], first=1)
    (job,) = rig.find(request)
    assert [each.slots.count(SCRATCH) for each in job.objects] == [1, 0]
    rig.end(job)
    assert rig.written(request) == 1
    rig.index.acknowledge(placed)
    assert rig.written(request) == 4


def test_two_requests_of_one_prefix_fetch_it_once() -> None:
    rig = Rig()
    first, second = make_request("a", 65), make_request("b", 97)
    (job,) = rig.find(first)
    (rest,) = rig.find(second)
    assert [each.name for each in rest.objects] == [second.block_hashes[5]]
    rig.end(rest)
    assert rig.tier.is_pending(second), "it needs what the first one's job brings"
    rig.end(job)
    assert not rig.tier.is_pending(second)
    assert rig.written(second) == 6


def test_what_failed_is_not_tried_again_for_this_request_but_for_others() -> None:
    rig = Rig()
    request = make_request("r", 65)
    (job,) = rig.find(request)
    rig.end(job, [True, False])
    assert not rig.tier.is_pending(request)
    rig.tier.admitted("r")
    rig.arrive(request)  # preempted
    assert rig.looks.asked == []
    assert not rig.tier.is_pending(request)
    (again,) = rig.find(make_request("other", 65))
    assert [each.name for each in again.objects] == [request.block_hashes[3]]


def test_after_a_preemption_what_the_store_has_is_looked_for_again() -> None:
    rig = Rig()
    request = make_request("r", 65)
    (job,) = rig.find(request)
    rig.end(job)
    rig.tier.admitted("r")
    rig.index.reset()
    assert len(rig.find(request)) == 1


def test_the_answer_is_pending_until_the_deadline_and_not_beyond() -> None:
    rig = Rig(fetch_deadline_s=2.0)
    request = make_request("r", 65)
    rig.arrive(request)
    for seconds, waits in ((0.0, True), (1.9, True), (0.2, False), (100.0, False)):
        rig.clock.now_s += seconds
        assert rig.tier.is_pending(request) is waits


def test_the_deadline_counts_from_the_arrival_however_far_the_fetch_has_come() -> None:
    rig = Rig(fetch_deadline_s=2.0)
    request = make_request("r", 65)
    rig.arrive(request)
    rig.clock.now_s += 1.5
    rig.looks.answer(True)
    (job,) = rig.fetches()
    rig.clock.now_s += 0.4
    assert rig.tier.is_pending(request)
    rig.clock.now_s += 0.1
    assert not rig.tier.is_pending(request)
    assert rig.fetches() == []
    assert rig.tier.quarantined_slots == 4
    rig.end(job)
    assert rig.tier.quarantined_slots == 0


def test_what_comes_late_is_kept_if_nobody_has_it() -> None:
    rig = Rig(fetch_deadline_s=2.0)
    request = make_request("r", 65)
    (job,) = rig.find(request)
    rig.clock.now_s += 2.0
    rig.fetches()
    rig.end(job)
    assert rig.written(request) == 4
    assert rig.tier.is_idle


def test_what_comes_late_is_dropped_if_it_was_captured_meanwhile() -> None:
    rig = Rig(fetch_deadline_s=2.0)
    request = make_request("r", 65)
    (job,) = rig.find(request)
    rig.clock.now_s += 2.0
    rig.fetches()
    captured = rig.write(request.block_hashes[:3])
    under_way = rig.place(request.block_hashes[3:], first=3)
    assert not set(captured.slots + under_way.slots) & {s for o in job.objects for s in o.slots}
    rig.end(job)
    rig.index.acknowledge(under_way)
    assert rig.index.locate(0, request.block_hashes)[0] == captured.slots + under_way.slots
    assert rig.index.free_count == rig.index.slot_count - 4


def test_quarantined_slots_are_nobodys_until_the_call_comes_back() -> None:
    rig = Rig(slots=4, fetch_deadline_s=2.0)
    request = make_request("r", 65)
    (job,) = rig.find(request)
    rig.clock.now_s += 2.0
    rig.fetches()
    other = make_request("other", 65, family=2)
    with pytest.raises(AssertionError):
        rig.place(other.block_hashes)
    rig.end(job, False)
    assert len(rig.place(other.block_hashes)) == 4


def test_nobody_waits_for_what_hangs() -> None:
    """An abandoned job may bring its prefix yet; whoever comes later goes on without it."""
    rig = Rig(fetch_deadline_s=2.0)
    (job,) = rig.find(make_request("r", 65))
    rig.clock.now_s += 2.0
    rig.fetches()
    late = make_request("late", 97)
    assert rig.find(late) == []
    assert not rig.tier.is_pending(late)
    rig.end(job, False)
    (again,) = rig.find(make_request("later", 65))
    rig.end(again)


def test_when_all_threads_hang_nobody_waits() -> None:
    rig = Rig(store_threads=2, fetch_deadline_s=2.0)
    rig.find(make_request("r", 65))
    rig.clock.now_s += 2.0
    rig.fetches()
    other = make_request("other", 65, family=2)
    assert rig.find(other) == []
    assert not rig.tier.is_pending(other)


def test_while_a_look_is_overdue_nobody_waits_behind_it() -> None:
    rig = Rig(fetch_deadline_s=2.0)
    rig.arrive(make_request("r", 65))
    rig.clock.now_s += 2.0
    late = make_request("late", 65)
    rig.arrive(late)
    assert len(rig.looks.asked) == 1
    assert not rig.tier.is_pending(late)
    rig.looks.answer(False)
    well = make_request("well", 65)
    rig.arrive(well)
    assert rig.tier.is_pending(well)


def test_no_more_requests_wait_than_may() -> None:
    rig = Rig(max_pending=2)
    requests = [make_request(name, 65, family=at) for at, name in enumerate("abc")]
    for request in requests:
        rig.arrive(request)
    assert [rig.tier.is_pending(request) for request in requests] == [True, True, False]
    assert [rig.tier.is_pending(request) for request in requests] == [True, True, False]
    rig.tier.admitted("a")
    assert rig.tier.is_pending(requests[2])


@pytest.mark.parametrize("end", ["admitted", "finished", "past its deadline", "answered"])
def test_whoever_waits_no_more_makes_room_for_others(end: str) -> None:
    rig = Rig(max_pending=1, fetch_deadline_s=2.0)
    first, second = make_request("a", 65), make_request("b", 65, family=2)
    rig.arrive(first)
    assert rig.tier.is_pending(first)
    if end == "past its deadline":
        rig.looks.answer(False)
        rig.clock.now_s += 2.0
    rig.arrive(second)
    match end:
        case "admitted":
            rig.tier.admitted("a")
        case "finished":
            rig.tier.finished(first)
        case "answered":
            rig.looks.answer(False)
    assert rig.tier.is_pending(second), "whether or not the first one was asked for again"


def test_fetches_and_what_they_hold_keep_to_their_share_oldest_first() -> None:
    rig = Rig(slots=16, fetch_share=0.5)
    first, second = make_request("a", 145), make_request("b", 145, family=2)
    jobs = rig.find(first)
    assert sum(len(each.slots) for job in jobs for each in job.objects) == 8, "from its head"
    assert [o.name for job in jobs for o in job.objects] == first.block_hashes[1:8:2]
    assert rig.find(second) == []
    assert rig.tier.is_pending(second)
    for job in jobs:
        rig.end(job)
    assert rig.fetches() == [], "what waits for its request counts as well"
    rig.tier.admitted("a")
    assert sum(len(job.objects) for job in rig.fetches()) == 4


def test_an_object_that_never_fits_is_not_waited_for() -> None:
    rig = Rig(slots=16, object_blocks=8, fetch_share=0.25)
    request = make_request("r", 129)
    assert rig.find(request) == []
    assert not rig.tier.is_pending(request)


def test_a_long_prefix_comes_in_several_jobs() -> None:
    rig = Rig()
    request = make_request("r", 18 * 16 + 1)
    jobs = rig.find(request)
    assert [len(job.objects) for job in jobs] == [MOST_OBJECTS, MOST_OBJECTS, 1]
    for job in jobs[1:]:
        rig.end(job)
    assert rig.written(request) == 0
    assert rig.tier.is_pending(request)
    rig.end(jobs[0])
    assert rig.written(request) == 18
    assert not rig.tier.is_pending(request)


def test_a_gap_in_what_came_ends_the_promise() -> None:
    rig = Rig()
    request = make_request("r", 97)
    (job,) = rig.find(request)
    rig.end(job, [True, False, True])
    assert rig.written(request) == 2
    assert not rig.tier.is_pending(request)
    rig.tier.finished(request)
    assert rig.tier.is_idle


@pytest.mark.parametrize(("found", "comes"), [(1, False), (2, True)])
def test_short_finds_are_not_fetched(found: int, comes: bool) -> None:
    rig = Rig(min_fetch_tokens=64)
    request = make_request("r", 97)
    jobs = rig.find(request, [number < found for number in range(3)])
    assert bool(jobs) is comes
    assert rig.tier.is_pending(request) is comes


def test_what_could_not_be_long_enough_is_not_looked_for() -> None:
    rig = Rig(min_fetch_tokens=128)
    rig.arrive(make_request("r", 97))
    assert rig.looks.asked == []


def test_a_look_that_failed_finds_nothing() -> None:
    rig = Rig()
    request = make_request("r", 65)
    assert rig.find(request, []) == []
    assert not rig.tier.is_pending(request)


def test_the_first_request_is_looked_for_before_the_ranks_have_told_their_slots() -> None:
    rig = Rig(slots=0)
    request = make_request("r", 65)
    assert rig.find(request) == []
    assert rig.tier.is_pending(request)
    rig.index.resize(8)
    (job,) = rig.fetches()
    rig.end(job)
    assert rig.written(request) == 4


def test_an_abort_while_it_is_fetched_leaves_what_came_to_others() -> None:
    rig = Rig()
    request = make_request("r", 65)
    (job,) = rig.find(request)
    rig.tier.finished(request)
    assert not rig.tier.is_idle
    rig.end(job)
    assert rig.tier.is_idle
    assert rig.index.pinned_count == 0
    assert rig.written(request) == 4


def test_an_abort_while_something_is_held_lets_it_go() -> None:
    rig = Rig()
    request = make_request("r", 65)
    (job,) = rig.find(request)
    rig.end(job)
    rig.tier.finished(request)
    assert rig.index.pinned_count == 0
    assert rig.tier.is_idle


def test_an_answer_for_an_ended_request_is_not_the_next_ones_of_its_id() -> None:
    rig = Rig()
    first, second = make_request("r", 65), make_request("r", 97, family=2)
    rig.arrive(first)
    rig.tier.finished(first)
    rig.arrive(second)
    rig.looks.answer(True, 0)
    assert rig.fetches() == []
    rig.looks.answer(False, 0)
    assert rig.fetches() == []
    assert not rig.tier.is_pending(second)


def test_the_end_of_a_job_is_not_credited_to_the_next_request_of_its_id() -> None:
    rig = Rig()
    first, second = make_request("r", 65), make_request("r", 65, family=2)
    (job,) = rig.find(first)
    rig.tier.finished(first)
    (own,) = rig.find(second)
    rig.end(job, [True, False])
    assert rig.index.pinned_count == 0
    assert rig.tier.is_pending(second)
    rig.end(own)
    rig.tier.admitted("r")
    rig.index.reset()
    rig.arrive(second)  # preempted: no fetch of its own has failed
    assert len(rig.looks.asked) == 1


def test_an_id_that_arrives_again_before_its_end_is_told_keeps_its_own_look() -> None:
    rig = Rig()
    first, second = make_request("r", 65), make_request("r", 65, family=2)
    rig.arrive(first)
    rig.tier.finished(first)
    rig.arrive(second)
    rig.tier.finished(first)
    assert rig.tier.is_pending(second)


def test_a_reset_while_fetching_promises_nothing_from_before() -> None:
    rig = Rig()
    request, held = make_request("r", 65), make_request("held", 65, family=2)
    (came,) = rig.find(held)
    rig.end(came)
    (job,) = rig.find(request)
    looking = make_request("looking", 65, family=3)
    rig.arrive(looking)
    rig.tier.reset()
    rig.index.reset()
    rig.looks.answer(True)
    for each in (request, held, looking):
        assert not rig.tier.is_pending(each)
    assert rig.fetches() == []
    rig.end(job)
    assert rig.written(request) == 0
    for each in (request, held, looking):
        rig.tier.finished(each)
    assert rig.tier.is_idle
    assert rig.index.free_count == rig.index.slot_count


def test_after_a_reset_nobody_waits_for_a_job_from_before() -> None:
    rig = Rig()
    (old,) = rig.find(make_request("r", 65))
    rig.tier.reset()
    rig.index.reset()
    again = make_request("again", 65)
    (new,) = rig.find(again)
    assert new.keys != old.keys
    rig.end(old)
    assert rig.written(again) == 0
    rig.end(new)
    assert rig.written(again) == 4
    assert not rig.tier.is_pending(again)


def test_numbers_of_jobs_never_repeat() -> None:
    rig = Rig()
    numbers = []
    for at in range(5):
        request = make_request("r", 65, family=at)
        (job,) = rig.find(request)
        numbers.append(job.number)
        rig.end(job)
        rig.tier.finished(request)
        pushed = make_request("p", 64, family=100 + at)
        rig.write(pushed.block_hashes)
        rig.tier.went_on(pushed, 64)
        for push in rig.pushes():
            numbers.append(push.number)
            rig.end(push)
        rig.tier.reset()
    assert len(numbers) == len(set(numbers)) == 10


@settings(deadline=None)
@given(host=st.sets(st.integers(0, 5)), stored=st.sets(st.integers(0, 5)))
def test_a_prefix_is_found_as_far_as_host_cache_and_store_have_it_together(
    host: set[int], stored: set[int]
) -> None:
    """Each has some of its six runs: the host cache lost others, the store never got them."""
    rig = Rig()
    request = make_request("r", 193)
    hashes = request.block_hashes
    for run in host:
        rig.write(hashes[2 * run : 2 * run + 2], first=2 * run)
    there = {rig.keys.current.key(0, 0, hashes[2 * run + 1]) for run in stored}
    rig.arrive(request)
    was_asked = bool(rig.looks.asked)
    assert was_asked == (len(host) < 6)
    for _, keys in rig.looks.asked[:]:
        rig.looks.answer([key in there for key in keys])
    for job in rig.fetches_without_more():
        rig.end(job)
    reach = next(run for run in range(7) if run not in host | stored)
    assert rig.written(request) == 2 * reach
    assert rig.tier.admitted("r").known_tokens == (32 * reach if was_asked else 0)


def test_a_prefix_behind_a_gap_counts_where_short_ones_are_not_worth_a_fetch() -> None:
    rig = Rig(min_fetch_tokens=64)
    request = make_request("r", 140)
    hashes = request.block_hashes
    rig.write(hashes[:2])
    rig.write(hashes[4:6], first=4)
    (job,) = rig.find(request, [True, False, False])
    assert [each.name for each in job.objects] == [hashes[3]]
    rig.end(job)
    assert rig.written(request) == 6


def test_a_fetch_does_not_push_out_the_last_run_it_reads() -> None:
    """The prompt ends with a block: the run that holds its last boundary goes up to that."""
    rig = Rig(slots=8)
    request, other = make_request("r", 96), make_request("o", 65, family=2)
    rig.write(request.block_hashes[4:6], first=4)
    rig.write(request.block_hashes[:2])
    rig.write(other.block_hashes)
    (job,) = rig.find(request)
    assert [each.name for each in job.objects] == [request.block_hashes[3]]
    rig.end(job)
    assert rig.written(request) == 6


def test_a_fetch_does_not_push_out_the_head_it_goes_on_from() -> None:
    """The head was used longest ago, and the host cache is full."""
    rig = Rig(slots=8)
    request, other = make_request("r", 97), make_request("o", 65, family=2)
    rig.write(request.block_hashes[:4])
    rig.write(other.block_hashes)
    (job,) = rig.find(request)
    rig.end(job)
    assert rig.written(request) == 6
    assert rig.written(other) == 2


def test_a_fetch_does_not_push_out_the_window_it_goes_on_from() -> None:
    full = GROUPS[0]
    window = replace(full, index=1, kind=GroupKind.SLIDING_WINDOW, window_tokens=33)
    rig = Rig(slots=12, groups=(full, window))
    request, other = make_request("r", 97), make_request("o", 129, family=2)
    hashes = request.block_hashes
    rig.write(hashes[4:6], first=4, group=1)
    rig.write(hashes[:2])
    rig.write(other.block_hashes)
    jobs = rig.find(request)
    for job in jobs:
        rig.end(job)
    assert rig.written(request) == 6
    assert rig.index.has_written(1, hashes[4:6])
