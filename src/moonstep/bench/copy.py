"""``moonstep bench copy``: capture and restore against ``memcpy`` of as many bytes.

The whole verbs of the worker are timed, checks and bookkeeping included, on one thread. The
reference is one ``memcpy`` call over contiguous bytes between the same two memories in the same
direction. Both go round the memories, which are larger than the caches, so that neither finds its
bytes warmer than the other; and they alternate, so that a busy neighbour meets both.

What is compared is the time the thread was on a core: on a machine with other work the longer of
two calls is interrupted more often, and wall-clock time would count that against it. On an idle
machine both are the same; the wall-clock shares stand in the file.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.table import Table

from moonstep.bench.machine import machine_facts
from moonstep.config import Settings
from moonstep.wire import BLOCK, GENERATION, ROW_COLUMNS, SLOT, Rows, StepPlan
from moonstep.worker.copies import LINE_BYTES
from moonstep.worker.pieces import Piece, slot_bytes
from moonstep.worker.worker import MooncakeStoreWorker

MEMORY_BYTES: Final = 768 << 20
"""Of the KV memory and of the host cache, each."""
BLOCK_COUNTS: Final = (1, 4, 8, 16, 32, 64, 128, 256)
MAX_SHARE_OF_MEMORY: Final = 0.5
"""No sample copies more than this of the memories, or it would meet its own bytes again."""
DEMANDED_SHARE: Final = 0.75
DEMANDED_FROM_BLOCKS: Final = 32
BOOTSTRAPS: Final = 2000
GENERATION_OF_ALL: Final = 1

_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's blocks: so many pieces a block, of so many bytes each, layer by layer."""

    name: str
    pieces: int
    piece_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.pieces * self.piece_bytes


