"""Rank: a stand-in for one worker and its model runner.

It takes scheduler outputs in the order in which an engine's worker gets them, keeps
block tables as `GPUModelRunner._update_states` does, and calls the connector's worker
hooks in the order of `KVConnectorModelRunnerMixin._get_kv_connector_output` (runner V1)
or `vllm.v1.worker.gpu.kv_connector.ActiveKVConnector` (runner V2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.outputs import KVConnectorOutput

from moonstep.audit.findings import Kind
from moonstep.audit.recurrent import RecurrentStates
from moonstep.audit.reporter import HookError
from moonstep.audit.work import RequestWork, Step, next_states_of, states_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonstep.audit.kvmemory import Positions, RankMemory
    from moonstep.audit.oracle import States
    from moonstep.audit.parallel import Surroundings
    from moonstep.audit.shape import Shape


class Rank:
    """One worker: its memory, its block tables and its half of the connector (or None)."""

    def __init__(
        self,
        memory: RankMemory,
        surroundings: Surroundings,
        connector: Any,
        shape: Shape,
        report: Callable[[Kind, str, str | None], None],
        forgive: Callable[[int], bool],
    ) -> None:
        self.memory = memory
        self.connector = connector
        self.tables: dict[str, list[list[int]]] = {}
        self.loading: dict[str, frozenset[int]] = {}
        self._surroundings = surroundings
        self._v2 = shape.runner == "v2"
        self._defers_finalize = shape.drafts > 0 and not self._v2
        self._report = report
        self._forgive = forgive
        self._allowed: frozenset[int] = frozenset()
        self._states = RecurrentStates(memory, self.tables, self._expect)

    def execute(self, step: Step, output: Any, works: list[RequestWork]) -> Any:
        """Run one step; the `KVConnectorOutput`, or None without a connector."""
        self._look("between steps")
        for load in step.async_loads:
            self.loading[load.request] = self.loading.get(load.request, frozenset()) | load.blocks
        with self._surroundings.active():
            if self.connector is None:
                self._update_tables(output)
                self._states.carry_over(step, works)
                self._forward(step, works)
                return None
            if self._v2:
                return self._execute_v2(step, output, works)
            return self._execute_v1(step, output, works)

    def _execute_v1(self, step: Step, output: Any, works: list[RequestWork]) -> Any:
        metadata = output.kv_connector_metadata
        self._call("handle_preemptions", metadata)
        self._update_tables(output)
        self._states.carry_over(step, works)
        self._call("bind_connector_metadata", metadata)
        self._load_before(step, output, {})
        self._forward(step, works)
        self._load_after(output, {})
        deferred = self._defers_finalize and bool(works)
        if not deferred:
            self._call("wait_for_save")
        result = self._results(output)
        if deferred:
            self._call("wait_for_save")
        self._call("clear_connector_metadata")
        return result

    def _execute_v2(self, step: Step, output: Any, works: list[RequestWork]) -> Any:
        metadata = output.kv_connector_metadata
        self._update_tables(output)
        self._states.carry_over(step, works)
        self._call("handle_preemptions", metadata)
        self._call("bind_connector_metadata", metadata)
        keywords: dict[str, Any] = {}
        if works:
            keywords = {
                "scheduler_output": output,
                "request_state_indices": np.arange(len(works)),
                "request_ids": [work.request for work in works],
                "num_tokens": step.tokens,
            }
        self._load_before(step, output, keywords)
        self._forward(step, works)
        self._call("finish_forward")
        self._load_after(output, keywords)
        self._call("wait_for_save")
        result = self._results(output)
        self._call("clear_connector_metadata")
        return result

    def _load_before(self, step: Step, output: Any, keywords: dict[str, Any]) -> None:
        if not output.has_sync_kv_loads:
            return
        self._allowed = frozenset().union(*(load.blocks for load in step.sync_loads))
        self._call("start_load_kv", self._surroundings.forward_context, **keywords)

    def _load_after(self, output: Any, keywords: dict[str, Any]) -> None:
        if not output.has_sync_kv_loads:
            self._call("start_load_kv", self._surroundings.forward_context, **keywords)

    def _results(self, output: Any) -> Any:
        result = KVConnectorOutput()
        transfers = self._call("get_transfer_results", output.finished_req_ids)
        result.finished_sending = transfers.finished_sending or None
        result.finished_recving = transfers.finished_recving or None
        result.failed_recving = transfers.failed_recving
        result.invalid_block_ids = self._call("get_block_ids_with_load_errors")
        result.kv_connector_stats = self._call("get_kv_connector_stats")
        result.kv_cache_events = self._call("get_kv_connector_kv_cache_events")
        result.kv_connector_worker_meta = self._call("build_connector_worker_meta")
        for request in transfers.finished_recving:
            self.loading.pop(request, None)
        return result

    def _call(self, hook: str, *args: Any, **keywords: Any) -> Any:
        try:
            answer = getattr(self.connector, hook)(*args, **keywords)
        except Exception as error:
            raise HookError(f"{hook} on rank {self.memory.rank}") from error
        self._look(hook)
        return answer

    def _look(self, where: str) -> None:
        """Report a write to any block that no load of this moment may touch."""
        changed = self.memory.changed_blocks()
        if not changed:
            return
        allowed = self._allowed.union(*self.loading.values())
        if stray := changed - allowed:
            self._report(
                Kind.STRAY_WRITE,
                f"rank {self.memory.rank}: blocks {sorted(stray)} were written in or before "
                f"{where}; loads of this moment may write {sorted(allowed)}",
                None,
            )

    def _update_tables(self, output: Any) -> None:
        self._states.end_lives(output)
        for request in output.finished_req_ids:
            self.tables.pop(request, None)
        if output.new_block_ids_to_zero:
            self.memory.zero(output.new_block_ids_to_zero)
        if output.kv_cache_block_copies:
            self.memory.copy_blocks(output.kv_cache_block_copies)
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids)
        cached = output.scheduled_cached_reqs
        for request, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request in cached.resumed_req_ids:
                self.tables[request] = list(block_ids)
            elif block_ids is not None:
                # In place, as runner V1 does: the lists belong to an earlier scheduler output.
                for table, more in zip(self.tables[request], block_ids, strict=True):
                    table.extend(more)

    def _forward(self, step: Step, works: list[RequestWork]) -> None:
        layers = self.memory.layers
        # Recurrent layers call no hooks: only the attention function does.
        hooked = [layer for layer in layers if not self.memory.is_recurrent[layer.group]]
        if self.connector is not None and works:
            for layer in hooked:
                self._call("wait_for_layer_load", layer.name)
        self._allowed = frozenset()
        if not works:
            return
        for work in works:
            self._states.check(step, work)  # before it is overwritten in place
        placed = [self._place(step, works, group) for group in range(len(self.memory.layers_of))]
        for layer in layers:
            blocks, slots, states = placed[layer.group]
            if layer.is_draft:
                states = np.concatenate([next_states_of(work) ^ step.salt for work in works])
            self.memory.write(layer, blocks, slots, states)
        for group, (blocks, slots, states) in enumerate(placed):
            self.memory.commit(group, blocks, slots, states)
        if self.connector is not None:
            for layer in hooked:
                self._call("save_kv_layer", layer.name, self.memory.tensors[layer.name], None)
        for work in works:
            for group in range(len(placed)):
                self._check_prefix(step, work, group)
        self._states.settle(works)

    def _place(
        self, step: Step, works: list[RequestWork], group: int
    ) -> tuple[Positions, Positions, States]:
        """Blocks, slots and salted states of all that a step writes in one group."""
        if self.memory.is_recurrent[group]:
            return self._states.place(step, works, group)
        tokens = self.memory.block_tokens[group]
        blocks, slots, states = [], [], []
        for work in works:
            positions = np.arange(work.start, work.stop)
            table = np.array(self.tables[work.request][group], np.int64)
            blocks.append(table[positions // tokens])
            slots.append(positions % tokens)
            states.append(states_of(work) ^ step.salt)
        return np.concatenate(blocks), np.concatenate(slots), np.concatenate(states)

    def _check_prefix(self, step: Step, work: RequestWork, group: int) -> None:
        """Report tokens that this work attends to and whose KV is not the oracle's.

        The null block never holds anybody's KV, so a window that reaches into it is reported.
        """
        if work.start == 0 or self.memory.is_recurrent[group]:
            return
        tokens = self.memory.block_tokens[group]
        table = np.array(self.tables[work.request][group], np.int64)
        window = self.memory.window_tokens[group]
        first = 0 if window is None else max(0, work.start - window + 1)
        positions = np.arange(first, work.start)
        blocks = table[positions // tokens]
        states = work.sequence.states(first, work.start) ^ step.salt
        self._expect(work, group, positions, blocks, positions % tokens, states)

    def _expect(
        self,
        work: RequestWork,
        group: int,
        positions: Positions,
        blocks: Positions,
        slots: Positions,
        states: States,
    ) -> None:
        """Report tokens whose bytes are not the oracle's, and not for the engine's own fault."""
        wrong = self.memory.wrong_tokens(group, blocks, slots, states)
        if len(wrong) == 0:
            return
        forgiven = np.array([self._forgive(int(block)) for block in blocks[wrong]])
        pardoned = wrong[forgiven]
        if len(pardoned):
            self.memory.repair(group, blocks[pardoned], slots[pardoned], states[pardoned])
        wrong = wrong[~forgiven]
        if len(wrong):
            detail = self._describe(work, group, positions[wrong], blocks[wrong])
            self._report(Kind.WRONG_KV, detail, work.request)

    def _describe(
        self, work: RequestWork, group: int, positions: Positions, blocks: Positions
    ) -> str:
        where = f"rank {self.memory.rank} group {group}: of {work.start} computed tokens"
        held = sorted(set(blocks.tolist()))
        if self.memory.is_recurrent[group]:
            return f"{where}, the state after token {positions[0]} is not in block {held[0]}"
        entries = sorted({int(p) // self.memory.block_tokens[group] for p in positions})
        return (
            f"{where}, tokens {_ranges(positions.tolist())} (table entries {entries}, blocks "
            f"{held}) do not hold the KV of this prefix"
        )


def _ranges(numbers: list[int]) -> str:
    """Numbers as ranges.

    >>> _ranges([4, 5, 6, 9])
    '4-6, 9'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
