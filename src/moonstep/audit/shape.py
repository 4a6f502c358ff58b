"""Shape: everything about the engine under the connector that a history can vary."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

Runner = Literal["v1", "v2"]
Policy = Literal["fcfs", "priority"]
Drafter = Literal["ngram", "eagle", "mtp"]
Executor = Literal["in-process", "multi-process"]
Groups = str
"""KV cache groups as kinds joined by `+`; a kind that is named twice has two groups."""

KINDS = ("full", "window", "state", "mla")
GROUP_SETS = (
    "full", "window", "mla", "full+window", "full+state", "full+window+window",
    "full+state+state", "full+window+state",
)  # fmt: skip
"""The sets that are audited by name; any other of `KINDS` can be driven as well."""

LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
"""Memory layouts of `vllm.v1.kv_cache_layout.KVCacheLayout` whose blocks are contiguous a layer."""

LONGER_TIMES = (2, 4)
"""How many times as long as others the blocks of one kind can be."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The engine of one history.

    `lag`: workers run a step only when its result is needed, after the next one
    was scheduled (asynchronous scheduling with workers in other processes).
    `ranks` is tensor parallel size, `stages` pipeline stages; both halves and
    all ranks live in this process. With fewer `heads` than ranks, each is on
    several of them. `drafts` is the number of draft tokens a step.
    The drafters "eagle" and "mtp" have a layer with KV of its own; the engine knows its group for
    "mtp" only, and takes all groups for the drafter's with "eagle".

    Blocks of the kind `longer` hold `longer_times` as many tokens as `block_tokens`: so the engine
    makes them where layers need less memory a token than others (`unify_kv_cache_spec_page_size`).
    `match_tokens` is the engine's `prefix_match_unit`, 0 for its default: beside recurrent state,
    hits may end there.
    `interval_tokens` is the engine's `prefix_cache_retention_interval`: 0 keeps what a prompt sent
    again needs, None all of it.
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
    drafter: Drafter = "ngram"
    layers: int = 2
    heads: int = 2
    window_tokens: int = 10
    longer: str = ""
    longer_times: int = 2
    match_tokens: int = 0
    interval_tokens: int | None = 0

    def __post_init__(self) -> None:
        self._check_groups()
        usable_tokens = (self.blocks - 1) // self.group_count * self.block_tokens
        if usable_tokens < self.max_tokens + self.block_tokens:
            raise ValueError(f"{self.blocks} blocks do not hold {self.max_tokens} tokens")
        if not self.chunked and self.budget_tokens < self.max_tokens:
            raise ValueError("without chunked prefill the budget must hold a whole prompt")

    def _check_groups(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown:
            raise ValueError(f"unknown kind of group {unknown[0]!r}; there are: {', '.join(KINDS)}")
        if self.longer and (self.longer not in self.kinds or len(set(self.kinds)) == 1):
            raise ValueError(f"no group but {self.longer!r} to be longer than")
        if self.longer_times not in LONGER_TIMES:
            raise ValueError(f"blocks can be longer {LONGER_TIMES} times")
        if self.drafter != "ngram" and not self.drafts:
            raise ValueError("a drafter without drafts")
        if "state" in self.kinds and not (self.prefix_caching and self.chunked):
            raise ValueError("recurrent state needs prefix caching and chunked prefill")

    @property
    def kinds(self) -> list[str]:
        """The kind of each KV cache group."""
        return self.groups.split("+")

    @property
    def group_count(self) -> int:
        """KV cache groups, which draw their blocks from one pool."""
        return len(self.kinds) + (self.drafter != "ngram" and len(self.kinds) > 1)

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
        if self.drafter != "ngram":
            words.append(self.drafter)
        if self.groups != "full":
            words.append(self.groups)
        if self.longer:
            words.append(f"longer-{self.longer}" + "-x4" * (self.longer_times == 4))
        if self.match_tokens:
            words.append(f"match-{self.match_tokens}")
        if self.interval_tokens != 0:
            words.append(f"interval-{self.interval_tokens}")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Cell:
    """What is given of a shape, where the rest is left to chance: a place in the grid.

    Blocks of the kind `longer`, if there is one, are `longer_times` as long as the others'.
    """

    groups: Groups
    block_tokens: int
    drafts: bool
    runner: Runner
    longer: str = ""
    longer_times: int = 2

    @property
    def blocks(self) -> str:
        """The tokens of its blocks.

        >>> Cell("full", 32, False, "v1").blocks
        '32'
        >>> Cell("full+window", 16, True, "v2", "window").blocks
        '16,window=32'
        """
        if not self.longer:
            return str(self.block_tokens)
        return f"{self.block_tokens},{self.longer}={self.longer_times * self.block_tokens}"

    @property
    def name(self) -> str:
        """Its name on the command line.

        >>> Cell("full+window", 16, True, "v2", "window", 4).name
        'full+window/16,window=64/drafts/v2'
        """
        drafts = "drafts" if self.drafts else "plain"
        return f"{self.groups}/{self.blocks}/{drafts}/{self.runner}"


def lengthened(shape: Shape, kind: str, times: int = 2) -> Shape:
    """The same engine where the blocks of one kind are longer, with memory for as many of them."""
    return replace(
        shape,
        longer=kind,
        longer_times=times,
        max_tokens=times * shape.max_tokens,
        budget_tokens=times * shape.budget_tokens,
        blocks=times * shape.blocks,
    )


def matrix(base: Shape) -> Iterator[Shape]:
    """The eight shapes every scenario runs in: runner x scheduling x policy."""
    for runner in ("v1", "v2"):
        for asynchronous in (False, True):
            for policy in ("fcfs", "priority"):
                yield replace(base, runner=runner, asynchronous=asynchronous, policy=policy)


def random_shape(rng: random.Random, groups: Groups = "full", cell: Cell | None = None) -> Shape:
    """A shape in which memory is tight, so that preemption and eviction are common.

    With a cell its groups count, and all else that it gives.
    """
    block_tokens = cell.block_tokens if cell else rng.choice((2, 4, 4, 8))
    max_blocks = rng.randint(6, 12)
    asynchronous = rng.random() < 0.5
    executor: Executor = "multi-process" if rng.random() < 0.5 else "in-process"
    chunked = rng.random() < 0.75
    max_tokens = max_blocks * block_tokens
    budget_unit = max(8, block_tokens)
    shape = Shape(
        runner=cell.runner if cell else rng.choice(("v1", "v2")),
        asynchronous=asynchronous,
        policy=rng.choice(("fcfs", "priority")),
        chunked=chunked,
        prefix_caching=rng.random() < 0.85,
        executor=executor,
        lag=asynchronous and executor == "multi-process" and rng.random() < 0.5,
        ranks=2 if executor == "multi-process" and rng.random() < 0.4 else 1,
        layout=rng.choice(LAYOUTS),
        block_tokens=block_tokens,
        blocks=max_blocks + rng.randint(3, 10),
        seats=rng.randint(2, 5),
        budget_tokens=budget_unit * rng.choice((1, 2, 4)) if chunked else max_tokens,
        max_tokens=max_tokens,
        drafts=_random_drafts(rng, cell),
    )
    groups = cell.groups if cell else groups
    return shape if groups == "full" else _of_groups(shape, groups, rng, cell)


def _random_drafts(rng: random.Random, cell: Cell | None) -> int:
    if cell is None:
        return rng.choice((0, 0, 0, 1, 3))
    return rng.choice((1, 3)) if cell.drafts else 0


def _of_groups(shape: Shape, groups: Groups, rng: random.Random, cell: Cell | None) -> Shape:
    """The same engine with other groups: memory for each of them, windows, block sizes.

    Left out, because vLLM 0.32.0 goes wrong by itself there: blocks of states longer than others,
    and so many drafts that a step may pass two of their ends.
    """
    kinds = groups.split("+")
    with_state = "state" in kinds
    longer, times = (cell.longer, cell.longer_times) if cell else (_random_longer(rng, kinds), 2)
    passes_two = with_state and shape.block_tokens < 2 * (shape.drafts + 1)
    drafts = 0 if passes_two else shape.drafts
    unit = shape.block_tokens * (times if longer else 1)
    sparse = {"window", "state"} & set(kinds) and len(kinds) > 1
    max_tokens = unit * -(-shape.max_tokens // unit)
    blocks_each = max_tokens // shape.block_tokens
    return replace(
        shape,
        groups=groups,
        drafts=drafts,
        longer=longer,
        longer_times=times,
        prefix_caching=shape.prefix_caching or with_state,
        chunked=shape.chunked or with_state,
        max_tokens=max_tokens,
        blocks=(len(kinds) + (len(kinds) > 1)) * (blocks_each + 1) + shape.blocks - blocks_each,
        budget_tokens=max(shape.budget_tokens, max_tokens if not shape.chunked else 0),
        window_tokens=rng.choice((2, max(2, unit - 1), unit, unit + 1, 2 * unit + 3)),
        interval_tokens=rng.choice((0, 0, None, unit, 2 * unit)) if sparse else 0,
        drafter=rng.choice(("ngram", "eagle", "mtp")) if drafts and not cell else "ngram",
        match_tokens=rng.choice((0, shape.block_tokens // 2)) if with_state else 0,
    )


def _random_longer(rng: random.Random, kinds: list[str]) -> str:
    others = sorted(set(kinds) - {"state"})
    return rng.choice(("", rng.choice(others))) if len(set(kinds)) > 1 else ""
