"""The directory store: objects as files on a local disk, ``dir:///path?capacity=200GiB``.

On disk, below the store's folder::

    moonstep-store        marks the folder as ours, with the format's version
    space                 how many bytes are taken, and the lock over them
    objects/NAMESPACE/FINGERPRINT/GROUP.RANK/BLOCK_HASH.kv
    incoming/OWNER/...    half-written objects of one process; OWNER.lock shows that it lives

The file system is the index: an object is there if its file is, so that any number of processes
agree without a word, and a start after a crash has nothing to repair. A file's time of last change
is the object's time of last use, marked a moment after a read, and files are evicted in that order.
"""

from moonstep.stores.directory.store import DirectoryStore, backend

__all__ = ["DirectoryStore", "backend"]
