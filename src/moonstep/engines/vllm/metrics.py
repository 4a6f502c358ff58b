"""Moonstep's metrics on vLLM's ``/metrics``: their list, and the two classes vLLM asks for.

The scheduler process sends what has changed since it sent last (``readings``), the API process adds
it up: counters only grow, gauges take the newest value. ``docs/metrics.md`` lists them for users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from moonstep.scheduler.misses import MissReason
from moonstep.stores.base import Get, Put

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX: Final = "vllm:moonstep_"
NO_LABEL: Final = ""
"""The one label value of a metric without a label of its own."""

SECONDS_BOUNDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 20)


class Kind(Enum):
    """How values of a metric are put together."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, without its prefix. ``label`` has the values that are listed, and no other."""

    name: str
    kind: Kind
    meaning: str
    label: str = NO_LABEL
    values: tuple[str, ...] = (NO_LABEL,)


def _names(answers: type[Enum]) -> tuple[str, ...]:
    return tuple(str(each.value).replace(" ", "_") for each in answers)


METRICS: Final = {
    metric.name: metric
    for metric in (
        Metric(
            "hit_tokens",
            Kind.COUNTER,
            "Tokens of admitted requests that were not computed, by who had them.",
            "tier",
            ("engine", "host", "store"),
        ),
        Metric(
            "miss_tokens",
            Kind.COUNTER,
            "Tokens of admitted requests that were computed, by reason.",
            "reason",
            _names(MissReason),
        ),
        Metric("capture_bytes", Kind.COUNTER, "Bytes copied from KV memory to the host cache."),
        Metric("capture_seconds", Kind.COUNTER, "Time spent in that, summed over ranks."),
        Metric("restore_bytes", Kind.COUNTER, "Bytes copied from the host cache to KV memory."),
        Metric("restore_seconds", Kind.COUNTER, "Time spent in that, summed over ranks."),
        Metric("failed_capture_blocks", Kind.COUNTER, "Blocks whose capture failed on some rank."),
        Metric("push_bytes", Kind.COUNTER, "Bytes that were stored."),
        Metric("push_seconds", Kind.HISTOGRAM, "Time of one call that stores objects."),
        Metric(
            "push_objects",
            Kind.COUNTER,
            "Objects that were to be stored, on each rank, by outcome.",
            "outcome",
            _names(Put),
        ),
        Metric("fetch_bytes", Kind.COUNTER, "Bytes that came from the store and were right."),
        Metric("fetch_seconds", Kind.HISTOGRAM, "Time of one call that fetches objects."),
        Metric(
            "fetch_objects",
            Kind.COUNTER,
            "Objects that were to be fetched, on each rank, by outcome.",
            "outcome",
            _names(Get),
        ),
        Metric(
            "dropped_objects",
            Kind.COUNTER,
            "Objects that were to be stored and never went, by reason.",
            "reason",
            ("queue_full", "evicted"),
        ),
        Metric(
            "abandoned_jobs",
            Kind.COUNTER,
            "Pushes and fetches that were not over when their deadline passed.",
            "job",
            ("push", "fetch"),
        ),
        Metric(
            "store_errors",
            Kind.COUNTER,
            "Calls that failed because the store itself was in trouble.",
            "call",
            ("look", "push", "fetch"),
        ),
        Metric(
            "slots",
            Kind.GAUGE,
            "Slots of the host cache by state; planned ones wait for their bytes.",
            "state",
            ("free", "planned", "written"),
        ),
        Metric("quarantined_slots", Kind.GAUGE, "Slots owned by abandoned jobs that still hang."),
    )
}

Values = dict[str, dict[str, Any]]
"""By a metric's name and its label's value: a number, or for a histogram a list of seconds."""


class MoonstepStats(KVConnectorStats):
    """What has changed since the last time, on its way to the API process. ``data`` is `Values`."""

    def reset(self) -> None:
        self.data: Values = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> MoonstepStats:
        """Take in what came later."""
        for name, values in other.data.items():
            mine = self.data.setdefault(name, {})
            is_gauge = METRICS[name].kind is Kind.GAUGE
            for value, amount in values.items():
                known = value in mine and not is_gauge
                mine[value] = mine[value] + amount if known else amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's periodic log line: what an operator asks first."""
        hits, misses = self.data.get("hit_tokens", {}), self.data.get("miss_tokens", {})
        line: dict[str, int | float] = {
            "restored tokens": hits.get("host", 0) + hits.get("store", 0),
            "of these from the store": hits.get("store", 0),
            "computed tokens": sum(misses.values()),
        }
        for verb in ("push", "fetch"):
            nbytes = self.data.get(f"{verb}_bytes", {}).get(NO_LABEL, 0)
            seconds = self.data.get(f"{verb}_seconds", {}).get(NO_LABEL, ())
            if seconds:
                line[f"{verb} MiB"] = round(nbytes / (1 << 20), 1)
                line[f"mean {verb} ms"] = round(1000 * sum(seconds) / len(seconds), 2)
        return line


class MoonstepPromMetrics(KVConnectorPromMetrics):
    """The metrics of all engines of one API process; every series is there, at 0, from the start.

    The parameters are vLLM's (``KVConnectorBase_V1.build_prom_metrics``).
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(
            vllm_config, dict(metric_types), list(labelnames), dict(per_engine_labelvalues)
        )
        self._series: dict[int, dict[str, dict[str, Any]]] = {
            engine: {} for engine in per_engine_labelvalues
        }
        for metric in METRICS.values():
            made = self._make(metric)
            for engine, labels in per_engine_labelvalues.items():
                self._series[engine][metric.name] = {
                    value: made.labels(*labels, *([value] if metric.label else []))
                    for value in metric.values
                }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in what an engine has sent."""
        for name, values in transfer_stats_data.items():
            series = self._series[engine_idx][name]
            kind = METRICS[name].kind
            for value, amount in values.items():
                if kind is Kind.COUNTER:
                    series[value].inc(amount)
                elif kind is Kind.GAUGE:
                    series[value].set(amount)
                else:
                    for seconds in amount:
                        series[value].observe(seconds)

    def _make(self, metric: Metric) -> Any:
        own = [metric.label] if metric.label else []
        named: dict[str, Any] = {
            "name": PREFIX + metric.name,
            "documentation": metric.meaning,
            "labelnames": [*self._labelnames, *own],
        }
        if metric.kind is Kind.COUNTER:
            return self._counter_cls(**named)
        if metric.kind is Kind.GAUGE:
            return self._gauge_cls(**named, multiprocess_mode="mostrecent")
        return self._histogram_cls(**named, buckets=SECONDS_BOUNDS)
