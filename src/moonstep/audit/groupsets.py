"""Group sets: which KV cache groups the engine of a history has, as specifications of its layers.

A set is written as kinds joined by `+`, such as "full+window+state"; a kind that is named twice
gives the engine twice as many layers of it, which it splits into two groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from moonstep.audit.kvmemory import DRAFT_LAYER

if TYPE_CHECKING:
    from moonstep.audit.shape import Shape

HEAD_SIZE = 4
WORD_BYTES = 4


def block_tokens(shape: Shape, kind: str) -> int:
    """Tokens of one block of a kind."""
    return shape.block_tokens * (shape.longer_times if kind == shape.longer else 1)


def scheduler_block_tokens(shape: Shape) -> int:
    """The least common multiple of all block sizes: where the engine's own hits end."""
    return shape.block_tokens * (shape.longer_times if shape.longer else 1)


def page_bytes(shape: Shape) -> int:
    """Bytes of one block of one layer on one rank: the same for all kinds, as the engine has it."""
    return _heads(shape) * shape.block_tokens * 2 * HEAD_SIZE * WORD_BYTES


def block_bytes(shape: Shape) -> int:
    """Bytes of one block of one group, over all ranks: what a connector needs to keep it."""
    return shape.layers * shape.stages * shape.ranks * page_bytes(shape)


def rank_specs(shape: Shape) -> list[dict[str, Any]]:
    """For each rank: layer name to KV cache spec; pipeline stages hold different layers.

    A drafter with KV of its own adds a layer of the first kind that is attention, after all others.
    """
    kinds = shape.kinds
    ranks: list[dict[str, Any]] = []
    stage_layers = shape.layers * len(kinds)
    for stage in range(shape.stages):
        layers = {
            f"model.layers.{index}.self_attn.attn": _spec_of(shape, kinds[index % len(kinds)])
            for index in range(stage * stage_layers, (stage + 1) * stage_layers)
        }
        if shape.drafter != "ngram" and stage == shape.stages - 1:
            kind = next(kind for kind in kinds if kind != "state")
            layers[f"{DRAFT_LAYER}layers.0.self_attn.attn"] = _spec_of(shape, kind)
        ranks.extend(dict(layers) for _ in range(shape.ranks))
    return ranks


def first_copy(shape: Shape, rank: int, spec: Any) -> int:
    """The lowest rank with the same bytes: latents are on every rank, as are heads too few.

    A recurrent state is each rank's own, whatever the number of heads.
    """
    if isinstance(spec, MambaSpec):
        return rank
    shards = 1 if isinstance(spec, MLAAttentionSpec) else min(shape.heads, shape.ranks)
    return rank - rank % shape.ranks % (shape.ranks // shards)


def _heads(shape: Shape) -> int:
    """KV heads of one rank; there are copies where there are more ranks than heads."""
    return max(1, shape.heads // shape.ranks)


def _spec_of(shape: Shape, kind: str) -> Any:
    """A layer of a kind. Longer blocks hold less a token, so that all pages have one size."""
    tokens = block_tokens(shape, kind)
    if kind == "state":
        return MambaSpec(
            block_size=tokens,
            shapes=((page_bytes(shape) // WORD_BYTES,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            num_speculative_blocks=shape.drafts,
        )
    token_bytes = page_bytes(shape) // tokens
    if kind == "mla":
        head_size = token_bytes // WORD_BYTES
        return MLAAttentionSpec(
            block_size=tokens, num_kv_heads=1, head_size=head_size, dtype=torch.float32
        )
    common = {
        "block_size": tokens,
        "num_kv_heads": _heads(shape),
        "head_size": token_bytes // _heads(shape) // 2 // WORD_BYTES,
        "dtype": torch.float32,
    }
    if kind == "window":
        return SlidingWindowSpec(**common, sliding_window=shape.window_tokens)
    return FullAttentionSpec(**common)
