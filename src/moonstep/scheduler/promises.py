"""Promises: what requests were answered in the step that is being built."""

from __future__ import annotations

from collections.abc import Sequence

from moonstep.config import Settings
from moonstep.engine import Request
from moonstep.groups import Group, GroupKind
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.lookup import JointLookup
from moonstep.scheduler.options import options_of
from moonstep.scheduler.restores import read_bytes
from moonstep.scheduler.tracker import LoadSpec


class Promises:
    """Answers of one step, by request; an answer pins nothing. Scheduler thread only."""

    def __init__(
        self, settings: Settings, groups: Sequence[Group], align_tokens: int, index: HostIndex
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._index = index
        self._lookup = JointLookup(groups, align_tokens)
        # The engine copies a state on before a step's synchronous loads have written it.
        self._all_sliced = any(g.kind is GroupKind.RECURRENT_STATE for g in groups)
        self._of: dict[str, LoadSpec] = {}
        self._sync_bytes = 0

    def __len__(self) -> int:
        return len(self._of)

    def make(self, request: Request, local_tokens: int, *, is_alone: bool) -> LoadSpec:
        """What the host cache can restore beyond ``local_tokens``, the engine's own hit.

        ``is_alone``: no other request is under way, so none has to wait for the copies.
        """
        found = 0
        if not request.skip_reading_prefix_cache and options_of(request).load:
            found = self._lookup.hit_tokens(self._index, request, local_tokens)
        hit = found if found >= self._settings.min_hit_tokens else 0
        room = self._settings.sync_restore_bytes - self._sync_bytes
        if is_alone:
            room = max(room, self._settings.idle_restore_bytes)
        sliced = hit > 0 and (
            self._all_sliced or read_bytes(self._groups, local_tokens, local_tokens + hit) > room
        )
        promise = self._of[request.request_id] = LoadSpec(local_tokens, hit, sliced, found)
        return promise

    def get(self, request_id: str) -> LoadSpec | None:
        """What the request was answered in this step, if it asked."""
        return self._of.get(request_id)

    def keep(self, request_id: str, external_tokens: int) -> LoadSpec:
        """The engine takes ``external_tokens`` of what the request was promised."""
        promise = self._of[request_id]
        load = LoadSpec(promise.local_tokens, external_tokens, promise.sliced)
        if not load.sliced:
            self._sync_bytes += read_bytes(self._groups, load.local_tokens, load.stop_tokens)
        return load

    def clear(self) -> None:
        """The step's plan is made: whoever was not admitted asks again."""
        self._of.clear()
        self._sync_bytes = 0
