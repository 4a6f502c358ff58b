"""Quiet: vLLM's own log lines are no part of a report."""

from __future__ import annotations

import logging
import os


def hush(level: int = logging.CRITICAL) -> None:
    """Keep vLLM's loggers silent below `level`; findings carry tracebacks of their own.

    Also before vLLM is imported: it logs while it is, before it has set up its handlers.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("vllm").setLevel(level)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("vllm") and isinstance(logger, logging.Logger):
            logger.setLevel(level)
