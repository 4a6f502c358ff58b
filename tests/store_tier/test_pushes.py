"""Pushes: bounded, heads before tails, each object once, nothing pinned when they have ended."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonstep.config import Push, Role, SettingError, Settings
from moonstep.scheduler import pushes
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.objects import ObjectNames, object_shape, objects_of
from moonstep.scheduler.policies import LruPolicy
from moonstep.scheduler.pushes import Bucket, PushQueue
from moonstep.wire import Job
from tests.scheduler.stock import GROUPS, make_request
from tests.store_tier.rig import Rig


def wanted_by(request_id: str, rig: Rig, blocks: int, family: int = 1) -> list[bytes]:
    """A request whose ``blocks`` blocks are in the host cache goes on from them."""
    request = make_request(request_id, blocks * 16, family=family)
    if not rig.index.has_written(0, request.block_hashes):
        rig.write(request.block_hashes)
    rig.tier.went_on(request, blocks * 16)
    return list(request.block_hashes)


def slots_of(jobs: list[Job]) -> list[int]:
    return [slot for job in jobs for each in job.objects for slot in each.slots]


def test_objects_go_in_order_with_their_parents_and_their_own_slots() -> None:
    rig = Rig()
    hashes = wanted_by("r", rig, 7)
    (job,) = rig.pushes()
    assert [each.name for each in job.objects] == [hashes[at] for at in (1, 3, 5, 6)]
    assert [each.parent for each in job.objects] == [None, hashes[1], hashes[3], hashes[5]]
    assert slots_of([job]) == rig.index.locate(0, hashes)[0]
    assert job.keys is rig.keys.current


def test_slots_are_pinned_until_the_last_rank_has_ended() -> None:
    rig = Rig(ranks=2)
    wanted_by("r", rig, 4)
    (job,) = rig.pushes()
    assert rig.index.pinned_count == 4
    assert not rig.tier.is_idle
    rig.end(job, ranks=[1])
    assert rig.index.pinned_count == 4
    rig.end(job, ranks=[0])
    assert rig.index.pinned_count == 0
    assert rig.tier.is_idle


def test_an_abandoned_push_keeps_its_slots_until_its_call_comes_back() -> None:
    rig = Rig(slots=4, push_deadline_s=5)
    hashes = wanted_by("r", rig, 4)
    (job,) = rig.pushes()
    rig.clock.now_s += 5
    assert rig.pushes() == []
    assert rig.tier.quarantined_slots == 4
    assert not rig.tier.has_push_work(), "nobody waits for a job that was abandoned"
    columns = Columns(0)
    columns.add_run(99, 0, make_request("other", 64, family=2).block_hashes, [0] * 4)
    assert rig.index.plan(columns) is None, "a quarantined slot was given away"
    rig.end(job)
    assert rig.tier.quarantined_slots == 0
    assert rig.tier.pushes.counts.abandoned_jobs == 1
    assert rig.index.has_written(0, hashes)


def test_what_the_store_has_is_not_pushed_again() -> None:
    rig = Rig()
    wanted_by("r", rig, 4)
    wanted_by("again", rig, 4)
    (job,) = rig.pushes()
    wanted_by("while it is under way", rig, 4)
    assert rig.pushes() == []
    rig.end(job, [True, False])
    wanted_by("later", rig, 4)
    (second,) = rig.pushes()
    assert [each.name for each in second.objects] == [job.objects[1].name]


def test_what_a_fetch_did_not_find_is_pushed_again() -> None:
    rig = Rig()
    hashes = wanted_by("r", rig, 2)
    (job,) = rig.pushes()
    rig.end(job)
    rig.index.reset()  # it leaves the host cache
    (fetch,) = rig.find(make_request("f", 33))
    rig.end(fetch, False)
    wanted_by("r2", rig, 2)
    (again,) = rig.pushes()
    assert again.objects[0].name == hashes[1]


def test_what_a_fetch_brought_is_not_pushed_back() -> None:
    rig = Rig()
    request = make_request("f", 65)
    (fetch,) = rig.find(request)
    rig.end(fetch, [True, False])
    rig.write(request.block_hashes[2:4])
    rig.tier.went_on(request, 64)
    (job,) = rig.pushes()
    assert [each.name for each in job.objects] == [fetch.objects[1].name]


def test_what_the_store_has_given_up_is_pushed_again() -> None:
    rig = Rig()
    hashes = wanted_by("r", rig, 2)
    (job,) = rig.pushes()
    rig.end(job)
    rig.index.reset()  # it leaves the host cache, and the store as well
    request = make_request("f", 33)
    rig.arrive(request)
    rig.looks.answer(False)
    assert not rig.tier.is_pending(request)
    wanted_by("r2", rig, 2)
    (again,) = rig.pushes()
    assert again.objects[0].name == hashes[1]


def test_what_was_evicted_before_its_turn_is_dropped_and_counted() -> None:
    rig = Rig()
    wanted_by("r", rig, 4)
    rig.index.reset()
    assert rig.pushes() == []
    assert rig.tier.pushes.counts.dropped_gone == 2
    assert rig.tier.is_idle
    wanted_by("again", rig, 4)
    assert len(slots_of(rig.pushes())) == 4


def test_a_job_is_of_one_request_and_not_too_large() -> None:
    rig = Rig()
    for family, blocks in ((1, 20), (2, 4)):
        wanted_by(f"r{family}", rig, blocks, family)
    jobs = rig.pushes()
    assert [(job.request_id, len(job.objects)) for job in jobs] == [("r1", 8), ("r1", 2), ("r2", 2)]
    assert len({job.number for job in jobs}) == 3


def test_jobs_own_no_more_slots_than_they_may() -> None:
    rig = Rig(slots=16, max_busy_share=0.5)
    wanted_by("r", rig, 16)
    first = rig.pushes()
    assert len(slots_of(first)) == 8
    assert rig.pushes() == []
    for job in first:
        rig.end(job)
    assert len(slots_of(rig.pushes())) == 8


def test_an_object_that_never_fits_keeps_no_engine_stepping() -> None:
    rig = Rig(slots=16, object_blocks=8, max_busy_share=0.25)
    wanted_by("r", rig, 16)
    assert rig.pushes() == []
    assert not rig.tier.has_push_work()
    assert rig.tier.is_idle


def test_when_all_threads_hang_nothing_more_is_started() -> None:
    rig = Rig(store_threads=2, push_deadline_s=1)
    wanted_by("r", rig, 4)
    (job,) = rig.pushes()
    rig.clock.now_s += 1
    wanted_by("other", rig, 4, family=2)
    assert rig.pushes() == []
    assert not rig.tier.has_push_work()
    rig.end(job, False)
    assert rig.tier.has_push_work()
    assert len(rig.pushes()) == 1


def test_after_a_reset_nothing_old_is_pushed_and_all_that_is_new() -> None:
    rig = Rig()
    wanted_by("r", rig, 4)
    (before,) = rig.pushes()
    wanted_by("waits", rig, 4, family=2)
    rig.tier.reset()
    rig.index.reset()
    wanted_by("r2", rig, 4)
    (after,) = rig.pushes()
    rig.end(before)
    assert after.keys != before.keys
    assert [each.name for each in after.objects] == [each.name for each in before.objects]
    rig.end(after)
    wanted_by("r3", rig, 4)
    assert rig.pushes() == []
    assert rig.tier.is_idle


def test_what_an_old_push_stored_is_not_known_under_the_new_keys() -> None:
    rig = Rig()
    wanted_by("r", rig, 4)
    (before,) = rig.pushes()
    rig.tier.reset()
    rig.index.reset()
    rig.end(before)
    wanted_by("r2", rig, 4)
    assert len(rig.pushes()) == 1


@pytest.mark.parametrize(
    ("settings", "whole", "used_again"),
    [
        ({}, 4, 0),
        ({"push": Push.ALL}, 4, 0),
        ({"push": Push.REUSE}, 0, 2),
        ({"push": Push.DECODED}, 0, 0),
        ({"role": Role.PRODUCER}, 4, 0),
        ({"role": Role.CONSUMER}, 0, 0),
    ],
)
def test_when_an_object_is_offered(settings: dict[str, Any], whole: int, used_again: int) -> None:
    rig = Rig(**settings)
    request = make_request("r", 64)
    placed = rig.write(request.block_hashes)
    requests = dict.fromkeys(placed.columns.lives, request)
    rig.tier.captured(placed.columns, requests)
    assert len(slots_of(rig.pushes())) == whole
    rig.tier.went_on(request, 32)
    assert len(slots_of(rig.pushes())) == used_again


def test_an_object_with_a_decoded_token_in_it_is_decoded() -> None:
    """Objects of 32 tokens; the prompt ends inside the second one."""
    rig = Rig(push=Push.DECODED, role=Role.CONSUMER)
    request = make_request("r", 33)
    request.append_output_token_ids(list(range(7000, 7063)))
    assert request.num_tokens == 96
    placed = rig.write(request.block_hashes)
    rig.tier.captured(placed.columns, dict.fromkeys(placed.columns.lives, request))
    (job,) = rig.pushes()
    assert [each.name for each in job.objects] == [request.block_hashes[at] for at in (3, 5)]


def test_only_whole_objects_are_offered() -> None:
    rig = Rig()
    request = make_request("r", 64)
    placed = rig.write(request.block_hashes[1:3], first=1)
    rig.tier.captured(placed.columns, dict.fromkeys(placed.columns.lives, request))
    assert rig.pushes() == []
    last = rig.write(request.block_hashes[3:4], first=3)
    rig.tier.captured(last.columns, dict.fromkeys(last.columns.lives, request))
    (job,) = rig.pushes()
    assert [each.name for each in job.objects] == [request.block_hashes[3]]


def names(number: int, chain: int) -> ObjectNames:
    return ObjectNames(number, (bytes([chain, number]),), None)


def test_when_the_queue_is_full_tails_go_before_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "_MOST_QUEUED", 4)
    queue = PushQueue(HostIndex(1, LruPolicy()))
    queue.offer("a", 0, [names(number, 1) for number in range(6)])
    assert sorted(wanted.names.number for wanted in queue._queue) == [0, 1, 2, 3]
    queue.offer("b", 0, [names(number, 2) for number in range(3)])
    assert sorted(wanted.names.number for wanted in queue._queue) == [0, 0, 1, 1]
    assert queue.counts.dropped_full == 5


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=60))
def test_a_full_queue_keeps_the_heads_it_was_offered(offers: list[tuple[int, int]]) -> None:
    most = 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pushes, "_MOST_QUEUED", most)
        queue = PushQueue(HostIndex(1, LruPolicy()))
        for chain, number in offers:
            queue.offer("r", 0, [names(number, chain)])
        kept = [wanted.names.number for wanted in queue._queue]
        marks = {(0, wanted.names.name) for wanted in queue._queue}
    offered = sorted(number for _, number in dict.fromkeys(offers))
    assert len(kept) <= most
    assert queue.stock.on_the_way == marks
    if len(offered) <= most:
        assert sorted(kept) == offered
        assert queue.counts.dropped_full == 0
    else:
        assert max(kept) <= offered[most - 1]


@given(
    rate=st.integers(1, 5_000),
    object_bytes=st.integers(1, 10_000),
    waits=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=50),
)
def test_the_bucket_keeps_its_rate_and_lets_everything_go_in_time(
    rate: int, object_bytes: int, waits: list[float]
) -> None:
    bucket, now_s, spent = Bucket(rate, 0.0), 0.0, 0
    for wait_s in waits:
        now_s += wait_s
        count = bucket.objects(object_bytes, now_s, most=1000)
        assert 0 <= count <= 1000
        bucket.spend(count * object_bytes)
        spent += count * object_bytes
        assert spent <= max(rate, object_bytes) + rate * now_s + 1
    now_s += 2 * object_bytes / rate + 1
    assert bucket.objects(object_bytes, now_s, most=1000) >= 1


def test_without_a_rate_everything_goes() -> None:
    bucket = Bucket(None, 0.0)
    assert bucket.objects(1 << 40, 0.0, most=17) == 17
    bucket.spend(1 << 50)
    assert bucket.objects(1 << 40, 0.0, most=17) == 17


def test_a_rate_of_nothing_is_refused() -> None:
    """Pushes would wait for ever, and keep the engine stepping."""
    for rate in (0, "0MiB"):
        with pytest.raises(SettingError, match="push_bytes_per_s"):
            Settings.parse({"store": "memory://x", "push_bytes_per_s": rate})


def test_the_rate_counts_the_bytes_of_all_ranks() -> None:
    nbytes = 2 * GROUPS[0].block_bytes
    rig = Rig(ranks=2, push_bytes_per_s=2 * 2 * nbytes)
    wanted_by("r", rig, 20)
    assert len(slots_of(rig.pushes())) == 2 * 2
    rig.clock.now_s += 0.5
    assert len(slots_of(rig.pushes())) == 2


@given(
    block_count=st.integers(0, 40),
    blocks=st.integers(1, 9),
    first=st.integers(0, 12),
    stop=st.integers(0, 12),
)
def test_objects_tile_a_prefix(block_count: int, blocks: int, first: int, stop: int) -> None:
    shape = object_shape(GROUPS[0], blocks * 16 + 15)
    assert (shape.blocks, shape.tokens) == (blocks, blocks * 16)
    hashes = [bytes([number]) for number in range(block_count)]
    objects = objects_of(shape, hashes, first, stop)
    assert [each.number for each in objects] == list(range(first, min(stop, block_count // blocks)))
    for each in objects:
        start = each.number * blocks
        assert list(each.names) == hashes[start : start + blocks]
        assert each.name == hashes[start + blocks - 1]
        assert each.parent == (hashes[start - 1] if start else None)
