"""The host-cache index and its policy, as state machines against plain models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from moonstep.scheduler import policies, runs
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.policies import LruPolicy, Place
from moonstep.scheduler.slots import Placed

CHAINS = st.integers(1, 4)
POSITIONS = st.integers(0, 5)
GROUPS = st.integers(0, 1)


def name_of(family: int, position: int) -> bytes:
    return f"{family}.{position}".encode()


def columns_of(group: int, *rows: tuple[Place, bytes]) -> Columns:
    """Blocks to capture: where each stands, and its name."""
    columns = Columns(group)
    for number, (place, name) in enumerate(rows):
        columns.add(place.chain, place.depth, name, number + 1)
    return columns


def written(index: HostIndex, group: int, name: bytes) -> bool:
    return index.written_run(group, [name], 0, 1) == 1


@dataclass
class Kept:
    """What a plain model knows of a block in a slot: who used it last, and how deep it is there."""

    slot: int
    generation: int
    place: Place

    @property
    def order(self) -> tuple[int, int]:
        """Among blocks of one chain the highest leaves first."""
        return self.place.depth, self.slot


Key = tuple[int, bytes]


@dataclass
class Model:
    """Plain dictionaries in place of the index. Orphans are what a reset left to end by itself."""

    written: dict[Key, Kept] = field(default_factory=dict)
    planned: dict[Key, Kept] = field(default_factory=dict)
    orphans: list[Kept] = field(default_factory=list)
    pinned: list[Kept] = field(default_factory=list)
    doomed: list[Kept] = field(default_factory=list)
    under_way: list[tuple[Placed, list[Kept]]] = field(default_factory=list)
    uses: set[tuple[int, int]] = field(default_factory=set)

    @property
    def busy(self) -> list[Kept]:
        return [*self.written.values(), *self.planned.values(), *self.orphans, *self.doomed]


class IndexMachine(RuleBasedStateMachine):
    """Every verb of the index, in any order the scheduler half may use."""

    @initialize(slots=st.integers(0, 6))
    def start(self, slots: int) -> None:
        self.policy = LruPolicy()
        self.index = HostIndex(2, self.policy)
        self.model = Model()
        self.slots = slots
        assert self.index.plan(columns_of(0, (Place(1, 0), b"early"))) is None
        assert not self.index.holds(0, b"early")
        self.index.resize(slots)

    @rule(
        chain=CHAINS,
        group=GROUPS,
        family=CHAINS,
        positions=st.lists(POSITIONS, min_size=1, max_size=3),
        other=st.tuples(CHAINS, CHAINS, POSITIONS),
    )
    def plan(
        self,
        chain: int,
        group: int,
        family: int,
        positions: list[int],
        other: tuple[int, int, int],
    ) -> None:
        """A run of one life and a block of another; some may be held or named twice."""
        rows = [(Place(chain, at), name_of(family, at)) for at in positions]
        rows.append((Place(other[0], other[2]), name_of(other[1], other[2])))
        wanted = self.index.unheld(columns_of(group, *rows))
        assert len(set(wanted.names)) == len(wanted)
        for name in wanted.names:
            assert not self.index.holds(group, name)
        assert set(wanted.names) == {n for _, n in rows if not self.index.holds(group, n)}
        if len(wanted):
            self.give_slots(group, wanted)

    def give_slots(self, group: int, wanted: Columns) -> None:
        model = self.model
        free = self.index.free_count
        placed = self.index.plan(wanted)
        gone = [key for key in model.written if not written(self.index, *key)]
        count = 0 if placed is None else len(placed)
        assert len(gone) == max(0, count - free)
        assert count == len(wanted) or len(gone) + free == count
        if placed is None:
            return
        newcomers = list(zip(placed.columns.lives, placed.columns.depths, strict=True))
        leaving = [model.written.pop(key) for key in gone]
        for victim in leaving:
            self.leaves(victim, newcomers, leaving)
        kept = []
        for (life, depth), name, slot in zip(
            newcomers, placed.columns.names, placed.slots, strict=True
        ):
            assert (slot, placed.generation) not in model.uses
            model.uses.add((slot, placed.generation))
            kept.append(Kept(slot, placed.generation, Place(life, depth)))
            model.planned[group, name] = kept[-1]
        model.under_way.append((placed, kept))

    def leaves(self, victim: Kept, newcomers: list[tuple[int, int]], leaving: list[Kept]) -> None:
        """A block may leave as the deepest of its chain, within it only for a shallower one."""
        chain, depth = victim.place
        assert any(life != chain or depth > at for life, at in newcomers)
        assert victim not in self.model.pinned
        for other in self.model.busy:
            assert other.place.chain != chain or other.order < victim.order or other in leaving

    @precondition(lambda self: self.model.under_way)
    @rule(data=st.data(), captured=st.booleans())
    def settle(self, data: st.DataObject, captured: bool) -> None:
        model = self.model
        at = data.draw(st.integers(0, len(model.under_way) - 1))
        placed, kept = model.under_way.pop(at)
        group = placed.columns.group
        wanted = [k for k in kept if k not in model.orphans]
        model.orphans = [k for k in model.orphans if k not in kept]
        for name, k in zip(placed.columns.names, kept, strict=True):
            if model.planned.get((group, name)) is k:
                del model.planned[group, name]
                if captured:
                    model.written[group, name] = k
        if captured:
            assert self.index.acknowledge(placed) == len(wanted)
        else:
            self.index.abandon(placed)
        with pytest.raises(RuntimeError, match="settled twice or re-used"):
            self.index.acknowledge(placed)

    @precondition(lambda self: self.model.written)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        kept = self.model.written[data.draw(st.sampled_from(sorted(self.model.written)))]
        self.index.pin([kept.slot])
        self.model.pinned.append(kept)

    @precondition(lambda self: self.model.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        model = self.model
        kept = model.pinned.pop(data.draw(st.integers(0, len(model.pinned) - 1)))
        self.index.unpin([kept.slot])
        model.doomed = [kept for kept in model.doomed if kept in model.pinned]

    @rule(chain=CHAINS, group=GROUPS, family=CHAINS, stop=POSITIONS)
    def use(self, chain: int, group: int, family: int, stop: int) -> None:
        names = [name_of(family, position) for position in range(stop)]
        self.index.use(chain, group, names, [])
        for depth, name in enumerate(names):
            kept = self.model.written.get((group, name))
            if kept is not None and kept.place.chain != chain:
                kept.place = Place(chain, depth)

    @rule()
    def reset(self) -> None:
        self.index.reset()
        model = self.model
        model.orphans += model.planned.values()
        model.doomed += [kept for kept in model.written.values() if kept in model.pinned]
        model.written.clear()
        model.planned.clear()

    @rule(
        group=GROUPS,
        family=CHAINS,
        start=POSITIONS,
        stop=POSITIONS,
        few=st.sampled_from((0, 1, 32)),
    )
    def look_up(self, group: int, family: int, start: int, stop: int, few: int) -> None:
        names = [name_of(family, position) for position in range(6)]
        run = 0
        while start + run < stop and (group, names[start + run]) in self.model.written:
            run += 1
        if start <= stop:
            with patch.object(runs, "_FEW", few), patch.object(runs, "_FIRST", 2):
                assert self.index.written_run(group, names, start, stop) == run

    @invariant()
    def books_add_up(self) -> None:
        self.index.check()
        self.policy.check()
        model = self.model
        assert self.index.free_count == self.slots - len(model.busy)
        assert self.index.written_count == len(model.written)
        assert self.index.planned_count == len(model.planned) + len(model.orphans)
        assert self.index.pinned_count == len({kept.slot for kept in model.pinned})
        assert len(self.policy) == len(model.busy)

    @invariant()
    def written_names_are_found_and_planned_ones_never(self) -> None:
        for (group, name), kept in self.model.written.items():
            slots, generations = self.index.locate(group, [name])
            assert (slots, list(generations)) == ([kept.slot], [kept.generation])
        for group, name in self.model.planned:
            assert self.index.holds(group, name)
            assert not written(self.index, group, name)
            with pytest.raises(KeyError):
                self.index.locate(group, [name])


class PolicyMachine(RuleBasedStateMachine):
    """The policy alone: its whole order, against chains that are sorted lists of (depth, slot)."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = LruPolicy()
        self.chains: dict[int, list[tuple[int, int]]] = {}

    def chain_of(self, slot: int) -> int | None:
        return next((c for c, items in self.chains.items() if slot in [s for _, s in items]), None)

    def refresh(self, chain: int) -> list[tuple[int, int]]:
        items = self.chains.pop(chain, [])
        self.chains[chain] = items
        return items

    def take_away(self, slot: int) -> None:
        for chain, items in self.chains.items():
            self.chains[chain] = [item for item in items if item[1] != slot]

    @rule(chain=CHAINS, depth=POSITIONS, slot=st.integers(0, 7))
    def add(self, chain: int, depth: int, slot: int) -> None:
        if self.chain_of(slot) is not None:
            return  # a slot is added once, when it is planned
        self.policy.add([chain], [depth], [slot])
        self.refresh(chain).append((depth, slot))
        self.chains[chain].sort()

    @rule(
        rows=st.dictionaries(st.integers(0, 7), st.tuples(CHAINS, POSITIONS), max_size=4),
        few=st.sampled_from((0, 24)),
    )
    def add_many(self, rows: dict[int, tuple[int, int]], few: int) -> None:
        new = [(*place, slot) for slot, place in rows.items() if self.chain_of(slot) is None]
        if not new:
            return
        chains, depths, slots = (list(column) for column in zip(*new, strict=True))
        with patch.object(policies, "_FEW", few):
            self.policy.add(chains, depths, slots)
        for chain, depth, slot in new:
            self.refresh(chain).append((depth, slot))
            self.chains[chain].sort()

    @rule(chain=CHAINS, slots=st.lists(st.integers(0, 7), unique=True, max_size=5))
    def use(self, chain: int, slots: list[int]) -> None:
        known = [(d, slot) for d, slot in enumerate(slots) if self.chain_of(slot) is not None]
        self.policy.use(chain, [depth for depth, _ in known], [slot for _, slot in known])
        self.refresh(chain)
        for depth, slot in known:
            if self.chain_of(slot) != chain:
                self.take_away(slot)
                self.chains[chain].append((depth, slot))
                self.chains[chain].sort()

    @rule(slot=st.integers(0, 7))
    def remove(self, slot: int) -> None:
        self.policy.remove([slot])
        self.take_away(slot)

    @rule(
        count=st.integers(0, 8),
        pinned=st.sets(st.integers(0, 7), max_size=3),
        spared=st.sets(CHAINS, max_size=2),
    )
    def ask_for_many(self, count: int, pinned: set[int], spared: set[int]) -> None:
        wanted: list[int] = []
        for chain, items in self.chains.items():
            for _, slot in reversed(items):
                if chain in spared or slot in pinned or len(wanted) == count:
                    break
                wanted.append(slot)

        def may_leave(slots: Sequence[int]) -> list[bool]:
            return [slot not in pinned for slot in slots]

        assert self.policy.choose_many(count, may_leave, spared) == wanted

    @rule()
    def ask_for_the_whole_order(self) -> None:
        """A rule and no invariant: asking lets the policy tidy up, which must not be needed."""
        self.policy.check()
        self.chains = {chain: items for chain, items in self.chains.items() if items}
        assert len(self.policy) == sum(map(len, self.chains.values()))
        asked: list[tuple[int, int, int]] = []
        assert self.policy.choose(lambda place, slot: bool(asked.append((*place, slot)))) is None
        assert asked == [(chain, *items[-1]) for chain, items in self.chains.items()]
        for chain, items in self.chains.items():
            tail = items[-1][1]
            assert self.policy.choose(lambda place, _, wanted=chain: place.chain == wanted) == tail


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPolicy = PolicyMachine.TestCase
TestPolicy.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def plan_run(index: HostIndex, chain: int, family: int, positions: Iterable[int]) -> Placed | None:
    """Plan blocks of a family, in this order, as those of one life."""
    rows = [(Place(chain, at), name_of(family, at)) for at in positions]
    return index.plan(columns_of(0, *rows))


