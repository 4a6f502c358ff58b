"""What the scheduler process knows for the metrics, and what of it has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moonstep.engines.vllm.metrics import METRICS, NO_LABEL, Kind, Values

if TYPE_CHECKING:
    from moonstep.engines.vllm.stores import SchedulerStore
    from moonstep.scheduler.scheduler import MooncakeStoreScheduler
    from moonstep.wire import RankReport, StoreCalls, WorkerReport


class Readings:
    """Reads the scheduler half and the ranks' reports. Scheduler process only.

    All ranks' totals come with their reports, so the workers send nothing of their own. A step in
    which nothing happened costs three comparisons.
    """

    def __init__(self, half: MooncakeStoreScheduler, store: SchedulerStore | None) -> None:
        self._half = half
        self._store = store
        self._by_rank: dict[int, RankReport] = {}
        self._ended_s: dict[str, list[float]] = {"push_seconds": [], "fetch_seconds": []}
        self._has_news = False
        self._lives = 0
        self._was_idle = True
        self._told: dict[tuple[str, str], float] = {}

    def take(self, report: WorkerReport) -> None:
        """The ranks have reported."""
        self._by_rank.update(report.by_rank)
        for rank in report.by_rank.values():
            for name, calls in (("push_seconds", rank.puts), ("fetch_seconds", rank.gets)):
                self._ended_s[name] += [ns / 1e9 for ns in calls.ended_ns]
        self._has_news = True

    def changes(self) -> Values | None:
        """What has changed since this was asked last; ``None`` when nothing has."""
        is_idle, lives = self._half.tier.is_idle, self._half.stats.lives
        # Once more after the tier has come to rest: it may have done so in between.
        if not self._has_news and lives == self._lives and is_idle and self._was_idle:
            return None
        self._has_news, self._lives, self._was_idle = False, lives, is_idle
        changed: Values = {}
        for name, values in self._totals().items():
            for value, total in values.items():
                known = self._told.get((name, value), 0)
                is_gauge = METRICS[name].kind is Kind.GAUGE
                # A counter that went back would take the API process down with it.
                if total == known or (total < known and not is_gauge):
                    continue
                self._told[(name, value)] = total
                changed.setdefault(name, {})[value] = total if is_gauge else total - known
        for name, seconds in self._ended_s.items():
            if seconds:
                changed[name] = {NO_LABEL: seconds}
                self._ended_s[name] = []
        return changed or None

    def _totals(self) -> dict[str, dict[str, float]]:
        stats, index = self._half.stats, self._half.index
        written = index.written_count
        host_tokens = stats.restored_tokens - stats.fetched_tokens
        return {
            "hit_tokens": {
                "engine": stats.local_tokens,
                "host": host_tokens,
                "store": stats.fetched_tokens,
            },
            "miss_tokens": dict(stats.missed_tokens),
            "failed_capture_blocks": {NO_LABEL: stats.failed_blocks},
            "slots": {
                "free": index.free_count,
                "planned": index.slot_count - index.free_count - written,
                "written": written,
            },
            **copies(self._by_rank),
            **(self._of_store(self._store) if self._store else {}),
        }

    def _of_store(self, store: SchedulerStore) -> dict[str, dict[str, float]]:
        pushes, fetches = store.tier.pushes.counts, store.tier.fetches.counts
        puts = [rank.puts for rank in self._by_rank.values()]
        gets = [rank.gets for rank in self._by_rank.values()]
        return {
            "push_bytes": {NO_LABEL: sum(calls.nbytes for calls in puts)},
            "fetch_bytes": {NO_LABEL: sum(calls.nbytes for calls in gets)},
            "push_objects": outcomes(puts),
            "fetch_objects": outcomes(gets),
            "dropped_objects": {"queue_full": pushes.dropped_full, "evicted": pushes.dropped_gone},
            "abandoned_jobs": {"push": pushes.abandoned_jobs, "fetch": fetches.abandoned_jobs},
            "store_errors": {
                "look": store.failed_looks,
                "push": sum(calls.unwell for calls in puts),
                "fetch": sum(calls.unwell for calls in gets),
            },
            "quarantined_slots": {NO_LABEL: store.tier.quarantined_slots},
        }


def copies(by_rank: Mapping[int, RankReport]) -> dict[str, dict[str, float]]:
    """Bytes and seconds of captures and restores, over all ranks."""
    ranks = by_rank.values()
    return {
        "capture_bytes": {NO_LABEL: sum(rank.capture_bytes for rank in ranks)},
        "capture_seconds": {NO_LABEL: sum(rank.capture_ns for rank in ranks) / 1e9},
        "restore_bytes": {NO_LABEL: sum(rank.restore_bytes for rank in ranks)},
        "restore_seconds": {NO_LABEL: sum(rank.restore_ns for rank in ranks) / 1e9},
    }


def outcomes(calls: list[StoreCalls]) -> dict[str, float]:
    """Objects by what became of them, over all ranks; the names are those of the label."""
    totals: dict[str, float] = {}
    for name, objects in (pair for each in calls for pair in each.outcomes):
        label = name.replace(" ", "_")
        totals[label] = totals.get(label, 0) + objects
    return totals
