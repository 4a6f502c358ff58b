"""What a promise means in each group: which of the request's blocks are filled from which slots."""

from __future__ import annotations

from collections.abc import Iterable

from moonstep.groups import Group, block_names, needed_blocks
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.loads import Restore
from moonstep.scheduler.tracker import Admission, LoadSpec


def read_positions(group: Group, local_tokens: int, stop_tokens: int) -> range:
    """Positions of a group's table that a restore of tokens ``[local, stop)`` fills.

    What the engine has itself stays as it is, and what a window has left behind is not there.
    """
    needed = needed_blocks(group, stop_tokens)
    return range(max(needed.start, local_tokens // group.block_tokens), needed.stop)


def read_bytes(groups: Iterable[Group], local_tokens: int, stop_tokens: int) -> int:
    """Bytes, on one rank, of all that such a restore fills."""
    return sum(
        len(read_positions(group, local_tokens, stop_tokens)) * group.block_bytes
        for group in groups
    )


def restores_of(
    groups: Iterable[Group], index: HostIndex, admission: Admission, load: LoadSpec, life: int
) -> list[Restore]:
    """What fills an admitted request's own blocks from the slots that it was promised.

    Raises:
        RuntimeError: a promised block has no slot, or nowhere to go. The engine cannot be told any
            other way, and would go on with wrong bytes.
    """
    restores = []
    for group in groups:
        reads = read_positions(group, load.local_tokens, load.stop_tokens)
        if not reads:
            continue
        names = block_names(admission.request.block_hashes, group, reads.start, reads.stop)
        columns = Columns(group.index)
        table = admission.tables[group.index]
        columns.add_run(life, reads.start, names, table[reads.start : reads.stop])
        try:
            slots, generations = index.locate(group.index, names)
        except KeyError as name:
            raise _drifted(admission, load, group, f"no slot holds block {name}") from None
        if not len(reads) == len(names) == len(columns.blocks) or 0 in columns.blocks:
            raise _drifted(admission, load, group, "its table lacks blocks to be filled")
        restores.append(Restore(columns, slots, generations, group.block_bytes))
    return restores


def _drifted(admission: Admission, load: LoadSpec, group: Group, what: str) -> RuntimeError:
    return RuntimeError(
        f"moonstep: request {admission.request.request_id} was promised tokens "
        f"{load.local_tokens} to {load.stop_tokens}, but {what} (group {group.index}): promises "
        f"and slots have drifted apart"
    )
