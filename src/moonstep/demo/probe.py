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

    def __sub__(self, earlier: ConnectorTotals) -> ConnectorTotals:
        return ConnectorTotals(
            connector_s=self.connector_s - earlier.connector_s,
            saved_bytes=self.saved_bytes - earlier.saved_bytes,
            restored_bytes=self.restored_bytes - earlier.restored_bytes,
            restored_tokens=self.restored_tokens - earlier.restored_tokens,
        )


class Probe(Protocol):
    """Reads a connector's totals."""

    def totals(self) -> ConnectorTotals: ...


class NullProbe:
    """An engine without a connector."""

    def totals(self) -> ConnectorTotals:
        """Zeros: there is nothing that could take time or keep bytes."""
        return ConnectorTotals()


def probe_for(core: Any, *, with_moonstep: bool) -> Probe:
    """The probe of an engine core (``vllm.v1.engine.core.EngineCore``) in this process."""
    if not with_moonstep:
        return NullProbe()
    raise NotImplementedError(core)
