"""Requests that have arrived and wait for the store: what was asked for them, and what came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from moonstep.engine import BlockHash, Request
from moonstep.keys import Key, KeyMaker
from moonstep.scheduler.misses import MissReason
from moonstep.scheduler.objects import NO_REACH, Reach, WantedObject
from moonstep.scheduler.slots import Placed


class StoreLookup(Protocol):
    """Asks a store what it has, off the scheduler's thread. Neither verb blocks."""

    def ask(self, ticket: int, keys: Sequence[Key]) -> None:
        """Look for these keys; the answer comes under ``ticket``, or never."""

    def answers(self) -> list[tuple[int, list[bool]]]:
        """What has been found since the last call; nothing for a look that failed."""


class FetchState(Enum):
    """How far the look for a request's prefix has come."""

    LOOKING = "looking"
    FOUND = "found"
    FETCHING = "fetching"
    OVER = "over"


Mark = tuple[int, BlockHash]
"""Group and name of a block."""


@dataclass(slots=True)
class Arrival:
    """A request that has arrived and was not admitted yet."""

    request: Request
    deadline_s: float
    top: Reach = NO_REACH
    """Where it would resume if all that is stored of its prefix were there."""
    first: list[int] = field(default_factory=list)
    """By group of full attention, how many of its objects the host cache has, from the first."""
    state: FetchState = FetchState.LOOKING
    there: set[Mark] = field(default_factory=set)
    """Objects that the store says it has."""
    whole: list[int] = field(default_factory=list)
    """By group of full attention, how many whole objects there are here or there, from the first;
    once the store has answered."""
    whole_tokens: int | None = None
    """How far whole objects of full attention reach, once the store has answered."""
    ends: list[int] = field(default_factory=list)
    """Where earlier prefixes may have ended, once that has been asked for."""
    reaches: list[Reach] = field(default_factory=list)
    """Where host cache and store together have all that a resume reads, highest first."""
    known_tokens: int = 0
    """How far host cache and store have its prefix; before the store has answered, may have it."""
    goal: Reach = NO_REACH
    """Where it can resume once what is fetched for it has come."""
    reason: MissReason | None = None
    """Why some of it will not come; ``None`` while it may."""
    jobs: set[int] = field(default_factory=set)
    asked_tokens: int = 0
    """What its own jobs are to bring, and since when; 0 when it has none any more."""
    started_s: float = 0.0
    came_tokens: int = 0
    held: list[int] = field(default_factory=list)
    """Slots that came for it, pinned until it is admitted."""
    held_tokens: int = 0


class Asked(NamedTuple):
    """What was asked of the store for an arrival."""

    arrival: Arrival
    objects: list[WantedObject]

    def take(self, present: Sequence[bool], parts_of: Callable[[int], int]) -> list[Mark]:
        """Note what is there, by the answers for all parts; the objects that are not.

        ``parts_of`` says how many parts an object of a group has.
        """
        missing: list[Mark] = []
        at = 0
        for each in self.objects:
            count = parts_of(each.shape.group.index)
            parts = present[at : at + count]
            if len(parts) < count:
                break  # what is not said is not there, and not known to be missing either
            at += count
            if all(parts):
                self.arrival.there.add(each.mark)
            else:
                missing.append(each.mark)
        return missing


AskedObjects = tuple[int, list[WantedObject]]
"""The ticket of a look, and what it is for."""


class Fetched(NamedTuple):
    """What a fetch job brings: the new slots of each of its objects, and for whom."""

    arrival: Arrival
    parts: list[Placed]


@dataclass(slots=True)
class FetchCounts:
    """What fetching has come to since the start."""

    looks: int = 0
    started_objects: int = 0
    fetched_objects: int = 0
    missed_objects: int = 0
    abandoned_jobs: int = 0
    pending_answers: int = 0


def keys_asked(keys: KeyMaker, rank_count: int, asked: Sequence[WantedObject]) -> list[Key]:
    """The keys of all parts of every object: those of the first object, then of the next."""
    return [
        keys.key(each.shape.group.index, rank, each.names.name)
        for each in asked
        for rank in keys.parts(each.shape.group.index, rank_count)
    ]
