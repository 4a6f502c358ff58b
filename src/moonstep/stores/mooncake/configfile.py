"""The JSON file that vLLM's own Mooncake connector takes: what it says, as parameters of a URL.

A size such as ``"4GB"`` means 4 GiB in this file, as vLLM reads it; in URLs and settings of
Moonstep it means 4 * 10**9 bytes.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

VARIABLE: Final = "MOONCAKE_CONFIG_PATH"
"""Names the file, when the URL names neither a master nor a file."""

DEFAULT_SEGMENT: Final = "4GB"
DEFAULT_PROTOCOL: Final = "rdma"

_SIZE: Final = re.compile(r"([\d.]+)\s*(gb|mb|kb|b)?")
_UNITS: Final = {"gb": 1 << 30, "mb": 1 << 20, "kb": 1 << 10, "b": 1, None: 1}


class BadConfigFile(ValueError):
    """The file cannot be read or used; the message is one line."""


def read(path: Path) -> dict[str, str]:
    """What the file says, as the parameters of a URL; ``master`` is the master's address.

    What vLLM takes for granted where the file is silent is taken here as well, but for the staging
    memory of 4 GiB, which Moonstep does not need. Keys that mean nothing here are named in the log.

    Raises:
        BadConfigFile: when it is no such file, or says what cannot be.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadConfigFile(f"{path} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise BadConfigFile(f"{path} holds no JSON object")
    unknown = said.keys() - _READERS.keys()
    if unknown:
        logger.warning("moonstep: %s: without effect here: %s", path, ", ".join(sorted(unknown)))
    try:
        params = {name: text for key, (name, read) in _READERS.items() if (text := read(said, key))}
    except ValueError as error:
        raise BadConfigFile(f"{path}: {error}") from error
    if "master" not in params:
        raise BadConfigFile(f"{path}: 'master_server_address' is missing")
    if _mode(said) == "standalone-store":
        params["segment"] = "0"
    return params


def size_bytes(value: object) -> int:
    """
    >>> [size_bytes(value) for value in (4096, "4GB", "1.5 mb", "100")]
    [4096, 4294967296, 1572864, 100]
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(str(value).strip().lower())
    if match is None or match[1].count(".") > 1:
        raise ValueError(f"{value!r} is no size such as 4GB")
    return int(float(match[1]) * _UNITS[match[2]])


_Reader = Callable[[Mapping[str, Any], str], str]


def _text(said: Mapping[str, Any], key: str, default: str = "") -> str:
    value = said.get(key, default)
    if value is None:
        return default
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is no text: {value!r}")
    return value.strip()


def _protocol(said: Mapping[str, Any], key: str) -> str:
    return _text(said, key, DEFAULT_PROTOCOL)


def _segment(said: Mapping[str, Any], key: str) -> str:
    return str(size_bytes(said.get(key, DEFAULT_SEGMENT)))


def _buffer(said: Mapping[str, Any], key: str) -> str:
    return str(size_bytes(said[key])) if key in said else ""


def _mode(said: Mapping[str, Any], key: str = "mode") -> str:
    mode = _text(said, key, "embedded")
    if mode not in ("embedded", "standalone-store"):
        raise ValueError(f"{key!r} is 'embedded' or 'standalone-store', not {mode!r}")
    return mode


def _checked_only(read: _Reader) -> _Reader:
    """A key whose value is looked at elsewhere."""

    def checked(said: Mapping[str, Any], key: str) -> str:
        read(said, key)
        return ""

    return checked


_READERS: Final[dict[str, tuple[str, _Reader]]] = {
    "master_server_address": ("master", _text),
    "metadata_server": ("metadata", _text),
    "protocol": ("protocol", _protocol),
    "device_name": ("device", _text),
    "global_segment_size": ("segment", _segment),
    "local_buffer_size": ("buffer", _buffer),
    "tenant_id": ("tenant", _text),
    "local_hostname": ("host", _text),
    "mode": ("mode", _checked_only(_mode)),
    # The SSD tier is the pool's affair: what lies there is read like anything else.
    "enable_offload": ("offload", lambda said, key: ""),
}
"""For each key of the file, the parameter it stands for, and how its value is read."""
