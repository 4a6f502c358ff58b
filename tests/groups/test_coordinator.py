"""The joint hit against vLLM's own search, over the same presence in a real block pool.

Both the rule over all that is present and the scheduler half's lookup in its index, which asks for
less, are compared.

Without drafts both find the same, always. With drafts three differences are deliberate; each is
named here, shown once by hand, and the only ones that random cases may show:

* **A proof at every boundary.** When one group shortens the engine's hit, vLLM looks at the shorter
  boundary again without the block that proves the next token (``eagle_verified``). The draft
  layers' last entry there may be another prompt's: it costs accepted drafts. Moonstep asks for the
  proof at the boundary it promises.
* **A window that reaches the head.** Where blocks differ in size, vLLM drops a boundary too many
  from a draft window that is not filled yet. Moonstep does not.
* **A group alone.** vLLM's search for a single group does not look beyond the hit's limit for the
  proof, its search for several does. Moonstep always looks.

Hits that end inside a block, which vLLM finds where the block of a recurrent group is several hash
units long, are not promised: the search is compared with that of whole blocks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonstep.groups import (
    Group,
    GroupKind,
    Presence,
    alignment_tokens,
    joint_hit_tokens,
    resumable,
)
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.lookup import JointLookup
from moonstep.scheduler.policies import LruPolicy
from tests.groups.coordinator import EngineSearch, Present

UNIT = 4
MOST_UNITS = 24
HASHES = [number.to_bytes(32, "big") for number in range(MOST_UNITS)]
GROUP_SETS = 440
CASES_A_SET = 50
LOOKUPS_ONE_IN = 7


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt's length, and what every group has of it."""

    groups: tuple[Group, ...]
    present: tuple[Present, ...]
    num_tokens: int

    @property
    def limit_tokens(self) -> int:
        return self.num_tokens - 1

    @property
    def align_tokens(self) -> int:
        return alignment_tokens(self.groups)

    def presences(self) -> list[Presence]:
        return [_presence(each, self.num_tokens // UNIT) for each in self.present]

    def hit_tokens(self) -> int:
        return joint_hit_tokens(self.presences(), self.limit_tokens, self.align_tokens)

    def lookup_tokens(self) -> int:
        """What the scheduler half promises with ``present`` in its index."""
        index = HostIndex(len(self.groups), LruPolicy())
        index.resize(len(self.groups) * MOST_UNITS)
        for each in self.present:
            columns = Columns(each.group.index)
            for depth, end in enumerate(sorted(each.ends)):
                columns.add(1, depth, HASHES[end - 1], end)
            if columns:
                placed = index.plan(columns)
                assert placed is not None
                index.acknowledge(placed)
        asking: Any = SimpleNamespace(
            num_tokens=self.num_tokens, block_hashes=HASHES[: self.num_tokens // UNIT]
        )
        return JointLookup(self.groups, self.align_tokens).hit_tokens(index, asking, 0)

    def engine_tokens(self, engine: EngineSearch) -> int:
        hashes = HASHES[: self.num_tokens // UNIT]
        return engine.hit_tokens(hashes, self.present, self.limit_tokens)


def test_the_joint_hit_is_the_engines() -> None:
    rng = random.Random(7)
    cases = hits = 0
    for number in range(GROUP_SETS):
        groups = _groups(rng)
        engine = EngineSearch(groups, drafter=False, latents=number % 5 == 0)
        for _ in range(CASES_A_SET):
            case = _case(rng, groups)
            hit = case.hit_tokens()
            assert hit == case.engine_tokens(engine), case
            if cases % LOOKUPS_ONE_IN == 0:
                assert hit == case.lookup_tokens(), case
            cases += 1
            hits += hit > 0
    assert cases >= 20_000
    assert hits > cases // 4


def test_with_drafts_it_differs_only_where_it_is_meant_to() -> None:
    rng = random.Random(11)
    cases = same = 0
    for _ in range(GROUP_SETS // 4):
        groups, flagged = _with_drafts(rng, _groups(rng))
        engine = EngineSearch(flagged, drafter=True)
        for _ in range(CASES_A_SET):
            case = _case(rng, groups)
            found, theirs = case.hit_tokens(), case.engine_tokens(engine)
            assert found == theirs or _is_meant(case, found, theirs), (case, found, theirs)
            if cases % LOOKUPS_ONE_IN == 0:
                assert found == case.lookup_tokens(), case
            cases += 1
            same += found == theirs
    assert same > 0.9 * cases


def _is_meant(case: Case, found: int, theirs: int) -> bool:
    """Whether a difference is one of the three."""
    if theirs > found:
        return _resumes(_without_drafts(case), theirs) and not _resumes(case, theirs)
    if len(case.groups) == 1:
        within = case.limit_tokens - case.align_tokens
        return theirs == joint_hit_tokens(case.presences(), within, case.align_tokens)
    return any(
        group.draft
        and group.block_tokens != case.align_tokens
        and found // group.block_tokens < group.window_blocks
        for group in case.groups
    )


def _resumes(case: Case, boundary: int) -> bool:
    number = boundary // case.align_tokens
    return all(
        resumable(presence, case.limit_tokens, case.align_tokens)[number]
        for presence in case.presences()
    )


def _without_drafts(case: Case) -> Case:
    present = tuple(replace(p, group=replace(p.group, draft=False)) for p in case.present)
    return replace(case, present=present)


FULL = Group(0, GroupKind.FULL_ATTENTION, 4, 1, ("full",), UNIT)
WINDOW = Group(1, GroupKind.SLIDING_WINDOW, 4, 1, ("window",), UNIT, 9)
STATE = Group(2, GroupKind.RECURRENT_STATE, 4, 1, ("state",), UNIT)


def test_a_hit_inside_a_block_ends_at_the_block() -> None:
    groups = (FULL, replace(STATE, index=1, block_tokens=16))
    present = (
        Present(groups[0], frozenset(range(1, 9))),
        Present(groups[1], frozenset({4, 6})),
    )
    case = Case(groups, present, 33)
    engine = EngineSearch(groups, drafter=False, partial_hits=True)
    assert (case.engine_tokens(engine), case.hit_tokens()) == (24, 16)


def test_a_boundary_that_was_shortened_needs_its_proof_too() -> None:
    told = (FULL, WINDOW, STATE)
    groups = tuple(replace(group, draft=True) for group in told)
    engine = EngineSearch(told, drafter=True)

    def case(*states: int) -> Case:
        ends = (range(1, 11), {1, 2, 3, 4, 8, 9, 10}, states)
        present = (Present(g, frozenset(e)) for g, e in zip(groups, ends, strict=True))
        return Case(groups, tuple(present), 42)

    assert case(4, 9).engine_tokens(engine) == 36 == case(4, 9).hit_tokens()
    assert (case(4).engine_tokens(engine), case(4).hit_tokens()) == (16, 0)


def test_a_draft_window_that_reaches_the_head_loses_no_boundary() -> None:
    groups = (replace(FULL, block_tokens=8), replace(WINDOW, window_tokens=40, draft=True))
    present = tuple(
        Present(group, frozenset(range(group.units, 9, group.units))) for group in groups
    )
    case = Case(groups, present, 36)
    assert (case.engine_tokens(EngineSearch(groups, drafter=True)), case.hit_tokens()) == (16, 24)


def test_a_draft_group_alone_is_proved_beyond_the_limit() -> None:
    groups = (replace(FULL, draft=True),)
    case = Case(groups, (Present(groups[0], frozenset(range(1, 5))),), 16)
    assert (case.engine_tokens(EngineSearch(groups, drafter=True)), case.hit_tokens()) == (8, 12)


@pytest.mark.parametrize("kind", GroupKind)
def test_a_group_without_anything_has_no_hit(kind: GroupKind) -> None:
    window = 9 if kind is GroupKind.SLIDING_WINDOW else 0
    groups = (Group(0, kind, 4, 1, ("layer",), UNIT, window),)
    case = Case(groups, (Present(groups[0], frozenset()),), 40)
    assert case.engine_tokens(EngineSearch(groups, drafter=False)) == 0 == case.hit_tokens()


def _groups(rng: random.Random) -> tuple[Group, ...]:
    count = rng.choice([1, 2, 2, 2, 3, 3, 4, 6])
    found = []
    for index in range(count):
        kind = rng.choice(list(GroupKind))
        # One group is hashed by its block; several have a unit that divides all their blocks.
        units = 1 if count == 1 else rng.choice([1, 1, 1, 2, 2, 3, 4])
        window = rng.randint(2, 8 * UNIT) if kind is GroupKind.SLIDING_WINDOW else 0
        found.append(Group(index, kind, units * UNIT, 1, (f"layer {index}",), UNIT, window))
    return tuple(found)


def _with_drafts(
    rng: random.Random, groups: tuple[Group, ...]
) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """The groups with the engine's rule for drafts applied, and as the engine is told of them."""
    attention = [group for group in groups if group.kind is not GroupKind.RECURRENT_STATE]
    if not attention or rng.random() < 0.5:
        return tuple(replace(group, draft=True) for group in groups), groups
    chosen = rng.choice(attention)
    told = tuple(replace(group, draft=group is chosen) for group in groups)
    alike = (chosen.kind, chosen.block_tokens, chosen.window_tokens)
    return tuple(
        replace(g, draft=(g.kind, g.block_tokens, g.window_tokens) == alike) for g in groups
    ), told


def _case(rng: random.Random, groups: Sequence[Group]) -> Case:
    num_tokens = rng.randint(1, MOST_UNITS * UNIT)
    units = num_tokens // UNIT
    present = tuple(Present(group, _ends(rng, group, units)) for group in groups)
    return Case(tuple(groups), present, num_tokens)


def _ends(rng: random.Random, group: Group, units: int) -> frozenset[int]:
    """All, a prefix, or a random share of what a group may have."""
    ends = range(group.units, units + 1, group.units)
    how = rng.random()
    if how < 0.25:
        return frozenset(ends)
    if how < 0.5:
        return frozenset(ends[: rng.randint(0, len(ends))])
    share = rng.choice([0.3, 0.6, 0.85, 0.95])
    return frozenset(end for end in ends if rng.random() < share)


def _presence(present: Present, units: int) -> Presence:
    step = present.group.units
    there = [end in present.ends for end in range(step, units + 1, step)]
    return Presence(present.group, np.array(there, dtype=np.bool_))
