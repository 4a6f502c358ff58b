"""Work: what one engine step computes, read from the scheduler output when it was made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from moonstep.audit.oracle import States, chain, mix

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moonstep.audit.oracle import Sequence


@dataclass(frozen=True, slots=True)
class RequestWork:
    """One request's part of a step.

    Tokens `start` up to `stop` are computed; `known_tokens` of them are no drafts.
    Under asynchronous scheduling with drafts all three count drafts of steps in flight as
    accepted, and are lowered by what was rejected when the step runs; not for a request whose
    life begins with this step (`fresh`).
    """

    request: str
    sequence: Sequence
    start: int
    stop: int
    known_tokens: int
    draft_tokens: tuple[int, ...] = ()
    fresh: bool = False

    @property
    def samples(self) -> bool:
        """Whether the step reaches the end of what is known, so that a token is sampled."""
        return self.stop - len(self.draft_tokens) >= self.known_tokens


@dataclass(frozen=True, slots=True)
class SyncLoad:
    """Blocks that a load of this step may write: those of tokens promised at this admission."""

    request: str
    start: int
    stop: int
    blocks: frozenset[int]


@dataclass(slots=True)
class Step:
    """One scheduled step on its way through the ranks.

    `sent` is the output as a multi-process executor sends it to its workers. `rejected` and
    `sampled` are filled when it runs; `earlier` are the steps whose output was not processed when
    this one was scheduled.
    """

    number: int
    output: Any
    salt: np.uint64
    works: list[RequestWork]
    sync_loads: list[SyncLoad]
    async_loads: list[SyncLoad]
    sent: bytes | None = None
    earlier: list[Step] = field(default_factory=list)
    rejected: dict[str, int] = field(default_factory=dict)
    sampled: dict[str, list[int]] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens scheduled in this step."""
        return int(self.output.total_num_scheduled_tokens)


def works_of(
    output: Any, requests: Mapping[str, Any], sequence_of: Callable[[str], Sequence]
) -> list[RequestWork]:
    """What each request of a scheduler output computes."""
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    fresh = starts.keys() | cached.resumed_req_ids
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
    works = []
    for name, count in output.num_scheduled_tokens.items():
        request = requests[name]
        known = request.num_prompt_tokens + outputs.get(name, request.num_output_tokens)
        drafts = tuple(output.scheduled_spec_decode_tokens.get(name, ()))
        start = starts[name]
        works.append(
            RequestWork(name, sequence_of(name), start, start + count, known, drafts, name in fresh)
        )
    return works


def rejected_in_flight(work: RequestWork, step: Step) -> int:
    """Drafts that were rejected, and that the scheduler still counted when it scheduled this."""
    if work.fresh:
        return 0
    return sum(earlier.rejected.get(work.request, 0) for earlier in step.earlier)


def settle(work: RequestWork, step: Step, drafts: tuple[int, ...]) -> RequestWork:
    """The work as it is really done: rejections of steps in flight are taken off."""
    late = rejected_in_flight(work, step)
    return RequestWork(
        work.request,
        work.sequence,
        work.start - late,
        work.stop - late,
        work.known_tokens - late,
        drafts,
    )


def states_of(work: RequestWork) -> States:
    """States of the tokens this work computes; a draft's state follows from the draft itself."""
    if not work.draft_tokens:
        return work.sequence.states(work.start, work.stop)
    settled = work.sequence.states(work.start, work.stop - len(work.draft_tokens))
    last = int(settled[-1])
    drafts = []
    for token in work.draft_tokens:
        last = chain(last, token)
        drafts.append(last)
    return np.concatenate([settled, np.array(drafts, np.uint64)])


def next_states_of(work: RequestWork) -> States:
    """States of the tokens after those this work computes: what a drafter's layers go by."""
    known = work.stop - len(work.draft_tokens)
    after = work.sequence.states(known, known + 1)
    return np.concatenate([states_of(work)[1:], after])


def sample_tokens(work: RequestWork) -> list[int]:
    """The tokens this work yields: accepted drafts and one more; none in the middle of a prompt."""
    if not work.samples:
        return []
    position, yielded = work.known_tokens, []
    for draft in work.draft_tokens:
        token = work.sequence.token(position)
        yielded.append(token)
        position += 1
        if draft != token:
            return yielded
    yielded.append(work.sequence.token(position))
    return yielded


def propose(sequence: Sequence, position: int, count: int) -> list[int]:
    """`count` drafts for the tokens from `position`: some right ones, then wrong ones.

    How many are right is a function of the prefix, so that a replay drafts the same.
    """
    right = mix(int(sequence.states(position - 1, position)[0]) ^ 0x7F) % (count + 1)
    return [
        sequence.token(position + i) if i < right else (sequence.token(position + i) + 1) % 499
        for i in range(count)
    ]
