"""Keys: two configurations name the same object only if every byte of it means the same.

A *fingerprint* covers all that decides an object's bytes beside its tokens, which the engine's
chained block hash covers (with LoRA adapters, cache salts and images among them). The object's key
is the user's namespace, the fingerprint, the group, the rank and the block hash at its end. Nothing
here depends on Python's ``hash``, on an order of insertion or on the process, so that two fresh
processes of one configuration agree.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Final, NewType

from moonstep.config import SettingError

Key = NewType("Key", str)
"""The name of an object: ``namespace/fingerprint/group.rank/block hash``.

Stores rely on no more than this: at least two parts between slashes, each of the characters
``A-Z a-z 0-9 . _ -`` and not beginning with a dot; the first part is the namespace.
"""

FORMAT_VERSION: Final = 1
"""Of what an object's payload is. Raised whenever the order of bytes in a slot changes."""

DEFAULT_NAMESPACE: Final = "default"
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_DIGEST_BYTES: Final = 16

WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".msgpack")
DESCRIPTION_FILES: Final = (
    "config.json",
    "params.json",
    "quantize_config.json",
    "quant_config.json",
)
SAMPLE_BYTES: Final = 64 << 10
SAMPLES_PER_SHARD: Final = 33


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What decides the bytes of one KV-cache group's objects.

    ``spec`` is the engine's own description of the group (heads, head size, window, ...);
    ``object_tokens`` is the length of an object of this group.
    """

    index: int
    kind: str
    block_tokens: int
    object_tokens: int
    layer_names: tuple[str, ...]
    spec: str


@dataclass(frozen=True, slots=True)
class Facts:
    """All that decides an object's bytes, beside its tokens. Filled at the engine's edge.

    ``model`` describes the model beyond its weights: architecture and the configuration in use,
    overrides included. ``epoch`` is :attr:`Epoch.value`. ``layout`` is the order of bytes in a
    block. ``drafter`` names a drafter whose layers are in the cache, and its draft length.
    """

    model: str
    revision: str
    epoch: str
    model_dtype: str
    cache_dtype: str
    quantization: str
    layout: str
    groups: tuple[GroupFacts, ...]
    hash_algorithm: str
    hash_seed: str
    tensor_parallel: int
    pipeline_parallel: int
    other_parallel: tuple[tuple[str, int], ...] = ()
    drafter: str = ""
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class KeyMaker:
    """Makes the keys of one configuration. Small, and pickles: it may travel in a plan.

    ``replicas[group]`` consecutive ranks, counted from rank 0, hold the same bytes of the group:
    one object serves them all, under the name of the first. A group that is not listed, or listed
    with 1, has bytes of its own on every rank.
    """

    namespace: str
    fingerprint: str
    replicas: tuple[int, ...] = ()

    def key(self, group: int, rank: int, block_hash: bytes) -> Key:
        """The key of the object that ends with the block of this hash.

        ``rank`` is that of the process whose bytes these are.

        >>> KeyMaker("tenant", "00ff").key(0, 1, bytes([0xab, 0xcd]))
        'tenant/00ff/0.1/abcd'
        >>> KeyMaker("tenant", "00ff", (2,)).key(0, 3, bytes([0xab, 0xcd]))
        'tenant/00ff/0.2/abcd'
        """
        first = rank - rank % self._copies(group)
        return Key(f"{self.namespace}/{self.fingerprint}/{group}.{first}/{block_hash.hex()}")

    def parts(self, group: int, rank_count: int) -> range:
        """The ranks whose keys together are a whole object of this group, on all ranks.

        >>> list(KeyMaker("n", "0").parts(0, 4)), list(KeyMaker("n", "0", (2,)).parts(0, 4))
        ([0, 1, 2, 3], [0, 2])
        """
        return range(0, rank_count, self._copies(group))

    def writes(self, group: int, rank: int, block_hash: bytes) -> bool:
        """Whether this rank is the one to store the object. Ranks with the same bytes take turns.

        >>> maker = KeyMaker("n", "0", (2,))
        >>> [[maker.writes(0, rank, bytes([end])) for rank in range(4)] for end in (4, 5)]
        [[True, False, True, False], [False, True, False, True]]
        """
        copies = self._copies(group)
        return copies == 1 or rank % copies == block_hash[-1] % copies

    def _copies(self, group: int) -> int:
        return self.replicas[group] if group < len(self.replicas) else 1


def key_maker(namespace: str, facts: Facts, replicas: tuple[int, ...] = ()) -> KeyMaker:
    """Raises ``SettingError`` for a namespace that cannot be part of a key."""
    return KeyMaker(checked_namespace(namespace), fingerprint(facts), replicas)


def fingerprint(facts: Facts) -> str:
    """The digest of the facts: 32 hex digits, equal in every process."""
    return _hasher(b"facts", canonical(facts)).hexdigest()


def checked_namespace(namespace: object) -> str:
    """The namespace, if it can be part of a key.

    Raises:
        SettingError: otherwise.
    """
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        remedy = "1 to 64 of the characters A-Z a-z 0-9 . _ -, the first of them no dot"
        raise SettingError("namespace", namespace, remedy)
    return namespace


def canonical(value: object) -> bytes:
    """Bytes that say a plain value and its type, and nothing but these.

    Values of different types differ, maps and dataclasses are sorted, and no two values that differ
    have the same bytes. Raises ``TypeError`` for what has no plain value.

    >>> canonical({"b": 1, "a": (True, None)}) == canonical({"a": [True, None], "b": 1})
    True
    >>> len({canonical(value) for value in (1, 1.0, "1", b"1", True, None, ("1",), {"1": 1})})
    8
    """
    match value:
        case None:
            return b"n"
        case Enum():
            return _tagged(b"e", type(value).__name__.encode(), canonical(value.value))
        case bool():
            return b"t" if value else b"f"
        case int():
            return _tagged(b"i", str(value).encode())
        case float():
            return _tagged(b"d", struct.pack("<d", value))
        case str():
            return _tagged(b"s", value.encode())
        case bytes():
            return _tagged(b"b", value)
        case list() | tuple():
            return _tagged(b"l", *map(canonical, value))
        case Mapping():
            items = sorted((canonical(key), canonical(each)) for key, each in value.items())
            return _tagged(b"m", *(part for item in items for part in item))
    if is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: getattr(value, field.name) for field in fields(value)}
        return _tagged(b"r", type(value).__name__.encode(), canonical(plain))
    raise TypeError(f"a {type(value).__name__} has no canonical form")


def _tagged(tag: bytes, *parts: bytes) -> bytes:
    """Parts with their lengths, so that no two lists of parts run together into the same bytes."""
    sized = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return tag + struct.pack("<Q", len(parts)) + sized


class Epoch:
    """Which weights the engine is serving now, as far as anybody can tell.

    It starts as the weights' identity. After a reset of the engine's cache (which may mean new
    weights) it is a fresh random nonce, held in memory only: what was stored before is never
    served again by this engine, and what is stored after it by nobody else, not even by this
    engine after a restart. An operator who names the weights (``weights_version``) replaces both.
    Belongs to the scheduler half; not thread-safe.
    """

    def __init__(
        self,
        weights: str | None,
        weights_version: str | None = None,
        nonce: Callable[[], str] = lambda: secrets.token_hex(_DIGEST_BYTES),
    ) -> None:
        self._is_named = weights_version is not None
        self._nonce = nonce
        self._value = (
            f"version:{weights_version}"
            if weights_version is not None
            else None
            if weights is None
            else f"weights:{weights}"
        )

    @property
    def value(self) -> str | None:
        """Part of :class:`Facts`. ``None``: nothing tells the weights, so there can be no store."""
        return self._value

    def reset(self) -> bool:
        """The engine's cache was reset. True when the epoch, and with it every key, is new."""
        if self._is_named or self._value is None:
            return False
        self._value = f"reset:{self._nonce()}"
        return True


