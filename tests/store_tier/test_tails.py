"""Where a prefix ends inside a run: what is stored of it there is what is looked for, and no less.

Each test plays both ends, with tiers of their own over one store that is a set of keys. The blocks
of an engine that writes are in its host cache; the host cache of one that reads is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonstep.config import Push, Role
from moonstep.engine import Request
from moonstep.groups import Group, GroupKind, reachable_tokens, replay_boundaries
from moonstep.keys import Key
from moonstep.scheduler.boundaries import Boundaries
from moonstep.scheduler.lookup import JointLookup
from moonstep.scheduler.objects import ObjectPlan, object_shape, objects_of, tail_of
from tests.scheduler.stock import BLOCK_BYTES, BLOCK_TOKENS, GROUPS, make_request
from tests.store_tier.rig import Rig

FULL = GROUPS[0]
COARSE = Group(1, GroupKind.FULL_ATTENTION, 32, BLOCK_BYTES, ("c",), hash_tokens=16)
WINDOW = Group(1, GroupKind.SLIDING_WINDOW, BLOCK_TOKENS, BLOCK_BYTES, ("w",), window_tokens=20)
STATE = Group(1, GroupKind.RECURRENT_STATE, BLOCK_TOKENS, BLOCK_BYTES, ("s",))
SETS = [(FULL,), (FULL, COARSE), (FULL, WINDOW), (FULL, STATE), (WINDOW,)]
WINDOW_ALONE = Group(0, GroupKind.SLIDING_WINDOW, 16, BLOCK_BYTES, ("w",), window_tokens=20)


class Store:
    """What is in the store, by key: tiers push into it and fetch from it at once."""

    def __init__(
        self, groups: Sequence[Group], object_blocks: int = 4, min_fetch_tokens: int = 1
    ) -> None:
        self.groups = [WINDOW_ALONE] if groups == (WINDOW,) else list(groups)
        self.keys: set[Key] = set()
        self.blocks_of: dict[Key, int] = {}
        self.absent: list[Key] = []
        """What was fetched although it was not there."""
        self._settings = {"object_blocks": object_blocks, "min_fetch_tokens": min_fetch_tokens}

    def rig(self, **settings: object) -> Rig:
        return Rig(slots=400, groups=self.groups, **{**self._settings, **settings})  # type: ignore[arg-type]

    def write(self, request: Request, rig: Rig | None = None) -> None:
        """An engine computes the request's prompt and ends it after what else it has."""
        rig = rig or self.rig()
        boundaries = Boundaries.of(self.groups, 0, rig.tier._objects.unit_tokens)
        for group in self.groups:
            names = request.block_hashes[group.units - 1 :: group.units]
            placed = rig.write(names, group=group.index)
            rig.tier.captured(placed.columns, dict.fromkeys(placed.columns.lives, request))
        for boundary in boundaries.of_request(request):
            if any(group.kind is not GroupKind.FULL_ATTENTION for group in self.groups):
                rig.tier.kept(request, boundary)
        request.num_computed_tokens = request.num_tokens
        rig.tier.finished(request)
        self.take(rig)

    def take(self, rig: Rig) -> None:
        """Everything that waits is pushed."""
        while jobs := rig.pushes():
            for job in jobs:
                for each in job.objects:
                    key = rig.keys.current.key(each.group, 0, each.name)
                    assert self.blocks_of.setdefault(key, len(each.slots)) == len(each.slots)
                    self.keys.add(key)
                rig.end(job)

    def read(self, request: Request, rig: Rig | None = None) -> int:
        """An engine with an empty host cache is asked: the tokens that it can promise."""
        rig = rig or self.rig()
        rig.arrive(request)
        looks = 0
        while rig.looks.asked:
            ((_, keys),) = rig.looks.asked
            rig.looks.answer([key in self.keys for key in keys])
            rig.tier.is_pending(request)
            looks += 1
        assert looks <= 2
        while jobs := rig.fetches():
            for job in jobs:
                keys = [rig.keys.current.key(o.group, 0, o.name) for o in job.objects]
                sizes = [len(each.slots) for each in job.objects]
                assert [self.blocks_of[key] for key in keys] == sizes, "known beforehand"
                self.absent += [key for key in keys if key not in self.keys]
                rig.end(job, [key in self.keys for key in keys])
        assert not rig.tier.is_pending(request)
        align = rig.tier._objects.align_tokens
        hit = JointLookup(self.groups, align).hit_tokens(rig.index, request, 0)
        assert rig.tier.admitted(request.request_id).known_tokens == hit
        return hit


