"""Mutants of hybrid caches: ways in which several groups have gone wrong, one small defect each.

Each is named with a group set in which random histories, or a scenario, have to find it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from mutants import Mutant

from moonstep.groups import Group, GroupKind, hit_blocks, kept, needed_blocks
from moonstep.scheduler import restores, scheduler, sparse, trail
from moonstep.scheduler.loads import Restore
from moonstep.scheduler.lookup import JointLookup
from moonstep.scheduler.promises import Promises
from moonstep.scheduler.sparse import SparsePlanner
from moonstep.scheduler.witness import Witness

STALE_STEPS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """A mutant, the groups it shows in, and the scenario that finds it if histories cannot."""

    mutant: Mutant
    groups: str
    scenario: str = ""


CASES: dict[str, Case] = {}


def mutant(groups: str, scenario: str = "") -> Any:
    """Register a mutant under its function's name."""

    def register(body: Any) -> Any:
        CASES[body.__name__] = Case(contextmanager(body), groups, scenario)
        return body

    return register


def believed(self: Witness, block: int, key: bytes, *, in_use: bool = False) -> bool:
    """Whatever the pool says of a block that is there."""
    return bool(block)


@mutant("full+window")
def last_group_skipped() -> Iterator[None]:
    """A promise is restored in all groups but the last."""
    whole = restores.restores_of

    def without_last(*args: Any) -> list[Restore]:
        found = whole(*args)
        return found[:-1] if len(found) > 1 else found

    with patch.object(scheduler, "restores_of", without_last):
        yield


def with_offers(output: Any, offers: Any) -> Any:
    """A scheduler output as `SparsePlanner.handed_over` reads it, with other states on offer."""
    return SimpleNamespace(
        kv_connector_block_state=SimpleNamespace(boundary_state_offloads=offers),
        num_scheduled_tokens=output.num_scheduled_tokens,
    )


@mutant("full+state")
def stale_state_hand_off() -> Iterator[None]:
    """States are taken some steps after they were offered, whatever the blocks hold by then."""
    take = SparsePlanner.handed_over
    waiting: dict[int, deque[Any]] = {}

    def handed_over(self: Any, output: Any, lives: Any) -> None:
        late = waiting.setdefault(id(self), deque([{}] * STALE_STEPS))
        late.append(output.kv_connector_block_state.boundary_state_offloads)
        take(self, with_offers(output, late.popleft()), lives)

    with (
        patch.object(SparsePlanner, "handed_over", handed_over),
        patch.object(Witness, "is_named", believed),
    ):
        yield


@mutant("full+state")
def states_read_by_position() -> Iterator[None]:
    """Every entry of a state's table is taken for the state at that block's end."""
    take = SparsePlanner.handed_over

    def handed_over(self: Any, output: Any, lives: Any) -> None:
        made = {
            name: [
                (group.index, block, (position + 1) * group.block_tokens)
                for group in self._states
                for position, block in enumerate(lives[name].tables.by_group[group.index])
            ]
            for name in output.num_scheduled_tokens
            if name in lives
        }
        take(self, with_offers(output, made), lives)

    with (
        patch.object(SparsePlanner, "handed_over", handed_over),
        patch.object(Witness, "is_named", believed),
    ):
        yield


@mutant("full+state")
def state_promised_for_the_same_step() -> Iterator[None]:
    """A promise with a state is restored in the step that admits its request."""
    begin = Promises.__init__

    def at_once(self: Any, *args: Any, **facts: Any) -> None:
        begin(self, *args, **facts)
        self._all_sliced = False

    with patch.object(Promises, "__init__", at_once):
        yield


@mutant("full+window")
def freed_window_block_captured() -> Iterator[None]:
    """A window's table is believed, whoever has the block by now."""

    def stands(self: Any, position: int, block: int, name: bytes) -> bool:
        return True

    with patch.object(sparse._Standing, "__call__", stands):
        yield


def _short(rule: Any) -> Any:
    """The rule with one block less of each window."""

    def shorter(group: Group, boundary_tokens: int) -> range:
        whole = rule(group, boundary_tokens)
        if group.kind is not GroupKind.SLIDING_WINDOW or len(whole) < 2:
            return whole
        return range(whole.start + 1, whole.stop)

    return shorter


@mutant("full+window", "round-trip-wide")
def window_read_short() -> Iterator[None]:
    """The first block of a window is not restored."""
    with patch.object(restores, "needed_blocks", _short(needed_blocks)):
        yield


@mutant("full+window", "round-trip-wide")
def window_kept_short() -> Iterator[None]:
    """The writer keeps one block less of a window than the reader needs."""
    shorter = _short(hit_blocks)
    with (
        patch.object(kept, "hit_blocks", shorter),
        patch.object(sparse, "hit_blocks", shorter),
        patch.object(trail, "hit_blocks", shorter),
    ):
        yield


@mutant("full+window")
def window_given_up_at_its_boundary() -> Iterator[None]:
    """A window's blocks at the boundary a prompt is resumed from are given up like any others."""
    fill = SparsePlanner._fill

    def all_in_passing(self: Any, tracker: Any, group: Group, kept: Any, passing: Any) -> None:
        fill(self, tracker, group, passing, passing)

    with patch.object(SparsePlanner, "_fill", all_in_passing):
        yield


@mutant("full+window")
def one_block_size_for_all() -> Iterator[None]:
    """Every group's blocks are named as if they were one hash long."""
    with patch.object(Group, "units", 1):
        yield


@mutant("full+window")
def first_group_decides() -> Iterator[None]:
    """What full attention has is promised, whatever the other groups lack."""

    def dense_only(self: Any, index: Any, request: Any, local_tokens: int, limit: int) -> int:
        return limit

    with patch.object(JointLookup, "_sparse_tokens", dense_only):
        yield


@mutant("full+state+state")
def states_of_groups_mixed_up() -> Iterator[None]:
    """Of several recurrent groups, each gets the block of the next."""
    by_boundary = sparse._by_boundary

    def turned(handed: Sequence[tuple[int, int, int]]) -> Any:
        for boundary, blocks in by_boundary(handed):
            groups = list(blocks)
            yield (
                boundary,
                dict(zip(groups, [blocks[g] for g in groups[1:] + groups[:1]], strict=True)),
            )

    with patch.object(sparse, "_by_boundary", turned), patch.object(Witness, "is_named", believed):
        yield
