"""The one line at shutdown that says what the connector did, and what it cost."""

from __future__ import annotations

from moonstep.scheduler.stats import SchedulerStats
from moonstep.wire import RankReport, WorkerReport


class Summary:
    """Totals of all ranks, as last reported. Scheduler process only."""

    def __init__(self) -> None:
        self._by_rank: dict[int, RankReport] = {}

    def take(self, report: WorkerReport) -> None:
        """Note the newest report of each rank."""
        self._by_rank.update(report.by_rank)

    def line(self, stats: SchedulerStats) -> str:
        """The line: tokens and bytes both ways, hit rate, cost a step."""
        ranks = self._by_rank.values()
        saved_bytes = sum(rank.capture_bytes for rank in ranks)
        restored_bytes = sum(rank.restore_bytes for rank in ranks)
        # Ranks copy side by side, so the slowest one is what a step waited for.
        copy_ns = max((rank.capture_ns + rank.restore_ns for rank in ranks), default=0)
        steps = max(stats.steps, 1)
        hit_rate = stats.restored_tokens / max(stats.admitted_tokens, 1)
        hook_ms, copy_ms = stats.hook_ns / steps / 1e6, copy_ns / steps / 1e6
        return (
            f"moonstep: saved {stats.saved_tokens} tokens ({_mib(saved_bytes)}), "
            f"restored {stats.restored_tokens} tokens ({_mib(restored_bytes)}), "
            f"hit rate {hit_rate:.1%} of {stats.admitted_tokens} tokens the engine did not have, "
            f"cost {hook_ms + copy_ms:.3f} ms a step over {stats.steps} steps "
            f"({hook_ms:.3f} scheduler, {copy_ms:.3f} copies)"
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
