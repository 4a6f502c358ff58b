"""``moonstep bench schedule``: what the scheduler half costs, beside that of vLLM's own connector.

Every half lives in a world of its own, built from the same seeds; halves take turns, some steps at
a time, so that a busy neighbour meets all of them. Nothing but the hooks is timed, one call each,
with the processor's caches as the engine's own work between two steps leaves them: cold.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from moonstep.bench.engineconfig import CHUNK_TOKENS
from moonstep.bench.halves import Half, MoonstepHalf, StepCost, StockHalf, finish, run_step, timed
from moonstep.bench.world import Step, World

BLOCK_TOKENS: Final = 16
ROUND_STEPS: Final = 16
CONTEXT_TOKENS: Final = 512
_AGED_TOKENS: Final = 4096
_LOOKUPS: Final = 25

HalfMaker = Callable[[World], Half]


@dataclass(frozen=True, slots=True)
class Measured:
    """One half's figures for one case.

    ``time_us`` and the others are medians over ``samples`` steps; of a prompt, which is one sample
    of many steps, they are sums, and ``of_total`` says so.
    """

    case: str
    half: str
    samples: int
    time_us: float
    low_us: float
    high_us: float
    """The quartiles of the samples."""
    wire_bytes: int | None
    kept_objects: int | None
    of_total: bool = False


@dataclass(slots=True)
class Seat:
    """A half, its world, and what it has cost so far."""

    world: World
    half: Half
    costs: list[StepCost]


def makers(pool_blocks: int, *, stock: bool, saves_decode: bool) -> list[HalfMaker]:
    """The halves to compare. Moonstep's host cache is as large as the engine's KV memory."""

    def moonstep(mode: str) -> HalfMaker:
        return lambda world: MoonstepHalf(world, pool_blocks, {"capture": mode}, mode)

    chosen: list[HalfMaker] = [moonstep("lazy"), moonstep("eager")]
    if stock:
        chosen.append(lambda world: StockHalf(world, saves_decode=saves_decode))
    return chosen


def decode(
    running: int,
    *,
    fills: bool,
    stock: bool,
    rounds: int,
    context_tokens: int = CONTEXT_TOKENS,
    saves_decode: bool = False,
) -> list[Measured]:
    """``running`` requests decode. ``fills``: a sixteenth of them fill a block in every step;
    otherwise only steps count in which none fills one and none gets one.

    The rest of the KV memory holds blocks of requests that have ended, and the host cache is full:
    what a server looks like that has run for a while.
    """
    steps = rounds * ROUND_STEPS
    table_blocks = context_tokens // BLOCK_TOKENS + 2
    spare_blocks = running * (steps // BLOCK_TOKENS + 2)
    pool_blocks = running * table_blocks + spare_blocks
    tokens = list(range(context_tokens + BLOCK_TOKENS))
    seats = []
    for make in makers(pool_blocks, stock=stock, saves_decode=saves_decode):
        seat = _seat(make, pool_blocks)
        requests = [
            seat.world.request(
                f"r{n}", tokens[: context_tokens + (n % BLOCK_TOKENS if fills else 1)]
            )
            for n in range(running)
        ]
        run_step(seat.half, seat.world, seat.world.admit(requests))
        _age(seat, pool_blocks)
        run_step(seat.half, seat.world, seat.world.decode())
        seats.append(seat)
    with settled_heap():
        _take_turns(
            seats, rounds, lambda step: fills or not (step.filled_blocks or step.new_blocks)
        )
    what = f"{running // BLOCK_TOKENS} fill" if fills else "none fills"
    where = f" at {context_tokens // 1024}k" if context_tokens >= 1024 else ""
    return [_measured(f"decode {running:,}{where}, {what}", seat) for seat in seats]


def prompt(tokens: int, *, aged: bool, stock: bool) -> list[Measured]:
    """One prompt, ``CHUNK_TOKENS`` a step, alone. ``aged``: every block it gets is taken from a
    request that has ended, and the host cache is full; otherwise both are empty.
    """
    pool_blocks = tokens // BLOCK_TOKENS + 2
    found = []
    for make in makers(pool_blocks, stock=stock, saves_decode=False):
        seat = _seat(make, pool_blocks)
        if aged:
            _age(seat, pool_blocks)
        request = seat.world.request("prompt", list(range(tokens)))
        with settled_heap():
            step = seat.world.admit([request], CHUNK_TOKENS)
            seat.costs.append(run_step(seat.half, seat.world, step))
            while request.num_computed_tokens < tokens:
                step = seat.world.chunk(request, CHUNK_TOKENS)
                seat.costs.append(run_step(seat.half, seat.world, step))
        state = "full" if aged else "empty"
        found.append(_total(f"prompt {tokens:,}, {state}", seat))
    return found


def lookup(tokens: int) -> list[Measured]:
    """A prompt of ``tokens`` that is all in the host cache and nowhere else: the promise.

    Moonstep's answer needs nobody else. vLLM's own asks a server in a worker, which needs a store;
    it is not measured here.
    """
    pool_blocks = tokens // BLOCK_TOKENS + 2
    world = World(BLOCK_TOKENS, pool_blocks)
    half = MoonstepHalf(world, pool_blocks, {"capture": "eager"})
    prompt_tokens = list(range(tokens))
    run_step(half, world, world.admit([world.request("prompt", prompt_tokens)]))
    same = world.request("prompt", prompt_tokens)
    samples = []
    with settled_heap():
        for _ in range(_LOOKUPS):
            (answer, _), spent_ns = timed(half.connector.get_num_new_matched_tokens, same, 0)
            samples.append(spent_ns / 1e3)
            assert answer == (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS, answer
    return [measured(f"lookup {tokens:,}", half.name, samples)]


def measured(case: str, half: str, samples_us: Sequence[float]) -> Measured:
    """Figures of a case of which only times are known."""
    low, median, high = _quartiles(samples_us)
    return Measured(case, half, len(samples_us), median, low, high, None, None)


def _seat(make: HalfMaker, pool_blocks: int) -> Seat:
    world = World(BLOCK_TOKENS, pool_blocks + 1)  # the pool keeps one block for itself
    return Seat(world, make(world), [])


def _age(seat: Seat, pool_blocks: int) -> None:
    """Fill what is left of the pool with blocks of requests that come and go."""
    left = seat.world.pool.get_num_free_blocks()
    tokens = list(range(_AGED_TOKENS))
    old = []
    for number, start in enumerate(range(0, left, _AGED_TOKENS // BLOCK_TOKENS)):
        count = min(left - start, _AGED_TOKENS // BLOCK_TOKENS) * BLOCK_TOKENS
        old.append(seat.world.request(f"old{number}", tokens[:count]))
    if not old:
        return
    run_step(seat.half, seat.world, seat.world.admit(old))
    for request in old:
        finish(seat.half, seat.world, request)
    assert seat.world.pool.get_num_free_blocks() == left, (left, pool_blocks)


def _take_turns(seats: Sequence[Seat], rounds: int, counts: Callable[[Step], bool]) -> None:
    for _ in range(rounds):
        for seat in seats:
            for _ in range(ROUND_STEPS):
                step = seat.world.decode()
                cost = run_step(seat.half, seat.world, step)
                if counts(step):
                    seat.costs.append(cost)


@contextmanager
def settled_heap() -> Iterator[None]:
    """As the engine does once it is up: what is there is no concern of the collector any more."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _measured(case: str, seat: Seat) -> Measured:
    low, median, high = _quartiles([cost.ns / 1e3 for cost in seat.costs])
    return Measured(
        case=case,
        half=seat.half.name,
        samples=len(seat.costs),
        time_us=median,
        low_us=low,
        high_us=high,
        wire_bytes=int(statistics.median(cost.wire_bytes for cost in seat.costs)),
        kept_objects=int(statistics.median(cost.kept_objects for cost in seat.costs)),
    )


def _total(case: str, seat: Seat) -> Measured:
    total_us = sum(cost.ns for cost in seat.costs) / 1e3
    return Measured(
        case=case,
        half=seat.half.name,
        samples=len(seat.costs),
        time_us=total_us,
        low_us=total_us,
        high_us=total_us,
        wire_bytes=sum(cost.wire_bytes for cost in seat.costs),
        kept_objects=sum(cost.kept_objects for cost in seat.costs),
        of_total=True,
    )


def _quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(samples, n=4)
    return low, median, high
