"""Pool: the engine's own books, checked from outside."""

from __future__ import annotations

from collections import Counter
from typing import Any


def owners(scheduler: Any) -> Counter[int]:
    """How many references each block has through tables of requests and deferred frees."""
    held: Counter[int] = Counter()
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        for blocks in manager.req_to_blocks.values():
            held.update(block.block_id for block in blocks if not block.is_null)
    for _, blocks in scheduler.deferred_frees:
        held.update(block.block_id for block in blocks)
    return held


def discrepancy(scheduler: Any) -> str | None:
    """Why the block pool cannot be right, or None.

    A connector may hold references of its own (`BlockPool.touch`); it may not take any away.
    """
    pool = scheduler.kv_cache_manager.block_pool
    held = owners(scheduler)
    free = 0
    for block in pool.blocks[1:]:
        if block.ref_cnt < held[block.block_id]:
            return (
                f"block {block.block_id} has {block.ref_cnt} references, "
                f"requests hold {held[block.block_id]}"
            )
        free += block.ref_cnt == 0
    if free != pool.get_num_free_blocks():
        return f"{free} blocks have no reference, the pool counts {pool.get_num_free_blocks()} free"
    return None


def leaked(scheduler: Any) -> list[int]:
    """Blocks that are still referenced; to be called when no request is left."""
    return [
        block.block_id
        for block in scheduler.kv_cache_manager.block_pool.blocks[1:]
        if block.ref_cnt != 0
    ]


def named(scheduler: Any) -> set[tuple[int, bytes]]:
    """Number and hash of each block that the engine could find again."""
    return {
        (block.block_id, block.block_hash)
        for block in scheduler.kv_cache_manager.block_pool.blocks
        if block.block_hash is not None
    }
