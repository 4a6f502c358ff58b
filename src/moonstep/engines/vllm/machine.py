"""How much memory this machine, or the container around us, has."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def machine_memory_bytes() -> int:
    """Total memory, or the container's limit where that is lower."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
