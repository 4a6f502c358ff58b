"""Which ranks hold the same bytes of a group: those whose attention heads are copies.

Tensor parallelism splits a layer's KV heads over the ranks. Where there are fewer heads than ranks,
each head is on several of them, and a latent cache (MLA) is whole on all. Their bytes need to be
stored only once. Recurrent state is split in ways of its own, so it is never shared, and whatever
does not say plainly how many heads it has is not either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_HEADS: Final = "num_key_value_heads"
_SPLIT_BY_HEADS: Final = (FullAttentionSpec, SlidingWindowSpec)
_LATENT: Final = (MLAAttentionSpec,)


def replicas(config: VllmConfig, cache: KVCacheConfig) -> tuple[int, ...]:
    """By group: how many consecutive ranks hold the same bytes of it; 1 for bytes of its own.

    Ranks are counted as the engine does, pipeline stages outside, so a divisor of the tensor
    parallel size never reaches into another stage.
    """
    ranks = int(config.parallel_config.tensor_parallel_size)
    heads = _total_heads(config.model_config)
    return tuple(replicas_of(group.kv_cache_spec, ranks, heads) for group in cache.kv_cache_groups)


def replicas_of(spec: KVCacheSpec, ranks: int, total_heads: int | None) -> int:
    """How many of the ranks hold the same bytes of a group of this spec.

    ``total_heads`` are the model's KV heads, ``None`` when its layers differ in them.
    """
    if type(spec) in _LATENT:
        return ranks
    if type(spec) not in _SPLIT_BY_HEADS or total_heads is None:
        return 1
    assert isinstance(spec, AttentionSpec)
    copies, rest = divmod(ranks, total_heads)
    return copies if copies > 1 and not rest and spec.num_kv_heads == 1 else 1


def _total_heads(model: ModelConfig) -> int | None:
    """KV heads of every attention layer, if the model's description has one number for all."""
    described = model.hf_text_config.to_dict()
    numbers = [name for name in described if name.endswith(("kv_heads", "key_value_heads"))]
    heads = described.get(_HEADS)
    if numbers != [_HEADS] or not isinstance(heads, int) or isinstance(heads, bool):
        return None
    return heads if heads == model.get_total_num_kv_heads() else None
