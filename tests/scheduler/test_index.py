"""The host-cache index and its policy, as state machines against plain models."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from moonstep.scheduler.index import HostIndex, Placement
from moonstep.scheduler.policies import LruPolicy, Place

CHAINS = st.integers(1, 4)
POSITIONS = st.integers(0, 5)
GROUPS = st.integers(0, 1)


def name_of(family: int, position: int) -> bytes:
    return f"{family}.{position}".encode()


@dataclass
class Kept:
    """What a plain model knows of a block in a slot: who used it last, and how deep it is there."""

    placement: Placement
    place: Place

    @property
    def order(self) -> tuple[int, int]:
        """Among blocks of one chain the highest leaves first."""
        return self.place.depth, self.placement.slot


@dataclass
class Model:
    """Plain dictionaries in place of the index. Orphans are what a reset left to end by itself."""

    written: dict[tuple[int, bytes], Kept] = field(default_factory=dict)
    planned: dict[tuple[int, bytes], Kept] = field(default_factory=dict)
    orphans: list[Kept] = field(default_factory=list)
    pinned: list[Placement] = field(default_factory=list)
    doomed: list[Kept] = field(default_factory=list)
    generations: set[tuple[int, int]] = field(default_factory=set)

    def is_pinned(self, kept: Kept) -> bool:
        return kept.placement in self.pinned

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
        assert self.index.plan(Place(1, 0), 0, b"early") is None
        assert not self.index.holds(0, b"early")
        self.index.resize(slots)

    @rule(chain=CHAINS, group=GROUPS, family=CHAINS, position=POSITIONS)
    def plan(self, chain: int, group: int, family: int, position: int) -> None:
        name, place = name_of(family, position), Place(chain, position)
        if self.index.holds(group, name):
            with pytest.raises(ValueError, match="has a slot already"):
                self.index.plan(place, group, name)
            return
        had_free = self.index.free_count > 0
        placement = self.index.plan(place, group, name)
        gone = [key for key in self.model.written if self.index.locate(*key) is None]
        if placement is None:
            assert not had_free
            assert not gone
            return
        assert len(gone) == (0 if had_free else 1)
        for key in gone:
            self.leaves(self.model.written.pop(key), place)
        assert (placement.group, placement.name) == (group, name)
        assert (placement.slot, placement.generation) not in self.model.generations
        self.model.generations.add((placement.slot, placement.generation))
        self.model.planned[group, name] = Kept(placement, place)

    def leaves(self, victim: Kept, newcomer: Place) -> None:
        """A block may leave as the deepest of its chain, within it only for a shallower one."""
        assert victim.place.chain != newcomer.chain or victim.place.depth > newcomer.depth
        assert not self.model.is_pinned(victim)
        for other in self.model.busy:
            assert other.place.chain != victim.place.chain or other.order < victim.order

    @precondition(lambda self: self.model.planned)
    @rule(data=st.data(), captured=st.booleans())
    def settle(self, data: st.DataObject, captured: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.planned)))
        kept = self.model.planned.pop(key)
        if captured:
            assert self.index.acknowledge(kept.placement)
            self.model.written[key] = kept
        else:
            assert not self.index.abandon(kept.placement)
        with pytest.raises(RuntimeError, match="settled twice or re-used"):
            self.index.acknowledge(kept.placement)

    @precondition(lambda self: self.model.orphans)
    @rule(captured=st.booleans())
    def settle_after_reset(self, captured: bool) -> None:
        placement = self.model.orphans.pop().placement
        settle = self.index.acknowledge if captured else self.index.abandon
        assert not settle(placement)

    @precondition(lambda self: self.model.written)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.written)))
        placement = self.model.written[key].placement
        self.index.pin([placement.slot])
        self.model.pinned.append(placement)

    @precondition(lambda self: self.model.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        placement = data.draw(st.sampled_from(self.model.pinned))
        self.index.unpin([placement.slot])
        self.model.pinned.remove(placement)
        self.model.doomed = [kept for kept in self.model.doomed if self.model.is_pinned(kept)]

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
        model.doomed += [kept for kept in model.written.values() if model.is_pinned(kept)]
        model.written.clear()
        model.planned.clear()

    @rule(group=GROUPS, family=CHAINS, start=POSITIONS, stop=POSITIONS)
    def look_up(self, group: int, family: int, start: int, stop: int) -> None:
        names = [name_of(family, position) for position in range(6)]
        run = 0
        while start + run < stop and (group, names[start + run]) in self.model.written:
            run += 1
        if start <= stop:
            assert self.index.written_run(group, names, start, stop) == run

    @invariant()
    def books_add_up(self) -> None:
        self.index.check()
        self.policy.check()
        model = self.model
        assert self.index.free_count == self.slots - len(model.busy)
        assert self.index.written_count == len(model.written)
        assert self.index.planned_count == len(model.planned) + len(model.orphans)
        assert self.index.pinned_count == len(set(model.pinned))
        assert len(self.policy) == len(model.busy)

    @invariant()
    def written_names_are_found_and_planned_ones_never(self) -> None:
        for (group, name), kept in self.model.written.items():
            assert self.index.locate(group, name) == kept.placement
        for group, name in self.model.planned:
            assert self.index.holds(group, name)
            assert self.index.locate(group, name) is None
            assert self.index.written_run(group, [name], 0, 1) == 0


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
        self.policy.add(Place(chain, depth), slot)
        self.refresh(chain).append((depth, slot))
        self.chains[chain].sort()

    @rule(chain=CHAINS, slots=st.lists(st.integers(0, 7), unique=True, max_size=5))
    def use(self, chain: int, slots: list[int]) -> None:
        known = [(d, slot) for d, slot in enumerate(slots) if self.chain_of(slot) is not None]
        self.policy.use(chain, known)
        self.refresh(chain)
        for depth, slot in known:
            if self.chain_of(slot) != chain:
                self.take_away(slot)
                self.chains[chain].append((depth, slot))
                self.chains[chain].sort()

    @rule(slot=st.integers(0, 7))
    def remove(self, slot: int) -> None:
        self.policy.remove(slot)
        self.take_away(slot)

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


def full_index(slots: int, chain: int, names: int) -> HostIndex:
    """An index with the first ``names`` blocks of family 1, written in order by ``chain``."""
    index = HostIndex(1, LruPolicy())
    index.resize(slots)
    for position in range(names):
        placement = index.plan(Place(chain, position), 0, name_of(1, position))
        assert placement is not None
        index.acknowledge(placement)
    return index


def test_the_tail_of_a_prefix_leaves_before_its_head() -> None:
    index = full_index(slots=4, chain=1, names=4)
    names = [name_of(1, position) for position in range(4)]
    for taken in range(1, 5):
        assert index.plan(Place(2, taken), 0, name_of(2, taken)) is not None
        assert index.written_run(0, names, 0, 4) == 4 - taken
    assert index.counts.evicted == 4


def test_a_prefix_longer_than_the_cache_keeps_its_head() -> None:
    index = full_index(slots=3, chain=1, names=3)
    assert index.plan(Place(1, 3), 0, name_of(1, 3)) is None
    assert index.counts.refused == 1
    assert index.written_run(0, [name_of(1, p) for p in range(4)], 0, 4) == 3


def test_a_prefix_written_tail_first_ends_with_its_head() -> None:
    """The engine gives up the tail of a prefix first, so that is captured first."""
    index = HostIndex(1, LruPolicy())
    index.resize(3)
    names = [name_of(1, position) for position in range(6)]
    for position in reversed(range(6)):
        placement = index.plan(Place(1, position), 0, names[position])
        assert placement is not None
        index.acknowledge(placement)
    assert index.written_run(0, names, 0, 6) == 3


def test_a_slot_given_back_to_its_chain_stands_where_it_is_put_now() -> None:
    policy = LruPolicy()
    policy.add(Place(1, 3), 7)
    policy.add(Place(1, 2), 8)
    policy.remove(7)
    policy.add(Place(1, 0), 7)
    assert policy.choose(lambda place, slot: True) == 8
    policy.check()


def test_what_a_later_chain_used_outlives_what_it_did_not() -> None:
    index = full_index(slots=4, chain=1, names=4)
    shared = [name_of(1, 0), name_of(1, 1)]
    index.use(2, 0, shared, [])
    for position in range(2):
        assert index.plan(Place(3, position), 0, name_of(3, position)) is not None
    assert index.written_run(0, [name_of(1, p) for p in range(4)], 0, 4) == 2


def test_slots_are_given_once_only() -> None:
    index = full_index(slots=2, chain=1, names=0)
    with pytest.raises(RuntimeError, match="has 2 slots already"):
        index.resize(2)


def test_a_name_planned_again_after_a_reset_is_not_the_earlier_ones() -> None:
    index = full_index(slots=2, chain=1, names=0)
    before = index.plan(Place(1, 0), 0, b"a")
    assert before is not None
    index.reset()
    after = index.plan(Place(2, 0), 0, b"a")
    assert after is not None
    assert after.slot != before.slot
    assert not index.acknowledge(before)
    assert index.locate(0, b"a") is None
    assert index.acknowledge(after)
    assert index.locate(0, b"a") == after
    index.check()
