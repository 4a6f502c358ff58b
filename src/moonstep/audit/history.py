"""History: a list of events, printable, replayable, and legal with any of them left out.

An event that does not apply when its turn comes (an abort of an id that is not there) does nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moonstep.audit.shape import Shape


@dataclass(frozen=True, slots=True)
class Step:
    """Let the engine run `count` steps, or fewer when it has nothing to do."""

    count: int = 1


@dataclass(frozen=True, slots=True)
class Arrive:
    """A request arrives: `tokens` prompt tokens, the first `shared` of them its family's.

    With `follows` its prompt begins with that request's prompt and output (the next turn of a chat)
    instead of the family's tokens, as far as `shared` goes.
    `skip_cache` asks for prompt log-probabilities, so that no cache may be read;
    `streaming` opens a session that goes on with `Extend` and ends with `Close`.
    """

    id: str
    family: int
    tokens: int
    shared: int = 0
    variant: int = 0
    output: int = 1
    priority: int = 0
    skip_cache: bool = False
    streaming: bool = False
    follows: str = ""


@dataclass(frozen=True, slots=True)
class Extend:
    """The next input of a streaming session."""

    id: str
    tokens: int
    variant: int = 0
    output: int = 1


@dataclass(frozen=True, slots=True)
class Close:
    """A streaming session gets no more input."""

    id: str


@dataclass(frozen=True, slots=True)
class Abort:
    """The client goes away; `late`: while the next step is being executed."""

    id: str
    late: bool = False


@dataclass(frozen=True, slots=True)
class Reset:
    """`reset_prefix_cache(reset_running_requests=running, reset_connector=connector)`."""

    running: bool = False
    connector: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """The store under the connector goes wrong, for some verbs, until the next such event.

    `kind` is one of `FAULTS`; without a store that can be told, nothing happens.
    """

    kind: str
    verbs: str = "put,get,contains"


FAULTS = (
    "none", "missing", "vanishing", "late", "short", "too few answers", "failing", "unwell",
    "broken", "lying", "flipping bits", "full", "hanging",
)  # fmt: skip
"""What can be wrong with a store; "none" ends a fault, and lets calls go on that hang."""

Event: TypeAlias = Step | Arrive | Extend | Close | Abort | Reset | Fault
_KINDS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind for kind in (Step, Arrive, Extend, Close, Abort, Reset, Fault)
}


def to_line(event: Event) -> str:
    """An event as a line of text.

    >>> to_line(Arrive("r1", family=2, tokens=17, output=3))
    'arrive id=r1 family=2 tokens=17 output=3'
    """
    words = [type(event).__name__.lower()]
    for spec in fields(event):
        value = getattr(event, spec.name)
        if value != spec.default:
            text = str(int(value) if isinstance(value, bool) else value).replace(" ", "-")
            words.append(f"{spec.name}={text}")
    return " ".join(words)


def from_line(line: str) -> Event:
    """The reverse of `to_line`; ValueError for a line that is none.

    >>> from_line("abort id=r1 late=1")
    Abort(id='r1', late=True)
    """
    name, *words = line.split()
    if name not in _KINDS:
        raise ValueError(f"unknown event: {line!r}")
    kind = _KINDS[name]
    types = {spec.name: str(spec.type) for spec in fields(kind)}
    values: dict[str, Any] = {}
    for word in words:
        key, _, text = word.partition("=")
        if key not in types:
            raise ValueError(f"unknown field {key!r} in {line!r}")
        values[key] = text if types[key] == "str" else int(text)
        if kind is Fault and key == "kind":
            values[key] = text.replace("-", " ")
        if types[key] == "bool":
            values[key] = bool(values[key])
    event: Event = kind(**values)
    return event


def to_text(events: Iterable[Event]) -> str:
    """Events, one a line."""
    return "\n".join(to_line(event) for event in events)


def from_text(text: str) -> list[Event]:
    """The reverse of `to_text`; blank lines and lines with # are left out."""
    lines = (line.strip() for line in text.splitlines())
    return [from_line(line) for line in lines if line and not line.startswith("#")]


class Generator:
    """Makes random events for one shape; the same seed makes the same events."""

    def __init__(self, shape: Shape, rng: random.Random) -> None:
        self._shape = shape
        self._rng = rng
        self._recent: list[str] = []
        self._sessions: list[str] = []
        self._count = 0

    def events(self, steps: int) -> list[Event]:
        """A history with about `steps` engine steps before its end."""
        events: list[Event] = []
        taken = 0
        while taken < steps:
            event = self._event()
            events.append(event)
            taken += event.count if isinstance(event, Step) else 0
        return events

    def _event(self) -> Event:
        roll = self._rng.random()
        if roll < 0.52:
            return Step(self._rng.choice((1, 1, 1, 2, 3, 8)))
        if roll < 0.84 or not self._recent:
            return self._arrive()
        if roll < 0.93:
            return Abort(self._rng.choice(self._recent[-8:]), self._rng.random() < 0.5)
        if roll < 0.955:
            return Reset(self._rng.random() < 0.6, self._rng.random() < 0.4)
        if roll < 0.98:
            return self._fault()
        if self._sessions:
            return self._session_event()
        return Step(2)

    def _arrive(self) -> Arrive:
        rng, shape = self._rng, self._shape
        if self._recent and rng.random() < 0.08:
            name = rng.choice(self._recent[-8:])
        else:
            self._count += 1
            name = f"r{self._count}"
        self._recent.append(name)
        output = rng.choice((1, 1, 2, 4, 8, shape.block_tokens * 3))
        room = shape.max_tokens - output
        if rng.random() < 0.5:
            tokens = shape.block_tokens * rng.randint(1, max(1, room // shape.block_tokens))
            tokens += rng.choice((0, 0, 1, -1))
        else:
            tokens = rng.randint(1, room)
        tokens = max(1, min(tokens, room))
        streaming = rng.random() < 0.06
        if streaming:
            tokens = max(1, tokens // 3)
            self._sessions.append(name)
        return Arrive(
            id=name,
            family=rng.randint(1, 3),
            tokens=tokens,
            shared=rng.choice((tokens, tokens, rng.randint(0, tokens))),
            variant=rng.randint(1, 3),
            output=output,
            priority=rng.randint(0, 3),
            skip_cache=rng.random() < 0.04,
            streaming=streaming,
            follows=rng.choice(self._recent[-6:]) if rng.random() < 0.15 else "",
        )

    def _fault(self) -> Fault:
        if self._rng.random() < 0.4:
            return Fault("none")
        verbs = self._rng.choice(("put", "get", "contains", "put,get,contains"))
        return Fault(self._rng.choice(FAULTS), verbs)

    def _session_event(self) -> Event:
        name = self._rng.choice(self._sessions[-3:])
        if self._rng.random() < 0.4:
            return Close(name)
        return Extend(
            name, self._rng.randint(1, 2 * self._shape.block_tokens), self._rng.randint(1, 3)
        )
