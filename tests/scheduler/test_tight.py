"""A host cache smaller than what passes through it: what is kept is what can be used."""

from __future__ import annotations

from tests.scheduler.stock import Hand, captured, lazy, make_request, running


def test_a_request_longer_than_the_host_cache_keeps_its_head() -> None:
    hand = Hand(slots=3)
    running(hand, 96, [1, 2, 3, 4, 5, 6])
    assert hand.half.get_num_new_matched_tokens(make_request("s", 97), 0)[0] == 48


def test_a_request_longer_than_the_host_cache_keeps_its_head_in_lazy_mode_too() -> None:
    hand = lazy(slots=3, blocks=12)
    running(hand, 96, [1, 2, 3, 4, 5, 6])
    hand.step(finished=["r"])
    for _ in range(6):
        hand.report()
        hand.step()
    hand.report()
    assert hand.half.get_num_new_matched_tokens(make_request("s", 97), 0)[0] == 48


def test_without_a_slot_nothing_is_captured_and_nothing_breaks() -> None:
    hand = Hand(slots=0)
    running(hand, 96, [1, 2, 3, 4, 5, 6])
    assert captured(*hand.decode("r", 20)) == []
    hand.preempt("r")
    assert hand.step(preempted=["r"]).is_empty


def test_what_the_engine_still_holds_leaves_first() -> None:
    hand = Hand(slots=4, blocks=64)
    running(hand, 32, [1, 2])
    hand.step(finished=["r"])
    for block in (1, 2):
        hand.pool.blocks[block].reset_hash()  # the engine has given these away
    hand.admit(make_request("s", 32, family=2), [11, 12])
    hand.step({"s": 32}, new=["s"])
    hand.report()
    hand.admit(make_request("t", 32, family=3), [21, 22])
    hand.step({"t": 32}, new=["t"])
    hand.report()
    asked = [
        hand.half.get_num_new_matched_tokens(make_request("x", 33, family=family), 0)[0]
        for family in (1, 2, 3)
    ]
    assert asked == [32, 0, 32]
    assert hand.half.index.counts.evicted_resident == 2
