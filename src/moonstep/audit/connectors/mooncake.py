"""vLLM's own MooncakeStoreConnector, over the in-memory stand-in of its client."""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from moonstep.audit import mooncake_standin
from moonstep.audit.connectors import Kit
from moonstep.audit.environ import environment
from moonstep.audit.inspector import Kept

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterator, Sequence

    from moonstep.audit.shape import Shape

_KEY = re.compile(r"@tp_rank:(\d+)@.*@pp_rank:(\d+)@group:(\d+)@([0-9a-f]+)$")
_numbers = itertools.count()
_retired: list[Any] = []

NOTE = (
    "MooncakeStoreConnector ran over an in-memory stand-in of its client "
    "(moonstep.audit.mooncake_standin): no network, no master, no eviction but on command. "
    "torch.cuda.Event, which it makes for every save, was replaced by one that is always done: "
    "the CPU build of torch has none."
)


def settings(shape: Shape, rng: random.Random | None = None) -> dict[str, Any]:
    """An endpoint for lookups of its own: by default all engines of a host share one."""
    del shape
    extra: dict[str, Any] = {"lookup_rpc_port": os.getpid() * 100_000 + next(_numbers)}
    if rng is not None:
        extra["save_decode_cache"] = rng.random() < 0.5
    return extra


def with_decode(shape: Shape) -> dict[str, Any]:
    return settings(shape) | {"save_decode_cache": True}


class _DoneEvent:
    """`torch.cuda.Event` where there is no stream: all work before it is done when it is made."""

    def record(self, stream: Any = None) -> None:
        """Nothing is left to wait for."""

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def query(self) -> bool:
        return True


class MooncakeInspector:
    """Reads the stand-in's objects; the connector's own books are not opened."""

    def __init__(self, scheduler_half: Any, worker_halves: Sequence[Any]) -> None:
        self._scheduler = scheduler_half
        self._shards = max(half.connector_worker.tp_rank for half in worker_halves) + 1

    def kept(self) -> Iterator[Kept]:
        store = mooncake_standin.STORE
        with store.lock:
            items = list(store.objects.items())
            stamps = dict(store.stamps)
        for key, payload in items:
            match = _KEY.search(key)
            if match is not None:
                shard, stage, group, name = match.groups()
                yield Kept(
                    int(group),
                    bytes.fromhex(name),
                    int(stage) * self._shards + int(shard),
                    stamps.get(key, 0),
                    partial(bytes, payload),
                )

    def check(self, running: Collection[str]) -> None:
        """Nothing is asked of its books."""

    def idle(self) -> bool:
        return not self._scheduler.has_pending_push_work()

    def counts(self) -> dict[str, int]:
        return {"objects": len(mooncake_standin.STORE.objects)}


@contextmanager
def client_settings(master: str, segment_bytes: int) -> Iterator[None]:
    """The file that the connector reads its client's settings from, and events that a CPU has."""
    facts = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "protocol": "tcp",
        "global_segment_size": segment_bytes,
        "local_buffer_size": segment_bytes,
    }
    with tempfile.TemporaryDirectory(prefix="audit-mooncake-") as folder:
        path = Path(folder, "mooncake.json")
        path.write_text(json.dumps(facts))
        with (
            environment("MOONCAKE_CONFIG_PATH", str(path)),
            patch.object(torch.cuda, "Event", _DoneEvent),
        ):
            yield


@contextmanager
def surroundings() -> Iterator[None]:
    """The stand-in in place of the client."""
    with client_settings("127.0.0.1:50051", 1 << 20), mooncake_standin.installed():
        yield


def _fresh() -> None:
    mooncake_standin.STORE.fresh()


def retire(halves: Sequence[Any]) -> None:
    """Keep the halves from being collected.

    The lookup client's socket still waits for an answer that will not come, and its ZeroMQ
    context would block whoever collects it.
    """
    _retired.append(halves)


def _store(scheduler_half: Any) -> mooncake_standin.SharedStore:
    del scheduler_half
    return mooncake_standin.STORE


KIT = Kit(
    settings=settings,
    variants={"prompts": settings, "decode": with_decode},
    inspect=MooncakeInspector,
    surroundings=surroundings,
    fresh=_fresh,
    retire=retire,
    store=_store,
    note=NOTE,
)
