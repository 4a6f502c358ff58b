"""Groups of every kind, read from the engine's own configurations; the rest refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from moonstep.engines.vllm.specs import Unsupported, read_groups
from moonstep.groups import Group, GroupKind
from tests.engines.kvconfigs import (
    BLOCK_TOKENS,
    full,
    group_of,
    kv_config,
    mla,
    of_scheduler,
    state,
    uniform,
    window,
)


def read_one(spec: KVCacheSpec, **other: Any) -> Group:
    (group,) = read_groups(kv_config([group_of(spec)], **other))
    return group


@pytest.mark.parametrize(
    ("spec", "kind", "window_tokens"),
    [
        (full(), GroupKind.FULL_ATTENTION, 0),
        (full(sliding_window=128), GroupKind.FULL_ATTENTION, 0),
        (mla(), GroupKind.FULL_ATTENTION, 0),
        (window(), GroupKind.SLIDING_WINDOW, 128),
        (state(), GroupKind.RECURRENT_STATE, 0),
    ],
    ids=["full", "window kept as full", "mla", "window", "state"],
)
def test_a_kind_is_what_its_spec_needs(
    spec: KVCacheSpec, kind: GroupKind, window_tokens: int
) -> None:
    group = read_one(spec)
    assert (group.kind, group.window_tokens) == (kind, window_tokens)
    assert (group.block_tokens, group.hash_tokens) == (BLOCK_TOKENS, BLOCK_TOKENS)
    assert group.block_bytes == 3 * spec.page_size_bytes
    assert group.layer_names == ("g0.l0", "g0.l1", "g0.l2")


def test_groups_have_blocks_and_a_hash_unit_of_their_own() -> None:
    groups = [group_of(full(block_size=32)), group_of(state(block_size=96), 1)]
    config = kv_config(groups, KVCacheLayout.BLNHC, unit_tokens=16)
    assert [(g.index, g.block_tokens, g.units) for g in read_groups(config)] == [
        (0, 32, 2),
        (1, 96, 6),
    ]


@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.BLHNC], ids=str)
def test_layers_of_one_type_count_with_their_own_bytes_in_both_processes(
    layout: KVCacheLayout,
) -> None:
    """The scheduler's configuration has the first layer's spec for all of them."""
    sizes = {"a": full(head_size=32), "b": full(head_size=96), "c": full(head_size=32)}
    config = kv_config([group_of(uniform(**sizes))], layout)
    (group,) = read_groups(config)
    assert group.kind is GroupKind.FULL_ATTENTION
    assert group.block_bytes == sum(spec.page_size_bytes for spec in sizes.values())
    (seen,) = read_groups(of_scheduler(config))
    assert seen.block_bytes == group.block_bytes


def scratch(block_tokens: int) -> CircularBufferSpec:
    return CircularBufferSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=32, dtype=torch.bfloat16
    )


def test_groups_that_opt_out_of_prefix_caching_are_left_out() -> None:
    groups = [group_of(scratch(16)), group_of(full(), 1)]
    assert [g.index for g in read_groups(kv_config(groups, KVCacheLayout.BLNHC))] == [1]
    with pytest.raises(Unsupported, match=r"group 0 \(CircularBufferSpec\) of 48 tokens"):
        read_groups(kv_config([group_of(scratch(48)), groups[1]], KVCacheLayout.BLNHC))
    with pytest.raises(Unsupported, match="without a KV cache that can be shared"):
        read_groups(kv_config(groups[:1]))


def test_a_stage_without_layers_of_a_group_still_has_the_group() -> None:
    config = kv_config([group_of(full()), KVCacheGroupSpec([], window())])
    assert [(g.index, g.block_bytes) for g in read_groups(config)][1] == (1, 0)


REFUSED: dict[str, tuple[Callable[[], KVCacheSpec], str]] = {
    "chunked local": (
        lambda: ChunkedLocalAttentionSpec(
            block_size=64, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=64
        ),
        "a KV cache of kind ChunkedLocalAttentionSpec is not supported: group 0",
    ),
    "sinks": (
        lambda: SinkFullAttentionSpec(
            block_size=64, num_kv_heads=1, head_size=8, dtype=torch.float32, sink_len=4
        ),
        "a KV cache of kind SinkFullAttentionSpec",
    ),
    "window of latents": (
        lambda: SlidingWindowMLASpec(
            block_size=64, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64
        ),
        "a KV cache of kind SlidingWindowMLASpec",
    ),
    "prefix LM": (lambda: full(non_causal=True), "FullAttentionSpec that attends to later tokens"),
    "blocks of drafts": (
        lambda: mla(non_causal_multi_token_decode=True),
        "MLAAttentionSpec that attends to later tokens",
    ),
    "compressed": (lambda: mla(tokens_per_state=4), "with 4 tokens a state"),
    "another's latents": (lambda: mla(model_version="deepseek_v4"), "for deepseek_v4"),
    "window of nothing": (lambda: window(sliding_window=1), "with a window of 1 token"),
    "wide drafter": (lambda: window(extra_retained_tokens=2), "keeps tokens below its window"),
    "state that is not cached": (
        lambda: state(mamba_cache_mode="none"),
        "MambaSpec in mode 'none' is not supported: set --enable-prefix-caching",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(Unsupported, match=r"^moonstep: ") as refusal:
        read_one(make())
    assert message in str(refusal.value)


def test_an_oddity_in_one_layer_is_enough() -> None:
    specs = {"a": full(), "b": replace(full(head_size=96), non_causal=True)}
    with pytest.raises(Unsupported, match="that attends to later tokens"):
        read_one(uniform(**specs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_eagle_group": True}, "a KV-cache group of draft layers"),
        ({"host_resident": True}, "KV-cache group 0, which the engine itself keeps"),
        ({"enable_kv_transfer": False}, "KV-cache group 0, which the engine itself keeps"),
    ],
)
def test_groups_with_a_part_of_their_own_are_refused(change: dict[str, Any], message: str) -> None:
    config = kv_config([group_of(full())])
    for name, value in change.items():
        setattr(config.kv_cache_groups[0], name, value)
    with pytest.raises(Unsupported, match=message):
        read_groups(config)


def test_a_hash_unit_that_does_not_divide_the_block_is_refused() -> None:
    with pytest.raises(Unsupported, match="a hash unit of 48 tokens with blocks of 64"):
        read_one(full(), unit_tokens=48)
