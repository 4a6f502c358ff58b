"""The engine tier does what vLLM's own block pool does."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from moonstep.replay.engine import ReplayEngine
from moonstep.replay.pool import BlockKey, EnginePool, pool_key
from moonstep.replay.rates import lru_hits
from moonstep.replay.traces import Trace

BLOCKS = 40


class VllmPool:
    """vLLM's ``BlockPool`` behind the verbs of a replay."""

    def __init__(self, block_count: int) -> None:
        from vllm.v1.core.block_pool import BlockPool

        # One more: the pool keeps its first block for itself.
        self.pool = BlockPool(block_count + 1, enable_caching=True, hash_block_size=16)

    def cached(self, key: BlockKey) -> Any | None:
        found = self.pool.get_cached_block(cast("Any", key[:-4]), [0])
        return found[0] if found else None

    def touch(self, blocks: Sequence[Any]) -> None:
        self.pool.touch(blocks)

    def take(self, count: int) -> list[Any]:
        return self.pool.get_new_blocks(count)

    def name(self, block: Any, key: BlockKey) -> None:
        self.pool._insert_block_hash(key, block, num_tokens=16)

    def free(self, blocks: Sequence[Any]) -> None:
        self.pool.free_blocks(blocks)


def vllm_free_names(pool: VllmPool) -> list[bytes | None]:
    return [block.block_hash for block in pool.pool.free_block_queue.get_all_free_blocks()]


def free_names(pool: EnginePool) -> list[bytes | None]:
    def walk() -> Iterator[bytes | None]:
        block = pool.free_block_queue.fake_free_list_head.next_free_block
        while block is not None and block.block_id >= 0:
            yield block.block_hash
            block = block.next_free_block

    return list(walk())


def prefix(rng: random.Random) -> list[bytes]:
    chain, length = rng.randrange(8), rng.randrange(1, 13)
    return [bytes([chain, depth]) * 16 for depth in range(length)]


@pytest.mark.parametrize("seed", range(6))
def test_hits_and_free_queue_are_vllm_s_own(seed: int) -> None:
    rng = random.Random(seed)
    ours, theirs = EnginePool(BLOCKS), VllmPool(BLOCKS)
    engines = [ReplayEngine(pool, None, 0, 16, step_blocks=3) for pool in (ours, theirs)]
    for _ in range(150):
        names = prefix(rng)
        hits = [engine.run(names) for engine in engines]
        assert hits[0] == hits[1]
        assert free_names(ours) == vllm_free_names(theirs)


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_overlap_share_and_free_as_in_vllm(seed: int) -> None:
    rng = random.Random(seed)
    pools: list[Any] = [EnginePool(BLOCKS), VllmPool(BLOCKS)]
    tables: list[list[list[Any]]] = [[], []]
    for _ in range(300):
        names = prefix(rng)
        ends = len(tables[0]) == 3 or (bool(tables[0]) and rng.random() < 0.4)
        which = rng.randrange(len(tables[0])) if ends else 0
        for pool, running in zip(pools, tables, strict=True):
            if ends:
                pool.free(running.pop(which)[::-1])
                continue
            keys = [pool_key(name) for name in names]
            table = []
            for key in keys:
                block = pool.cached(key)
                if block is None:
                    break
                table.append(block)
            pool.touch(table)
            for key in keys[len(table) :]:
                (block,) = pool.take(1)
                if key != keys[-1] or len(names) % 2:  # some blocks stay without a name
                    pool.name(block, key)
                table.append(block)
            running.append(table)
        assert free_names(pools[0]) == vllm_free_names(pools[1])


def test_the_engine_tier_alone_hits_what_an_lru_cache_hits(trace: Trace) -> None:
    capacity = 500
    engine = ReplayEngine(EnginePool(capacity), None, 0, trace.block_tokens, step_blocks=16)
    hits = [
        engine.run([block.to_bytes(32, "big") for block in request.blocks]).engine_blocks
        for request in trace.requests
    ]
    assert hits == lru_hits(trace, capacity)


def test_a_request_larger_than_the_pool_is_refused() -> None:
    engine = ReplayEngine(EnginePool(4), None, 0, 16, step_blocks=2)
    with pytest.raises(IndexError):
        engine.run([bytes([number]) * 32 for number in range(5)])
