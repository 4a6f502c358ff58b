"""The boundary a promise ends at: the index asked sparingly finds what all presence would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonstep.groups import (
    Group,
    GroupKind,
    Presence,
    alignment_tokens,
    block_names,
    joint_hit_tokens,
)
from moonstep.scheduler import lookup
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.lookup import JointLookup
from moonstep.scheduler.policies import LruPolicy

UNIT = 4


@dataclass
class Asked:
    num_tokens: int
    block_hashes: list[bytes] = field(default_factory=list)


def request_of(num_tokens: int) -> Asked:
    return Asked(num_tokens, [b"%d" % unit for unit in range(num_tokens // UNIT)])


def keep(index: HostIndex, group: Group, names: list[bytes]) -> None:
    columns = Columns(group.index)
    for position, name in enumerate(names):
        columns.add(1, position, name, position + 1)
    placed = index.plan(columns)
    if placed is not None:
        index.acknowledge(placed)


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    kinds = draw(st.lists(st.sampled_from(list(GroupKind)), min_size=1, max_size=4))
    made = []
    for number, kind in enumerate(kinds):
        window = draw(st.integers(2, 30)) if kind is GroupKind.SLIDING_WINDOW else 0
        block = UNIT * draw(st.sampled_from((1, 1, 2, 4)))
        draft = draw(st.booleans()) and kind is not GroupKind.RECURRENT_STATE
        made.append(Group(number, kind, block, 1, (), UNIT, window, draft))
    return made


@settings(max_examples=400, deadline=None)
@given(
    groups=groups(),
    num_tokens=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from((0.3, 0.8, 0.95, 1.0)),
    local=st.integers(0, 12),
    probe_blocks=st.sampled_from((1, 2, 5, 128)),
)
def test_it_is_the_joint_boundary_of_all_that_is_present(
    groups: list[Group], num_tokens: int, seed: int, share: float, local: int, probe_blocks: int
) -> None:
    rng = np.random.default_rng(seed)
    request, align = request_of(num_tokens), alignment_tokens(groups)
    index = HostIndex(len(groups), LruPolicy())
    index.resize(1000)
    presences = []
    for group in groups:
        names = list(block_names(request.block_hashes, group))
        present = rng.random(len(names)) < share
        keep(index, group, [n for n, there in zip(names, present, strict=True) if there])
        presences.append(Presence(group, present))
    local_tokens = min(local * align, (num_tokens - 1) // align * align)
    with patch.object(lookup, "PROBE_BLOCKS", probe_blocks):
        found = JointLookup(groups, align).hit_tokens(index, request, local_tokens)  # type: ignore[arg-type]
    expected = joint_hit_tokens(presences, num_tokens - 1, align, local_tokens)
    assert local_tokens + found == expected


def test_it_finds_a_boundary_below_many_that_lack_another_group() -> None:
    """A state everywhere, windows far down only: past a few tries all groups are looked at."""
    state = Group(0, GroupKind.RECURRENT_STATE, UNIT, 1, ())
    window = Group(1, GroupKind.SLIDING_WINDOW, UNIT, 1, (), window_tokens=9)
    request = request_of(1000)
    index = HostIndex(2, LruPolicy())
    index.resize(1000)
    keep(index, state, request.block_hashes)
    keep(index, window, request.block_hashes[8:10])
    assert JointLookup([state, window], UNIT).hit_tokens(index, request, 0) == 40  # type: ignore[arg-type]


class CountingIndex(HostIndex):
    """Counts the blocks that it is asked about."""

    asked = 0

    def written_run(self, group: int, names: Sequence[bytes], start: int, stop: int) -> int:
        before = self.asked  # a run asks in strides, by the other verb; what counts is how far
        run = super().written_run(group, names, start, stop)
        self.asked = before + min(run + 1, stop - start)
        return run

    def which_held(self, group: int, names: Iterable[bytes]) -> list[bool]:
        there = list(super().which_held(group, names))
        self.asked += len(there)
        return there


LONG, WINDOW, INTERVAL = 8192, 64, 512
"""In blocks: a prompt, what a window covers, and how often windows are kept."""


@pytest.mark.parametrize(
    ("what", "found", "most"),
    [
        ("whole", LONG, LONG + 500),
        ("a window gone", 0, LONG + 500),
        ("holes in turn", INTERVAL, LONG + 6_000),
        ("a gap in full attention", INTERVAL, LONG + 1_500),
        ("never seen", 0, 1_000),
    ],
)
def test_a_long_prompt_is_asked_about_once(what: str, found: int, most: int) -> None:
    """Six groups, of which five are windows: no more than one look at each block of one group."""
    full = Group(0, GroupKind.FULL_ATTENTION, UNIT, 1, ())
    windows = [
        Group(n, GroupKind.SLIDING_WINDOW, UNIT, 1, (), window_tokens=WINDOW * UNIT)
        for n in range(1, 6)
    ]
    request = request_of(LONG * UNIT + 1)
    names = request.block_hashes
    index = CountingIndex(6, LruPolicy())
    index.resize(LONG * 3)
    if what != "never seen":
        keep(index, full, names[:700] + names[701 if "gap" in what else 700 :])
        for group in windows:
            for boundary in range(INTERVAL, LONG + 1, INTERVAL):
                turn = boundary // INTERVAL
                lacks = turn > 1 and turn % 5 == group.index - 1 and what == "holes in turn"
                if not (what == "a window gone" and group is windows[-1]):
                    keep(index, group, names[boundary - WINDOW + lacks : boundary])
    look = JointLookup([full, *windows], UNIT)
    assert look.hit_tokens(index, request, 0) == found * UNIT  # type: ignore[arg-type]
    assert index.asked <= most


def test_what_is_on_its_way_is_no_hit() -> None:
    full = Group(0, GroupKind.FULL_ATTENTION, UNIT, 1, ())
    window = Group(1, GroupKind.SLIDING_WINDOW, UNIT, 1, (), window_tokens=9)
    request = request_of(40)
    index = HostIndex(2, LruPolicy())
    index.resize(100)
    keep(index, full, request.block_hashes)
    keep(index, window, request.block_hashes[:6])
    columns = Columns(1)
    for position in range(6, 9):
        columns.add(1, position, request.block_hashes[position], position + 1)
    placed = index.plan(columns)
    look = JointLookup([full, window], UNIT)
    assert look.hit_tokens(index, request, 0) == 24  # type: ignore[arg-type]
    assert placed is not None
    index.acknowledge(placed)
    assert look.hit_tokens(index, request, 0) == 36  # type: ignore[arg-type]
