"""A scheduler half driven by hand with the installed vLLM's own objects, block 16.

The hand plays the engine: it names blocks when it hands them out, as the engine's pool does, and
moves the numbers of a request on after each step. What a test wants to say of a step it says in the
terms of vLLM's ``SchedulerOutput``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from moonstep.config import CaptureMode, Settings
from moonstep.groups import Group, GroupKind
from moonstep.scheduler.scheduler import MooncakeStoreScheduler
from moonstep.wire import BLOCK, SLOT, RankReport, Rows, StepPlan, WorkerReport

BLOCK_TOKENS = 16
BLOCK_BYTES = 1024
GROUPS = (Group(0, GroupKind.FULL_ATTENTION, BLOCK_TOKENS, BLOCK_BYTES, ("layer",)),)

init_none_hash(sha256)
_HASHER = get_request_block_hasher(BLOCK_TOKENS, sha256)


def make_request(
    request_id: str,
    prompt_tokens: int,
    *,
    family: int = 1,
    params: Mapping[str, Any] | None = None,
    skip_cache: bool = False,
    hasher: Callable[[Request], list[Any]] | None = _HASHER,
) -> Request:
    """A request whose prompt is the first ``prompt_tokens`` tokens of its family."""
    extra = {"kv_transfer_params": dict(params)} if params is not None else None
    return Request(
        request_id=request_id,
        prompt_token_ids=[family * 1000 + position for position in range(prompt_tokens)],
        sampling_params=SamplingParams(
            max_tokens=512, extra_args=extra, prompt_logprobs=1 if skip_cache else None
        ),
        pooling_params=None,
        block_hasher=hasher,
    )


def rows_of(rows: Rows) -> list[tuple[int, int]]:
    """``(block, slot)`` of each row."""
    return [(int(row[BLOCK]), int(row[SLOT])) for row in rows]


def blocks_of(rows: Rows) -> list[int]:
    """The engine's blocks that the rows name, in order."""
    return [int(row[BLOCK]) for row in rows]


