"""What the demo measures, and the settings that all compared engines share."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """One engine's part of the demo.

    The two that are compared side by side differ in ``with_moonstep``, and in how many prompts come
    back: without a connector each costs what a new one does. With a ``store`` the engine only
    answers each prompt once.
    """

    model: str
    with_moonstep: bool
    cpus: tuple[int, ...]
    """The CPUs the engine computes on: the same for all compared engines, since vLLM by itself
    leaves one core out when it has no connector and none when it has one."""
    dtype: str = "float32"
    """Batches of another shape change a token in bfloat16, and the storm compares tokens."""
    block_tokens: int = 64
    kv_blocks: int = 96
    """The engine's KV memory: 6,144 tokens, so two prompts push a third one out."""
    max_model_tokens: int = 4096
    step_tokens: int = 2560
    host_cache: str = "1536MiB"
    store: str | None = None
    """URL of a store behind the host cache."""
    prompt_count: int = 5
    return_count: int = 5
    """How many of them come back."""
    prompt_tokens: int = 2500
    answer_tokens: int = 4
    gap_returns: int = 2
    """Prompts that come back while the other request decodes."""
    gap_spacing_tokens: int = 16
    """Tokens the other request decodes between two of them."""
    storm_requests: int = 20
    storm_prompt_tokens: int = 256
    storm_answer_tokens: int = 80
    """20 requests grow from 4 blocks to 5 or 6 each: some more than there are."""

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data; ``from_json`` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Self:
        """The plan that ``to_json`` wrote."""
        return cls(**{**raw, "cpus": tuple(raw["cpus"])})

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's ``LLM``."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "enforce_eager": True,
            "block_size": self.block_tokens,
            "num_gpu_blocks_override": self.kv_blocks,
            "max_model_len": self.max_model_tokens,
            "max_num_batched_tokens": self.step_tokens,
            "max_num_seqs": self.storm_requests,
            "disable_log_stats": False,
            "seed": 0,
        }
        if self.with_moonstep:
            extra = {"host_cache": self.host_cache}
            arguments["kv_transfer_config"] = {
                "kv_connector": "MoonstepConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra | ({"store": self.store} if self.store else {}),
            }
        return arguments

    def environment(self) -> dict[str, str]:
        """Environment variables that the engine reads at import."""
        return {
            # Engine core, scheduler and worker in one process: its step time can be taken and its
            # counters read without a message in between.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self.cpus)),
            "OMP_NUM_THREADS": str(len(self.cpus)),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }


def usable_cpus() -> tuple[int, ...]:
    """The CPUs this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))
