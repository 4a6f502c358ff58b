"""What a promise means in each group: which of the request's blocks are filled from which slots."""

from __future__ import annotations

from collections.abc import Sequence

from moonstep.groups import Group
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.loads import Restore
from moonstep.scheduler.tracker import Admission, LoadSpec


def restores_of(
    groups: Sequence[Group], index: HostIndex, admission: Admission, load: LoadSpec, life: int
) -> list[Restore]:
    """What fills an admitted request's own blocks from the slots that it was promised.

    Raises:
        RuntimeError: a promised block has no slot. The engine cannot be told any other way, and
            would go on with wrong bytes.
    """
    restores = []
    for group, table in zip(groups, admission.tables, strict=True):
        first = load.local_tokens // group.block_tokens
        stop = load.stop_tokens // group.block_tokens
        columns = Columns(group.index)
        names = admission.request.block_hashes[first:stop]
        columns.add_run(life, first, names, table[first:stop])
        try:
            slots, generations = index.locate(group.index, names)
        except KeyError as name:
            raise RuntimeError(
                f"moonstep: request {admission.request.request_id} was promised tokens "
                f"{load.local_tokens} to {load.stop_tokens}, but no slot holds block {name} of "
                f"group {group.index}: promises and slots have drifted apart"
            ) from None
        restores.append(Restore(columns, slots, generations, group.block_bytes))
    return restores
