"""Ranks that hold the same bytes share one object; whoever has bytes of its own never does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from moonstep.audit.engineconfig import EngineConfig
from moonstep.engines.vllm.keyring import VllmKeyring
from moonstep.engines.vllm.replicas import replicas, replicas_of
from tests.engines.conftest import configured
from tests.engines.test_keyring import settings
from tests.engines.test_refusals import changed

ATTENTION: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 1,
    "head_size": 64,
    "dtype": torch.float32,
}
STATE = MambaSpec(block_size=16, shapes=((1, 4),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("spec", "ranks", "total_heads", "shared"),
    [
        (FullAttentionSpec(**ATTENTION), 2, 1, 2),
        (FullAttentionSpec(**ATTENTION), 8, 2, 4),
        (FullAttentionSpec(**ATTENTION), 2, 2, 1),
        (FullAttentionSpec(**ATTENTION), 1, 1, 1),
        (FullAttentionSpec(**ATTENTION), 6, 4, 1),  # does not come out even
        (FullAttentionSpec(**ATTENTION), 8, None, 1),  # layers of different heads
        (FullAttentionSpec(**ATTENTION | {"num_kv_heads": 2}), 2, 1, 1),
        (SlidingWindowSpec(**ATTENTION, sliding_window=32), 4, 1, 4),
        (MLAAttentionSpec(**ATTENTION), 4, 16, 4),
        (MLAAttentionSpec(**ATTENTION), 4, None, 4),
        (STATE, 8, 1, 1),
        (STATE, 8, None, 1),
    ],
)
def test_only_copies_of_heads_and_latents_are_shared(
    spec: KVCacheSpec, ranks: int, total_heads: int | None, shared: int
) -> None:
    assert replicas_of(spec, ranks, total_heads) == shared


def of_heads(ranks: int, heads_here: int, **facts: Any) -> EngineConfig:
    """The audit's model (4 KV heads) with ``facts``, on so many ranks."""
    config = configured()
    model = config.vllm_config.model_config
    described = copy.deepcopy(model.hf_text_config)
    for name, value in facts.items():
        setattr(described, name, value)
    architecture = copy.copy(model.model_arch_config)
    architecture.total_num_kv_heads = facts.get("num_key_value_heads", 4)
    config = changed(
        config, "model_config", hf_text_config=described, model_arch_config=architecture
    )
    config = changed(config, "parallel_config", tensor_parallel_size=ranks)
    kv = copy.deepcopy(config.scheduler_kv)
    spec = FullAttentionSpec(**ATTENTION | {"num_kv_heads": heads_here})
    kv.kv_cache_groups[0].kv_cache_spec = spec
    return EngineConfig(config.vllm_config, kv, (kv,), 4, 4)


@pytest.mark.parametrize(
    ("facts", "ranks", "heads_here", "shared"),
    [
        ({"num_key_value_heads": 1}, 2, 1, 2),
        ({"num_key_value_heads": 2}, 2, 1, 1),
        ({"num_key_value_heads": 4}, 2, 2, 1),
        # Some layers have heads of another number: one head here may be half of two.
        ({"num_key_value_heads": 1, "num_global_key_value_heads": 2}, 2, 1, 1),
    ],
)
def test_heads_are_counted_in_the_model_description(
    facts: dict[str, Any], ranks: int, heads_here: int, shared: int
) -> None:
    config = of_heads(ranks, heads_here, **facts)
    assert replicas(config.vllm_config, config.scheduler_kv) == (shared,)


def test_the_keys_of_an_engine_say_who_shares() -> None:
    config = of_heads(2, 1, num_key_value_heads=1)
    maker = VllmKeyring(settings(), config.vllm_config, config.scheduler_kv).current
    assert maker.key(0, 0, b"\1") == maker.key(0, 1, b"\1")
    assert list(maker.parts(0, 2)) == [0]
    own = of_heads(2, 1, num_key_value_heads=2)
    maker = VllmKeyring(settings(), own.vllm_config, own.scheduler_kv).current
    assert maker.key(0, 0, b"\1") != maker.key(0, 1, b"\1")
