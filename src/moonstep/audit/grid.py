"""Grid: group sets, block sizes, drafts and model runners, every one with every other."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from moonstep.audit import scenarios
from moonstep.audit.scenarios.hybrid import of_block
from moonstep.audit.scenarios.stage import BASE, REFUSED, Status
from moonstep.audit.shape import LONGER_TIMES, Cell, Groups, Runner, Shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from moonstep.audit.audit import Verdict

SETS: tuple[Groups, ...] = (
    "full", "full+window", "full+state", "window", "mla", "full+window+state",
)  # fmt: skip
BLOCK_TOKENS = (16, 32, 64)
RUNNERS: tuple[Runner, ...] = ("v1", "v2")
DRAFTS = 3
"""Draft tokens a step in scenarios of cells with drafts; histories draw one or three."""

SCENARIOS = ("round-trip", "round-trip-wide", "round-trip-interval", "answered")
"""What is played in each cell: what is kept has to be promised, whatever a block holds."""


def cells() -> Iterator[Cell]:
    """All cells, one after the other as they stand in a table.

    Beside blocks of one size there are those that the engine makes unequal: one kind of attention
    has blocks two or four times as long as the others. Those of a state are as long as the
    engine's `block_size`, and no other block is shorter than that.
    """
    for groups in SETS:
        kinds = dict.fromkeys(groups.split("+"))
        sizes = [(tokens, "", 2) for tokens in BLOCK_TOKENS]
        if len(kinds) > 1:
            attention = [kind for kind in kinds if kind != "state"]
            sizes += [
                (BLOCK_TOKENS[0], kind, times) for kind in attention for times in LONGER_TIMES
            ]
        for tokens, longer, times in sizes:
            for drafts in (False, True):
                for runner in RUNNERS:
                    yield Cell(groups, tokens, drafts, runner, longer, times)


def chosen(names: Iterable[str]) -> tuple[Cell, ...]:
    """Cells by name or by what a name begins with, up to a slash; all of them for "all".

    Raises:
        ValueError: for a name that no cell's begins with.
    """
    every = tuple(cells())
    wanted: set[Cell] = set()
    for name in names:
        found = [cell for cell in every if name == "all" or _begins(cell.name, name)]
        if not found:
            raise ValueError(f"no cell {name!r}; there are {every[0].name} to {every[-1].name}")
        wanted.update(found)
    return tuple(cell for cell in every if cell in wanted)


def _begins(name: str, start: str) -> bool:
    return f"{name}/".startswith(f"{start.rstrip('/')}/")


def shape_of(cell: Cell, number: int) -> Shape:
    """The engine of a cell's scenario, before its groups: scheduling and policy go round."""
    return replace(
        of_block(cell.block_tokens)(BASE),
        runner=cell.runner,
        drafts=DRAFTS if cell.drafts else 0,
        asynchronous=bool(number % 2),
        policy=("fcfs", "priority")[number // 2 % 2],
    )


def turn_of(name: str) -> int:
    """The number of a scenario in every cell, whichever others are played with it.

    >>> turn_of("round-trip"), turn_of("answered")
    (0, 3)
    """
    others = (one.name for one in scenarios.ALL if one.name not in SCENARIOS)
    return (*SCENARIOS, *others).index(name)


def stagings(cell: Cell, variants: Sequence[str], turn: int) -> Iterator[tuple[str, Shape]]:
    """Variant and shape of each run of a scenario in a cell; `turn` is the scenario's number.

    Each runner has half of the variants, the other half in the next turn; a single one is for both.
    """
    runner = RUNNERS.index(cell.runner)
    for number, variant in enumerate(variants):
        if len(variants) == 1 or (number + turn + runner) % 2 == 0:
            yield variant, shape_of(cell, number // 2 + turn + cell.drafts)


@dataclass(frozen=True, slots=True)
class Row:
    """What a cell came to: scenario runs and histories, and what they did together.

    `promised_tokens` were promised and given blocks; each was compared in every group when it was
    counted as computed. `refused` says why the connector does not start there, or nothing.
    `has_to_promise`: scenarios ran that do not pass without a promise (`SCENARIOS`).
    """

    cell: Cell
    runs: int
    histories: int
    steps: int
    promised_tokens: int
    findings: int
    not_reached: int
    refused: str = ""
    has_to_promise: bool = False

    @property
    def is_unproven(self) -> bool:
        """Whether nothing was promised although there was something to promise."""
        return self.has_to_promise and self.promised_tokens == 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"name": self.cell.name, "cell": asdict(self.cell)}


def row_of(verdict: Verdict) -> Row:
    """The row of an audit of one cell."""
    cell = verdict.order.cell
    assert cell is not None
    played = [r for r in verdict.results if r.status is not Status.NOT_APPLICABLE]
    histories = verdict.histories - verdict.counts["refused"]
    reasons = [r.reason for r in verdict.results if r.reason.startswith(REFUSED)]
    reasons.append(verdict.refusal)
    refused = "" if played or histories else reasons[0]
    ran = {r.scenario for r in verdict.results if r.counts.get("steps")}
    return Row(
        cell,
        len(played),
        histories,
        sum(r.counts.get("steps", 0) for r in played) + verdict.counts["steps"],
        sum(r.counts.get("loaded_tokens", 0) for r in played) + verdict.counts["loaded_tokens"],
        verdict.finding_count,
        verdict.not_reached_count,
        refused.removeprefix(REFUSED),
        not ran.isdisjoint(SCENARIOS),
    )
