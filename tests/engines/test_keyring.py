"""Keys of real vLLM configurations: who shares objects, and who does not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from moonstep.audit.engineconfig import EngineConfig
from moonstep.config import SettingError, Settings
from moonstep.engines.vllm.keyring import VllmKeyring
from moonstep.keys import Key
from tests.engines.conftest import changed, configured

STORE = {"store": "memory://keyring"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def key_of(config: EngineConfig, **settings: Any) -> Key:
    keyring = VllmKeyring(Settings.parse(STORE | settings), config.vllm_config, config.scheduler_kv)
    return keyring.current.key(0, 0, b"a block")


def model_folder(config: EngineConfig) -> Path:
    return Path(config.vllm_config.model_config.model)


def test_two_engines_of_one_configuration_share() -> None:
    assert key_of(configured()) == key_of(configured())


@pytest.mark.parametrize(
    "settings", [{"namespace": "b"}, {"chunk_tokens": 8}, {"weights_version": "2"}]
)
def test_a_setting_that_means_other_objects_does_not(settings: dict[str, Any]) -> None:
    assert key_of(configured(), **settings) != key_of(configured())


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("model_config", {"revision": "other"}),
        ("model_config", {"quantization": "other"}),
        ("cache_config", {"cache_dtype": "fp8"}),
        ("cache_config", {"prefix_caching_hash_algo": "sha256_cbor"}),
        ("parallel_config", {"tensor_parallel_size": 2}),
    ],
)
def test_a_configuration_that_means_other_bytes_does_not(part: str, values: dict[str, Any]) -> None:
    config = configured()
    assert key_of(changed(config, part, **values)) != key_of(config)


def test_where_a_model_lies_does_not_matter_and_what_it_holds_does(tmp_path: Path) -> None:
    config = configured()
    copy = Path(shutil.copytree(model_folder(config), tmp_path / "copy"))
    moved = changed(config, "model_config", model=str(copy))
    assert key_of(moved) == key_of(config)
    (copy / "model.safetensors").write_bytes(b"other weights")
    assert key_of(moved) != key_of(config)


def test_weights_that_a_hub_has_a_name_for_are_found_in_its_cache(tmp_path: Path) -> None:
    config = configured()
    hub = tmp_path / "models--someone--tiny"
    shutil.copytree(model_folder(config), hub / "snapshots" / COMMIT)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(COMMIT)
    named = changed(config, "model_config", model="someone/tiny")
    named = changed(named, "load_config", download_dir=str(tmp_path))
    assert key_of(named) == key_of(config)


@pytest.mark.parametrize("model", ["someone/unknown", "s3://no/hub/has/this"])
def test_weights_that_are_nowhere_to_be_seen_have_to_be_named(model: str, tmp_path: Path) -> None:
    config = changed(configured(), "model_config", model=model)
    config = changed(config, "load_config", download_dir=str(tmp_path))
    with pytest.raises(SettingError, match=r"name them \(weights_version\)"):
        key_of(config)
    assert key_of(config, weights_version="1")


def test_a_reset_renews_the_keys_unless_the_weights_are_named() -> None:
    config = configured()
    for version, renews in ((None, True), ("1", False)):
        settings = Settings.parse(STORE | ({"weights_version": version} if version else {}))
        keyring = VllmKeyring(settings, config.vllm_config, config.scheduler_kv)
        before = keyring.current.key(0, 0, b"a block")
        keyring.reset()
        assert (keyring.current.key(0, 0, b"a block") != before) is renews
