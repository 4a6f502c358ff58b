"""Random groups of an engine, and random presences over them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from moonstep.groups import Group, GroupKind, Presence

UNIT = 4
MOST_UNITS = 40


@st.composite
def groups(draw: st.DrawFn, index: int = 0) -> Group:
    """A group of any kind, its block one to four hash units."""
    kind = draw(st.sampled_from(GroupKind))
    window = draw(st.integers(2, 10 * UNIT)) if kind is GroupKind.SLIDING_WINDOW else 0
    block = UNIT * draw(st.sampled_from([1, 1, 2, 3, 4]))
    return Group(index, kind, block, 1, (f"layer {index}",), UNIT, window, draw(st.booleans()))


@st.composite
def group_sets(draw: st.DrawFn) -> tuple[Group, ...]:
    """One to six groups."""
    return tuple(draw(groups(index)) for index in range(draw(st.integers(1, 6))))


@st.composite
def presences(draw: st.DrawFn, group: Group) -> Presence:
    """Any presence of a group, most often with long runs."""
    count = draw(st.integers(0, MOST_UNITS // group.units))
    gaps = draw(st.sets(st.integers(0, max(0, count - 1)), max_size=4))
    blocks = np.ones(count, dtype=np.bool_)
    blocks[[gap for gap in gaps if gap < count]] = False
    if draw(st.booleans()):
        blocks = ~blocks
    return Presence(group, blocks)
