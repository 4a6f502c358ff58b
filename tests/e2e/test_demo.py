"""The demo itself, small: real engines in child processes, with and without Moonstep."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from moonstep.demo.figures import EngineFigures
from moonstep.demo.plan import DemoPlan
from moonstep.demo.process import EngineFailed, engine_events
from tests.e2e.cpus import own_cpu
from tests.e2e.servers import poll

pytestmark = pytest.mark.engine


def small_plan(model: Path, *, with_moonstep: bool) -> DemoPlan:
    """Three prompts of which two fit together, and a storm that needs half as much again."""
    return DemoPlan(
        str(model),
        with_moonstep=with_moonstep,
        cpus=own_cpu(),
        block_tokens=32,
        kv_blocks=21,
        max_model_tokens=640,
        step_tokens=1024,
        host_cache="256MiB",
        prompt_count=3,
        return_count=3,
        prompt_tokens=300,
        gap_returns=1,
        gap_spacing_tokens=8,
        storm_requests=6,
        storm_prompt_tokens=90,
        storm_answer_tokens=40,
    )


def figures(plan: DemoPlan, log: Path) -> EngineFigures:
    with engine_events(plan, log) as events:
        *_, last = events
    return EngineFigures.from_raw(last["figures"])


def test_preempted_and_returning_requests_answer_as_without_moonstep(
    model: Path, tmp_path: Path
) -> None:
    plain, ours = (
        figures(small_plan(model, with_moonstep=wanted), tmp_path / f"{wanted}.log")
        for wanted in (False, True)
    )
    assert ours.answers == plain.answers
    assert ours.later_answers == 2 * plain.answers
    assert ours.storm_answers == plain.storm_answers
    assert plain.preemptions > 0
    assert ours.preemptions > 0
    assert ours.storm_restored_tokens > 0
    assert ours.restored_bytes > 0


@pytest.mark.drill
def test_an_engine_that_does_not_start_says_why(model: Path, tmp_path: Path) -> None:
    plan = dataclasses.replace(small_plan(model, with_moonstep=True), host_cache="a lot")
    with (
        pytest.raises(EngineFailed, match=r"moonstep: host_cache='a lot'"),
        engine_events(plan, tmp_path / "refused.log") as events,
    ):
        list(events)


def test_ctrl_c_leaves_no_process_behind(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moonstep.cli.main", "demo"]
    demo = subprocess.Popen([*command, "--model", str(model), "--out", str(tmp_path)])
    try:
        children: list[psutil.Process] = []
        log = tmp_path / "demo-no-connector.log"
        for _ in poll(60):
            children = psutil.Process(demo.pid).children(recursive=True)
            if children and log.is_file() and log.stat().st_size:
                break
        assert children, "the demo has started no engine"
        demo.send_signal(signal.SIGINT)
        assert demo.wait(timeout=30) == 130
        gone, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
        assert gone
    finally:
        demo.kill()
        demo.wait()
