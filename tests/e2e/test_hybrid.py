"""Real engines with tiny models of every shape: the same answers with Moonstep as without it.

Each story is told twice, by an engine without a connector and by one with Moonstep whose KV memory
holds about three prompts: a prompt is pushed out and sent again, goes on from its answer, is left
half-way, and in the end more requests run at once than there is memory for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moonstep.demo.process import EngineFailed, engine_events
from tests.e2e.tiny import DEEPSEEK2, GEMMA3, LLAMA, QWEN3_NEXT, VOCABULARY, TinyModel, save
from tests.e2e.tiny_child import TinyPlan

pytestmark = pytest.mark.engine

HOST = {"host_cache": "64MiB"}
TIE = 0.5
"""Log probabilities no further apart than this may change places."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def plan_for(model: TinyModel, folder: Path, settings: dict[str, Any] | None) -> TinyPlan:
    return TinyPlan(
        model=str(save(model, folder / "model")),
        engine={
            "dtype": model.dtype,
            "num_gpu_blocks_override": model.kv_blocks,
            "max_model_len": 2 * model.prompt_tokens,
            "max_num_batched_tokens": 2 * model.block_tokens,
            **model.engine,
        },
        settings=settings,
        prompt_tokens=model.prompt_tokens,
        vocabulary=VOCABULARY,
        fillers=6,
        storm_prompt_tokens=model.storm_tokens[0],
        storm_answer_tokens=model.storm_tokens[1],
        ranks=None if model.dtype == "float32" else 8,
    )


def told_by(plan: TinyPlan, log: Path) -> dict[str, Any]:
    """The story as an engine of its own tells it."""
    with engine_events(plan, log, "tests.e2e.tiny_child") as events:
        *_, last = events
    told: dict[str, Any] = last["figures"]
    return told


def tokens_of(told: dict[str, Any]) -> dict[str, list[list[int]]]:
    return {
        chapter: [answer["tokens"] for answer in answers]
        for chapter, answers in told["answers"].items()
    }


def cached_tokens(told: dict[str, Any], chapter: str) -> int:
    (answer,) = told["answers"][chapter]
    return int(answer["cached_tokens"])


