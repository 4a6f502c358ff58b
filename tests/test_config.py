"""Settings and what one request may ask: everything wrong is said in one line, nothing ignored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonstep.config import (
    CaptureMode,
    Push,
    RequestOptions,
    Role,
    SettingError,
    Settings,
    parse_size,
)

GIB = 1 << 30


def line_of(call: Callable[[], Any]) -> str:
    """The message of the refusal; it has to be one line that begins with ``moonstep:``."""
    with pytest.raises(SettingError) as caught:
        call()
    line = str(caught.value)
    assert line.startswith("moonstep: ")
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        ("4GiB", 4 * GIB),
        ("4 gib", 4 * GIB),
        (" 512MiB ", 512 << 20),
        ("512 MB", 512 * 10**6),
        ("1.5k", 1536),
        ("2t", 2 << 40),
        ("100", 100),
        ("7b", 7),
        (123456, 123456),
        (0, 0),
    ],
)
def test_sizes_are_read_with_their_unit(written: object, nbytes: int) -> None:
    assert parse_size("host_cache", written) == nbytes


@given(st.integers(0, 1 << 50))
def test_a_size_survives_being_written_as_text(nbytes: int) -> None:
    assert parse_size("host_cache", str(nbytes)) == nbytes
    assert parse_size("host_cache", f"{nbytes >> 10}KiB") == nbytes >> 10 << 10


@pytest.mark.parametrize(
    "value", ["", "GiB", "4 gigs", "-4GiB", "1e9", "4,5GiB", 4.5, None, True, [], {}, -1, "0x10"]
)
def test_what_is_no_size_is_refused_by_name_and_value(value: object) -> None:
    line = line_of(lambda: Settings.parse({"host_cache": value}))
    assert f"host_cache={value!r}" in line


@pytest.mark.parametrize("value", [-1, 1.0, "16", True, None, [16]])
def test_a_count_is_a_whole_number(value: object) -> None:
    line = line_of(lambda: Settings.parse({"min_hit_tokens": value}))
    assert f"min_hit_tokens={value!r}" in line
    assert "whole number" in line


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("host_cach", "did you mean 'host_cache'?"),
        ("hostcache", "did you mean 'host_cache'?"),
        ("min_hit_token", "did you mean 'min_hit_tokens'?"),
        ("zebra", "there are host_cache, "),
    ],
)
def test_an_unknown_setting_is_an_error_that_names_the_likely_one(key: str, remedy: str) -> None:
    line = line_of(lambda: Settings.parse({key: 1}))
    assert f"{key}=1: there is no such setting" in line
    assert remedy in line


def test_nothing_set_gives_the_defaults_and_what_is_set_is_taken() -> None:
    assert Settings.parse({}) == Settings()
    assert Settings.parse({"host_cache": "1GiB", "min_hit_tokens": 64}) == Settings(
        host_cache_bytes=GIB, min_hit_tokens=64
    )


@pytest.mark.parametrize(
    ("role", "raw", "pushed", "fetches", "capture"),
    [
        (Role.BOTH, {}, Push.ALL, True, CaptureMode.EAGER),
        (Role.BOTH, {"push": "decoded"}, Push.DECODED, True, CaptureMode.EAGER),
        (Role.PRODUCER, {}, Push.ALL, False, CaptureMode.EAGER),
        (Role.PRODUCER, {"push": "reuse"}, Push.REUSE, False, CaptureMode.EAGER),
        (Role.CONSUMER, {}, Push.NONE, True, CaptureMode.LAZY),
        (Role.CONSUMER, {"push": "decoded"}, Push.DECODED, True, CaptureMode.EAGER),
        (Role.CONSUMER, {"capture": "eager"}, Push.NONE, True, CaptureMode.EAGER),
    ],
)
def test_what_a_role_pushes_fetches_and_captures(
    role: Role, raw: dict[str, Any], pushed: Push, fetches: bool, capture: CaptureMode
) -> None:
    settings = Settings.parse({"store": "memory://roles", **raw}, role)
    assert (settings.pushed, settings.fetches, settings.capture_mode) == (pushed, fetches, capture)


@pytest.mark.parametrize("role", [Role.PRODUCER, Role.CONSUMER])
def test_a_role_means_something_only_with_a_store(role: Role) -> None:
    assert f"kv_role='{role.value}'" in line_of(lambda: Settings.parse({}, role))


@pytest.mark.parametrize("push", ["all", "reuse"])
def test_a_consumer_pushes_at_most_what_it_decodes(push: str) -> None:
    raw = {"store": "memory://roles", "push": push}
    line = line_of(lambda: Settings.parse(raw, Role.CONSUMER))
    assert f"push={push!r}" in line
    assert "decoded" in line


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().min_hit_tokens = 3  # type: ignore[misc]


def test_a_host_cache_too_small_for_one_block_on_every_rank_is_refused() -> None:
    settings = Settings(host_cache_bytes=999)
    settings.check(slot_bytes=333, world_size=3, machine_bytes=GIB)
    line = line_of(lambda: settings.check(slot_bytes=334, world_size=3, machine_bytes=GIB))
    assert "host_cache=999: one block takes 1002 bytes over 3 rank(s)" in line


def test_a_host_cache_beyond_the_machine_is_refused() -> None:
    settings = Settings(host_cache_bytes=GIB)
    settings.check(slot_bytes=64, world_size=1, machine_bytes=GIB)
    line = line_of(lambda: settings.check(slot_bytes=64, world_size=1, machine_bytes=GIB - 1))
    assert f"host_cache={GIB}: this machine has {GIB - 1} bytes" in line


@pytest.mark.parametrize(
    ("params", "options"),
    [
        (None, RequestOptions()),
        ({}, RequestOptions()),
        ({"do_remote_prefill": True}, RequestOptions()),
        ({"moonstep": {}}, RequestOptions()),
        ({"moonstep": {"save": False}}, RequestOptions(save=False)),
        ({"moonstep": {"save": False, "load": False}}, RequestOptions(save=False, load=False)),
    ],
)
def test_a_request_can_opt_out(params: dict[str, Any] | None, options: RequestOptions) -> None:
    assert RequestOptions.parse(params) == options


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        ({"sve": False}, "kv_transfer_params.moonstep.sve=False"),
        ({"save": 0}, "kv_transfer_params.moonstep.save=0"),
        ({"load": "false"}, "kv_transfer_params.moonstep.load='false'"),
        (False, "kv_transfer_params.moonstep=False"),
        ([], "kv_transfer_params.moonstep=[]"),
    ],
)
def test_what_a_request_cannot_ask_is_named(wish: object, named: str) -> None:
    assert named in line_of(lambda: RequestOptions.parse({"moonstep": wish}))
