"""The look-ahead over the installed vLLM's own block pool: nothing goes without being seen."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
)

from moonstep.scheduler.lookahead import _MIN_BLOCKS, LookAhead


class Player:
    """Plays an engine's use of its pool, step by step, and what a look-ahead is told of it."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=16)
        self.lookahead = LookAhead()
        self.lookahead.bind(self.pool)
        self.held: list[list[KVCacheBlock]] = []
        self.passed: dict[int, bytes] = {}
        self.just_freed: set[int] = set()
        self.surprises: list[int] = []
        self._names = count(1)

    def finish(self, which: int) -> None:
        """A request ends between two steps; its blocks are freed tail first."""
        if self.held:
            blocks = self.held.pop(which % len(self.held))
            self.pool.free_blocks(reversed(blocks))
            self.just_freed.update(block.block_id for block in blocks)

    def step(self, reused: int, taken: int, named: int) -> list[int]:
        """A request goes on from up to ``reused`` cached blocks, takes ``taken`` new ones and names
        ``named`` of them. The blocks passed on."""
        free = [b for b in self.pool.free_block_queue.get_all_free_blocks() if b.block_hash]
        old = free[len(free) // 2 :][:reused]
        self.pool.touch(old)
        self.lookahead.saw_used_again([block.block_id for block in old])
        for block in old:
            self.passed.pop(block.block_id, None)
        new = self._take(min(taken, self.pool.get_num_free_blocks()))
        for block in new[:named]:
            key = make_block_hash_with_group_id(BlockHash(next(self._names).to_bytes(8, "big")), 0)
            block.set_block_hash(key)
            self.pool.cached_block_hash_to_block.insert(key, block)
        if old or new:
            self.held.append([*old, *new])
        return self.look()

    def look(self) -> list[int]:
        going = self.lookahead.next_to_go()
        passed = list(zip(going.blocks, going.keys, strict=True))
        for block_id, key in passed:
            assert self.pool.blocks[block_id].block_hash == key
            assert self.pool.blocks[block_id].ref_cnt == 0
        self.passed.update(passed)
        self.just_freed.clear()
        return [block_id for block_id, _ in passed]

    def _take(self, count: int) -> list[KVCacheBlock]:
        front = self.pool.free_block_queue.get_all_free_blocks()[:count]
        for block in front:
            key = block.block_hash
            seen = key is None or self.passed.get(block.block_id) == key
            if not seen and block.block_id not in self.just_freed:
                self.surprises.append(block.block_id)
            self.passed.pop(block.block_id, None)
        new = self.pool.get_new_blocks(count)
        self.lookahead.saw_taken([block.block_id for block in new])
        return new


MOST_REUSED = 3
MOST_TAKEN = _MIN_BLOCKS - MOST_REUSED
STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), max_size=3),
        st.integers(0, MOST_REUSED),
        st.integers(0, MOST_TAKEN),
        st.integers(0, MOST_TAKEN),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(blocks=st.sampled_from([20, 60, 150]), steps=STEPS)
def test_no_block_is_overwritten_that_was_not_passed_on(
    blocks: int, steps: list[tuple[list[int], int, int, int]]
) -> None:
    """As long as no step takes or uses again more than the window is deep, and what is freed was
    freed before the last look."""
    player = Player(blocks)
    player.look()
    for ended, reused, taken, named in steps:
        for which in ended:
            player.finish(which)
        player.step(reused, taken, named)
    assert player.surprises == []


def test_each_block_is_passed_on_once() -> None:
    player = Player(12)
    player.step(0, 8, 8)
    player.finish(0)
    assert sorted(player.look()) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert player.look() == []
    player.lookahead.look_again([3, 4])
    assert sorted(player.look()) == [3, 4]


def test_a_block_used_again_and_freed_again_is_passed_on_again() -> None:
    player = Player(12)
    player.step(0, 4, 4)
    player.finish(0)
    assert len(player.look()) == 4
    assert player.step(2, 0, 0) == []
    player.finish(0)
    assert len(player.look()) == 2


def test_the_window_learns_how_many_blocks_a_step_takes() -> None:
    player = Player(200)
    player.step(0, 100, 100)
    player.finish(0)
    player.step(0, 60, 0)
    assert player.lookahead.window_blocks >= 60
    for _ in range(200):
        player.lookahead.saw_taken([199])
        player.lookahead.next_to_go()
    assert player.lookahead.window_blocks == _MIN_BLOCKS


@pytest.mark.parametrize("bound", [True, False])
def test_without_prefix_caching_or_a_pool_nothing_is_passed_on(bound: bool) -> None:
    lookahead = LookAhead()
    if bound:
        lookahead.bind(BlockPool(20, enable_caching=False, hash_block_size=16))
    assert lookahead.next_to_go() == ([], [])
