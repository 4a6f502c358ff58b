"""Several real engines around one real Mooncake Store, and a master in trouble under load."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import Server, poll
from tests.e2e.test_ranks import TWO_RANKS
from tests.e2e.test_store import PROMPT_OBJECTS, PROMPT_TOKENS, PROMPTS, wait_for_metrics
from tests.e2e.tinymodel import PROMPTS as TINY_PROMPTS
from tests.e2e.tinymodel import tiny_llama
from tests.masters import Master, need_mooncake
from tests.store_tier.mooncake import Pool

pytestmark = pytest.mark.engine

BLOCK_BYTES = 128 * 30 * 2 * 3 * 64 * 4
"""Of SmolLM2-135M in float32: tokens, layers, keys and values, heads, head size, bytes."""
FROZEN_S = 20.0
RESUMES_S = 15.0
SHUTDOWN_DEADLINE_S = 5.0


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    need_mooncake()
    with Master(tmp_path) as master:
        yield master


def settings(url: str, **more: Any) -> dict[str, Any]:
    # A machine that does much else is slow; that the deadline is kept is tested elsewhere.
    return {"store": url, "fetch_deadline_s": 60, **more}


def wait_for_keys(master: Master, count: int) -> None:
    for _ in poll(60):
        if master.keys() >= count:
            return
    raise AssertionError(f"{master.keys()} objects of {count} have been stored")


def test_a_producer_prefills_for_a_consumer_over_mooncake(tmp_path: Path, master: Master) -> None:
    """The producer gives the memory."""
    model = tiny_llama(tmp_path / "model")
    taking = settings(master.url("0"))
    giving = settings(master.url("64MiB"))
    with (
        Server(model, tmp_path / "producer.log", giving, role="kv_producer") as producer,
        Server(model, tmp_path / "consumer.log", taking, role="kv_consumer") as consumer,
    ):
        producer.wait_ready()
        consumer.wait_ready()
        producer.complete(TINY_PROMPTS[0], max_tokens=1)
        # The master counts an object when its put begins.
        wait_for_metrics(producer, {"push_objects_total stored": PROMPT_OBJECTS})
        text, cached = consumer.complete(TINY_PROMPTS[0])
        assert cached == PROMPT_TOKENS
        producer.forget()
        assert producer.complete(TINY_PROMPTS[0]) == (text, PROMPT_TOKENS), (
            "its own host cache works"
        )
        producer.stop()
        consumer.stop()


def test_heads_that_two_ranks_have_are_stored_once_and_fetched_by_both(
    tmp_path: Path, master: Master
) -> None:
    """A host cache for one prompt and a little: the first of four has to come from the store."""
    model = tiny_llama(tmp_path / "model", kv_heads=1)
    block_bytes = 2 * 2 * 128 * 2 * 64 * 4  # ranks, layers, tokens, keys and values, head, float32
    extra = settings(
        master.url("64MiB"), host_cache=12 * block_bytes, fetch_share=1.0, max_busy_share=1.0
    )
    with Server(model, tmp_path / "server.log", extra, arguments=TWO_RANKS) as server:
        server.wait_ready()
        text, cached = server.complete(TINY_PROMPTS[0])
        assert cached == 0
        for number, other in enumerate(TINY_PROMPTS[1:], 1):
            # Until then the last prompt's slots are the pushes', and the next finds no room.
            wait_for_metrics(server, {"push_objects_total stored": number * PROMPT_OBJECTS})
            server.complete(other)
        wait_for_keys(master, len(TINY_PROMPTS) * PROMPT_OBJECTS)
        server.forget()
        assert server.complete(TINY_PROMPTS[0]) == (text, PROMPT_TOKENS)
        assert master.keys() == len(TINY_PROMPTS) * PROMPT_OBJECTS, "each object once"
        server.stop()


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_two_ranks_come_back_from_mooncake_after_a_restart(tmp_path: Path, master: Master) -> None:
    """The memory is another process's, so it outlives the engine."""
    model = tiny_llama(tmp_path / "model", kv_heads=2)
    extra = settings(master.url("0"))
    texts = []
    with Pool(master.url("512MiB")):
        for life in range(2):
            log = tmp_path / f"life-{life}.log"
            with Server(model, log, extra, arguments=TWO_RANKS) as server:
                server.wait_ready()
                text, cached = server.complete(TINY_PROMPTS[0])
                assert cached == (PROMPT_TOKENS if life else 0)
                texts.append(text)
                wait_for_keys(master, 2 * PROMPT_OBJECTS)
                server.stop()
    assert texts[0] == texts[1]


class Load:
    """Requests, two at a time, that have to answer as they did the first time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._texts = {prompt: server.complete(prompt)[0] for prompt in PROMPTS}
        self._stop = threading.Event()

    def run(self) -> int:
        """Until told to stop; how many were answered."""
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(self._ask_on, (0, len(PROMPTS) // 2)))

    def stop(self) -> None:
        self._stop.set()

    def from_the_store(self) -> int:
        """Ask each prompt in turn, the engine's own cache emptied before: how many were found.

        The host cache holds the last two of six, so what is found comes from the store.
        """
        found = 0
        for prompt in PROMPTS:
            self._server.forget()
            found += self._ask(prompt) == PROMPT_TOKENS
        return found

    def _ask_on(self, first: int) -> int:
        count = 0
        while not self._stop.is_set():
            self._ask(PROMPTS[(first + count) % len(PROMPTS)])
            count += 1
        return count

    def _ask(self, prompt: str) -> int:
        text, cached = self._server.complete(prompt)
        assert text == self._texts[prompt]
        return cached


@pytest.mark.drill
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trouble", ["frozen", "killed"])
def test_a_master_in_trouble_under_the_load_of_a_real_engine(
    model: Path, tmp_path: Path, master: Master, trouble: str
) -> None:
    """KV memory for three prompts, a host cache for two, six prompts in turn: all else has to come
    from the store, or be computed. It ends beside a master that is frozen once more."""
    extra = {
        "store": master.url("1GiB"),
        "host_cache": 24 * BLOCK_BYTES,
        "fetch_deadline_s": 1.0,
        "push_deadline_s": 2.0,
        "shutdown_deadline_s": SHUTDOWN_DEADLINE_S,
    }
    with Server(model, tmp_path / "server.log", extra) as server:
        server.wait_ready()
        load = Load(server)
        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(load.run)
            time.sleep(5.0)
            (master.freeze if trouble == "frozen" else master.kill)()
            time.sleep(FROZEN_S)
            (master.thaw if trouble == "frozen" else master.start)()
            time.sleep(RESUMES_S)
            load.stop()
            assert answered.result(timeout=120) > 0
        # A master that was killed knew nothing when it came back: what is asked now is stored anew.
        assert load.from_the_store() >= (4 if trouble == "frozen" else 1)
        assert load.from_the_store() >= 4
        master.freeze()
        start_s = time.monotonic()
        server.stop()
        taken_s = time.monotonic() - start_s
        master.thaw()
        assert not server.own_tracebacks()
        # The server's own end, with two processes to stop, takes about two seconds of it.
        assert taken_s <= SHUTDOWN_DEADLINE_S + 2 + 5, f"it took {taken_s:.1f} s to end"
