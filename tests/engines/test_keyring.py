"""Keys of an engine: equal in every process of one configuration, and in no other."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from moonstep.audit.engineconfig import EngineConfig
from moonstep.audit.shape import Shape
from moonstep.config import SettingError, Settings
from moonstep.engines.vllm.keyring import VllmKeyring
from tests.engines.conftest import configured, create
from tests.engines.kvconfigs import (
    BLOCK_TOKENS,
    full,
    group_of,
    kv_config,
    of_scheduler,
    uniform,
)
from tests.engines.test_refusals import changed, refusal, register
from tests.scheduler.stock import make_request

STORE = "memory://keyring"


@pytest.fixture(autouse=True)
def no_seed_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def settings(**extra: Any) -> Settings:
    return Settings.parse({"store": STORE, **extra})


def keyring(config: EngineConfig | None = None, **extra: Any) -> VllmKeyring:
    config = config or configured()
    return VllmKeyring(settings(**extra), config.vllm_config, config.scheduler_kv)


def fingerprint(config: EngineConfig | None = None, **extra: Any) -> str:
    return keyring(config, **extra).current.fingerprint


def some_keys() -> list[str]:
    """Keys of two ranks for the blocks of a prompt, hashed as the engine hashes them."""
    init_none_hash(sha256)
    request = make_request("r", 64)
    keys = keyring().current
    return [keys.key(0, rank, name) for rank in (0, 1) for name in request.block_hashes]


_CHILD = """
import json
from moonstep.audit import quiet
quiet.hush()
from tests.engines.test_keyring import some_keys
print("KEYS", json.dumps(some_keys()))
"""


def test_another_process_agrees_without_any_environment_variable() -> None:
    """On keys and on block hashes, although it has its model in another folder."""
    passed_on = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")
    environment = {name: os.environ[name] for name in passed_on if name in os.environ}
    child = subprocess.run(
        [sys.executable, "-c", _CHILD],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        timeout=250,
        check=True,
    )
    (line,) = [line for line in child.stdout.decode().splitlines() if line.startswith("KEYS ")]
    answers = json.loads(line.removeprefix("KEYS "))
    assert answers == some_keys()
    assert len(set(answers)) == 8


def other_model(**values: Any) -> EngineConfig:
    """A model whose own configuration differs in these values."""
    config = configured()
    described = copy.deepcopy(config.vllm_config.model_config.hf_config)
    for name, value in values.items():
        setattr(described, name, value)
    return changed(config, "model_config", hf_config=described)


def with_weights(folder: Path, content: bytes) -> EngineConfig:
    """The same model with other weights."""
    shutil.copytree(configured().vllm_config.model_config.model, folder)
    (folder / "model.safetensors").write_bytes(content)
    return changed(configured(), "model_config", model=str(folder))


def with_spec(**values: Any) -> EngineConfig:
    config = configured()
    kv = copy.deepcopy(config.scheduler_kv)
    group = kv.kv_cache_groups[0]
    group.kv_cache_spec = copy.copy(group.kv_cache_spec)
    for name, value in values.items():
        object.__setattr__(group.kv_cache_spec, name, value)
    return EngineConfig(config.vllm_config, kv, (kv,), 4, 4)


def with_layers_of(*head_sizes: int) -> EngineConfig:
    """One group of layers of these sizes; the scheduler has the first layer's spec for all."""
    layers = {f"l{number}": full(head_size=size) for number, size in enumerate(head_sizes)}
    kv = of_scheduler(kv_config([group_of(uniform(**layers))]))
    return EngineConfig(configured().vllm_config, kv, (kv,), BLOCK_TOKENS, BLOCK_TOKENS)


CHANGES: dict[str, Callable[[], str]] = {
    "latents": lambda: fingerprint(configured(Shape(groups="mla"))),
    "windows": lambda: fingerprint(configured(Shape(groups="window", blocks=48))),
    "longer windows": lambda: fingerprint(
        configured(Shape(groups="window", blocks=48, window_tokens=11))
    ),
    "a second group": lambda: fingerprint(configured(Shape(groups="full+window", blocks=48))),
    "states": lambda: fingerprint(configured(Shape(groups="full+state", blocks=48))),
    "sizes of layers": lambda: fingerprint(with_layers_of(32, 96)),
    "other sizes of layers": lambda: fingerprint(with_layers_of(32, 64)),
    "model dtype": lambda: fingerprint(changed(configured(), "model_config", dtype=torch.bfloat16)),
    "cache dtype": lambda: fingerprint(changed(configured(), "cache_config", cache_dtype="fp8")),
    "dtype of the specs": lambda: fingerprint(with_spec(dtype=torch.bfloat16)),
    "heads": lambda: fingerprint(with_spec(num_kv_heads=4)),
    "quantization": lambda: fingerprint(changed(configured(), "model_config", quantization="awq")),
    "revision": lambda: fingerprint(changed(configured(), "model_config", revision="v2")),
    "model configuration": lambda: fingerprint(other_model(rope_theta=5e5)),
    "rope scaling": lambda: fingerprint(other_model(rope_scaling={"factor": 2.0})),
    "architecture": lambda: fingerprint(other_model(architectures=["MistralForCausalLM"])),
    "block size": lambda: fingerprint(configured(Shape(block_tokens=8))),
    "length of an object": lambda: fingerprint(chunk_tokens=512),
    "layers": lambda: fingerprint(configured(Shape(layers=3))),
    "layout": lambda: fingerprint(configured(Shape(layout="LBHNC"))),
    "attention backend": lambda: fingerprint(
        changed(configured(), "attention_config", backend="FLEX_ATTENTION")
    ),
    "tensor parallel size": lambda: fingerprint(configured(Shape(ranks=2))),
    "pipeline stages": lambda: fingerprint(configured(Shape(stages=2))),
    "hash algorithm": lambda: fingerprint(
        changed(configured(), "cache_config", prefix_caching_hash_algo="sha256_cbor")
    ),
    "version of the weights": lambda: fingerprint(weights_version="v2"),
    "another version of the weights": lambda: fingerprint(weights_version="v3"),
}


