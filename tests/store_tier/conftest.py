"""Engines whose store fails on command; what Moonstep logs of that is no news here."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from moonstep.audit import quiet
from moonstep.audit.connectors import kit_for
from moonstep.audit.connectors.moonstep import STORES, FaultyStores


@pytest.fixture
def stores() -> Iterator[FaultyStores]:
    """All stores that Moonstep opens, in memory and empty, told together what to do."""
    quiet.hush()
    logger = logging.getLogger("moonstep")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with kit_for("MoonstepConnector").surroundings():
        STORES.fresh()
        yield STORES
        STORES.fresh()
    logger.setLevel(level)
