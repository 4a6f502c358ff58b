"""What a retention interval costs and brings: a trace through a cache that keeps windows or states.

One LRU cache holds the blocks of full attention whole, and of the layers beside it what
:mod:`moonstep.groups` keeps: at the end of every prompt, where prefixes were seen to part, and once
in an interval. So short intervals hit more often and leave room for less.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from moonstep.groups import Group, GroupKind, hit_blocks, kept_boundaries
from moonstep.replay.rates import Rates, leading, rates
from moonstep.replay.traces import Trace, TraceRequest

_FULL: Final = 0
_SPARSE: Final = 1

BlockKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """Layers beside full attention, how often they are kept, and memory.

    ``whole_blocks`` is the memory as the number of the trace's blocks that fit into it with all
    layers kept whole; ``None`` is memory without end.
    """

    sparse: Group
    interval_tokens: int
    whole_blocks: int | None


@dataclass(frozen=True, slots=True)
class RetentionFigures:
    """What came of one plan.

    ``kept_share`` is what was kept of the bytes that all layers of the new blocks have.
    """

    hits: Rates
    kept_share: float


def windows(block_tokens: int, window_tokens: int = 1024, layers: int = 5) -> Group:
    """Layers with a window beside each layer of full attention, bytes counted in its tokens."""
    return Group(
        _SPARSE,
        GroupKind.SLIDING_WINDOW,
        block_tokens,
        layers * block_tokens,
        ("windows",),
        window_tokens=window_tokens,
    )


def states(block_tokens: int, state_tokens: int = 512, layers: int = 3) -> Group:
    """Recurrent layers beside each layer of full attention.

    A state has the bytes of ``state_tokens`` tokens of full attention.
    """
    return Group(
        _SPARSE, GroupKind.RECURRENT_STATE, block_tokens, layers * state_tokens, ("states",)
    )


def replay_retention(trace: Trace, plan: RetentionPlan) -> RetentionFigures:
    """Run every request of ``trace`` through a cache of ``plan``."""
    cache = RetentionCache(trace.block_tokens, plan)
    hits = [cache.run(request) for request in trace.requests]
    return RetentionFigures(rates(trace, hits), cache.kept_share)


class RetentionCache:
    """The cache of one plan. A boundary is kept by whoever computes what ends there."""

    def __init__(self, block_tokens: int, plan: RetentionPlan) -> None:
        full_bytes = block_tokens
        self._full = Group(_FULL, GroupKind.FULL_ATTENTION, block_tokens, full_bytes, ("full",))
        self._sparse = plan.sparse
        self._interval_tokens = plan.interval_tokens
        whole_bytes = full_bytes + plan.sparse.block_bytes
        blocks = plan.whole_blocks
        self._capacity_bytes = None if blocks is None else blocks * whole_bytes
        self._bytes_of = (full_bytes, plan.sparse.block_bytes)
        self._cached: OrderedDict[BlockKey, None] = OrderedDict()
        self._used_bytes = 0
        self._new_bytes = [0, 0]

    @property
    def kept_share(self) -> float:
        """Bytes that were kept, of those that all layers of the new blocks have."""
        full, sparse = self._new_bytes
        whole = full * sum(self._bytes_of) / self._bytes_of[_FULL]
        return (full + sparse) / whole if whole else 0.0

    def run(self, request: TraceRequest) -> int:
        """One request arrives and is computed: the leading blocks it hits. All of it enters."""
        block = self._full.block_tokens
        whole = request.input_tokens // block
        run = self._run(request, whole)
        hit = self._highest(request, min(run, (request.input_tokens - 1) // block))
        boundaries = kept_boundaries(
            [self._full, self._sparse], request.input_tokens, self._interval_tokens
        )
        # Where prefixes part, the engine says so: what is missing there is kept as well.
        wanted = {hit, *({run} if run > hit else ()), *(b // block for b in boundaries)}
        kept = {p for b in wanted if b >= hit for p in hit_blocks(self._sparse, b * block)}
        for key in self._tail_first(request, whole, kept):
            self._enter(key)
        self._make_room()
        return hit

    def _run(self, request: TraceRequest, whole: int) -> int:
        full = [(_FULL, block) for block in request.blocks[:whole]]
        return leading(full, self._cached)

    def _highest(self, request: TraceRequest, run: int) -> int:
        """The highest boundary up to ``run`` blocks for which the other layers are there."""
        tokens = self._full.block_tokens
        for boundary in range(run, 0, -1):
            needed = hit_blocks(self._sparse, boundary * tokens)
            if all((_SPARSE, request.blocks[p]) in self._cached for p in needed):
                return boundary
        return 0

    def _tail_first(self, request: TraceRequest, whole: int, kept: set[int]) -> Iterator[BlockKey]:
        """What was read or is new, in the order in which it is to leave."""
        for position in range(whole - 1, -1, -1):
            if position in kept:
                yield _SPARSE, request.blocks[position]
            yield _FULL, request.blocks[position]

    def _enter(self, key: BlockKey) -> None:
        if key not in self._cached:
            kind_bytes = self._bytes_of[key[0]]
            self._used_bytes += kind_bytes
            self._new_bytes[key[0]] += kind_bytes
        self._cached[key] = None
        self._cached.move_to_end(key)

    def _make_room(self) -> None:
        while self._capacity_bytes is not None and self._used_bytes > self._capacity_bytes:
            key, _ = self._cached.popitem(last=False)
            self._used_bytes -= self._bytes_of[key[0]]