def test_whatever_decides_a_byte_changes_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prints = {"nothing": fingerprint()} | {name: make() for name, make in CHANGES.items()}
    prints["weights"] = fingerprint(with_weights(tmp_path / "other", b"other weights"))
    for seed in ("0", "7"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        prints[f"hash seed {seed}"] = fingerprint()
    of: dict[str, list[str]] = {}
    for name, each in prints.items():
        of.setdefault(each, []).append(name)
    assert [names for names in of.values() if len(names) > 1] == []


def test_where_a_model_lies_changes_nothing(tmp_path: Path) -> None:
    weights = Path(configured().vllm_config.model_config.model, "model.safetensors").read_bytes()
    elsewhere = with_weights(tmp_path / "elsewhere", weights)
    assert fingerprint(elsewhere) == fingerprint()
    assert fingerprint(other_model(_name_or_path="/elsewhere")) == fingerprint()
    assert fingerprint(other_model(transformers_version="9.9")) == fingerprint()


@pytest.mark.parametrize(
    "extra",
    [{"min_hit_tokens": 9}, {"push": "reuse"}, {"fetch_deadline_s": 9}, {"host_cache": "2MiB"}],
)
def test_what_decides_no_byte_changes_nothing(extra: dict[str, Any]) -> None:
    assert fingerprint(**extra) == fingerprint()


def test_namespaces_are_apart_under_one_fingerprint() -> None:
    keys = [keyring(namespace=name).current for name in ("a", "b")]
    assert keys[0].fingerprint == keys[1].fingerprint
    assert keys[0].key(0, 0, b"x") != keys[1].key(0, 0, b"x")


def test_a_reset_gives_keys_that_nobody_had() -> None:
    ring, other = keyring(), keyring()
    prints = {ring.current.fingerprint}
    for each in (ring, ring, other):
        each.reset()
        prints.add(each.current.fingerprint)
    assert len(prints) == 4
    assert keyring().current.fingerprint in prints, "a restart comes back to the weights' own"


def test_weights_that_are_named_keep_their_keys_over_a_reset() -> None:
    ring = keyring(weights_version="v1")
    before = ring.current
    ring.reset()
    assert ring.current == before == keyring(weights_version="v1").current


def with_hash(algorithm: str) -> EngineConfig:
    return changed(configured(store=STORE), "cache_config", prefix_caching_hash_algo=algorithm)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_random_hash_seed_is_refused(algorithm: str, lines: list[str]) -> None:
    line = refusal(lambda: create(with_hash(algorithm)), lines)
    assert f"block hashes by '{algorithm}' start from a random seed" in line
    assert "set PYTHONHASHSEED" in line


def test_a_hash_seed_that_is_given_is_fine(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "11")
    create(with_hash("xxhash")).shutdown()
    assert not [line for line in lines if "random seed" in line]


def test_dummy_weights_need_a_name(lines: list[str]) -> None:
    dummy = changed(configured(store=STORE), "load_config", load_format="dummy")
    assert "name them (weights_version)" in refusal(lambda: create(dummy), lines)
    named = changed(
        configured(store=STORE, weights_version="mine"), "load_config", load_format="dummy"
    )
    create(named).shutdown()


def test_weights_that_are_nowhere_need_a_name(tmp_path: Path) -> None:
    nowhere = changed(configured(), "model_config", model=str(tmp_path / "nothing"))
    with pytest.raises(SettingError, match="weights_version"):
        keyring(nowhere)


@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
def test_a_store_that_does_not_exist_is_refused(role: KVConnectorRole, lines: list[str]) -> None:
    config = configured(store="nosuch://x")

    def start() -> None:
        if role is KVConnectorRole.SCHEDULER:
            create(config)
        else:
            register(config)

    assert "store='nosuch://x'" in refusal(start, lines)


def test_a_namespace_that_cannot_be_part_of_a_key_is_refused(lines: list[str]) -> None:
    config = configured(store=STORE, namespace="a/b")
    assert "namespace='a/b'" in refusal(lambda: create(config), lines)
