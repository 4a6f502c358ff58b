"""What holds for every test."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def own_log_lines() -> None:
    """Moonstep's log lines reach pytest, whatever an engine in this process did to its logger.

    In an engine they go where vLLM's go, and no further (``join_vllm_logging``).
    """
    logger = logging.getLogger("moonstep")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
