"""What Moonstep refuses to run with: one line of ours, by name, that is also the exception's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from moonstep.audit.engineconfig import EngineConfig
from moonstep.audit.kvmemory import RankMemory
from moonstep.audit.shape import Shape
from moonstep.engines.vllm import machine
from moonstep.engines.vllm.connector import MoonstepConnector
from tests.engines.conftest import changed, configured, create


def refusal(call: Callable[[], Any], lines: list[str]) -> str:
    """The line of a refusal: logged exactly once, and the message of the exception."""
    with pytest.raises(ValueError, match=r"^moonstep: ") as caught:
        call()
    ours = [line for line in lines if line.startswith("moonstep:")]
    assert ours == [str(caught.value)]
    assert "\n" not in ours[0]
    return ours[0]


ROLES = pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])


@ROLES
@pytest.mark.parametrize("kv_role", ["kv_producer", "kv_consumer"])
def test_a_role_without_a_store(role: KVConnectorRole, kv_role: str, lines: list[str]) -> None:
    config = configured(role=kv_role)
    line = refusal(lambda: create(config, role), lines)
    assert f"kv_role='{kv_role}'" in line
    assert "store" in line


@ROLES
@pytest.mark.parametrize("size", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism(role: KVConnectorRole, size: str, lines: list[str]) -> None:
    config = changed(configured(), "parallel_config", **{size: 2})
    assert f"{size}=2 is not supported" in refusal(lambda: create(config, role), lines)


@ROLES
def test_an_encoder_decoder_model(role: KVConnectorRole, lines: list[str]) -> None:
    config = changed(configured(), "model_config", is_encoder_decoder=True)
    assert "an encoder-decoder model is not" in refusal(lambda: create(config, role), lines)


@ROLES
def test_latents_on_a_cpu_whose_kernels_cannot_go_on(
    role: KVConnectorRole, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.32.0 switches prefix caching off there. Answers over restored latents are wrong."""
    config = configured(Shape(groups="mla", prefix_caching=False))
    create(config, role)
    monkeypatch.setattr(type(config.vllm_config.model_config), "use_mla", True)
    assert "latent attention (MLA) on a CPU that" in refusal(lambda: create(config, role), lines)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "draft_model"])
def test_a_drafter_with_layers_of_its_own(method: str, lines: list[str]) -> None:
    config = changed(configured(Shape(drafts=2)), "speculative_config", method=method)
    line = refusal(lambda: create(config), lines)
    assert f"speculative decoding with '{method}' is not supported" in line
    assert "n-gram drafts work" in line


def with_group(**values: Any) -> EngineConfig:
    """A configuration whose one group differs in these values."""
    config = configured()
    kv = copy.deepcopy(config.scheduler_kv)
    for name, value in values.items():
        setattr(kv.kv_cache_groups[0], name, value)
    return EngineConfig(config.vllm_config, kv, (kv,), 4, 4)


@ROLES
def test_groups_of_a_kind_that_is_not_known(role: KVConnectorRole, lines: list[str]) -> None:
    """More of them in test_specs."""
    spec = ChunkedLocalAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=8
    )
    config = with_group(kv_cache_spec=spec)
    assert "a KV cache of kind ChunkedLocal" in refusal(lambda: create(config, role), lines)


def test_a_group_of_draft_layers(lines: list[str]) -> None:
    config = with_group(is_eagle_group=True)
    assert "a KV-cache group of draft layers" in refusal(lambda: create(config), lines)


def test_drafts_beside_recurrent_layers(lines: list[str]) -> None:
    config = configured(Shape(groups="full+state", blocks=48, drafts=2))
    line = refusal(lambda: create(config), lines)
    assert "speculative decoding with 'ngram' beside recurrent layers is not supported" in line


@ROLES
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"host_cahce": "1GiB"}, "host_cahce='1GiB': there is no such setting; did you mean"),
        ({"min_hit_tokens": "16"}, "min_hit_tokens='16': write a whole number"),
        ({"host_cache": "4 gigs"}, "host_cache='4 gigs': write a size with a unit"),
        ({"host_cache": -1}, "host_cache=-1: a size cannot be negative"),
        ({"capture": "sometimes"}, "capture='sometimes': write 'eager' or 'lazy'"),
    ],
)
def test_a_setting_that_cannot_be_used(
    role: KVConnectorRole, settings: dict[str, Any], named: str, lines: list[str]
) -> None:
    config = configured(**settings)
    assert named in refusal(lambda: create(config, role), lines)


def with_store(tmp_path: Path, **extra: Any) -> EngineConfig:
    """A configuration with a directory behind the host cache."""
    return configured(store=f"dir://{tmp_path / 'store'}?capacity=1MiB", **extra)


