"""A process that only gives memory to a master's pool, so that servers come and go and it stays.

``python -m moonstep.stores.mooncake.pool URL``, where the URL says how much. SIGTERM ends it.
"""

from __future__ import annotations

import signal
import sys
import threading

from moonstep.config import SettingError
from moonstep.stores.base import StoreUnwell
from moonstep.stores.urls import open_store


def main(url: str) -> int:
    """Hold the segment until a signal comes. The exit status; what is wrong goes to stderr."""
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    try:
        store = open_store(url)
    except (SettingError, StoreUnwell) as error:
        print(error, file=sys.stderr)
        return 2
    done.wait()
    closer = threading.Thread(target=store.close, daemon=True)
    closer.start()
    closer.join(5)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
