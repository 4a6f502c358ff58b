"""KV-cache configurations as the engine itself makes them, for groups of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

BLOCKS = 7
HEADS, HEAD_SIZE, BLOCK_TOKENS = 3, 32, 64
WINDOW_TOKENS = 128


def full(**other: Any) -> FullAttentionSpec:
    """Full attention in bfloat16, with these fields changed."""
    return FullAttentionSpec(**(_attention() | other))


def window(**other: Any) -> SlidingWindowSpec:
    """A sliding window of two blocks, with these fields changed."""
    return SlidingWindowSpec(**(_attention() | {"sliding_window": WINDOW_TOKENS} | other))


def mla(**other: Any) -> MLAAttentionSpec:
    """The latent cache of DeepSeek-V2, with these fields changed."""
    return MLAAttentionSpec(
        **(_attention() | {"num_kv_heads": 1, "head_size": 576, "head_size_v": 0} | other)
    )


def state(page_bytes: int = 64 << 10, **other: Any) -> MambaSpec:
    """A recurrent state that fills its page except for some padding at the end."""
    fields = {
        "block_size": BLOCK_TOKENS,
        "shapes": ((3, 64), (page_bytes // 8,)),
        "dtypes": (torch.bfloat16, torch.float32),
        "page_size_padded": page_bytes,
        "mamba_cache_mode": "align",
    }
    return MambaSpec(**(fields | other))


def uniform(**specs: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    """One group of layers that need the same blocks, but not as many bytes of them."""
    merged = UniformTypeKVCacheSpecs.from_specs(specs)
    assert merged is not None
    return merged


def group_of(spec: KVCacheSpec, index: int = 0, layers: int = 3) -> KVCacheGroupSpec:
    """A group with layers named after its number, or with those that its spec names."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return KVCacheGroupSpec(list(spec.kv_cache_specs), spec)
    return KVCacheGroupSpec([f"g{index}.l{layer}" for layer in range(layers)], spec)


def kv_config(
    groups: Sequence[KVCacheGroupSpec],
    layout: KVCacheLayout = KVCacheLayout.LBNHC,
    unit_tokens: int | None = None,
) -> KVCacheConfig:
    """A worker's configuration of these groups, placed in memory by the engine's own function."""
    settings: Any = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
        ),
    )
    config = get_kv_cache_config_from_groups(settings, list(groups), 1 << 30)
    config.kv_cache_layout = layout.name
    config.hash_block_size = unit_tokens
    return config


def of_scheduler(config: KVCacheConfig) -> KVCacheConfig:
    """What the scheduler's process is given of a worker's configuration."""
    return generate_scheduler_kv_cache_config([config])


def _attention() -> dict[str, Any]:
    return {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.bfloat16,
    }
