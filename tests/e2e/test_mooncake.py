"""`vllm serve` with a real Mooncake Store behind the host cache, which outlives the servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moonstep.stores.base import Store
from moonstep.stores.urls import open_store
from tests.e2e.servers import Server, poll
from tests.masters import Master, need_mooncake

pytestmark = pytest.mark.engine

# Ten full blocks of 128 tokens each: five objects of 256.
PROMPT = "One. " + " ".join(
    f"On day {n} the harbour master counted {n % 7} ships." for n in range(105)
)
PROMPT_TOKENS = 1280


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[tuple[Master, Store]]:
    """A master, and a client that gives memory to it and outlives the servers."""
    need_mooncake()
    with Master(tmp_path) as master:
        store = open_store(master.url(segment="512MiB"))
        yield master, store
        store.close()


def test_a_restarted_server_is_warm(
    model: Path, tmp_path: Path, pool: tuple[Master, Store]
) -> None:
    """Its answer is the same, and what it did not compute came out of the pool."""
    master, _ = pool
    settings = {"store": master.url(segment=0), "fetch_deadline_s": 60}
    with Server(model, tmp_path / "first.log", settings) as first:
        first.wait_ready()
        cold = first.complete(PROMPT)
        assert cold[1] == 0
        for _ in poll(60):
            if master.keys() >= PROMPT_TOKENS // 256:
                break
        first.stop()
    with Server(model, tmp_path / "second.log", settings) as second:
        second.wait_ready()
        assert second.complete(PROMPT) == (cold[0], PROMPT_TOKENS)
        second.stop()
        assert "unwell" not in second.log_text()
