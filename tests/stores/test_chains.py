"""A tree of chains in a small directory store: no hole, no wrong byte, no byte too many."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonstep.stores.base import Get, Put, Transfer
from moonstep.stores.checked import CheckedInspection
from moonstep.stores.directory import DirectoryStore
from moonstep.stores.testing import incoming, key, outgoing, payload

NODES = 40
ROOM_OBJECTS = 17
NBYTES = 3000
ON_DISK = 4096
SECOND_NS = 10**9

nodes = st.integers(0, NODES - 1)


class Chains(RuleBasedStateMachine):
    """Pushes as a connector makes them: a prefix from its head, in batches; fetches of its tail.

    Two openings of one directory take turns, and either is opened anew at times. What one has read
    it marks when it evicts, when it is told to and when it is closed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="moonstep-chains-"))
        self.now_ns = 1_700_000_000 * SECOND_NS
        self.stores = [self.opened(), self.opened()]
        self.parents: list[int | None] = []

    def opened(self) -> CheckedInspection:
        capacity_bytes = ROOM_OBJECTS * ON_DISK
        directory = DirectoryStore(self.root, capacity_bytes, clock=lambda: self.now_ns)
        directory._reads._delay_s = 3600.0
        return CheckedInspection(directory)

    @initialize(choices=st.lists(st.integers(0, NODES), min_size=NODES, max_size=NODES))
    def make_tree(self, choices: list[int]) -> None:
        """Mostly chains, now and then a branch or a new head."""
        for node, choice in enumerate(choices):
            self.parents.append(node - 1 if choice >= node else choice)
        self.parents[0] = None
        for node in range(1, NODES):
            if choices[node] == 0:
                self.parents[node] = None

    def path(self, node: int) -> list[int]:
        found: list[int] = []
        at: int | None = node
        while at is not None:
            found.append(at)
            at = self.parents[at]
        return found[::-1]

    def present(self) -> set[int]:
        there = self.stores[0].contains([key(node) for node in range(NODES)])
        return {node for node, is_there in enumerate(there) if is_there}

    @rule(node=nodes, which=st.integers(0, 1), batch=st.integers(1, 9))
    def push(self, node: int, which: int, batch: int) -> None:
        missing = [each for each in self.path(node) if each not in self.present()]
        for start in range(0, len(missing), batch):
            items = [self.transfer(each) for each in missing[start : start + batch]]
            answers = self.stores[which].put(items)
            assert set(answers) <= {Put.STORED, Put.NO_SPACE}
            self.now_ns += SECOND_NS // 10
            if Put.NO_SPACE in answers:
                assert len(self.path(node)) > 1
                return

    def transfer(self, node: int) -> Transfer:
        parent = self.parents[node]
        spans = outgoing(key(node), payload(node, NBYTES), cuts=(1000,)).spans
        return Transfer(key(node), spans, None if parent is None else key(parent))

    @rule(node=nodes, which=st.integers(0, 1), skipped=st.integers(0, 10))
    def fetch(self, node: int, which: int, skipped: int) -> None:
        there = self.present()
        wanted = [incoming(key(each), NBYTES) for each in self.path(node)[skipped:]]
        answers = self.stores[which].get([transfer for transfer, _ in wanted])
        for each, answer, (_, memory) in zip(
            self.path(node)[skipped:], answers, wanted, strict=True
        ):
            assert answer is (Get.HIT if each in there else Get.MISS)
            assert answer is Get.MISS or memory == payload(each, NBYTES)

    @rule(seconds=st.sampled_from([0.001, 1.0, 10.0, 3600.0]))
    def wait(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND_NS)

    @rule(which=st.integers(0, 1))
    def mark_reads(self, which: int) -> None:
        directory = self.stores[which]._inner
        assert isinstance(directory, DirectoryStore)
        directory.mark_reads()

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = self.opened()

    @invariant()
    def no_tail_without_its_head(self) -> None:
        there = self.present() if self.parents else set()
        for node in there:
            parent = self.parents[node]
            assert parent is None or parent in there

    @invariant()
    def no_byte_too_many(self) -> None:
        assert self.stores[0].usage().used_bytes <= ROOM_OBJECTS * ON_DISK

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.root)


Chains.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestChains = Chains.TestCase
