"""What the scheduler half remembers of a request: one tracker for each life, and nothing beside it.

A life is one admission of a request. It ends by finish, by preemption, or when its id appears among
a step's new requests again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonstep.engine import Request
from moonstep.scheduler.tables import BlockTables


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
    ``next_block`` is, for each group, the position of the first block that this life has yet to
    fill (it begins with the first that was not there whole at its start); ``token_len`` counts the
    tokens known to be settled, and ``is_prefilling`` says whether more of them are known than that.
    """

    __slots__ = (
        "due_step",
        "is_prefilling",
        "life",
        "next_block",
        "request",
        "request_id",
        "saves",
        "tables",
        "token_len",
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
        self.due_step = 0

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
