"""How far a prefix can be promised: asked by the run, not block by block.

A block's name is 32 bytes on the heap, and to look it up in a dictionary of a hundred thousand
touches four places of memory that are in no cache. A chain of the eviction policy lists slots in
the order of a prefix. So it tells where the blocks behind one that was found are likely to be, and
comparing a run of names with those of the asked slots is one pass. The chain is a hint and no more:
a block counts only if the slot that was pointed at is written and bears its very name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count
from operator import ne
from typing import TYPE_CHECKING, Final

import numpy as np

from moonstep.engine import BlockHash
from moonstep.scheduler.columns import Numbers
from moonstep.scheduler.slots import AT_ONCE, WRITTEN

if TYPE_CHECKING:
    from moonstep.scheduler.index import HostIndex

_FEW: Final = 32
"""Blocks of a run that are hardly worth the calls."""

_FIRST: Final = 128
_MORE: Final = 8


def written_run(
    index: HostIndex, group: int, names: Sequence[BlockHash], start: int, stop: int
) -> int:
    """Length of the leading run of ``names[start:stop]`` that can be promised, in blocks."""
    slot_of, state = index._slot_of[group], index._state
    at, reach = start, _FIRST
    while at < stop:
        slot = slot_of.get(names[at])
        if slot is None or state[slot] != WRITTEN:
            return at - start
        asked = min(reach, stop - at)
        if asked > _FEW:
            found, parts = _chain_run(index, group, slot, names[at : at + asked])
            at += found
            if found > _FEW:
                reach = _FIRST if parts else reach * _MORE
                continue
        there = _which(index, group, names[at : min(at + AT_ONCE, stop)])
        if False in there:
            return at + there.index(False) - start
        at += len(there)
    return max(0, stop - start)


def _chain_run(
    index: HostIndex, group: int, slot: int, names: Sequence[BlockHash]
) -> tuple[int, bool]:
    """How many of the leading names are written, one behind another, in slots of the chain that
    used ``slot`` last, from it on; and whether the chain parts from them there.
    """
    slots = _written(index, group, index._policy.behind(slot, len(names)))
    held = index._name[slots].tolist()
    wanted = names[: len(held)]
    if held == wanted:
        return len(held), False
    return next(compress(count(), map(ne, held, wanted)), len(wanted)), True


def _written(index: HostIndex, group: int, slots: Numbers) -> Numbers:
    """Those of a chain's slots that are of this group, up to the first that is not written."""
    if index.group_count > 1:
        slots = slots[index._group[slots] == group]
    unwritten = index._states[slots] != WRITTEN
    return slots[: np.argmax(unwritten)] if unwritten.any() else slots


def _which(index: HostIndex, group: int, names: Sequence[BlockHash]) -> list[bool]:
    if index.planned_count:
        return index.which_written(group, names)
    return list(index.which_held(group, names))
