"""What the engine says of its KV-cache groups, read into our own words; the rest is refused.

A group that keeps something else than we believe could be restored wrongly, unnoticed. So a spec is
known by its exact class, and by those of its fields that change what a block means.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from moonstep.groups import Group, GroupKind


class Unsupported(ValueError):
    """The engine is configured in a way that Moonstep cannot keep right. One line, by name."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"moonstep: {what} is not supported: {remedy}")


@dataclass(frozen=True, slots=True)
class _Known:
    """How a spec of one class is read: its kind, and the first thing in it that is not known."""

    kind: GroupKind
    oddity: Callable[[Any], tuple[str, str] | None]


def read_groups(config: KVCacheConfig) -> tuple[Group, ...]:
    """The groups that take part in prefix caching, with the engine's own numbers.

    Groups that opt out of it (``prefix_cacheable``) hold what a request needs for itself alone, and
    are left out. Either half, at start.

    Raises:
        Unsupported: for the first group that is of no known kind, or when none is left.
    """
    shared = {
        index: group
        for index, group in enumerate(config.kv_cache_groups)
        if group.kv_cache_spec.prefix_cacheable
    }
    if not shared:
        raise Unsupported("a model without a KV cache that can be shared", "it has no use for it")
    _refuse_scratch(config)
    unit = config.hash_block_size
    return tuple(
        _group(index, group, config, unit or group.kv_cache_spec.block_size)
        for index, group in shared.items()
    )


def page_bytes_by_layer(config: KVCacheConfig) -> dict[str, int]:
    """Bytes of one block of each layer, padding included, as the engine placed them.

    The scheduler's copy of a configuration keeps one spec for a group whose layers differ in size
    (``generate_scheduler_kv_cache_config``), but says where every layer lies. Layers differ only in
    layouts whose pages are whole, where one of a layer's two strides steps over a page, and the
    other over the pages of all blocks or all layers.
    """
    pages: dict[str, int] = {}
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            pages |= {name: each.page_size_bytes for name, each in spec.kv_cache_specs.items()}
        else:
            pages |= dict.fromkeys(group.layer_names, spec.page_size_bytes)
    layout = config.kv_cache_layout
    if layout is not None and KVCacheLayout[layout].is_block_compact:
        for tensor in config.kv_cache_tensors:
            page_bytes = min(tensor.layer_stride, tensor.block_stride)
            pages.update(dict.fromkeys(tensor.layers, page_bytes))
    return pages


def _group(index: int, group: KVCacheGroupSpec, config: KVCacheConfig, unit_tokens: int) -> Group:
    specs = list(iter_layer_specs(group.kv_cache_spec))
    kinds = {_kind(index, spec) for spec in specs}
    windows = {getattr(spec, "sliding_window", None) for spec in specs}
    first = specs[0]
    if len(kinds) > 1 or (GroupKind.SLIDING_WINDOW in kinds and len(windows) > 1):
        names = ", ".join(sorted({type(spec).__name__ for spec in specs}))
        what = f"KV-cache group {index} of layers that need different things ({names})"
        raise Unsupported(what, "the layers of a group have to be of one kind")
    _refuse_roles(index, group)
    if first.block_size % unit_tokens:
        what = f"a hash unit of {unit_tokens} tokens with blocks of {first.block_size}"
        raise Unsupported(what, "set --prefix-match-unit so that it divides every block")
    (kind,) = kinds
    pages = page_bytes_by_layer(config)
    return Group(
        index,
        kind,
        block_tokens=first.block_size,
        block_bytes=sum(pages[name] for name in group.layer_names if name in pages),
        layer_names=tuple(group.layer_names),
        hash_tokens=unit_tokens,
        window_tokens=first.sliding_window if isinstance(first, SlidingWindowSpec) else 0,
    )


def _refuse_scratch(config: KVCacheConfig) -> None:
    """The engine aligns its hits to the blocks of all groups, those that are left out included."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    shared_tokens = math.lcm(*(spec.block_size for spec in specs if spec.prefix_cacheable))
    for index, spec in enumerate(specs):
        if not spec.prefix_cacheable and shared_tokens % spec.block_size:
            what = f"KV-cache group {index} ({type(spec).__name__}) of {spec.block_size} tokens"
            remedy = f"its blocks have to divide those of the other groups ({shared_tokens})"
            raise Unsupported(what, remedy)


def _refuse_roles(index: int, group: KVCacheGroupSpec) -> None:
    if group.is_eagle_group:
        raise Unsupported("a KV-cache group of draft layers", "run without that drafter")
    if group.host_resident or not group.enable_kv_transfer:
        what = f"KV-cache group {index}, which the engine itself keeps in host memory,"
        raise Unsupported(what, "run without hisparse")


def _kind(index: int, spec: KVCacheSpec) -> GroupKind:
    name = type(spec).__name__
    known = _KNOWN.get(type(spec))
    if known is None:
        kinds = ", ".join(each.__name__ for each in _KNOWN)
        raise Unsupported(f"a KV cache of kind {name}", f"group {index} has to be one of {kinds}")
    if oddity := known.oddity(spec):
        what, remedy = oddity
        raise Unsupported(f"a KV cache of kind {name} {what}", remedy)
    return known.kind


def _attention_oddity(spec: Any) -> tuple[str, str] | None:
    if getattr(spec, "non_causal", False) or getattr(spec, "non_causal_multi_token_decode", False):
        return "that attends to later tokens", "what it keeps depends on more than the prefix"
    if spec.tokens_per_state != 1:
        return f"with {spec.tokens_per_state} tokens a state", "every token has to have its own"
    if getattr(spec, "model_version", None) is not None:
        return f"for {spec.model_version}", "its blocks have not been tried"
    if isinstance(spec, SlidingWindowSpec) and spec.sliding_window < 2:
        return f"with a window of {spec.sliding_window} token(s)", "nothing before a token is read"
    if getattr(spec, "extra_retained_tokens", 0):
        return "that keeps tokens below its window", "run with a drafter of one module, or none"
    return None


def _state_oddity(spec: MambaSpec) -> tuple[str, str] | None:
    if spec.mamba_cache_mode != "align":
        return (
            f"in mode {spec.mamba_cache_mode!r}",
            "set --enable-prefix-caching --mamba-cache-mode align",
        )
    return None


_KNOWN: Final[dict[type[KVCacheSpec], _Known]] = {
    FullAttentionSpec: _Known(GroupKind.FULL_ATTENTION, _attention_oddity),
    MLAAttentionSpec: _Known(GroupKind.FULL_ATTENTION, _attention_oddity),
    SlidingWindowSpec: _Known(GroupKind.SLIDING_WINDOW, _attention_oddity),
    MambaSpec: _Known(GroupKind.RECURRENT_STATE, _state_oddity),
}
