"""A store that fails on command: what tests and audits put between Moonstep and a good store."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Final, TypeVar

from moonstep.stores.base import Get, Key, Put, Store, StoreUnwell, Transfer

LATE_S: Final = 0.02


class Fault(Enum):
    """What is wrong, from one call to the next."""

    NONE = "none"
    MISSING = "missing"
    """Nothing is found; what is put is accepted, and gone."""
    VANISHING = "vanishing"
    """``contains`` finds everything that is there, ``get`` finds nothing: evicted in between."""
    LATE = "late"
    """Every call takes ``late_s`` longer."""
    SHORT = "short"
    """The second half of each object does not arrive, or is not stored; the answer is success."""
    TOO_FEW = "too few answers"
    FAILING = "failing"
    """Every object is answered with failure."""
    UNWELL = "unwell"
    """Every call raises ``StoreUnwell``."""
    BROKEN = "broken"
    """Every call raises what no store may raise."""
    LYING = "lying"
    """Everything is there, stored and read, by its answers; not a byte moves."""
    FLIPPING = "flipping bits"
    """One bit of each object that is read is wrong."""
    FULL = "full"
    HANGING = "hanging"
    """Every call waits until ``resume`` before it does anything. Then it does what it was asked to,
    with the memory as it is by then: the frozen store that wakes up. Without ``resume`` it is the
    store that never answers."""


class FaultyStore:
    """A :class:`Store` around a store. ``fault`` can be set at any time, from any thread.

    ``only`` names the verbs that are faulty. A fault takes effect with the next call; calls that
    hang go on hanging until ``resume``. ``seed`` decides which bits are flipped.
    """

    def __init__(
        self,
        inner: Store,
        fault: Fault = Fault.NONE,
        *,
        only: Sequence[str] = ("contains", "put", "get", "remove", "close"),
        late_s: float = LATE_S,
        seed: int = 0,
    ) -> None:
        self._inner = inner
        self.fault = fault
        self.only = frozenset(only)
        self._late_s = late_s
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._hanging = 0
        self._releases = 0
        self._never = threading.Event()

    def resume(self) -> None:
        """Let every call that hangs now go on. Later calls hang again while the fault is set."""
        with self._changed:
            self._releases += 1
            self._changed.notify_all()

    @property
    def hanging(self) -> int:
        """How many calls hang now."""
        with self._changed:
            return self._hanging

    def wait_until_hanging(self, calls: int, timeout_s: float) -> bool:
        """Wait until at least so many calls hang; False when they do not within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self._hanging >= calls, timeout_s)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._faults("contains") as fault:
            match fault:
                case Fault.MISSING | Fault.FAILING:
                    return [False] * len(keys)
                case Fault.LYING:
                    return [True] * len(keys)
            return _cut(fault, self._inner.contains(keys))

    def put(self, items: Sequence[Transfer]) -> list[Put]:
        with self._faults("put") as fault:
            match fault:
                case Fault.MISSING | Fault.LYING:
                    return [Put.STORED] * len(items)
                case Fault.FAILING:
                    return [Put.FAILED] * len(items)
                case Fault.FULL:
                    return [Put.NO_SPACE] * len(items)
                case Fault.SHORT:
                    return self._inner.put([_half(item) for item in items])
            return _cut(fault, self._inner.put(items))

    def get(self, items: Sequence[Transfer]) -> list[Get]:
        with self._faults("get") as fault:
            match fault:
                case Fault.MISSING | Fault.VANISHING:
                    return [Get.MISS] * len(items)
                case Fault.FAILING:
                    return [Get.FAILED] * len(items)
                case Fault.LYING:
                    return [Get.HIT] * len(items)
                case Fault.SHORT:
                    return [self._get_half(item) for item in items]
            answers = self._inner.get(items)
            if fault is Fault.FLIPPING:
                for item in items:
                    self._flip(item)
            return _cut(fault, answers)

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        with self._faults("remove") as fault:
            match fault:
                case Fault.MISSING | Fault.FAILING:
                    return [False] * len(keys)
                case Fault.LYING:
                    return [True] * len(keys)
            return _cut(fault, self._inner.remove(keys))

    def close(self) -> None:
        """Hangs as the other verbs do."""
        with self._faults("close"):
            self._inner.close()

    @contextmanager
    def _faults(self, verb: str) -> Iterator[Fault]:
        fault = self.fault if verb in self.only else Fault.NONE
        match fault:
            case Fault.UNWELL:
                raise StoreUnwell("unwell on command")
            case Fault.BROKEN:
                raise ZeroDivisionError("broken on command")
            case Fault.LATE:
                self._never.wait(self._late_s)
            case Fault.HANGING:
                self._hang()
        yield fault

    def _hang(self) -> None:
        with self._changed:
            seen = self._releases
            self._hanging += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._releases > seen)
            self._hanging -= 1
            self._changed.notify_all()

    def _get_half(self, item: Transfer) -> Get:
        """Half of the bytes arrive, the rest of the memory stays as it is."""
        kept = [bytearray(span) for span in item.spans]
        answer = self._inner.get([item])[0]
        position, half = 0, item.nbytes // 2
        for span, before in zip(item.spans, kept, strict=True):
            start = min(max(half - position, 0), span.nbytes)
            span[start:] = before[start:]
            position += span.nbytes
        return answer

    def _flip(self, item: Transfer) -> None:
        bit = self._random.randrange(max(item.nbytes, 1) * 8)
        position = bit // 8
        for span in item.spans:
            if position < span.nbytes:
                span[position] ^= 1 << bit % 8
                return
            position -= span.nbytes


def _half(item: Transfer) -> Transfer:
    """The first half of an object's bytes.

    >>> spans = (memoryview(b"abcd"), memoryview(b"efgh"))
    >>> [bytes(span) for span in _half(Transfer(Key("a/b"), spans)).spans]
    [b'abcd', b'']
    """
    left, spans = item.nbytes // 2, []
    for span in item.spans:
        spans.append(span[:left])
        left = max(0, left - span.nbytes)
    return Transfer(item.key, tuple(spans), item.parent)


_Answer = TypeVar("_Answer", bool, Put, Get)


def _cut(fault: Fault, answers: list[_Answer]) -> list[_Answer]:
    return answers[: len(answers) // 2] if fault is Fault.TOO_FEW else answers
