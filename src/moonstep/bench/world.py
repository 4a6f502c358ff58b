"""The engine's side of a step, made of vLLM's own objects: what a scheduler half is told.

Not a scheduler: it admits what it is told to and lets everyone decode. So a step can have exactly
as many running requests, and as many filled blocks, as a measurement asks for.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its output, and what makes it cheap or dear for a connector."""

    output: Any
    admitted: tuple[Any, ...]
    filled_blocks: int
    new_blocks: int


class World:
    """Requests, their tables and the engine's block pool, under exact control.

    A step is two calls: ``admit``, ``chunk`` or ``decode`` builds what the scheduler half is told,
    and ``settle`` does what the engine does once the step has run. ``finish`` comes in between.
    """

    def __init__(self, block_tokens: int, blocks: int) -> None:
        self.block_tokens = block_tokens
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=block_tokens)
        self.requests: dict[str, Any] = {}
        self._tables: dict[str, list[Any]] = {}
        self._cached_blocks: dict[str, int] = {}
        self._scheduled: dict[str, int] = {}
        self._finished: set[str] = set()

    def request(self, name: str, tokens: list[int]) -> Any:
        """A request with names of its own for every block. Keeps ``tokens``, never changes it."""
        return Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1 << 20, ignore_eos=True),
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=_hasher(name, self.block_tokens),
        )

    def blocks_of(self, request: Any) -> Any:
        """The request's whole table as ``update_state_after_alloc`` gets it."""
        return KVCacheBlocks((self._tables[request.request_id],))

    def admit(self, requests: Sequence[Any], chunk_tokens: int | None = None) -> Step:
        """A step that starts ``requests``, with at most ``chunk_tokens`` of each."""
        new, filled, allocated = [], 0, 0
        for request in requests:
            name = request.request_id
            self.requests[name] = request
            self._tables[name], self._cached_blocks[name] = [], 0
            count = min(request.num_tokens, chunk_tokens or request.num_tokens)
            ids, full = self._allocate(request, count)
            filled, allocated = filled + full, allocated + len(ids)
            new.append(NewRequestData.from_request(request, (ids,)))
            self._scheduled[name] = count
        output = self._output(new, CachedRequestData.make_empty())
        return Step(output, tuple(requests), filled, allocated)

    def chunk(self, request: Any, chunk_tokens: int) -> Step:
        """A step that goes on with one request's prefill."""
        count = min(chunk_tokens, request.num_tokens - request.num_computed_tokens)
        return self._go_on([(request, count)])

    def decode(self) -> Step:
        """A step in which every request computes one token."""
        return self._go_on([(request, 1) for request in self.requests.values()])

    def finish(self, request: Any) -> None:
        """The request has ended: the next step says so, and its blocks are free, tail first."""
        name = request.request_id
        del self.requests[name], self._cached_blocks[name]
        self.pool.free_blocks(reversed(self._tables.pop(name)))
        self._finished.add(name)

    def settle(self) -> None:
        """The step has run: tokens are computed, and who has none left to compute gets one."""
        for name, count in self._scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(7)
        self._scheduled.clear()

    def _go_on(self, scheduled: Sequence[tuple[Any, int]]) -> Step:
        new_block_ids: list[tuple[list[int], ...] | None] = []
        filled, allocated = 0, 0
        for request, count in scheduled:
            ids, full = self._allocate(request, count)
            filled, allocated = filled + full, allocated + len(ids)
            new_block_ids.append((ids,) if ids else None)
            self._scheduled[request.request_id] = count
        cached = CachedRequestData(
            req_ids=[request.request_id for request, _ in scheduled],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=new_block_ids,
            num_computed_tokens=[request.num_computed_tokens for request, _ in scheduled],
            num_output_tokens=[request.num_output_tokens for request, _ in scheduled],
        )
        return Step(self._output([], cached), (), filled, allocated)

    def _allocate(self, request: Any, count: int) -> tuple[list[int], int]:
        """Give blocks for ``count`` more tokens; the engine names full ones at once."""
        name = request.request_id
        table = self._tables[name]
        stop_tokens = request.num_computed_tokens + count
        missing = -(-stop_tokens // self.block_tokens) - len(table)
        blocks = self.pool.get_new_blocks(missing) if missing > 0 else []
        table.extend(blocks)
        full = min(stop_tokens, request.num_tokens) // self.block_tokens
        known = self._cached_blocks[name]
        if full > known:
            self.pool.cache_full_blocks(request, table, known, full, self.block_tokens, 0)
            self._cached_blocks[name] = full
        return [block.block_id for block in blocks], max(0, full - known)

    def _output(self, new: list[Any], cached: Any) -> Any:
        scheduled = dict(self._scheduled)
        finished, self._finished = self._finished, set()
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
            preempted_req_ids=set(),
            kv_connector_block_state=KVConnectorBlockState(
                req_ids=set(scheduled),
                resolve_block_ids=lambda name: ([b.block_id for b in self._tables[name]],),
                boundary_state_offloads={},
            ),
        )


def _hasher(name: str, block_tokens: int) -> Callable[[Any], list[bytes]]:
    """Names for a request's full blocks, 32 bytes each as sha256 gives, of ``name`` alone."""
    seed = hashlib.sha256(name.encode()).digest()[:24]
    numbers = itertools.count()

    def hash_blocks(request: Any) -> list[bytes]:
        missing = request.num_tokens // block_tokens - len(request.block_hashes)
        return [
            seed + number.to_bytes(8, "big")
            for number in itertools.islice(numbers, max(0, missing))
        ]

    return hash_blocks
