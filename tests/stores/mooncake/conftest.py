"""A master for all tests of this folder that do it no harm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.masters import Master, need_mooncake


@pytest.fixture(scope="session")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    need_mooncake()
    with Master(tmp_path_factory.mktemp("master")) as running:
        yield running
