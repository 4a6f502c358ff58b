"""The Mooncake store beside a dict that is to hold the same, whatever is done in whatever order."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from moonstep.stores.base import Get, Put
from moonstep.stores.mooncake import MooncakeStore, package
from moonstep.stores.mooncake.options import MooncakeOptions
from moonstep.stores.testing import fetch, incoming, key, outgoing, payload
from tests.masters import Master

KEYS = st.integers(0, 5)
CONTENTS = st.sampled_from([(1, 100), (2, 100), (3, 5000), (4, 1 << 20)])
"""Seed and size: two of one size, and two of others."""


def test_it_holds_what_a_dict_would(master: Master) -> None:
    store = MooncakeStore(MooncakeOptions(master.plan.address, 128 << 20), package.load())
    store.probe()

    class Beside(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            store.clear()
            self.held: dict[int, bytes] = {}

        @rule(batch=st.dictionaries(KEYS, CONTENTS, max_size=4))
        def put(self, batch: dict[int, tuple[int, int]]) -> None:
            new = {number: payload(*content) for number, content in batch.items()}
            answers = store.put([outgoing(key(number), bytes_) for number, bytes_ in new.items()])
            for (number, bytes_), answer in zip(new.items(), answers, strict=True):
                is_there = len(self.held.get(number, b"")) == len(bytes_)
                assert answer is (Put.ALREADY_THERE if is_there else Put.STORED)
                if not is_there:
                    self.held[number] = bytes_

        @rule(numbers=st.lists(KEYS, max_size=6))
        def contains(self, numbers: list[int]) -> None:
            assert store.contains([key(n) for n in numbers]) == [n in self.held for n in numbers]

        @rule(numbers=st.lists(KEYS, max_size=6))
        def get(self, numbers: list[int]) -> None:
            transfers = [incoming(key(n), len(self.held.get(n, b"?"))) for n in numbers]
            answers = store.get([transfer for transfer, _ in transfers])
            for number, answer, (_, memory) in zip(numbers, answers, transfers, strict=True):
                assert answer is (Get.HIT if number in self.held else Get.MISS)
                assert number not in self.held or memory == self.held[number]

        @rule(number=KEYS, nbytes=st.sampled_from([1, 99, 101, 6000]))
        def get_into_memory_of_another_size(self, number: int, nbytes: int) -> None:
            expected = Get.DAMAGED if number in self.held else Get.MISS
            assert fetch(store, key(number), nbytes) is expected

        @rule(numbers=st.lists(KEYS, unique=True))
        def discard(self, numbers: list[int]) -> None:
            removed = store.discard([key(n) for n in numbers])
            assert removed == [self.held.pop(n, None) is not None for n in numbers]

        @rule(numbers=st.lists(KEYS, unique=True))
        def remove(self, numbers: list[int]) -> None:
            """What was asked for has a lease, and may stay."""
            for number, is_removed in zip(
                numbers, store.remove([key(n) for n in numbers]), strict=True
            ):
                assert number in self.held or not is_removed
                if is_removed:
                    del self.held[number]

    try:
        run_state_machine_as_test(
            Beside,
            settings=settings(
                max_examples=30,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
    finally:
        store.close()