SHAPES: Final = (
    Shape("SmolLM2-135M bf16, block 32", 30, 24 << 10),
    Shape("SmolLM2-135M bf16, block 128", 30, 96 << 10),
    Shape("SmolLM2-135M fp32, block 128", 30, 192 << 10),
    Shape("Llama-8B bf16, block 16", 32, 64 << 10),
    Shape("Llama-8B bf16, block 16, heads apart", 32 * 8, 8 << 10),
    Shape("MLA (576) bf16, block 64", 27, 72 << 10),
    Shape("layers within a block", 1, 720 << 10),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One direction of one shape at one number of blocks. Rates in bytes a second."""

    shape: str
    piece_bytes: int
    blocks: int
    nbytes: int
    verb: str
    samples: int
    rate: float
    memcpy_rate: float
    share: float
    share_low: float
    share_high: float
    """Median of the shares of ``memcpy``'s speed, and its 95 % interval."""
    wall_share: float
    """The same median by wall-clock time."""

    @property
    def is_demanded(self) -> bool:
        return self.blocks >= DEMANDED_FROM_BLOCKS

    @property
    def holds(self) -> bool:
        return not self.is_demanded or self.share >= DEMANDED_SHARE


@dataclass(frozen=True, slots=True)
class Sample:
    """One call: the time its thread was on a core, and wall-clock time."""

    busy_s: float
    wall_s: float


class Bench:
    """A worker on plain memory of one shape, every slot captured once."""

    def __init__(self, shape: Shape, memory_bytes: int, seed: int) -> None:
        self.shape = shape
        self.block_count = memory_bytes // shape.block_bytes
        self._kv = _plain_memory(self.block_count * shape.block_bytes)
        layer_bytes = self.block_count * shape.piece_bytes
        start = int(self._kv.ctypes.data)
        pieces = [
            Piece(start + index * layer_bytes, shape.piece_bytes, shape.piece_bytes, offset)
            for index, offset in enumerate(range(0, shape.block_bytes, shape.piece_bytes))
        ]
        host_cache_bytes = (self.block_count - 1) * slot_bytes([pieces])
        self._worker = MooncakeStoreWorker(
            Settings(host_cache_bytes=host_cache_bytes), 0, 1, self.block_count, [pieces]
        )
        self._worker.arena.wait_until_faulted_in(timeout_s=120)
        rng = np.random.default_rng(seed)
        self._blocks = _Round(rng.permutation(np.arange(1, self.block_count)))
        self._slots = _Round(rng.permutation(self._worker.slots))
        self._at = 0
        self._worker.capture(StepPlan(0, captures=self._rows(self._worker.slots)))

    def capture(self, blocks: int) -> Sample:
        """A capture of ``blocks`` blocks into slots that hold others."""
        plan = StepPlan(1, captures=self._rows(blocks))
        return _sample(lambda: self._worker.capture(plan))

    def restore(self, blocks: int) -> Sample:
        """A restore of ``blocks`` blocks."""
        plan = StepPlan(1, restores=self._rows(blocks))
        return _sample(lambda: self._worker.restore(plan))

    def memcpy(self, blocks: int, *, to_host_cache: bool) -> Sample:
        """One ``memcpy`` of as many bytes as ``blocks`` blocks have."""
        nbytes = blocks * self.shape.block_bytes
        room = min(self._kv.nbytes, self._worker.arena.nbytes) - nbytes
        self._at = (self._at + nbytes) % max(room, 1)
        kv, host = int(self._kv.ctypes.data) + self._at, self._worker.arena.address + self._at
        target, source = (host, kv) if to_host_cache else (kv, host)
        return _sample(lambda: _libc.memcpy(target, source, nbytes))

    def close(self) -> None:
        self._worker.shutdown()

    def _rows(self, count: int) -> Rows:
        rows = np.zeros((count, ROW_COLUMNS), np.int32)
        rows[:, BLOCK] = self._blocks.take(count)
        rows[:, SLOT] = self._slots.take(count)
        rows[:, GENERATION] = GENERATION_OF_ALL
        return rows


class _Round:
    """Goes round a fixed order, so that what is taken next was longest left alone."""

    def __init__(self, order: npt.NDArray[np.int64]) -> None:
        self._order = order
        self._at = 0

    def take(self, count: int) -> npt.NDArray[np.int64]:
        taken = np.take(self._order, range(self._at, self._at + count), mode="wrap")
        self._at = (self._at + count) % len(self._order)
        return taken


def measure(shape: Shape, repeats: int, memory_bytes: int, seed: int = 0) -> Iterator[Measured]:
    """Both directions of one shape at every number of blocks that fits."""
    bench = Bench(shape, memory_bytes, seed)
    most = int(bench.block_count * MAX_SHARE_OF_MEMORY)
    try:
        for blocks, is_capture in itertools.product(BLOCK_COUNTS, (True, False)):
            if blocks > most:
                return
            verb = bench.capture if is_capture else bench.restore
            pairs = [
                (verb(blocks), bench.memcpy(blocks, to_host_cache=is_capture))
                for _ in range(repeats)
            ]
            yield summary(shape, blocks, "capture" if is_capture else "restore", pairs)
    finally:
        bench.close()


def summary(
    shape: Shape, blocks: int, verb: str, pairs: Sequence[tuple[Sample, Sample]], seed: int = 0
) -> Measured:
    """Medians of paired samples of a verb and of memcpy.

    >>> pairs = [(Sample(x, x), Sample(x / 2, x / 4)) for x in (2.0, 4.0, 2.0)]
    >>> made = summary(Shape("s", 2, 500), 10, "capture", pairs)
    >>> made.rate, made.memcpy_rate, made.share, made.share_low, made.wall_share
    (5000.0, 10000.0, 0.5, 0.5, 0.25)
    """
    verb_s, memcpy_s = (np.array([pair[side].busy_s for pair in pairs]) for side in (0, 1))
    shares = memcpy_s / verb_s
    draws = np.random.default_rng(seed).choice(shares, (BOOTSTRAPS, len(shares)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    nbytes = blocks * shape.block_bytes
    return Measured(
        shape=shape.name,
        piece_bytes=shape.piece_bytes,
        blocks=blocks,
        nbytes=nbytes,
        verb=verb,
        samples=len(pairs),
        rate=float(nbytes / np.median(verb_s)),
        memcpy_rate=float(nbytes / np.median(memcpy_s)),
        share=float(np.median(shares)),
        share_low=float(low),
        share_high=float(high),
        wall_share=float(np.median([ref.wall_s / ours.wall_s for ours, ref in pairs])),
    )


def copy(
    repeats: Annotated[int, typer.Option(min=3, help="Samples of each figure.")] = 15,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write this file.")] = None,
) -> None:
    """Compare capture and restore with memcpy: seven block shapes, 1 to 256 scattered blocks."""
    console = Console()
    machine = machine_facts()
    console.print(f"{machine}", highlight=False)
    found: list[Measured] = []
    for shape in SHAPES:
        with console.status(shape.name):
            of_shape = list(measure(shape, repeats, MEMORY_BYTES))
        found += of_shape
        console.print(as_table(shape, of_shape))
    demanded = [made for made in found if made.is_demanded]
    short = [made for made in demanded if not made.holds]
    console.print(
        f"At least {DEMANDED_SHARE:.0%} of memcpy from {DEMANDED_FROM_BLOCKS} blocks up: "
        f"{len(demanded) - len(short)} of {len(demanded)} figures; "
        f"the lowest is {min(made.share for made in demanded):.2f}."
    )
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "machine": asdict(machine),
            "repeats": repeats,
            "memory_bytes": MEMORY_BYTES,
            "measured": [asdict(made) for made in found],
        }
        json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {json_path}")


def as_table(shape: Shape, measured: list[Measured]) -> Table:
    """One shape's figures, a line a direction and number of blocks."""
    title = f"{shape.name}: {shape.pieces} pieces of {shape.piece_bytes >> 10} KiB a block"
    table = Table(title=title, title_justify="left")
    for heading in ("blocks", "MiB", "", "GB/s", "memcpy GB/s", "share", "95 %"):
        table.add_column(heading, justify="left" if not heading else "right")
    for made in measured:
        table.add_row(
            f"{made.blocks}",
            f"{made.nbytes / 2**20:.1f}",
            made.verb,
            f"{made.rate / 1e9:.2f}",
            f"{made.memcpy_rate / 1e9:.2f}",
            f"{made.share:.2f}" + ("" if made.holds else " (short)"),
            f"{made.share_low:.2f} to {made.share_high:.2f}",
        )
    return table


def _plain_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory as an engine's allocator gives it: private pages of the usual size, all present, and
    a tensor that begins one line after a page. How two addresses lie to each other within their
    pages decides over the speed of some loops."""
    mapping = mmap.mmap(-1, nbytes + LINE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapping, np.uint8)
    memory[:] = 1
    return memory[LINE_BYTES:]


def _sample(call: Callable[[], object]) -> Sample:
    start_wall_s, start_busy_s = time.perf_counter(), time.thread_time()
    call()
    return Sample(time.thread_time() - start_busy_s, time.perf_counter() - start_wall_s)
