"""What decides the bytes of an object, read from vLLM's configuration.

Whatever this leaves out must not change a byte; whatever it cannot tell refuses the store.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from moonstep.config import SettingError, Settings
from moonstep.engines.vllm.replicas import replicas
from moonstep.engines.vllm.specs import page_bytes_by_layer, read_groups
from moonstep.groups import Group
from moonstep.keys import (
    Epoch,
    Facts,
    GroupFacts,
    KeyMaker,
    checked_namespace,
    key_maker,
    weights_identity,
)
from moonstep.scheduler.objects import object_shape

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_SEEDED_HASHES: Final = ("sha256", "sha256_cbor")
"""Hashes that vLLM 0.29 and later starts from a fixed seed (``resolve_none_hash_seed``)."""

_PASSING_FACTS: Final = ("_name_or_path", "transformers_version")


class VllmKeyring:
    """The keys of this engine, which change when its caches are reset. Scheduler half only."""

    def __init__(self, settings: Settings, config: VllmConfig, cache: KVCacheConfig) -> None:
        self._settings = settings
        self._config = config
        self._cache = cache
        self._groups = {group.index: group for group in read_groups(cache)}
        self._seed = _hash_seed(settings, config)
        checked_namespace(settings.namespace)
        version = settings.weights_version
        weights = None if version is not None else _weights(config)
        self._epoch = Epoch(weights, version)
        if self._epoch.value is None:
            remedy = "nothing tells this model's weights from others: name them (weights_version)"
            raise SettingError("store", settings.store, remedy)
        self._current = self._make()

    @property
    def current(self) -> KeyMaker:
        """The keys of what is served now."""
        return self._current

    def reset(self) -> None:
        """The caches were reset: unless the operator names the weights, the keys are new."""
        if self._epoch.reset():
            self._current = self._make()

    def _make(self) -> KeyMaker:
        shared = replicas(self._config, self._cache)
        return key_maker(self._settings.namespace, self._facts(), shared)

    def _facts(self) -> Facts:
        model, parallel = self._config.model_config, self._config.parallel_config
        return Facts(
            model=_model(model),
            revision=str(model.revision),
            epoch=str(self._epoch.value),
            model_dtype=str(model.dtype),
            cache_dtype=str(self._config.cache_config.cache_dtype),
            quantization=str(model.quantization),
            layout=_layout(self._config, self._cache),
            groups=tuple(map(self._group, self._groups.values())),
            hash_algorithm=str(self._config.cache_config.prefix_caching_hash_algo),
            hash_seed=self._seed,
            tensor_parallel=parallel.tensor_parallel_size,
            pipeline_parallel=parallel.pipeline_parallel_size,
        )

    def _group(self, group: Group) -> GroupFacts:
        spec = self._cache.kv_cache_groups[group.index]
        return GroupFacts(
            index=group.index,
            kind=type(spec.kv_cache_spec).__name__,
            block_tokens=group.block_tokens,
            object_tokens=object_shape(group, self._settings.chunk_tokens).tokens,
            layer_names=group.layer_names,
            spec=self._spec(spec),
        )

    def _spec(self, group: KVCacheGroupSpec) -> str:
        """The engine's description of a group; the scheduler has that of one of its layers only,
        so layers of other sizes are told by their pages."""
        spec = group.kv_cache_spec
        pages = page_bytes_by_layer(self._cache)
        sizes = [pages.get(name, 0) for name in group.layer_names]
        alike = all(size == spec.page_size_bytes for size in sizes)
        return repr(spec) if alike else f"{spec!r} in pages of {sizes}"


def _hash_seed(settings: Settings, config: VllmConfig) -> str:
    """What the engine's chained hashes start from.

    Raises:
        SettingError: when it is random, so that no other process could find anything.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return f"env:{seed}"
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if algorithm in _SEEDED_HASHES:
        return "fixed"
    remedy = (
        f"block hashes by {algorithm!r} start from a random seed, so nothing stored would be found "
        "again: set PYTHONHASHSEED, or --prefix-caching-hash-algo sha256"
    )
    raise SettingError("store", settings.store, remedy)


def _weights(config: VllmConfig) -> str | None:
    """The identity of the weights that are loaded; ``None`` when there is none to be had."""
    if str(config.load_config.load_format) == "dummy":
        return None
    folder = _weights_folder(config)
    return None if folder is None else weights_identity(folder)


def _weights_folder(config: VllmConfig) -> Path | None:
    """Where the weights lie that the workers have loaded: the model's path, or what the hub's cache
    on this machine has under its name. Asks no network.
    """
    model = config.model_config
    named = Path(str(model.model))
    if named.exists():
        return named
    from huggingface_hub import snapshot_download

    try:
        cached = snapshot_download(
            str(model.model),
            revision=model.revision,
            cache_dir=config.load_config.download_dir,
            local_files_only=True,
        )
    except (OSError, ValueError):  # not there, or no name that a hub could know
        return None
    return Path(cached)


def _model(model: ModelConfig) -> str:
    described = model.hf_config.to_dict()
    for name in _PASSING_FACTS:
        described.pop(name, None)
    return json.dumps(described, sort_keys=True, default=str)


def _layout(config: VllmConfig, cache: KVCacheConfig) -> str:
    """What decides the order of bytes in a block's slot, beside the groups."""
    layers = [list(tensor.layers) for tensor in cache.kv_cache_tensors]
    device = config.device_config.device_type
    backend = getattr(config.attention_config, "backend", None)
    return json.dumps([cache.kv_cache_layout, str(device), str(backend), layers])
