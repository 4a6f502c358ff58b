"""Two scheduler halves under one set of verbs: Moonstep's and that of vLLM's own connector."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from time import thread_time_ns
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (
    MooncakeStoreConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeStoreWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

from moonstep.bench.engineconfig import half_config
from moonstep.bench.world import Step, World
from moonstep.engines.vllm.connector import MoonstepConnector
from moonstep.engines.vllm.metadata import ReportMetadata
from moonstep.engines.vllm.plugin import register
from moonstep.wire import RankReport, WorkerReport


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step cost a scheduler half, all of its hooks together."""

    ns: int
    wire_bytes: int
    """The step's metadata, pickled once and sent to every worker."""
    kept_objects: int
    """Memory blocks that Python's allocator holds more of, once the metadata is built."""


def finish(half: Half, world: World, request: Any) -> None:
    """End a request as the engine does: the connector hears of it, then its blocks are free."""
    table = world.blocks_of(request).get_block_ids()
    half.connector.request_finished_all_groups(request, table)
    world.finish(request)


class Half(Protocol):
    """A scheduler half that is driven step by step, with one worker that does all it is told."""

    name: str
    connector: Any

    def answer(self, metadata: Any) -> Any:
        """What the worker says once it has done what ``metadata`` asks for."""


class MoonstepHalf:
    """Moonstep's connector in the scheduler role, with ``slots`` slots on one rank."""

    def __init__(
        self, world: World, slots: int, settings: dict[str, Any] | None = None, label: str = ""
    ) -> None:
        register()
        self.name = f"Moonstep {label}".strip()
        config = half_config("MoonstepConnector", settings or {}, world.block_tokens)
        self.connector = MoonstepConnector(
            config.vllm_config, KVConnectorRole.SCHEDULER, config.kv_cache_config
        )
        self.connector.bind_gpu_block_pool(world.pool)
        self._slots = slots
        report = RankReport(slots=slots, through=0)
        self.connector.update_connector_output(_worker_says(_as_metadata(report)))

    def answer(self, metadata: Any) -> Any:
        step = metadata.plan.step
        captured = (step,) if len(metadata.plan.captures) else ()
        return _worker_says(_as_metadata(RankReport(self._slots, step, captured)))


class StockHalf:
    """The connector that ships with vLLM, ``MooncakeStoreScheduler`` behind its own hooks.

    Lookups are off unless asked for: they need a store's server.
    """

    def __init__(self, world: World, *, saves_decode: bool) -> None:
        self.name = "vLLM's own"
        extra = {"save_decode_cache": saves_decode, "enable_lookup": False}
        config = half_config("MooncakeStoreConnector", extra, world.block_tokens)
        self.connector = MooncakeStoreConnector(
            config.vllm_config, KVConnectorRole.SCHEDULER, config.kv_cache_config
        )
        self.connector.bind_gpu_block_pool(world.pool)

    def answer(self, metadata: Any) -> Any:
        done = {r.store_job_id: 1 for r in metadata.requests if r.store_job_id is not None}
        return _worker_says(MooncakeStoreWorkerMetadata(completed_saves=done))


def run_step(half: Half, world: World, step: Step) -> StepCost:
    """Put ``step`` through every hook of the scheduler half, as the engine does, and settle it."""
    connector = half.connector
    ns, before = 0, sys.getallocatedblocks()
    for request in step.admitted:
        blocks = world.blocks_of(request)
        start = thread_time_ns()
        connector.on_new_request(request)
        connector.get_num_new_matched_tokens(request, 0)
        connector.update_state_after_alloc(request, blocks, 0)
        ns += thread_time_ns() - start
    start = thread_time_ns()
    metadata = connector.build_connector_meta(step.output)
    ns += thread_time_ns() - start
    kept_objects = sys.getallocatedblocks() - before
    wire_bytes = len(pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL))
    world.settle()
    said = half.answer(metadata)
    start = thread_time_ns()
    connector.update_connector_output(said)
    ns += thread_time_ns() - start
    return StepCost(ns, wire_bytes, kept_objects)


def _as_metadata(report: RankReport) -> ReportMetadata:
    return ReportMetadata(WorkerReport({0: report}))


def _worker_says(metadata: Any) -> Any:
    return KVConnectorOutput(kv_connector_worker_meta=metadata)
