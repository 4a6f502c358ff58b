"""The two messages in the form vLLM carries them."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from moonstep.wire import StepPlan, WorkerReport


@dataclass(frozen=True, slots=True)
class StepMetadata(KVConnectorMetadata):
    """A step's plan on its way to the workers."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class ReportMetadata(KVConnectorWorkerMetadata):
    """The ranks' reports on their way to the scheduler."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReportMetadata:
        if not isinstance(other, ReportMetadata):
            raise TypeError(f"cannot aggregate with {type(other).__name__}")
        return ReportMetadata(self.report.aggregate(other.report))
