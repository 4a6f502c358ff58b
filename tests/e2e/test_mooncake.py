"""Real engines with a real Mooncake Store behind their host caches, which outlives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_hybrid import assert_a_restart_is_warm
from tests.e2e.tiny import LLAMA
from tests.masters import Master, need_mooncake
from tests.store_tier.mooncake import Pool

pytestmark = pytest.mark.engine


def test_a_restarted_engine_answers_from_mooncake(tmp_path: Path) -> None:
    """Its answer is the same, and what it did not compute came out of another process's memory."""
    need_mooncake()
    with Master(tmp_path) as master, Pool(master.url("256MiB")):
        assert_a_restart_is_warm(LLAMA, master.url(0), tmp_path)
    assert "unwell" not in (tmp_path / "again.log").read_text()
