"""Tensor parallelism over two ranks with real engines: each keeps, stores and fetches its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import Server
from tests.e2e.test_store import PROMPT_OBJECTS, PROMPT_TOKENS, wait_for_objects
from tests.e2e.tinymodel import PROMPTS, tiny_llama

# In full: the smoke of each in `make test` goes over Mooncake (test_mooncake_fleet.py).
pytestmark = [pytest.mark.engine, pytest.mark.drill]

TWO_RANKS = ("--tensor-parallel-size", "2")


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"store": f"dir://{folder}?capacity=2GiB", "fetch_deadline_s": 60, **more}


def test_two_ranks_come_back_from_the_host_cache_and_after_a_restart(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", kv_heads=2)
    extra = settings(tmp_path / "store")
    with Server(model, tmp_path / "first.log", extra, arguments=TWO_RANKS) as server:
        server.wait_ready()
        text, cached = server.complete(PROMPTS[0])
        assert cached == 0
        server.forget()
        assert server.complete(PROMPTS[0]) == (text, PROMPT_TOKENS)
        # Each rank has heads of its own, so each stores its part of an object.
        wait_for_objects(tmp_path / "store", 2 * PROMPT_OBJECTS)
        server.stop()
    with Server(model, tmp_path / "second.log", extra, arguments=TWO_RANKS) as server:
        server.wait_ready()
        assert server.complete(PROMPTS[0]) == (text, PROMPT_TOKENS)
        server.stop()
