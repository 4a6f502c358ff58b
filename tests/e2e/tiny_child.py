"""One engine with a tiny model, in a process of its own: tells a story and returns all answers.

python -m tests.e2e.tiny_child FD < plan.json
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from moonstep.demo.child import Emit, run_child

Prompt = list[int]


@dataclass(frozen=True)
class TinyPlan:
    """A story for one engine. ``settings`` are Moonstep's; ``None``: an engine without it.

    ``short``: only a prompt and its extension, for an engine that another one has gone before.
    ``ranks``: say how probable so many tokens were at each place of an answer.
    ``spoiled_group``: zero what is restored of this group, to see that the answers show it.
    """

    model: str
    engine: Mapping[str, Any]
    settings: Mapping[str, Any] | None
    prompt_tokens: int
    vocabulary: int
    fillers: int
    storm_prompt_tokens: int
    storm_answer_tokens: int
    storm_requests: int = 8
    answer_tokens: int = 12
    short: bool = False
    ranks: int | None = None
    spoiled_group: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        return cls(**raw)

    def environment(self) -> dict[str, str]:
        """Engine and connector in this one process, and one thread for its kernels."""
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
        }

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's ``LLM``."""
        transfer: dict[str, Any] = {}
        if self.settings is not None:
            transfer["kv_transfer_config"] = {
                "kv_connector": "MoonstepConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": dict(self.settings),
            }
        return {
            "model": self.model,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_num_seqs": self.storm_requests,
            "disable_log_stats": False,
            "seed": 0,
            **self.engine,
            **transfer,
        }


@dataclass
class Answer:
    """The tokens of one answer, and how many of its prompt's came from a cache.

    ``ranked`` are the log probabilities of the best tokens at each place, if they were asked for.
    """

    tokens: list[int]
    cached_tokens: int
    ranked: list[dict[int, float]] = field(default_factory=list)


@dataclass
class Told:
    """What became of a story.

    ``same_blocks`` counts, by group, the restored blocks whose bytes are those of the block that
    they were captured from; ``other_blocks`` the rest.
    """

    answers: dict[str, list[Answer]] = field(default_factory=dict)
    preemptions: int = 0
    restored_tokens: int = 0
    groups: list[str] = field(default_factory=list)
    block_tokens: list[int] = field(default_factory=list)
    same_blocks: dict[int, int] = field(default_factory=dict)
    other_blocks: dict[int, int] = field(default_factory=dict)


class ByteWatch:
    """Compares what is restored with what was captured, in the engine's own tensors."""

    def __init__(self, spoiled_group: int | None) -> None:
        self.same: Counter[int] = Counter()
        self.other: Counter[int] = Counter()
        self._spoiled_group = spoiled_group
        self._captured: dict[tuple[int, int, int], bytes] = {}
        self._layers: list[list[Any]] = []

    def install(self) -> None:
        """Look over the shoulder of the worker half that is built from now on in this process.

        vLLM looks through all that is imported when it builds its own worker, and stumbles over
        numba: so the worker half is taken hold of only when it is there.
        """
        from moonstep.engines.vllm.connector import MoonstepConnector

        register = MoonstepConnector.register_kv_caches

        def registering(connector: Any, kv_caches: dict[str, Any]) -> None:
            config = connector._kv_cache_config
            self._layers = [
                [
                    kv_caches[name].unflatten(0, (config.num_blocks, -1))
                    for name in group.layer_names
                ]
                for group in config.kv_cache_groups
            ]
            register(connector, kv_caches)
            self._watch(connector.worker)

        setattr(MoonstepConnector, "register_kv_caches", registering)  # noqa: B010

    def _watch(self, worker: Any) -> None:
        restore, capture = worker.restore, worker.capture

        def restoring(plan: Any) -> None:
            restore(plan)
            self._restored(plan.restores.tolist())

        def capturing(plan: Any) -> None:
            capture(plan)
            for group, block, slot, generation in plan.captures.tolist():
                self._captured[group, slot, generation] = self._digest(group, block)

        worker.restore, worker.capture = restoring, capturing

    def _restored(self, rows: Sequence[Sequence[int]]) -> None:
        for group, block, slot, generation in rows:
            known = self._captured.get((group, slot, generation))
            if known is not None:  # else it came from a store
                same = known == self._digest(group, block)
                (self.same if same else self.other)[group] += 1
            if group == self._spoiled_group:
                for layer in self._layers[group]:
                    layer[block].zero_()

    def _digest(self, group: int, block: int) -> bytes:
        import torch

        digest = hashlib.blake2b(digest_size=16)
        for layer in self._layers[group]:
            digest.update(layer[block].contiguous().view(torch.uint8).numpy().tobytes())
        return digest.digest()


