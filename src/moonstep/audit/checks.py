"""Checks: what has to hold after every step and at the end of a history."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from moonstep.audit import pool
from moonstep.audit.findings import Kind

if TYPE_CHECKING:
    from moonstep.audit.engine import Engine
    from moonstep.audit.inspector import Inspector, Kept
    from moonstep.audit.oracle import Named, States

IDLE_DEADLINE_S = 5.0
FLUSH_STEPS = 20
KEPT_TURNS = 8
"""A kept block whose stamp is unchanged is read again in one of so many steps."""


class ThreadWatch:
    """Threads that were started with the engine, and exceptions that ended threads."""

    def __init__(self, passing: tuple[str, ...] = ()) -> None:
        self._passing = passing
        self._before = set(threading.enumerate())
        self._own: list[threading.Thread] = []
        self._died: list[str] = []
        self._hook = threading.excepthook
        threading.excepthook = self._note

    def started(self) -> None:
        """Construction is over: the threads that came with it have to live."""
        self._own = [
            thread
            for thread in threading.enumerate()
            if thread not in self._before and thread.name not in self._passing
        ]

    def dead(self) -> str | None:
        """What happened to a thread that is no longer there, or None."""
        if self._died:
            return self._died[0]
        for thread in self._own:
            if not thread.is_alive():
                return f"thread {thread.name} is gone"
        return None

    def left(self) -> list[str]:
        """Threads that would keep the process from ending."""
        return [
            thread.name
            for thread in threading.enumerate()
            if thread not in self._before and thread.is_alive() and not thread.daemon
        ]

    def close(self) -> None:
        """Put the exception hook back."""
        threading.excepthook = self._hook

    def _note(self, args: Any) -> None:
        name = args.thread.name if args.thread is not None else "?"
        self._died.append(f"thread {name} ended with {args.exc_type.__name__}: {args.exc_value}")


def after_step(engine: Engine) -> None:
    """The pool's books, the connector's books, and every object it keeps."""
    if problem := pool.discrepancy(engine.scheduler):
        engine.report(Kind.BOOKS, problem)
    if problem := engine.threads.dead():
        engine.report(Kind.THREAD_DIED, problem)
    if engine.inspector is not None:
        check_books(engine, engine.inspector)
        engine.kept_watch.compare(engine, engine.inspector)


def check_books(engine: Engine, inspector: Inspector) -> None:
    """Ask the connector whether its books add up."""
    try:
        inspector.check([request.request_id for request in engine.scheduler.running])
    except AssertionError as error:
        engine.report(Kind.BOOKS, f"the connector's books: {error}")


class KeptWatch:
    """Compares what a connector keeps with the oracle, by block hash.

    A block is read when it is new or its stamp has changed, and every now and then again: its
    bytes could change without anybody saying so.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int, bytes, str], tuple[int, int]] = {}
        self._turn = 0

    def compare(self, engine: Engine, inspector: Inspector, everything: bool = False) -> None:
        """Report the first kept block that is wrong."""
        self._turn += 1
        seen: dict[tuple[int, int, bytes, str], tuple[int, int]] = {}
        for number, kept in enumerate(inspector.kept()):
            key = (kept.rank, kept.group, kept.block_hash, kept.source)
            stamp = (kept.stamp, engine.epoch)
            known = self._seen.get(key) == stamp
            if everything or not known or (number + self._turn) % KEPT_TURNS == 0:
                self._compare_one(engine, kept)
            seen[key] = stamp
        self._seen = seen

    def _compare_one(self, engine: Engine, kept: Kept) -> None:
        engine.counts.kept_compared += 1
        memory = engine.ranks[kept.rank].memory
        named = engine.clients.registry.named(kept.block_hash)
        if named is None:
            engine.report(Kind.WRONG_KEPT, f"a hash nobody computed: {kept.block_hash.hex()}")
            return
        payload = kept.read()
        size = len(payload) // kept.blocks
        parts = _blocks_of(named, kept.blocks, memory.block_tokens[kept.group])
        pieces = [payload[size * i : size * (i + 1)] for i in range(kept.blocks)]
        if len(parts) != len(pieces) or not all(
            memory.holds(kept.group, part ^ engine.salt, piece)
            for part, piece in zip(parts, pieces, strict=True)
        ):
            engine.report(
                Kind.WRONG_KEPT,
                f"rank {kept.rank} group {kept.group} {kept.source}: the object under "
                f"{kept.block_hash.hex()[:16]} (token {named.end_tokens}) "
                "does not hold the KV of that prefix",
            )


def _blocks_of(named: Named, count: int, block_tokens: int) -> list[States]:
    """States of the tokens of the last `count` blocks before a name's end.

    Where hashes are finer than blocks a name may end inside its block.
    """
    stop = named.end_tokens
    first = (stop - 1) // block_tokens - count + 1
    if first < 0:
        return []
    starts = range(first * block_tokens, stop, block_tokens)
    return [named.sequence.states(at, min(at + block_tokens, stop)) for at in starts]


def at_end(engine: Engine) -> None:
    """Everything is as at the start: no block, job, request or thread is missing or left."""
    check_requests(engine)
    flush(engine)
    if blocks := pool.leaked(engine.scheduler):
        engine.report(Kind.LEAK, f"blocks {blocks} are still referenced, no request is left")
    if problem := pool.discrepancy(engine.scheduler):
        engine.report(Kind.BOOKS, problem)
    if engine.inspector is not None:
        wait_until_idle(engine, engine.inspector)
        check_books(engine, engine.inspector)
        engine.kept_watch.compare(engine, engine.inspector, everything=True)
    if problem := engine.threads.dead():
        engine.report(Kind.THREAD_DIED, problem)


def check_requests(engine: Engine) -> None:
    """Every request either ended for its client or was aborted by it."""
    if engine.scheduler.requests:
        engine.report(Kind.LEAK, f"requests {sorted(engine.scheduler.requests)} never left")
    for name in engine.clients.by_id:
        engine.clients.check_ended(name)


def flush(engine: Engine) -> None:
    """A few steps without a request, as the next arrival would cause them."""
    if engine.scheduler.connector is None:
        return
    for _ in range(FLUSH_STEPS):
        engine.empty_step()
        if engine.inspector is not None and engine.inspector.idle():
            return


def wait_until_idle(engine: Engine, inspector: Inspector) -> None:
    """Jobs in the background get a while to end; one that does not is a finding."""
    deadline = time.monotonic() + IDLE_DEADLINE_S
    while not inspector.idle():
        if time.monotonic() > deadline:
            engine.report(Kind.NOT_IDLE, f"work is left: {inspector.counts()}")
        engine.empty_step()
        time.sleep(0.001)
