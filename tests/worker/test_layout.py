"""Layouts that the engine itself makes: bit for bit there and back, or refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from moonstep.config import Settings
from moonstep.engines.vllm.layout import CacheLayout, cache_layout
from moonstep.wire import StepPlan
from moonstep.worker.pieces import slot_bytes
from moonstep.worker.worker import MooncakeStoreWorker
from tests.worker.conftest import as_rows

BLOCKS = 7
HEADS, HEAD_SIZE, BLOCK_TOKENS = 3, 32, 64

KvCaches = dict[str, torch.Tensor]


def full(dtype: torch.dtype = torch.bfloat16) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=dtype
    )


def window(dtype: torch.dtype = torch.bfloat16) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        dtype=dtype,
        sliding_window=128,
    )


def mla() -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )


def state(page_bytes: int) -> MambaSpec:
    """A recurrent state that fills its page except for some padding at the end."""
    return MambaSpec(
        block_size=BLOCK_TOKENS,
        shapes=((3, 64), (page_bytes // 8,)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page_bytes,
    )


def engine_memory(
    layout: KVCacheLayout, *specs: KVCacheSpec, layers: int = 3, kernel_tokens: int | None = None
) -> tuple[KvCaches, KVCacheConfig]:
    """Memory for one group a spec, placed and viewed by the engine's own functions."""
    groups = [
        KVCacheGroupSpec([f"g{index}.l{layer}" for layer in range(layers)], spec)
        for index, spec in enumerate(specs)
    ]
    settings: Any = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
        ),
    )
    config = get_kv_cache_config_from_groups(settings, groups, 1 << 30)
    kernel_sizes = [kernel_tokens or spec.block_size for spec in specs]
    return allocate_kv_cache(config, torch.device("cpu"), layout, kernel_sizes), config


