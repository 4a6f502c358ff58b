"""What a master's metrics say about its pool."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from moonstep.stores.base import StoreUnwell
from moonstep.stores.mooncake.master import Address

READ_S: Final = 3.0

_SAMPLE: Final = re.compile(r'(\w+)(?:\{segment="([^"]*)"\})? ([-+.\deE]+)\s*')


@dataclass(frozen=True, slots=True)
class SegmentStatus:
    """Memory that one client gives."""

    name: str
    used_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class MasterStatus:
    """A pool as its master counts it. ``evicted`` are objects since the master's start."""

    objects: int
    used_bytes: int
    capacity_bytes: int
    clients: int
    evicted: int
    segments: tuple[SegmentStatus, ...]

    @classmethod
    def parse(cls, text: str) -> MasterStatus:
        """From the text of ``/metrics``; what the master does not count is zero.

        >>> MasterStatus.parse("master_key_count 3\\nmaster_allocated_bytes 5000\\n").objects
        3
        """
        samples = {(name, segment): value for name, segment, value in _samples(text)}

        def total(name: str) -> int:
            return samples.get((name, ""), 0)

        names = sorted(s for name, s in samples if name == "segment_total_capacity_bytes" and s)
        return cls(
            objects=total("master_key_count"),
            used_bytes=total("master_allocated_bytes"),
            capacity_bytes=total("master_total_capacity_bytes"),
            clients=total("master_active_clients"),
            evicted=total("master_evicted_key_count"),
            segments=tuple(
                SegmentStatus(
                    name,
                    samples.get(("segment_allocated_bytes", name), 0),
                    samples[("segment_total_capacity_bytes", name)],
                )
                for name in names
            ),
        )


def read_status(metrics: Address, timeout_s: float = READ_S) -> MasterStatus:
    """Ask a master for its metrics.

    Raises:
        StoreUnwell: when it does not give them in time.
    """
    try:
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=timeout_s) as answer:
            return MasterStatus.parse(answer.read().decode())
    except (OSError, ValueError) as error:
        raise StoreUnwell(f"no metrics at http://{metrics}/metrics: {error}") from error


def _samples(text: str) -> Iterator[tuple[str, str, int]]:
    for line in text.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is not None:
            yield sample[1], sample[2] or "", int(float(sample[3]))
