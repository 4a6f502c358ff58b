"""The file of vLLM's own connector means the same to Moonstep."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from moonstep.config import SettingError
from moonstep.stores.mooncake.configfile import VARIABLE
from moonstep.stores.mooncake.master import Address
from moonstep.stores.mooncake.options import MooncakeOptions
from moonstep.stores.urls import StoreUrl

FULL = {
    "mode": "embedded",
    "metadata_server": "http://10.0.0.5:8080/metadata",
    "master_server_address": "10.0.0.5:50061",
    "protocol": "tcp",
    "device_name": "mlx5_0",
    "global_segment_size": "8GB",
    "local_buffer_size": "512MB",
    "tenant_id": "research",
    "enable_offload": False,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mooncake.json"


def options(text: str, environ: dict[str, str] | None = None) -> MooncakeOptions:
    return MooncakeOptions.of_url(StoreUrl.parse(text), environ or {})


def written(path: Path, said: Any) -> str:
    path.write_text(json.dumps(said))
    return f"mooncake://?config={path}"


def test_each_key_is_taken(path: Path) -> None:
    assert options(written(path, FULL)) == MooncakeOptions(
        Address("10.0.0.5", 50061),
        segment_bytes=8 << 30,
        protocol="tcp",
        device="mlx5_0",
        metadata="http://10.0.0.5:8080/metadata",
        buffer_bytes=512 << 20,
        tenant="research",
    )


def test_the_environment_names_the_file_for_a_url_that_names_nothing(path: Path) -> None:
    url = written(path, FULL)
    assert options("mooncake://", {VARIABLE: str(path)}) == options(url)
    other = options("mooncake://master?segment=0", {VARIABLE: str(path)})
    assert other == MooncakeOptions(Address("master", 50051))


def test_the_urls_parameters_go_first(path: Path) -> None:
    found = options(written(path, FULL) + "&segment=1GiB&replicas=2")
    assert (found.segment_bytes, found.replicas, found.tenant) == (1 << 30, 2, "research")


def test_what_the_file_leaves_out_is_what_vllm_takes(path: Path) -> None:
    found = options(written(path, {"master_server_address": "m:1", "metadata_server": ""}))
    assert (found.segment_bytes, found.protocol, found.tenant) == (4 << 30, "rdma", "default")


def test_a_standalone_store_gives_no_memory(path: Path) -> None:
    said = FULL | {"mode": "standalone-store", "global_segment_size": 0}
    assert options(written(path, said)).segment_bytes == 0


def test_what_means_nothing_here_is_named_in_the_log(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    options(written(path, FULL | {"storage_root_dir": "/ssd"}))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"moonstep: {path}: without effect here: storage_root_dir"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (["a list"], "no JSON object"),
        ({}, "'master_server_address' is missing"),
        (FULL | {"master_server_address": 7}, "no text"),
        (FULL | {"global_segment_size": "4 parsecs"}, "no size"),
        (FULL | {"global_segment_size": -1}, "no size"),
        (FULL | {"mode": "embeded"}, "'embedded' or 'standalone-store'"),
        (FULL | {"protocol": "smoke"}, "one of: tcp, rdma"),
    ],
)
def test_what_cannot_be_is_one_line(path: Path, said: Any, words: str) -> None:
    url = written(path, said)
    with pytest.raises(SettingError) as raised:
        options(url)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_or_no_json_is_one_line(path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be read"):
        options(f"mooncake://?config={path}")
    path.write_text("{")
    with pytest.raises(SettingError, match="cannot be read"):
        options(f"mooncake://?config={path}")


def test_a_url_names_a_master_or_a_file_and_not_both(path: Path) -> None:
    with pytest.raises(SettingError, match="the file names the master"):
        options(written(path, FULL).replace("://", "://master"))
    with pytest.raises(SettingError, match=VARIABLE):
        options("mooncake://")


@pytest.mark.parametrize(
    "said",
    [
        FULL,
        FULL | {"global_segment_size": 1 << 30, "tenant_id": None},
        FULL | {"global_segment_size": "1.5gb", "tenant_id": " "},
        {key: FULL[key] for key in ("master_server_address", "metadata_server")},
    ],
)
def test_vllm_reads_the_same_out_of_it(path: Path, said: Any) -> None:
    store = pytest.importorskip("vllm.distributed.mooncake_store", reason="vLLM is not installed")
    ours = options(written(path, said))
    theirs = store.MooncakeStoreConfig.from_file(str(path))
    assert str(ours.master) == theirs.master_server_address
    assert ours.metadata == theirs.metadata_server
    assert ours.segment_bytes == theirs.global_segment_size
    assert (ours.protocol, ours.device) == (theirs.protocol, theirs.device_name)
    assert ours.tenant == theirs.tenant_id
    if "local_buffer_size" in said:
        assert ours.buffer_bytes == theirs.local_buffer_size
