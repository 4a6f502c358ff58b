"""An in-memory stand-in of Mooncake Store's Python client, for connectors that are built on it.

It offers the calls that vLLM's `MooncakeStoreConnector` makes on `mooncake.store`
(`MooncakeDistributedStore`, `ReplicateConfig`), with the client's own answers: 0 or bytes for
success, negative codes for failure, one for each key. All clients of a process share one
store. It moves bytes in the calling thread; it is no measure of speed, and no network.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NO_SPACE = -200
NOT_FOUND = -704
TRANSFER_FAILED = -800


class SharedStore:
    """Objects by key, and the faults that are switched on."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        self.stamps: dict[str, int] = {}
        self._stamp = 0
        self._open = {verb: threading.Event() for verb in ("put", "get", "contains")}
        self.struck = 0
        self.fault = "none"
        self.verbs: frozenset[str] = frozenset()
        self.clear()

    def fresh(self) -> None:
        """Forget all objects: another engine begins."""
        with self.lock:
            self.objects.clear()
            self.stamps.clear()
            self.struck = 0

    def put(self, key: str, payload: bytes) -> int:
        """Keep an object, unless there is one of this key."""
        with self.lock:
            if self.is_faulty("full", "put"):
                return NO_SPACE
            if self.is_faulty("failing", "put"):
                return TRANSFER_FAILED
            if key not in self.objects:
                self._stamp += 1
                self.objects[key] = payload
                self.stamps[key] = self._stamp
            return 0

    def wait_for(self, verb: str) -> None:
        """Block while calls of this verb are held back."""
        self.struck += self.fault != "none" and verb in self.verbs
        self._open[verb].wait()
        if self.is_faulty("unwell", verb):
            raise RuntimeError(f"the stand-in's {verb} was told to raise")

    def inject(self, kind: str, verbs: Sequence[str]) -> bool:
        """Go wrong until told otherwise; see `moonstep.audit.history.FAULTS`."""
        self.clear()
        if kind not in ("none", "vanishing", "failing", "unwell", "full", "hanging"):
            return False
        self.fault, self.verbs = kind, frozenset(verbs)
        for verb, gate in self._open.items():
            if kind == "hanging" and verb in self.verbs:
                gate.clear()
        return True

    def clear(self) -> None:
        """Be well again; calls that hang go on."""
        self.fault, self.verbs = "none", frozenset()
        for gate in self._open.values():
            gate.set()

    def is_faulty(self, kind: str, verb: str) -> bool:
        """Whether calls of this verb go wrong in this way now."""
        return self.fault == kind and verb in self.verbs


STORE = SharedStore()
"""The store behind all clients of this process."""


class ReplicateConfig:
    """Placement wishes; kept, and without effect here."""

    def __init__(self) -> None:
        self.replica_num = 1
        self.preferred_segment = ""
        self.group_ids: list[str] = []


class MooncakeDistributedStore:
    """The client. Addresses are those of this process, as in the real one."""

    def setup(self, *args: Any, **keywords: Any) -> int:
        """Succeeds at once."""
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        """Nothing to pin here."""
        return 0

    def unregister_buffer(self, address: int) -> int:
        """Nothing to let go here."""
        return 0

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1 for each key that is there, 0 for the others."""
        STORE.wait_for("contains")
        with STORE.lock:
            return [int(key in STORE.objects) for key in keys]

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Keep the bytes that lie at these addresses when the call gets to run."""
        STORE.wait_for("put")
        return [
            STORE.put(key, b"".join(map(ctypes.string_at, places, lengths)))
            for key, places, lengths in zip(keys, addresses, sizes, strict=True)
        ]

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Copy objects to these addresses; the bytes copied, or a code for each that was not."""
        STORE.wait_for("get")
        answers = []
        for index, key in enumerate(keys):
            if STORE.is_faulty("vanishing", "get"):
                with STORE.lock:
                    STORE.objects.pop(key, None)
            if STORE.is_faulty("failing", "get"):
                answers.append(TRANSFER_FAILED)
            else:
                answers.append(_copy_out(key, addresses[index], sizes[index]))
        return answers

    def remove_all(self, force: bool = False) -> int:
        """Forget every object; how many there were."""
        with STORE.lock:
            count = len(STORE.objects)
            STORE.objects.clear()
            STORE.stamps.clear()
            return count

    def close(self) -> int:
        """Nothing is held."""
        return 0


def _copy_out(key: str, places: Sequence[int], lengths: Sequence[int]) -> int:
    with STORE.lock:
        payload = STORE.objects.get(key)
    if payload is None:
        return NOT_FOUND
    offset = 0
    for place, length in zip(places, lengths, strict=True):
        piece = payload[offset : offset + length]
        ctypes.memmove(place, piece, len(piece))
        offset += length
    return len(payload)


@contextmanager
def installed() -> Iterator[None]:
    """Let `import mooncake.store` find the stand-in."""
    package, module = types.ModuleType("mooncake"), types.ModuleType("mooncake.store")
    package.__path__ = []
    for name in ("MooncakeDistributedStore", "ReplicateConfig"):
        setattr(module, name, globals()[name])
    package.store = module  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in ("mooncake", "mooncake.store")}
    sys.modules.update({"mooncake": package, "mooncake.store": module})
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = old
