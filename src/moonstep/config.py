"""Settings: ``kv_connector_extra_config`` parsed once into one frozen object.

Whatever is wrong with a setting ends the start with one line that names the setting, its value and
what to do. Nothing is ignored: an unknown key is an error, and so is a value that cannot work.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Final, Self

_UNITS: Final = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "kb": 10**3,
    "m": 1 << 20,
    "mib": 1 << 20,
    "mb": 10**6,
    "g": 1 << 30,
    "gib": 1 << 30,
    "gb": 10**9,
    "t": 1 << 40,
    "tib": 1 << 40,
    "tb": 10**12,
}


class CaptureMode(Enum):
    """When a block is captured into the host cache."""

    EAGER = "eager"
    """As soon as a step fills it, and again when it is about to go and was evicted meanwhile."""
    LAZY = "lazy"
    """When the engine is about to lose it."""


class Role(Enum):
    """What an engine does with its store: vLLM's ``kv_role``."""

    BOTH = "kv_both"
    PRODUCER = "kv_producer"
    """Pushes, and looks for nothing: an engine that prefills for others."""
    CONSUMER = "kv_consumer"
    """Fetches what others have pushed."""


class Push(Enum):
    """Which objects are pushed to the store."""

    ALL = "all"
    """Every object, when it is whole."""
    REUSE = "reuse"
    """An object that is used again."""
    DECODED = "decoded"
    """An object with at least one decoded token in it, when it is whole."""
    NONE = "none"
    """Not for a user to write: a consumer that was told nothing else."""


class SettingError(ValueError):
    """A setting that cannot be used. The message is one line that begins with ``moonstep:``."""

    def __init__(self, setting: str, value: object, remedy: str) -> None:
        super().__init__(f"moonstep: {setting}={value!r}: {remedy}")