def weights_identity(model: Path) -> str | None:
    """What tells these weights from any others: sizes and sampled contents of all shards.

    ``model`` is a model's folder or its one file. Of each shard the name, the size and samples of
    64 KiB spread evenly over it are read, both ends among them, and beside the shards the files
    that say how to read them. Where a model lies and when it was written does not matter. A change
    of a few numbers between the samples goes unseen: whoever edits weights in place has to give a
    ``weights_version``. ``None`` when there are no weights. Raises ``OSError`` when they cannot be
    read.
    """
    shards = sorted(_weight_files(model), key=lambda path: path.name)
    if not shards:
        return None
    hasher = _hasher(b"weights")
    for path in shards:
        hasher.update(canonical((path.name, path.stat().st_size)))
        for sample in _samples(path):
            hasher.update(sample)
    for name in DESCRIPTION_FILES if model.is_dir() else ():
        if (model / name).is_file():
            hasher.update(canonical((name, (model / name).read_bytes())))
    return hasher.hexdigest()


def sample_starts(nbytes: int) -> list[int]:
    """Where the samples of a file of ``nbytes`` bytes start.

    >>> sample_starts(100)
    [0]
    >>> starts = sample_starts(1 << 30)
    >>> len(starts), starts[0], starts[-1] == (1 << 30) - SAMPLE_BYTES
    (33, 0, True)
    """
    if nbytes <= SAMPLE_BYTES * SAMPLES_PER_SHARD:
        return list(range(0, nbytes, SAMPLE_BYTES))
    last = nbytes - SAMPLE_BYTES
    return [last * index // (SAMPLES_PER_SHARD - 1) for index in range(SAMPLES_PER_SHARD)]


def _weight_files(model: Path) -> list[Path]:
    if model.is_file():
        return [model]
    if not model.is_dir():
        return []
    return [path for path in model.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file()]


def _samples(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for start in sample_starts(path.stat().st_size):
            file.seek(start)
            yield file.read(SAMPLE_BYTES)


def _hasher(purpose: bytes, *parts: bytes) -> hashlib.blake2b:
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"moonstep-" + purpose)
    for part in parts:
        hasher.update(part)
    return hasher
