"""Which CPU an engine of a test computes on."""

from __future__ import annotations

import os
import re

from moonstep.demo.plan import usable_cpus


def own_cpu() -> tuple[int, ...]:
    """One CPU, and each process of pytest-xdist its own: two engines bound to one would take turns,
    and one engine on two would wait for its own threads on a busy machine."""
    worker = re.search(r"\d+$", os.environ.get("PYTEST_XDIST_WORKER", "0"))
    cpus = usable_cpus()
    return (cpus[int(worker.group()) % len(cpus)],) if worker else cpus[:1]
