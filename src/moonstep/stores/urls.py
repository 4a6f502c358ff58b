"""Store URLs: ``scheme://host/path?parameter=value``. The scheme chooses the backend.

A third party's package registers a backend by an entry point of the group ``moonstep.stores``: its
name is the scheme, its value a function from :class:`StoreUrl` to an :class:`Opener`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from moonstep.config import SettingError, parse_size
from moonstep.stores.base import Store

ENTRY_POINT_GROUP: Final = "moonstep.stores"
SETTING: Final = "store"
"""The setting that error messages name."""

_BUILT_IN: Final = {
    "dir": "moonstep.stores.directory:backend",
    "memory": "moonstep.stores.memory:backend",
    "mooncake": "moonstep.stores.mooncake:backend",
}


class Use(Enum):
    """What a store is opened for."""

    SERVE = "serve"
    """A worker puts and gets."""
    LOOK_UP = "look up"
    """The scheduler's process asks what is there."""
    INSPECT = "inspect"
    """An operator looks after it."""


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A URL in its parts. ``params`` holds the text of each parameter.

    ``use`` says what the store is opened for: a backend gives and creates nothing where it is not
    to serve, and asks then for no parameter that only serving needs.
    """

    text: str
    scheme: str
    host: str
    path: str
    params: Mapping[str, str]
    use: Use = Use.SERVE

    @property
    def inspecting(self) -> bool:
        return self.use is Use.INSPECT

    @classmethod
    def parse(cls, text: str, use: Use = Use.SERVE) -> StoreUrl:
        """The parts of ``text``.

        Raises:
            SettingError: when it is no URL, or a parameter has no value or two.

        >>> url = StoreUrl.parse("dir:///var/cache/moonstep?capacity=200GiB")
        >>> url.scheme, url.path, dict(url.params)
        ('dir', '/var/cache/moonstep', {'capacity': '200GiB'})
        """
        if not isinstance(text, str):
            raise SettingError(SETTING, text, 'write a URL, such as "dir:///path?capacity=200GiB"')
        scheme, separator, _ = text.partition("://")
        if not separator or not scheme:
            raise SettingError(SETTING, text, 'write a URL, such as "dir:///path?capacity=200GiB"')
        split = urlsplit(text)
        if split.fragment:
            raise SettingError(SETTING, text, 'write "%23" for "#"')
        params: dict[str, str] = {}
        for name, value in parse_qsl(split.query, keep_blank_values=True):
            if not value or name in params:
                raise SettingError(SETTING, text, f"parameter {name!r} needs one value")
            params[name] = value
        return cls(text, scheme, split.netloc, unquote(split.path), params, use)

    def check_params(self, known: Collection[str]) -> None:
        """Raise ``SettingError`` for the first parameter that is not known."""
        for name in self.params:
            if name not in known:
                raise self.error(_unknown(f"parameter {name!r}", name, known))

    def size(self, name: str) -> int | None:
        """Bytes of a parameter such as ``capacity=200GiB``; ``None`` when it is not given."""
        value = self.params.get(name)
        return None if value is None else parse_size(f"{SETTING} parameter {name}", value)

    def error(self, remedy: str) -> SettingError:
        """The error to raise when this URL cannot be used."""
        return SettingError(SETTING, self.text, remedy)


Opener = Callable[[], Store]
"""Opens the store. May block, and raises ``SettingError`` or ``StoreUnwell`` when it cannot."""

Backend = Callable[[StoreUrl], Opener]
"""Checks a URL, touching nothing, and answers how to open it. Raises ``SettingError``."""


def resolve(text: str, use: Use = Use.SERVE) -> Opener:
    """Check a URL and say how to open it. Opens nothing, so that any process may ask.

    Raises:
        SettingError: for a scheme nobody registered, or whatever the backend does not accept.
    """
    url = StoreUrl.parse(text, use)
    return _backend(url)(url)


def open_store(text: str, use: Use = Use.SERVE) -> Store:
    """Open the store of a URL. Raises as :func:`resolve` does, and what the opener raises."""
    return resolve(text, use)()


def _backend(url: StoreUrl) -> Backend:
    if url.scheme in _BUILT_IN:
        module, _, name = _BUILT_IN[url.scheme].partition(":")
        built_in: Backend = getattr(import_module(module), name)
        return built_in
    third_party: dict[str, EntryPoint] = {
        point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)
    }
    if url.scheme not in third_party:
        known = [*_BUILT_IN, *sorted(third_party)]
        raise url.error(_unknown(f"store {url.scheme!r}", url.scheme, known))
    try:
        backend: Backend = third_party[url.scheme].load()
    except Exception as error:
        where = third_party[url.scheme].value
        raise url.error(f"its backend {where} does not load: {error}") from error
    return backend


def _unknown(what: str, name: str, known: Collection[str]) -> str:
    """
    >>> _unknown("parameter 'capacty'", "capacty", ["capacity"])
    "there is no parameter 'capacty'; did you mean 'capacity'?"
    """
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"there is no {what}; did you mean {close[0]!r}?"
    return f"there is no {what}; there are: {', '.join(known) or 'none'}"
