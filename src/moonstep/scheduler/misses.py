"""Why tokens that the engine did not have were computed, and not restored.

Every token of an admitted request is counted once: as the engine's own, as restored, or as missed
for one of these reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from moonstep.engine import Request
from moonstep.groups import last_boundary_tokens
from moonstep.scheduler.options import reads_store
from moonstep.scheduler.tracker import LoadSpec


class MissReason(Enum):
    """Why a token was computed."""

    ABSENT = "absent"
    """Nobody had it."""
    TAIL = "tail"
    """It is behind the last whole block, or the last token: never restored."""
    SHORT = "short"
    """The hit was below ``min_hit_tokens``, or the find below ``min_fetch_tokens``."""
    LATE = "late"
    """The store had not brought it, or had not even answered, when the waiting was over."""
    SLOWER = "slower"
    """Fetching it would have taken longer than computing it, by measurement."""
    FAILED = "failed"
    """The store had it, and could not give it, or gave something damaged."""
    BUSY = "busy"
    """No slots or threads were free for it, or too many requests waited already."""
    DECLINED = "declined"
    """It was promised, and the engine took less."""
    NOT_ASKED = "not_asked"
    """The request may not read the cache, or another connector serves it."""


@dataclass(frozen=True, slots=True)
class Look:
    """What came of the look for a request's prefix when the request was admitted.

    ``fetched_tokens`` came from the store for this request; the host cache or the store had the
    first ``known_tokens``, and ``reason`` says why those that were not restored were not.
    """

    fetched_tokens: int = 0
    known_tokens: int = 0
    reason: MissReason = MissReason.ABSENT


NOTHING_FOUND: Final = Look()


def overruled(look: Look, request: Request, promise: LoadSpec | None, given_tokens: int) -> Look:
    """The look, unless something else is why tokens were not restored.

    ``promise`` is what was answered to the engine, which then took ``given_tokens`` of it.
    """
    if not reads_store(request):
        return Look(0, request.num_tokens, MissReason.NOT_ASKED)
    if promise is None or given_tokens >= promise.found_tokens:
        return look
    reason = MissReason.DECLINED if promise.external_tokens else MissReason.SHORT
    known_tokens = promise.local_tokens + promise.found_tokens
    return Look(look.fetched_tokens, max(known_tokens, look.known_tokens), reason)


def missed(
    num_tokens: int, had_tokens: int, block_tokens: int, look: Look
) -> Iterator[tuple[MissReason, int]]:
    """The tokens of a request that are computed, by reason; ``had_tokens`` are there already.

    >>> look = Look(known_tokens=32, reason=MissReason.LATE)
    >>> [(reason.value, tokens) for reason, tokens in missed(70, 16, 16, look)]
    [('late', 16), ('absent', 32), ('tail', 6)]
    """
    boundary = max(had_tokens, last_boundary_tokens(num_tokens, block_tokens))
    known = min(max(had_tokens, look.known_tokens), boundary)
    yield look.reason, known - had_tokens
    yield MissReason.ABSENT, boundary - known
    yield MissReason.TAIL, num_tokens - boundary
