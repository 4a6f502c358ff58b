"""``moonstep bench schedule``: which cases, their bounds, and the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod
from rich.table import Table

from moonstep.bench import pending
from moonstep.bench.joint import Lost, joint_hit_us
from moonstep.bench.schedule import Measured, decode, lookup, measured, prompt

RUNNING: Final = (64, 256, 1024, 2048, 4096)
PROMPT_TOKENS: Final = (8 << 10, 32 << 10, 128 << 10, 1 << 20)
SAVES_RUNNING: Final = 256
SAVES_TOKENS: Final = 32 << 10
PARTS: Final = ("idle", "fill", "saves", "prompt", "lookup", "joint", "pending")
PENDING_STEPS: Final = 100
JOINT_TOKENS: Final = 128 << 10
JOINT_WINDOWS: Final = 5
JOINT_SAMPLES: Final = 25


@dataclass(frozen=True, slots=True)
class Bound:
    """What a case may cost Moonstep in either capture mode."""

    time_us: float
    wire_bytes: int | None = None

    def holds(self, measured: Measured) -> bool:
        """Whether ``measured`` stays within it."""
        few_bytes = self.wire_bytes is None or (measured.wire_bytes or 0) <= self.wire_bytes
        return measured.time_us <= self.time_us and few_bytes

    def __str__(self) -> str:
        sent = "" if self.wire_bytes is None else f", {as_bytes(self.wire_bytes)}"
        return as_time(self.time_us) + sent


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: its figures, and Moonstep's bound if there is one."""

    measured: list[Measured]
    bound: Bound | None


def cases(parts: tuple[str, ...], *, rounds: int, stock: bool) -> Iterator[Case]:
    """Run the chosen ``parts`` (of ``PARTS``), one case after the other."""
    for running in RUNNING:
        for fills, part, bound_us in ((False, "idle", 30.0), (True, "fill", 400.0)):
            if part in parts:
                found = decode(running, fills=fills, stock=stock, rounds=rounds)
                yield Case(found, Bound(bound_us) if running == 2048 else None)
    if "saves" in parts:
        found = decode(
            SAVES_RUNNING,
            fills=True,
            stock=stock,
            rounds=rounds,
            context_tokens=SAVES_TOKENS,
            saves_decode=True,
        )
        yield Case(found, Bound(500.0, 20_000))
    for tokens in PROMPT_TOKENS:
        for aged in (False, True):
            if "prompt" in parts:
                found = prompt(tokens, aged=aged, stock=stock)
                yield Case(found, Bound(40_000.0, 4_000_000) if tokens == 1 << 20 else None)
    for tokens in PROMPT_TOKENS:
        if "lookup" in parts:
            yield Case(lookup(tokens), Bound(500.0) if tokens == 128 << 10 else None)
    if "joint" in parts:
        yield from _joint()
    if "pending" in parts:
        yield from (Case(_pending(cost), None) for cost in pending.measure(PENDING_STEPS))


def _joint() -> Iterator[Case]:
    """One answer over one group of full attention and five of windows."""
    for lost in Lost:
        times = joint_hit_us(JOINT_TOKENS, JOINT_WINDOWS, JOINT_SAMPLES, lost)
        case = f"joint hit {JOINT_TOKENS:,}, 6 groups, {lost.value}"
        yield Case([measured(case, "Moonstep", times)], Bound(1000.0))


def _pending(cost: pending.PendingCost) -> list[Measured]:
    case = f"schedule(), {cost.pending} pending"
    return [
        measured(case, "vLLM, all", cost.schedule_us),
        measured(case, "of it ours", cost.hooks_us),
    ]


def as_table(found: list[Case]) -> Table:
    """All cases, one line a half."""
    title = (
        "Time of the scheduler half's hooks in a step (of a prompt: in all its steps);\n"
        "Moonstep with lazy and eager capture, vLLM's own connector beside it"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("case", "capture", "time", "sent", "bound"):
        justify: JustifyMethod = "right" if heading in ("time", "sent") else "left"
        table.add_column(heading, justify=justify, no_wrap=heading == "case")
    for case in found:
        for number, one in enumerate(case.measured):
            table.add_row(
                one.case if number == 0 else "",
                one.half.removeprefix("Moonstep "),
                as_time(one.time_us),
                "" if one.wire_bytes is None else as_bytes(one.wire_bytes),
                _verdict(case.bound, one),
                end_section=number == len(case.measured) - 1,
            )
    return table


def as_time(us: float) -> str:
    """A time in the unit that fits.

    >>> as_time(12.3), as_time(123.4), as_time(45_678.0), as_time(1.5e6)
    ('12.3 us', '123 us', '45.7 ms', '1,500 ms')
    """
    if us < 100:
        return f"{us:.1f} us"
    if us < 10_000:
        return f"{us:,.0f} us"
    return f"{us / 1e3:.1f} ms" if us < 100_000 else f"{us / 1e3:,.0f} ms"


def as_bytes(count: int) -> str:
    """A number of bytes in the decimal unit that fits.

    >>> as_bytes(229), as_bytes(20_000), as_bytes(306_380_004)
    ('229 B', '20.0 kB', '306.4 MB')
    """
    if count < 1000:
        return f"{count} B"
    return f"{count / 1e3:,.1f} kB" if count < 1_000_000 else f"{count / 1e6:,.1f} MB"


def _verdict(bound: Bound | None, measured: Measured) -> str:
    if bound is None or not measured.half.startswith("Moonstep"):
        return ""
    return f"{bound}: " + ("[green]holds[/]" if bound.holds(measured) else "[red]fails[/]")
