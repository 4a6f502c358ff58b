"""Where the bytes of a span lie: what Mooncake takes instead of a view."""

from __future__ import annotations

from ctypes import addressof, c_char
from dataclasses import dataclass

import numpy as np

from moonstep.stores.base import Key, Transfer


@dataclass(frozen=True, slots=True)
class Placed:
    """One object: its key, and address and length of each of its pieces."""

    key: Key
    addresses: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, item: Transfer) -> Placed:
        """The pieces of a transfer that have bytes; holds no view of them."""
        spans = [span for span in item.spans if span.nbytes]
        sizes = [span.nbytes for span in spans]
        return cls(item.key, list(map(address_of, spans)), sizes)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


def address_of(view: memoryview) -> int:
    """Where a view's first byte lies; it may be read-only, and must not be empty."""
    if not view.readonly:  # slots and headers: several times faster than by numpy
        return addressof(c_char.from_buffer(view))
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
