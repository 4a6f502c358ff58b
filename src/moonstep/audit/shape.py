"""Shape: everything about the engine under the connector that a history can vary."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

Runner = Literal["v1", "v2"]
Policy = Literal["fcfs", "priority"]
Executor = Literal["in-process", "multi-process"]
Groups = Literal["full", "full+window", "window"]

LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
"""Memory layouts of `vllm.v1.kv_cache_layout.KVCacheLayout` whose blocks are contiguous a layer."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The engine of one history.

    `lag`: workers run a step only when its result is needed, after the next one
    was scheduled (asynchronous scheduling with workers in other processes).
    `ranks` is tensor parallel size, `stages` pipeline stages; both halves and
    all ranks live in this process. With fewer `heads` than ranks, each is on
    several of them. `drafts` is the number of draft tokens a step.
    """

    runner: Runner = "v1"
    asynchronous: bool = False
    policy: Policy = "fcfs"
    chunked: bool = True
    prefix_caching: bool = True
    executor: Executor = "in-process"
    lag: bool = False
    ranks: int = 1
    stages: int = 1
    groups: Groups = "full"
    layout: str = "LBNHC"
    block_tokens: int = 4
    blocks: int = 24
    seats: int = 4
    budget_tokens: int = 32
    max_tokens: int = 64
    drafts: int = 0
    layers: int = 2
    heads: int = 2
    window_tokens: int = 10

    def __post_init__(self) -> None:
        usable_tokens = (self.blocks - 1) // self.group_count * self.block_tokens
        if usable_tokens < self.max_tokens + self.block_tokens:
            raise ValueError(f"{self.blocks} blocks do not hold {self.max_tokens} tokens")
        if not self.chunked and self.budget_tokens < self.max_tokens:
            raise ValueError("without chunked prefill the budget must hold a whole prompt")

    @property
    def group_count(self) -> int:
        """KV cache groups, which draw their blocks from one pool."""
        return 2 if "+" in self.groups else 1

    @property
    def copies(self) -> int:
        """Consecutive ranks that hold the same bytes: those with a copy of the same head."""
        return max(1, self.ranks // self.heads)

    def as_dict(self) -> dict[str, Any]:
        """Only what differs from the default shape."""
        default = Shape.__dataclass_fields__
        return {k: v for k, v in asdict(self).items() if v != default[k].default}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Shape:
        """The reverse of `as_dict`; an unknown name is an error."""
        known = {f.name for f in fields(cls)}
        if unknown := raw.keys() - known:
            raise ValueError(f"unknown shape settings: {', '.join(sorted(unknown))}")
        return cls(**raw)

    def label(self) -> str:
        """A short name for tables: what differs from the default.

        >>> Shape(runner="v2", asynchronous=True, policy="priority").label()
        'v2 async priority'
        """
        words: list[str] = [self.runner, "async" if self.asynchronous else "sync", self.policy]
        if self.lag:
            words.append("lag")
        if self.executor != "in-process":
            words.append("mp")
        if self.ranks * self.stages > 1:
            words.append(f"tp{self.ranks}pp{self.stages}")
        if self.drafts:
            words.append(f"drafts{self.drafts}")
        if self.groups != "full":
            words.append(self.groups)
        return " ".join(words)


def matrix(base: Shape) -> Iterator[Shape]:
    """The eight shapes every scenario runs in: runner x scheduling x policy."""
    for runner in ("v1", "v2"):
        for asynchronous in (False, True):
            for policy in ("fcfs", "priority"):
                yield replace(base, runner=runner, asynchronous=asynchronous, policy=policy)


def random_shape(rng: random.Random, groups: Groups = "full") -> Shape:
    """A shape in which memory is tight, so that preemption and eviction are common."""
    block_tokens = rng.choice((2, 4, 4, 8))
    max_blocks = rng.randint(6, 12)
    asynchronous = rng.random() < 0.5
    executor: Executor = "multi-process" if rng.random() < 0.5 else "in-process"
    chunked = rng.random() < 0.75
    max_tokens = max_blocks * block_tokens
    return Shape(
        runner=rng.choice(("v1", "v2")),
        asynchronous=asynchronous,
        policy=rng.choice(("fcfs", "priority")),
        chunked=chunked,
        prefix_caching=rng.random() < 0.85,
        executor=executor,
        lag=asynchronous and executor == "multi-process" and rng.random() < 0.5,
        ranks=2 if executor == "multi-process" and rng.random() < 0.4 else 1,
        groups=groups,
        layout=rng.choice(LAYOUTS),
        block_tokens=block_tokens,
        blocks=(2 if "+" in groups else 1) * max_blocks + rng.randint(3, 10),
        seats=rng.randint(2, 5),
        budget_tokens=rng.choice((8, 16, 32)) if chunked else max_tokens,
        max_tokens=max_tokens,
        drafts=rng.choice((0, 0, 0, 1, 3)),
    )
