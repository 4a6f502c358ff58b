"""Sizes of ``moonstep bench multiturn``, and the engines it compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from moonstep.demo.plan import DemoPlan

KV_CONVERSATIONS: Final = 4
HOST_SHARES: Final = (1, 4)
_NULL_BLOCKS: Final = 1
"""vLLM keeps the first block of its KV memory for itself."""


@dataclass(frozen=True, slots=True)
class MultiturnPlan:
    """One engine's part: ``conversations`` that take ``turns`` in the order of ``seed``."""

    engine: DemoPlan
    conversations: int = 20
    turns: int = 8
    user_tokens: int = 112
    answer_tokens: int = 16
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data; ``from_json`` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """The plan that ``to_json`` wrote."""
        return cls(**{**raw, "engine": DemoPlan.from_json(raw["engine"])})

    def environment(self) -> dict[str, str]:
        return self.engine.environment()


@dataclass(frozen=True, slots=True)
class Row:
    """One engine of the comparison."""

    name: str
    plan: MultiturnPlan


def rows(
    model: str, cpus: tuple[int, ...], token_bytes: int, seed: int, conversations: int, turns: int
) -> list[Row]:
    """No connector, Moonstep with a host cache of 1 and 4 times the KV memory, and beside each an
    engine without a connector whose KV memory has those bytes in addition.

    ``token_bytes`` is the KV of one token. KV memory holds ``KV_CONVERSATIONS`` conversations.
    """
    sizes = MultiturnPlan(_engine(model, cpus, 1, 1), conversations, turns, seed=seed)
    tokens = turns * (sizes.user_tokens + sizes.answer_tokens)
    block_tokens = sizes.engine.block_tokens
    blocks = KV_CONVERSATIONS * -(-tokens // block_tokens)
    block_bytes = block_tokens * token_bytes

    def row(name: str, kv_blocks: int, host_blocks: int = 0) -> Row:
        engine = _engine(model, cpus, kv_blocks, tokens, host_blocks * block_bytes)
        return Row(name, MultiturnPlan(engine, conversations, turns, seed=seed))

    listed = [row("no connector", blocks)]
    for share in HOST_SHARES:
        listed.append(row(f"Moonstep, host cache {share} x KV memory", blocks, share * blocks))
        listed.append(row(f"no connector, {1 + share} x KV memory", (1 + share) * blocks))
    return listed


def _engine(
    model: str, cpus: tuple[int, ...], kv_blocks: int, tokens: int, host_bytes: int = 0
) -> DemoPlan:
    return DemoPlan(
        model=model,
        with_moonstep=host_bytes > 0,
        cpus=cpus,
        block_tokens=32,
        kv_blocks=kv_blocks + _NULL_BLOCKS,
        max_model_tokens=tokens,
        step_tokens=max(tokens, 2048),
        host_cache=f"{host_bytes}B",
    )
