"""The engine's own search for a hit, over a presence that a test lays down in a real block pool."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from moonstep.groups import Group, GroupKind

POOL_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Present:
    """What one group has of a request: the numbers of the hash units at which it ends."""

    group: Group
    ends: frozenset[int]


class EngineSearch:
    """vLLM's coordinator for a set of groups, and the pool it asks."""

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        drafter: bool,
        latents: bool = False,
        partial_hits: bool = False,
    ) -> None:
        self.groups = groups
        units = groups[0].hash_tokens
        config = KVCacheConfig(
            num_blocks=POOL_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(
                    list(group.layer_names), _spec(group, latents), is_eagle_group=group.draft
                )
                for group in groups
            ],
        )
        self._coordinator: KVCacheCoordinator = get_kv_cache_coordinator(
            config,
            max_model_len=1 << 17,
            max_in_flight_tokens=1 << 13,
            use_eagle=drafter,
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=math.lcm(*(group.block_tokens for group in groups)),
            hash_block_size=units,
            allow_partial_hash_hits=partial_hits,
        )

    def hit_tokens(
        self, hashes: Sequence[BlockHash], present: Iterable[Present], limit_tokens: int
    ) -> int:
        """What the engine finds when exactly ``present`` is in its pool."""
        pool = self._coordinator.block_pool
        pool.cached_block_hash_to_block = cache = BlockHashToBlockMap()
        free = iter(pool.blocks[1:])
        for each in present:
            for end in each.ends:
                name = make_block_hash_with_group_id(hashes[end - 1], each.group.index)
                cache.insert(name, next(free))
        _, hit, _ = self._coordinator.find_longest_cache_hit(list(hashes), limit_tokens)
        return hit


def _spec(group: Group, latents: bool) -> KVCacheSpec:
    if group.kind is GroupKind.RECURRENT_STATE:
        return MambaSpec(
            block_size=group.block_tokens,
            shapes=((4,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )
    heads = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    if group.kind is GroupKind.SLIDING_WINDOW:
        return SlidingWindowSpec(
            block_size=group.block_tokens, sliding_window=group.window_tokens, **heads
        )
    spec = MLAAttentionSpec if latents else FullAttentionSpec
    return spec(block_size=group.block_tokens, **heads)
