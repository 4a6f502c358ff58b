"""Orders, prompts and intervals of the measurements on real engines."""

from __future__ import annotations

import doctest
import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

import moonstep.bench.conversations
import moonstep.bench.intervals
import moonstep.replay.rates
import moonstep.replay.report
import moonstep.replay.traces
from moonstep.bench.conversations import Conversation, turn_order
from moonstep.bench.engines import model_token_bytes
from moonstep.bench.intervals import ratio_of_means
from moonstep.bench.machine import machine_facts
from moonstep.bench.multiturn_plan import MultiturnPlan, rows
from moonstep.bench.outcome import write_json

MODULES = [
    moonstep.bench.conversations,
    moonstep.bench.intervals,
    moonstep.replay.rates,
    moonstep.replay.report,
    moonstep.replay.traces,
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_in_the_docstrings_hold(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def test_a_seed_decides_the_order() -> None:
    assert turn_order(20, 8, seed=1) == turn_order(20, 8, seed=1)
    assert turn_order(20, 8, seed=1) != turn_order(20, 8, seed=2)


def test_a_prompt_is_all_that_was_said_before() -> None:
    talk = Conversation([[1, 2], [5]])
    assert talk.next_prompt() == [1, 2]
    talk.hear((3, 4))
    assert talk.next_prompt() == [1, 2, 3, 4, 5]


def test_the_interval_holds_the_ratio_and_narrows_with_more_starts() -> None:
    few = ratio_of_means([1.0, 1.2, 0.9], [2.0, 2.1, 2.2], paired=False)
    many = ratio_of_means([1.0, 1.2, 0.9] * 20, [2.0, 2.1, 2.2] * 20, paired=False)
    assert few.low < few.value < few.high
    assert many.high - many.low < few.high - few.low


def test_pairing_takes_out_what_both_had_in_common() -> None:
    noise = [1.0, 2.0, 3.0, 4.0, 5.0]
    ours = [0.9 * value for value in noise]
    paired = ratio_of_means(ours, noise, paired=True)
    loose = ratio_of_means(ours, noise, paired=False)
    assert paired.high - paired.low < 0.01 < loose.high - loose.low


@pytest.mark.parametrize(("ours", "theirs"), [([], [1.0]), ([1.0], [1.0, 2.0])])
def test_what_cannot_be_compared_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot compare"):
        ratio_of_means(ours, theirs, paired=True)


def test_compared_engines_have_the_same_bytes() -> None:
    listed = rows("model", (0, 1), token_bytes=1000, seed=0, conversations=20, turns=8)
    base, one, double, four, five = (row.plan.engine for row in listed)
    block_bytes = base.block_tokens * 1000
    assert not base.with_moonstep
    assert not double.with_moonstep
    for ours, larger in ((one, double), (four, five)):
        assert ours.with_moonstep
        assert ours.kv_blocks == base.kv_blocks
        host_bytes = int(ours.host_cache.removesuffix("B"))
        assert (larger.kv_blocks - base.kv_blocks) * block_bytes == host_bytes
    # Four whole conversations fit, a fifth does not.
    tokens = 8 * (listed[0].plan.user_tokens + listed[0].plan.answer_tokens)
    assert 4 * tokens <= (base.kv_blocks - 1) * base.block_tokens < 5 * tokens


def test_a_plan_survives_its_way_to_the_child() -> None:
    (plan, *_) = (row.plan for row in rows("model", (0, 1), 1000, 3, 6, 2))
    assert MultiturnPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_kv_bytes_of_a_token_come_from_the_model_s_configuration(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 30, "num_key_value_heads": 3, "num_attention_heads": 9}
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 576}))
    assert model_token_bytes(tmp_path, dtype_bytes=4) == 2 * 30 * 3 * 64 * 4


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^moonstep: there is no model in .*`make setup`"):
        model_token_bytes(tmp_path / "nowhere", dtype_bytes=4)


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Figure:
    name: str
    colour: Colour


def test_outcomes_are_written_with_their_machine(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.json"
    write_json(path, machine_facts(), {"figures": [Figure("a", Colour.RED)], "at": path})
    content = json.loads(path.read_text())
    assert content["figures"] == [{"name": "a", "colour": "red"}]
    assert content["machine"]["cores"] >= 1
