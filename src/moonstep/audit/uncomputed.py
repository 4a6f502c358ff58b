"""Uncomputed blocks: a defect of the engine itself, kept apart from the connector's.

Under the priority policy vLLM can preempt a request in the very `schedule()` that gave it
blocks. Full blocks carry their hash from allocation on, so these return to the pool with a
hash and without ever having been computed, and a later request can hit them. That happens
without any connector; the bench counts it, puts the right bytes there, and goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Uncomputed:
    """Which blocks carry a hash that no step has computed."""

    def __init__(self, scheduler: Any) -> None:
        self.blocks: set[int] = set()
        self._fresh: dict[str, set[int]] = {}
        self._preempted: list[str] = []
        self._pool = scheduler.kv_cache_manager.block_pool
        manager = scheduler.kv_cache_manager
        manager.allocate_slots = self._watch_allocation(manager.allocate_slots)
        scheduler._preempt_request = self._watch_preemption(scheduler._preempt_request)

    def new_step(self) -> None:
        """A `schedule()` begins."""
        self._fresh.clear()
        self._preempted.clear()

    def after_schedule(self) -> None:
        """A `schedule()` is over: fresh blocks of its victims stay uncomputed."""
        for name in self._preempted:
            for block in self._fresh.pop(name, ()):
                if self._pool.blocks[block].block_hash is not None:
                    self.blocks.add(block)

    def _watch_allocation(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_slots(request: Any, *args: Any, **keywords: Any) -> Any:
            blocks = allocate(request, *args, **keywords)
            if blocks is not None:
                fresh = {
                    block.block_id
                    for group in blocks.blocks
                    for block in group
                    if not block.is_null
                }
                self.blocks -= fresh
                for name in self._preempted:
                    self._fresh.get(name, set()).difference_update(fresh)
                self._fresh.setdefault(request.request_id, set()).update(fresh)
            return blocks

        return allocate_slots

    def _watch_preemption(self, preempt: Callable[..., Any]) -> Callable[..., Any]:
        def preempt_request(request: Any, *args: Any, **keywords: Any) -> Any:
            self._preempted.append(request.request_id)
            return preempt(request, *args, **keywords)

        return preempt_request
