"""What the connector of an engine in this process says it has done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ConnectorTotals:
    """Totals since the engine started; the difference of two is what happened in between."""

    connector_s: float = 0.0
    """Time inside the connector's hooks, both halves together."""
    saved_bytes: int = 0
    restored_bytes: int = 0
    restored_tokens: int = 0
    victim_tokens: int = 0
    """Tokens in full blocks of requests at the moment they were preempted."""
    resumed_tokens: int = 0
    """Tokens that resumed requests did not compute again: restored, or still in the engine."""

    def __sub__(self, earlier: ConnectorTotals) -> ConnectorTotals:
        return ConnectorTotals(
            connector_s=self.connector_s - earlier.connector_s,
            saved_bytes=self.saved_bytes - earlier.saved_bytes,
            restored_bytes=self.restored_bytes - earlier.restored_bytes,
            restored_tokens=self.restored_tokens - earlier.restored_tokens,
            victim_tokens=self.victim_tokens - earlier.victim_tokens,
            resumed_tokens=self.resumed_tokens - earlier.resumed_tokens,
        )


class Probe(Protocol):
    """Reads a connector's totals."""

    def totals(self) -> ConnectorTotals: ...


class NullProbe:
    """An engine without a connector."""

    def totals(self) -> ConnectorTotals:
        """Zeros: there is nothing that could take time or keep bytes."""
        return ConnectorTotals()


class MoonstepProbe:
    """Both halves of a Moonstep connector whose engine core runs in this process."""

    def __init__(self, core: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._scheduler = core.scheduler.connector.scheduler
        self._worker = get_kv_transfer_group().worker

    def totals(self) -> ConnectorTotals:
        """What both halves have counted so far."""
        planned, copied = self._scheduler.stats, self._worker.stats
        return ConnectorTotals(
            connector_s=(planned.hook_ns + copied.capture_ns + copied.restore_ns) / 1e9,
            saved_bytes=copied.capture_bytes,
            restored_bytes=copied.restore_bytes,
            restored_tokens=planned.restored_tokens,
            victim_tokens=planned.victim_tokens,
            resumed_tokens=planned.resumed_restored_tokens + planned.resumed_local_tokens,
        )


def probe_for(core: Any, *, with_moonstep: bool) -> Probe:
    """The probe of an engine core (``vllm.v1.engine.core.EngineCore``) in this process."""
    return MoonstepProbe(core) if with_moonstep else NullProbe()
