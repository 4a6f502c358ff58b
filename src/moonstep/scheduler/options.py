"""What a request asks of the cache, read whenever it matters: it travels with the request."""

from __future__ import annotations

from typing import Final

from moonstep.config import RequestOptions, SettingError
from moonstep.engine import Request

_DEFAULT: Final = RequestOptions()


def options_of(request: Request) -> RequestOptions:
    """The request's own wishes; what it got wrong was said when it arrived."""
    if not request.kv_transfer_params:
        return _DEFAULT
    try:
        return RequestOptions.parse(request.kv_transfer_params)
    except SettingError:
        return _DEFAULT


def reads_store(request: Request) -> bool:
    """Whether what a store has of the request's prefix may be brought for it."""
    elsewhere = (request.kv_transfer_params or {}).get("do_remote_prefill")
    return options_of(request).load and not (request.skip_reading_prefix_cache or elsewhere)


def what_is_wrong(request: Request) -> SettingError | None:
    """What the request got wrong, if anything."""
    try:
        RequestOptions.parse(request.kv_transfer_params)
    except SettingError as error:
        return error
    return None
