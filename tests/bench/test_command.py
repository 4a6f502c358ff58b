"""``moonstep bench``: help with examples, tables, JSON, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonstep.bench.starts import Outcome, Start, as_table, plan
from moonstep.cli.bench import app

TRACE = Path(__file__).parents[1] / "data" / "mooncake_conversation_head.jsonl.xz"
COMMANDS = (
    "schedule", "copy", "memory", "replay", "multiturn", "engine", "gap", "peers", "store",
)  # fmt: skip

runner = CliRunner()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"moonstep bench {command}" in result.output
    assert "--json" in result.output


def test_a_replay_prints_its_rates_and_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "replay.json"
    arguments = ["replay", "--trace", str(TRACE), "--sizes", "300+600", "--limit", "400"]
    result = runner.invoke(app, [*arguments, "--capture", "lazy", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "300 + 600" in " ".join(result.output.split())
    (outcome,) = json.loads(path.read_text())["outcomes"]
    assert outcome["plan"]["capture"] == "lazy"
    assert 0 < outcome["figures"]["both"]["whole"] < 1


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["replay", "--trace", str(TRACE), "--sizes", "many"], 2),
        (["replay", "--trace", str(TRACE), "--capture", "sometimes"], 2),
        (["replay", "--trace", __file__], 2),
        (["replay", "--trace", "/nowhere/at/all"], 2),
        (["schedule", "--part", "everything"], 2),
        (["multiturn", "--model", "/nowhere/at/all"], 1),
        (["engine", "--model", "/nowhere/at/all"], 1),
        (["gap", "--model", "/nowhere/at/all"], 1),
        (["gap", "--size", "large"], 2),
        (["peers", "--model", "/nowhere/at/all"], 1),
        (["store", "--store", "elsewhere://x"], 2),
        (["store", "--store", "mooncake", "--folder", "/tmp"], 2),
    ],
)
def test_what_cannot_be_done_ends_without_a_traceback(arguments: list[str], status: int) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


def start(cold_s: float, answers: tuple[tuple[int, ...], ...] = ((1, 2), (3,))) -> Start:
    return Start(20.0, cold_s, cold_s / 4, 2 * cold_s, 0.09, 0.05, 7, 900, 800, 760, answers)


def test_starts_are_compared_by_their_ratio() -> None:
    outcome = Outcome([start(2.0), start(4.0)], [start(1.0), start(2.0)])
    assert outcome.ratio("cold").value == pytest.approx(0.5)
    assert outcome.ratio("storm").low == pytest.approx(0.5)
    assert outcome.answers_differ == 0
    assert as_table(outcome).row_count == 10


def test_a_starts_engine_holds_its_longest_request_and_not_all_its_prompts() -> None:
    engine = plan("", (), with_moonstep=True)
    held_tokens = (engine.kv_blocks - 1) * engine.block_tokens
    assert engine.prompt_tokens + engine.answer_tokens < engine.max_model_tokens <= held_tokens
    assert held_tokens < engine.prompt_count * engine.prompt_tokens
    least_tokens = engine.storm_prompt_tokens - engine.block_tokens + engine.storm_answer_tokens
    assert engine.storm_requests * least_tokens > held_tokens, "a storm preempts"


def test_answers_that_differ_are_counted() -> None:
    outcome = Outcome([start(2.0)], [start(2.0, ((1, 2), (4,)))])
    assert outcome.answers_differ == 1


def test_a_start_is_read_from_what_the_child_sent() -> None:
    answer = {"first_token_s": 0.5, "connector": {"restored_tokens": 64}}
    storm = {
        "wall_s": 3.0,
        "preemptions": 2,
        "tokens": [[1], [2]],
        "connector": {"restored_tokens": 100, "victim_tokens": 80, "resumed_tokens": 75},
    }
    raw = {
        "start_s": 9.0,
        "first_visits": [answer, answer | {"first_token_s": 0.7}, answer | {"first_token_s": 9.0}],
        "returns": [answer],
        "gaps_s": [0.1, 0.2, 0.3],
        "storm": storm,
    }
    found = Start.from_raw(raw)
    assert (found.cold_s, found.warm_s, found.storm_s) == (0.7, 0.5, 3.0)
    assert (found.gap_worst_s, found.gap_median_s) == (0.3, 0.2)
    assert (found.restored_tokens, found.victim_tokens, found.resumed_tokens) == (164, 80, 75)
