"""Boundaries at which windows and states are kept, until their objects can be pushed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from moonstep.engine import Request
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.objects import ObjectPlan, WantedObject

MOST_LOOKS: Final = 64
"""So many steps a boundary is looked at; what has not come by then never will."""


class _Kept(NamedTuple):
    """A boundary of a request, its objects as soon as all are named, and how often we looked."""

    request: Request
    boundary_tokens: int
    objects: tuple[WantedObject, ...] = ()
    looks: int = 0


class KeptObjects:
    """What waits to be captured, all that a boundary needs. Scheduler thread only."""

    def __init__(self, objects: ObjectPlan, index: HostIndex) -> None:
        self._objects = objects
        self._index = index
        self._waiting: deque[_Kept] = deque()

    def add(self, request: Request, boundary_tokens: int) -> None:
        """Wait for this boundary, if a store's hit can end there."""
        plan = self._objects
        if plan.sparse and boundary_tokens and plan.below(boundary_tokens) == boundary_tokens:
            self._waiting.append(_Kept(request, boundary_tokens))

    def take(self) -> Iterator[tuple[Request, tuple[WantedObject, ...]]]:
        """Requests and objects of boundaries of which all has been captured by now."""
        for _ in range(len(self._waiting)):
            kept = self._waiting.popleft()
            objects = kept.objects or self._named(kept)
            if objects and all(map(self._is_here, objects)):
                yield kept.request, objects
            elif kept.looks < MOST_LOOKS:
                self._waiting.append(kept._replace(objects=objects, looks=kept.looks + 1))

    def clear(self) -> None:
        """Wait for none of them."""
        self._waiting.clear()

    def _named(self, kept: _Kept) -> tuple[WantedObject, ...]:
        """All objects of a boundary, or none yet: from a part of them nobody could go on."""
        objects = tuple(self._objects.at(kept.request.block_hashes, kept.boundary_tokens))
        return objects if len(objects) == len(self._objects.sparse) else ()

    def _is_here(self, each: WantedObject) -> bool:
        return self._index.has_written(each.shape.group.index, each.names.names)
