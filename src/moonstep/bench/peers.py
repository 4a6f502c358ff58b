"""``moonstep bench peers``: a warm start over Mooncake Store, with Moonstep and with vLLM's own.

Memory and master belong to other processes, so what an engine stored outlives it. Each connector
first fills the store with its own objects; then engines start in turns, and every prompt they get
has to come from the store. How long the first token takes is compared, as a ratio of means with its
95 % interval: single starts differ by a tenth.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table

from moonstep.bench.engines import run_engine
from moonstep.bench.growth import Growth, GrowthWatch
from moonstep.bench.intervals import Interval, ratio_of_means
from moonstep.bench.mooncake_pool import open_pool, own_master, url_of
from moonstep.bench.peers_plan import MOONSTEP, STOCK, PeerPlan
from moonstep.stores.urls import StoreUrl

CHILD: Final = "moonstep.bench.peers_child"
_BUFFER_BYTES: Final = 256 << 20
_SEGMENT: Final = "2GiB"
"""Both connectors' objects: five prompts of 2,500 tokens each, in float32."""


@dataclass(frozen=True, slots=True)
class Warm:
    """One engine's times. ``first_token_s`` is the sum over its prompts."""

    first_token_s: float
    settle_s: float
    tokens: tuple[tuple[int, ...], ...]

    @classmethod
    def from_raw(cls, raw: dict[str, Any]) -> Self:
        """From what the child process sent."""
        tokens = tuple(tuple(answer) for answer in raw["tokens"])
        return cls(sum(raw["first_token_s"]), raw["settle_s"], tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The engines that filled the store, and those that started on it, by connector."""

    cold: dict[str, Warm]
    warm: dict[str, list[Warm]]
    growth: dict[str, Growth]
    """What the former stored, by the master's own metrics."""

    @property
    def ratio(self) -> Interval:
        """Moonstep's time to the first tokens over that of vLLM's connector."""
        ours, theirs = (
            [start.first_token_s for start in self.warm[name]] for name in (MOONSTEP, STOCK)
        )
        return ratio_of_means(ours, theirs, paired=True)

    @property
    def answers_differ(self) -> int:
        """Answers that are not those of the engine that filled the store with Moonstep."""
        expected = self.cold[MOONSTEP].tokens
        starts = [*self.cold.values(), *(one for many in self.warm.values() for one in many)]
        return sum(
            answer != other
            for start in starts
            for answer, other in zip(start.tokens, expected, strict=True)
        )


def plans(
    model: str, cpus: tuple[int, ...], url: str, settings: Path, chunk_tokens: int | None = None
) -> dict[str, PeerPlan]:
    """The engines that are compared: equal but for their connector."""
    ours = PeerPlan(
        model=model,
        with_moonstep=True,
        cpus=cpus,
        store=url,
        prompt_count=4,
        connector=MOONSTEP,
        client_settings=str(settings),
        chunk_tokens=chunk_tokens,
    )
    return {MOONSTEP: ours, STOCK: replace(ours, with_moonstep=False, store=None, connector=STOCK)}


def run_peers(
    model: Path,
    cpus: tuple[int, ...],
    starts: int,
    chunk_tokens: int | None,
    out: Path,
    progress: Progress,
) -> Outcome:
    """Fill the store once with each connector, then ``starts`` rounds of two engines; who goes
    first changes with every round."""
    cold: dict[str, Warm] = {}
    warm: dict[str, list[Warm]] = {MOONSTEP: [], STOCK: []}
    growth: dict[str, Growth] = {}

    def start(plan: PeerPlan, name: str) -> Warm:
        log = out / f"peers-{name.replace(' ', '-').replace(',', '').lower()}.log"
        return Warm.from_raw(run_engine(name, plan, CHILD, log, progress))

    with (
        tempfile.TemporaryDirectory(prefix="moonstep-peers-") as folder,
        own_master() as master,
        open_pool(url_of(master), _SEGMENT),
    ):
        url = url_of(master)
        settings = Path(folder, "mooncake.json")
        settings.write_text(json.dumps(_client_settings(url)))
        compared = plans(str(model), cpus, url, settings, chunk_tokens)
        for connector, plan in compared.items():
            with GrowthWatch(master.metrics) as watch:
                cold[connector] = start(plan, f"filling, {connector}")
            growth[connector] = watch.growth
        for number in range(starts):
            order = (MOONSTEP, STOCK) if number % 2 == 0 else (STOCK, MOONSTEP)
            for connector in order:
                name = f"start {number + 1} of {starts}, {connector}"
                warm[connector].append(start(compared[connector], name))
    return Outcome(cold, warm, growth)


def _client_settings(url: str) -> dict[str, Any]:
    """What vLLM's connector reads: the same master, and no memory given either."""
    return {
        "mode": "standalone-store",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": StoreUrl.parse(url).host,
        "protocol": "tcp",
        "global_segment_size": 0,
        "local_buffer_size": _BUFFER_BYTES,
    }


def as_table(found: Outcome) -> Table:
    """Means of both, and the ratio with its interval."""
    title = f"{len(found.warm[MOONSTEP])} alternating warm starts of each over one Mooncake Store"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("")
    for heading in (MOONSTEP, STOCK, "ratio [95 %]"):
        table.add_column(heading, justify="right")
    means = [
        statistics.fmean(start.first_token_s for start in found.warm[name])
        for name in (MOONSTEP, STOCK)
    ]
    table.add_row("warm, first tokens", *(f"{mean:.2f} s" for mean in means), str(found.ratio))
    for row, pick in (("cold, first tokens", "first_token_s"), ("until stored", "settle_s")):
        values = [getattr(found.cold[name], pick) for name in (MOONSTEP, STOCK)]
        table.add_row(row, *(f"{value:.2f} s" for value in values), "")
    grown = [found.growth[name] for name in (MOONSTEP, STOCK)]
    table.add_row("put, cold", *(f"{made.nbytes / 2**20:,.0f} MiB" for made in grown), "")
    table.add_row("first put to last", *(f"{made.seconds:.2f} s" for made in grown), "")
    table.add_row("answers that differ", "", f"{found.answers_differ}", "")
    return table
