"""Environment variables that hold for a while, and are then as they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """``name`` is ``value`` within; afterwards it is what it was before, or unset if it was."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
