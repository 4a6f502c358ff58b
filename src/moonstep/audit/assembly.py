"""Assembly: builds the real scheduler, both halves of the connector, and the stand-in ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.structured_output import StructuredOutputManager

from moonstep.audit import engineconfig
from moonstep.audit.kvmemory import RankMemory
from moonstep.audit.parallel import Place, Surroundings, places
from moonstep.audit.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonstep.audit.engineconfig import EngineConfig
    from moonstep.audit.reporter import Reporter
    from moonstep.audit.shape import Shape


@dataclass(slots=True)
class _LayerModule:
    """What a forward context knows of an attention layer: its KV cache."""

    kv_cache: Any


def make_scheduler(config: EngineConfig, shape: Shape) -> Any:
    """The scheduler that the configuration asks for, with its half of the connector."""
    scheduler_class = config.vllm_config.scheduler_config.get_scheduler_cls()
    scheduler = scheduler_class(
        vllm_config=config.vllm_config,
        kv_cache_config=config.scheduler_kv,
        structured_output_manager=StructuredOutputManager(config.vllm_config),
        block_size=config.scheduler_block_tokens,
        hash_block_size=config.hash_block_tokens,
        log_stats=False,
    )
    scheduler.use_v2_model_runner = shape.runner == "v2"
    return scheduler


def make_ranks(
    config: EngineConfig,
    shape: Shape,
    connected: bool,
    reporter: Reporter,
    forgive: Callable[[int], bool],
) -> list[Rank]:
    """All ranks, each with KV memory of its own and, if `connected`, its half of the connector."""
    ranks = []
    for place, kv_config in zip(places(shape.ranks, shape.stages), config.rank_kv, strict=True):
        memory = RankMemory(kv_config, shape.layout, place.rank, shape.copies)
        layers = {name: _LayerModule(tensor) for name, tensor in memory.tensors.items()}
        surroundings = Surroundings(place, layers)
        half = _make_half(config, surroundings, place, kv_config, memory) if connected else None
        ranks.append(Rank(memory, surroundings, half, shape, reporter.report, forgive))
    return ranks


def _make_half(
    config: EngineConfig,
    surroundings: Surroundings,
    place: Place,
    kv_config: Any,
    memory: RankMemory,
) -> Any:
    vllm_config = engineconfig.for_rank(config.vllm_config, place.rank)
    with surroundings.active():
        half = KVConnectorFactory.create_connector(
            config=vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=kv_config
        )
        surroundings.connector = half
        half.register_kv_caches(memory.tensors)
    return half


def make_hasher(config: EngineConfig, connected: bool) -> Any:
    """The function that hashes a request's blocks; None where the engine needs no hashes.

    After the scheduler is built, as in the engine: the hash seed is set here.
    """
    cache_config = config.vllm_config.cache_config
    if not (cache_config.enable_prefix_caching or connected):
        return None
    hash_function = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    return get_request_block_hasher(config.hash_block_tokens, hash_function)


def make_aggregator(scheduler: Any, ranks: list[Rank]) -> Any:
    """vLLM's aggregator of the ranks' reports."""
    return KVOutputAggregator(scheduler.connector.get_finished_count() or len(ranks))


def shake_hands(scheduler: Any, ranks: list[Rank], shape: Shape) -> None:
    """Pass the ranks' handshake metadata to the scheduler half, as the engine core does."""
    content = {
        (place.stage, place.shard): metadata
        for place, rank in zip(places(shape.ranks, shape.stages), ranks, strict=True)
        if (metadata := rank.connector.get_handshake_metadata()) is not None
    }
    if content:
        scheduler.connector.set_xfer_handshake_metadata_pp_aware(content)
