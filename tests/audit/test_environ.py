"""The audit changes the environment for a while and leaves it as it was."""

from __future__ import annotations

import os

import pytest

from moonstep.audit.connectors import kit_for
from moonstep.audit.engine import Engine
from moonstep.audit.engineconfig import ConnectorChoice
from moonstep.audit.environ import environment
from moonstep.audit.shape import Shape

NAME = "MOONSTEP_TEST_VARIABLE"


@pytest.mark.parametrize("before", [None, "before"])
def test_a_variable_is_as_it_was_even_after_an_error(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)

    def fail_within() -> None:
        with environment(NAME, "within"):
            assert os.environ[NAME] == "within"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_within()
    assert os.environ.get(NAME) == before


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_an_engine_leaves_the_choice_of_a_runner_as_it_found_it(runner: str) -> None:
    before = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    engine = Engine(Shape(runner=runner), ConnectorChoice("MoonstepConnector"))
    try:
        assert engine.scheduler.use_v2_model_runner == (runner == "v2")
        engine.step()
        engine.shutdown()
    finally:
        engine.threads.close()
    assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == before


def test_mooncake_s_surroundings_leave_it_too() -> None:
    before = dict(os.environ)
    with kit_for("MooncakeStoreConnector").surroundings():
        assert "MOONCAKE_CONFIG_PATH" in os.environ
    assert dict(os.environ) == before