@settings(deadline=None)
@given(
    groups=st.sampled_from(SETS),
    tokens=st.integers(33, 300),
    more=st.integers(0, 90),
    object_blocks=st.integers(1, 6),
)
def test_a_prompt_comes_back_as_if_the_host_cache_had_it(
    groups: Sequence[Group], tokens: int, more: int, object_blocks: int
) -> None:
    """Sent again up to its last token, extended up to its end: where the engine could resume."""
    store = Store(groups, object_blocks)
    store.write(make_request("w", tokens))
    resend, extension = replay_boundaries(store.groups, tokens)
    assert store.read(make_request("again", tokens)) == resend
    if more:
        asked = tokens + more
        wanted = min(extension, reachable_tokens(store.groups, asked, asked - 1))
        assert store.read(make_request("more", asked)) == wanted


@settings(deadline=None)
@given(
    groups=st.sampled_from([(FULL,), (FULL, COARSE)]),
    tokens=st.integers(33, 300),
    more=st.integers(0, 90),
    object_blocks=st.integers(1, 6),
)
def test_what_whole_objects_hold_is_not_looked_for_in_tails(
    groups: Sequence[Group], tokens: int, more: int, object_blocks: int
) -> None:
    """Nothing that the store has not is fetched, also where runs of two groups end apart."""
    store = Store(groups, object_blocks)
    rig, request = store.rig(), make_request("w", tokens)
    store.write(request, rig)
    whole = {
        rig.keys.current.key(shape.group.index, 0, found.name)
        for shape in rig.tier._objects.dense
        for found in objects_of(shape, request.block_hashes, 0, len(request.block_hashes))
    }
    store.keys &= whole
    store.read(make_request("again", tokens + more))
    assert store.absent == []


def test_an_idle_engine_steps_for_what_was_captured_after_a_request_ended() -> None:
    """Its last block may be captured in the step that flushes it: nobody else brings a step."""
    store = Store((FULL,))
    rig, request = store.rig(), make_request("w", 100)
    request.num_computed_tokens = request.num_tokens
    rig.tier.finished(request)
    assert not rig.pushes()
    assert not rig.tier.has_push_work()
    placed = rig.write(request.block_hashes)
    rig.tier.captured(placed.columns, {})
    assert rig.tier.has_push_work()
    store.take(rig)
    assert len(store.keys) == 1
    assert not rig.tier.has_push_work()


@settings(deadline=None)
@given(
    tokens=st.integers(33, 200),
    output=st.integers(1, 100),
    more=st.integers(1, 100),
    object_blocks=st.integers(1, 6),
)
def test_an_answer_is_gone_on_from_its_end(
    tokens: int, output: int, more: int, object_blocks: int
) -> None:
    store = Store((FULL,), object_blocks)
    request = make_request("w", tokens)
    request.append_output_token_ids([1000 + tokens + at for at in range(output)])
    store.write(request)
    next_turn = make_request("next", tokens + output + more)
    assert next_turn.block_hashes[: len(request.block_hashes)] == request.block_hashes
    assert store.read(next_turn) == (tokens + output) // BLOCK_TOKENS * BLOCK_TOKENS


@settings(deadline=None)
@given(
    groups=st.sampled_from(SETS),
    tokens=st.integers(33, 300),
    object_blocks=st.integers(1, 6),
    min_fetch_tokens=st.sampled_from([1, 64, 128, 200]),
)
def test_nothing_is_stored_that_nobody_could_fetch(
    groups: Sequence[Group], tokens: int, object_blocks: int, min_fetch_tokens: int
) -> None:
    """Each tail, window and state is read by the same prompt, one token longer, or by one that
    parts there; runs of full attention are shared by all, and each by someone longer."""
    store = Store(groups, object_blocks, min_fetch_tokens)
    store.write(make_request("w", tokens))
    read: set[Key] = set()
    for asked in (tokens, tokens + 1, *range(17, tokens, 16)):
        rig = store.rig()
        request = make_request("r", asked)
        rig.arrive(request)
        while rig.looks.asked:
            ((_, keys),) = rig.looks.asked
            rig.looks.answer([key in store.keys for key in keys])
            rig.tier.is_pending(request)
        while jobs := rig.fetches():
            for job in jobs:
                read |= {rig.keys.current.key(o.group, 0, o.name) for o in job.objects}
                rig.end(job)
    shapes = {shape.group.index: shape for shape in store.rig().tier._objects.dense}
    for key in store.keys - read:
        group = int(key.split("/")[2].split(".")[0])
        assert group in shapes, "a window or a state that nobody reads"
        assert store.blocks_of[key] == shapes[group].blocks, "a tail that nobody reads"


