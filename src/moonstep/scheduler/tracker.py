"""What the scheduler half remembers of a request: one tracker for each life, and nothing beside it.

A life is one admission of a request. It ends by finish, by preemption, or when its id appears among
a step's new requests again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonstep.engine import Request
from moonstep.scheduler.tables import BlockTables
from moonstep.scheduler.trail import Trail


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What a request is promised from the host cache: tokens ``[local, local + external)``.

    ``sliced`` promises are the engine's asynchronous loads. ``found_tokens`` is what there was to
    promise, before it was found too short.
    """

    local_tokens: int
    external_tokens: int
    sliced: bool = False
    found_tokens: int = 0

    @property
    def stop_tokens(self) -> int:
        return self.local_tokens + self.external_tokens


@dataclass(frozen=True, slots=True)
class Admission:
    """What ``update_state_after_alloc`` said of a request in the step that is being built."""

    request: Request
    tables: tuple[Sequence[int], ...]
    load: LoadSpec | None


class RequestTracker:
    """One life of a request, from its admission to its end.

    ``life`` is a number no other life has; ``tables`` are the request's block tables of this step;
    ``trail`` is what it keeps of windows and states, where the engine has such groups.
    ``next_block`` is, for each group, the position of the first block that this life has yet to
    fill (it begins with the first that was not there whole at its start); ``token_len`` counts the
    tokens known to be settled, and ``is_prefilling`` says whether more of them are known than that.
    ``sources`` are, for each group, the witness's of its blocks, or nobody. A life that is not
    ``is_followed`` is not looked at before it ends: until then it may have more settled than this.
    """

    __slots__ = (
        "due_step",
        "is_followed",
        "is_prefilling",
        "life",
        "next_block",
        "request",
        "request_id",
        "saves",
        "sources",
        "tables",
        "token_len",
        "trail",
    )

    def __init__(
        self,
        life: int,
        request: Request,
        tables: BlockTables,
        next_block: Sequence[int],
        *,
        saves: bool,
    ) -> None:
        self.life = life
        self.request = request
        self.request_id = request.request_id
        self.tables = tables
        self.next_block = list(next_block)
        self.token_len = 0
        self.is_prefilling = True
        self.saves = saves
        self.sources: Sequence[int] = ()
        self.is_followed = True
        self.due_step = 0
        self.trail: Trail | None = None

    def settle(self, num_scheduled_tokens: int) -> None:
        """Note the tokens that are settled once this step's forward pass has run.

        Drafts and placeholders are scheduled too; a token counts only when it is the request's own
        (``num_tokens``).
        """
        request = self.request
        computed, known = request.num_computed_tokens + num_scheduled_tokens, request.num_tokens
        if computed < known:
            self.is_prefilling, self.token_len = True, computed
        else:
            self.is_prefilling, self.token_len = False, known

    def catch_up(self, limit_tokens: int | None = None) -> None:
        """Settle what a life that was not followed has computed since it was last looked at.

        It has decoded: each token but the last is one that the next was computed from. What comes
        behind ``limit_tokens`` may be of a client who went on with its session, also if that was
        aborted before it ran again.
        """
        if not self.is_followed:
            computed = self.request.num_tokens - 1
            if limit_tokens is not None:
                computed = min(computed, limit_tokens)
            self.token_len = max(self.token_len, computed)
