"""What Moonstep reads from an engine, as protocols with the engine's own field names (vLLM 0.32.0).

The scheduler half sees the engine only through these, so it imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

BlockHash = bytes
"""The engine's chained hash of all tokens up to a block's end (vLLM ``BlockHash``)."""


class Request(Protocol):
    """``vllm.v1.request.Request``: a live object of the scheduler, whose numbers move."""

    request_id: str
    num_computed_tokens: int
    num_preemptions: int
    block_hashes: Sequence[BlockHash]
    kv_transfer_params: Mapping[str, Any] | None
    skip_reading_prefix_cache: bool | None

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...


class Block(Protocol):
    """``vllm.v1.core.kv_cache_utils.KVCacheBlock``."""

    block_id: int
    ref_cnt: int
    next_free_block: Block | None

    @property
    def block_hash(self) -> bytes | None:
        """Block hash and group id (4 bytes, big-endian) as one, or ``None``."""


class FreeBlockQueue(Protocol):
    """``vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue``: the next to be handed out first."""

    num_free_blocks: int
    fake_free_list_head: Block


class BlockPool(Protocol):
    """``vllm.v1.core.block_pool.BlockPool``: the first witness of what a block holds."""

    blocks: Sequence[Block]
    enable_caching: bool
    free_block_queue: FreeBlockQueue

    def touch(self, blocks: Sequence[Block]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None: ...


class AllocatedBlocks(Protocol):
    """``vllm.v1.core.kv_cache_manager.KVCacheBlocks``: a request's whole table."""

    def get_block_ids(self) -> tuple[list[int], ...]: ...


class TablesNow(Protocol):
    """``KVCacheBlocks`` once more: a request's tables as the engine has them at this moment."""

    @property
    def blocks(self) -> Sequence[Sequence[Block]]:
        """The blocks of each group, by position; id 0 where there is none."""


class CacheManager(Protocol):
    """``vllm.v1.core.kv_cache_manager.KVCacheManager``: the tables of this very moment."""

    block_pool: BlockPool

    def get_blocks(self, request_id: str) -> TablesNow: ...


class BlockState(Protocol):
    """``vllm.v1.core.sched.output.KVConnectorBlockState`` (0.30 and later)."""

    boundary_state_offloads: Mapping[str, Sequence[tuple[int, int, int]]]
    """By request: group, block and tokens of each state that this step leaves at a boundary."""


class NewRequest(Protocol):
    """``vllm.v1.core.sched.output.NewRequestData``."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


class CachedRequests(Protocol):
    """``vllm.v1.core.sched.output.CachedRequestData``.

    ``new_block_ids[i]`` replaces the table of ``req_ids[i]`` if that id is in ``resumed_req_ids``,
    and extends it otherwise.
    """

    req_ids: list[str]
    resumed_req_ids: set[str]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]


class SchedulerOutput(Protocol):
    """``vllm.v1.core.sched.output.SchedulerOutput``: what one step does, and the only authority."""

    scheduled_new_reqs: Sequence[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    preempted_req_ids: set[str] | None
