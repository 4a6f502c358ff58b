"""Moonstep's own connector: tight settings, and its books opened to the bench."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from moonstep.audit.connectors import Kit
from moonstep.audit.groupsets import block_bytes, scheduler_block_tokens
from moonstep.audit.inspector import Kept
from moonstep.engines.vllm.facts import Unsupported
from moonstep.stores import memory
from moonstep.stores.faulty import Fault, FaultyStore
from moonstep.stores.header import HEADER_BYTES, verify
from moonstep.stores.urls import Use, open_store

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterator, Sequence

    from moonstep.audit.shape import Shape


SHELF = "audit"
"""Name of the store in memory that both halves open."""


def settings(shape: Shape, rng: random.Random) -> dict[str, Any]:
    """A host cache of a few blocks up to some more than the engine has, and small slices."""
    block = block_bytes(shape)
    rank_block = block // (shape.ranks * shape.stages)
    facts: dict[str, Any] = {
        "host_cache": block * rng.choice((3, 8, 16, shape.blocks, 3 * shape.blocks)),
        "min_hit_tokens": rng.choice((0, 0, 0, 6)),
        "capture": rng.choice(("lazy", "eager")),
        "victim_bytes": rank_block * rng.choice((1, 100)),
        "leaver_bytes": rank_block * rng.choice((1, 3, 100)),
        "sync_restore_bytes": rank_block * rng.choice((1, 2, 100)),
        "restore_slice_bytes": rank_block * rng.choice((1, 2, 100)),
    }
    if rng.random() < 0.4:
        facts |= store_settings(shape) | {
            "chunk_tokens": shape.block_tokens * rng.choice((1, 2)),
            "push": rng.choice(("all", "reuse")),
            "fetch_deadline_s": rng.choice((0.005, 0.05, 0.5)),
            "push_deadline_s": rng.choice((0.005, 0.5)),
            "max_pending": rng.choice((1, 8)),
            "fetch_share": rng.choice((0.3, 1.0)),
            "max_busy_share": rng.choice((0.3, 1.0)),
        }
    if shape.groups != "full":
        unit = scheduler_block_tokens(shape)
        facts["retention_interval"] = rng.choice((0, unit, 3 * unit, 8192))
    facts["idle_restore_bytes"] = rank_block * rng.choice((1, 100))
    return facts


def store_settings(shape: Shape) -> dict[str, Any]:
    """A store in memory behind the host cache; objects of one block."""
    return {
        "store": f"memory://{SHELF}",
        "chunk_tokens": shape.block_tokens,
        "min_fetch_tokens": 1,
        "fetch_deadline_s": 0.2,
        "push_deadline_s": 0.2,
        "shutdown_deadline_s": 0.5,
    }


def _roomy(shape: Shape) -> dict[str, Any]:
    return {"host_cache": 16 * shape.blocks * block_bytes(shape)}


def _lazy(shape: Shape) -> dict[str, Any]:
    """Captures when the engine is about to lose a block, restores within the step."""
    return _roomy(shape) | {"capture": "lazy"}


def _eager(shape: Shape) -> dict[str, Any]:
    """Captures every block as it fills."""
    return _roomy(shape) | {"capture": "eager"}


def _stored(shape: Shape) -> dict[str, Any]:
    """A host cache of half the engine's memory, all of which one fetch may take, and a store."""
    small = {"host_cache": shape.blocks // 2 * block_bytes(shape)}
    return store_settings(shape) | small | {"fetch_share": 1.0, "max_busy_share": 1.0}


def _sliced(shape: Shape) -> dict[str, Any]:
    """Restores as asynchronous loads, one block a step."""
    rank_block = block_bytes(shape) // (shape.ranks * shape.stages)
    slices = {"sync_restore_bytes": 1, "restore_slice_bytes": rank_block, "idle_restore_bytes": 1}
    return _eager(shape) | slices


def in_role(role: str, shape: Shape, facts: dict[str, Any]) -> dict[str, Any]:
    """A producer and a consumer have a store; the latter pushes what it decodes."""
    if role == "kv_both":
        return facts
    facts = store_settings(shape) | facts
    return facts | {"push": "decoded"} if role == "kv_consumer" else facts


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
        for group in range(index.group_count):
            for name, slot in index.written(group).items():
                stamp = index._generation[slot]
                for rank, worker in enumerate(self._workers):
                    size = self._group_bytes[rank][group]
                    yield Kept(group, name, rank, stamp, partial(_read, worker.arena, slot, size))
        yield from self._stored()

    def _stored(self) -> Iterator[Kept]:
        """Objects under the keys in use now that are whole; what is damaged is never taken."""
        keyring = getattr(self._scheduler.tier, "_keyring", None)
        shelf = memory._shelves.get(SHELF)
        if keyring is None or shelf is None:
            return
        for entry in shelf.entries():
            _, fingerprint, place, name = entry.key.split("/")
            stored = shelf.read(entry.key, touch=False)
            if fingerprint != keyring.current.fingerprint or stored is None:
                continue
            head, payload = stored[:HEADER_BYTES], memoryview(stored)[HEADER_BYTES:]
            if verify(entry.key, head, [payload]) is None:
                group, rank = map(int, place.split("."))
                blocks = len(payload) // self._group_bytes[rank][group]
                stamp = id(stored)
                yield Kept(
                    group, bytes.fromhex(name), rank, stamp, payload.tobytes, blocks, "store"
                )

    def check(self, running: Collection[str]) -> None:
        self._scheduler.check()
        index = self._scheduler.index
        slots = min(worker.slots for worker in self._workers)
        assert index.slot_count in (0, slots), f"index of {index.slot_count} slots, ranks {slots}"
        lifeless = [name for name in running if name not in self._scheduler.lives]
        assert not lifeless, f"running without a life: {lifeless}"
        for group in range(index.group_count):
            for slot in index.written(group).values():
                for rank, worker in enumerate(self._workers):
                    assert slot < worker.slots, f"slot {slot}: rank {rank} has {worker.slots}"
                    held, wanted = worker.arena.generation[slot], int(index._generation[slot])
                    assert held == wanted, (
                        f"slot {slot} on rank {rank} is at generation {held}, the index at {wanted}"
                    )

    def idle(self) -> bool:
        return bool(self._scheduler.is_idle and not self._scheduler.lives)

    def counts(self) -> dict[str, int]:
        index = self._scheduler.index
        return {
            "written": index.written_count,
            "planned": index.planned_count,
            "pinned": index.pinned_count,
            "free": index.free_count,
            "lives": len(self._scheduler.lives),
        }


def _read(arena: Any, slot: int, size: int) -> bytes:
    payload: bytes = arena.slot(slot)[:size].tobytes()
    return payload


class _CountedStore(FaultyStore):
    """Tells how many calls came while they were to go wrong."""

    @contextmanager
    def _faults(self, verb: str) -> Iterator[Fault]:
        STORES.struck += self.fault is not Fault.NONE and verb in self.only
        with super()._faults(verb) as fault:
            yield fault


class FaultyStores:
    """All stores that Moonstep has opened since the last engine began: they fail together."""

    def __init__(self) -> None:
        self.opened: list[FaultyStore] = []
        self.struck = 0

    def open(self, text: str, use: Use = Use.SERVE) -> FaultyStore:
        """What Moonstep's `open_store` does, with a wrapper that obeys."""
        store = _CountedStore(open_store(text, use))
        self.opened.append(store)
        return store

    def inject(self, kind: str, verbs: Sequence[str]) -> bool:
        """Go wrong until told otherwise; see `moonstep.audit.history.FAULTS`."""
        self.clear()
        for store in self.opened:
            store.only, store.fault = frozenset(verbs), Fault(kind)
        return True

    def clear(self) -> None:
        """Be well again; calls that hang go on."""
        for store in self.opened:
            store.fault = Fault.NONE
            store.resume()

    def fresh(self) -> None:
        """Another engine begins, with an empty store."""
        self.clear()
        self.opened.clear()
        self.struck = 0
        memory.forget(SHELF)


STORES = FaultyStores()


@contextmanager
def _surroundings() -> Iterator[None]:
    """A store that obeys, and no log lines: what Moonstep says of faults is no news here."""
    logger = logging.getLogger("moonstep")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with patch("moonstep.engines.vllm.stores.open_store", STORES.open):
            yield
    finally:
        logger.setLevel(level)


def _adapt(scheduler_half: Any) -> None:
    """Fetch whatever its pace: computing takes next to no time here, so none would pay."""
    pace = getattr(scheduler_half.scheduler.tier, "_pace", None)
    if pace is not None:
        pace.should_fetch = lambda tokens: True


def _store(scheduler_half: Any) -> FaultyStores | None:
    return STORES if scheduler_half.settings.store else None


KIT = Kit(
    settings=settings,
    in_role=in_role,
    variants={"lazy": _lazy, "eager": _eager, "sliced": _sliced, "store": _stored},
    adapt=_adapt,
    inspect=MoonstepInspector,
    surroundings=_surroundings,
    fresh=STORES.fresh,
    store=_store,
    passing_threads=("moonstep-arena",),
    refusals=(Unsupported,),
)
