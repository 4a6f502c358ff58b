"""The Mooncake store itself: the verbs of a store on a client of Mooncake's package."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final, TypeVar

from moonstep.stores.base import Get, Key, Put, Store, StoreUnwell, Transfer
from moonstep.stores.guarded import GuardedStore
from moonstep.stores.mooncake import package
from moonstep.stores.mooncake.address import Placed, columns
from moonstep.stores.mooncake.client import ANSWER_S, Client, SetUpRefused
from moonstep.stores.mooncake.codes import Code, Meaning, code
from moonstep.stores.mooncake.master import answers
from moonstep.stores.mooncake.options import OWN_SEGMENT, MooncakeOptions, SoftPin
from moonstep.stores.tally import Tally
from moonstep.stores.urls import Opener, StoreUrl, Use

logger = logging.getLogger(__name__)

CONNECT_S: Final = 10.0
"""How long opening waits for the first answer; mapping a large segment may take longer."""

REFUSED_S: Final = 60.0
"""After Mooncake refused to make a client it is not asked again for so long: a try may take it
seconds, with the GIL held."""

Answer = TypeVar("Answer", Put, Get)

_PUT: Final = {
    Meaning.DONE: Put.STORED,
    Meaning.EXISTS: Put.ALREADY_THERE,
    Meaning.PRESSURE: Put.NO_SPACE,
}
_GET: Final = {
    Meaning.MISS: Get.MISS,
    Meaning.DAMAGED: Get.DAMAGED,
}


class Errors(Tally):
    """Return codes that were failures, counted by verb and name; each kind is logged once."""

    def write(self, verb: str, found: Code) -> None:
        kind = f"{verb} {found.name}"
        if self.is_first(kind) and found.meaning is Meaning.FAILED:
            logger.warning("Mooncake store: %s (%d; logged once, then counted)", kind, found.number)


class MooncakeStore:
    """A :class:`Store` in a Mooncake Store, shared by all clients of a master.

    It begins without a client; ``probe`` makes one, and until it has, every verb raises
    ``StoreUnwell``. From then on the client stays, also when the master goes and comes back: it
    mounts its segment again by itself. What was in a master that was restarted is gone.

    The verbs block for as long as the master does. An object that is discarded, or replaced by one
    of another size, while another client reads it may give that client the bytes of a third one;
    the checks around every object find that out.
    """

    def __init__(
        self,
        options: MooncakeOptions,
        module: ModuleType,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._module = module
        self._clock = clock
        self._refusal: SetUpRefused | None = None
        self._set_up_again_s = 0.0
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._regions: list[memoryview] = []
        self._is_closed = False
        self.errors = Errors()

    @property
    def registrations(self) -> int:
        """Regions of memory that are registered with the client."""
        return self._client.registrations if self._client else 0

    def probe(self) -> None:
        """Make a client, if there is none, and see whether the master answers.

        Raises ``StoreUnwell`` when it does not. Never blocks for long on a master that is stopped.
        """
        with self._lock:
            self._check_open()
            if self._client is None:
                self._client = self._connected()
                return
        if not answers(self._options.master, ANSWER_S):
            raise StoreUnwell(f"no master answers at {self._options.master}")

    def register(self, memory: memoryview) -> None:
        """Tell the client of memory; and every client that comes later. Keeps the memory alive."""
        with self._lock:
            self._check_open()
            if self._client is not None:
                self._client.register(memory)
            self._regions.append(memory)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        numbers = self._run("contains", keys, lambda handle: handle.batch_is_exist(list(keys)))
        return [number > 0 for number in numbers]

    def put(self, items: Sequence[Transfer]) -> list[Put]:
        return _in_rounds(items, self._put)

    def get(self, items: Sequence[Transfer]) -> list[Get]:
        return _in_rounds(items, self._get)

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        """What was looked for or read within the last seconds has a lease, and stays."""
        return self._remove(keys, is_forced=False)

    def discard(self, keys: Sequence[Key]) -> list[bool]:
        """Leases are passed over: a damaged object would stay for as long as somebody reads it."""
        return self._remove(keys, is_forced=True)

    def clear(self) -> int:
        """Remove every object of the master, of whatever namespace; how many there were."""
        with self._calling() as handle:
            return int(handle.remove_all(True))

    def close(self) -> None:
        """Waits for calls under way, which a master that is stopped keeps for half a minute."""
        with self._lock:
            self._is_closed, client = True, self._client
        if client is not None:
            client.close()

    def _put(self, items: Sequence[Transfer]) -> list[Put]:
        there = self.contains([item.key for item in items])
        sizes = self._sizes([item.key for item, known in zip(items, there, strict=True) if known])
        # One whose size nobody tells, on a disk, is taken for what it should be: a read will tell.
        same = {item.key for item in items if sizes.get(item.key, -1) in (None, item.nbytes)}
        others = [key for key in sizes if key not in same]
        if others:
            self.discard(others)
        rest = [item for item in items if item.key not in same]
        stored = iter(self._put_new(rest))
        return [Put.ALREADY_THERE if item.key in same else next(stored) for item in items]

    def _get(self, items: Sequence[Transfer]) -> list[Get]:
        placed = [Placed.of(item) for item in items]
        numbers = self._run(
            "get",
            placed,
            lambda handle: handle.batch_get_into_multi_buffers(*columns(placed)),
        )
        pairs = list(zip(placed, map(code, numbers), strict=True))
        # A size that differs shows as one of several failures: ask what it is.
        sizes = self._sizes([each.key for each, got in pairs if got.meaning is Meaning.FAILED])
        return [self._got(each, got, sizes) for each, got in pairs]

    def _connected(self) -> Client:
        if self._refusal is not None and self._clock() < self._set_up_again_s:
            raise SetUpRefused(str(self._refusal))
        try:
            client = Client.connect(self._module, self._options)
        except SetUpRefused as refusal:
            self._refusal = refusal
            self._set_up_again_s = self._clock() + REFUSED_S
            raise
        try:
            for region in self._regions:
                client.register(region)
        except StoreUnwell:
            client.close()
            raise
        return client

    def _remove(self, keys: Sequence[Key], *, is_forced: bool) -> list[bool]:
        keys = list(keys)
        numbers = self._run("remove", keys, lambda handle: handle.batch_remove(keys, is_forced))
        return [number >= 0 for number in numbers]

    def _put_new(self, items: Sequence[Transfer]) -> list[Put]:
        placed = [(self._is_pinned(item), Placed.of(item)) for item in items]
        answers: dict[int, Put] = {}
        for is_pinned in (False, True):
            chosen = [n for n, (pinned, _) in enumerate(placed) if pinned is is_pinned]
            numbers = self._put_alike([placed[n][1] for n in chosen], is_pinned)
            for n, number in zip(chosen, numbers, strict=True):
                answers[n] = _PUT.get(code(number).meaning, Put.FAILED)
        return [answers[n] for n in range(len(items))]

    def _put_alike(self, placed: Sequence[Placed], is_pinned: bool) -> Sequence[int]:
        return self._run(
            "put",
            placed,
            lambda handle: handle.batch_put_from_multi_buffers(
                *columns(placed),
                self._replication(handle, is_pinned),
            ),
        )

    def _replication(self, handle: Any, is_pinned: bool) -> Any:
        config = self._module.ReplicateConfig()
        config.replica_num = self._options.replicas
        preferred = self._options.preferred_segment
        if preferred is not None:
            config.preferred_segment = (
                handle.get_hostname() if preferred == OWN_SEGMENT else preferred
            )
        if is_pinned:
            config.soft_pin_action = self._module.SoftPinAction.ENABLE
        return config

    def _is_pinned(self, item: Transfer) -> bool:
        match self._options.soft_pin:
            case SoftPin.ALL:
                return True
            case SoftPin.HEADS:
                return item.parent is None
        return False

    def _got(self, placed: Placed, got: Code, sizes: dict[Key, int | None]) -> Get:
        if got.meaning is Meaning.DONE:
            return Get.HIT if got.number == placed.nbytes else Get.DAMAGED
        if got.meaning is Meaning.FAILED and sizes.get(placed.key) not in (None, placed.nbytes):
            return Get.DAMAGED
        return _GET.get(got.meaning, Get.FAILED)

    def _sizes(self, keys: Sequence[Key]) -> dict[Key, int | None]:
        """Bytes of each object that is there; ``None`` where its replicas do not tell."""
        if not keys:
            return {}
        with self._calling() as handle:
            replicas = handle.batch_get_replica_desc(list(keys))
        return {key: _size(replicas[key][0]) for key in keys if replicas.get(key)}

    def _run(
        self, verb: str, batch: Sequence[Any], call: Callable[[Any], Sequence[int]]
    ) -> Sequence[int]:
        """What one call returns, a number for each of ``batch``. Raises ``StoreUnwell``."""
        with self._calling() as handle:
            if not batch:
                return []
            numbers = call(handle)
        if len(numbers) != len(batch):
            raise StoreUnwell(f"{verb} of {len(batch)} objects gave {len(numbers)} answers")
        for found in (code(number) for number in numbers if number < 0):
            if found.meaning not in (Meaning.MISS, Meaning.EXISTS):
                self.errors.write(verb, found)
            if found.meaning is Meaning.UNWELL:
                raise StoreUnwell(f"{verb}: {found.name} ({found.number})")
        return numbers

    def _calling(self) -> Any:
        client = self._client
        if client is None:
            self._check_open()
            raise StoreUnwell(f"no client of the master at {self._options.master} yet")
        return client.calling()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnwell("the Mooncake store is closed")


def _in_rounds(
    items: Sequence[Transfer], call: Callable[[Sequence[Transfer]], list[Answer]]
) -> list[Answer]:
    """The answers of ``call`` for batches in which no key comes twice; nearly always a single one.

    Mooncake's client reports success for each of two equal keys and fills the memory of one.
    """
    if len({item.key for item in items}) == len(items):
        return call(items)
    first: dict[Key, int] = {}
    for number, item in enumerate(items):
        first.setdefault(item.key, number)
    numbers = list(first.values())
    rest = [number for number in range(len(items)) if first[items[number].key] != number]
    answers = dict(zip(numbers, call([items[number] for number in numbers]), strict=True))
    answers |= zip(rest, _in_rounds([items[number] for number in rest], call), strict=True)
    return [answers[number] for number in range(len(items))]


def _size(replica: Any) -> int | None:
    if replica.is_memory_replica():
        return int(replica.get_memory_descriptor().buffer_descriptor.size)
    if replica.is_disk_replica():
        return int(replica.get_disk_descriptor().object_size)
    return None


def backend(url: StoreUrl) -> Opener:
    """``mooncake://MASTER:PORT?segment=32GiB&protocol=rdma``. The package is loaded on opening.

    A master that does not answer yet is waited for in the background, unless the store is opened to
    be looked at. Raises ``SettingError`` for what no waiting will mend.
    """
    options = MooncakeOptions.of_url(url)

    def open_mooncake() -> Store:
        try:
            store = MooncakeStore(options, package.load())
        except package.PackageMissing as error:
            raise url.error(str(error)) from error
        purpose = " (lookups)" if url.use is Use.LOOK_UP else ""
        guarded = GuardedStore(store, f"the Mooncake Store at {options.master}{purpose}")
        trouble = guarded.wait_well(CONNECT_S)
        if isinstance(trouble, SetUpRefused) or (trouble and url.inspecting):
            guarded.close()
            if url.inspecting:
                raise trouble
            raise url.error(str(trouble)) from trouble
        return guarded

    return open_mooncake
