"""One replay: a trace, an engine of so many blocks, a host cache of so many more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from moonstep.config import CaptureMode, Settings
from moonstep.groups import Group, GroupKind
from moonstep.replay.engine import Hit, ReplayEngine
from moonstep.replay.pool import EnginePool
from moonstep.replay.rates import Rates, lru_hits, rates
from moonstep.replay.traces import Trace
from moonstep.scheduler.scheduler import MooncakeStoreScheduler

_NAME_BYTES: Final = 32
_NO_BOUND_BYTES: Final = 1 << 62

Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Sizes in blocks of the trace. ``host_blocks`` 0 is an engine without Moonstep.

    ``step_tokens`` is what the engine computes in one step of a prefill. ``token_bytes`` is the KV
    of one token: it decides how far the byte budgets of a step reach. 0 takes the budgets away.
    """

    engine_blocks: int
    host_blocks: int
    capture: CaptureMode = CaptureMode.LAZY
    step_tokens: int = 8192
    token_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """What came of one plan. Rates are shares of all prompt tokens."""

    engine: Rates
    """Hits in the engine's own cache."""
    both: Rates
    """... and in the host cache behind it."""
    captured_blocks: int
    restored_blocks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class References:
    """Plain LRU caches to compare a plan with.

    ``joined`` has the blocks of both tiers in one: what a host cache that never holds a block twice
    would give.
    """

    engine_alone: Rates
    joined: Rates


def replay(trace: Trace, plan: ReplayPlan, tick: Tick = lambda done: None) -> ReplayFigures:
    """Run every request of ``trace`` through ``plan``; ``tick`` is told how many are done."""
    start = time.perf_counter()
    engine = ReplayEngine(
        EnginePool(plan.engine_blocks),
        _scheduler(trace, plan) if plan.host_blocks else None,
        plan.host_blocks,
        trace.block_tokens,
        max(1, plan.step_tokens // trace.block_tokens),
    )
    hits = list(_hits(engine, trace, tick))
    return ReplayFigures(
        engine=rates(trace, [hit.engine_blocks for hit in hits]),
        both=rates(trace, [hit.engine_blocks + hit.host_blocks for hit in hits]),
        captured_blocks=engine.captured_blocks,
        restored_blocks=sum(hit.host_blocks for hit in hits),
        seconds=time.perf_counter() - start,
    )


def references(trace: Trace, plan: ReplayPlan) -> References:
    """The plain caches that ``plan`` is compared with."""
    return References(
        engine_alone=rates(trace, lru_hits(trace, plan.engine_blocks)),
        joined=rates(trace, lru_hits(trace, plan.engine_blocks + plan.host_blocks)),
    )


def _hits(engine: ReplayEngine, trace: Trace, tick: Tick) -> Iterator[Hit]:
    for done, request in enumerate(trace.requests):
        tick(done)
        yield engine.run([block.to_bytes(_NAME_BYTES, "big") for block in request.blocks])


def _scheduler(trace: Trace, plan: ReplayPlan) -> MooncakeStoreScheduler:
    settings = Settings(capture=plan.capture, sync_restore_bytes=_NO_BOUND_BYTES)
    group = Group(
        index=0,
        kind=GroupKind.FULL_ATTENTION,
        block_tokens=trace.block_tokens,
        block_bytes=max(1, plan.token_bytes * trace.block_tokens),
        layer_names=("replay",),
    )
    return MooncakeStoreScheduler(settings, [group], rank_count=1)
