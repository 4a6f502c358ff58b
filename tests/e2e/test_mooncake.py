"""Real engines with a real Mooncake Store behind their host caches, which outlives them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.test_hybrid import HOST, cached_tokens, plan_for, tokens_of, told_by
from tests.e2e.tiny import LLAMA
from tests.masters import Master, need_mooncake
from tests.store_tier.mooncake import Pool

pytestmark = pytest.mark.engine


def test_a_restarted_engine_answers_from_mooncake(tmp_path: Path) -> None:
    """Its answer is the same, and what it did not compute came out of another process's memory."""
    need_mooncake()
    with Master(tmp_path) as master, Pool(master.url("256MiB")):
        settings = HOST | {
            "store": master.url(0),
            "chunk_tokens": LLAMA.block_tokens,
            "min_fetch_tokens": 0,
            "fetch_deadline_s": 60,
        }
        plan = replace(plan_for(LLAMA, tmp_path, settings), short=True)
        first, again = (told_by(plan, tmp_path / f"{name}.log") for name in ("first", "again"))
    assert tokens_of(again) == tokens_of(first)
    assert cached_tokens(first, "first") == 0
    assert cached_tokens(again, "first") == LLAMA.boundary(LLAMA.prompt_tokens - 1)
    assert "unwell" not in (tmp_path / "again.log").read_text()
