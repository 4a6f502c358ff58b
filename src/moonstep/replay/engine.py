"""The engine as the scheduler half sees it, one request after the other, without a model.

Each request is looked up in the engine's pool, then asked for at Moonstep, allocated, computed in
steps of ``step_blocks`` and freed: the calls and their order are those of vLLM's scheduler. What
the workers would copy is carried out on block names, so a wrong byte would be seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from moonstep.engine import Block, BlockPool, CachedRequests, NewRequest
from moonstep.replay.pool import BlockKey, pool_key
from moonstep.scheduler.scheduler import MooncakeStoreScheduler
from moonstep.wire import BLOCK, SLOT, RankReport, StepPlan, WorkerReport

_RANK: Final = 0


class Pool(Protocol):
    """The engine's block pool: ``EnginePool``, or vLLM's own behind the same verbs."""

    def cached(self, key: BlockKey) -> Any | None: ...
    def touch(self, blocks: Sequence[Any]) -> None: ...
    def take(self, count: int) -> list[Any]: ...
    def name(self, block: Any, key: BlockKey) -> None: ...
    def free(self, blocks: Sequence[Any]) -> None: ...


@dataclass(slots=True)
class ReplayRequest:
    """A request of the trace in the engine's terms. Every block counts as full."""

    request_id: str
    num_tokens: int
    block_hashes: Sequence[bytes]
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = False


@dataclass(slots=True)
class _New:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass(slots=True)
class _Cached:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Output:
    scheduled_new_reqs: Sequence[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    preempted_req_ids: set[str] | None = None


@dataclass(frozen=True, slots=True)
class _Table:
    blocks: Sequence[Block]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([block.block_id for block in self.blocks],)


@dataclass(frozen=True, slots=True)
class Hit:
    """Leading blocks of a request that need no computing: from the engine, then from the host."""

    engine_blocks: int
    host_blocks: int


class ReplayEngine:
    """Runs requests through a pool and Moonstep's scheduler half (``None``: the pool alone)."""

    def __init__(
        self,
        pool: Pool,
        scheduler: MooncakeStoreScheduler | None,
        slots: int,
        block_tokens: int,
        step_blocks: int,
    ) -> None:
        self.captured_blocks = 0
        self._pool = pool
        self._scheduler = scheduler
        self._slots = slots
        self._block_tokens = block_tokens
        self._step_blocks = step_blocks
        self._finished: set[str] = set()
        self._count = 0
        self._in_block: dict[int, BlockKey] = {}
        self._in_slot: dict[int, BlockKey] = {}
        if scheduler is not None:
            # A protocol's fields can be set, so a type checker wants exactly its types.
            scheduler.bind_block_pool(cast("BlockPool", pool))
            self._report(RankReport(slots, through=0))

    def run(self, names: Sequence[bytes]) -> Hit:
        """One request from arrival to end; ``names`` are those of its blocks, head first.

        Raises:
            IndexError: the pool cannot hold the request.
            RuntimeError: a restore would have given it wrong bytes.
        """
        self._count += 1
        # One token more than the blocks hold: the engine computes at least one token of a request,
        # and here that should not cost it its last block.
        tokens = len(names) * self._block_tokens + 1
        request = ReplayRequest(str(self._count), tokens, list(names))
        keys = [pool_key(name) for name in names]
        table = self._leading(keys)
        local = len(table)
        host = self._ask(request, local)
        self._pool.touch(table)
        self._compute(request, keys, table, host)
        self._pool.free(table[::-1])
        self._finished.add(request.request_id)
        return Hit(local, host)

    def _leading(self, keys: Sequence[BlockKey]) -> list[Any]:
        table = []
        for key in keys:
            block = self._pool.cached(key)
            if block is None:
                break
            table.append(block)
        return table

    def _ask(self, request: ReplayRequest, local_blocks: int) -> int:
        if self._scheduler is None:
            return 0
        self._scheduler.on_new_request(request)
        local_tokens = local_blocks * self._block_tokens
        tokens, sliced = self._scheduler.get_num_new_matched_tokens(request, local_tokens)
        assert tokens is not None, "a replay has no store to wait for"
        assert not sliced, "a replay restores within a step: settings must allow it"
        return tokens // self._block_tokens

    def _compute(
        self, request: ReplayRequest, keys: Sequence[BlockKey], table: list[Any], host: int
    ) -> None:
        """Steps from admission to the last token; ``table`` grows to the request's whole table."""
        computed = len(table) + host
        request.num_computed_tokens = computed * self._block_tokens
        stop = min(len(keys), computed + self._step_blocks)
        self._allocate(keys, table, stop)
        if self._scheduler is not None:
            external_tokens = host * self._block_tokens
            self._scheduler.update_state_after_alloc(request, _Table(table), external_tokens)
        new = _New(request.request_id, _Table(table).get_block_ids(), request.num_computed_tokens)
        self._step(request, keys, table, range(computed, stop), [new], _Cached())
        while stop < len(keys):
            start, stop = stop, min(len(keys), stop + self._step_blocks)
            self._allocate(keys, table, stop)
            ids = [block.block_id for block in table[start:stop]]
            cached = _Cached([request.request_id], set(), [(ids,)], [request.num_computed_tokens])
            self._step(request, keys, table, range(start, stop), [], cached)

    def _allocate(self, keys: Sequence[BlockKey], table: list[Any], stop: int) -> None:
        """Blocks up to ``stop``, named at once: the engine names them before they are computed."""
        start = len(table)
        table.extend(self._pool.take(stop - start))
        for position in range(start, stop):
            self._pool.name(table[position], keys[position])

    def _step(
        self,
        request: ReplayRequest,
        keys: Sequence[BlockKey],
        table: Sequence[Any],
        computes: range,
        new: list[_New],
        cached: _Cached,
    ) -> None:
        scheduled = len(computes) * self._block_tokens
        if self._scheduler is not None:
            tokens = {request.request_id: scheduled}
            output = _Output(new, cached, tokens, scheduled, self._finished)
            plan = self._scheduler.build_connector_meta(output)
            self._finished = set()
            self._restore(plan)
            for position in computes:
                self._in_block[table[position].block_id] = keys[position]
            self._capture(plan)
            for position, block in enumerate(table):
                if self._in_block.get(block.block_id) != keys[position]:
                    raise RuntimeError(f"block {position} of a request has another one's bytes")
        request.num_computed_tokens += scheduled

    def _restore(self, plan: StepPlan) -> None:
        for row in plan.restores.tolist():
            self._in_block[row[BLOCK]] = self._in_slot[row[SLOT]]

    def _capture(self, plan: StepPlan) -> None:
        for row in plan.captures.tolist():
            self._in_slot[row[SLOT]] = self._in_block[row[BLOCK]]
        self.captured_blocks += len(plan.captures)
        captured = (plan.step,) if len(plan.captures) else ()
        self._report(RankReport(self._slots, plan.step, captured))

    def _report(self, report: RankReport) -> None:
        assert self._scheduler is not None
        self._scheduler.update_connector_output(WorkerReport({_RANK: report}))
