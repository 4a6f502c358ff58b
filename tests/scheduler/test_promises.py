"""What is promised: what is there, to those who may have it, and as the engine takes it."""

from __future__ import annotations

import logging

import pytest

from moonstep.config import CaptureMode
from moonstep.wire import ReqMeta
from tests.scheduler.stock import BLOCK_BYTES, BLOCK_TOKENS, Hand, blocks_of, make_request, rows_of


def hand_with_kept(tokens: int = 80, **settings: object) -> Hand:
    """A hand whose host cache has the first ``tokens`` tokens of family 1; the engine has not."""
    hand = Hand(**settings)  # type: ignore[arg-type]
    hand.admit(make_request("seed", tokens), list(range(1, 2 + (tokens - 1) // BLOCK_TOKENS)))
    hand.step({"seed": tokens}, new=["seed"])
    hand.report()
    hand.step(finished=["seed"])
    assert hand.half.index.written_count == tokens // BLOCK_TOKENS
    return hand


def ask(hand: Hand, request_id: str, tokens: int, *, local: int = 0, **wishes: object) -> int:
    request = make_request(request_id, tokens, **wishes)  # type: ignore[arg-type]
    return hand.half.get_num_new_matched_tokens(request, local)[0]


@pytest.mark.parametrize(
    ("tokens", "local", "promised"),
    [
        (1, 0, 0),
        (15, 0, 0),
        (16, 0, 0),
        (17, 0, 16),
        (31, 0, 16),
        (32, 0, 16),
        (32, 16, 0),
        (33, 0, 32),
        (33, 16, 16),
        (33, 32, 0),
        (48, 0, 32),
        (48, 32, 0),
        (80, 16, 48),
        (81, 0, 80),
        (200, 0, 80),
        (200, 80, 0),
        (200, 96, 0),
    ],
)
def test_the_promise_ends_at_a_boundary_below_the_last_token(
    tokens: int, local: int, promised: int
) -> None:
    assert ask(hand_with_kept(), "r", tokens, local=local) == promised


def test_a_gap_ends_the_promise() -> None:
    hand = hand_with_kept()
    request = make_request("r", 200)
    (slot,), _ = hand.half.index.locate(0, request.block_hashes[2:3])
    hand.half.index._release([slot])
    assert ask(hand, "r", 200) == 32
    assert ask(hand, "r", 200, local=48) == 32


@pytest.mark.parametrize(("min_hit_tokens", "promised"), [(0, 80), (80, 80), (81, 0), (4096, 0)])
def test_a_hit_smaller_than_min_hit_tokens_is_not_restored(
    min_hit_tokens: int, promised: int
) -> None:
    assert ask(hand_with_kept(min_hit_tokens=min_hit_tokens), "r", 200) == promised


def test_a_request_that_skips_reading_the_cache_is_promised_nothing() -> None:
    hand = hand_with_kept()
    request = make_request("r", 200, skip_cache=True)
    assert request.skip_reading_prefix_cache
    assert hand.half.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_request_that_opts_out_of_loading_still_saves() -> None:
    hand = hand_with_kept()
    request = make_request("r", 100, params={"moonstep": {"load": False}})
    assert hand.admit(request, [11, 12, 13, 14, 15, 16, 17]) == 0
    plan = hand.step({"r": 100}, new=["r"])
    assert len(plan.restores) == 0
    assert blocks_of(plan.captures) == [16]


@pytest.mark.parametrize("capture", list(CaptureMode))
def test_a_request_that_opts_out_of_saving_still_loads(capture: CaptureMode) -> None:
    hand = hand_with_kept(32)
    hand.half._mode = capture
    request = make_request("r", 100, params={"moonstep": {"save": False}})
    assert hand.admit(request, [11, 12, 13, 14, 15, 16, 17]) == 32
    plan = hand.step({"r": 68}, new=["r"])
    assert blocks_of(plan.restores) == [11, 12]
    hand.decode("r", 8)
    hand.preempt("r")
    plans = [hand.step(preempted=["r"]), hand.step(), hand.step()]
    assert [len(plan.captures) for plan in plans] == [0, 0, 0]
    assert hand.half.index.written_count == 2


def test_wrong_wishes_are_said_once_and_the_defaults_apply(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hand = hand_with_kept()
    request = make_request("r", 100, params={"moonstep": {"laod": False}})
    with caplog.at_level(logging.WARNING):
        assert hand.admit(request, [11, 12, 13, 14, 15, 16, 17]) == 80
        hand.half.get_num_new_matched_tokens(request, 0)
        hand.step({"r": 20}, new=["r"])
    assert caplog.text.count("moonstep: kv_transfer_params.moonstep.laod=False") == 1


def test_an_answer_is_given_again_in_every_step_in_which_allocation_fails() -> None:
    hand = hand_with_kept()
    request = make_request("r", 100)
    for _ in range(5):
        assert hand.half.get_num_new_matched_tokens(request, 0) == (80, False)
        assert hand.step().is_empty
    assert hand.half.get_num_new_matched_tokens(request, 32) == (48, False)
    hand.step()
    assert hand.admit(request, [11, 12, 13, 14, 15, 16, 17], local=16) == 64
    plan = hand.step({"r": 20}, new=["r"])
    assert blocks_of(plan.restores) == [12, 13, 14, 15]


def test_an_answer_pins_nothing() -> None:
    """Between an answer that came to nothing and the next one, slots may go."""
    hand = hand_with_kept(slots=5)
    request = make_request("r", 100)
    assert hand.half.get_num_new_matched_tokens(request, 0)[0] == 80
    hand.admit(make_request("other", 32, family=2), [20, 21])
    hand.step({"other": 32}, new=["other"])
    assert hand.half.get_num_new_matched_tokens(request, 0)[0] == 48


@pytest.mark.parametrize("external", [64, 48, 16])
def test_only_what_the_engine_took_of_a_promise_is_restored(external: int) -> None:
    hand = hand_with_kept()
    assert hand.admit(make_request("r", 100), list(range(11, 18)), external=external) == 80
    plan = hand.step({"r": 100 - external}, new=["r"])
    blocks = external // BLOCK_TOKENS
    assert blocks_of(plan.restores) == list(range(11, 11 + blocks))
    assert plan.restores_of == (ReqMeta("r", 0, blocks),)
    assert blocks_of(plan.captures) == [16]


def test_a_promise_that_came_to_nothing_restores_nothing() -> None:
    hand = hand_with_kept()
    assert hand.admit(make_request("r", 100), list(range(11, 18)), external=0) == 80
    plan = hand.step({"r": 100}, new=["r"])
    assert len(plan.restores) == 0
    assert blocks_of(plan.captures) == [16]
    assert hand.half.stats.restored_tokens == 0


def test_two_requests_of_one_step_are_restored_from_the_same_slots() -> None:
    hand = hand_with_kept(32)
    for request_id, first in (("r", 11), ("s", 21)):
        hand.admit(make_request(request_id, 40), [first, first + 1, first + 2])
    plan = hand.step({"r": 8, "s": 8}, new=["r", "s"])
    assert blocks_of(plan.restores) == [11, 12, 21, 22]
    slots = [slot for _, slot in rows_of(plan.restores)]
    assert slots[:2] == slots[2:]
    assert plan.restores_of == (ReqMeta("r", 0, 2), ReqMeta("s", 2, 4))


def test_an_answer_to_an_aborted_request_is_not_its_successors() -> None:
    """The same id, asked and aborted before it was admitted, then another prompt under it."""
    hand = hand_with_kept()
    assert ask(hand, "r", 100) == 80
    hand.step(finished=["r"])
    assert hand.admit(make_request("r", 100, family=3), list(range(11, 18))) == 0
    plan = hand.step({"r": 100}, new=["r"])
    assert len(plan.restores) == 0
    assert blocks_of(plan.captures) == list(range(11, 17))


# Promises in slices: the engine's asynchronous loads.

SLICED = {
    "sync_restore_bytes": 2 * BLOCK_BYTES,
    "restore_slice_bytes": 2 * BLOCK_BYTES,
    "idle_restore_bytes": 0,
}


def test_a_small_promise_is_kept_at_once_and_a_large_one_in_slices() -> None:
    hand = hand_with_kept(**SLICED)
    assert hand.half.get_num_new_matched_tokens(make_request("r", 33), 0) == (32, False)
    assert hand.half.get_num_new_matched_tokens(make_request("s", 100), 0) == (80, True)


def test_what_one_step_restores_at_once_is_bounded_over_its_requests() -> None:
    hand = hand_with_kept(**SLICED)
    hand.admit(make_request("r", 33), [11, 12, 13])
    assert hand.half.get_num_new_matched_tokens(make_request("s", 33), 0) == (32, True)
    hand.step({"r": 1}, new=["r"])
    assert hand.half.get_num_new_matched_tokens(make_request("s", 33), 0) == (32, False)


def load_in_slices(hand: Hand, *, external: int = 80) -> list[list[int]]:
    """R is promised 80 tokens, and loads ``external`` of them; the blocks of each step."""
    hand.admit(make_request("r", 100), list(range(11, 18)), external=external)
    slices = []
    while True:
        plan = hand.step()
        slices.append(blocks_of(plan.restores))
        assert len(plan.captures) == 0
        if plan.received:
            assert plan.received == ("r",)
            return slices
        assert len(slices) < 9


@pytest.mark.parametrize(
    ("external", "slices"),
    [(80, [[11, 12], [13, 14], [15]]), (64, [[11, 12], [13, 14]]), (16, [[11]])],
)
def test_a_load_is_copied_slice_by_slice_and_reported_once(
    external: int, slices: list[list[int]]
) -> None:
    hand = hand_with_kept(**SLICED)
    assert load_in_slices(hand, external=external) == slices
    assert hand.half.is_idle
    assert hand.half.index.pinned_count == 0
    hand.half.update_state_after_alloc(hand.requests["r"], NO_BLOCKS, 0)
    plan = hand.step({"r": 100 - external}, new=["r"])
    assert not plan.received
    assert hand.table("r") == list(range(11, 18))
    assert hand.half.stats.restored_tokens == external


def test_slots_of_a_load_under_way_are_given_to_nobody() -> None:
    hand = hand_with_kept(slots=5, **SLICED)
    hand.admit(make_request("r", 100), list(range(11, 18)))
    hand.step()
    hand.admit(make_request("other", 80, family=2), [20, 21, 22, 23, 24])
    plan = hand.step({"other": 80}, new=["other"])
    assert blocks_of(plan.restores) == [13, 14]
    assert len(plan.captures) == 0
    plan = hand.step()
    assert blocks_of(plan.restores) == [15]
    assert plan.received == ("r",)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_an_aborted_load_ends_once_and_lets_its_slots_go(steps: int) -> None:
    """Aborted after its first slice, after the last but one, and when it had ended already."""
    hand = hand_with_kept(**SLICED)
    hand.admit(make_request("r", 100), list(range(11, 18)))
    received = [hand.step().received for _ in range(steps)]
    plans = [hand.step(finished=["r"]), hand.step()]
    received += [plan.received for plan in plans]
    assert [name for names in received for name in names] == ["r"]
    assert [len(plan.restores) for plan in plans] == [0, 0]
    assert hand.half.is_idle
    assert hand.half.index.pinned_count == 0
    assert ask(hand, "s", 100) == 80


def test_a_reset_while_loading_keeps_the_promise_but_nothing_of_it_is_kept() -> None:
    hand = hand_with_kept(**SLICED, blocks=16)
    hand.admit(make_request("r", 100), list(range(6, 13)))
    slices = [blocks_of(hand.step().restores)]
    hand.half.reset_cache()
    assert ask(hand, "s", 100) == 0
    plans = [hand.step(), hand.step()]
    slices += [blocks_of(plan.restores) for plan in plans]
    assert slices == [[6, 7], [8, 9], [10]]
    assert plans[-1].received == ("r",)
    hand.half.update_state_after_alloc(hand.requests["r"], NO_BLOCKS, 0)
    plan = hand.step({"r": 20}, new=["r"])
    hand.decode("r", 20)
    hand.preempt("r")
    plans += [plan, hand.step(preempted=["r"]), hand.step()]
    assert [len(plan.captures) for plan in plans] == [0] * 5
    assert hand.half.index.written_count == 0
    assert hand.half.index.free_count == hand.slots


def test_loads_take_turns_oldest_first() -> None:
    hand = hand_with_kept(**SLICED)
    hand.admit(make_request("r", 65), list(range(11, 16)))
    hand.admit(make_request("s", 65), list(range(21, 26)))
    plans = [hand.step() for _ in range(4)]
    assert [blocks_of(plan.restores) for plan in plans] == [
        [11, 12],
        [13, 14],
        [21, 22],
        [23, 24],
    ]
    assert [plan.received for plan in plans] == [(), ("r",), (), ("s",)]


# While nobody else is under way, nobody has to wait for a long copy.

IDLE = SLICED | {"idle_restore_bytes": 100 * BLOCK_BYTES}


def run_beside(hand: Hand) -> None:
    """A request is under way, and goes on."""
    hand.admit(make_request("other", 20, family=2), [20, 21])
    hand.step({"other": 20}, new=["other"])


def test_a_large_promise_to_the_only_request_is_kept_at_once() -> None:
    hand = hand_with_kept(**IDLE)
    assert hand.half.get_num_new_matched_tokens(make_request("r", 100), 0) == (80, False)
    hand.admit(make_request("r", 100), list(range(11, 18)))
    plan = hand.step({"r": 20}, new=["r"])
    assert blocks_of(plan.restores) == list(range(11, 16))
    assert not plan.received


def test_the_only_request_is_sliced_too_beyond_idle_restore_bytes() -> None:
    hand = hand_with_kept(**IDLE | {"idle_restore_bytes": 4 * BLOCK_BYTES})
    assert hand.half.get_num_new_matched_tokens(make_request("r", 65), 0) == (64, False)
    assert hand.half.get_num_new_matched_tokens(make_request("r", 100), 0) == (80, True)


def test_beside_a_request_under_way_a_large_promise_is_sliced() -> None:
    hand = hand_with_kept(**IDLE)
    run_beside(hand)
    assert hand.half.get_num_new_matched_tokens(make_request("r", 100), 0) == (80, True)
    hand.step(finished=["other"])
    assert hand.half.get_num_new_matched_tokens(make_request("r", 100), 0) == (80, False)


def test_only_the_first_request_of_a_step_is_alone() -> None:
    hand = hand_with_kept(**IDLE)
    hand.admit(make_request("r", 100), list(range(11, 18)))
    assert hand.half.get_num_new_matched_tokens(make_request("s", 100), 0) == (80, True)


def test_a_load_that_nobody_computes_beside_any_more_is_copied_at_once() -> None:
    hand = hand_with_kept(**IDLE)
    run_beside(hand)
    hand.admit(make_request("r", 100), list(range(11, 18)))
    (plan,) = hand.decode("other", 1)
    assert blocks_of(plan.restores) == [11, 12]
    plan = hand.step(finished=["other"])
    assert blocks_of(plan.restores) == [13, 14, 15]
    assert plan.received == ("r",)


def test_a_step_that_computes_nothing_is_not_one_without_requests() -> None:
    """With pipeline parallelism a step may schedule nobody although requests decode."""
    hand = hand_with_kept(**IDLE)
    run_beside(hand)
    hand.admit(make_request("r", 100), list(range(11, 18)))
    assert blocks_of(hand.step().restores) == [11, 12]


class _NoBlocks:
    """What the second call for a load that has ended may as well carry: the life has its table."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([],)


NO_BLOCKS = _NoBlocks()
