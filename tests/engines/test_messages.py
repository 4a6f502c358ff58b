"""The messages in vLLM's form, the lines for its users, and what they cost."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from moonstep.audit.history import Arrive, Reset, Step
from moonstep.audit.shape import Shape
from moonstep.engines.vllm.logs import join_vllm_logging
from moonstep.engines.vllm.metadata import ReportMetadata, StepMetadata
from moonstep.engines.vllm.summary import Summary
from moonstep.scheduler.stats import SchedulerStats
from moonstep.wire import RankReport, StepPlan, WorkerReport, make_rows
from tests.scheduler.engine import open_engine


def report_of(rank: int, **values: Any) -> ReportMetadata:
    return ReportMetadata(WorkerReport({rank: RankReport(**{"slots": 8, "through": 3, **values})}))


def output_with(metadata: ReportMetadata | None) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=[],
        req_id_to_index={},
        kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=metadata),
    )


def test_a_step_in_which_nothing_happens_is_a_message_of_a_few_hundred_bytes() -> None:
    assert len(pickle.dumps(StepMetadata(StepPlan(12345)))) < 400


def test_a_block_more_costs_its_row_and_no_more() -> None:
    def nbytes(blocks: int) -> int:
        rows = make_rows(0, range(1, blocks + 1), range(blocks), 7)
        return len(pickle.dumps(StepMetadata(StepPlan(1, captures=rows))))

    assert nbytes(1064) - nbytes(64) < 1000 * 16 + 32


def test_reports_of_all_ranks_are_merged_as_vllm_merges_them() -> None:
    reports = [report_of(0, captured=(3,)), None, report_of(2, captured=())]
    aggregator = KVOutputAggregator(expected_finished_count=3)
    merged = aggregator.aggregate([output_with(report) for report in reports])
    assert merged is not None
    output = merged.kv_connector_output
    assert output is not None
    metadata = output.kv_connector_worker_meta
    assert isinstance(metadata, ReportMetadata)
    assert metadata.report.by_rank == {
        0: RankReport(slots=8, through=3, captured=(3,)),
        2: RankReport(slots=8, through=3),
    }


def test_a_strangers_report_is_not_merged() -> None:
    class Strange(KVConnectorWorkerMetadata):
        def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
            return self

    with pytest.raises(TypeError, match="cannot aggregate with Strange"):
        report_of(0).aggregate(Strange())


def test_one_line_at_shutdown_says_what_was_done(lines: list[str]) -> None:
    with open_engine(Shape(ranks=2, executor="multi-process", blocks=40)) as watched:
        watched.run(id="a", family=1, tokens=30, shared=30, output=4)
        watched.apply(Reset(), Arrive("again", 1, 30, 30, output=4), Step())
        watched.settle()
        nbytes = 28 * 2 * 2 * 4 * 4 * 2  # tokens, layers, heads of both ranks, size, float32, K+V
    ours = [line for line in lines if line.startswith("moonstep:")]
    assert len(ours) == 1
    assert "saved 32 tokens" in ours[0]
    assert f"restored 28 tokens ({nbytes / (1 << 20):.1f} MiB)" in ours[0]
    assert "hit rate 46.7% of 60 tokens the engine did not have" in ours[0]
    assert "ms a step over" in ours[0]


def test_the_summary_of_an_engine_that_did_nothing() -> None:
    line = Summary().line(SchedulerStats())
    assert line.startswith("moonstep: saved 0 tokens (0.0 MiB), restored 0 tokens")
    assert "hit rate 0.0%" in line


def test_the_summary_adds_bytes_over_ranks_and_takes_the_slowest_copies() -> None:
    summary = Summary()
    mib = 1 << 20
    summary.take(
        report_of(0, capture_bytes=mib, restore_bytes=2 * mib, capture_ns=4_000_000).report
    )
    summary.take(
        report_of(1, capture_bytes=mib, restore_bytes=2 * mib, restore_ns=2_000_000).report
    )
    summary.take(report_of(1, capture_bytes=2 * mib, restore_bytes=3 * mib).report)
    stats = SchedulerStats(steps=2, hook_ns=2_000_000, admitted_tokens=100, restored_tokens=25)
    line = summary.line(stats)
    assert "(3.0 MiB), restored 25 tokens (5.0 MiB), hit rate 25.0% of 100" in line
    assert "cost 3.000 ms a step over 2 steps (1.000 scheduler, 2.000 copies)" in line


@pytest.mark.parametrize("own_handlers", [True, False])
def test_our_lines_go_where_vllms_go_unless_the_user_said_otherwise(own_handlers: bool) -> None:
    ours, theirs = logging.getLogger("moonstep"), logging.getLogger("vllm")
    before = ours.handlers[:], ours.level, ours.propagate, theirs.handlers[:], theirs.level
    handler, own = logging.NullHandler(), logging.NullHandler()
    try:
        theirs.handlers, theirs.level = [handler], logging.WARNING
        ours.handlers = [own] if own_handlers else []
        join_vllm_logging()
        join_vllm_logging()
        assert ours.handlers == ([own] if own_handlers else [handler])
        assert own_handlers or (ours.level, ours.propagate) == (logging.WARNING, False)
    finally:
        ours.handlers, ours.level, ours.propagate, theirs.handlers, theirs.level = before
