"""The metrics: complete in the documents, right in sum, and nothing at all when nothing happens."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
)

from moonstep.audit.history import Reset
from moonstep.audit.shape import Shape
from moonstep.engines.vllm.connector import MoonstepConnector
from moonstep.engines.vllm.metrics import METRICS, PREFIX, Kind, MoonstepPromMetrics, MoonstepStats
from moonstep.engines.vllm.readings import Readings
from moonstep.scheduler.misses import MissReason
from moonstep.stores import memory
from tests.engines.conftest import configured
from tests.engines.test_multi import PROMPT, open_multi
from tests.scheduler.engine import Watched, open_engine

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `vllm:moonstep_(\w+)` \| (\w+) \| (.*?) ?\| (.+) \|$", flags=re.MULTILINE)
SHAPE = Shape(blocks=40, max_tokens=64, budget_tokens=96)
STORE = {"store": "memory://metrics", "chunk_tokens": 8, "min_fetch_tokens": 4}


def documented_label(name: str) -> str:
    metric = METRICS[name]
    return (
        f"`{metric.label}`: " + ", ".join(f"`{v}`" for v in metric.values) if metric.label else ""
    )


def test_the_document_lists_what_there_is() -> None:
    rows = {name: rest for name, *rest in ROW.findall(DOCUMENT.read_text())}
    assert rows == {
        name: [metric.kind.value, documented_label(name), metric.meaning]
        for name, metric in METRICS.items()
    }
    reasons = set(re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), flags=re.MULTILINE))
    assert reasons >= {reason.value for reason in MissReason}


def metric_types(registry: CollectorRegistry) -> dict[Any, Any]:
    return {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}


def prom(registry: CollectorRegistry, engines: int = 1) -> MoonstepPromMetrics:
    labels: dict[int, list[object]] = {engine: ["model", str(engine)] for engine in range(engines)}
    types = metric_types(registry)
    return MoonstepConnector.build_prom_metrics(
        vllm_config(), types, ["model_name", "engine"], labels
    )


@cache
def vllm_config() -> Any:
    return configured().vllm_config


def shown(registry: CollectorRegistry, name: str, engine: str = "0", **labels: str) -> float | None:
    return registry.get_sample_value(
        PREFIX + name, {"model_name": "model", "engine": engine, **labels}
    )


def test_every_series_is_there_from_the_start_for_every_engine() -> None:
    registry = CollectorRegistry()
    prom(registry, engines=2)
    ends = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}
    for metric in METRICS.values():
        for value in metric.values:
            label = {metric.label: value} if metric.label else {}
            for engine in "01":
                assert shown(registry, metric.name + ends[metric.kind], engine, **label) == 0


NUMBERS = st.integers(0, 5) | st.floats(0, 1)
ENTRIES = st.one_of(
    st.sampled_from(
        [(m.name, v) for m in METRICS.values() for v in m.values if m.kind is not Kind.HISTOGRAM]
    ).flatmap(lambda at: st.tuples(st.just(at), NUMBERS)),
    st.tuples(st.just(("push_seconds", "")), st.lists(st.floats(0, 9), min_size=1, max_size=3)),
)


def stats_of(entries: list[Any]) -> MoonstepStats:
    data: dict[str, dict[str, Any]] = {}
    for (name, value), amount in entries:
        data.setdefault(name, {})[value] = amount
    return MoonstepStats(data=data)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(ENTRIES, max_size=6), min_size=1, max_size=5))
def test_what_is_sent_in_pieces_is_shown_as_what_is_sent_at_once(pieces: list[list[Any]]) -> None:
    at_once, in_pieces = CollectorRegistry(), CollectorRegistry()
    showing, together = prom(in_pieces), MoonstepConnector.build_kv_connector_stats()
    assert together.is_empty()
    for piece in pieces:
        sent = pickle.loads(pickle.dumps(stats_of(piece).to_dict()))
        showing.observe(sent)
        together = together.aggregate(MoonstepConnector.build_kv_connector_stats(sent))
    assert together.is_empty() == (not any(pieces))
    prom(at_once).observe(together.to_dict())
    for metric in METRICS.values():
        for value in metric.values:
            label = {metric.label: value} if metric.label else {}
            for end in ("", "_total", "_sum", "_count"):
                expected = shown(at_once, metric.name + end, **label)
                assert shown(in_pieces, metric.name + end, **label) == pytest.approx(expected)
    together.reset()
    assert together.is_empty()


class Collected:
    """All that an engine has sent, and what each step sent."""

    def __init__(self, connector: Any) -> None:
        self.sent: list[dict[str, Any] | None] = []
        self._ask = connector.get_kv_connector_stats
        connector.get_kv_connector_stats = self._asked

    def _asked(self) -> Any:
        stats = self._ask()
        assert stats is None or not stats.is_empty()
        self.sent.append(None if stats is None else pickle.loads(pickle.dumps(stats.to_dict())))
        return stats

    def total(self, name: str) -> dict[str, Any]:
        """What /metrics would show."""
        together = MoonstepStats()
        for data in self.sent:
            together = together.aggregate(MoonstepStats(data=data or {}))
        values: dict[str, Any] = together.data.get(name, {})
        return values


@pytest.fixture
def metered(request: pytest.FixtureRequest) -> Iterator[tuple[Watched, Collected]]:
    """An engine with a store, and what it sends from its first step on."""
    memory.forget("metrics")
    with open_engine(SHAPE, first_step=False, **STORE, **getattr(request, "param", {})) as engine:
        collected = Collected(engine.engine.scheduler.connector)
        engine.engine.empty_step()
        yield engine, collected
    memory.forget("metrics")


def test_every_token_of_an_admission_is_counted_once(metered: tuple[Watched, Collected]) -> None:
    engine, collected = metered
    tokens = 0
    for name in ("a", "b", "c"):
        restored = engine.run(id=name, **PROMPT)
        tokens += PROMPT["tokens"]
        hits, misses = collected.total("hit_tokens"), collected.total("miss_tokens")
        assert sum(hits.values()) + sum(misses.values()) == tokens
        assert restored == 0, "the engine has it itself"
    assert hits == {"engine": 56}
    assert misses == {"absent": 28, "tail": 6}
    engine.apply(Reset())
    assert engine.run(id="d", **PROMPT) == 28
    assert collected.total("hit_tokens") == {"engine": 56, "host": 28}


def test_what_comes_from_the_store_is_told_from_what_was_at_hand(
    metered: tuple[Watched, Collected],
) -> None:
    engine, collected = metered
    engine.run(id="a", **PROMPT)
    stored = collected.total("push_objects")["stored"]
    assert stored == 4, "three runs and a tail"
    assert collected.total("slots")["written"] == engine.half.index.written_count > 0
    assert len(collected.total("push_seconds")[""]) >= 1
    assert collected.total("push_bytes")[""] > 0
    engine.half.index.reset()
    engine.apply(Reset())
    assert engine.run(id="b", **PROMPT) == 28
    assert collected.total("hit_tokens") == {"store": 28}
    assert collected.total("fetch_objects") == {"hit": 4}
    assert collected.total("fetch_bytes") == collected.total("push_bytes")
    assert collected.total("miss_tokens") == {"absent": 28, "tail": 4}


@pytest.mark.parametrize("metered", [{"min_hit_tokens": 32}], indirect=True)
def test_reasons_of_the_host_cache_and_of_the_request(metered: tuple[Watched, Collected]) -> None:
    engine, collected = metered
    engine.run(id="a", **PROMPT)
    engine.apply(Reset())
    assert engine.run(id="b", **PROMPT) == 0
    assert collected.total("miss_tokens") == {"absent": 28, "short": 28, "tail": 4}


def test_a_step_in_which_nothing_changed_sends_nothing_and_reads_nothing(
    metered: tuple[Watched, Collected], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, collected = metered
    engine.run(id="a", **PROMPT)
    for _ in range(3):
        engine.engine.empty_step()
    read = []
    monkeypatch.setattr(Readings, "_totals", lambda self: read.append(self) or {})
    asked = len(collected.sent)
    for _ in range(5):
        engine.engine.empty_step()
    assert collected.sent[asked:] == [None] * 5
    assert not read


def test_a_counter_that_goes_back_is_not_sent(metered: tuple[Watched, Collected]) -> None:
    engine, collected = metered
    engine.run(id="a", **PROMPT)
    before = collected.total("miss_tokens")
    engine.half.stats.missed_tokens["absent"] -= 5
    engine.run(id="b", **PROMPT)
    after = collected.total("miss_tokens")
    assert after == before | {"tail": after["tail"]}


def test_the_log_line_says_what_an_operator_asks() -> None:
    stats = stats_of(
        [
            (("hit_tokens", "host"), 3),
            (("hit_tokens", "store"), 4),
            (("miss_tokens", "absent"), 5),
            (("fetch_bytes", ""), 3 << 20),
            (("fetch_seconds", ""), [0.001, 0.003]),
        ]
    )
    assert stats.reduce() == {
        "restored tokens": 7,
        "of these from the store": 4,
        "computed tokens": 5,
        "fetch MiB": 3.0,
        "mean fetch ms": 2.0,
    }


def test_as_a_child_of_another_connector() -> None:
    registry = CollectorRegistry()
    with open_multi(SHAPE, {}) as engine:
        collected = Collected(engine.scheduler.connector)
        labels: dict[int, list[object]] = {0: ["model", "0"]}
        showing = MultiConnector.build_prom_metrics(
            engine._config.vllm_config, metric_types(registry), ["model_name", "engine"], labels
        )
        run_prompt(engine)
        together = MultiKVConnectorStats()
        for data in filter(None, collected.sent):
            showing.observe(data)
            together = together.aggregate(MultiConnector.build_kv_connector_stats(data))
        assert shown(registry, "miss_tokens_total", reason="absent") == 28
        assert set(together.reduce()) == {"MoonstepConnector"}


def run_prompt(engine: Any) -> None:
    from tests.engines.test_multi import run

    run(engine, "a", **PROMPT)