def full_index(slots: int, chain: int, names: int) -> HostIndex:
    """An index with the first ``names`` blocks of family 1, written in order by ``chain``."""
    index = HostIndex(1, LruPolicy())
    index.resize(slots)
    if names:
        placed = plan_run(index, chain, 1, range(names))
        assert placed is not None
        assert index.acknowledge(placed) == names
    return index


def head_of(index: HostIndex, family: int, stop: int = 6) -> int:
    """How many leading blocks of a family can be promised."""
    return index.written_run(0, [name_of(family, at) for at in range(stop)], 0, stop)


@settings(max_examples=150, deadline=None)
@given(
    forks=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), min_size=1, max_size=4),
    pieces=st.integers(1, 400),
    tails_first=st.booleans(),
    holes=st.sets(st.integers(0, 900), max_size=3),
    late=st.sets(st.integers(0, 900), max_size=2),
    used=st.integers(0, 900),
)
def test_a_long_run_is_as_long_as_the_blocks_say_one_by_one(
    forks: list[tuple[int, int]],
    pieces: int,
    tails_first: bool,
    holes: set[int],
    late: set[int],
    used: int,
) -> None:
    """Lives that part from the first one's prefix at some depth, kept in pieces, either way round;
    some blocks are missing, some are still on their way, some were used by another life since.
    """
    index = HostIndex(1, LruPolicy())
    index.resize(5000)
    first = [name_of(0, at) for at in range(forks[0][0] + forks[0][1])]
    lives = [first]
    for number, (shared, own) in enumerate(forks[1:], 1):
        lives.append([*first[:shared], *(name_of(number, at) for at in range(own))])
    for number, names in enumerate(lives, 1):
        starts = range(0, len(names), pieces)
        for start in reversed(starts) if tails_first else starts:
            rows = list(enumerate(names))[start : start + pieces]
            rows = [(at, name) for at, name in rows if at not in holes]
            columns = columns_of(0, *((Place(number, at), name) for at, name in rows))
            placed = index.plan(index.unheld(columns))
            if placed is not None and start not in late:
                index.acknowledge(placed)
    index.use(9, 0, lives[-1][:used], [])
    index.check()
    for names in lives:
        there = index.which_written(0, names)
        for start in (0, 1, len(names) // 2, len(names)):
            run = next((n for n, is_there in enumerate(there[start:]) if not is_there), None)
            expected = len(there) - min(start, len(there)) if run is None else run
            assert index.written_run(0, names, start, len(names)) == expected


def test_a_chain_that_points_at_another_block_promises_nothing() -> None:
    """A chain says where to look; which block stands there, its name says."""
    index = HostIndex(1, LruPolicy())
    index.resize(400)
    rows = [(Place(1, at), name_of(1 + (at >= 150), at)) for at in range(200)]
    placed = index.plan(columns_of(0, *rows))
    assert placed is not None
    index.acknowledge(placed)
    assert head_of(index, 1, 200) == 150


def test_a_block_of_another_group_on_the_same_chain_promises_nothing() -> None:
    index = HostIndex(2, LruPolicy())
    index.resize(400)
    for group, positions in ((0, range(100)), (1, range(100, 200))):
        rows = [(Place(1, at), name_of(1, at)) for at in positions]
        placed = index.plan(columns_of(group, *rows))
        assert placed is not None
        index.acknowledge(placed)
    assert head_of(index, 1, 200) == 100


def test_the_tail_of_a_prefix_leaves_before_its_head() -> None:
    index = full_index(slots=4, chain=1, names=4)
    for taken in range(1, 5):
        assert plan_run(index, 2, 2, [taken]) is not None
        assert head_of(index, 1) == 4 - taken
    assert index.counts.evicted == 4


def test_what_another_chain_took_over_is_passed_by_while_something_is_pinned() -> None:
    index = full_index(slots=6, chain=1, names=6)
    middle = [name_of(1, at) for at in (1, 2, 3)]
    index.use(2, 0, middle, [], positions=[1, 2, 3])
    index.pin(index.locate(0, middle)[0][:1])
    placed = plan_run(index, 3, 3, range(3))
    assert placed is not None
    assert len(placed) == 3
    assert not any(written(index, 0, name_of(1, at)) for at in (0, 4, 5))
    assert index.has_written(0, middle)


def test_a_prefix_longer_than_the_cache_keeps_its_head() -> None:
    index = full_index(slots=3, chain=1, names=3)
    assert plan_run(index, 1, 1, [3]) is None
    assert index.counts.refused == 1
    assert head_of(index, 1) == 3


def test_of_a_run_that_does_not_fit_the_first_get_the_slots() -> None:
    index = full_index(slots=3, chain=1, names=0)
    placed = plan_run(index, 1, 1, range(5))
    assert placed is not None
    assert placed.columns.names == [name_of(1, at) for at in range(3)]
    assert index.counts.refused == 2


def test_a_prefix_written_tail_first_ends_with_its_head() -> None:
    """The engine gives up the tail of a prefix first, so that is captured first."""
    index = full_index(slots=3, chain=1, names=0)
    for at in reversed(range(6)):
        placed = plan_run(index, 1, 1, [at])
        assert placed is not None
        index.acknowledge(placed)
    assert head_of(index, 1) == 3


def test_a_slot_given_back_to_its_chain_stands_where_it_is_put_now() -> None:
    policy = LruPolicy()
    policy.add([1, 1], [3, 2], [7, 8])
    policy.remove([7])
    policy.add([1], [0], [7])
    assert policy.choose(lambda place, slot: True) == 8
    policy.check()


@given(st.lists(st.tuples(CHAINS, st.integers(1, 6)), max_size=8))
def test_runs_of_chains_are_added_as_if_slot_by_slot(runs: list[tuple[int, int]]) -> None:
    chains = [chain for chain, length in runs for _ in range(length)]
    depths = [length - at for _, length in runs for at in range(length)]
    slots = list(range(len(chains)))
    at_once, singly = LruPolicy(), LruPolicy()
    with patch.object(policies, "_FEW", 0):
        at_once.add(chains, depths, slots)
    for chain, depth, slot in zip(chains, depths, slots, strict=True):
        singly.add([chain], [depth], [slot])
    for policy in (at_once, singly):
        policy.check()
    assert everything(at_once) == everything(singly)


def everything(policy: LruPolicy) -> list[int]:
    """All slots, those that leave first before the others."""
    return policy.choose_many(100, lambda slots: [True] * len(slots), ())


def test_what_a_later_chain_used_outlives_what_it_did_not() -> None:
    index = full_index(slots=4, chain=1, names=4)
    index.use(2, 0, [name_of(1, 0), name_of(1, 1)], [])
    assert plan_run(index, 3, 3, range(2)) is not None
    assert head_of(index, 1) == 2


def test_slots_are_given_once_only() -> None:
    index = full_index(slots=2, chain=1, names=0)
    with pytest.raises(RuntimeError, match="has 2 slots already"):
        index.resize(2)


@pytest.mark.parametrize("captured", [True, False])
def test_a_name_planned_again_after_a_reset_is_not_the_earlier_ones(captured: bool) -> None:
    index = full_index(slots=4, chain=1, names=0)
    before = plan_run(index, 1, 1, range(2))
    assert before is not None
    index.reset()
    after = plan_run(index, 2, 1, range(1))
    assert after is not None
    assert after.slots[0] not in before.slots
    if captured:
        assert index.acknowledge(before) == 0
    else:
        index.abandon(before)
    assert head_of(index, 1) == 0
    assert index.acknowledge(after) == 1
    assert head_of(index, 1) == 1
    assert index.free_count == 3
    index.check()
