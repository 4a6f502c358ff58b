"""The figures of two engines, with and without Moonstep, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine's medians and sums, from the plain data its child process sent."""

    start_s: float
    first_visit_s: float
    """Time to first token of a prompt nobody has seen; like the next two, a median over prompts."""
    repeat_s: float
    """... that the engine's own prefix cache still has: the floor."""
    return_s: float
    """... sent again after the engine's own cache has given its blocks away."""
    restored_bytes: float
    """Bytes restored for one returning prompt."""
    memcpy_bytes_per_s: float
    connector_s: float
    """Time inside the connector over all first visits."""
    step_s: float
    """Time of the engine's steps over all first visits."""
    gap_median_s: float
    gap_worst_s: float
    """While prompts come back that the engine has given away."""
    gap_floor_s: float
    """The worst while one comes back that the engine still has: what an admission takes anyway."""
    storm_s: float
    preemptions: int
    storm_restored_tokens: int
    answers: tuple[tuple[int, ...], ...]
    """Tokens of each prompt's first answer; the same prompts in every engine."""
    later_answers: tuple[tuple[int, ...], ...]
    """Tokens of the answers to the first of these prompts when they came back, round by round."""
    storm_answers: tuple[tuple[int, ...], ...]

    @classmethod
    def from_raw(cls, raw: dict[str, Any]) -> Self:
        """From what ``moonstep.demo.child.measure`` returned, after its way through JSON."""
        firsts, repeats, returns = (
            raw[name] for name in ("first_visits", "immediate_repeats", "returns")
        )
        storm = raw["storm"]
        return cls(
            start_s=raw["start_s"],
            first_visit_s=_median(a["first_token_s"] for a in firsts),
            repeat_s=_median(a["first_token_s"] for a in repeats),
            return_s=_median(a["first_token_s"] for a in returns),
            restored_bytes=_median(a["connector"]["restored_bytes"] for a in returns),
            memcpy_bytes_per_s=_median(raw["memcpy_bytes_per_s"]),
            connector_s=sum(a["connector"]["connector_s"] for a in firsts),
            step_s=sum(a["step_s"] for a in firsts),
            gap_median_s=_median(raw["gaps_s"]),
            gap_worst_s=max(raw["gaps_s"]),
            gap_floor_s=max(raw["floor_gaps_s"]),
            storm_s=storm["wall_s"],
            preemptions=storm["preemptions"],
            storm_restored_tokens=storm["connector"]["restored_tokens"],
            answers=_tokens(firsts),
            later_answers=_tokens(returns) + _tokens(repeats),
            storm_answers=tuple(tuple(tokens) for tokens in storm["tokens"]),
        )


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """Two engine processes, one after the other, on one store: the same prompts in both."""

    cold_s: float
    """Time to first token in the first one, which nobody had stored anything for: a median."""
    warm_s: float
    """... in the second one, which finds in the store what the first one left."""
    restored_tokens: tuple[int, ...]
    """Of each prompt in the second one."""
    cold_answers: tuple[tuple[int, ...], ...]
    warm_answers: tuple[tuple[int, ...], ...]

    @classmethod
    def from_raw(cls, first: dict[str, Any], second: dict[str, Any]) -> Self:
        """From what ``moonstep.demo.child.measure_store`` returned in the two processes."""
        cold, warm = first["visits"], second["visits"]
        return cls(
            cold_s=_median(a["first_token_s"] for a in cold),
            warm_s=_median(a["first_token_s"] for a in warm),
            restored_tokens=tuple(a["connector"]["restored_tokens"] for a in warm),
            cold_answers=_tokens(cold),
            warm_answers=_tokens(warm),
        )


def _tokens(answers: Sequence[dict[str, Any]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(answer["tokens"]) for answer in answers)


def _median(values: Sequence[float] | Any) -> float:
    listed = list(values)
    return float(statistics.median(listed)) if listed else 0.0


@dataclass(frozen=True, slots=True)
class Check:
    """One promise of the demo, with its bound and whether this run kept it."""

    name: str
    value: float
    bound: float
    unit: str
    holds: bool
    about_answers: bool = False
    """Wrong answers are a defect; a late one may be a busy machine."""


def checks(plain: EngineFigures, moonstep: EngineFigures) -> list[Check]:
    """The demo's promises, judged on the figures of an engine without and one with Moonstep."""
    return [
        _warm_is_near_the_floor(moonstep),
        _share_of_the_step(moonstep),
        _worst_gap(moonstep),
        *_storm(plain, moonstep),
        _answers(plain, moonstep),
    ]


def store_checks(stored: StoreFigures) -> list[Check]:
    """What a store promises: a new engine process is warm, and answers as the old one did."""
    bound = 0.35 * stored.cold_s
    holds = min(stored.restored_tokens) > 0 and stored.warm_s <= bound
    name = "first token after a restart <= 0.35 x cold"
    return [
        Check(name, stored.warm_s * 1e3, bound * 1e3, "ms", holds),
        _equal("answers that differ after a restart", stored.cold_answers, stored.warm_answers),
    ]


def _warm_is_near_the_floor(figures: EngineFigures) -> Check:
    copy_s = figures.restored_bytes / (figures.memcpy_bytes_per_s or 1.0)
    bound = figures.repeat_s + 1.5 * copy_s
    holds = figures.restored_bytes > 0 and figures.return_s <= bound
    name = "first token from Moonstep <= floor + 1.5 x bytes / memcpy rate"
    return Check(name, figures.return_s * 1e3, bound * 1e3, "ms", holds)


def _share_of_the_step(figures: EngineFigures) -> Check:
    share = 100 * figures.connector_s / figures.step_s
    name = "time inside the connector, share of cold prefill steps"
    return Check(name, share, 3.0, "%", 0 < share <= 3.0)


def _worst_gap(figures: EngineFigures) -> Check:
    bound = 2 * figures.gap_median_s
    name = "worst token gap of the other request <= 2 x its median"
    return Check(name, figures.gap_worst_s * 1e3, bound * 1e3, "ms", figures.gap_worst_s <= bound)


def _storm(plain: EngineFigures, moonstep: EngineFigures) -> list[Check]:
    return [
        _equal("storm: answers that differ", plain.storm_answers, moonstep.storm_answers),
        _at_least_one("storm: preemptions", moonstep.preemptions),
        _at_least_one("storm: tokens restored", moonstep.storm_restored_tokens),
    ]


def _answers(plain: EngineFigures, figures: EngineFigures) -> Check:
    """However often a prompt comes, its answer is the first one of an engine without Moonstep."""
    returned = len(figures.later_answers) // 2
    expected = plain.answers + 2 * plain.answers[:returned]
    name = "answers that differ from those without a connector"
    return _equal(name, expected, figures.answers + figures.later_answers)


def _equal(
    name: str, ours: tuple[tuple[int, ...], ...], theirs: tuple[tuple[int, ...], ...]
) -> Check:
    differing = sum(a != b for a, b in zip(ours, theirs, strict=True))
    return Check(name, differing, 0, "", differing == 0, about_answers=True)


def _at_least_one(name: str, count: int) -> Check:
    return Check(name, count, 1, "", count >= 1)
