"""`vllm serve` with a directory behind the host cache, which outlives the servers."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from moonstep.cli.main import app
from tests.e2e.servers import Server, poll
from tests.e2e.tinymodel import PROMPTS as TINY_PROMPTS
from tests.e2e.tinymodel import tiny_llama

# In full: the smoke of each in `make test` goes over Mooncake (test_mooncake.py and its fleet).
pytestmark = [pytest.mark.engine, pytest.mark.drill]

# Ten full blocks of 128 tokens each, different from their first words on: five objects of 256.
STORY = " ".join(f"On day {n} the harbour master counted {n % 7} lanterns." for n in range(105))
PROMPTS = [f"{name}. {STORY}" for name in ("One", "Two", "Three", "Four", "Five", "Six")]
PROMPT_TOKENS = 1280
PROMPT_OBJECTS = 5


def settings(folder: Path) -> dict[str, object]:
    # A machine that does much else is slow; that the deadline is kept is tested elsewhere.
    return {"store": f"dir://{folder}?capacity=2GiB", "fetch_deadline_s": 60}


def slow_settings(folder: Path) -> dict[str, object]:
    """Two objects a second, so that a kill comes in between."""
    return settings(folder) | {"push_bytes_per_s": "24MB"}


def object_count(folder: Path) -> int:
    return sum(1 for _ in folder.glob("objects/**/*.kv"))


def wait_for_objects(folder: Path, count: int) -> None:
    for _ in poll(60):
        if object_count(folder) >= count:
            return
    raise AssertionError(f"{object_count(folder)} objects of {count} have been stored")


def damaged_count(folder: Path) -> int:
    """How many damaged objects `moonstep store verify` finds; it also sees that all can be read."""
    result = CliRunner().invoke(app, ["store", "verify", f"dir://{folder}"])
    assert result.exit_code in (0, 1), result.output
    return result.exit_code


def test_what_one_server_stores_another_one_serves(tmp_path: Path) -> None:
    """While both run; and what the first one's last request left, after the first one has ended."""
    folder = tmp_path / "store"
    model = tiny_llama(tmp_path / "model")
    one, other, *_ = TINY_PROMPTS
    with (
        Server(model, tmp_path / "first.log", settings(folder)) as first,
        Server(model, tmp_path / "second.log", settings(folder)) as second,
    ):
        first.wait_ready()
        second.wait_ready()
        text, cached = first.complete(one)
        assert cached == 0
        # The engine is idle: only the connector keeps it stepping until everything is stored.
        wait_for_objects(folder, PROMPT_OBJECTS)
        assert second.complete(one) == (text, PROMPT_TOKENS)
        wait_for_metrics(first, {"push_objects_total stored": PROMPT_OBJECTS})
        fetched = {"hit_tokens_total store": PROMPT_TOKENS, "quarantined_slots": 0}
        fetched |= {"fetch_objects_total hit": PROMPT_OBJECTS, "miss_tokens_total absent": 0}
        wait_for_metrics(second, fetched)
        stored = first.metrics()
        assert stored["push_bytes_total"] == second.metrics()["fetch_bytes_total"] > 0
        assert stored["push_seconds_count"] > 0
        assert stored["push_seconds_sum"] > 0
        text, cached = first.complete(other)
        assert cached == 0
        first.stop()
        assert second.complete(other) == (text, PROMPT_TOKENS)
        second.stop()
    assert object_count(folder) == 2 * PROMPT_OBJECTS
    assert damaged_count(folder) == 0


def wait_for_metrics(server: Server, wanted: dict[str, float]) -> None:
    shown: dict[str, float] = {}
    for _ in poll(60):
        shown = server.metrics()
        if wanted.items() <= shown.items():
            return
    raise AssertionError(f"{wanted} wanted, {shown} shown")


def wait_until_it_writes(folder: Path) -> None:
    for _ in poll(60, every_s=0.001):
        if any((folder / "incoming").glob("*/*")):
            return
    raise AssertionError("nothing is being written")


def ask_in_vain(server: Server, prompt: str) -> None:
    with contextlib.suppress(httpx.HTTPError):
        server.complete(prompt)


@pytest.mark.timeout(900)
def test_a_server_killed_while_it_stores_leaves_no_damage(model: Path, tmp_path: Path) -> None:
    """Twice; each time it answers what was stored before, and all that was whole is there."""
    folder = tmp_path / "store"
    answers: dict[str, str] = {}
    for life in range(2):
        *stored, interrupted = PROMPTS[3 * life : 3 * life + 3]
        with Server(model, tmp_path / f"killed-{life}.log", slow_settings(folder)) as server:
            server.wait_ready()
            for prompt, text in answers.items():
                assert server.complete(prompt) == (text, PROMPT_TOKENS)
            before = object_count(folder)
            for prompt in stored:
                answers[prompt], cached = server.complete(prompt)
                assert cached == 0
            wait_for_objects(folder, before + len(stored) * PROMPT_OBJECTS)
            asking = threading.Thread(target=ask_in_vain, args=(server, interrupted))
            asking.start()
            wait_until_it_writes(folder)
            server.kill()
            asking.join(timeout=60)
            assert not asking.is_alive()
        assert object_count(folder) < before + 3 * PROMPT_OBJECTS, "killed when all was over"
    with Server(model, tmp_path / "last.log", settings(folder)) as server:
        server.wait_ready()
        for prompt, text in answers.items():
            assert server.complete(prompt) == (text, PROMPT_TOKENS)
        server.stop()
    assert damaged_count(folder) == 0