def parse_size(setting: str, value: object) -> int:
    """Bytes of a size such as ``"4GiB"``, ``"512 MB"`` or a plain number of bytes.

    >>> parse_size("host_cache", "1.5KiB")
    1536
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise SettingError(setting, value, "a size cannot be negative")
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
    if not isinstance(value, str) or match is None or match[2] not in _UNITS:
        raise SettingError(setting, value, 'write a size with a unit, such as "4GiB" or "512MiB"')
    return int(float(match[1]) * _UNITS[match[2]])


def _parse_count(setting: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SettingError(setting, value, "write a whole number, zero or more")
    return value


def _parse_capture(setting: str, value: object) -> CaptureMode:
    try:
        return CaptureMode(value)
    except ValueError:
        known = " or ".join(repr(mode.value) for mode in CaptureMode)
        raise SettingError(setting, value, f"write {known}") from None


def _parse_seconds(setting: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise SettingError(setting, value, "write seconds, zero or more")
    return float(value)


def _parse_share(setting: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise SettingError(setting, value, "write a share of the host cache, above 0 and up to 1")
    return float(value)


def _parse_text(setting: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise SettingError(setting, value, "write text")
    return value


def _parse_push(setting: str, value: object) -> Push:
    if value not in ("all", "reuse", "decoded"):
        raise SettingError(setting, value, "write 'all', 'reuse' or 'decoded'")
    return Push(value)


def _parse_positive(setting: str, value: object) -> int:
    count = _parse_count(setting, value)
    if not count:
        raise SettingError(setting, value, "write a whole number, one or more")
    return count


def _parse_rate(setting: str, value: object) -> int:
    rate = parse_size(setting, value)
    if not rate:
        raise SettingError(setting, value, "nothing would ever be stored: write more, or leave out")
    return rate


_STORE_PARSERS: Final[dict[str, tuple[str, Callable[[str, object], Any]]]] = {
    "namespace": ("namespace", _parse_text),
    "weights_version": ("weights_version", _parse_text),
    "chunk_tokens": ("chunk_tokens", _parse_positive),
    "push": ("push", _parse_push),
    "push_bytes_per_s": ("push_bytes_per_s", _parse_rate),
    "fetch_deadline_s": ("fetch_deadline_s", _parse_seconds),
    "push_deadline_s": ("push_deadline_s", _parse_seconds),
    "min_fetch_tokens": ("min_fetch_tokens", _parse_count),
    "max_pending": ("max_pending", _parse_count),
    "fetch_share": ("fetch_share", _parse_share),
    "max_busy_share": ("max_busy_share", _parse_share),
    "store_threads": ("store_threads", _parse_positive),
    "shutdown_deadline_s": ("shutdown_deadline_s", _parse_seconds),
}
"""Settings that mean something only with a store."""

_PARSERS: Final[dict[str, tuple[str, Callable[[str, object], Any]]]] = {
    "host_cache": ("host_cache_bytes", parse_size),
    "min_hit_tokens": ("min_hit_tokens", _parse_count),
    "capture": ("capture", _parse_capture),
    "victim_bytes": ("victim_bytes", parse_size),
    "leaver_bytes": ("leaver_bytes", parse_size),
    "sync_restore_bytes": ("sync_restore_bytes", parse_size),
    "restore_slice_bytes": ("restore_slice_bytes", parse_size),
    "idle_restore_bytes": ("idle_restore_bytes", parse_size),
    "retention_interval": ("retention_interval", _parse_count),
    "store": ("store", _parse_text),
    **_STORE_PARSERS,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """All that a user can set, in the units the code uses. Both halves read the same object."""

    host_cache_bytes: int = 4 << 30
    """Host memory for kept blocks, of the whole engine; its ranks share it evenly."""
    min_hit_tokens: int = 0
    """Hits that would save fewer tokens than this are not restored."""
    capture: CaptureMode | None = None
    """When blocks are captured. Not given: eager with a store, and with a model that has windows
    or recurrent layers; otherwise lazy."""
    victim_bytes: int = 256 << 20
    """Most that one step captures of the requests it preempts, on one rank."""
    leaver_bytes: int = 1 << 30
    """Most that one step captures of what the engine is about to overwrite, on one rank."""
    sync_restore_bytes: int = 64 << 20
    """Most that one step restores at once, on one rank; what is larger is loaded in slices."""
    restore_slice_bytes: int = 32 << 20
    """Size of such a slice, on one rank: a step copies one."""
    idle_restore_bytes: int = 1 << 30
    """As both of these, where they are less, while no other request is under way."""
    retention_interval: int = 8192
    """Windows and states are kept once in so many tokens of a prefix, beside the ends of prompts
    and answers; 0: only there. Layers of full attention keep all."""

    store: str | None = None
    """URL of a store behind the host cache."""
    namespace: str = "default"
    """Objects of different namespaces are never shared."""
    weights_version: str | None = None
    """Names the weights, instead of what they hold."""
    chunk_tokens: int = 256
    """Length of an object in the store."""
    push: Push | None = None
    """Which objects are pushed. Not given: all, and none in the role of a consumer."""
    push_bytes_per_s: int | None = None
    """Most bytes a second that the engine pushes, over all its ranks."""
    fetch_deadline_s: float = 2.0
    """How long after its arrival a request may be kept waiting for the store."""
    push_deadline_s: float = 30.0
    """After so long a push is given up; its slots stay its own until its call comes back."""
    min_fetch_tokens: int = 256
    """Shorter finds are not fetched."""
    max_pending: int = 16
    """Most requests that are kept waiting at a time."""
    fetch_share: float = 0.5
    """Most of the host cache that fetches and what they hold for waiting requests may take."""
    max_busy_share: float = 0.5
    """Most of the host cache that jobs may own; beyond it no new one starts."""
    store_threads: int = 4
    """Threads of each worker, half of them for pushes."""
    shutdown_deadline_s: float = 5.0
    """How long a shutdown waits for jobs under way."""
    role: Role = Role.BOTH
    """What the engine does with the store; the engine's own setting, not one of these."""

    @property
    def capture_mode(self) -> CaptureMode:
        if self.capture is not None:
            return self.capture
        pushes = self.store and self.pushed is not Push.NONE
        return CaptureMode.EAGER if pushes else CaptureMode.LAZY

    @property
    def pushed(self) -> Push:
        """Which objects this engine pushes."""
        if self.push is not None:
            return self.push
        return Push.NONE if self.role is Role.CONSUMER else Push.ALL

    @property
    def fetches(self) -> bool:
        """Whether this engine looks for prompts in the store."""
        return self.role is not Role.PRODUCER

    @classmethod
    def parse(cls, raw: Mapping[str, Any], role: Role = Role.BOTH) -> Self:
        """Settings from what stands in ``kv_connector_extra_config``, for an engine of this role.

        Raises:
            SettingError: for an unknown key, a value of the wrong type, an impossible size, and for
                what does not fit the role.
        """
        values: dict[str, Any] = {"role": role}
        for key, value in raw.items():
            if key not in _PARSERS:
                raise SettingError(key, value, _unknown_remedy(key))
            name, parse = _PARSERS[key]
            values[name] = parse(key, value)
            if key in _STORE_PARSERS and not raw.get("store"):
                raise SettingError(key, value, 'it means nothing without a "store": name one')
        settings = cls(**values)
        settings._check_role()
        return settings

    def _check_role(self) -> None:
        if self.role is not Role.BOTH and not self.store:
            remedy = 'it says what to do with a "store": name one, or use "kv_both"'
            raise SettingError("kv_role", self.role.value, remedy)
        if self.role is Role.CONSUMER and self.push in (Push.ALL, Push.REUSE):
            remedy = 'a kv_consumer pushes at most what it decodes: write "decoded", or leave out'
            raise SettingError("push", self.push.value, remedy)

    def check(self, slot_bytes: int, world_size: int, machine_bytes: int) -> None:
        """Raise when the host cache cannot hold a block, or is more than the machine has.

        ``slot_bytes`` is the memory of one block of one group on one rank.
        """
        need = slot_bytes * world_size
        if self.host_cache_bytes < need:
            remedy = f"one block takes {need} bytes over {world_size} rank(s): give at least that"
            raise SettingError("host_cache", self.host_cache_bytes, remedy)
        if self.host_cache_bytes > machine_bytes:
            remedy = f"this machine has {machine_bytes} bytes of memory in all: give less"
            raise SettingError("host_cache", self.host_cache_bytes, remedy)


def _unknown_remedy(key: str) -> str:
    close = difflib.get_close_matches(key, _PARSERS, n=1)
    if close:
        return f"there is no such setting; did you mean {close[0]!r}?"
    return f"there is no such setting; there are {', '.join(_PARSERS)}"


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What one request asks of the cache: ``kv_transfer_params={"moonstep": {"save": false}}``."""

    save: bool = True
    load: bool = True

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None) -> Self:
        """Options from a request's ``kv_transfer_params``.

        Raises:
            SettingError: for an unknown key or a value that is not true or false.
        """
        raw = (params or {}).get("moonstep")
        if raw is None:
            return cls()
        names = [f.name for f in fields(cls)]
        if not isinstance(raw, Mapping):
            raise SettingError("kv_transfer_params.moonstep", raw, f"write a map of {names}")
        for key, value in raw.items():
            if key not in names:
                raise SettingError(f"kv_transfer_params.moonstep.{key}", value, f"known: {names}")
            if not isinstance(value, bool):
                raise SettingError(f"kv_transfer_params.moonstep.{key}", value, "true or false")
        return cls(**raw)
