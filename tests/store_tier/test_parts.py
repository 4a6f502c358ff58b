"""Two ranks and a store: an object is whole when every rank's part of it is there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moonstep.audit.connectors.moonstep import SHELF, FaultyStores
from moonstep.audit.findings import Kind, Stop
from moonstep.engines.vllm import keyring
from moonstep.keys import KeyMaker
from moonstep.stores import memory
from tests.scheduler.stock import make_request
from tests.store_tier.rig import Rig
from tests.store_tier.stage import BLOCKS, SHAPE, SOON_S, Stage, open_stage

TWO_RANKS = replace(SHAPE, ranks=2, executor="multi-process")


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_what_one_rank_has_lost_is_not_promised(stores: FaultyStores, lost: int | None) -> None:
    """Real scheduler and workers; the audit compares every byte that is used, on both ranks."""
    with open_stage(stores, slots=BLOCKS + 2, shape=TWO_RANKS, fetch_deadline_s=SOON_S) as stage:
        stage.run("a", family=1)
        stage.until(lambda: stage.tier.pushes.counts.stored >= BLOCKS)
        shelf = memory._shelves[SHELF]
        parts = [entry.key for entry in shelf.entries()]
        assert len(parts) == 2 * BLOCKS, "each rank has stored its part of each object"
        stage.forget_locally()
        stage.until(lambda: stage.tier.is_idle)
        for key in parts:
            if key.split("/")[2] == f"0.{lost}":
                assert shelf.discard(key)
        stats = stage.engine.scheduler.connector.scheduler.stats
        before = stats.restored_tokens
        stage.run("a2", family=1)
        restored = BLOCKS * SHAPE.block_tokens if lost is None else 0
        assert stats.restored_tokens - before == restored


def comes_back(stage: Stage) -> int:
    """One prompt is stored, forgotten and asked again; how many parts its objects had."""
    stage.run("a", family=1)
    stage.until(lambda: stage.tier.pushes.counts.stored >= BLOCKS)
    parts = memory._shelves[SHELF].usage().objects
    stage.forget_locally()
    stage.until(lambda: stage.tier.is_idle)
    before = stage.tier.fetches.counts.fetched_objects
    stage.run("a2", family=1)
    assert stage.tier.fetches.counts.fetched_objects - before == BLOCKS
    return parts


def test_a_head_that_two_ranks_have_is_stored_once(stores: FaultyStores) -> None:
    one_head = replace(TWO_RANKS, heads=1)
    with open_stage(stores, slots=BLOCKS + 2, shape=one_head, fetch_deadline_s=SOON_S) as stage:
        assert comes_back(stage) == BLOCKS


def test_bytes_of_a_rank_taken_for_shared_are_found(
    stores: FaultyStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault "replication where the bytes are a rank's own", put in."""
    monkeypatch.setattr(keyring, "replicas", lambda config, cache: (2,))
    with (
        pytest.raises(Stop) as caught,
        open_stage(stores, slots=BLOCKS + 2, shape=TWO_RANKS, fetch_deadline_s=SOON_S) as stage,
    ):
        comes_back(stage)
    assert caught.value.finding.kind in (Kind.WRONG_KEPT, Kind.WRONG_KV)


def test_of_ranks_with_the_same_bytes_one_is_asked_for() -> None:
    """Four ranks, each two of them alike: two keys an object, and every rank fetches."""
    rig = Rig(ranks=4)
    rig.keys.current = KeyMaker("default", "0", (2,))
    request = make_request("r", 97)
    rig.arrive(request)
    ((_, keys),) = rig.looks.asked
    assert [key.split("/")[2] for key in keys] == ["0.0", "0.2"] * 3
    rig.looks.answer([True, True, True, False, True, True])
    (job,) = rig.fetches_without_more()
    assert len(job.objects) == 1
    rig.end(job, ranks=[0, 1, 2])
    assert rig.written(request) == 0, "the last rank has not brought its copy"
    rig.end(job, ranks=[3])
    assert rig.written(request) == 2
