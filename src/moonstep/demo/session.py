"""A real vLLM engine in this process, driven step by step with a clock beside it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moonstep.demo.plan import DemoPlan
from moonstep.demo.probe import ConnectorTotals, probe_for

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one prompt that had the engine to itself."""

    first_token_s: float
    step_s: float
    """Time of the engine's steps until the first token."""
    tokens: tuple[int, ...]
    connector: ConnectorTotals
    """What the connector did from the prompt's arrival to its first token."""


@dataclass(frozen=True, slots=True)
class StormResult:
    """Many requests at once, more than the KV memory holds."""

    wall_s: float
    tokens: tuple[tuple[int, ...], ...]
    preemptions: int
    connector: ConnectorTotals


class Session:
    """The engine of a plan. All verbs are called on one thread and return when the engine is idle
    again; answers are greedy and never end early, so equal engines do equal work."""

    def __init__(self, plan: DemoPlan) -> None:
        from vllm import LLM

        start = time.perf_counter()
        self._llm = LLM(**plan.engine_arguments())
        self._engine = self._llm.llm_engine
        self.start_s = time.perf_counter() - start
        self._probe = probe_for(self._core, with_moonstep=plan.with_moonstep)
        self._last_id = 0

    @property
    def _core(self) -> Any:
        # vllm.v1.engine.core_client.InprocClient holds the EngineCore itself.
        return self._engine.engine_core.engine_core

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""
        return list(self._llm.get_tokenizer().encode(text))

    def connector_totals(self) -> ConnectorTotals:
        """What the connector has done since the engine started; zeros without one."""
        return self._probe.totals()

    def answer(self, prompt: Prompt, answer_tokens: int) -> Answer:
        """Send one prompt to the idle engine and time its first token."""
        before = self.connector_totals()
        first_token_s, step_s, done = 0.0, 0.0, before
        start = time.perf_counter()
        name = self._add(prompt, answer_tokens)
        tokens: tuple[int, ...] = ()
        while self._engine.has_unfinished_requests():
            step_start = time.perf_counter()
            outputs = {o.request_id: o for o in self._engine.step()}
            now = time.perf_counter()
            if not tokens:
                step_s += now - step_start
                done = self.connector_totals()
            if name in outputs:
                first_token_s = first_token_s or now - start
                tokens = tuple(outputs[name].outputs[0].token_ids)
        return Answer(first_token_s, step_s, tokens, done - before)

    def token_gaps(
        self, steady: Prompt, returning: Sequence[Prompt], spacing_tokens: int, answer_tokens: int
    ) -> list[float]:
        """Seconds between the tokens of one request while other prompts come in.

        ``steady`` decodes; whenever it has given ``spacing_tokens`` more tokens, the next prompt of
        ``returning`` arrives, and after the last one it goes on for as many. Gaps count from the
        first arrival on.
        """
        total = spacing_tokens * (len(returning) + 1)
        name = self._add(steady, total)
        waiting = list(returning)
        times: list[float] = []
        while self._engine.has_unfinished_requests():
            outputs = {o.request_id: o for o in self._engine.step()}
            if name not in outputs:
                continue
            times.append(time.perf_counter())
            if waiting and len(times) % spacing_tokens == 0:
                self._add(waiting.pop(0), answer_tokens)
        after_first_arrival = times[spacing_tokens - 1 :]
        return [b - a for a, b in itertools.pairwise(after_first_arrival)]

    def storm(
        self, prompts: Sequence[Prompt], answer_tokens: int, tick: Callable[[int], None]
    ) -> StormResult:
        """Send all prompts at once; ``tick`` is told the number of tokens that have come back."""
        before, preempted_before = self.connector_totals(), self._preemptions()
        start = time.perf_counter()
        names = [self._add(prompt, answer_tokens) for prompt in prompts]
        tokens: dict[str, tuple[int, ...]] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens[output.request_id] = tuple(output.outputs[0].token_ids)
            tick(sum(map(len, tokens.values())))
        return StormResult(
            wall_s=time.perf_counter() - start,
            tokens=tuple(tokens[name] for name in names),
            preemptions=self._preemptions() - preempted_before,
            connector=self.connector_totals() - before,
        )

    def settle(self, deadline_s: float) -> None:
        """Step the idle engine while its connector has bytes on their way, as an engine in a
        process of its own does by itself."""
        stop_s = time.monotonic() + deadline_s
        while self._core.scheduler.has_requests() and time.monotonic() < stop_s:
            self._engine.step()

    def close(self) -> None:
        """Shut the engine down, so that the connector can say what it did."""
        self._engine.engine_core.shutdown()

    def _add(self, prompt: Prompt, answer_tokens: int) -> str:
        from vllm import SamplingParams, TokensPrompt

        self._last_id += 1
        name = f"demo-{self._last_id}"
        params = SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True)
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)
        return name

    def _preemptions(self) -> int:
        counters = (m for m in self._llm.get_metrics() if m.name == "vllm:num_preemptions")
        return int(sum(counter.value for counter in counters))


def memcpy_bytes_per_s(nbytes: int, repeats: int = 7) -> float:
    """One thread's rate for copying ``nbytes`` between two buffers that are faulted in: the median.

    The buffers are far larger than a core's own caches when ``nbytes`` is what a prompt restores.
    """
    import numpy as np

    source = np.ones(nbytes, dtype=np.uint8)
    target = np.zeros(nbytes, dtype=np.uint8)
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        np.copyto(target, source)
        rates.append(nbytes / (time.perf_counter() - start))
    return statistics.median(rates)
