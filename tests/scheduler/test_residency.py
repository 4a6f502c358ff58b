"""What the engine still holds, chosen by the batch, against the same one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from moonstep.scheduler.residency import Residency

SLOTS = 8
BLOCKS = 5
SOME_SLOTS = st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=4)
SOME_BLOCKS = st.sets(st.integers(1, BLOCKS))

NOTES = st.tuples(st.just("note"), SOME_SLOTS, st.integers(1, BLOCKS))
FORGETS = st.tuples(st.just("forget"), SOME_SLOTS, st.just(0))
CHOICES = st.tuples(
    st.just("choose"),
    st.integers(0, SLOTS),
    st.tuples(st.sets(st.integers(0, SLOTS - 1)), SOME_BLOCKS, SOME_BLOCKS),
)


class World:
    """Each slot's content is a block's that has it beside it; ``gone`` blocks hold another now."""

    def __init__(self) -> None:
        self.pinned: set[int] = set()
        self.going: set[int] = set()
        self.pool: Any = SimpleNamespace(enable_caching=True, blocks=[])
        self.name_of: dict[int, int] = {}  # by slot
        self.residency = Residency(self.about_to_go)
        self.residency.bind(self.pool)

    def hold(self, gone: set[int]) -> None:
        names = [b"other" if block in gone else b"%d" % block for block in range(BLOCKS + 1)]
        self.pool.blocks = [SimpleNamespace(block_hash=name) for name in names]

    def about_to_go(self, blocks: Sequence[int]) -> list[bool]:
        return [block in self.going for block in blocks]

    def may_leave(self, slots: Sequence[int]) -> list[bool]:
        return [slot not in self.pinned for slot in slots]

    def keys_of(self, slots: Sequence[int]) -> list[bytes]:
        return [b"%d" % self.name_of[slot] for slot in slots]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(NOTES, NOTES, FORGETS, CHOICES), max_size=40))
def test_what_was_seen_last_is_chosen_first(events: list[tuple[str, Any, Any]]) -> None:
    world, seen = World(), dict[int, int]()
    for verb, what, more in events:
        if verb == "note":
            blocks = [(more + n) % BLOCKS + 1 for n in range(len(what))]
            world.residency.note(what, blocks)
            for slot, block in zip(what, blocks, strict=True):
                seen.pop(slot, None)
                seen[slot] = world.name_of[slot] = block
        elif verb == "forget":
            world.residency.forget(what)
            for slot in what:
                seen.pop(slot, None)
        else:
            world.pinned, world.going, gone = more
            world.hold(gone)
            chosen = world.residency.choose_many(what, world.may_leave, world.keys_of)
            assert chosen == choice(seen, what, world, gone)


def choice(seen: dict[int, int], count: int, world: World, gone: set[int]) -> list[int]:
    """The same by hand, one at a time, the last seen first."""
    chosen: list[int] = []
    for slot, block in reversed(list(seen.items())):
        if len(chosen) == count:
            break
        is_there = block not in gone and block not in world.going
        if is_there and slot in world.pinned:
            continue
        del seen[slot]
        if is_there:
            chosen.append(slot)
    return chosen
