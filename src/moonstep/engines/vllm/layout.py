"""Where the engine keeps the bytes of a block: from its tensors to pieces.

vLLM 0.32.0 places the caches of all layers in one allocation and shows each layer as a strided view
``[blocks, heads, tokens, content]`` of it (``allocate_kv_cache``, ``create_kv_cache_views`` and
``KVCacheTensor``); one block of the manager may be several consecutive *kernel blocks* of such a
view. Nothing here depends on what the other dimensions mean: the bytes of a block are found from
shape and strides alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moonstep.engines.vllm.specs import Unsupported
from moonstep.worker.pieces import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class View:
    """One tensor of one layer, in bytes.

    ``storage`` numbers the allocations in the order they were met, so that pieces are laid out the
    same way in every process that has the same layout, wherever its memory happens to lie.
    """

    layer: str
    storage: int
    storage_start: int
    storage_stop: int
    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int

    def refused(self, why: str) -> Unsupported:
        return Unsupported(
            f"the KV cache layout of layer {self.layer!r} (shape {self.shape}, strides "
            f"{self.strides_bytes} bytes, items of {self.item_bytes} bytes)",
            why,
        )


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """Contiguous bytes of block 0 of a view, which come again one block stride further."""

    storage: int
    address: int
    nbytes: int
    block_stride_bytes: int

    @property
    def stop(self) -> int:
        return self.address + self.nbytes


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What a worker needs to know of the engine's KV memory.

    ``pieces[g]`` are the pieces of the engine's group ``g``, none of one that cannot be shared;
    ``block_count`` counts the null block as well,
    ``device_type`` is torch's name of where the memory is.
    """

    block_count: int
    pieces: tuple[tuple[Piece, ...], ...]
    device_type: str


def cache_layout(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], config: KVCacheConfig
) -> CacheLayout:
    """The layout of what ``register_kv_caches`` was given. Worker half, at start.

    Raises ``Unsupported``, naming layer, shape and strides, for a layout whose blocks cannot be
    told apart or are not made of contiguous runs.
    """
    views = _views_by_layer(kv_caches)
    strides = _block_strides(config)
    groups: list[tuple[Piece, ...]] = []
    for group in config.kv_cache_groups:
        if not group.kv_cache_spec.prefix_cacheable:
            groups.append(())
            continue
        missing = [name for name in group.layer_names if name not in views]
        if missing:
            raise Unsupported(
                f"a layer without a KV cache ({missing[0]!r})", "it was not registered"
            )
        runs = [
            run
            for name in group.layer_names
            for view in views[name]
            for run in runs_of_block(view, config.num_blocks, strides.get(name))
        ]
        groups.append(lay_out(coalesce(runs)))
    return CacheLayout(config.num_blocks, tuple(groups), _device_type(kv_caches))


def block_dimension(view: View, block_count: int, block_stride_bytes: int | None) -> int:
    """Which dimension of a view counts its (kernel) blocks.

    The engine's own word on the distance between two blocks decides where there is one; otherwise
    exactly one dimension must be as long as there are blocks.

    >>> view = View("l", 0, 0, 4096, 0, (2, 8, 4, 16), (2048, 256, 64, 4), 4)
    >>> block_dimension(view, 8, None), block_dimension(view, 2, 2048)
    (1, 0)
    >>> block_dimension(view, 4, 512)  # two kernel blocks make one block
    1
    """
    if block_stride_bytes is None:
        found = [dim for dim, size in enumerate(view.shape) if size == block_count]
        if len(found) == 1:
            return found[0]
        raise view.refused(f"{len(found)} of its dimensions have the size of {block_count} blocks")
    for dim, (size, stride) in enumerate(zip(view.shape, view.strides_bytes, strict=True)):
        kernel_blocks, rest = divmod(size, block_count)
        if kernel_blocks and not rest and stride * kernel_blocks == block_stride_bytes:
            return dim
    raise view.refused(
        f"no dimension counts {block_count} blocks that lie {block_stride_bytes} bytes apart"
    )


