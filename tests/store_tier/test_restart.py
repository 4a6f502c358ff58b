"""What one engine left in the store, the first request of the next one finds."""

from __future__ import annotations

from moonstep.audit.connectors.moonstep import FaultyStores
from tests.store_tier.stage import BLOCKS, PROMPT_TOKENS, open_stage


def test_the_first_request_after_a_restart_is_warm(stores: FaultyStores) -> None:
    """It arrives before any rank has told how many slots there are."""
    with open_stage(stores, slots=32) as stage:
        stage.run("a", family=1)
        stage.until(lambda: stage.tier.pushes.counts.stored >= BLOCKS)
        stage.until(lambda: stage.tier.is_idle)
    with open_stage(stores, slots=32, first_step=False) as stage:
        stage.run("a", family=1)
        assert stage.engine.seam.counts.loaded_tokens == PROMPT_TOKENS
        assert stage.tier.fetches.counts.fetched_objects == BLOCKS
