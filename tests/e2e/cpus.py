"""Which CPU an engine of a test computes on."""

from __future__ import annotations

import os

from moonstep.demo.plan import usable_cpus


def own_cpu() -> tuple[int, ...]:
    """One CPU, and each process of pytest-xdist its own: two engines bound to one would take turns,
    and one engine on two would wait for its own threads on a busy machine."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    cpus = usable_cpus()
    return (cpus[worker % len(cpus)],)
