"""What can be promised to a request: the longest run of its blocks that every rank has."""

from __future__ import annotations

from moonstep.engine import Request
from moonstep.groups import Group, last_boundary_tokens
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.options import options_of


def host_hit_tokens(index: HostIndex, group: Group, request: Request, local_tokens: int) -> int:
    """Tokens beyond ``local_tokens`` that the host cache can restore for ``request``.

    ``local_tokens`` is the engine's own hit, a multiple of the block. The last token is never
    promised, and nothing to a request that may not read. Reads the index, changes nothing: an
    answer pins no slot.
    """
    if request.skip_reading_prefix_cache or not options_of(request).load:
        return 0
    start = local_tokens // group.block_tokens
    boundary = last_boundary_tokens(request.num_tokens, group.block_tokens)
    stop = min(boundary // group.block_tokens, len(request.block_hashes))
    if stop <= start:
        return 0
    return index.written_run(group.index, request.block_hashes, start, stop) * group.block_tokens
