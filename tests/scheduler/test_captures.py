"""What is captured: settled blocks that two witnesses vouch for, as they fill or before they go."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from moonstep.config import CaptureMode
from tests.scheduler.stock import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    Hand,
    captured,
    lazy,
    make_request,
    running,
)

# Settled: never drafts or placeholders, and not before there is a name.


def test_drafts_are_scheduled_but_not_settled() -> None:
    hand = Hand(tokens_per_decode=4)
    running(hand, 44, [1, 2, 3, 4])
    plan = hand.step({"r": 4}, drafts={"r": 3})
    assert captured(plan) == []
    assert hand.half.lives["r"].token_len == 45
    r = hand.requests["r"]
    r.append_output_token_ids([7, 7, 7])  # two drafts accepted, one token sampled
    r.num_computed_tokens += 2
    plan = hand.step({"r": 4}, drafts={"r": 3})
    assert hand.half.lives["r"].token_len == 48
    assert captured(plan) == [3]


def test_a_block_that_only_drafts_fill_is_not_captured_when_they_are_rejected() -> None:
    hand = Hand(tokens_per_decode=4)
    running(hand, 46, [1, 2, 3, 4])
    plans = [hand.step({"r": 4}, drafts={"r": 3})]  # 47 of its own, and 3 drafts beyond
    hand.requests["r"].append_output_token_ids(8)  # all rejected
    assert captured(*plans) == []
    plans.append(hand.step({"r": 4}, drafts={"r": 3}))
    assert captured(*plans) == [3]


def test_placeholders_are_counted_as_computed_but_not_settled() -> None:
    """Under asynchronous scheduling a step is built before the tokens of the last are known."""
    hand = Hand()
    running(hand, 46, [1, 2, 3, 4])
    for _ in range(3):
        assert captured(hand.step({"r": 1})) == []
    r = hand.requests["r"]
    assert (r.num_computed_tokens, r.num_tokens) == (49, 47)
    r.append_output_token_ids([7, 7])
    assert captured(hand.step({"r": 1})) == [3]


def test_a_block_without_a_name_waits_for_it() -> None:
    """Hashes may lag behind the tokens."""
    hand = Hand()
    hand.admit(make_request("r", 70), [1, 2, 3, 4, 5])
    hashes = hand.requests["r"].block_hashes
    late = [hashes.pop(), hashes.pop()]
    assert captured(hand.step({"r": 70}, new=["r"])) == [1, 2]
    assert captured(hand.step()) == []
    hashes.append(late.pop())
    assert captured(hand.step({"r": 1})) == [3]
    assert captured(hand.step({"r": 1})) == []
    hashes.append(late.pop())
    assert captured(hand.step({"r": 1})) == [4]


def test_every_chunk_of_a_prefill_is_captured_and_none_twice() -> None:
    hand = Hand()
    hand.admit(make_request("r", 100), list(range(1, 8)))
    plans = [hand.step({"r": 24}, new=["r"])]
    plans += [hand.step({"r": tokens}) for tokens in (8, 0, 1, 40, 27)]
    assert [captured(plan) for plan in plans] == [[1], [2], [], [], [3, 4], [5, 6]]


def test_a_life_inside_a_block_captures_it_when_it_is_full() -> None:
    """A streaming session goes on where it stopped, in the middle of a block."""
    hand = Hand()
    hand.admit(make_request("r", 60), [1, 2, 3, 4], local=40)
    assert captured(hand.step({"r": 20}, new=["r"])) == [3]


@settings(max_examples=80, deadline=None)
@given(
    prompt=st.integers(1, 40),
    drafts=st.integers(0, 4),
    accepted=st.lists(st.integers(0, 4), min_size=1, max_size=40),
)
def test_whatever_is_accepted_every_block_is_captured_in_the_step_that_settles_it(
    prompt: int, drafts: int, accepted: list[int]
) -> None:
    hand = Hand(tokens_per_decode=drafts + 1)
    table = list(range(1, 20))
    hand.admit(make_request("r", prompt), table)
    r = hand.requests["r"]
    plans = [hand.step({"r": prompt}, new=["r"])]
    for count in accepted:
        r.append_output_token_ids([7] * (1 + min(count, drafts)))
        settled = r.num_tokens
        r.num_computed_tokens = settled - 1
        plans.append(hand.step({"r": 1 + drafts}, drafts={"r": drafts}))
        assert captured(*plans) == table[: settled // BLOCK_TOKENS]
        r.num_computed_tokens = settled


# Two witnesses: the engine's pool, and a step that was seen.


def test_a_block_the_pool_knows_by_another_name_is_not_captured() -> None:
    hand = Hand()
    hand.admit(make_request("r", 64), [1, 2, 3, 4])
    other = make_request("other", 64, family=9)
    block = hand.pool.blocks[3]
    block.set_block_hash(other.block_hashes[2] + (0).to_bytes(4, "big"))  # type: ignore[arg-type]
    plan = hand.step({"r": 64}, new=["r"])
    assert captured(plan) == [1, 2, 4]
    assert hand.half.stats.unvouched_blocks == 1


@pytest.mark.parametrize("capture", list(CaptureMode))
def test_a_block_that_carries_a_hash_but_was_never_computed_is_not_captured(
    capture: CaptureMode,
) -> None:
    """Under priority scheduling a request can be preempted later in the ``schedule()`` that
    admitted it: its blocks are freed with their hashes, and nothing ever computed them."""
    hand = Hand(capture=capture, blocks=12)
    request = make_request("r", 64)
    hand.give(request, [1, 2, 3, 4])
    hand.requests["r"] = request
    hand._name_blocks("r", 64)
    hand.free("r")
    assert all(hand.pool.blocks[block].block_hash for block in (1, 2, 3, 4))
    for _ in range(3):
        assert hand.step().is_empty


def test_what_the_engine_shares_is_captured_once() -> None:
    hand = Hand()
    running(hand, 64, [1, 2, 3, 4])
    hand.admit(make_request("s", 80), [1, 2, 3, 4, 5], local=64)
    assert captured(hand.step({"s": 16}, new=["s"])) == [5]


def test_what_another_connector_loaded_is_not_captured() -> None:
    """Blocks that were there at admission, from wherever, were not seen to be computed."""
    hand = Hand()
    request = make_request("r", 80)
    hand.admit(request, [1, 2, 3, 4, 5], external=0)
    request.num_computed_tokens = 64
    assert captured(hand.step({"r": 16}, new=["r"])) == [5]
    hand.preempt("r")
    assert captured(hand.step(preempted=["r"])) == []


def test_without_prefix_caching_the_table_of_the_step_is_the_first_witness() -> None:
    hand = Hand(caching=False)
    running(hand, 64, [1, 2, 3, 4])
    assert hand.half.index.written_count == 4
    assert hand.half.lives["r"].request.num_tokens == 65


def test_without_prefix_caching_lazy_captures_as_blocks_fill() -> None:
    hand = Hand(caching=False, capture=CaptureMode.LAZY)
    hand.admit(make_request("r", 64), [1, 2, 3, 4])
    assert captured(hand.step({"r": 64}, new=["r"])) == [1, 2, 3, 4]


@pytest.mark.parametrize("caching", [True, False])
def test_a_victims_block_that_a_sibling_is_loading_into_is_not_captured(caching: bool) -> None:
    """A request that another connector loads asynchronously is admitted, but runs in no step yet.

    Reset and re-admission can fall into one step, so its blocks may have been the victim's.
    """
    hand = Hand(caching=caching)
    running(hand, 64, [1, 2, 3, 4])
    hand.half.index.reset()
    hand.preempt("r")
    hand.admit(make_request("s", 40, family=2), [2, 3, 4], external=0)
    plan = hand.step(preempted=["r"])
    assert not set(captured(plan)) & {2, 3, 4}


# Lazy: what the engine is about to lose.


def test_lazy_captures_nothing_while_the_engine_keeps_it() -> None:
    hand = lazy()
    running(hand, 64, [1, 2, 3, 4])
    assert captured(*hand.decode("r", 40)) == []
    assert hand.half.index.written_count == 0


def test_a_preempted_requests_blocks_are_captured_in_the_step_that_preempts_it() -> None:
    hand = lazy()
    running(hand, 70, [1, 2, 3, 4, 5])
    hand.preempt("r")
    assert captured(hand.step(preempted=["r"])) == [1, 2, 3, 4]


def test_a_victim_has_not_computed_what_the_step_that_preempts_it_would_have() -> None:
    """Its last token is known, and its last block named by the time it loses its turn."""
    hand = lazy()
    running(hand, 62, [1, 2, 3, 4])
    hand.step({"r": 1})
    hand.requests["r"].append_output_token_ids(7)
    hand._name_blocks("r", 1)
    assert hand.pool.blocks[4].block_hash is not None
    hand.preempt("r")
    assert captured(hand.step(preempted=["r"])) == [1, 2, 3]
    for _ in range(3):
        assert hand.step().is_empty


def test_of_a_victim_only_what_this_step_leaves_intact_is_captured() -> None:
    hand = lazy()
    running(hand, 70, [1, 2, 3, 4, 5])
    hand.preempt("r")
    hand.admit(make_request("s", 30, family=2), [5, 3])
    assert captured(hand.step({"s": 30}, new=["s"], preempted=["r"])) == [1, 2, 4]


def test_a_victim_of_more_than_victim_bytes_is_captured_from_its_head() -> None:
    hand = lazy(victim_bytes=2 * BLOCK_BYTES, blocks=200)
    running(hand, 64, [150, 151, 152, 153])
    hand.preempt("r")
    plan = hand.step(preempted=["r"])
    assert captured(plan) == [150, 151]


def test_what_a_request_leaves_is_captured_before_the_engine_overwrites_it() -> None:
    """Freed blocks go to the end of the queue, and are captured when they are near its front."""
    hand = lazy(blocks=40)
    running(hand, 64, [1, 2, 3, 4])
    assert captured(hand.step(finished=["r"])) == []
    request = make_request("s", 500, family=2)
    front = [block.block_id for block in hand.pool.free_block_queue.get_all_free_blocks()]
    assert front[-4:] == [4, 3, 2, 1]
    hand.admit(request, front[:20])
    plan = hand.step({"s": 320}, new=["s"])
    assert sorted(captured(plan)) == [1, 2, 3, 4]
    hand.report()
    assert captured(hand.step(), hand.step()) == []


def test_leaver_bytes_bound_a_step_and_the_next_goes_on() -> None:
    hand = lazy(blocks=12, leaver_bytes=2 * BLOCK_BYTES)
    running(hand, 96, [1, 2, 3, 4, 5, 6])
    plans = [hand.step(finished=["r"]), hand.step(), hand.step(), hand.step()]
    assert [sorted(captured(plan)) for plan in plans] == [[5, 6], [3, 4], [1, 2], []]


def test_what_is_captured_already_is_not_captured_again() -> None:
    hand = lazy(blocks=12)
    running(hand, 64, [1, 2, 3, 4])
    hand.preempt("r")
    assert captured(hand.step(preempted=["r"])) == [1, 2, 3, 4]
    hand.report()
    for _ in range(3):
        assert hand.step().is_empty


def test_a_failed_capture_of_what_is_about_to_go_is_tried_again() -> None:
    hand = lazy(blocks=12)
    running(hand, 32, [1, 2])
    assert sorted(captured(hand.step(finished=["r"]))) == [1, 2]
    hand.report(captured=False)
    assert sorted(captured(hand.step())) == [1, 2]
    hand.report()
    assert hand.step().is_empty
    assert hand.half.index.written_count == 2


def test_a_block_filled_anew_is_captured_anew() -> None:
    """Block 1 held X, was captured and overwritten without getting a name; X's copy went; block 1
    holds X again and is about to go again."""
    hand = lazy(blocks=12)
    running(hand, 16, [1, 2])
    assert captured(hand.step(finished=["r"])) == [1]
    hand.report()
    hand.admit(make_request("short", 8, family=2), [1])
    hand.step({"short": 8}, new=["short"])
    hand.step(finished=["short"])
    hand.half.index.reset()
    running(hand, 16, [1, 2])
    assert captured(hand.step(finished=["r"])) == [1]


def test_what_another_request_goes_on_from_is_looked_at_again_when_it_is_freed() -> None:
    """Captured, used again by the engine, its copy evicted meanwhile: captured once more."""
    hand = lazy(blocks=12)
    running(hand, 32, [1, 2])
    assert sorted(captured(hand.step(finished=["r"]))) == [1, 2]
    hand.report()
    hand.admit(make_request("s", 40), [1, 2, 3], local=32)
    hand.step({"s": 8}, new=["s"])
    hand.half.index.reset()
    assert sorted(captured(hand.step(finished=["s"]))) == [1, 2]


def test_what_a_client_sent_last_is_not_computed_if_the_session_ends_before_it_runs() -> None:
    """A paused session gets its next input, which fills up a block, and is aborted then."""
    hand = lazy()
    running(hand, 40, [1, 2, 3, 4])
    hand.decode("r", 4)
    r = hand.requests["r"]
    assert r.num_computed_tokens == 44
    del r._all_token_ids[44:], r._output_token_ids[4:], r.block_hashes[2:]
    r.append_output_token_ids([9] * 20)
    assert len(r.block_hashes) == 4
    hand.step(finished=["r"])
    keys = [make_block_hash_with_group_id(name, 0) for name in r.block_hashes]
    assert hand.half._witness.computed(0, [1, 2, 3, 4], keys).blocks == [1, 2]
