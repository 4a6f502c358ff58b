"""The store tier over a real Mooncake master that is killed, frozen, restarted, full.

In each case every request answers with the right tokens and no wrong byte is used or kept (the
audit compares), no answer is pending after its deadline, quarantined slots come back, and pushes
and hits go on within fifteen seconds.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonstep.audit.shape import Shape
from moonstep.stores.mooncake.metrics import read_status
from tests.masters import Master, need_mooncake
from tests.store_tier.mooncake import (
    BLOCKS,
    FAMILIES,
    MooncakeStage,
    Pool,
    open_mooncake_stage,
)
from tests.store_tier.mutants import without_quarantine

SEGMENT = "64MiB"
NO_SEGMENT = "0"
FROZEN_S = 20.0


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    need_mooncake()
    with Master(tmp_path) as master:
        yield master


def test_what_leaves_the_host_cache_comes_back_from_mooncake(master: Master) -> None:
    with open_mooncake_stage(master.url(SEGMENT), fetch_deadline_s=20.0) as stage:
        stage.until_stored()
        before = stage.tier.fetches.counts.fetched_objects
        stage.round()
        assert stage.tier.fetches.counts.fetched_objects - before >= (FAMILIES - 2) * BLOCKS
        there, wrong = stage.wrong_objects()
        assert there >= FAMILIES * BLOCKS
        assert wrong == 0


def a_frozen_put(stage: MooncakeStage, master: Master) -> tuple[int, int]:
    """A's blocks are being pushed when the master freezes; others take the slots; it goes on."""
    stage.until_stored()
    master.freeze()
    stage.run(100)
    stage.until(stage.puts_in_progress)
    stage.until(lambda: not stage.tier._push_jobs.awaited)
    for family in range(101, 104):
        stage.run(family)
    master.thaw()
    workers = [rank.connector.worker for rank in stage.engine.ranks]
    stage.until(lambda: not any(worker.jobs._open for worker in workers))
    return stage.wrong_objects()


def test_what_a_frozen_master_stores_is_still_what_its_key_says(master: Master) -> None:
    with open_mooncake_stage(master.url(SEGMENT), push_deadline_s=0.05) as stage:
        there, wrong = a_frozen_put(stage, master)
        assert there >= FAMILIES * BLOCKS
        assert wrong == 0
        stage.until(lambda: not stage.tier.quarantined_slots)


def test_without_quarantine_a_frozen_master_stores_another_prefix(master: Master) -> None:
    with (
        without_quarantine("push"),
        open_mooncake_stage(master.url(SEGMENT), push_deadline_s=0.05) as stage,
    ):
        _, wrong = a_frozen_put(stage, master)
        assert wrong > 0


@pytest.mark.drill
class TestDrills:
    """Minutes of a store in trouble."""

    def test_a_master_that_is_not_there_at_the_start(self, master: Master) -> None:
        master.kill()
        with open_mooncake_stage(master.url(SEGMENT)) as stage:
            stage.rounds(5.0)
            assert stage.tier.pushes.counts.stored == 0
            master.start()
            stage.resumes()

    @pytest.mark.parametrize("verb", ["push", "fetch"])
    def test_a_master_killed_under_load_and_restarted_empty(
        self, master: Master, verb: str
    ) -> None:
        with open_mooncake_stage(master.url(SEGMENT)) as stage:
            if verb == "fetch":
                stage.until_stored()
            killer = threading.Timer(0.3, master.kill)
            killer.start()
            stage.rounds(8.0)
            killer.join()
            master.start()
            stage.resumes()

    def test_a_master_restarted_empty_while_nothing_happens(self, master: Master) -> None:
        with open_mooncake_stage(master.url(SEGMENT)) as stage:
            stage.until_stored()
            master.restart()
            stage.resumes()

    @pytest.mark.timeout(600)
    def test_a_master_frozen_for_twenty_seconds_under_load(self, master: Master) -> None:
        with open_mooncake_stage(master.url(SEGMENT)) as stage:
            stage.until_stored()
            timers = [threading.Timer(0.2, master.freeze), threading.Timer(FROZEN_S, master.thaw)]
            for timer in timers:
                timer.start()
            stage.rounds(FROZEN_S + 1)
            for timer in timers:
                timer.join()
            stage.resumes()

    def test_a_shutdown_beside_a_frozen_master_is_in_time(self, master: Master) -> None:
        """The stage itself measures its shutdown."""
        try:
            with open_mooncake_stage(master.url(SEGMENT)) as stage:
                stage.until_stored()
                master.freeze()
                stage.rounds(2.0)
                # The books are not those of an idle engine: calls hang and own their slots.
                stage.engine.drain = lambda: None  # type: ignore[method-assign]
        finally:
            master.thaw()

    def test_a_peer_that_gave_the_memory_is_lost(self, master: Master) -> None:
        with (
            Pool(master.url(SEGMENT)) as pool,
            open_mooncake_stage(master.url(NO_SEGMENT)) as stage,
        ):
            stage.until_stored()
            pool.kill()
            stage.rounds(8.0)
            with Pool(master.url(SEGMENT)):
                stage.resumes()

    def test_a_peer_that_stands_still_while_it_is_read(self, tmp_path: Path) -> None:
        """A lease of one second, and reads that take three."""
        need_mooncake()
        with (
            Master(tmp_path, {"default_kv_lease_ttl": "1000"}) as master,
            Pool(master.url(SEGMENT)) as pool,
            open_mooncake_stage(master.url(NO_SEGMENT)) as stage,
        ):
            stage.until_stored()
            for _ in range(3):
                pool.signal(signal.SIGSTOP)
                going_on = threading.Timer(3.0, pool.signal, [signal.SIGCONT])
                going_on.start()
                stage.rounds(4.0)
                going_on.join()
            stage.resumes()

    @pytest.mark.timeout(600)
    def test_a_store_that_is_full_and_evicts(self, tmp_path: Path) -> None:
        """Three times as much as the segment holds; the audit reads what is served meanwhile."""
        need_mooncake()
        shape = Shape(blocks=24, block_tokens=4, max_tokens=32, layers=8, heads=32)
        flags = {"default_kv_lease_ttl": "200", "eviction_high_watermark_ratio": "0.8"}
        with (
            Master(tmp_path, flags) as master,
            open_mooncake_stage(master.url("16MiB"), shape) as stage,
        ):
            stop_s = time.monotonic() + 60.0
            family = 1000
            while stage.tier.pushes.counts.stored < 1600:
                assert time.monotonic() < stop_s, stage.tier.pushes.counts
                stage.run(family)
                stage.run(family - 50)
                family += 1
            assert read_status(master.plan.metrics).evicted > 0
            stage.resumes()
