"""Quiet: vLLM's own log lines are no part of a report."""

from __future__ import annotations

import logging
from functools import lru_cache


@lru_cache(maxsize=1)
def hush(level: int = logging.CRITICAL) -> None:
    """Keep vLLM's loggers silent below `level`; findings carry tracebacks of their own."""
    logging.getLogger("vllm").setLevel(level)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("vllm") and isinstance(logger, logging.Logger):
            logger.setLevel(level)
