"""Ratios of repeated measurements with their 95 % interval, by bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

DRAWS: Final = 10_000
_QUANTILES: Final = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and the range in which it lies with 95 % confidence."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_of_means(
    ours: Sequence[float], theirs: Sequence[float], *, paired: bool, seed: int = 0
) -> Interval:
    """``mean(ours) / mean(theirs)``. ``paired``: value i of both was measured one after the other.

    >>> str(ratio_of_means([2.0, 2.0, 2.0], [4.0, 4.0, 4.0], paired=True))
    '0.500 [0.500, 0.500]'

    Raises:
        ValueError: no values, or paired sequences of different length.
    """
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if not len(a) or not len(b) or (paired and len(a) != len(b)):
        raise ValueError(f"cannot compare {len(a)} with {len(b)} measurements")
    rng = np.random.default_rng(seed)
    picks_a = rng.integers(len(a), size=(DRAWS, len(a)))
    picks_b = picks_a if paired else rng.integers(len(b), size=(DRAWS, len(b)))
    ratios = a[picks_a].mean(axis=1) / b[picks_b].mean(axis=1)
    low, high = np.quantile(ratios, _QUANTILES)
    return Interval(float(a.mean() / b.mean()), float(low), float(high))
