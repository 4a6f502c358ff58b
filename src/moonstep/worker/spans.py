"""Where the bytes of an object lie in a worker's memory: the slots of its blocks, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from moonstep.stores.base import Transfer
from moonstep.wire import SCRATCH, Job, StoredObject
from moonstep.worker.arena import Arena

Register = Callable[[memoryview], None]


def _nobody(memory: memoryview) -> None:
    """For a store that does not want to know where bytes lie."""


class ObjectSpans:
    """Turns the objects of a job into a store's transfers, for one rank. Any thread may ask.

    Blocks of a fetched object that need no slot get memory of the calling thread: the object is
    read and checked whole, and those bytes are forgotten. ``register`` is told of all memory that
    spans may lie in, before they do, and may raise ``StoreUnwell``.
    """

    def __init__(
        self, arena: Arena, rank: int, block_bytes: Sequence[int], register: Register = _nobody
    ) -> None:
        register(arena.memory.data)
        self._register = register
        self._arena = arena
        self._rank = rank
        self._block_bytes = tuple(block_bytes)
        self._scratch = threading.local()

    def of(self, job: Job) -> list[Transfer]:
        """One transfer for each object of ``job``, in order."""
        scratch_blocks = sum(each.slots.count(SCRATCH) for each in job.objects)
        scratch = self._scratch_of(scratch_blocks)
        return [self._transfer(job, each, scratch) for each in job.objects]

    def own(self, job: Job) -> list[bool]:
        """For each object of a push, whether it is this rank that stores it."""
        return [job.keys.writes(each.group, self._rank, each.name) for each in job.objects]

    def _transfer(
        self, job: Job, each: StoredObject, scratch: list[npt.NDArray[np.uint8]]
    ) -> Transfer:
        nbytes = self._block_bytes[each.group]
        spans = tuple(
            (scratch.pop() if slot == SCRATCH else self._arena.slot(slot)).data[:nbytes]
            for slot in each.slots
        )
        keys, rank = job.keys, self._rank
        parent = None if each.parent is None else keys.key(each.group, rank, each.parent)
        return Transfer(keys.key(each.group, rank, each.name), spans, parent)

    def _scratch_of(self, blocks: int) -> list[npt.NDArray[np.uint8]]:
        """Memory of this thread for so many blocks, apart from one another."""
        have: list[npt.NDArray[np.uint8]] = getattr(self._scratch, "blocks", [])
        while len(have) < blocks:
            block = np.empty(max(self._block_bytes), dtype=np.uint8)
            self._register(block.data)
            have.append(block)
        self._scratch.blocks = have
        return have[:blocks]
