"""vLLM's own MooncakeStoreConnector over a real master on loopback, started and stopped here.

Each process of an audit has a master of its own, so that engines which run side by side do not see
each other's objects; between two engines of a process all objects are removed.
"""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from moonstep.audit.connectors import Kit
from moonstep.audit.connectors.mooncake import client_settings, retire, settings, with_decode
from moonstep.stores.mooncake import package, process
from moonstep.stores.mooncake.process import LOOPBACK, MasterPlan

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from moonstep.audit.inspector import Kept

SEGMENT_BYTES: Final = 16 << 20
"""Little: a client that was closed does not give all of it back to the process."""
_BUFFER_BYTES: Final = 16 << 20
_STOP_S: Final = 10.0

NOTE = (
    "MooncakeStoreConnector ran over a real Mooncake Store: a master on loopback for each process, "
    "clients over TCP, a segment in each worker. Its objects cannot be listed, so what is stored "
    "is compared when it is loaded, and no fault can be injected. torch.cuda.Event, which it makes "
    "for every save, was replaced by one that is always done: the CPU build of torch has none."
)

_clients: list[Any] = []


def check() -> None:
    """Raise ``ValueError`` where there is no master to be started."""
    try:
        process.program()
    except package.PackageMissing as error:
        raise ValueError(str(error)) from error


class NoListing:
    """The books of a connector whose store does not list what it has."""

    def __init__(self, scheduler_half: Any, worker_halves: Sequence[Any]) -> None:
        del worker_halves
        self._scheduler = scheduler_half

    def kept(self) -> Iterator[Kept]:
        """Nothing that could be named."""
        return iter(())

    def check(self, running: Collection[str]) -> None:
        """Nothing is asked of its books."""

    def idle(self) -> bool:
        return not self._scheduler.has_pending_push_work()

    def counts(self) -> dict[str, int]:
        return {}


@contextmanager
def surroundings() -> Iterator[None]:
    """A master, a client with which to clear it, and what the connector reads to find it.

    Raises:
        PackageMissing: when Mooncake's package is not there.
    """
    # The package's own log lines, and those of a master that ends, are no part of a report.
    os.environ.setdefault("GLOG_minloglevel", "3")
    logging.getLogger("moonstep").setLevel(logging.CRITICAL)
    module = package.load()
    plan = MasterPlan(port=process.free_port(), metrics_port=process.free_port())
    with tempfile.TemporaryDirectory(prefix="audit-master-") as folder:
        master = process.start(plan, Path(folder, "master.log"), detached=True, ends_with_us=True)
        try:
            client = module.MooncakeDistributedStore()
            client.setup(LOOPBACK, "P2PHANDSHAKE", 0, _BUFFER_BYTES, "tcp", "", str(plan.address))
            _clients.append(client)
            with (
                patch.dict(os.environ, {"VLLM_HOST_IP": LOOPBACK}),
                client_settings(str(plan.address), SEGMENT_BYTES),
            ):
                yield
            _clients.clear()
            client.close()
        finally:
            master.terminate()
            master.wait(_STOP_S)


def _fresh() -> None:
    for client in _clients:
        client.remove_all(force=True)


KIT = Kit(
    settings=settings,
    variants={"prompts": settings, "decode": with_decode},
    inspect=NoListing,
    surroundings=surroundings,
    fresh=_fresh,
    retire=retire,
    in_its_own_time=True,
    note=NOTE,
)
