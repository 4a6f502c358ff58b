"""When to leave a store alone: a circuit breaker for an unwell one, a pause for a full one.

Both are plain state machines. Time is an argument, and ``jitter`` gives numbers from 0 to 1, so
that servers that lost their store together do not all come back to it in the same instant.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

Jitter = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double from ``first_s`` up to ``most_s``; jitter adds up to ``spread`` of each."""

    first_s: float
    most_s: float
    spread: float = 0.5

    def wait_s(self, attempt: int, jitter: float) -> float:
        """The wait after so many attempts in vain, one or more.

        >>> backoff = Backoff(0.5, 4.0)
        >>> [backoff.wait_s(n, jitter=0.0) for n in (1, 2, 3, 4, 9)]
        [0.5, 1.0, 2.0, 4.0, 4.0]
        >>> backoff.wait_s(1, jitter=1.0)
        0.75
        """
        # 2.0 ** 1024 is too much for a float, and 30 doublings are more than anybody waits for.
        wait_s = min(self.most_s, self.first_s * 2.0 ** min(attempt - 1, 30))
        return wait_s * (1 + self.spread * jitter)


PROBES: Final = Backoff(first_s=0.5, most_s=4.0)
PUTS: Final = Backoff(first_s=0.5, most_s=4.0)
"""Short: a store whose memory comes back has to be filled soon, and a try costs one small put."""


class State(Enum):
    """Whether calls go through to the store."""

    CLOSED = "closed"
    """All do: the circuit is closed."""
    OPEN = "open"
    """None does, until a probe says that the store is well."""
    HALF_OPEN = "half-open"
    """None but the probe, which is on its way."""


@dataclass(slots=True)
class Breaker:
    """Opens when a call says that the store is unwell; closes when a probe says that it is not.

    Waits between probes grow until a *call* has succeeded, so a store whose probes are well and
    whose calls are not is asked less and less often. ``opened`` counts how often it opened.
    """

    backoff: Backoff = PROBES
    jitter: Jitter = random.random
    state: State = State.CLOSED
    opened: int = 0
    _attempts: int = 0
    _probe_at_s: float = 0.0

    def succeeded(self) -> None:
        """A call has come back, and the store was well."""
        if self.state is State.CLOSED:
            self._attempts = 0

    def failed(self, now_s: float) -> bool:
        """A call, or a probe of a store in doubt, says that it is unwell; whether that is news."""
        if self.state is not State.CLOSED:
            return False
        self.opened += 1
        self._open(now_s)
        return True

    def begin_probe(self, now_s: float) -> bool:
        """Whether to probe now; if so, ``end_probe`` has to follow."""
        if self.state is not State.OPEN or now_s < self._probe_at_s:
            return False
        self.state = State.HALF_OPEN
        return True

    def end_probe(self, is_well: bool, now_s: float) -> None:
        """What the probe found."""
        if self.state is not State.HALF_OPEN:
            raise ValueError(f"a probe ended that did not begin: {self.state.value}")
        if is_well:
            self.state = State.CLOSED
        else:
            self._open(now_s)

    def until_probe_s(self, now_s: float) -> float | None:
        """How long until a probe is due; ``None`` when none is."""
        return max(0.0, self._probe_at_s - now_s) if self.state is State.OPEN else None

    def _open(self, now_s: float) -> None:
        self.state = State.OPEN
        self._attempts += 1
        self._probe_at_s = now_s + self.backoff.wait_s(self._attempts, self.jitter())


@dataclass(slots=True)
class Pause:
    """Keeps puts from a store that has no room, but for one batch now and then that tries.

    ``paused`` counts how often it began.
    """

    backoff: Backoff = PUTS
    jitter: Jitter = random.random
    paused: int = 0
    _attempts: int = 0
    _try_at_s: float = 0.0

    @property
    def is_on(self) -> bool:
        return self._attempts > 0

    def begin_put(self, now_s: float) -> bool:
        """Whether a batch may go through now. One that tries keeps the others out meanwhile."""
        if not self.is_on:
            return True
        if now_s < self._try_at_s:
            return False
        self._try_at_s = now_s + self.backoff.most_s
        return True

    def end_put(self, stored: int, refused: int, now_s: float) -> bool:
        """What became of a batch's objects; whether the pause began or ended with it.

        A store that evicts may refuse some and take others: it is full when it took none.
        """
        was_on = self.is_on
        if stored:
            self._attempts = 0
        elif refused:
            self._attempts += 1
            self.paused += not was_on
            self._try_at_s = now_s + self.backoff.wait_s(self._attempts, self.jitter())
        else:
            self._try_at_s = min(self._try_at_s, now_s)  # nothing was learnt: the next may try
        return was_on != self.is_on
