"""Our log lines, where vLLM's users look for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from moonstep.config import SettingError
from moonstep.engines.vllm.facts import Unsupported
from moonstep.stores.base import StoreUnwell


def join_vllm_logging() -> None:
    """Send the ``moonstep`` logger's lines where the ``vllm`` logger's go, at the same level.

    vLLM configures its own logger only, so without this nothing of ours would be seen. A logger
    that the user has given handlers is left alone.
    """
    ours, theirs = logging.getLogger("moonstep"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = False


@contextmanager
def said_once(logger: logging.Logger) -> Iterator[None]:
    """Log a refusal as one line of its own before vLLM wraps it in a hundred."""
    try:
        yield
    except (SettingError, Unsupported, StoreUnwell) as error:
        logger.error("%s", error)
        raise
