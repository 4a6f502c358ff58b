"""The gap measurement: what it asks of an engine, and what it makes of an engine's times."""

from __future__ import annotations

import pytest

from moonstep.bench import gap

TOKEN_BYTES = 46_080


def test_a_prompt_restores_at_least_what_was_asked_for_and_computes_one_token() -> None:
    chosen = gap.plan("model", (0,), TOKEN_BYTES, restore_bytes=128 << 20, restores=4)
    engine = chosen.engine
    restored = (engine.prompt_tokens - 1) // engine.block_tokens * engine.block_tokens
    assert engine.prompt_tokens - restored == 1
    assert restored * TOKEN_BYTES >= 128 << 20
    # What the decoding request has not taken yet may still hold as many of the prompt's blocks.
    decoding_blocks = engine.kv_blocks - 2 * (restored // engine.block_tokens) - 1
    assert decoding_blocks > 1
    restored_least = restored - (gap._SPARE_BLOCKS + decoding_blocks) * engine.block_tokens
    assert restored_least * TOKEN_BYTES >= 128 << 20
    assert (restored_least - engine.block_tokens) * TOKEN_BYTES < 128 << 20


def test_kv_memory_holds_two_prompts_and_what_decodes_but_not_three() -> None:
    chosen = gap.plan("model", (0,), TOKEN_BYTES, restore_bytes=128 << 20, restores=9)
    engine = chosen.engine
    prompt_blocks = -(-engine.prompt_tokens // engine.block_tokens)
    decoded = engine.block_tokens + 2 * chosen.window_tokens * chosen.restores + 1
    decoding_blocks = -(-decoded // engine.block_tokens)
    assert prompt_blocks + decoding_blocks < engine.kv_blocks < 3 * prompt_blocks


def test_the_plan_reaches_the_child_whole() -> None:
    chosen = gap.plan("model", (0, 1), TOKEN_BYTES, restore_bytes=1 << 20, restores=2)
    assert gap.GapPlan.from_json(chosen.to_json()) == chosen


def test_windows_are_compared_with_their_own_median() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 9.0, 11.0, 13.0, 16.0, 18.0, 20.0]
    first, second = gap.windows_of(times, [10, 30, 60], window_tokens=3)
    assert first.alone_s == [1.0, 1.0, 1.0]
    assert first.beside_s == [1.0, 2.0, 1.0]
    assert (first.worst_alone, first.worst_beside) == (1.0, 2.0)
    assert second.worst_beside == pytest.approx(1.5)
    assert [first.restored_bytes, second.restored_bytes] == [20, 30]
    shown = gap.as_table(gap.plan("model", (0,), TOKEN_BYTES, 1 << 20, 2), [first, second])
    assert shown.row_count == 3
