"""Recurrent state on one rank: what a model runner does with the blocks of such layers.

A block of a recurrent group holds one state: that after all tokens up to a block's end, or the
running one. In vLLM's "align" mode a request's table is sparse. A step works in the table entry
in which it ends and, with drafts, in one more for each of them. If the request's state lies in
another entry it is carried over first: before the connector's loads, on both runners
(`mamba_utils.preprocess_mamba`, `MambaHybridModelState.preprocess_state`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moonstep.audit.work import sample_tokens, states_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonstep.audit.kvmemory import Positions, RankMemory
    from moonstep.audit.oracle import States
    from moonstep.audit.work import RequestWork, Step

    Check = Callable[[RequestWork, int, Positions, Positions, Positions, States], None]


@dataclass(frozen=True, slots=True)
class Running:
    """Where a request's state is: `accepted` - 1 table entries beyond `entry`."""

    entry: int
    accepted: int = 1

    @property
    def source(self) -> int:
        return self.entry + self.accepted - 1


class RecurrentStates:
    """The recurrent groups of one rank.

    `check(work, group, positions, blocks, slots, states)` reports what is not the oracle's.
    """

    def __init__(
        self, memory: RankMemory, tables: dict[str, list[list[int]]], check: Check
    ) -> None:
        self.groups = [group for group, is_so in enumerate(memory.is_recurrent) if is_so]
        self._memory = memory
        self._tables = tables
        self._check = check
        self._running: dict[str, Running] = {}
        self._block_tokens = memory.block_tokens[self.groups[0]] if self.groups else 1

    def end_lives(self, output: Any) -> None:
        """Forget where the states of requests are that end, or begin, with this step."""
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for request in (*output.finished_req_ids, *(output.preempted_req_ids or ()), *resumed):
            self._running.pop(request, None)
        for new in output.scheduled_new_reqs:
            self._running.pop(new.req_id, None)

    def carry_over(self, step: Step, works: Sequence[RequestWork]) -> None:
        """Bring each request's state into the entry in which the step works."""
        for work in works if self.groups else ():
            entry = -(-work.stop // self._block_tokens) - 1
            running = self._running.get(work.request)
            if running is None:
                running = Running((work.start - 1) // self._block_tokens)
            if running.entry not in (-1, entry):
                self._check_one(step, work, running)
                self._copy(work.request, running.source, entry)
                running = Running(entry)
            self._running[work.request] = Running(entry, running.accepted)

    def check(self, step: Step, work: RequestWork) -> None:
        """Report a state that this work goes on from and that is not the oracle's."""
        if self.groups and work.start:
            self._check_one(step, work, self._running[work.request])

    def place(
        self, step: Step, works: Sequence[RequestWork], group: int
    ) -> tuple[Positions, Positions, States]:
        """Blocks, slots and salted states that this step writes: one for each draft, and one."""
        blocks, states = [], []
        for work in works:
            first = self._running[work.request].entry
            count = 1 + len(work.draft_tokens)
            blocks.append(np.array(self._tables[work.request][group][first : first + count]))
            states.append(states_of(work)[-count:] ^ step.salt)
        joined = np.concatenate(blocks)
        return joined, np.zeros_like(joined), np.concatenate(states)

    def settle(self, works: Sequence[RequestWork]) -> None:
        """Note how many tokens were accepted; a state at a block's end goes to that block."""
        for work in works if self.groups else ():
            running = self._running[work.request]
            accepted = max(1, len(sample_tokens(work)))
            known = work.stop - len(work.draft_tokens)
            boundary = (known + accepted - 1) // self._block_tokens * self._block_tokens
            if boundary >= known:
                beyond, target = boundary - known, boundary // self._block_tokens - 1
                if (beyond, target) != (0, running.entry):
                    self._copy(work.request, running.entry + beyond, target)
                if target == running.entry:
                    accepted = 1
            self._running[work.request] = Running(running.entry, accepted)

    def _check_one(self, step: Step, work: RequestWork, running: Running) -> None:
        states = work.sequence.states(work.start - 1, work.start) ^ step.salt
        position = np.array([work.start - 1])
        for group in self.groups:
            block = np.array([self._tables[work.request][group][running.source]])
            self._check(work, group, position, block, np.zeros(1, np.int64), states)

    def _copy(self, request: str, source: int, target: int) -> None:
        for group in self.groups:
            table = self._tables[request][group]
            self._memory.copy_entry(group, table[source], table[target])