def as_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a layer by manager block: ``[block, kernel block, ...]``."""
    return tensor.view(torch.int8).unflatten(0, (BLOCKS, -1))


def assert_round_trip(kv_caches: KvCaches, config: KVCacheConfig, layout: CacheLayout) -> None:
    """In each group swap two blocks through two slots: those two change places, nothing else."""
    nbytes = 2 * slot_bytes(layout.pieces)
    worker = MooncakeStoreWorker(Settings(nbytes), 0, 1, layout.block_count, layout.pieces)
    for index, group in enumerate(config.kv_cache_groups):
        tensors = [as_blocks(kv_caches[name]) for name in group.layer_names]
        for tensor in tensors:
            tensor.copy_(torch.randint(-128, 128, tensor.shape, dtype=torch.int8))
        expected = [tensor[[0, 1, 5, 3, 4, 2, 6]].clone() for tensor in tensors]
        rows = as_rows([(index, 2, 0, index), (index, 5, 1, index)])
        back = as_rows([(index, 5, 0, index), (index, 2, 1, index)])
        worker.capture(StepPlan(index, captures=rows))
        worker.restore(StepPlan(index, restores=back))
        for tensor, want in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, want)
    worker.shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("kernel_tokens", [None, 32])
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
def test_layer_by_layer_each_block_is_one_piece_a_layer(
    layout: KVCacheLayout, kernel_tokens: int | None, dtype: torch.dtype
) -> None:
    kv_caches, config = engine_memory(layout, full(dtype), kernel_tokens=kernel_tokens)
    found = cache_layout(kv_caches, config)
    assert (found.block_count, found.device_type) == (BLOCKS, "cpu")
    page_bytes = full(dtype).page_size_bytes
    assert [piece.nbytes for piece in found.pieces[0]] == [page_bytes] * 3
    assert_round_trip(kv_caches, config, found)


@pytest.mark.parametrize("layout", [KVCacheLayout.BLHNC, KVCacheLayout.BLNHC, KVCacheLayout.BHLNC])
def test_block_by_block_all_layers_are_one_piece(layout: KVCacheLayout) -> None:
    kv_caches, config = engine_memory(layout, full())
    found = cache_layout(kv_caches, config)
    assert [piece.nbytes for piece in found.pieces[0]] == [3 * full().page_size_bytes]
    assert_round_trip(kv_caches, config, found)


def test_heads_before_blocks_make_a_piece_a_head() -> None:
    kv_caches, config = engine_memory(KVCacheLayout.LHBNC, full())
    found = cache_layout(kv_caches, config)
    assert len(found.pieces[0]) == 3 * HEADS
    assert_round_trip(kv_caches, config, found)


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC])
def test_groups_that_overlay_each_other_have_pieces_of_their_own(layout: KVCacheLayout) -> None:
    page_bytes = full().page_size_bytes
    kv_caches, config = engine_memory(layout, full(), window(), state(page_bytes))
    found = cache_layout(kv_caches, config)
    assert len(found.pieces) == 3
    assert_round_trip(kv_caches, config, found)


def test_the_latent_cache_of_mla_has_one_piece_a_layer() -> None:
    kv_caches, config = engine_memory(KVCacheLayout.LBHNC, mla())
    found = cache_layout(kv_caches, config)
    assert [piece.nbytes for piece in found.pieces[0]] == [BLOCK_TOKENS * 576 * 2] * 3
    assert_round_trip(kv_caches, config, found)


def plain_config(*layer_names: str) -> Any:
    """A config that names layers but does not say where their blocks lie."""
    return SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_groups=[SimpleNamespace(layer_names=list(layer_names))],
        kv_cache_tensors=[],
    )


@pytest.mark.parametrize(
    "shape", [(2, BLOCKS, 16, 2, 8), (BLOCKS, 2, 16, 2, 8), (BLOCKS, 16, 24)], ids=str
)
def test_keys_and_values_may_be_split_around_the_blocks(shape: tuple[int, ...]) -> None:
    block_dim = shape.index(BLOCKS)
    kv_caches: KvCaches = {
        name: torch.randint(-9, 9, shape, dtype=torch.int16) for name in ("a", "b")
    }
    found = cache_layout(kv_caches, plain_config("a", "b"))
    assert len(found.pieces[0]) == (4 if block_dim else 2)
    by_block = {name: cache.movedim(block_dim, 0) for name, cache in kv_caches.items()}
    before = {name: cache.clone() for name, cache in by_block.items()}
    worker = MooncakeStoreWorker(
        Settings(slot_bytes(found.pieces)), 0, 1, found.block_count, found.pieces
    )
    worker.capture(StepPlan(0, captures=as_rows([(0, 2, 0, 0)])))
    worker.restore(StepPlan(1, restores=as_rows([(0, 5, 0, 0)])))
    worker.shutdown()
    for name, cache in by_block.items():
        assert torch.equal(cache, before[name][[0, 1, 2, 3, 4, 2, 6]])


def test_layers_that_share_a_cache_are_copied_once() -> None:
    cache = torch.zeros(BLOCKS, 64, dtype=torch.float32)
    found = cache_layout({"a": cache, "b": cache}, plain_config("a", "b"))
    assert [piece.nbytes for piece in found.pieces[0]] == [256]


@pytest.mark.parametrize(
    ("cache", "why"),
    [
        (torch.zeros(BLOCKS + 1, 64), "0 of its dimensions have the size of 7 blocks"),
        (torch.zeros(BLOCKS, BLOCKS), "2 of its dimensions have the size of 7 blocks"),
        (torch.zeros(BLOCKS, 64).expand(3, BLOCKS, 64), "parts of one block overlap"),
        (torch.zeros(64).expand(BLOCKS, 64), "its blocks overlap"),
        (torch.zeros(64, BLOCKS).t(), "no two of its items are neighbours"),
    ],
    ids=["no blocks", "ambiguous", "expanded", "one block for all", "transposed"],
)
def test_what_cannot_be_copied_in_runs_is_refused_by_name(cache: torch.Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refusal:
        cache_layout({"model.layers.0": cache}, plain_config("model.layers.0"))
    message = str(refusal.value)
    assert "'model.layers.0'" in message
    assert str(tuple(cache.shape)) in message
    assert str(tuple(step * 4 for step in cache.stride())) in message
    assert "\n" not in message


def test_blocks_that_lie_elsewhere_than_the_engine_says_are_refused() -> None:
    kv_caches, config = engine_memory(KVCacheLayout.LBHNC, full())
    config.kv_cache_tensors[0].block_stride *= 2
    with pytest.raises(ValueError, match="no dimension counts 7 blocks that lie"):
        cache_layout(kv_caches, config)


def test_a_layer_without_a_cache_is_named() -> None:
    with pytest.raises(ValueError, match="without a KV cache \\('b'\\)"):
        cache_layout({"a": torch.zeros(BLOCKS, 64)}, plain_config("a", "b"))