def test_a_store_for_weights_that_nothing_tells_from_others(
    tmp_path: Path, lines: list[str]
) -> None:
    config = changed(with_store(tmp_path), "load_config", load_format="dummy")
    line = refusal(lambda: create(config), lines)
    assert "nothing tells this model's weights from others: name them (weights_version)" in line
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_store_whose_hashes_start_from_a_random_seed(
    algorithm: str, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = changed(
        with_store(tmp_path, weights_version="1"),
        "cache_config",
        prefix_caching_hash_algo=algorithm,
    )
    line = refusal(lambda: create(config), lines)
    assert f"block hashes by {algorithm!r} start from a random seed" in line
    assert "set PYTHONHASHSEED, or --prefix-caching-hash-algo sha256" in line
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    create(config).shutdown()


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"store": "dri:///tmp/x"}, "store='dri:///tmp/x'"),
        ({"namespace": "a"}, "namespace='a': it means nothing without a \"store\""),
        ({"store": "memory://x", "namespace": "a/b", "weights_version": "1"}, "namespace='a/b'"),
    ],
)
def test_a_store_setting_that_cannot_be_used(
    extra: dict[str, Any], named: str, lines: list[str]
) -> None:
    assert named in refusal(lambda: create(configured(**extra)), lines)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"host_cahce": "1GiB"}, "host_cahce='1GiB': there is no such setting; did you mean"),
        ({"store": "dir:///etc/passwd/x?capacity=1MiB"}, "the folder cannot be used"),
        ({"store": "dri:///tmp/x"}, "store='dri:///tmp/x'"),
        ({"store": "memory://x", "namespace": "a/b"}, "namespace='a/b'"),
    ],
)
def test_what_is_refused_when_the_configuration_is_built(
    extra: dict[str, Any], named: str, lines: list[str]
) -> None:
    ask = MoonstepConnector.requires_piecewise_for_cudagraph
    assert named in refusal(lambda: ask(extra), lines)


def test_good_settings_pass_when_the_configuration_is_built(
    tmp_path: Path, lines: list[str]
) -> None:
    good = {"store": f"dir://{tmp_path / 'store'}?capacity=1MiB", "host_cache": "1GiB"}
    assert not MoonstepConnector.requires_piecewise_for_cudagraph(good)
    assert not MoonstepConnector.requires_piecewise_for_cudagraph({})
    assert [line for line in lines if line.startswith("moonstep:")] == []


def register(config: EngineConfig, layout: str = "LBNHC") -> None:
    connector = create(config, KVConnectorRole.WORKER)
    connector.register_kv_caches(RankMemory(config.rank_kv[0], layout, 0).tensors)
    connector.shutdown()


def test_a_host_cache_too_small_for_a_block(lines: list[str]) -> None:
    config = configured(host_cache=100)
    line = refusal(lambda: register(config), lines)
    assert "host_cache=100: one block takes 512 bytes over 1 rank(s)" in line


def test_a_host_cache_larger_than_the_machine(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(host_cache="100TiB")
    line = refusal(lambda: register(config), lines)
    assert f"this machine has {machine.machine_memory_bytes()} bytes" in line


@pytest.mark.parametrize(
    ("shape", "device", "named"),
    [
        ((7, 2, 4, 8), "cpu", "the KV cache layout of layer 'model.layers.0.self_attn.attn'"),
        ((24, 2, 4, 8), "meta", "KV memory on 'meta' is not supported"),
    ],
    ids=["no dimension counts the blocks", "no such device"],
)
def test_memory_that_it_cannot_copy(
    shape: tuple[int, ...], device: str, named: str, lines: list[str]
) -> None:
    config = configured()
    connector = create(config, KVConnectorRole.WORKER)
    caches = {
        name: torch.zeros(shape, device=device)
        for name in config.rank_kv[0].kv_cache_groups[0].layer_names
    }
    assert named in refusal(lambda: connector.register_kv_caches(caches), lines)
    connector.shutdown()


def test_what_is_fine_is_not_remarked_upon(lines: list[str]) -> None:
    create(configured())
    register(configured())
    assert [line for line in lines if line.startswith("moonstep:")] == []


def test_the_containers_limit_counts_where_it_is_lower(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = machine.machine_memory_bytes()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_CGROUP_LIMIT", limit)
    assert machine.machine_memory_bytes() >= total
    for text, nbytes in (("max\n", None), ("1048576\n", 1048576), (f"{1 << 62}\n", None)):
        limit.write_text(text)
        assert machine.machine_memory_bytes() == (nbytes or machine.machine_memory_bytes())
        assert (machine.machine_memory_bytes() == 1048576) is (nbytes is not None)
