"""The child process of the demo: one engine, all phases, figures as JSON lines.

    python -m moonstep.demo.child FD < plan.json

``FD`` is an open pipe; each line written to it is one event: ``{"phase": ..., "done": ..., "of":
...}`` on the way and one ``{"figures": {...}}`` at the end. Standard output is the engine's log.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from moonstep.demo.plan import DemoPlan
from moonstep.demo.prompts import make_prompts
from moonstep.demo.session import Answer, Prompt, Session, memcpy_bytes_per_s

Emit = Callable[[str, int, int], None]

_PR_SET_PDEATHSIG: Final = 1
_SETTLE_S: Final = 30.0
_SEED_PROMPTS, _SEED_WARM_UP, _SEED_STEADY, _SEED_STORM = 1, 2, 3, 4


def measure(session: Session, plan: DemoPlan, emit: Emit) -> dict[str, Any]:
    """Run every phase on a fresh session and return the figures as plain data.

    The order is the same with and without a connector. Between a prompt's first visit and its
    return all others have passed through a KV memory that holds less than half of them, so the
    engine's own cache has given its blocks away.
    """
    prompts = _prompts(session, plan, plan.prompt_count, _SEED_PROMPTS)
    emit("warming up", 0, 1)
    _warm_up(session, plan)
    firsts, repeats, returns = _visits(session, plan, prompts, emit)
    restored_bytes = max((a.connector.restored_bytes for a in returns), default=0)
    memcpy = [memcpy_bytes_per_s(restored_bytes)] if restored_bytes else []
    gaps, floor_gaps = _gaps(session, plan, prompts, emit)
    if restored_bytes:
        memcpy.append(memcpy_bytes_per_s(restored_bytes))
    storm = _storm(session, plan, emit)
    return {
        "start_s": session.start_s,
        "first_visits": [asdict(a) for a in firsts],
        "immediate_repeats": [asdict(a) for a in repeats],
        "returns": [asdict(a) for a in returns],
        "memcpy_bytes_per_s": memcpy,
        "gaps_s": gaps,
        "floor_gaps_s": floor_gaps,
        "storm": asdict(storm),
    }


def measure_store(session: Session, plan: DemoPlan, emit: Emit) -> dict[str, Any]:
    """Answer each prompt once, let everything reach the store, and return the visits."""
    prompts = _prompts(session, plan, plan.prompt_count, _SEED_PROMPTS)
    emit("warming up", 0, 1)
    _warm_up(session, plan)
    visits = []
    for done, prompt in enumerate(prompts):
        emit("prompts, with a store", done, len(prompts))
        visits.append(session.answer(prompt, plan.answer_tokens))
    session.settle(_SETTLE_S)
    return {"start_s": session.start_s, "visits": [asdict(a) for a in visits]}


def _prompts(
    session: Session, plan: DemoPlan, count: int, seed: int, tokens: int | None = None
) -> list[Prompt]:
    size = plan.prompt_tokens if tokens is None else tokens
    return make_prompts(session.encode, count=count, tokens=size, seed=seed)


def _warm_up(session: Session, plan: DemoPlan) -> None:
    """A short prompt, so that the first that is measured does not pay for every first use.

    It still pays for the first use of its size, which a median over prompts does not show.
    """
    (short,) = _prompts(session, plan, 1, _SEED_WARM_UP, tokens=plan.block_tokens)
    session.answer(short, plan.answer_tokens)


def _visits(
    session: Session, plan: DemoPlan, prompts: list[Prompt], emit: Emit
) -> tuple[list[Answer], list[Answer], list[Answer]]:
    """Each prompt's first visit; its return after all the others; and that sent again at once.

    The last two are taken in turns, so that what a step leaves behind in the processor's caches is
    the same for both.
    """
    firsts, repeats, returns = [], [], []
    for done, prompt in enumerate(prompts):
        emit("new prompts", done, len(prompts))
        firsts.append(session.answer(prompt, plan.answer_tokens))
    for done, prompt in enumerate(prompts[: plan.return_count]):
        emit("the same prompts later", done, plan.return_count)
        returns.append(session.answer(prompt, plan.answer_tokens))
        repeats.append(session.answer(prompt, plan.answer_tokens))
    return firsts, repeats, returns


def _gaps(
    session: Session, plan: DemoPlan, prompts: list[Prompt], emit: Emit
) -> tuple[list[float], list[float]]:
    """A request's token gaps while prompts come back that the engine has given away, and then the
    floor: while one comes back that the engine still has."""
    emit("beside a decoding request", 0, 2)
    (steady,) = _prompts(session, plan, 1, _SEED_STEADY, tokens=plan.block_tokens)
    # Those that were not asked for the longest.
    by_last_use = prompts[plan.return_count :] + prompts[: plan.return_count]
    returning = by_last_use[: plan.gap_returns]

    def gaps(of: list[Prompt]) -> list[float]:
        return session.token_gaps(steady, of, plan.gap_spacing_tokens, plan.answer_tokens)

    found = gaps(returning)
    emit("beside a decoding request", 1, 2)
    return found, gaps(returning[-1:])


def _storm(session: Session, plan: DemoPlan, emit: Emit) -> Any:
    prompts = _prompts(
        session, plan, plan.storm_requests, _SEED_STORM, tokens=plan.storm_prompt_tokens
    )
    # Spread over one block, so that requests ask for their next block in turn, as real ones do.
    prompts = [
        prompt[: len(prompt) - index * plan.block_tokens // len(prompts)]
        for index, prompt in enumerate(prompts)
    ]
    total = len(prompts) * plan.storm_answer_tokens

    def tick(done: int) -> None:
        emit("storm, tokens", done, total)

    tick(0)
    return session.storm(prompts, plan.storm_answer_tokens, tick)


def _die_with_parent() -> None:
    # Whatever ends the demo, SIGKILL included, ends its engine: Linux sends the signal.
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        sys.exit("the demo that started this engine is gone")


def run_child(measure: Callable[[dict[str, Any], Emit], dict[str, Any]]) -> None:
    """Read a plan from standard input and write events to the pipe named on the command line.

    ``measure`` gets the plan as plain data and returns the figures as such.
    """
    _die_with_parent()
    plan = json.load(sys.stdin)
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1) as pipe:

        def emit(phase: str, done: int, of: int) -> None:
            print(json.dumps({"phase": phase, "done": done, "of": of}), file=pipe)

        emit("starting the engine", 0, 1)
        figures = measure(plan, emit)
        print(json.dumps({"figures": figures}), file=pipe)


def _measure_demo(raw_plan: dict[str, Any], emit: Emit) -> dict[str, Any]:
    plan = DemoPlan.from_json(raw_plan)
    session = Session(plan)
    try:
        return (measure_store if plan.store else measure)(session, plan, emit)
    finally:
        session.close()


if __name__ == "__main__":
    run_child(_measure_demo)
