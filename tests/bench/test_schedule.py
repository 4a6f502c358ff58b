"""The world a scheduler half is measured in is the engine's."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from moonstep.bench.halves import MoonstepHalf, StockHalf, finish, run_step
from moonstep.bench.pending import PENDING, measure
from moonstep.bench.schedule import decode, lookup, prompt
from moonstep.bench.schedule_report import Bound, Case, as_table
from moonstep.bench.world import World


def test_steps_fill_what_is_asked_for() -> None:
    world = World(16, 400)
    requests = [world.request(f"r{n}", list(range(32 + n))) for n in range(16)]
    world.admit(requests)
    world.settle()
    for _ in range(20):
        step = world.decode()
        world.settle()
        assert step.filled_blocks == 1
        assert step.new_blocks == 1


def test_the_engine_s_pool_names_what_a_step_fills() -> None:
    world = World(16, 50)
    request = world.request("r", list(range(40)))
    world.admit([request])
    (table,) = world.blocks_of(request).blocks
    assert [block.block_hash is not None for block in table] == [True, True, False]


def test_moonstep_captures_and_finds_again_what_a_world_computed() -> None:
    world = World(16, 50)
    half = MoonstepHalf(world, 20, {"capture": "eager"})
    request = world.request("r", list(range(160)))
    run_step(half, world, world.admit([request]))
    assert half.connector.scheduler.index.written_count == 10
    assert half.connector.get_num_new_matched_tokens(world.request("r", list(range(170))), 0) == (
        160,
        False,
    )
    half.connector.scheduler.check()


def test_a_finished_request_leaves_its_blocks_to_the_pool() -> None:
    world = World(16, 50)
    half = MoonstepHalf(world, 20)
    before = world.pool.get_num_free_blocks()
    request, other = (world.request(name, list(range(32))) for name in "ab")
    run_step(half, world, world.admit([request, other]))
    finish(half, world, request)
    step = world.decode()
    assert step.output.finished_req_ids == {"a"}
    run_step(half, world, step)
    finish(half, world, other)
    run_step(half, world, world.decode())
    run_step(half, world, world.decode())
    assert world.pool.get_num_free_blocks() == before


def test_vllm_s_own_connector_runs_in_the_same_world() -> None:
    world = World(16, 50)
    half = StockHalf(world, saves_decode=True)
    cost = run_step(half, world, world.admit([world.request("r", list(range(100)))]))
    assert cost.wire_bytes > 6 * 32, "the hashes of six blocks are on the wire"


def test_every_case_runs_and_is_shown() -> None:
    cases = [
        Case(decode(16, fills=False, stock=True, rounds=1), Bound(30.0)),
        Case(decode(16, fills=True, stock=True, rounds=1, context_tokens=1024), None),
        Case(prompt(9000, aged=True, stock=True), Bound(1.0, 1)),
        Case(lookup(8192), None),
    ]
    assert [len(case.measured) for case in cases] == [3, 3, 3, 1]
    assert as_table(cases).row_count == 10
    assert all(m.samples for case in cases for m in case.measured)


def test_requests_wait_for_a_silent_store_and_the_engine_goes_on() -> None:
    costs = measure(steps=3)
    assert [cost.pending for cost in costs] == list(PENDING)
    assert all(len(cost.schedule_us) == len(cost.hooks_us) == 3 for cost in costs)
