"""Stores: what lies behind the host cache and keeps objects by key.

``open_store(url)`` opens a store; ``CheckedStore`` is how it is read and written. Backends
are built against ``moonstep.stores.base`` and tested with ``moonstep.stores.testing``.
"""

from moonstep.stores.base import (
    Entry,
    Get,
    Inspectable,
    Key,
    Put,
    RegistersMemory,
    Store,
    StoreUnwell,
    Transfer,
    Usage,
)
from moonstep.stores.checked import CheckedStore
from moonstep.stores.urls import Backend, Opener, StoreUrl, open_store, resolve

__all__ = [
    "Backend",
    "CheckedStore",
    "Entry",
    "Get",
    "Inspectable",
    "Key",
    "Opener",
    "Put",
    "RegistersMemory",
    "Store",
    "StoreUnwell",
    "StoreUrl",
    "Transfer",
    "Usage",
    "open_store",
    "resolve",
]
