"""Quiet engines, one thread for torch (they are small and many), a store that fails on command."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moonstep.audit.connectors import kit_for
from moonstep.audit.quiet import hush

hush()
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def moonsteps_store() -> Iterator[None]:
    """Moonstep opens a store that obeys the histories."""
    with kit_for("MoonstepConnector").surroundings():
        yield
