"""Objects of windows and states: pushed where they are kept, fetched where all groups can resume.

Blocks are 16 tokens, runs of full attention two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from moonstep.groups import Group, GroupKind
from moonstep.scheduler.lookup import JointLookup
from moonstep.scheduler.objects import ObjectPlan
from moonstep.wire import Job
from tests.scheduler.stock import BLOCK_BYTES, BLOCK_TOKENS, make_request
from tests.store_tier.rig import Rig

FULL = Group(0, GroupKind.FULL_ATTENTION, BLOCK_TOKENS, BLOCK_BYTES, ("full",))
WINDOW = Group(1, GroupKind.SLIDING_WINDOW, BLOCK_TOKENS, BLOCK_BYTES, ("w",), window_tokens=20)
STATE = Group(1, GroupKind.RECURRENT_STATE, BLOCK_TOKENS, BLOCK_BYTES, ("s",))
BOTH = [(FULL, WINDOW), (FULL, STATE)]


def moved(jobs: Sequence[Job]) -> list[tuple[int, int, bytes]]:
    """Group, number of blocks and name of each object that the jobs move."""
    return [(o.group, len(o.slots), o.name) for job in jobs for o in job.objects]


def hit(rig: Rig, groups: Sequence[Group], tokens: int) -> int:
    lookup = JointLookup(groups, BLOCK_TOKENS)
    return lookup.hit_tokens(rig.index, make_request("again", tokens), 0)


@pytest.mark.parametrize("groups", BOTH)
def test_what_is_kept_at_a_boundary_is_pushed_once_it_is_there(groups: Sequence[Group]) -> None:
    rig = Rig(groups=groups)
    request = make_request("r", 70)
    names = request.block_hashes
    rig.tier.kept(request, 64)
    assert rig.pushes() == []
    if groups[1] is WINDOW:
        rig.write(names[2:3], first=2, group=1)
        assert rig.pushes() == []
    rig.write(names[3:4], first=3, group=1)
    count = 2 if groups[1] is WINDOW else 1
    jobs = rig.pushes()
    assert moved(jobs) == [(1, count, names[3])]
    rig.end(jobs[0])
    rig.tier.kept(request, 64)
    assert rig.pushes() == []


def test_a_boundary_inside_a_run_is_pushed_with_the_runs_tail() -> None:
    """Or not at all: from a window alone nobody could go on."""
    rig = Rig(groups=(FULL, WINDOW))
    request = make_request("r", 70)
    names = request.block_hashes
    rig.write(names, group=1)
    rig.tier.kept(request, 48)
    assert rig.pushes() == []
    rig.write(names[:3])
    assert moved(rig.pushes()) == [(0, 1, names[2]), (1, 2, names[2])]


def test_a_part_of_what_a_boundary_needs_is_never_pushed() -> None:
    """Of the window its proof is not hashed yet: from the state alone nobody could go on."""
    drafted = replace(WINDOW, index=2, draft=True)
    rig = Rig(groups=(FULL, STATE, drafted))
    request = make_request("r", 70)
    rig.write(request.block_hashes, group=1)
    rig.write(request.block_hashes, group=2)
    rig.tier.kept(request, 64)
    assert rig.pushes() == []
    longer = make_request("r", 80)
    request.block_hashes.extend(longer.block_hashes[4:])
    rig.write(request.block_hashes[4:], first=4, group=2)
    (job,) = rig.pushes()
    assert moved([job]) == [(1, 1, request.block_hashes[3]), (2, 3, request.block_hashes[4])]


def test_a_window_waits_for_a_tail_whose_proof_is_not_hashed_yet() -> None:
    rig = Rig(groups=(replace(FULL, draft=True), WINDOW))
    request = make_request("r", 70)
    names = request.block_hashes
    for group in (0, 1):
        rig.write(names, group=group)
    rig.tier.kept(request, 64)
    assert rig.pushes() == []
    names.extend(make_request("r", 80).block_hashes[4:])
    rig.write(names[4:], first=4)
    assert moved(rig.pushes()) == [(0, 1, names[4]), (1, 2, names[3])]


def test_the_objects_of_a_boundary_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(groups=(FULL, WINDOW))
    request = make_request("r", 70)
    rig.tier.kept(request, 64)
    asked: list[int] = []
    at = ObjectPlan.at
    monkeypatch.setattr(ObjectPlan, "at", lambda self, *of: (asked.append(1), at(self, *of))[1])
    for _ in range(5):
        assert rig.pushes() == []
    assert len(asked) == 1
    rig.write(request.block_hashes, group=1)
    assert len(rig.pushes()) == 1


def test_a_boundary_of_which_something_never_comes_is_forgotten() -> None:
    rig = Rig(groups=(FULL, WINDOW))
    request = make_request("r", 70)
    rig.tier.kept(request, 64)
    for _ in range(100):
        assert rig.pushes() == []
    rig.write(request.block_hashes, group=1)
    assert rig.pushes() == []


@pytest.mark.parametrize("groups", BOTH)
def test_a_fetch_brings_all_that_the_highest_joint_boundary_needs(groups: Sequence[Group]) -> None:
    """The store has full attention up to 128 tokens, and the other group at 32 and 96 only."""
    rig = Rig(groups=groups)
    request = make_request("r", 200)
    names = request.block_hashes
    rig.arrive(request)
    _, keys = rig.looks.asked[0]
    of = rig.keys.current
    there = {of.key(0, 0, names[at]) for at in (1, 3, 5, 7)}
    there |= {of.key(1, 0, names[at]) for at in (1, 5)}
    rig.looks.answer([key in there for key in keys])
    jobs = rig.fetches_without_more()
    dense = [(0, 2, names[at]) for at in (1, 3, 5)]
    sparse = (1, 2 if groups[1] is WINDOW else 1, names[5])
    assert moved(jobs) == [*dense, sparse]
    for job in jobs:
        rig.end(job)
    assert hit(rig, groups, 200) == 96


@pytest.mark.parametrize("groups", BOTH)
def test_what_the_host_cache_has_is_not_fetched(groups: Sequence[Group]) -> None:
    rig = Rig(groups=groups)
    request = make_request("r", 70)
    names = request.block_hashes
    rig.write(names[:4])
    jobs = rig.find(request)
    assert moved(jobs) == [(1, 2 if groups[1] is WINDOW else 1, names[3])]
    rig.end(jobs[0])
    assert hit(rig, groups, 70) == 64


def test_a_boundary_is_found_behind_a_gap_that_the_store_fills() -> None:
    """The store never got the run behind the gap, which the host cache still has."""
    rig = Rig(groups=(FULL, STATE))
    request = make_request("r", 140)
    names = request.block_hashes
    rig.write(names[:2])
    rig.write(names[4:6], first=4)
    rig.arrive(request)
    ((_, keys),) = rig.looks.asked
    of = rig.keys.current
    there = {of.key(0, 0, names[3]), of.key(1, 0, names[5])}
    rig.looks.answer([key in there for key in keys])
    jobs = rig.fetches_without_more()
    assert moved(jobs) == [(0, 2, names[3]), (1, 1, names[5])]
    for job in jobs:
        rig.end(job)
    assert hit(rig, (FULL, STATE), 140) == 96


def test_with_too_little_room_a_lower_boundary_is_fetched_whole() -> None:
    """At 128 tokens it would take eight blocks and a state, at 64 four and one."""
    rig = Rig(groups=(FULL, STATE), slots=6)
    request = make_request("r", 140)
    jobs = rig.find(request)
    names = request.block_hashes
    assert moved(jobs) == [(0, 2, names[1]), (0, 2, names[3]), (1, 1, names[3])]


def test_without_a_boundary_that_all_groups_have_nothing_is_fetched() -> None:
    rig = Rig(groups=(FULL, STATE))
    request = make_request("r", 140)
    rig.arrive(request)
    _, keys = rig.looks.asked[0]
    rig.looks.answer([key.split("/")[2].startswith("0.") for key in keys])
    assert rig.fetches_without_more() == []
    assert not rig.tier.is_pending(request)


def test_a_window_that_does_not_come_costs_the_hit_and_no_more() -> None:
    rig = Rig(groups=(FULL, WINDOW))
    request = make_request("r", 70)
    jobs = rig.find(request)
    for job in jobs:
        rig.end(job, [each.group == 0 for each in job.objects])
    assert hit(rig, (FULL, WINDOW), 70) == 0
    rig.arrive(request)
    assert not rig.looks.asked, "what failed is not asked for again by the same request"
    assert rig.index.planned_count == 0


def test_one_name_in_two_groups_is_two_objects() -> None:
    """A fetch under way for one group does not stand for the other's."""
    rig = Rig(groups=(FULL, STATE))
    first, second = make_request("a", 40), make_request("b", 40)
    rig.write(first.block_hashes[:2])
    jobs = rig.find(first)
    assert [o.group for job in jobs for o in job.objects] == [1]
    rig.index.reset()
    rig.arrive(second)
    rig.looks.answer(True, -1)
    later = rig.fetches()
    assert [o.group for job in later for o in job.objects] == [0]
    for job in (*jobs, *later):
        rig.end(job)
