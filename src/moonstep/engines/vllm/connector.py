"""``MoonstepConnector``: vLLM's connector interface over the two halves.

vLLM builds one object in the scheduler process and one in every worker, and calls on each only the
hooks of its side. Nothing is decided here: a hook hands over to the half that is there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from moonstep.config import Role, Settings
from moonstep.engines.vllm.advice import retention_advice
from moonstep.engines.vllm.facts import EngineFacts, engine_facts
from moonstep.engines.vllm.logs import join_vllm_logging, said_once
from moonstep.engines.vllm.machine import machine_memory_bytes
from moonstep.engines.vllm.metadata import ReportMetadata, StepMetadata
from moonstep.engines.vllm.metrics import MoonstepPromMetrics, MoonstepStats
from moonstep.engines.vllm.plugin import register
from moonstep.engines.vllm.readings import Readings
from moonstep.engines.vllm.summary import Summary

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from moonstep.engines.vllm.stores import SchedulerStore
    from moonstep.scheduler.scheduler import MooncakeStoreScheduler
    from moonstep.worker.worker import MooncakeStoreWorker

logger = logging.getLogger(__name__)

Hook = TypeVar("Hook", bound=Callable[..., Any])


def _timed(hook: Hook) -> Hook:
    """Count a scheduler-side hook's time, so that the summary can say what the connector costs."""

    @wraps(hook)
    def timed(self: MoonstepConnector, *args: Any, **kwargs: Any) -> Any:
        start_ns = time.perf_counter_ns()
        try:
            return hook(self, *args, **kwargs)
        finally:
            self.scheduler.stats.hook_ns += time.perf_counter_ns() - start_ns

    return cast("Hook", timed)


class MoonstepConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps what the engine computes in host memory, and gives it back to whoever needs it.

    Raises at construction, each with one line that begins with ``moonstep:``:
        SettingError: for a setting that cannot be used.
        Unsupported: for an engine configuration that cannot be kept right.
    """

    scheduler: MooncakeStoreScheduler
    """The scheduler half; only in the scheduler process."""
    worker: MooncakeStoreWorker
    """The worker half; only in a worker, once the KV caches are registered."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_vllm_logging()
        with said_once(logger):
            transfer = self._kv_transfer_config
            extra = transfer.kv_connector_extra_config
            self.settings = Settings.parse(extra or {}, Role(transfer.kv_role))
            self.facts: EngineFacts = engine_facts(vllm_config, kv_cache_config)
        self._store: SchedulerStore | None = None
        if role == KVConnectorRole.SCHEDULER:
            from moonstep.scheduler.scheduler import MooncakeStoreScheduler

            if self.settings.store:
                from moonstep.engines.vllm.stores import SchedulerStore

                with said_once(logger):
                    self._store = SchedulerStore(
                        self.settings, self.facts, vllm_config, kv_cache_config
                    )
            self.scheduler = MooncakeStoreScheduler(
                self.settings,
                self.facts.groups,
                self.facts.world_size,
                self.facts.tokens_per_decode,
                hashes_lag=self.facts.async_scheduling,
                store=self._store.make_tier if self._store else None,
            )
            self._summary = Summary()
            self._readings = Readings(self.scheduler, self._store)
            if advice := retention_advice(self.facts):
                logger.info("%s", advice)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: this is a cache. What is not saved is computed again, never owed to anyone."""
        return False

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler.bind_block_pool(gpu_block_pool)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self.scheduler.bind_cache_manager(kv_cache_manager)

    @_timed
    def on_new_request(self, request: Request) -> None:
        self.scheduler.on_new_request(request)

    @_timed
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    @_timed
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        # Timed by hand: in most steps of a decoding engine the wrapper would cost as much again.
        start_ns = time.perf_counter_ns()
        scheduler = self.scheduler
        metadata = StepMetadata(scheduler.build_connector_meta(scheduler_output))
        scheduler.stats.hook_ns += time.perf_counter_ns() - start_ns
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if metadata is not None:
            self._take_report(metadata)

    @_timed
    def _take_report(self, metadata: KVConnectorWorkerMetadata) -> None:
        if isinstance(metadata, ReportMetadata):
            self._summary.take(metadata.report)
            self._readings.take(metadata.report)
            self.scheduler.update_connector_output(metadata.report)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_timed
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.request_finished(request), None

    def has_pending_push_work(self) -> bool:
        return self.scheduler.has_pending_push_work()

    def reset_cache(self) -> bool:
        return self.scheduler.reset_cache()

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from moonstep.engines.vllm.devices import device_for
        from moonstep.engines.vllm.layout import cache_layout
        from moonstep.engines.vllm.stores import worker_store
        from moonstep.worker.pieces import slot_bytes
        from moonstep.worker.worker import MooncakeStoreWorker

        with said_once(logger):
            layout = cache_layout(kv_caches, self._kv_cache_config)
            need = slot_bytes(layout.pieces)
            self.settings.check(need, self.facts.world_size, machine_memory_bytes())
            device = device_for(layout.device_type)
            self.worker = MooncakeStoreWorker(
                self.settings,
                self.facts.rank,
                self.facts.world_size,
                layout.block_count,
                layout.pieces,
                device,
                worker_store(self.settings),
            )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.worker.restore(self._plan.plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a restore is over, or ordered, when ``start_load_kv`` returns."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing to do layer by layer: a step is captured whole, after its forward pass."""

    def wait_for_save(self) -> None:
        self.worker.capture(self._plan.plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """No request is kept for sending; sliced loads end in the step of their last slice."""
        received = self._plan.plan.received
        return None, set(received) if received else None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self.worker.report()
        return None if report is None else ReportMetadata(report)

    @property
    def _plan(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    # What vLLM asks the class.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False: nothing is copied layer by layer.

        vLLM asks while it builds its configuration, in the first process and before a model is
        loaded, if full CUDA graphs are on. No hook sees settings earlier, so they are checked here.

        Raises:
            SettingError: for a setting or a store's URL that cannot be used.
        """
        from moonstep.engines.vllm.stores import check_settings

        join_vllm_logging()
        with said_once(logger):
            check_settings(extra_config)
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MoonstepStats:
        """What an engine has sent, in the API process."""
        return MoonstepStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MoonstepPromMetrics:
        """The metrics of this API process. Once a process."""
        register()  # ``MultiConnector`` looks its children's statistics up by name alone
        return MoonstepPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> MoonstepStats | None:
        """What has changed, asked in every step on both sides; the scheduler's knows it all."""
        return self._changed() if self._role == KVConnectorRole.SCHEDULER else None

    @_timed
    def _changed(self) -> MoonstepStats | None:
        changes = self._readings.changes()
        return None if changes is None else MoonstepStats(data=changes)

    # Both.

    def shutdown(self) -> None:
        if self._role == KVConnectorRole.SCHEDULER:
            logger.info("%s", self._summary.line(self.scheduler.stats))
            if self._store is not None:
                self._store.close()
        elif hasattr(self, "worker"):
            self.worker.shutdown()
