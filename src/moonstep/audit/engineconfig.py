"""Engine configuration: a Shape and a connector turned into vLLM's own configuration objects."""

from __future__ import annotations

import atexit
import copy
import json
import shutil
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.plugins import load_general_plugins
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)

from moonstep.audit import groupsets
from moonstep.audit.environ import environment
from moonstep.audit.oracle import VOCABULARY

if TYPE_CHECKING:
    from moonstep.audit.shape import Shape

LoadFailurePolicy = Literal["fail", "recompute"]


@dataclass(frozen=True, slots=True)
class ConnectorChoice:
    """Which connector is driven; `name` is a registered name or `module:Class`, None for none."""

    name: str | None = None
    extra_config: dict[str, Any] = field(default_factory=dict)
    role: str = "kv_both"
    load_failure_policy: LoadFailurePolicy = "fail"

    def transfer_config(self) -> Any:
        """vLLM's `KVTransferConfig` for this choice, or None."""
        if self.name is None:
            return None
        module, _, class_name = self.name.rpartition(":")
        return KVTransferConfig(
            kv_connector=class_name,
            kv_connector_module_path=module or None,
            kv_role=self.role,
            kv_connector_extra_config=dict(self.extra_config),
            kv_load_failure_policy=self.load_failure_policy,
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that the scheduler and the ranks are built from."""

    vllm_config: Any
    scheduler_kv: Any
    rank_kv: tuple[Any, ...]
    scheduler_block_tokens: int
    hash_block_tokens: int


@lru_cache(maxsize=4)
def _model_folder(kv_heads: int) -> str:
    """A folder with a tiny model's configuration, and a file that stands for its weights.

    Nobody loads them; a connector may tell weights by what is in the file.
    """
    folder = tempfile.mkdtemp(prefix="audit-model-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    heads = 4
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16 * heads,
        "intermediate_size": 64,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1 << 20,
        "torch_dtype": "float32",
    }
    Path(folder, "config.json").write_text(json.dumps(facts))
    Path(folder, "model.safetensors").write_bytes(b"weights of the audit's model")
    return folder


@lru_cache(maxsize=32)
def _model_config(max_tokens: int, kv_heads: int) -> Any:
    return ModelConfig(
        model=_model_folder(kv_heads),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=max_tokens,
        seed=0,
    )


def _scheduler_config(shape: Shape) -> Any:
    return SchedulerConfig(
        max_num_seqs=shape.seats,
        max_num_batched_tokens=shape.budget_tokens,
        max_model_len=shape.max_tokens,
        enable_chunked_prefill=shape.chunked,
        is_encoder_decoder=False,
        policy=shape.policy,
        async_scheduling=False,
    )


def _speculative_config(shape: Shape, model_config: Any) -> Any:
    if not shape.drafts:
        return None
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=shape.drafts,
        prompt_lookup_max=3,
        target_model_config=model_config,
        target_parallel_config=ParallelConfig(),
    )


def _set_cache(cache: Any, shape: Shape) -> None:
    """What the engine settles once it knows the model's layers; the model here has none."""
    cache.block_size = shape.block_tokens
    cache.kv_cache_layout = shape.layout
    cache.prefix_cache_retention_interval = shape.interval_tokens
    cache.prefix_match_unit = shape.match_tokens or None
    if "state" in shape.kinds:
        cache.mamba_cache_mode = "align"
        cache.mamba_block_size = groupsets.block_tokens(shape, "state")


def _kv_configs(vllm_config: Any, shape: Shape) -> tuple[list[Any], Any, int, int]:
    """KV cache configurations of the ranks and the scheduler, its block and the hashes' tokens."""
    memory_bytes = [1 << 30] * (shape.ranks * shape.stages)
    rank_kv = get_kv_cache_configs(vllm_config, groupsets.rank_specs(shape), memory_bytes)
    scheduler_kv = generate_scheduler_kv_cache_config(rank_kv)
    vllm_config.cache_config.num_gpu_blocks = scheduler_kv.num_blocks
    scheduler_block_tokens, hash_block_tokens = resolve_kv_cache_block_sizes(
        scheduler_kv, vllm_config
    )
    alignment_tokens = resolve_cache_hit_alignment_tokens(
        scheduler_kv, vllm_config, scheduler_block_tokens, hash_block_tokens
    )
    for config in (*rank_kv, scheduler_kv):
        config.kv_cache_layout = shape.layout
        config.hash_block_size = hash_block_tokens
        config.cache_hit_alignment_tokens = alignment_tokens
    return rank_kv, scheduler_kv, scheduler_block_tokens, hash_block_tokens


def runner_of(shape: Shape) -> AbstractContextManager[None]:
    """While the shape's model runner is the one that ``VllmConfig`` says it uses.

    ``VllmConfig.use_v2_model_runner`` reads the environment each time it is asked.
    """
    return environment("VLLM_USE_V2_MODEL_RUNNER", "1" if shape.runner == "v2" else "0")


def build(shape: Shape, connector: ConnectorChoice) -> EngineConfig:
    """Configuration of one engine. What asks it for the runner has to be within ``runner_of``.

    The CPU platform switches asynchronous scheduling off while the configuration is built, so it
    is set afterwards; runner V2 cannot be asked for at all without Triton.
    """
    load_general_plugins()
    with environment("VLLM_USE_V2_MODEL_RUNNER", "0"):
        return _build(shape, connector)


def _build(shape: Shape, connector: ConnectorChoice) -> EngineConfig:
    model_config = _model_config(shape.max_tokens, shape.heads if shape.copies > 1 else 4)
    vllm_config = VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(
            block_size=shape.block_tokens,
            enable_prefix_caching=shape.prefix_caching,
            num_gpu_blocks_override=shape.blocks,
        ),
        scheduler_config=_scheduler_config(shape),
        parallel_config=ParallelConfig(
            tensor_parallel_size=shape.ranks, pipeline_parallel_size=shape.stages
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=connector.transfer_config(),
        speculative_config=_speculative_config(shape, model_config),
    )
    _set_cache(vllm_config.cache_config, shape)
    vllm_config.scheduler_config.enable_chunked_prefill = shape.chunked
    if vllm_config.speculative_config is not None:
        # Another drafter would have to be there as a model.
        vllm_config.speculative_config.method = shape.drafter
    rank_kv, scheduler_kv, block_tokens, hash_tokens = _kv_configs(vllm_config, shape)
    vllm_config.scheduler_config.async_scheduling = shape.asynchronous
    return EngineConfig(
        vllm_config=vllm_config,
        scheduler_kv=scheduler_kv,
        rank_kv=tuple(rank_kv),
        scheduler_block_tokens=block_tokens,
        hash_block_tokens=hash_tokens,
    )


def for_rank(vllm_config: Any, rank: int) -> Any:
    """A worker's configuration: the engine's, with the worker's own rank."""
    own = copy.copy(vllm_config)
    own.parallel_config = copy.copy(vllm_config.parallel_config)
    own.parallel_config.rank = rank
    return own
