"""The Mooncake store: objects in the memory of many machines, ``mooncake://HOST?segment=32GiB``.

Mooncake Store keeps objects in *segments*, memory that its clients give to a common pool; a
*master* knows which object lies where. Every worker of an engine is a client that may give a
segment; the scheduler's process is one that only asks. Bytes move between clients, without the
master.

    options    what a URL says
    configfile what the JSON file of vLLM's own Mooncake connector says
    package    Mooncake's Python package: loading it, and what to install when it is not there
    client     one client of the package: its calls, and its end, which must not hold anybody up
    codes      what each of its return codes means
    address    where the bytes of a span lie
    master     the master on the network: whether it answers
    process    starting one
    metrics    what it counts
    pool       a process that gives memory and does nothing else
    local      master and pool of one machine, kept by a record: moonstep up and down
    store      the store itself
"""

from moonstep.stores.mooncake.store import MooncakeStore, backend

__all__ = ["MooncakeStore", "backend"]
