"""The header of an object: what its payload has to be, so that nothing else is ever taken for it.

64 bytes in front of the payload: magic, version, payload length, a digest of the key and a checksum
of the payload, with a checksum of the header itself at the end. It finds damage and mix-ups of
every kind. It is no signature: whoever may write to the store can make what passes for an object.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import Enum
from typing import Final, NamedTuple

import xxhash

from moonstep.stores.base import Key

MAGIC: Final = b"MOONSTEP"
VERSION: Final = 1

_FIELDS: Final = struct.Struct("<8sHHIQ16s16s")
_CHECKSUM: Final = struct.Struct("<8s")
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUM.size


class Damage(Enum):
    """Why an object is not what its key says."""

    NOT_AN_OBJECT = "no header of ours"
    HEADER = "the header is damaged"
    VERSION = "another version's header"
    KEY = "another key's object"
    LENGTH = "another length"
    PAYLOAD = "the payload is damaged"


class Header(NamedTuple):
    """What a whole header says."""

    version: int
    payload_bytes: int
    key_digest: bytes
    payload_digest: bytes


def seal(key: Key, payload: Iterable[memoryview]) -> bytes:
    """The header of an object. Reads the payload once, outside the GIL."""
    digest, nbytes = _digest(payload)
    fields = _FIELDS.pack(MAGIC, VERSION, HEADER_BYTES, 0, nbytes, _key_digest(key), digest)
    return fields + _checksum(fields)


def parse(header: bytes | memoryview) -> Header | Damage:
    """What a header says, or what is wrong with it.

    >>> parse(seal(Key("a/b"), [memoryview(b"bytes")])).payload_bytes
    5
    >>> parse(bytes(64))
    <Damage.NOT_AN_OBJECT: 'no header of ours'>
    """
    raw = bytes(header[:HEADER_BYTES])
    if len(raw) < HEADER_BYTES or not raw.startswith(MAGIC):
        return Damage.NOT_AN_OBJECT
    fields = raw[: _FIELDS.size]
    if _checksum(fields) != raw[_FIELDS.size :]:
        return Damage.HEADER
    _, version, header_bytes, _, nbytes, key_digest, payload_digest = _FIELDS.unpack(fields)
    if version != VERSION or header_bytes != HEADER_BYTES:
        return Damage.VERSION
    return Header(version, nbytes, key_digest, payload_digest)


def verify(key: Key, header: bytes | memoryview, payload: Iterable[memoryview]) -> Damage | None:
    """What is wrong with the object under ``key``, or ``None`` when every byte is as it was put.

    The payload is checked where it lies, and read once, outside the GIL.
    """
    spans = tuple(payload)
    # A key and a payload have one header; what is wrong with another is asked only of that one.
    right = seal(key, spans)
    return None if header[:HEADER_BYTES] == right else _damage(header, right)


def _damage(header: bytes | memoryview, right: bytes) -> Damage:
    """What is wrong with a header that is not the right one."""
    said, wanted = parse(header), parse(right)
    assert isinstance(wanted, Header)
    if isinstance(said, Damage):
        return said
    if said.key_digest != wanted.key_digest:
        return Damage.KEY
    return Damage.PAYLOAD if said.payload_bytes == wanted.payload_bytes else Damage.LENGTH


def _digest(payload: Iterable[memoryview]) -> tuple[bytes, int]:
    spans = tuple(payload)
    if len(spans) == 1:
        return xxhash.xxh3_128_digest(spans[0]), spans[0].nbytes
    hasher, nbytes = xxhash.xxh3_128(), 0
    for span in spans:
        hasher.update(span)
        nbytes += span.nbytes
    return hasher.digest(), nbytes


def _key_digest(key: Key) -> bytes:
    return xxhash.xxh3_128_digest(key.encode())


def _checksum(fields: bytes | memoryview) -> bytes:
    return xxhash.xxh3_64_digest(fields)
