"""What a vLLM configuration says that Moonstep needs to know, and what it refuses to run with.

Everything that cannot be kept right is refused at start, by name: a wrong byte is never an option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonstep.engines.vllm.specs import Unsupported, read_groups
from moonstep.groups import Group, GroupKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["EngineFacts", "Unsupported", "engine_facts"]

_DRAFTERS_WITHOUT_LAYERS = frozenset({"ngram", "ngram_gpu", "suffix"})


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The engine as both halves see it.

    ``rank`` is this process's rank in the engine (meaningful in a worker), ``world_size`` the
    number of its ranks, ``tokens_per_decode`` the most tokens a decode can settle in one step.
    """

    groups: tuple[Group, ...]
    """Those that can be shared, with the engine's numbers: there may be gaps."""
    rank: int
    world_size: int
    tokens_per_decode: int
    async_scheduling: bool
    retention_tokens: int | None
    """The engine's ``--prefix-cache-retention-interval``: every so many tokens it keeps what a
    resume in between would need; 0 where prompts end, ``None`` everywhere."""

    def has(self, kind: GroupKind) -> bool:
        """Whether a group is of this kind."""
        return any(group.kind is kind for group in self.groups)


def engine_facts(config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineFacts:
    """Read the facts from vLLM's configuration.

    Raises:
        Unsupported: for the first thing found that Moonstep cannot do.
    """
    _refuse_parallel_sizes(config)
    _refuse_models(config)
    groups = read_groups(kv_cache_config)
    _refuse_drafts_of_states(config, groups)
    return EngineFacts(
        groups=groups,
        rank=config.parallel_config.rank,
        world_size=config.parallel_config.world_size,
        tokens_per_decode=1 + _draft_tokens(config),
        async_scheduling=bool(config.scheduler_config.async_scheduling),
        retention_tokens=kv_cache_config.prefix_cache_retention_interval,
    )


def _refuse_parallel_sizes(config: VllmConfig) -> None:
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise Unsupported(f"{name}={size}", "run without context parallelism")


def _refuse_models(config: VllmConfig) -> None:
    if config.model_config.is_encoder_decoder:
        raise Unsupported("an encoder-decoder model", "run it without a KV connector")
    on_cpu = config.device_config.device_type == "cpu"
    if config.model_config.use_mla and on_cpu and not config.cache_config.enable_prefix_caching:
        # vLLM switches it off by itself where its kernels cannot: they give wrong answers then.
        what = "latent attention (MLA) on a CPU that cannot go on from the middle of a prompt"
        raise Unsupported(what, "it takes a CPU with AMX, and prefix caching")


def _draft_tokens(config: VllmConfig) -> int:
    speculative = config.speculative_config
    if speculative is None:
        return 0
    if speculative.method not in _DRAFTERS_WITHOUT_LAYERS:
        remedy = "its draft layers depend on later tokens; n-gram drafts work"
        raise Unsupported(f"speculative decoding with {speculative.method!r}", remedy)
    return int(speculative.num_speculative_tokens)


def _refuse_drafts_of_states(config: VllmConfig, groups: tuple[Group, ...]) -> None:
    """The state after the tokens that were accepted comes to its block only behind the drafts."""
    speculative = config.speculative_config
    if speculative and any(group.kind is GroupKind.RECURRENT_STATE for group in groups):
        what = f"speculative decoding with {speculative.method!r} beside recurrent layers"
        raise Unsupported(what, "run without drafts")