@settings(deadline=None)
@given(
    groups=st.sampled_from(SETS), num_tokens=st.integers(1, 400), hashed_blocks=st.integers(0, 30)
)
@pytest.mark.parametrize("draft", [False, True])
def test_ends_are_where_the_groups_say(
    groups: Sequence[Group], num_tokens: int, hashed_blocks: int, draft: bool
) -> None:
    """The plan's arithmetic against the rule of ``groups``."""
    if draft and groups[0].kind is GroupKind.FULL_ATTENTION:
        drafting = Group(0, FULL.kind, 16, BLOCK_BYTES, ("d",), draft=True)
        groups = (drafting, *groups[1:])
    plan = ObjectPlan.of(groups, 64)
    hashed = min(hashed_blocks * 16, num_tokens)
    reach = plan.top(num_tokens, hashed)
    assert reach.resume_tokens == reachable_tokens(groups, hashed, num_tokens - 1)
    assert reach.end_tokens == reachable_tokens(groups, hashed, num_tokens)


def test_a_tail_is_one_more_object_with_its_parent() -> None:
    shape = object_shape(FULL, 64)
    hashes = make_request("r", 112).block_hashes
    tail = tail_of(shape, hashes, 112)
    assert tail is not None
    assert (tail.number, tail.first, list(tail.names)) == (1, 4, hashes[4:7])
    assert tail.parent == hashes[3]
    assert tail_of(shape, hashes, 128) is None, "not hashed so far"
    assert tail_of(shape, hashes, 64) is None, "a run ends there"


def test_few_keys_are_asked_for() -> None:
    """One more than there are runs; then, if the prompt is new, the ends in one run."""
    store = Store((FULL,), object_blocks=16, min_fetch_tokens=256)
    store.write(make_request("w", 600))
    rig = store.rig()
    rig.arrive(make_request("r", 1000))
    ((_, keys),) = rig.looks.asked
    assert len(keys) == 3 + 1
    rig.looks.answer([key in store.keys for key in keys])
    rig.plan()
    ((_, keys),) = rig.looks.asked
    assert len(keys) == 15
    assert sum(key in store.keys for key in keys) == 1


def test_a_prompt_of_which_nothing_is_there_is_asked_for_once() -> None:
    store = Store((FULL,), object_blocks=16, min_fetch_tokens=256)
    rig = store.rig()
    request = make_request("r", 1000)
    rig.arrive(request)
    rig.looks.answer(False)
    assert not rig.tier.is_pending(request)
    assert not rig.looks.asked


def test_a_second_look_that_is_late_or_fails_costs_the_tail_at_most() -> None:
    for failed in (True, False):
        store = Store((FULL,))
        store.write(make_request("w", 150))
        rig = store.rig(fetch_deadline_s=2.0)
        request = make_request("r", 200)
        rig.arrive(request)
        ((_, keys),) = rig.looks.asked
        rig.looks.answer([key in store.keys for key in keys])
        assert rig.tier.is_pending(request)
        if failed:
            rig.looks.answer([])
            (job,) = rig.fetches()
            rig.end(job)
            assert rig.written(request) == 8
            continue
        rig.clock.now_s += 2.0
        assert not rig.tier.is_pending(request)
        rig.looks.answer(True)
        rig.plan()
        rig.tier.finished(request)


def test_a_run_that_was_completed_takes_the_tails_place() -> None:
    """The tail is not read any more by whoever shares the whole run, and blocks are not twice."""
    store = Store((FULL,))
    store.write(make_request("w", 113))
    store.write(make_request("longer", 200))
    rig = store.rig()
    assert store.read(make_request("r", 200), rig) == 192
    assert rig.tier.fetches.counts.fetched_objects == 3
    assert rig.index.written_count == 12


