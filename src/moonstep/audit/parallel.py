"""Parallel state: lets several ranks of one engine live in one process.

Connectors ask vLLM's parallel state for their rank (`get_tensor_model_parallel_rank`
and others), and code in the engine's hooks asks for the current forward context and the
current connector. Both are module globals there; here they are set around each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm import forward_context as forward_context_module
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import ForwardContext


@dataclass(frozen=True, slots=True)
class Group:
    """The part of vLLM's `GroupCoordinator` that can be asked without a network."""

    rank: int
    rank_in_group: int
    world_size: int
    local_rank: int
    ranks: list[int]
    unique_name: str = "audit"

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    @property
    def first_rank(self) -> int:
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        return self.ranks[-1]

    def barrier(self) -> None:
        """Ranks of the bench run one after the other: there is nothing to wait for."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: `rank` of all, `shard` in tensor parallel, `stage` in pipeline."""

    rank: int
    shard: int
    stage: int
    shards: int
    stages: int

    def groups(self) -> dict[str, Group]:
        """Names of the globals in `vllm.distributed.parallel_state`, and what they are set to."""
        first = self.stage * self.shards
        alone = Group(self.rank, 0, 1, self.rank, [self.rank])
        return {
            "_TP": Group(
                self.rank,
                self.shard,
                self.shards,
                self.rank,
                list(range(first, first + self.shards)),
            ),
            "_PP": Group(
                self.rank,
                self.stage,
                self.stages,
                self.rank,
                [stage * self.shards + self.shard for stage in range(self.stages)],
            ),
            "_WORLD": Group(
                self.rank,
                self.rank,
                self.shards * self.stages,
                self.rank,
                list(range(self.shards * self.stages)),
            ),
            "_DP": alone,
            "_DCP": alone,
            "_PCP": alone,
        }


def places(shards: int, stages: int) -> list[Place]:
    """All ranks, in vLLM's order: stages outermost."""
    return [
        Place(stage * shards + shard, shard, stage, shards, stages)
        for stage in range(stages)
        for shard in range(shards)
    ]


class Surroundings:
    """The globals of one rank; `with surroundings:` puts them in place."""

    def __init__(self, place: Place, layers: dict[str, Any]) -> None:
        self._groups = {
            name: group for name, group in place.groups().items() if hasattr(parallel_state, name)
        }
        self.forward_context = ForwardContext(
            no_compile_layers=layers, attn_metadata={}, slot_mapping={}
        )
        self.connector: Any = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Set the globals for the time of a call, and put back what was there."""
        before = {name: getattr(parallel_state, name) for name in self._groups}
        agent = kv_transfer_state._KV_CONNECTOR_AGENT
        context = forward_context_module._forward_context
        for name, group in self._groups.items():
            setattr(parallel_state, name, group)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        forward_context_module._forward_context = self.forward_context
        try:
            yield
        finally:
            for name, group in before.items():
                setattr(parallel_state, name, group)
            kv_transfer_state._KV_CONNECTOR_AGENT = agent
            forward_context_module._forward_context = context
