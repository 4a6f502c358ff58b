"""The child process of ``moonstep bench multiturn``: one engine, all turns.

python -m moonstep.bench.multiturn_child FD < plan.json
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass
from typing import Any

from moonstep.bench.conversations import Conversation, turn_order
from moonstep.bench.multiturn_plan import MultiturnPlan
from moonstep.demo.child import Emit, run_child
from moonstep.demo.prompts import make_prompts
from moonstep.demo.session import Session

_SEED_USERS = 11


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """All turns of one engine. Token counts are the engine's own.

    ``computed_tokens`` are those of the prompts that the engine's steps computed: everything its
    scheduler scheduled, less the tokens of the answers.
    """

    seconds: float
    prompt_tokens: int
    computed_tokens: int
    reported_cached_tokens: int
    answers_digest: str


class CountingSession(Session):
    """A session that also counts what the engine schedules and what it says it had cached."""

    def __init__(self, plan: Any) -> None:
        super().__init__(plan)
        self.scheduled_tokens = 0
        self.cached_tokens = 0
        scheduler = self._core.scheduler
        schedule = scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.scheduled_tokens += output.total_num_scheduled_tokens
            return output

        scheduler.schedule = counted

    def turn(self, prompt: list[int], answer_tokens: int) -> tuple[int, ...]:
        """Send ``prompt`` to the idle engine and return its whole answer."""
        name = self._add(prompt, answer_tokens)
        tokens: tuple[int, ...] = ()
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                assert output.request_id == name, output.request_id
                tokens = tuple(output.outputs[0].token_ids)
                if output.finished:
                    self.cached_tokens += output.num_cached_tokens
        return tokens


def measure(raw_plan: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Hold all conversations and return the figures as plain data."""
    plan = MultiturnPlan.from_json(raw_plan)
    session = CountingSession(plan.engine)
    try:
        return asdict(_hold(session, plan, emit))
    finally:
        session.close()


def _hold(session: CountingSession, plan: MultiturnPlan, emit: Emit) -> TurnFigures:
    talks = _conversations(session, plan)
    order = turn_order(plan.conversations, plan.turns, plan.seed)
    digest, prompt_tokens = hashlib.sha256(), 0
    start = time.perf_counter()
    for done, number in enumerate(order):
        emit("turns", done, len(order))
        prompt = talks[number].next_prompt()
        answer = session.turn(prompt, plan.answer_tokens)
        talks[number].hear(answer)
        digest.update(repr(answer).encode())
        prompt_tokens += len(prompt)
    # The engine computes no KV for the last token of an answer: nothing follows it.
    decoded = len(order) * (plan.answer_tokens - 1)
    return TurnFigures(
        seconds=time.perf_counter() - start,
        prompt_tokens=prompt_tokens,
        computed_tokens=session.scheduled_tokens - decoded,
        reported_cached_tokens=session.cached_tokens,
        answers_digest=digest.hexdigest(),
    )


def _conversations(session: Session, plan: MultiturnPlan) -> list[Conversation]:
    said = make_prompts(
        session.encode,
        count=plan.conversations * plan.turns,
        tokens=plan.user_tokens,
        seed=_SEED_USERS + plan.seed,
    )
    return [
        Conversation(said[number * plan.turns : (number + 1) * plan.turns])
        for number in range(plan.conversations)
    ]


if __name__ == "__main__":
    run_child(measure)
