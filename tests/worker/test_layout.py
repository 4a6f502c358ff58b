"""Layouts that the engine itself makes: bit for bit there and back, or refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from moonstep.config import Settings
from moonstep.engines.vllm.layout import CacheLayout, cache_layout
from moonstep.wire import StepPlan
from moonstep.worker.pieces import block_bytes, slot_bytes
from moonstep.worker.worker import MooncakeStoreWorker
from tests.engines.kvconfigs import (
    BLOCK_TOKENS,
    BLOCKS,
    HEADS,
    full,
    group_of,
    kv_config,
    mla,
    state,
    uniform,
    window,
)
from tests.worker.conftest import as_rows

KvCaches = dict[str, torch.Tensor]


def engine_memory(
    layout: KVCacheLayout, *specs: KVCacheSpec, layers: int = 3, kernel_tokens: int | None = None
) -> tuple[KvCaches, KVCacheConfig]:
    """Memory for one group a spec, placed and viewed by the engine's own functions."""
    groups = [group_of(spec, index, layers) for index, spec in enumerate(specs)]
    config = kv_config(groups, layout)
    kernel_sizes = [kernel_tokens or spec.block_size for spec in specs]
    return allocate_kv_cache(config, torch.device("cpu"), layout, kernel_sizes), config


def storage_of(kv_caches: KvCaches) -> torch.Tensor:
    """All bytes behind the layers, what lies between their blocks included."""
    storage = next(iter(kv_caches.values())).untyped_storage()
    return torch.empty(0, dtype=torch.int8).set_(storage)


def as_blocks(tensor: torch.Tensor, storage: torch.Tensor) -> torch.Tensor:
    """The bytes of a layer in ``storage`` by manager block: ``[block, kernel block, ...]``."""
    view = tensor.view(torch.int8)
    there = storage.as_strided(view.shape, view.stride(), view.storage_offset())
    return there.unflatten(0, (BLOCKS, -1))


def assert_round_trip(kv_caches: KvCaches, config: KVCacheConfig, layout: CacheLayout) -> None:
    """In each group swap two blocks through two slots: those two change places, and not one byte
    of another block, of another layer or of the padding between them."""
    nbytes = 2 * slot_bytes(layout.pieces)
    worker = MooncakeStoreWorker(Settings(nbytes), 0, 1, layout.block_count, layout.pieces)
    storage = storage_of(kv_caches)
    for index, group in enumerate(config.kv_cache_groups):
        if not group.kv_cache_spec.prefix_cacheable:
            continue
        storage.copy_(torch.randint(-128, 128, storage.shape, dtype=torch.int8))
        expected = storage.clone()
        for name in group.layer_names:
            blocks = as_blocks(kv_caches[name], expected)
            blocks[[2, 5]] = blocks[[5, 2]].clone()
        rows = as_rows([(index, 2, 0, index), (index, 5, 1, index)])
        back = as_rows([(index, 5, 0, index), (index, 2, 1, index)])
        worker.capture(StepPlan(index, captures=rows))
        worker.restore(StepPlan(index, restores=back))
        assert torch.equal(storage, expected)
    worker.shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("kernel_tokens", [None, 32])
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
def test_layer_by_layer_each_block_is_one_piece_a_layer(
    layout: KVCacheLayout, kernel_tokens: int | None, dtype: torch.dtype
) -> None:
    kv_caches, config = engine_memory(layout, full(dtype=dtype), kernel_tokens=kernel_tokens)
    found = cache_layout(kv_caches, config)
    assert (found.block_count, found.device_type) == (BLOCKS, "cpu")
    page_bytes = full(dtype=dtype).page_size_bytes
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


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC])
def test_the_padding_of_a_state_is_not_copied(layout: KVCacheLayout) -> None:
    page_bytes = full().page_size_bytes
    kv_caches, config = engine_memory(layout, full(), state(page_bytes))
    found = cache_layout(kv_caches, config)
    content = state(page_bytes).state_content_size_bytes
    assert content < page_bytes
    assert [piece.nbytes for piece in found.pieces[1]] == [content] * 3
    assert_round_trip(kv_caches, config, found)


@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.BLHNC])
def test_layers_of_one_group_may_differ_in_size(layout: KVCacheLayout) -> None:
    sizes = {"a": full(head_size=32), "b": full(head_size=96), "c": full(head_size=32)}
    kv_caches, config = engine_memory(layout, uniform(**sizes))
    found = cache_layout(kv_caches, config)
    assert block_bytes(found.pieces[0]) == sum(spec.page_size_bytes for spec in sizes.values())
    assert_round_trip(kv_caches, config, found)


def test_blocks_of_different_groups_may_differ_in_size() -> None:
    """A slot has room for the largest of them."""
    kv_caches, config = engine_memory(KVCacheLayout.BLNHC, full(), window(head_size=8), mla())
    found = cache_layout(kv_caches, config)
    assert len({block_bytes(pieces) for pieces in found.pieces}) == 3
    assert_round_trip(kv_caches, config, found)


def test_groups_that_are_not_shared_have_no_pieces() -> None:
    ring = CircularBufferSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    kv_caches, config = engine_memory(KVCacheLayout.BLNHC, ring, full())
    found = cache_layout(kv_caches, config)
    assert [len(pieces) for pieces in found.pieces] == [0, 1]
    assert_round_trip(kv_caches, config, found)


def plain_config(*layer_names: str) -> Any:
    """A config that names layers but does not say where their blocks lie."""
    return SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_groups=[SimpleNamespace(layer_names=list(layer_names), kv_cache_spec=full())],
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
