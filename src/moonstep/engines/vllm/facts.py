"""What a vLLM configuration says that Moonstep needs to know, and what it refuses to run with.

Everything that cannot be kept right is refused at start, by name: a wrong byte is never an option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from moonstep.groups import Group, GroupKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_DRAFTERS_WITHOUT_LAYERS = frozenset({"ngram", "ngram_gpu", "suffix"})


class Unsupported(ValueError):
    """The engine is configured in a way that Moonstep cannot keep right. One line, by name."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"moonstep: {what} is not supported: {remedy}")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The engine as both halves see it.

    ``rank`` is this process's rank in the engine (meaningful in a worker), ``world_size`` the
    number of its ranks, ``tokens_per_decode`` the most tokens a decode can settle in one step.
    """

    groups: tuple[Group, ...]
    rank: int
    world_size: int
    tokens_per_decode: int
    async_scheduling: bool


def engine_facts(config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineFacts:
    """Read the facts from vLLM's configuration.

    Raises:
        Unsupported: for the first thing found that Moonstep cannot do.
    """
    _refuse_parallel_sizes(config)
    _refuse_models(config)
    return EngineFacts(
        groups=_groups(kv_cache_config),
        rank=config.parallel_config.rank,
        world_size=config.parallel_config.world_size,
        tokens_per_decode=1 + _draft_tokens(config),
        async_scheduling=bool(config.scheduler_config.async_scheduling),
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


def _draft_tokens(config: VllmConfig) -> int:
    speculative = config.speculative_config
    if speculative is None:
        return 0
    if speculative.method not in _DRAFTERS_WITHOUT_LAYERS:
        remedy = "its draft layers depend on later tokens; n-gram drafts work"
        raise Unsupported(f"speculative decoding with {speculative.method!r}", remedy)
    return int(speculative.num_speculative_tokens)


def _groups(config: KVCacheConfig) -> tuple[Group, ...]:
    specs = config.kv_cache_groups
    if len(specs) != 1:
        kinds = ", ".join(type(spec.kv_cache_spec).__name__ for spec in specs) or "none"
        raise Unsupported(
            f"a KV cache of {len(specs)} groups ({kinds})",
            "models whose layers are all full attention have one",
        )
    return tuple(_group(index, spec, config) for index, spec in enumerate(specs))


def _group(index: int, group: KVCacheGroupSpec, config: KVCacheConfig) -> Group:
    spec = group.kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        remedy = f"group {index} has to be full attention (FullAttentionSpec)"
        raise Unsupported(f"a KV cache of kind {type(spec).__name__}", remedy)
    if group.is_eagle_group:
        raise Unsupported("a KV-cache group of draft layers", "run without that drafter")
    hash_tokens = config.hash_block_size or spec.block_size
    if hash_tokens != spec.block_size:
        what = f"a hash unit of {hash_tokens} tokens with blocks of {spec.block_size}"
        raise Unsupported(what, "leave --hash-block-size unset")
    return Group(
        index,
        GroupKind.FULL_ATTENTION,
        block_tokens=spec.block_size,
        block_bytes=spec.page_size_bytes * len(group.layer_names),
        layer_names=tuple(group.layer_names),
    )
