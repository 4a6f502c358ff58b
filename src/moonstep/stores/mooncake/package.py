"""Mooncake's Python package: loaded when it is needed, with words for when it cannot be."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import Final

SYSTEM_LIBRARIES: Final = ("libibverbs1", "libnuma1", "libcurl4")
"""Debian's packages of the shared libraries that it loads and does not bring (Debian 13 calls the
last one ``libcurl4t64``)."""

ENVIRONMENT: Final = {
    # Its C++ code writes to standard error; errors only, not what it does. INFO and 0 show all.
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
    # It tries a random port, one a second, and keeps the GIL: twenty tries are too many at a start.
    "MC_STORE_CLIENT_SETUP_RETRIES": "4",
}


class PackageMissing(RuntimeError):
    """Mooncake's package is not installed, or does not load. The message says what to install."""


def load() -> ModuleType:
    """The module ``mooncake.store``.

    What it reads from the environment is set here where the user has not set it (``ENVIRONMENT``).

    Raises:
        PackageMissing: with one line that says what to install.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise PackageMissing(missing()) from error
    except ImportError as error:
        libraries = " ".join(SYSTEM_LIBRARIES)
        raise PackageMissing(
            f"Mooncake does not load: {error}; on Debian or Ubuntu: apt-get install {libraries}"
        ) from error


def missing() -> str:
    """What to say when it is not installed."""
    return (
        "Mooncake is not installed: pip install 'moonstep[mooncake]', "
        "or 'moonstep[mooncake-cuda]' for CUDA"
    )