def test_blocks_that_another_fetch_brings_are_waited_for() -> None:
    """Two tails in one run have their first blocks in common."""
    store = Store((FULL,))
    store.write(make_request("a", 100))
    store.write(make_request("b", 113))
    rig = store.rig()
    first, second = make_request("r1", 100), make_request("r2", 113)
    for request in (first, second):
        rig.arrive(request)
        rig.looks.answer(True)
    jobs = rig.fetches()
    assert [len(each.slots) for job in jobs for each in job.objects] == [4, 2, 3]
    for job in reversed(jobs):
        rig.end(job)
    assert not rig.tier.is_pending(second)
    assert rig.written(second) == 7


@pytest.mark.parametrize("tokens", [112, 113])
@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, [4, 3]),
        ({"push": Push.REUSE}, []),
        ({"push": Push.DECODED}, []),
        ({"role": Role.CONSUMER}, []),
        ({"min_fetch_tokens": 128}, [4]),
    ],
)
def test_when_a_prompts_tail_is_pushed(
    settings: dict[str, object], wanted: list[int], tokens: int
) -> None:
    """As soon as it has been captured, and up to the prompt's end: its answer may take long."""
    rig = Store((FULL,)).rig(**settings)
    request = make_request("r", tokens)
    placed = rig.write(request.block_hashes)
    rig.tier.captured(placed.columns, dict.fromkeys(placed.columns.lives, request))
    assert [len(o.slots) for job in rig.pushes() for o in job.objects] == wanted


@pytest.mark.parametrize("tokens", [112, 113])
def test_a_prompt_that_is_used_again_is_pushed_up_to_where_it_is_looked_for(tokens: int) -> None:
    store = Store((FULL,))
    rig = store.rig(push=Push.REUSE)
    request = make_request("r", tokens)
    rig.write(request.block_hashes)
    rig.tier.went_on(request, 96 if tokens == 112 else 112)
    store.take(rig)
    assert store.read(make_request("again", tokens)) == (96 if tokens == 112 else 112)


def test_what_a_consumer_decodes_is_pushed_up_to_its_end() -> None:
    store = Store((FULL,))
    rig = store.rig(push=Push.DECODED, role=Role.CONSUMER)
    request = make_request("r", 33)
    request.append_output_token_ids(list(range(1033, 1113)))
    store.write(request, rig)
    assert sorted(store.blocks_of.values()) == [3, 4]


def test_a_request_that_saves_nothing_leaves_no_end() -> None:
    store = Store((FULL,))
    rig = store.rig()
    request = make_request("r", 113, params={"moonstep": {"save": False}})
    rig.write(request.block_hashes)
    request.num_computed_tokens = 113
    rig.tier.finished(request)
    store.take(rig)
    assert not store.keys


def test_a_full_queue_gives_up_tails_before_what_they_hang_on() -> None:
    store = Store((FULL,))
    rig = store.rig(max_busy_share=0.02)  # two objects at a time
    store.write(make_request("w", 177), rig)
    assert sorted(store.blocks_of.values()) == [3, 4, 4]


def test_an_end_below_whole_runs_is_read_from_them() -> None:
    """Its own tail has been evicted, and so has the state at the end of the longer prompt."""
    store = Store((FULL, STATE))
    shorter, longer = make_request("w", 113), make_request("longer", 200)
    store.write(shorter)
    store.write(longer)
    of = store.rig().keys.current
    store.keys -= {of.key(0, 0, shorter.block_hashes[6])}
    store.keys -= {of.key(1, 0, longer.block_hashes[at]) for at in (7, 11)}
    assert store.read(make_request("r", 300)) == 112


def test_a_state_from_before_a_long_answer_is_found() -> None:
    """Nothing but full attention is there beyond it, several runs of it, and nothing before it."""
    store = Store((FULL, STATE))
    shorter, longer = make_request("w", 113), make_request("longer", 400)
    store.write(shorter)
    store.write(longer)
    of = store.rig().keys.current
    store.keys -= {of.key(1, 0, longer.block_hashes[at]) for at in (3, 23, 24)}
    rig = store.rig()
    assert store.read(make_request("r", 500), rig) == 112
    assert rig.tier.fetches.counts.looks == 2
