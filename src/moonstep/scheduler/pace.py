"""Whether a fetch pays: what fetching takes against what computing takes, both as measured.

Fetches are compared with fetches of about their size, since a small one is mostly latency. Fetching
goes on until it is clearly slower, and while it is off a few fetches are made all the same, to see
whether it has become faster than computing. The two bounds lie apart, so rates that stay as they
are, even if they scatter, cannot make it go back and forth.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from moonstep.engine import SchedulerOutput

FETCHES_REMEMBERED: Final = 5
CLEARLY_SLOWER: Final = 1.5
"""Fetching stops when it takes so many times as long as computing."""
PROBE_EVERY: Final = 16
"""While fetching is off, one find in so many is fetched."""
FAST_PROBES: Final = 2
"""Fetching is on again when so many in a row were no slower than computing."""

STEPS_REMEMBERED: Final = 15
FEWEST_STEPS: Final = 3
FEWEST_TOKENS: Final = 64
"""A step that computes fewer prompt tokens says little about how long they take."""


def is_slower(fetch_s: Sequence[float], prefill_s: float | None, *, was_slower: bool) -> bool:
    """Whether fetching a token takes longer than computing one, given what was said before.

    ``fetch_s`` are the last fetches of this size, oldest first, in seconds a token, and
    ``prefill_s`` is what computing one takes, if that is known.

    >>> is_slower([1.4] * 5, 1.0, was_slower=False), is_slower([1.6] * 5, 1.0, was_slower=False)
    (False, True)
    >>> is_slower([9.0, 0.9, 0.9], 1.0, was_slower=True)
    False
    """
    if prefill_s is None:
        return False
    if was_slower:
        return max(fetch_s[-FAST_PROBES:]) > prefill_s
    return len(fetch_s) == FETCHES_REMEMBERED and median(fetch_s) > CLEARLY_SLOWER * prefill_s


class PrefillPace:
    """What computing a prompt token takes, from the times between steps. Scheduler thread only.

    A step is seen when it is built. The time until the next one is built is the step's own, if the
    engine had no reason to rest in between: some request went on. Under async scheduling, where a
    step is built while the one before it runs, it is the time of that one: ``lag`` is 1 then.
    Tokens beyond what decodes take (``tokens_per_decode`` a request) count as prompt tokens. The
    median of the last steps is taken, since one step may be held up by anything.
    """

    def __init__(self, tokens_per_decode: int = 1, lag: int = 0) -> None:
        self._tokens_per_decode = tokens_per_decode
        self._tokens: deque[int] = deque([0] * (lag + 1), lag + 1)
        self._then_s = 0.0
        self._token_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)

    def saw(self, output: SchedulerOutput, now_s: float) -> None:
        """A step is being built."""
        computed = self._tokens[0]
        if computed >= FEWEST_TOKENS and output.scheduled_cached_reqs.req_ids:
            self._token_s.append((now_s - self._then_s) / computed)
        scheduled = output.num_scheduled_tokens
        decoded = self._tokens_per_decode * len(scheduled)
        self._tokens.append(output.total_num_scheduled_tokens - decoded)
        self._then_s = now_s

    @property
    def token_s(self) -> float | None:
        """Seconds a prompt token; ``None`` while too little was seen."""
        return median(self._token_s) if len(self._token_s) >= FEWEST_STEPS else None


class _Fetches:
    """Fetches of one size: how long they took, and whether they still pay."""

    __slots__ = ("is_off", "passed_by", "token_s")

    def __init__(self) -> None:
        self.token_s: deque[float] = deque(maxlen=FETCHES_REMEMBERED)
        self.is_off = False
        self.passed_by = 0


class FetchPace:
    """Decides which finds are fetched. Scheduler thread only.

    Sizes are told apart by powers of two. ``clock`` gives seconds.
    """

    def __init__(self, clock: Callable[[], float], prefill: PrefillPace | None = None) -> None:
        self.clock = clock
        self.prefill = prefill or PrefillPace()
        self._by_size: dict[int, _Fetches] = {}

    def should_fetch(self, tokens: int) -> bool:
        """Whether a find of so many tokens is to be fetched. Asked once for each find."""
        fetches = self._fetches(tokens)
        was_off = fetches.is_off
        fetches.is_off = is_slower([*fetches.token_s], self.prefill.token_s, was_slower=was_off)
        if not fetches.is_off:
            if was_off:
                fetches.token_s.clear()  # it is judged anew, by a full number of fetches
            return True
        fetches.passed_by = fetches.passed_by + 1 if was_off else 1
        return fetches.passed_by % PROBE_EVERY == 0

    def fetched(self, tokens: int, came_tokens: int, started_s: float) -> None:
        """A fetch of so many tokens that began then is over, and so many of them came."""
        token_s = (self.clock() - started_s) / came_tokens if came_tokens else math.inf
        self._fetches(tokens).token_s.append(token_s)

    def _fetches(self, tokens: int) -> _Fetches:
        return self._by_size.setdefault(tokens.bit_length(), _Fetches())
