"""Moonstep's own connector: tight settings, and its books opened to the bench."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from moonstep.audit.connectors import Kit
from moonstep.audit.engineconfig import block_bytes
from moonstep.audit.inspector import Kept

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from moonstep.audit.shape import Shape


def settings(shape: Shape, rng: random.Random) -> dict[str, Any]:
    """A host cache of a few blocks up to some more than the engine has, and small slices."""
    block = block_bytes(shape)
    rank_block = block // (shape.ranks * shape.stages)
    return {
        "host_cache": block * rng.choice((3, 8, 16, shape.blocks, 3 * shape.blocks)),
        "min_hit_tokens": rng.choice((0, 0, 0, 6)),
        "capture": rng.choice(("lazy", "eager")),
        "victim_bytes": rank_block * rng.choice((1, 100)),
        "leaver_bytes": rank_block * rng.choice((1, 3, 100)),
        "sync_restore_bytes": rank_block * rng.choice((1, 2, 100)),
        "restore_slice_bytes": rank_block * rng.choice((1, 2, 100)),
    }


def _roomy(shape: Shape) -> dict[str, Any]:
    return {"host_cache": 16 * shape.blocks * block_bytes(shape)}


def _lazy(shape: Shape) -> dict[str, Any]:
    """Captures when the engine is about to lose a block, restores within the step."""
    return _roomy(shape) | {"capture": "lazy"}


def _eager(shape: Shape) -> dict[str, Any]:
    """Captures every block as it fills."""
    return _roomy(shape) | {"capture": "eager"}


def _sliced(shape: Shape) -> dict[str, Any]:
    """Restores as asynchronous loads, one block a step."""
    rank_block = block_bytes(shape) // (shape.ranks * shape.stages)
    return _eager(shape) | {"sync_restore_bytes": 1, "restore_slice_bytes": rank_block}


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
                stamp = index._generation[slot]
                for rank, worker in enumerate(self._workers):
                    size = self._group_bytes[rank][group]
                    yield Kept(group, name, rank, stamp, partial(_read, worker.arena, slot, size))

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
            not index.planned_count
            and not getattr(index, "pinned_count", 0)
            and not self._scheduler.lives
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


def _read(arena: Any, slot: int, size: int) -> bytes:
    payload: bytes = arena.slot(slot)[:size].tobytes()
    return payload


KIT = Kit(
    settings=settings,
    variants={"lazy": _lazy, "eager": _eager, "sliced": _sliced},
    inspect=MoonstepInspector,
    passing_threads=("moonstep-arena",),
)