def assert_ties(plain: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    """Where two answers part, both tokens were as good as equally probable.

    In bfloat16 numbers differ with the shape of the batch, and requests that are preempted together
    come back together in one engine and not in the other.
    """
    gaps = []
    for one, other in zip(plain, ours, strict=True):
        pairs = enumerate(zip(one["tokens"], other["tokens"], strict=True))
        place = next((at for at, (this, that) in pairs if this != that), None)
        if place is not None:
            ranked = one["ranked"][place]
            this, that = str(one["tokens"][place]), str(other["tokens"][place])
            gaps.append(ranked[this] - ranked.get(that, -math.inf))
    assert max(gaps, default=0.0) <= TIE, f"{len(gaps)} of {len(plain)} answers part: {gaps}"


def assert_same_story(model: TinyModel, plan: TinyPlan, tmp_path: Path) -> dict[str, Any]:
    """Tell the story without and with Moonstep; return what the second one told."""
    plain = told_by(replace(plan, settings=None), tmp_path / "plain.log")
    ours = told_by(plan, tmp_path / "moonstep.log")
    if model.dtype != "float32":
        assert_ties(plain["answers"].pop("storm"), ours["answers"].pop("storm"))
    assert tokens_of(ours) == tokens_of(plain)
    assert sorted(ours["groups"]) == sorted(model.kinds)
    assert set(ours["block_tokens"]) == {model.block_tokens}
    for chapter in ("sent again", "goes on", "leaves half-way"):
        assert cached_tokens(plain, chapter) == 0, "the fillers have not pushed it out"
    assert cached_tokens(ours, "sent again") == model.boundary(model.prompt_tokens - 1)
    assert plain["preemptions"] > 0
    assert ours["preemptions"] > 0
    assert ours["other_blocks"] == {}
    every_group = {str(index) for index in range(len(model.kinds))}
    assert set(ours["same_blocks"]) == every_group
    return ours


def assert_a_restart_is_warm(model: TinyModel, store: str, tmp_path: Path) -> None:
    """Two engines, one after the other: the second one finds in the store what the first one left.

    Their logs are ``first.log`` and ``again.log``.
    """
    settings = HOST | {
        "store": store,
        "chunk_tokens": model.block_tokens,
        "min_fetch_tokens": 0,
        "fetch_deadline_s": 60,
    }
    plan = replace(plan_for(model, tmp_path, settings), short=True)
    first, again = (told_by(plan, tmp_path / f"{name}.log") for name in ("first", "again"))
    assert tokens_of(again) == tokens_of(first)
    assert cached_tokens(first, "first") == 0
    assert cached_tokens(again, "first") == model.boundary(model.prompt_tokens - 1)


@pytest.mark.parametrize("capture", [None, pytest.param("lazy", marks=pytest.mark.drill)])
def test_windows_beside_full_attention(capture: str | None, tmp_path: Path) -> None:
    """Gemma 3: five sliding-window groups to one of full attention."""
    settings = HOST | ({"capture": capture} if capture else {})
    plan = plan_for(GEMMA3, tmp_path, settings)
    ours = assert_same_story(GEMMA3, plan, tmp_path)
    answered = GEMMA3.prompt_tokens + plan.answer_tokens - 1
    assert cached_tokens(ours, "goes on") == GEMMA3.boundary(answered)


@pytest.mark.drill
@pytest.mark.parametrize("group", [0, 1], ids=lambda group: f"group {group}")
def test_wrong_bytes_in_one_group_would_show_in_the_answers(group: int, tmp_path: Path) -> None:
    """The comparison of tokens is worth something: blocks that are zeroed change them."""
    plan = plan_for(GEMMA3, tmp_path, HOST)
    good, spoiled = (
        tokens_of(told_by(replace(plan, spoiled_group=which), tmp_path / f"{which}.log"))
        for which in (None, group)
    )
    assert spoiled["first"] == good["first"]
    assert spoiled["sent again"] != good["sent again"]


@pytest.mark.drill
def test_windows_with_drafts(tmp_path: Path) -> None:
    """Only what was accepted is kept: n-gram drafts are wrong more often than not."""
    model = replace(GEMMA3, engine=GEMMA3.engine | {"speculative_config": NGRAM})
    assert_same_story(model, plan_for(model, tmp_path, HOST), tmp_path)


@pytest.mark.drill
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("interval_tokens", "kept_tokens"), [(0, 1280), (256, 1536), (None, 1536)])
def test_states_beside_full_attention(
    interval_tokens: int | None, kept_tokens: int, tmp_path: Path
) -> None:
    """Qwen3-Next. Its state at token 1,536, within the answer, is kept if the engine retains it."""
    engine = QWEN3_NEXT.engine | {"prefix_cache_retention_interval": interval_tokens}
    model = replace(QWEN3_NEXT, engine=engine)
    ours = assert_same_story(model, plan_for(model, tmp_path, HOST), tmp_path)
    assert cached_tokens(ours, "goes on") == kept_tokens


@pytest.mark.drill
def test_latents_go_on_from_the_middle_of_a_prompt_or_are_refused(tmp_path: Path) -> None:
    """DeepSeek-V2. vLLM's kernels for a CPU without AMX cannot; a start says so."""
    if torch.cpu._is_amx_tile_supported():
        model = replace(DEEPSEEK2, block_tokens=128, kv_blocks=14, engine={"block_size": 128})
        assert_same_story(model, plan_for(model, tmp_path, HOST), tmp_path)
    else:
        with pytest.raises(EngineFailed, match=r"moonstep: latent attention \(MLA\) on a CPU"):
            told_by(plan_for(DEEPSEEK2, tmp_path, HOST), tmp_path / "refused.log")


@pytest.mark.drill
@pytest.mark.parametrize("capture", ["lazy", "eager"])
def test_one_group_of_full_attention(capture: str, tmp_path: Path) -> None:
    assert_same_story(LLAMA, plan_for(LLAMA, tmp_path, HOST | {"capture": capture}), tmp_path)


@pytest.mark.drill
@pytest.mark.parametrize("model", [LLAMA, GEMMA3, QWEN3_NEXT], ids=lambda model: model.family)
def test_a_restarted_engine_answers_from_the_directory(model: TinyModel, tmp_path: Path) -> None:
    assert_a_restart_is_warm(model, f"dir://{tmp_path / 'store'}?capacity=1GiB", tmp_path)
