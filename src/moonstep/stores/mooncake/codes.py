"""What Mooncake's return codes mean, for one object of a batch.

Zero and above is success. The names are Mooncake's own; the list is that of version 0.3.13, and a
code that is not in it is taken as a failure of that object alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Meaning(Enum):
    """What a return code says about an object, or about the store."""

    DONE = "done"
    MISS = "miss"
    """There is no such object, or it went while it was read."""
    EXISTS = "exists"
    HELD = "held"
    """Somebody reads, copies or moves it, so it cannot be removed now."""
    PRESSURE = "pressure"
    """There is no room for it now."""
    DAMAGED = "damaged"
    FAILED = "failed"
    """This object could not be moved this time; others may be."""
    UNWELL = "unwell"
    """The master cannot be reached, or does not know this client: nothing can be done."""


@dataclass(frozen=True, slots=True)
class Code:
    """A return code: its number, Mooncake's name for it, and what it means to us."""

    number: int
    name: str
    meaning: Meaning


_MISS: Final = {
    -703: "REPLICA_IS_NOT_READY",
    -704: "OBJECT_NOT_FOUND",
    -707: "LEASE_EXPIRED",
    -710: "REPLICA_NOT_FOUND",
    -712: "REPLICA_IS_GONE",
    -713: "REPLICA_NOT_IN_LOCAL_MEMORY",
    -1100: "FILE_NOT_FOUND",
    -1200: "BUCKET_NOT_FOUND",
}
_EXISTS: Final = {
    -705: "OBJECT_ALREADY_EXISTS",
    -711: "REPLICA_ALREADY_EXISTS",
}
_HELD: Final = {
    -706: "OBJECT_HAS_LEASE",
    -708: "OBJECT_HAS_REPLICATION_TASK",
    -714: "OBJECT_REPLICA_BUSY",
}
_PRESSURE: Final = {
    -101: "SEGMENT_NOT_FOUND",
    -200: "NO_AVAILABLE_HANDLE",
    -1202: "KEYS_EXCEED_BUCKET_LIMIT",
    -1203: "KEYS_ULTRA_LIMIT",
    -1602: "DFS_QUOTA_EXCEEDED",
    -1700: "TENANT_QUOTA_EXCEEDED",
}
_DAMAGED: Final = {-801: "CHECKSUM_MISMATCH"}
_UNWELL: Final = {
    -103: "CLIENT_NOT_FOUND",
    -601: "ILLEGAL_CLIENT",
    -900: "RPC_FAIL",
    -901: "RPC_TIMEOUT",
    -1000: "ETCD_OPERATION_ERROR",
    -1001: "ETCD_KEY_NOT_EXIST",
    -1002: "ETCD_TRANSACTION_FAIL",
    -1003: "ETCD_CTX_CANCELLED",
    -1004: "OPLOG_ENTRY_NOT_FOUND",
    -1005: "K8S_LEASE_OPERATION_ERROR",
    -1006: "K8S_LEASE_NOT_FOUND",
    -1007: "INCOMPLETE_OPLOG_CATCH_UP",
    -1010: "UNAVAILABLE_IN_CURRENT_STATUS",
    -1011: "UNAVAILABLE_IN_CURRENT_MODE",
    -1701: "TENANT_NOT_REGISTERED",
}
_FAILED: Final = {
    -1: "INTERNAL_ERROR",
    -10: "BUFFER_OVERFLOW",
    -100: "SHARD_INDEX_OUT_OF_RANGE",
    -102: "SEGMENT_ALREADY_EXISTS",
    -300: "INVALID_VERSION",
    -400: "INVALID_KEY",
    -500: "WRITE_FAIL",
    -600: "INVALID_PARAMS",
    -700: "INVALID_WRITE",
    -701: "INVALID_READ",
    -702: "INVALID_REPLICA",
    -709: "OBJECT_NO_REPLICATION_TASK",
    -800: "TRANSFER_FAIL",
    -1101: "FILE_OPEN_FAIL",
    -1102: "FILE_READ_FAIL",
    -1103: "FILE_WRITE_FAIL",
    -1104: "FILE_INVALID_BUFFER",
    -1105: "FILE_LOCK_FAIL",
    -1106: "FILE_INVALID_HANDLE",
    -1201: "BUCKET_ALREADY_EXISTS",
    -1300: "UNABLE_OFFLOAD",
    -1301: "UNABLE_OFFLOADING",
    -1400: "TASK_NOT_FOUND",
    -1401: "TASK_PENDING_LIMIT_EXCEEDED",
    -1402: "JOB_NOT_FOUND",
    -1500: "SERIALIZE_UNSUPPORTED",
    -1501: "SERIALIZE_FAIL",
    -1502: "DESERIALIZE_FAIL",
    -1503: "PERSISTENT_FAIL",
    -1600: "DFS_NETWORK_TIMEOUT",
    -1601: "DFS_SERVICE_UNAVAILABLE",
    -1603: "DFS_PERMISSION_DENIED",
    -1604: "DFS_STALE_HANDLE",
    -1605: "DFS_PARTIAL_WRITE",
    -1702: "TENANT_NOT_EMPTY",
}

CODES: Final[dict[int, Code]] = {
    number: Code(number, name, meaning)
    for meaning, names in (
        (Meaning.MISS, _MISS),
        (Meaning.EXISTS, _EXISTS),
        (Meaning.HELD, _HELD),
        (Meaning.PRESSURE, _PRESSURE),
        (Meaning.DAMAGED, _DAMAGED),
        (Meaning.FAILED, _FAILED),
        (Meaning.UNWELL, _UNWELL),
    )
    for number, name in names.items()
}


def code(number: int) -> Code:
    """The meaning of a return value.

    >>> code(-200).meaning, code(-900).meaning, code(4096).meaning
    (<Meaning.PRESSURE: 'pressure'>, <Meaning.UNWELL: 'unwell'>, <Meaning.DONE: 'done'>)
    >>> code(-99_999)
    Code(number=-99999, name='unknown', meaning=<Meaning.FAILED: 'failed'>)
    """
    if number >= 0:
        return Code(number, "OK", Meaning.DONE)
    return CODES.get(number, Code(number, "unknown", Meaning.FAILED))
