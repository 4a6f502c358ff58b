"""Where spans lie, as Mooncake takes it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moonstep.stores.base import Transfer
from moonstep.stores.mooncake.address import Placed, address_of
from moonstep.stores.testing import key

MEMORY = np.arange(200, dtype=np.uint8)
START = int(MEMORY.ctypes.data)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=12))
def test_the_pieces_are_the_bytes_of_the_spans_in_order(edges: list[tuple[int, int]]) -> None:
    spans = tuple(MEMORY.data[min(edge) : max(edge)] for edge in edges)
    placed = Placed.of(Transfer(key(1), spans))
    pieces = [
        bytes(MEMORY[address - START : address - START + size])
        for address, size in zip(placed.addresses, placed.sizes, strict=True)
    ]
    assert b"".join(pieces) == b"".join(map(bytes, spans))
    assert placed.nbytes == sum(span.nbytes for span in spans)
    assert all(placed.sizes)


@given(st.lists(st.integers(0, 200), min_size=2, max_size=12))
def test_neighbours_are_one_piece(edges: list[int]) -> None:
    spans = tuple(MEMORY.data[start:stop] for start, stop in pairwise(sorted(edges)))
    assert len(Placed.of(Transfer(key(1), spans)).sizes) <= 1


def test_what_is_read_only_has_an_address_as_well() -> None:
    view = MEMORY.data[7:9]
    assert address_of(view) == address_of(view.toreadonly()) == START + 7
