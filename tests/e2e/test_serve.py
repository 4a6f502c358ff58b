"""``vllm serve`` with the one flag, as a user runs it: two servers, and one that is misspelt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.servers import Server
from tests.e2e.tinymodel import PROMPTS, TEN_BLOCKS, tiny_llama

pytestmark = pytest.mark.engine

PROMPT, SECOND, THIRD, FOURTH = PROMPTS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that starts and answers quickly: what is tested here is around it."""
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def servers(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Two servers on one host, started at the same time: the first captures at once, the second
    has no settings at all."""
    logs = tmp_path_factory.mktemp("serve")
    with (
        Server(model, logs / "eager.log", {"capture": "eager"}) as eager,
        Server(model, logs / "plain.log") as plain,
    ):
        eager.wait_ready()
        plain.wait_ready()
        yield eager, plain


def test_the_same_prompt_comes_back_after_a_reset_of_the_engine(
    servers: tuple[Server, Server],
) -> None:
    eager, _ = servers
    text, cached = eager.complete(PROMPT)
    assert cached == 0
    eager.forget()
    again, cached = eager.complete(PROMPT)
    assert cached == TEN_BLOCKS
    assert again == text


def test_a_prompt_that_others_pushed_out_comes_back_with_no_settings_at_all(
    servers: tuple[Server, Server],
) -> None:
    eager, plain = servers
    text, cached = plain.complete(PROMPT)
    assert cached == 0, "what the other server on this host keeps is not this one's"
    for prompt in (SECOND, THIRD, FOURTH):
        plain.complete(prompt)
    again, cached = plain.complete(PROMPT)
    assert cached == TEN_BLOCKS
    assert again == text == eager.complete(PROMPT)[0]


def test_a_request_can_opt_out_of_loading_and_of_saving(servers: tuple[Server, Server]) -> None:
    eager, _ = servers
    eager.forget()
    _, cached = eager.complete(PROMPT, kv_transfer_params={"moonstep": {"load": False}})
    assert cached == 0
    eager.complete(SECOND, kv_transfer_params={"moonstep": {"save": False}})
    eager.forget()
    _, cached = eager.complete(SECOND)
    assert cached == 0
    assert eager.metrics()["miss_tokens_total not_asked"] >= TEN_BLOCKS


def test_each_server_says_at_its_end_what_it_did(servers: tuple[Server, Server]) -> None:
    for server in servers:
        shown = server.metrics()
        server.stop()
        (summary,) = server.last_words()
        assert summary.startswith("moonstep: saved ")
        assert "restored 0 tokens" not in summary
        hits, misses = (
            {name: tokens for name, tokens in shown.items() if name.startswith(of)}
            for of in ("hit_tokens_total", "miss_tokens_total")
        )
        restored = hits.pop("hit_tokens_total host")
        assert f"restored {restored:.0f} tokens ({mib(shown['restore_bytes_total'])})" in summary
        assert f"tokens ({mib(shown['capture_bytes_total'])}), restored" in summary
        assert f"of {restored + sum(misses.values()):.0f} tokens the engine" in summary
        assert misses["miss_tokens_total absent"] > 0
        assert shown["capture_seconds_total"] > 0
        assert shown["slots written"] > 0


def mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"


@pytest.mark.drill
def test_a_misspelt_setting_ends_the_start_with_one_line(model: Path, tmp_path: Path) -> None:
    with Server(model, tmp_path / "misspelt.log", {"host_cashe": "1GiB"}) as server:
        assert server.wait_ended(timeout_s=280) != 0
        (line,) = set(server.moonstep_lines())
        assert "host_cashe='1GiB'" in line
        assert "did you mean 'host_cache'?" in line
        # The same words are the message of the exception that vLLM reports as the cause.
        assert f"SettingError: {line}" in server.log_text()
