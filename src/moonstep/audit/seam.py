"""Seam: what passes between the real scheduler and the connector's scheduler half.

The hooks are wrapped on the instance, so the class and its `isinstance` facts stay as they are.
The seam checks every answer against the contract of `KVConnectorBase_V1`, remembers which blocks
a load may write, and marks an exception as the connector's own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moonstep.audit.findings import Kind
from moonstep.audit.reporter import HookError
from moonstep.audit.work import SyncLoad

if TYPE_CHECKING:
    from collections.abc import Callable

WRAPPED = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "reset_cache",
    "has_pending_push_work",
    "has_pending_block_frees",
    "take_events",
    "get_kv_connector_stats",
)


@dataclass(slots=True)
class Answer:
    """The latest answer of `get_num_new_matched_tokens` for a request."""

    local_tokens: int
    tokens: int | None
    asynchronous: bool


@dataclass(slots=True)
class SeamCounts:
    """How often what happened; scenarios assert on these."""

    lookups: int = 0
    pending: int = 0
    hits: int = 0
    sync_loads: int = 0
    async_loads: int = 0
    loaded_tokens: int = 0
    dropped_promises: int = 0


@dataclass(slots=True)
class Seam:
    """Watches one connector's scheduler half; `None` as connector means there is none."""

    connector: Any
    group_tokens: list[int]
    report: Callable[[Kind, str, str | None], None]
    counts: SeamCounts = field(default_factory=SeamCounts)
    passed_over: Counter[str] = field(default_factory=Counter)
    sync_loads: list[SyncLoad] = field(default_factory=list)
    async_loads: list[SyncLoad] = field(default_factory=list)
    _answers: dict[str, Answer] = field(default_factory=dict)

    def install(self) -> None:
        """Wrap the hooks of the connector."""
        if self.connector is None:
            return
        for name in WRAPPED:
            original = getattr(self.connector, name, None)
            if original is not None:
                setattr(self.connector, name, self._wrap(name, original))

    def take_loads(self) -> tuple[list[SyncLoad], list[SyncLoad]]:
        """Loads given since the last step was built: synchronous ones, asynchronous ones."""
        loads = self.sync_loads, self.async_loads
        self.sync_loads, self.async_loads = [], []
        return loads

    def forget(self, request: str) -> None:
        """The request ended: its id may be used again."""
        self._answers.pop(request, None)
        self.passed_over.pop(request, None)

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        after = getattr(self, f"_after_{name}", None)

        def wrapper(*args: Any, **keywords: Any) -> Any:
            try:
                answer = original(*args, **keywords)
            except Exception as error:
                raise HookError(name) from error
            if after is not None:
                after(answer, *args, **keywords)
            return answer

        return wrapper

    def _after_get_num_new_matched_tokens(
        self, answer: Any, request: Any, num_computed_tokens: int
    ) -> None:
        name = request.request_id
        self.counts.lookups += 1
        tokens, asynchronous = answer
        self._answers[name] = Answer(num_computed_tokens, tokens, bool(asynchronous))
        if tokens is None:
            self.counts.pending += 1
            self.passed_over[name] += 1
            return
        self.passed_over.pop(name, None)
        self.counts.hits += tokens > 0
        total = num_computed_tokens + tokens
        if tokens < 0:
            self.report(Kind.BAD_ANSWER, f"promised {tokens} tokens", name)
        elif tokens == 0 and asynchronous:
            self.report(Kind.BAD_ANSWER, "promised an asynchronous load of 0 tokens", name)
        elif total > request.num_tokens or (total == request.num_tokens and not asynchronous):
            self.report(
                Kind.BAD_ANSWER,
                f"promised {tokens} tokens on top of {num_computed_tokens} "
                f"of a request of {request.num_tokens}",
                name,
            )

    def _after_update_state_after_alloc(
        self, _answer: Any, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        answer = self._answers.get(request.request_id)
        if num_external_tokens == 0:
            self.counts.dropped_promises += bool(answer is not None and answer.tokens)
            return
        if answer is None:
            return
        start = answer.local_tokens
        stop = start + num_external_tokens
        load = SyncLoad(
            request.request_id, start, stop, self._blocks(blocks.get_block_ids(), start, stop)
        )
        self.counts.loaded_tokens += num_external_tokens
        if answer.asynchronous:
            self.counts.async_loads += 1
            self.async_loads.append(load)
        else:
            self.counts.sync_loads += 1
            self.sync_loads.append(load)
        answer.tokens = 0

    def _blocks(self, tables: tuple[list[int], ...], start: int, stop: int) -> frozenset[int]:
        """Blocks that hold tokens `start` up to `stop`, in all groups; never the null block."""
        blocks: set[int] = set()
        for table, tokens in zip(tables, self.group_tokens, strict=True):
            blocks.update(table[start // tokens : -(-stop // tokens)])
        return frozenset(blocks - {0})

    def _after_request_finished(self, _answer: Any, request: Any, _block_ids: Any) -> None:
        self.forget(request.request_id)

    def _after_request_finished_all_groups(
        self, _answer: Any, request: Any, _block_ids: Any
    ) -> None:
        self.forget(request.request_id)
