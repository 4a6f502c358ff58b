"""vLLM's own connector over a real Mooncake master that the audit starts and stops."""

from __future__ import annotations

import psutil
import pytest
from tests.masters import need_mooncake

from moonstep.audit import connectors
from moonstep.audit.audit import Order, perform
from moonstep.audit.engineconfig import ConnectorChoice
from moonstep.audit.scenarios.stage import Status


@pytest.fixture(autouse=True)
def no_kit_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen here is chosen for the process."""
    monkeypatch.setattr(connectors, "_KITS", {})


def order(*scenarios: str, name: str = "MooncakeStoreConnector") -> Order:
    return Order(ConnectorChoice(name), scenarios, steps=0, seed=0, jobs=1, real_store=True)


def masters() -> set[psutil.Process]:
    """Masters that this process and its children have started (a fixture may keep one longer)."""
    children = psutil.Process().children(recursive=True)
    return {child for child in children if child.name().startswith("mooncake_master")}


@pytest.mark.drill
def test_a_scenario_loads_from_a_real_store_and_faults_do_not_apply() -> None:
    need_mooncake()
    before = masters()
    verdict = perform(order("finish-same-step", "gets-fail"), lambda *progress: None)
    by_name = {name: [] for name in ("finish-same-step", "gets-fail")}
    for result in verdict.results:
        by_name[result.scenario].append(result)
    assert {result.status for result in by_name["finish-same-step"]} == {Status.CLEAN}
    assert {result.status for result in by_name["gets-fail"]} == {Status.NOT_APPLICABLE}
    assert not masters() - before, "a master was left behind"


def test_a_connector_without_a_real_store_is_refused() -> None:
    with pytest.raises(ValueError, match="only for MooncakeStoreConnector"):
        perform(order("chat", name="MoonstepConnector"), lambda *progress: None)
