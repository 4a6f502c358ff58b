"""Prefill on one server, decode on another: what the first one pushes, the second one fetches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.servers import Server
from tests.e2e.test_store import (
    PROMPT_OBJECTS,
    PROMPT_TOKENS,
    PROMPTS,
    object_count,
    settings,
    wait_for_objects,
)

# In full: the smoke of each in `make test` goes over Mooncake (test_mooncake_fleet.py).
pytestmark = [pytest.mark.engine, pytest.mark.drill]


def test_a_producer_prefills_for_a_consumer(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    decoded = settings(folder) | {"push": "decoded"}
    with (
        Server(model, tmp_path / "producer.log", settings(folder), role="kv_producer") as producer,
        Server(model, tmp_path / "consumer.log", decoded, role="kv_consumer") as consumer,
    ):
        producer.wait_ready()
        consumer.wait_ready()
        producer.complete(PROMPTS[0], max_tokens=1)
        wait_for_objects(folder, PROMPT_OBJECTS)
        text, cached = consumer.complete(PROMPTS[0])
        assert cached == PROMPT_TOKENS
        producer.forget()
        # The producer's own host cache works, and its answer is the reference.
        assert producer.complete(PROMPTS[0]) == (text, PROMPT_TOKENS)
        # What the consumer has to compute of a prompt it keeps for itself; what it decodes is
        # pushed, when an object is full of it.
        consumer.complete(PROMPTS[1], max_tokens=1)
        consumer.complete(PROMPTS[0], max_tokens=300, ignore_eos=True)
        wait_for_objects(folder, PROMPT_OBJECTS + 1)
        producer.complete(PROMPTS[2], max_tokens=1)
        wait_for_objects(folder, 2 * PROMPT_OBJECTS + 1)
        producer.stop()
        consumer.stop()
    assert object_count(folder) == 2 * PROMPT_OBJECTS + 1
    assert not producer.own_tracebacks()
    assert not consumer.own_tracebacks()