class Hand:
    """One engine without a model: a scheduler half, a real block pool, and ranks that report."""

    def __init__(
        self,
        half: type[MooncakeStoreScheduler] = MooncakeStoreScheduler,
        *,
        ranks: int = 1,
        slots: int = 64,
        blocks: int = 64,
        caching: bool = True,
        reported: bool = True,
        tokens_per_decode: int = 1,
        capture: CaptureMode = CaptureMode.EAGER,
        checks: bool = True,
        **settings: Any,
    ) -> None:
        self.half = half(
            Settings(capture=capture, **settings),
            GROUPS,
            ranks,
            tokens_per_decode,
            hashes_lag=True,
        )
        self.pool = BlockPool(blocks, enable_caching=caching, hash_block_size=BLOCK_TOKENS)
        self.half.bind_block_pool(self.pool)
        self.ranks = ranks
        self.slots = slots
        self.checks = checks
        self.tables: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        if reported:
            self.report(captured=False)

    def admit(
        self,
        request: Request,
        block_ids: Sequence[int],
        *,
        local: int = 0,
        external: int | None = None,
    ) -> int:
        """Ask and admit a request as ``schedule()`` does; the tokens it was promised.

        ``external`` is what the engine makes of the answer: the answer itself if not given. The
        request then has ``local`` and ``external`` tokens computed.
        """
        self.half.on_new_request(request)
        answer, _ = self.half.get_num_new_matched_tokens(request, local)
        external = answer if external is None else external
        self.give(request, block_ids, fresh_from=local // BLOCK_TOKENS)
        blocks = KVCacheBlocks((tuple(self.pool.blocks[i] for i in block_ids),))
        self.half.update_state_after_alloc(request, blocks, external)
        request.num_computed_tokens = local + external
        self.requests[request.request_id] = request
        return answer

    def give(self, request: Request, block_ids: Sequence[int], *, fresh_from: int = 0) -> None:
        """Hand out blocks: the request's table, of which those from ``fresh_from`` on are new."""
        known = len(self.tables.get(request.request_id, ()))
        self.tables[request.request_id] = list(block_ids)
        self.pool.touch([self.pool.blocks[block_id] for block_id in block_ids[known:]])
        for block_id in block_ids[fresh_from:]:
            self.pool.blocks[block_id].reset_hash()

    def free(self, request_id: str) -> None:
        """Put a request's blocks at the end of the free queue, its tail first."""
        table = self.tables.pop(request_id, [])
        self.pool.free_blocks([self.pool.blocks[block_id] for block_id in reversed(table)])

    def step(
        self,
        scheduled: Mapping[str, int] | None = None,
        *,
        new: Sequence[str] = (),
        resumed: Sequence[str] = (),
        appended: Mapping[str, Sequence[int]] | None = None,
        preempted: Sequence[str] = (),
        finished: Sequence[str] = (),
        drafts: Mapping[str, int] | None = None,
        v2: bool = False,
    ) -> StepPlan:
        """Build one step and its plan; afterwards every scheduled request has its tokens computed.

        ``new`` and ``resumed`` requests have been admitted before; ``appended`` are new blocks of
        running ones. Every other scheduled request merely runs. ``drafts`` of the scheduled tokens
        are no tokens of the request.
        """
        scheduled, appended = scheduled or {}, appended or {}
        for request_id in finished:
            self.finish(request_id)
        for request_id, block_ids in appended.items():
            self.give(
                self.requests[request_id],
                [*self.tables[request_id], *block_ids],
                fresh_from=len(self.tables[request_id]),
            )
        for request_id, tokens in scheduled.items():
            self._name_blocks(request_id, tokens)
        output = self._output(scheduled, new, resumed, appended, v2=v2)
        output.preempted_req_ids = set(preempted)
        output.finished_req_ids = set(finished)
        plan = self.half.build_connector_meta(output)
        for request_id, tokens in scheduled.items():
            self.requests[request_id].num_computed_tokens += tokens - (drafts or {}).get(
                request_id, 0
            )
        if self.checks:
            self.half.check()
        return plan

    def finish(self, request_id: str) -> None:
        """What ``Scheduler._free_request`` does; the next step has to name it."""
        if request_id in self.requests:
            self.half.request_finished(self.requests[request_id])
        self.free(request_id)

    def decode(self, request_id: str, steps: int) -> list[StepPlan]:
        """Decode steps, a token each; blocks are handed out from the pool's front as needed."""
        plans = []
        request = self.requests[request_id]
        for _ in range(steps):
            request.append_output_token_ids(7)
            full = request.num_computed_tokens == len(self.tables[request_id]) * BLOCK_TOKENS
            plans.append(
                self.step({request_id: 1}, appended={request_id: self.front(1)} if full else None)
            )
            self.report()
        return plans

    def front(self, count: int) -> list[int]:
        """The blocks the engine would hand out next."""
        free = self.pool.free_block_queue.get_all_free_blocks()
        return [block.block_id for block in free[:count]]

    def report(self, *, captured: bool | Sequence[bool] = True, through: int | None = None) -> None:
        """All ranks report every step so far, as ended well or not (one answer for each rank)."""
        step = self.half._step if through is None else through
        wells = [captured] * self.ranks if isinstance(captured, bool) else list(captured)
        open_steps = tuple(range(step + 1))
        self.half.update_connector_output(
            WorkerReport(
                {
                    rank: RankReport(self.slots, step, open_steps if well else ())
                    for rank, well in enumerate(wells)
                }
            )
        )

    def preempt(self, request_id: str) -> None:
        """What ``Scheduler._preempt_request`` does; the next step has to name it."""
        self.requests[request_id].num_computed_tokens = 0
        self.requests[request_id].num_preemptions += 1
        self.free(request_id)

    def table(self, request_id: str) -> list[int]:
        """The table the scheduler half has."""
        return self.half.lives[request_id].tables.by_group[0]

    def _name_blocks(self, request_id: str, tokens: int) -> None:
        """Name what this step fills, from allocation on, as ``cache_full_blocks`` does."""
        request = self.requests[request_id]
        stop = min(request.num_computed_tokens + tokens, request.num_tokens) // BLOCK_TOKENS
        for position, name in enumerate(request.block_hashes[:stop]):
            block = self.pool.blocks[self.tables[request_id][position]]
            if block.block_hash is None and self.pool.enable_caching:
                block.set_block_hash(make_block_hash_with_group_id(name, 0))

    def _output(
        self,
        scheduled: Mapping[str, int],
        new: Sequence[str],
        resumed: Sequence[str],
        appended: Mapping[str, Sequence[int]],
        *,
        v2: bool,
    ) -> SchedulerOutput:
        """The scheduler's output in the shape of runner V1, or of runner V2."""
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = dict(scheduled)
        output.total_num_scheduled_tokens = sum(scheduled.values())
        among_new = [*new, *(resumed if v2 else ())]
        for request_id in among_new:
            request = self.requests[request_id]
            output.scheduled_new_reqs.append(
                NewRequestData.from_request(
                    request,
                    (list(self.tables[request_id]),),
                    request._all_token_ids if v2 else None,
                )
            )
        cached = [request_id for request_id in scheduled if request_id not in among_new]
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=cached,
            resumed_req_ids={request_id for request_id in cached if request_id in resumed},
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[self._new_ids(r, resumed, appended) for r in cached],
            num_computed_tokens=[self.requests[r].num_computed_tokens for r in cached],
            num_output_tokens=[self.requests[r].num_output_tokens for r in cached],
        )
        return output

    def _new_ids(
        self, request_id: str, resumed: Sequence[str], appended: Mapping[str, Sequence[int]]
    ) -> tuple[list[int], ...] | None:
        if request_id in resumed:
            return (list(self.tables[request_id]),)
        return (list(appended[request_id]),) if request_id in appended else None


def lazy(**settings: object) -> Hand:
    """A hand in lazy mode."""
    return Hand(capture=CaptureMode.LAZY, **settings)  # type: ignore[arg-type]


def running(hand: Hand, tokens: int, table: list[int], *, family: int = 1) -> None:
    """R has computed its prompt of ``tokens`` tokens and sampled one; its captures have arrived."""
    hand.admit(make_request("r", tokens, family=family), table)
    hand.step({"r": tokens}, new=["r"])
    hand.report()
    hand.requests["r"].append_output_token_ids(7)


def captured(*plans: StepPlan) -> list[int]:
    """The blocks that these plans capture, in order."""
    return [block for plan in plans for block in blocks_of(plan.captures)]
