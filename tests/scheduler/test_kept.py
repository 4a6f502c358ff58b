"""Nothing that was computed is lost: what a request leaves behind, block by block."""

from __future__ import annotations

import pytest

from moonstep.audit.history import Abort, Arrive, Reset, Step
from moonstep.audit.shape import Shape
from tests.scheduler.engine import Watched, open_engine
from tests.scheduler.stock import Hand, captured, make_request

SHAPES = [
    Shape(
        asynchronous=asynchronous,
        lag=lag,
        executor="multi-process" if lag else "in-process",
        drafts=drafts,
        blocks=60,
        max_tokens=96,
        budget_tokens=16,
    )
    for asynchronous, lag in ((False, False), (True, False), (True, True))
    for drafts in (0, 3)
]


def kept_blocks(watched: Watched, arrival: Arrive) -> tuple[int, int]:
    """Run a request to its end: how many leading blocks are kept, of how many it computed."""
    watched.apply(arrival)
    request = watched.engine.scheduler.requests[arrival.id]
    watched.settle()
    computed = (request.num_tokens - 1) // watched.engine.shape.block_tokens
    names = request.block_hashes[:computed]
    return watched.half.index.written_run(0, names, 0, len(names)), computed


@pytest.mark.parametrize("shape", SHAPES, ids=Shape.label)
@pytest.mark.parametrize(("tokens", "output"), [(40, 1), (41, 12), (7, 30), (16, 16), (17, 17)])
def test_every_full_block_of_prompt_and_output_is_kept(
    shape: Shape, tokens: int, output: int
) -> None:
    """Chunked prefill, decode, drafts, one step ahead or not: the last full block as well.

    Except with drafts in lock step: a block that accepted drafts complete in the very last step is
    not held, since a cache reset in that moment would fail for it.
    """
    with open_engine(shape) as watched:
        kept, computed = kept_blocks(watched, Arrive("r", 1, tokens, tokens, output=output))
        unheld = 1 if shape.drafts and not shape.asynchronous else 0
        assert computed - unheld <= kept <= computed
        watched.apply(Reset())
        restored = watched.run(id="again", family=1, tokens=tokens, shared=tokens)
        assert restored == (tokens - 1) // 4 * 4


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_engines_first_request_is_kept_although_one_step_is_all_it_needs(
    asynchronous: bool,
) -> None:
    """The ranks tell how many slots they have with the report of that very step."""
    shape = Shape(asynchronous=asynchronous, blocks=60, max_tokens=96, budget_tokens=96)
    with open_engine(shape, first_step=False) as watched:
        kept, computed = kept_blocks(watched, Arrive("r", 1, 40, 40, output=1))
        assert kept == computed == 10


@pytest.mark.parametrize("shape", SHAPES, ids=Shape.label)
def test_nothing_is_kept_that_was_not_computed(shape: Shape) -> None:
    """Aborted in the middle of prefill and decode, early and late; an oracle reads all."""
    with open_engine(shape) as watched:
        for index, steps in enumerate((1, 2, 3, 5, 9)):
            for late in (False, True):
                name = f"{index}.{late}"
                watched.apply(
                    Arrive(name, index, 60, 60, output=20), Step(steps), Abort(name, late=late)
                )
                watched.settle()
        assert watched.half.index.written_count > 0


def hand_that_learns_late() -> Hand:
    """R's fourth block is scheduled whole, but its last token and so its name are not known yet."""
    hand = Hand()
    hand.admit(make_request("r", 62), [1, 2, 3, 4])
    assert captured(hand.step({"r": 62}, new=["r"])) == [1, 2, 3]
    assert captured(hand.step({"r": 1}), hand.step({"r": 1})) == []
    hand.report()
    hand.requests["r"].append_output_token_ids([7, 7, 7])
    return hand


def test_a_block_named_by_the_output_that_ends_its_request_is_held_and_captured() -> None:
    hand = hand_that_learns_late()
    free = hand.pool.get_num_free_blocks()
    hand.finish("r")
    assert hand.pool.get_num_free_blocks() == free + 3
    assert not hand.half.is_idle
    assert captured(hand.step(finished=["r"])) == [4]
    assert hand.pool.get_num_free_blocks() == free + 4
    hand.report()
    assert hand.half.is_idle
    assert hand.half.get_num_new_matched_tokens(make_request("s", 63), 0)[0] == 48
    assert hand.half.index.written_count == 4


def test_what_is_held_is_let_go_and_not_captured_after_a_reset() -> None:
    hand = hand_that_learns_late()
    hand.finish("r")
    hand.half.reset_cache()
    assert captured(hand.step(finished=["r"])) == []
    assert hand.pool.get_num_free_blocks() == 63
    assert hand.half.is_idle


def test_a_request_that_opted_out_leaves_nothing_held() -> None:
    hand = Hand()
    hand.admit(make_request("r", 62, params={"moonstep": {"save": False}}), [1, 2, 3, 4])
    hand.step({"r": 62}, new=["r"])
    hand.step({"r": 1})
    hand.step({"r": 1})
    hand.requests["r"].append_output_token_ids([7, 7, 7])
    hand.finish("r")
    assert hand.pool.get_num_free_blocks() == 63
    assert captured(hand.step(finished=["r"])) == []


def test_a_request_preempted_and_then_aborted_between_two_steps_holds_nothing() -> None:
    """Its blocks are no longer its own when it ends, although its life ends with the next step."""
    hand = hand_that_learns_late()
    hand.preempt("r")
    hand.finish("r")
    assert hand.pool.get_num_free_blocks() == 63
    assert captured(hand.step(preempted=["r"], finished=["r"])) == []
