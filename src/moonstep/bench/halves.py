"""Two scheduler halves under one set of verbs: Moonstep's and that of vLLM's own connector."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns, thread_time_ns
from typing import Any, Protocol, TypeVar

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

T = TypeVar("T")


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
        self.connector.update_connector_output(moonstep_worker_starts(slots))

    def answer(self, metadata: Any) -> Any:
        return moonstep_worker_says(metadata, self._slots)


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
        return _worker_says(MooncakeStoreWorkerMetadata(completed_saves=done) if done else None)


def run_step(half: Half, world: World, step: Step) -> StepCost:
    """Put ``step`` through every hook of the scheduler half, as the engine does, and settle it."""
    connector = half.connector
    ns, before = 0, sys.getallocatedblocks()
    for request in step.admitted:
        _, spent_ns = timed(_admit, connector, request, world.blocks_of(request))
        ns += spent_ns
    metadata, spent_ns = timed(connector.build_connector_meta, step.output)
    ns += spent_ns
    kept_objects = sys.getallocatedblocks() - before
    wire_bytes = len(pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL))
    world.settle()
    _, spent_ns = timed(connector.update_connector_output, half.answer(metadata))
    return StepCost(ns + spent_ns, wire_bytes, kept_objects)


def timed(call: Callable[..., T], *arguments: Any) -> tuple[T, int]:
    """The result of a call that waits for nothing, and its nanoseconds when nobody disturbs it.

    That is wall-clock time, unless the thread lost its core meanwhile: then its CPU time, whose
    clock takes longer to read.
    """
    cpu_ns = thread_time_ns()
    wall_ns = perf_counter_ns()
    result = call(*arguments)
    wall_ns = perf_counter_ns() - wall_ns
    cpu_ns = thread_time_ns() - cpu_ns
    return result, min(wall_ns, cpu_ns)


def _admit(connector: Any, request: Any, blocks: Any) -> None:
    connector.on_new_request(request)
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, blocks, 0)


def moonstep_worker_starts(slots: int) -> Any:
    """The first report of a Moonstep worker."""
    return _worker_says(_as_metadata(RankReport(slots, through=0)))


def moonstep_worker_says(metadata: Any, slots: int) -> Any:
    """What a Moonstep worker reports that has carried out a step: nothing, if nothing ended."""
    step = metadata.plan.step
    if not len(metadata.plan.captures):
        return _worker_says(None)
    return _worker_says(_as_metadata(RankReport(slots, step, captured=(step,))))


def _as_metadata(report: RankReport) -> ReportMetadata:
    return ReportMetadata(WorkerReport({0: report}))


def _worker_says(metadata: Any) -> Any:
    return KVConnectorOutput(kv_connector_worker_meta=metadata)
