"""Windows and states beyond the host cache: a restarted engine goes on from where prompts ended.

The real scheduler, real worker halves and a store in memory; an oracle compares every byte.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from moonstep.audit.connectors.moonstep import SHELF, FaultyStores
from moonstep.audit.history import Arrive
from moonstep.audit.shape import Shape
from moonstep.groups import GroupKind
from moonstep.stores import memory
from tests.store_tier.stage import Stage, open_stage

BASE = Shape(blocks=90, max_tokens=96, budget_tokens=16)
SHAPES = [
    replace(BASE, groups="full+window"),
    replace(BASE, groups="window"),
    replace(BASE, groups="full+window", longer="window"),
    replace(BASE, groups="full+window+window", runner="v2", asynchronous=True, blocks=120),
    replace(BASE, groups="full+state", interval_tokens=None),
    replace(BASE, groups="full+window+state", interval_tokens=None, blocks=120),
]


def run(stage: Stage, name: str, tokens: int, output: int = 1, follows: str = "") -> int:
    """One request to its end, its pushes included: how many tokens it was given."""
    before = stage.engine.seam.counts.loaded_tokens
    stage.engine.apply(Arrive(name, 1, tokens, tokens, output=output, follows=follows))
    while name in stage.engine.scheduler.requests:
        stage.engine.step()
    stage.steps(3)  # what its end leaves to be pushed is told in the next step
    stage.until(lambda: stage.tier.is_idle)
    return stage.engine.seam.counts.loaded_tokens - before


@pytest.mark.parametrize("shape", [replace(BASE), *SHAPES], ids=Shape.label)
@pytest.mark.parametrize("chunk_blocks", [1, 2, 4])
@pytest.mark.parametrize("tokens", [41, 47])
def test_a_restarted_engine_goes_on_from_where_prompts_ended(
    stores: FaultyStores, shape: Shape, chunk_blocks: int, tokens: int
) -> None:
    align = shape.block_tokens * (2 if shape.longer else 1)
    chunk = {"chunk_tokens": shape.block_tokens * chunk_blocks}
    with open_stage(stores, 400, shape=shape, **chunk) as stage:
        run(stage, "a", tokens)
    with open_stage(stores, 400, shape=shape, first_step=False, **chunk) as stage:
        assert run(stage, "b", tokens) == (tokens - 1) // align * align
        assert stage.tier.fetches.counts.fetched_objects


@pytest.mark.parametrize("shape", [replace(BASE), *SHAPES], ids=Shape.label)
def test_the_next_turn_goes_on_from_the_answer(stores: FaultyStores, shape: Shape) -> None:
    """It does not know where that ended; in runs of 32 tokens, it asks for the ends in one."""
    with open_stage(stores, 400, shape=shape, chunk_tokens=8 * shape.block_tokens) as stage:
        run(stage, "hello", 9)  # the first prompt of all keeps no windows
        run(stage, "a", 41, output=15)
        assert stage.engine.scheduler.reset_prefix_cache()
        stage.engine.scheduler.connector.scheduler.index.reset()
        assert run(stage, "b", 70, follows="a") in (48, 52)


@pytest.mark.parametrize("shape", SHAPES, ids=Shape.label)
def test_a_store_keeps_few_windows_and_states(stores: FaultyStores, shape: Shape) -> None:
    """Those of the prompt's end and of the answer's, not one for each block."""
    with open_stage(stores, 400, shape=shape) as stage:
        run(stage, "a", 41, output=40)
        named = stage.engine.clients.registry.named
        for group in stage.engine.scheduler.connector.scheduler._groups:
            names = [key.rpartition("/")[2] for key in _keys() if f"/{group.index}." in key]
            ends = [named(bytes.fromhex(name)).end_tokens for name in names]
            if group.kind is not GroupKind.FULL_ATTENTION:
                assert 1 <= len(ends) <= 3
                assert 40 in ends
                assert max(ends) in (80, 76, 72)


def _keys() -> list[str]:
    return [str(entry.key) for entry in memory._shelves[SHELF].entries()]
