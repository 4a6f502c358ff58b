"""What a long prompt takes of the host cache where most layers look through a sliding window.

The real scheduler of the installed vLLM drives both halves over real (small) KV memory, so blocks
are counted, not computed, and every hit is a load whose bytes were compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moonstep.audit.engine import Engine
from moonstep.audit.engineconfig import ConnectorChoice
from moonstep.audit.groupsets import block_bytes
from moonstep.audit.history import Arrive, Event, Reset
from moonstep.audit.shape import Shape

if TYPE_CHECKING:
    from moonstep.audit.inspector import Inspector

BUDGET_TOKENS = 8_192
ROOM_TOKENS = 1_024
"""What a request may have beyond the prompt."""


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """A model of one full-attention layer to ``windows`` layers of ``window_tokens``.

    A prompt is computed once, then sent again, extended, and sent with another ending from each
    of the tokens ``diverging``. ``interval_tokens`` is Moonstep's ``retention_interval``.
    """

    prompt_tokens: int = 32_768
    windows: int = 5
    window_tokens: int = 1_024
    interval_tokens: int = 8_192
    block_tokens: int = 16
    answer_tokens: int = 64
    diverging: tuple[int, ...] = (6_000, 12_288, 20_000, 30_000)

    @property
    def whole_blocks(self) -> int:
        """Blocks of the prompt in all groups."""
        return (1 + self.windows) * (self.prompt_tokens // self.block_tokens)

    def shape(self) -> Shape:
        """An engine that holds the prompt and an answer."""
        max_tokens = self.prompt_tokens + ROOM_TOKENS
        groups = 1 + self.windows
        return Shape(
            groups="+".join(["full", *["window"] * self.windows]),
            layers=1,
            heads=1,
            seats=2,
            block_tokens=self.block_tokens,
            blocks=groups * (max_tokens // self.block_tokens + 1) + 1,
            budget_tokens=min(BUDGET_TOKENS, max_tokens),
            max_tokens=max_tokens,
            window_tokens=self.window_tokens,
        )


@dataclass(frozen=True, slots=True)
class Hit:
    """How much of a prompt came from the host cache, and how much would if all were kept."""

    what: str
    tokens: int
    whole_tokens: int

    @property
    def lost_tokens(self) -> int:
        return self.whole_tokens - self.tokens


@dataclass(slots=True)
class MemoryFigures:
    """What was counted; ``group_blocks`` are those kept of the prompt once it is answered.

    ``prefill_peak_blocks`` and ``decode_peak_blocks`` are the most that were in use at a time,
    the latter while ``answer_tokens`` tokens were decoded.
    """

    case: MemoryCase
    group_blocks: list[int] = field(default_factory=list)
    prefill_peak_blocks: int = 0
    decode_peak_blocks: int = 0
    hits: list[Hit] = field(default_factory=list)

    @property
    def kept_blocks(self) -> int:
        return sum(self.group_blocks)

    @property
    def share(self) -> float:
        """Of what the prompt would take if every group were kept whole."""
        return self.kept_blocks / self.case.whole_blocks


def measure(case: MemoryCase) -> MemoryFigures:
    """Count, on one engine.

    Raises:
        moonstep.audit.findings.Stop: Moonstep served or kept a wrong byte.
    """
    shape = case.shape()
    extra = {
        "host_cache": 3 * shape.blocks * block_bytes(shape),
        "capture": "eager",
        "retention_interval": case.interval_tokens,
    }
    engine = Engine(shape, ConnectorChoice("MoonstepConnector", extra))
    # Asked here only: the bench would compare all that is kept after every step.
    kept, engine.inspector = engine.inspector, None
    assert kept is not None
    counter = _Counter(engine, kept)
    figures = MemoryFigures(case)
    counter.finish(_prompt("first", case.block_tokens))
    before, first = counter.in_use, counter.by_group()
    peak = counter.finish(_prompt("prompt", case.prompt_tokens))
    figures.prefill_peak_blocks = peak - before
    figures.group_blocks = [now - then for now, then in zip(counter.by_group(), first, strict=True)]
    ends = [("sent again", case.prompt_tokens, 0), ("extended by 100", case.prompt_tokens + 100, 0)]
    ends += [(f"another from token {at:,}", case.prompt_tokens, at) for at in case.diverging]
    for number, (what, tokens, diverges) in enumerate(ends):
        shared = diverges or min(tokens, case.prompt_tokens)
        whole = min(shared, tokens - 1) // case.block_tokens * case.block_tokens
        event = _prompt(f"r{number}", tokens, shared=shared, variant=number)
        figures.hits.append(Hit(what, counter.loaded(event), whole))
    before = counter.in_use
    peak = counter.finish(_prompt("answer", case.prompt_tokens, output=case.answer_tokens))
    figures.decode_peak_blocks = peak - before
    engine.shutdown()
    engine.threads.close()
    return figures


class _Counter:
    """An engine, with the blocks that are in use while it runs."""

    def __init__(self, engine: Engine, kept: Inspector) -> None:
        self._engine = engine
        self._kept = kept

    @property
    def in_use(self) -> int:
        counts = self._kept.counts()
        return counts["written"] + counts["planned"]

    def by_group(self) -> list[int]:
        """Blocks that are kept, of each group."""
        blocks = [0] * self._engine.shape.group_count
        for one in self._kept.kept():
            blocks[one.group] += 1
        return blocks

    def finish(self, event: Event) -> int:
        """Let a request run to its end; the most blocks that were in use at a time."""
        self._engine.apply(event)
        peak = 0
        while self._engine.step():
            peak = max(peak, self.in_use)
        for _ in range(4):
            self._engine.empty_step()
        return peak

    def loaded(self, event: Event) -> int:
        """Tokens that were loaded for a request, once the engine has lost all it had."""
        self._engine.apply(Reset())
        counts = self._engine.seam.counts
        before = counts.loaded_tokens
        self.finish(event)
        return counts.loaded_tokens - before


def _prompt(name: str, tokens: int, shared: int = 0, variant: int = 0, output: int = 1) -> Arrive:
    """A request of one family; the very first one finds no memory reported yet."""
    family = 2 if name == "first" else 1
    return Arrive(name, family, tokens, shared=shared or tokens, variant=variant, output=output)
