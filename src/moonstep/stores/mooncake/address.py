"""Where the bytes of a span lie: what Mooncake takes instead of a view."""

from __future__ import annotations

from collections.abc import Sequence
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
        """The pieces of a transfer that have bytes; holds no view of them.

        Spans that lie one behind the other, as neighbouring slots do, are one piece: over TCP each
        piece costs a message.
        """
        addresses: list[int] = []
        sizes: list[int] = []
        behind = 0
        for span in item.spans:
            nbytes = span.nbytes
            if not nbytes:
                continue
            address = address_of(span)
            if address == behind:
                sizes[-1] += nbytes
            else:
                addresses.append(address)
                sizes.append(nbytes)
            behind = address + nbytes
        return cls(item.key, addresses, sizes)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


def columns(placed: Sequence[Placed]) -> tuple[list[Key], list[list[int]], list[list[int]]]:
    """Keys, addresses and sizes of a batch, as Mooncake's ``batch_*_multi_buffers`` take them."""
    return (
        [each.key for each in placed],
        [each.addresses for each in placed],
        [each.sizes for each in placed],
    )


def address_of(view: memoryview) -> int:
    """Where a view's first byte lies; it may be read-only, and must not be empty."""
    if not view.readonly:  # slots and headers: several times faster than by numpy
        return addressof(c_char.from_buffer(view))
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