class Storyteller:
    """The engine of a plan, in this process. Answers are greedy and never end early."""

    def __init__(self, plan: TinyPlan) -> None:
        from vllm import LLM

        self._llm = LLM(**plan.engine_arguments())
        self._engine = self._llm.llm_engine
        self._with_moonstep = plan.settings is not None
        self._ranks = plan.ranks
        self._last_id = 0

    @property
    def _core(self) -> Any:
        return self._engine.engine_core.engine_core

    def ask(self, prompts: Sequence[Prompt], answer_tokens: int) -> list[Answer]:
        """Send all prompts at once to the idle engine and return when it is idle again."""
        names = [self._add(prompt, answer_tokens) for prompt in prompts]
        answers: dict[str, Answer] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                (best,) = output.outputs
                answers[output.request_id] = Answer(
                    list(best.token_ids),
                    output.num_cached_tokens or 0,
                    [{t: p.logprob for t, p in each.items()} for each in best.logprobs or ()],
                )
        return [answers[name] for name in names]

    def settle(self) -> None:
        """Step the idle engine while its connector has bytes on their way."""
        while self._core.scheduler.has_requests():
            self._engine.step()

    def told(self, answers: dict[str, list[Answer]], watch: ByteWatch) -> Told:
        """The story's end."""
        counters = (m for m in self._llm.get_metrics() if m.name == "vllm:num_preemptions")
        told = Told(answers, preemptions=int(sum(counter.value for counter in counters)))
        if self._with_moonstep:
            connector = self._core.scheduler.connector
            connector.scheduler.check()
            told.restored_tokens = connector.scheduler.stats.restored_tokens
            told.groups = [group.kind.value for group in connector.facts.groups]
            told.block_tokens = [group.block_tokens for group in connector.facts.groups]
            told.same_blocks, told.other_blocks = dict(watch.same), dict(watch.other)
        return told

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _add(self, prompt: Prompt, answer_tokens: int) -> str:
        from vllm import SamplingParams, TokensPrompt

        self._last_id += 1
        name = f"tiny-{self._last_id}"
        params = SamplingParams(
            temperature=0.0,
            max_tokens=answer_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=self._ranks,
        )
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)
        return name


class Words:
    """Random prompts, the same for every engine of a vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        self._rng = random.Random(0)
        self._vocabulary = vocabulary

    def __call__(self, count: int) -> Prompt:
        return [self._rng.randrange(3, self._vocabulary) for _ in range(count)]


def tell(teller: Storyteller, plan: TinyPlan, emit: Emit) -> dict[str, list[Answer]]:
    """Prompts that are new, sent again, extended, left half-way, and too many at once."""
    words, size = Words(plan.vocabulary), plan.prompt_tokens
    first, second, more, other = words(size), words(size), words(size // 4), words(size // 2)
    answers: dict[str, list[Answer]] = {}

    def ask(chapter: str, *prompts: Prompt, tokens: int = plan.answer_tokens) -> None:
        emit(chapter, 0, 1)
        answers[chapter] = teller.ask(prompts, tokens)

    def push_out(chapter: str) -> None:
        for number in range(plan.fillers):
            ask(f"{chapter}, filler {number}", words(size))

    ask("hello", first[:8])  # after it every rank has said how many slots it has
    ask("first", first)
    if not plan.short:
        ask("second", second)
        push_out("before")
        ask("sent again", first)
        push_out("again")
    ask("goes on", first + answers["first"][0].tokens + more)
    if not plan.short:
        ask("leaves half-way", second[: size * 3 // 4] + other)
        storm = [
            words(plan.storm_prompt_tokens + 7 * number) for number in range(plan.storm_requests)
        ]
        ask("storm", *storm, tokens=plan.storm_answer_tokens)
        ask("after the storm", second)
    teller.settle()
    return answers


def measure(raw_plan: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Tell the story of a plan and return what became of it as plain data."""
    plan = TinyPlan.from_json(raw_plan)
    watch = ByteWatch(plan.spoiled_group)
    if plan.settings is not None:
        watch.install()
    teller = Storyteller(plan)
    try:
        return asdict(teller.told(tell(teller, plan, emit), watch))
    finally:
        teller.close()


if __name__ == "__main__":
    run_child(measure)
