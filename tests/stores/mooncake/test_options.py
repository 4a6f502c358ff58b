"""What a ``mooncake://`` URL may say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moonstep.config import SettingError
from moonstep.stores.mooncake import package
from moonstep.stores.mooncake.codes import CODES, Meaning, code
from moonstep.stores.mooncake.master import Address
from moonstep.stores.mooncake.options import PARAMETERS, MooncakeOptions, SoftPin
from moonstep.stores.urls import StoreUrl, Use, open_store


def options(text: str, use: Use = Use.SERVE) -> MooncakeOptions:
    return MooncakeOptions.of_url(StoreUrl.parse(text, use))


def test_everything_can_be_said() -> None:
    assert options(
        "mooncake://10.0.0.5:50061?segment=32GiB&protocol=rdma&device=mlx5_0,mlx5_1&host=10.0.0.7"
        "&metadata=http://10.0.0.5:8080/metadata&buffer=64MiB&replicas=2&preferred_segment=own"
        "&soft_pin=heads&tenant=research"
    ) == MooncakeOptions(
        Address("10.0.0.5", 50061),
        segment_bytes=32 << 30,
        protocol="rdma",
        device="mlx5_0,mlx5_1",
        metadata="http://10.0.0.5:8080/metadata",
        host="10.0.0.7",
        buffer_bytes=64 << 20,
        replicas=2,
        preferred_segment="own",
        soft_pin=SoftPin.HEADS,
        tenant="research",
    )


def test_only_the_segment_has_to_be_said() -> None:
    assert options("mooncake://master?segment=0") == MooncakeOptions(Address("master", 50051))
    assert options("mooncake://[::1]:7?segment=0").master == Address("::1", 7)
    assert str(Address("::1", 7)) == "[::1]:7"


@pytest.mark.parametrize("use", [Use.LOOK_UP, Use.INSPECT])
def test_only_workers_give_memory(use: Use) -> None:
    assert options("mooncake://master?segment=32GiB", use).segment_bytes == 0


def test_an_operator_need_not_say_how_much_memory_to_give() -> None:
    assert options("mooncake://master", Use.INSPECT).master == Address("master", 50051)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("mooncake://master", "segment=32GiB"),
        ("mooncake://?segment=0", "name the master"),
        ("mooncake://master:port?segment=0", "cannot be read"),
        ("mooncake://user@master?segment=0", "name the master"),
        ("mooncake://master/path?segment=0", "no path"),
        ("mooncake://master?segmnt=0", "did you mean 'segment'"),
        ("mooncake://master?segment=0&protocol=smoke", "one of: tcp, rdma"),
        ("mooncake://master?segment=0&soft_pin=tails", "one of: none, heads, all"),
        ("mooncake://master?segment=0&replicas=0", "one or more"),
        ("mooncake://master?segment=0&replicas=two", "one or more"),
        ("mooncake://master?segment=much", "segment"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(text: str, remedy: str) -> None:
    with pytest.raises(SettingError) as raised:
        options(text)
    assert str(raised.value).startswith("moonstep: store")
    assert remedy in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_page_lists_the_parameters_and_their_defaults() -> None:
    page = (Path(__file__).parents[3] / "docs" / "mooncake.md").read_text(encoding="utf-8")
    table = page[page.index("## The URL") : page.index("**Who gives")]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE))
    assert set(rows) == set(PARAMETERS)
    defaults = {name: value.strip("`") for name, value in rows.items() if value.startswith("`")}
    query = "&".join(f"{name}={value}" for name, value in defaults.items())
    assert options(f"mooncake://m?segment=0&{query}") == options("mooncake://m?segment=0")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), "pip install 'moonstep[mooncake]'"),
        (
            ImportError("libibverbs.so.1: cannot open shared object file"),
            "apt-get install libibverbs1 libnuma1 libcurl4",
        ),
    ],
)
def test_a_package_that_does_not_load_is_one_line_that_says_what_to_install(
    error: ImportError, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(package, "import_module", fail)
    with pytest.raises(SettingError) as raised:
        open_store("mooncake://127.0.0.1?segment=0")
    assert str(raised.value).startswith("moonstep: store=")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_code_has_one_meaning() -> None:
    assert all(number < 0 and found.number == number for number, found in CODES.items())
    assert {found.meaning for found in CODES.values()} == set(Meaning) - {Meaning.DONE}
    assert len({found.name for found in CODES.values()}) == len(CODES)


@pytest.mark.parametrize(
    ("number", "meaning"),
    [
        (0, Meaning.DONE),
        (1 << 20, Meaning.DONE),
        (-200, Meaning.PRESSURE),
        (-704, Meaning.MISS),
        (-707, Meaning.MISS),
        (-800, Meaning.FAILED),
        (-900, Meaning.UNWELL),
        (-12345, Meaning.FAILED),
    ],
)
def test_codes(number: int, meaning: Meaning) -> None:
    assert code(number).meaning is meaning
