"""As a child of vLLM's ``MultiConnector``: real scheduler, real memory, beside another child.

The sibling is Moonstep again, with settings of its own: the one whose hit is not chosen is told of
an admission with nothing to load, and both have to keep their books, and the bytes, right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from moonstep.audit import quiet
from moonstep.audit.engine import Engine
from moonstep.audit.engineconfig import ConnectorChoice
from moonstep.audit.groupsets import block_bytes
from moonstep.audit.history import Arrive, Reset, Step
from moonstep.audit.shape import Shape
from moonstep.scheduler.scheduler import MooncakeStoreScheduler
from tests.engines.conftest import MODULE

SHAPE = Shape(blocks=40, max_tokens=64, budget_tokens=96)
NEVER = {"min_hit_tokens": 1 << 30}
PROMPT: dict[str, Any] = {"family": 1, "tokens": 30, "shared": 30}
HIT = 28


def child(**settings: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MoonstepConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"capture": "eager", **settings},
    }


@contextmanager
def open_multi(shape: Shape, *children: dict[str, Any]) -> Iterator[Engine]:
    """An engine whose connector is a ``MultiConnector`` of these Moonsteps."""
    quiet.hush()
    host_cache = 400 * block_bytes(shape)
    extra = {
        "connectors": [child(**{"host_cache": host_cache, **settings}) for settings in children]
    }
    engine = Engine(shape, ConnectorChoice("MultiConnector", extra))
    try:
        assert isinstance(engine.scheduler.connector, MultiConnector)
        for rank in engine.ranks:
            for connector in rank.connector.sub_connectors:
                assert connector.worker.arena.wait_until_faulted_in(timeout_s=30)
        engine.threads.started()  # those that live now have to go on living
        engine.empty_step()
        yield engine
        engine.drain()
        for half in halves(engine):
            half.check()
            assert half.is_idle
        engine.shutdown()
    finally:
        engine.threads.close()


def halves(engine: Engine) -> list[MooncakeStoreScheduler]:
    return [connector.scheduler for connector in engine.scheduler.connector.sub_connectors]


def run(engine: Engine, name: str, **arrival: Any) -> list[int]:
    """Run one request to its end; what each child restored for it."""
    before = [half.stats.restored_tokens for half in halves(engine)]
    engine.apply(Arrive(name, **arrival))
    while engine.step():
        pass
    engine.empty_step()
    engine.empty_step()
    return [
        half.stats.restored_tokens - old for half, old in zip(halves(engine), before, strict=True)
    ]


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("children", "restored"),
    [(({}, {}), [HIT, 0]), ((NEVER, {}), [0, HIT]), ((NEVER, NEVER), [0, 0])],
    ids=["first", "second", "neither"],
)
def test_the_chosen_child_restores_and_the_others_promise_comes_to_nothing(
    runner: Literal["v1", "v2"],
    ranks: int,
    children: tuple[dict[str, Any], ...],
    restored: list[int],
) -> None:
    executor: Any = "multi-process" if ranks > 1 else "in-process"
    shape = Shape(
        runner=runner, ranks=ranks, executor=executor, blocks=40, max_tokens=64, budget_tokens=96
    )
    with open_multi(shape, *children) as engine:
        assert not engine.scheduler.connector.requires_kv_delivery
        assert run(engine, "a", **PROMPT) == [0, 0]
        engine.apply(Reset())
        assert run(engine, "again", **PROMPT, output=9) == restored
        assert [half.index.written_count for half in halves(engine)] == [9, 9]


def test_a_large_load_in_slices_beside_a_sibling() -> None:
    slices = {
        "sync_restore_bytes": 0,
        "restore_slice_bytes": 2 * block_bytes(SHAPE),
        "idle_restore_bytes": 0,
    }
    with open_multi(SHAPE, slices, {}) as engine:
        run(engine, "a", **PROMPT)
        engine.apply(Reset())
        assert run(engine, "again", **PROMPT, output=9) == [HIT, 0]
        assert halves(engine)[0].stats.sliced_loads == 1
        assert engine.seam.counts.async_loads == 1


def test_preemptions_beside_a_sibling() -> None:
    tight = Shape(blocks=18, seats=4, max_tokens=64)
    with open_multi(tight, {}, {"capture": "lazy"}) as engine:
        for index in range(8):
            engine.apply(Arrive(f"r{index}", index, 20, 20, output=24))
            engine.apply(Step(2))
        while engine.step():
            pass
        assert engine.counts.preemptions > 0
        assert halves(engine)[0].stats.resumed_restored_tokens > 0
