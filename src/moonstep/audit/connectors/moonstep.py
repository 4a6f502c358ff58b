"""Moonstep's own connector: tight settings, and its books opened to the bench."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moonstep.audit.connectors import Kit
from moonstep.audit.engineconfig import block_bytes
from moonstep.audit.inspector import Kept

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from moonstep.audit.shape import Shape


def settings(shape: Shape, rng: random.Random) -> dict[str, Any]:
    """A host cache of a few blocks up to some more than the engine has."""
    blocks = rng.choice((3, 8, 16, shape.blocks, 3 * shape.blocks))
    return {"host_cache": blocks * block_bytes(shape), "min_hit_tokens": rng.choice((0, 0, 0, 6))}


def roomy(shape: Shape) -> dict[str, Any]:
    """A host cache that keeps all a scenario computes."""
    return {"host_cache": 8 * shape.blocks * block_bytes(shape)}


class MoonstepInspector:
    """Reads the index of the scheduler half and the arenas of the worker halves."""

    def __init__(self, scheduler_half: Any, worker_halves: Sequence[Any]) -> None:
        self._scheduler = scheduler_half.scheduler
        self._workers = [half.worker for half in worker_halves]
        self._group_bytes = [
            [int(size) for size in worker._block_bytes] for worker in self._workers
        ]

    def kept(self) -> Iterator[Kept]:
        index = self._scheduler.index
        for group, names in enumerate(index._written):
            for name, slot in names.items():
                for rank, worker in enumerate(self._workers):
                    payload = worker.arena.slot(slot)[: self._group_bytes[rank][group]]
                    yield Kept(group, name, rank, payload.tobytes())

    def check(self) -> None:
        self._scheduler.check()
        index = self._scheduler.index
        for names in index._written:
            for slot in names.values():
                for rank, worker in enumerate(self._workers):
                    assert slot < worker.slots, f"slot {slot}: rank {rank} has {worker.slots}"
                    held, wanted = worker.arena.generation[slot], int(index._generation[slot])
                    assert held == wanted, (
                        f"slot {slot} on rank {rank} is at generation {held}, the index at {wanted}"
                    )

    def idle(self) -> bool:
        index = self._scheduler.index
        return bool(
            not index.planned_count and not getattr(index, "pinned_count", 0) and not self._scheduler.lives
        )

    def counts(self) -> dict[str, int]:
        index = self._scheduler.index
        return {
            "written": index.written_count,
            "planned": index.planned_count,
            "pinned": getattr(index, "pinned_count", 0),
            "free": index.free_count,
            "lives": len(self._scheduler.lives),
        }


KIT = Kit(
    settings=settings,
    roomy=roomy,
    inspect=MoonstepInspector,
    passing_threads=("moonstep-arena",),
)
