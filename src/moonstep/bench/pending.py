"""``schedule()`` of the real vLLM scheduler while requests wait for a store that has not answered.

A pending request is asked for again in every step, and the engine looks up its prefix anew each
time: that is what an answer of ``None`` costs, and why Moonstep gives only ``max_pending`` of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from moonstep.bench.engineconfig import half_config
from moonstep.bench.halves import moonstep_worker_says, moonstep_worker_starts, timed
from moonstep.bench.schedule import settled_heap
from moonstep.config import Push, Settings
from moonstep.engines.vllm.plugin import register
from moonstep.keys import Key, KeyMaker
from moonstep.scheduler.tier import StoreTier

BLOCK_TOKENS: Final = 16
RUNNING: Final = 32
LOCAL_TOKENS: Final = 32 << 10
PENDING: Final = (0, 1, 8)
_NEW_TOKENS: Final = 8 << 10
_SLOTS: Final = 1024
_FOR_EVER_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class PendingCost:
    """Microseconds of one ``schedule()``, the engine's own work included, and our hooks' part."""

    pending: int
    schedule_us: list[float]
    hooks_us: list[float]


class _SilentStore:
    """A store that has been asked and has not answered yet."""

    def ask(self, ticket: int, keys: Sequence[Key]) -> None:
        pass

    def answers(self) -> list[tuple[int, list[bool]]]:
        return []


class _OneKey:
    """Keys of one configuration; nobody ever resets it here."""

    current = KeyMaker("bench", "0" * 32)

    def reset(self) -> None:
        pass


class PendingEngine:
    """vLLM's own scheduler with Moonstep in it, a silent store behind, and no model."""

    def __init__(self) -> None:
        register()
        settings = {"capture": "lazy"}
        config = half_config("MoonstepConnector", settings, BLOCK_TOKENS)
        vllm_config = config.vllm_config
        vllm_config.cache_config.num_gpu_blocks = config.kv_cache_config.num_blocks
        scheduler_class: Any = vllm_config.scheduler_config.get_scheduler_cls()
        self._scheduler = scheduler_class(
            vllm_config=vllm_config,
            kv_cache_config=config.kv_cache_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=False,
        )
        self._connector = self._scheduler.connector
        self._connector.update_connector_output(moonstep_worker_starts(_SLOTS))
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)
        self._count = 0

    def put_a_silent_store_behind(self) -> None:
        """From here on a request with a prompt of an object's length waits for the store."""
        half = self._connector.scheduler
        half.tier = StoreTier(
            Settings(store="silent", fetch_deadline_s=_FOR_EVER_S, push=Push.REUSE),
            self._connector.facts.groups,
            rank_count=1,
            index=half.index,
            keyring=_OneKey(),
            lookup=_SilentStore(),
        )

    def add(self, tokens: list[int], answer_tokens: int = 1 << 16) -> None:
        """A request arrives."""
        self._count += 1
        self._scheduler.add_request(
            Request(
                request_id=str(self._count),
                prompt_token_ids=tokens,
                sampling_params=SamplingParams(max_tokens=answer_tokens, ignore_eos=True),
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )

    @property
    def has_requests(self) -> bool:
        return bool(self._scheduler.has_requests())

    @property
    def waiting_count(self) -> int:
        """Requests that run not yet."""
        return len(self._scheduler.requests) - len(self._scheduler.running)

    def step(self) -> tuple[float, float]:
        """One step: microseconds of ``schedule()``, and of our hooks in it."""
        stats = self._connector.scheduler.stats
        before_ns = stats.hook_ns
        output, spent_ns = timed(self._scheduler.schedule)
        hooks_ns = stats.hook_ns - before_ns
        names = list(output.num_scheduled_tokens)
        self._scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[[7] if self._is_whole(name) else [] for name in names],
                kv_connector_output=moonstep_worker_says(output.kv_connector_metadata, _SLOTS),
            ),
        )
        return spent_ns / 1e3, hooks_ns / 1e3

    def _is_whole(self, name: str) -> bool:
        request = self._scheduler.requests[name]
        return bool(request.num_computed_tokens >= request.num_tokens)


def measure(steps: int) -> list[PendingCost]:
    """``RUNNING`` requests decode while more and more others wait, each with a prefix of
    ``LOCAL_TOKENS`` in the engine's own cache and more of it, perhaps, in the store.
    """
    engine = PendingEngine()
    prefix = list(range(LOCAL_TOKENS))
    engine.add([*prefix, 1], answer_tokens=1)
    while engine.has_requests:
        engine.step()
    for number in range(RUNNING):
        engine.add([number] * BLOCK_TOKENS)
    engine.step()
    engine.put_a_silent_store_behind()
    found, waiting = [], 0
    for pending in PENDING:
        for number in range(waiting, pending):
            engine.add([*prefix, *range(number, number + _NEW_TOKENS)])
        waiting = pending
        engine.step()
        with settled_heap():
            samples = [engine.step() for _ in range(steps)]
        assert engine.waiting_count == pending, (engine.waiting_count, pending)
        found.append(PendingCost(pending, [s[0] for s in samples], [s[1] for s in samples]))
    return found