def runs_of_block(view: View, block_count: int, block_stride_bytes: int | None) -> list[Run]:
    """The contiguous runs that make up block 0 of a view, in the order of their addresses.

    >>> view = View("l", 0, 0, 4096, 0, (2, 8, 4, 16), (2048, 256, 64, 4), 4)
    >>> [(run.address, run.nbytes, run.block_stride_bytes) for run in runs_of_block(view, 8, None)]
    [(0, 256, 256), (2048, 256, 256)]
    """
    block_dim = block_dimension(view, block_count, block_stride_bytes)
    kernel_blocks = view.shape[block_dim] // block_count
    stride = view.strides_bytes[block_dim] * kernel_blocks
    inner = [
        (view.strides_bytes[dim], kernel_blocks if dim == block_dim else size)
        for dim, size in enumerate(view.shape)
    ]
    offsets, run_bytes = _runs(view, sorted((step, size) for step, size in inner if size != 1))
    if block_count > 1 and run_bytes > stride:
        raise view.refused("its blocks overlap")
    last_byte = view.address + offsets[-1] + run_bytes + (block_count - 1) * stride
    if view.address < view.storage_start or last_byte > view.storage_stop:
        raise view.refused("its blocks reach beyond the memory that holds them")
    return [Run(view.storage, view.address + offset, run_bytes, stride) for offset in offsets]


def coalesce(runs: Iterable[Run]) -> list[Run]:
    """Runs of one group, ordered, with neighbours that repeat alike made into one.

    Layers that share one cache give the same run twice: it is kept once.

    >>> coalesce([Run(0, 8, 8, 64), Run(0, 0, 8, 64), Run(0, 128, 8, 64), Run(0, 0, 8, 64)])
    [Run(storage=0, address=0, nbytes=16, block_stride_bytes=64), \
Run(storage=0, address=128, nbytes=8, block_stride_bytes=64)]
    """
    merged: list[Run] = []
    for run in sorted(set(runs)):
        last = merged[-1] if merged else None
        if last is None or last.storage != run.storage:
            merged.append(run)
        elif run.address < last.stop:
            raise Unsupported("a group whose layers share memory", f"{last} and {run} overlap")
        elif run.address == last.stop and run.block_stride_bytes == last.block_stride_bytes:
            nbytes = last.nbytes + run.nbytes
            merged[-1] = Run(last.storage, last.address, nbytes, last.block_stride_bytes)
        else:
            merged.append(run)
    return merged


def lay_out(runs: Sequence[Run]) -> tuple[Piece, ...]:
    """Pieces that lie one after the other in a slot.

    >>> lay_out([Run(0, 4096, 8, 64), Run(0, 8192, 24, 64)])[1]
    Piece(address=8192, block_stride_bytes=64, nbytes=24, slot_offset=8)
    """
    ends = itertools.accumulate(run.nbytes for run in runs)
    return tuple(
        Piece(run.address, run.block_stride_bytes, run.nbytes, end - run.nbytes)
        for run, end in zip(runs, ends, strict=True)
    )


def _runs(view: View, steps: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Offsets and size of the runs in a block, from its (stride, size) pairs, smallest first."""
    if steps and steps[0][0] == 0:
        raise view.refused("parts of one block overlap")
    run_bytes = view.item_bytes
    outer = list(steps)
    while outer and outer[0][0] == run_bytes:
        run_bytes *= outer.pop(0)[1]
    if outer and run_bytes == view.item_bytes:
        raise view.refused("no two of its items are neighbours")
    offsets = sorted(
        sum(at) for at in itertools.product(*(range(0, step * size, step) for step, size in outer))
    )
    if any(after - before < run_bytes for before, after in itertools.pairwise(offsets)):
        raise view.refused("parts of one block overlap")
    return offsets, run_bytes


def _views_by_layer(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
) -> dict[str, list[View]]:
    storages: dict[int, int] = {}
    return {
        name: [_view(name, tensor, storages) for tensor in _tensors(value)]
        for name, value in kv_caches.items()
    }


def _view(layer: str, tensor: torch.Tensor, storages: dict[int, int]) -> View:
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    item_bytes = tensor.element_size()
    return View(
        layer=layer,
        storage=storages.setdefault(start, len(storages)),
        storage_start=start,
        storage_stop=start + storage.nbytes(),
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides_bytes=tuple(step * item_bytes for step in tensor.stride()),
        item_bytes=item_bytes,
    )


def _tensors(value: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return value if isinstance(value, (list, tuple)) else [value]


def _block_strides(config: KVCacheConfig) -> dict[str, int]:
    """Bytes between two blocks, by layer, where the engine states them."""
    return {
        name: tensor.block_stride for tensor in config.kv_cache_tensors for name in tensor.layers
    }


def _device_type(kv_caches: Mapping[str, Any]) -> str:
    types = {tensor.device.type for value in kv_caches.values() for tensor in _tensors(value)}
    if len(types) != 1:
        raise Unsupported(f"KV memory on {sorted(types) or 'no device'}", "it has to be one device")
    return str(types.pop())
