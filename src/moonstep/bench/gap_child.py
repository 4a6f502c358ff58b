"""The child process of ``moonstep bench gap``: one engine, one decoding request, prompts beside it.

python -m moonstep.bench.gap_child FD < plan.json
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from moonstep.bench.gap import GapPlan, Window, windows_of
from moonstep.demo.child import Emit, run_child
from moonstep.demo.prompts import make_prompts
from moonstep.demo.session import Prompt, Session

_SEED_PROMPTS, _SEED_STEADY = 21, 22


class GapSession(Session):
    """A session in which one request decodes while others come and go."""

    def windows(
        self, steady: Prompt, returning: Sequence[Prompt], window_tokens: int, emit: Emit
    ) -> list[Window]:
        """Decode ``steady``; for each of ``returning``, as many tokens alone and beside it."""
        name = self._add(steady, 2 * window_tokens * len(returning) + 1)
        times: list[float] = []
        restored = [self.connector_totals().restored_bytes]
        waiting = list(returning)
        while self._engine.has_unfinished_requests():
            outputs = {o.request_id: o for o in self._engine.step()}
            if name not in outputs:
                continue
            times.append(time.perf_counter())
            gaps_ended = len(times) - 1
            if gaps_ended % (2 * window_tokens) == window_tokens:
                self._add(waiting.pop(0), 1)
            elif gaps_ended and gaps_ended % (2 * window_tokens) == 0:
                restored.append(self.connector_totals().restored_bytes)
                emit("beside a decoding request", len(restored) - 1, len(returning))
        return windows_of(times, restored, window_tokens)


def measure(raw_plan: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Every prompt once, so that the host cache has them; then the windows, as plain data."""
    plan = GapPlan.from_json(raw_plan)
    session = GapSession(plan.engine)
    try:
        return {"windows": [asdict(window) for window in _windows(session, plan, emit)]}
    finally:
        session.close()


def _windows(session: GapSession, plan: GapPlan, emit: Emit) -> list[Window]:
    engine = plan.engine
    prompts = make_prompts(
        session.encode, count=engine.prompt_count, tokens=engine.prompt_tokens, seed=_SEED_PROMPTS
    )
    (steady,) = make_prompts(session.encode, count=1, tokens=engine.block_tokens, seed=_SEED_STEADY)
    # Twice: the second time round everything has been restored once, and nothing is a first use.
    for done, prompt in enumerate(2 * prompts):
        emit("prompts, one after the other", done, 2 * len(prompts))
        session.answer(prompt, 1)
    returning = [prompts[number % len(prompts)] for number in range(plan.restores)]
    windows = session.windows(steady, returning, plan.window_tokens, emit)
    least = min(window.restored_bytes for window in windows)
    if least < plan.restore_bytes:
        raise RuntimeError(f"moonstep: {least:,} bytes restored, not {plan.restore_bytes:,}")
    return windows


if __name__ == "__main__":
    run_child(measure)
