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


_PARSERS: Final[dict[str, tuple[str, Callable[[str, object], Any]]]] = {
    "host_cache": ("host_cache_bytes", parse_size),
    "min_hit_tokens": ("min_hit_tokens", _parse_count),
    "capture": ("capture", _parse_capture),
    "victim_bytes": ("victim_bytes", parse_size),
    "leaver_bytes": ("leaver_bytes", parse_size),
    "sync_restore_bytes": ("sync_restore_bytes", parse_size),
    "restore_slice_bytes": ("restore_slice_bytes", parse_size),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """All that a user can set, in the units the code uses. Both halves read the same object."""

    host_cache_bytes: int = 4 << 30
    """Host memory for kept blocks, of the whole engine; its ranks share it evenly."""
    min_hit_tokens: int = 0
    """Hits that would save fewer tokens than this are not restored."""
    capture: CaptureMode = CaptureMode.LAZY
    """When blocks are captured."""
    victim_bytes: int = 256 << 20
    """Most that one step captures of the requests it preempts, on one rank."""
    leaver_bytes: int = 1 << 30
    """Most that one step captures of what the engine is about to overwrite, on one rank."""
    sync_restore_bytes: int = 64 << 20
    """Most that one step restores at once, on one rank; what is larger is loaded in slices."""
    restore_slice_bytes: int = 32 << 20
    """Size of such a slice, on one rank: a step copies one."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """Settings from what stands in ``kv_connector_extra_config``.

        Raises:
            SettingError: for an unknown key, a value of the wrong type, an impossible size.
        """
        values: dict[str, Any] = {}
        for key, value in raw.items():
            if key not in _PARSERS:
                raise SettingError(key, value, _unknown_remedy(key))
            name, parse = _PARSERS[key]
            values[name] = parse(key, value)
        return cls(**values)

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
