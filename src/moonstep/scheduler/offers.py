"""What is offered to be pushed: objects that have become whole, that are used again, that end here.

Runs of full attention are offered when their last block has been captured, as long as the request
goes on; what is stored because a prefix ends somewhere, when all of it is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from moonstep.config import Push, Settings
from moonstep.engine import Request
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.objects import (
    ObjectPlan,
    ObjectShape,
    WantedObject,
    all_of,
    objects_of,
    tail_of,
)
from moonstep.scheduler.options import options_of
from moonstep.scheduler.pushes import PushQueue

_MOST_LOOKS: Final = 64
"""So many steps a boundary is looked at; what has not come by then never will."""


class Ended(NamedTuple):
    """A boundary of a request at which a prefix ends: what is stored for that, as soon as all of it
    can be named, and how often we looked whether it is there."""

    request: Request
    boundary_tokens: int
    objects: tuple[WantedObject, ...] | None = None
    looks: int = 0


class Offers:
    """Offers objects to the queue of pushes, as the settings say. Scheduler thread only."""

    def __init__(
        self, settings: Settings, objects: ObjectPlan, index: HostIndex, queue: PushQueue
    ) -> None:
        self._settings = settings
        self._objects = objects
        self._dense = {shape.group.index: shape for shape in objects.dense}
        self._index = index
        self._queue = queue
        self._ended: deque[Ended] = deque()

    def captured(self, columns: Columns, requests: Mapping[int, Request]) -> None:
        """Blocks were captured on every rank: objects that are whole now may be pushed."""
        shape, pushed = self._dense.get(columns.group), self._settings.pushed
        if shape is None or pushed not in (Push.ALL, Push.DECODED):
            return
        whole = {
            (life, depth // shape.blocks)
            for life, depth in zip(columns.lives, columns.depths, strict=True)
        }
        for life, number in sorted(whole):
            request = requests.get(life)
            if request is None:
                continue
            if self._is_pushed(request, (number + 1) * shape.tokens):
                hashes = request.block_hashes
                self._offer(request, all_of(shape, objects_of(shape, hashes, number, number + 1)))
            if not self._objects.sparse and pushed is Push.ALL:
                self._offer_prompt_tail(request, shape, number)

    def kept(self, request: Request, boundary_tokens: int) -> None:
        """Windows and states are kept at this boundary: they may be pushed once they are there."""
        if self._is_pushed(request, boundary_tokens):
            self._end_at(request, boundary_tokens)

    def went_on(self, request: Request, num_computed_tokens: int) -> None:
        """A request goes on from a prefix that was there: its objects are used again."""
        if self._settings.pushed not in (Push.ALL, Push.REUSE):
            return
        hashes = request.block_hashes
        for shape in self._objects.dense:
            stop = num_computed_tokens // shape.tokens
            self._offer(request, all_of(shape, objects_of(shape, hashes, 0, stop)))
        prompt = self._objects.top(request.num_prompt_tokens, self._hashed_tokens(request))
        if num_computed_tokens == prompt.resume_tokens and not self._objects.sparse:
            num_computed_tokens = prompt.end_tokens  # where the same prompt looks for it
        self._end_at(request, num_computed_tokens)

    def finished(self, request: Request) -> None:
        """A request has ended: whoever goes on from its answer finds it up to there.

        Where there are windows and states, it ends where these are kept (``kept``).
        """
        if self._objects.sparse or not options_of(request).save:
            return
        computed = min(request.num_computed_tokens, request.num_tokens)
        end = self._objects.end(computed, self._hashed_tokens(request))
        if self._is_pushed(request, end):
            self._end_at(request, end)

    def look_again(self) -> None:
        """Offer what is stored where prefixes end, as soon as all of it has been captured."""
        for _ in range(len(self._ended)):
            ended = self._named(self._ended.popleft())
            objects = self._ready(ended)
            if objects is not None:
                self._offer(ended.request, objects)
            elif ended.looks < _MOST_LOOKS:
                self._ended.append(ended._replace(looks=ended.looks + 1))

    def has_ready(self) -> bool:
        """Whether the next look offers anything: what was missing has been captured since."""
        return any(self._ready(self._named(ended)) is not None for ended in self._ended)

    def reset(self) -> None:
        """New keys: what has not been offered is from before."""
        self._ended.clear()

    def _offer_prompt_tail(self, request: Request, shape: ObjectShape, number: int) -> None:
        """Offer the prompt's tail if it is object ``number`` and all of it has been captured."""
        end = self._objects.end(request.num_prompt_tokens, self._hashed_tokens(request))
        if abs(end // shape.tokens - number) > 1 or end < self._settings.min_fetch_tokens:
            return  # seen at a glance, since it is asked for every run of a prompt
        tail = tail_of(shape, request.block_hashes, end)
        if tail is not None and tail.number == number:
            self._offer(request, [WantedObject(shape, tail)])

    def _is_pushed(self, request: Request, stop_tokens: int) -> bool:
        """Whether what ends there goes to the store when it is captured."""
        pushed = self._settings.pushed
        is_decoded = stop_tokens > request.num_prompt_tokens
        return pushed is Push.ALL or (pushed is Push.DECODED and is_decoded)

    def _end_at(self, request: Request, boundary_tokens: int) -> None:
        """Offer what is stored because a prefix ends there, unless nobody would ever fetch it."""
        is_boundary = boundary_tokens > 0 and boundary_tokens % self._objects.align_tokens == 0
        if is_boundary and boundary_tokens >= self._settings.min_fetch_tokens:
            self._ended.append(Ended(request, boundary_tokens))

    def _named(self, ended: Ended) -> Ended:
        """With all that is stored because a prefix ends there, once it is hashed so far.

        From a part of it nobody could go on.
        """
        request, end_tokens = ended.request, ended.boundary_tokens
        if ended.objects is not None:
            return ended
        if self._objects.end(end_tokens, self._hashed_tokens(request)) < end_tokens:
            return ended
        return ended._replace(objects=tuple(self._objects.ending(request.block_hashes, end_tokens)))

    def _ready(self, ended: Ended) -> tuple[WantedObject, ...] | None:
        """What is stored there, if it can be named and all of it is here."""
        if ended.objects is not None and all(map(self._is_here, ended.objects)):
            return ended.objects
        return None

    def _offer(self, request: Request, objects: Iterable[WantedObject]) -> None:
        """Push these objects, as far as they are here."""
        most_busy_slots = int(self._settings.max_busy_share * self._index.slot_count)
        if most_busy_slots < self._objects.most_blocks:
            return  # no job could ever own so many slots
        for each in objects:
            if self._is_here(each):
                self._queue.offer(request.request_id, each.shape.group.index, [each.names])

    def _is_here(self, each: WantedObject) -> bool:
        return self._index.has_written(each.shape.group.index, each.names.names)

    def _hashed_tokens(self, request: Request) -> int:
        return len(request.block_hashes) * self._objects.hash_tokens
