"""A store that is left alone while it is unwell or full, so that trouble costs one wait, not many.

``GuardedStore`` stands before a store that other machines may take away. A call that finds it
unwell opens a circuit breaker; from then on every call is refused at once, and a thread of its own
asks the store again and again, so that no request pays for the asking. Calls that are long under
way raise a doubt, and the same thread asks whether the store answers at all. Puts to a full store
pause.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol

from moonstep.stores.base import (
    Get,
    Key,
    Put,
    Store,
    StoreUnwell,
    Transfer,
    discard,
    register,
)
from moonstep.stores.health import Breaker, Pause, State

logger = logging.getLogger(__name__)

DOUBT_S: Final = 3.0
"""A call that takes longer raises a doubt."""
TICK_S: Final = 0.5
"""How often the thread looks at calls under way."""


class ProbedStore(Store, Protocol):
    """A store that can be asked how it is."""

    def probe(self) -> None:
        """Connect if there is no connection, and see whether the store answers.

        Raises ``StoreUnwell`` when it does not. Answers soon, also when other calls hang.
        """
        ...


@dataclass(frozen=True, slots=True)
class Health:
    """How a guarded store is, and what has been kept from it since the start.

    ``opened`` and ``paused`` count changes for the worse; ``refused_calls`` and ``held_puts``
    (objects) what did not reach the store because of them; ``probes`` how often it was asked.
    """

    state: State
    is_full: bool
    opened: int
    paused: int
    probes: int
    refused_calls: int
    held_puts: int


class GuardedStore:
    """A :class:`Store` around a store that can be probed. All its verbs may raise ``StoreUnwell``.

    It begins unwell, with a probe at once; ``wait_well`` waits for it. One line is logged for each
    change, and the ``StoreUnwell`` that it raises say that they are told already.
    """

    def __init__(
        self,
        inner: ProbedStore,
        name: str,
        breaker: Breaker | None = None,
        pause: Pause | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._name = name
        self._breaker = Breaker(state=State.OPEN) if breaker is None else breaker
        self._pause = Pause() if pause is None else pause
        self._clock = clock
        self._changed = threading.Condition()
        self._reason: StoreUnwell = StoreUnwell(f"{name} has not answered yet")
        self._told_well: bool | None = None
        self._well_since_s = clock()
        self._tokens = count()
        self._calls: dict[int, float] = {}
        self._next_doubt_s = 0.0
        self._probes = self._refused = self._held = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name="moonstep-health", daemon=True)
        self._thread.start()

    def health(self) -> Health:
        """How it is now."""
        with self._changed:
            return Health(
                self._breaker.state,
                self._pause.is_on,
                self._breaker.opened,
                self._pause.paused,
                self._probes,
                self._refused,
                self._held,
            )

    def wait_well(self, timeout_s: float) -> StoreUnwell | None:
        """Wait until the store is well, or a probe has said that it is not; then what it said."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._breaker.state is State.CLOSED or self._probes > 0, timeout_s
            )
            return None if self._breaker.state is State.CLOSED else self._reason

    def register(self, memory: memoryview) -> None:
        register(self._inner, memory)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._calling():
            return self._inner.contains(keys)

    def put(self, items: Sequence[Transfer]) -> list[Put]:
        with self._changed:
            may_put = self._pause.begin_put(self._clock())
            if not may_put:
                self._held += len(items)
        if not may_put:
            return [Put.NO_SPACE] * len(items)
        answers: Sequence[Put] = ()
        try:
            with self._calling():
                answers = self._inner.put(items)
        finally:
            self._end_put(answers)
        return list(answers)

    def get(self, items: Sequence[Transfer]) -> list[Get]:
        with self._calling():
            return self._inner.get(items)

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        with self._calling():
            return self._inner.remove(keys)

    def discard(self, keys: Sequence[Key]) -> list[bool]:
        with self._calling():
            return discard(self._inner, keys)

    def close(self) -> None:
        """Ends the thread, unless it is in a call, and closes the store: that may block."""
        self.stop_asking()
        self._inner.close()

    def stop_asking(self) -> None:
        """End the thread, after a probe under way. From now on all calls go through."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        with self._changed:
            if self._breaker.state is not State.CLOSED and not self._is_closed:
                self._refused += 1
                refusal = StoreUnwell(str(self._reason))
                refusal.is_told = True
                raise refusal
            token, start_s = next(self._tokens), self._clock()
            self._calls[token] = start_s
        found: StoreUnwell | None = None
        try:
            yield
        except StoreUnwell as error:
            error.is_told, found = True, error
            raise
        finally:
            with self._changed:
                del self._calls[token]
                self._note(found, start_s)

    def _note(self, error: StoreUnwell | None, start_s: float) -> None:
        """A call has come back. One that began before the last trouble ended is no news."""
        if error is None:
            self._breaker.succeeded()
        elif (
            start_s >= self._well_since_s
            and not self._is_closed
            and self._breaker.failed(self._clock())
        ):
            self._tell(error)

    def _end_put(self, answers: Sequence[Put]) -> None:
        stored = sum(answer is Put.STORED for answer in answers)
        refused = sum(answer is Put.NO_SPACE for answer in answers)
        with self._changed:
            if not self._pause.end_put(stored, refused, self._clock()):
                return
            if self._pause.is_on:
                logger.warning("moonstep: %s is full: pushes pause until it has room", self._name)
            else:
                logger.warning("moonstep: %s has room again", self._name)

    def _watch(self) -> None:
        """The thread: probe when it is time, and when a call is under way for too long."""
        while True:
            with self._changed:
                until_s = self._breaker.until_probe_s(self._clock())
                self._changed.wait(TICK_S if until_s is None else min(until_s, TICK_S))
                if self._is_closed:
                    return
                now_s = self._clock()
                doubts = self._has_doubts(now_s)
                if not doubts and not self._breaker.begin_probe(now_s):
                    continue
            self._probed(self._probe())

    def _probe(self) -> StoreUnwell | None:
        try:
            self._inner.probe()
        except StoreUnwell as error:
            return error
        except Exception as error:
            logger.exception("moonstep: asking %s how it is failed", self._name)
            return StoreUnwell(f"asking it failed: {error!r}")
        return None

    def _probed(self, error: StoreUnwell | None) -> None:
        with self._changed:
            self._probes += 1
            now_s = self._clock()
            if self._breaker.state is State.HALF_OPEN:
                self._breaker.end_probe(error is None, now_s)
                if error is None:
                    self._well_since_s = now_s
                self._tell(error)
            elif error is not None and self._breaker.failed(now_s):
                self._tell(error)
            self._changed.notify_all()

    def _has_doubts(self, now_s: float) -> bool:
        """Whether to ask, while all seems well, since a call is under way for too long."""
        start_s = next(iter(self._calls.values()), now_s)
        if self._breaker.state is not State.CLOSED or now_s - start_s < DOUBT_S:
            return False
        if now_s < self._next_doubt_s:
            return False
        self._next_doubt_s = now_s + DOUBT_S
        return True

    def _tell(self, error: StoreUnwell | None) -> None:
        """One line, if this is a change. ``error`` says why the store is unwell."""
        if error is not None:
            self._reason = error
        told, self._told_well = self._told_well, error is None
        if told == self._told_well:
            return
        if error is not None:
            logger.warning(
                "moonstep: %s is unwell, requests go on without it: %s", self._name, error
            )
        elif told is None:
            logger.info("moonstep: %s is connected", self._name)
        else:
            logger.warning("moonstep: %s is well again", self._name)
