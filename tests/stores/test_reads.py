"""Reads are marked as uses a moment later, by another thread, each batch once."""

from __future__ import annotations

import threading

import pytest

from moonstep.stores.base import Key
from moonstep.stores.directory import reads as reads_module
from moonstep.stores.directory.reads import Reads, UnmarkedReads

LONG_S = 3600.0
DEADLINE_S = 20.0


def batch(number: int, objects: int = 1) -> Reads:
    return Reads(number, {Key(f"a/{number}.{index}"): "" for index in range(objects)})


def waiting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "moonstep-uses"]


def test_a_batch_is_marked_in_a_moment_by_another_thread() -> None:
    marked: list[tuple[Reads, str]] = []
    is_marked = threading.Event()

    def mark(reads: Reads) -> None:
        marked.append((reads, threading.current_thread().name))
        is_marked.set()

    unmarked = UnmarkedReads(mark, delay_s=0.01)
    for number in range(3):
        unmarked.add(batch(number))
        assert is_marked.wait(DEADLINE_S)
        is_marked.clear()
    assert marked == [(batch(number), "moonstep-uses") for number in range(3)]


def test_nothing_is_marked_twice_and_the_latest_comes_first() -> None:
    marked: list[Reads] = []
    unmarked = UnmarkedReads(marked.append, LONG_S)
    for number in range(3):
        unmarked.add(batch(number))
    assert marked == []
    unmarked.mark()
    unmarked.mark()
    assert marked == [batch(2), batch(1), batch(0)]


def test_once_all_is_marked_no_thread_waits() -> None:
    unmarked = UnmarkedReads(lambda _: None, LONG_S)
    unmarked.add(batch(0, objects=0))
    assert waiting_threads() == []
    unmarked.add(batch(1))
    unmarked.add(batch(2))
    (thread,) = waiting_threads()
    unmarked.mark()
    thread.join(DEADLINE_S)
    assert waiting_threads() == []


def test_whoever_reads_too_much_marks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads_module, "MOST_UNMARKED", 5)
    marked: list[Reads] = []
    unmarked = UnmarkedReads(marked.append, LONG_S)
    unmarked.add(batch(0, objects=4))
    assert marked == []
    unmarked.add(batch(1))
    assert marked == [batch(1), batch(0, objects=4)]


def test_without_a_thread_to_be_had_it_is_marked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refuse)
    marked: list[Reads] = []
    unmarked = UnmarkedReads(marked.append, LONG_S)
    unmarked.add(batch(0))
    unmarked.add(batch(1))
    assert marked == [batch(0), batch(1)]


def test_who_wants_all_marked_waits_for_marks_under_way() -> None:
    order: list[str] = []
    has_begun, may_end, has_returned = (threading.Event() for _ in range(3))

    def mark(_: Reads) -> None:
        has_begun.set()
        assert may_end.wait(DEADLINE_S)
        order.append("marked")

    unmarked = UnmarkedReads(mark, LONG_S)

    def want_all() -> None:
        unmarked.mark()
        order.append("returned")
        has_returned.set()

    unmarked.add(batch(0))
    first = threading.Thread(target=unmarked.mark)
    first.start()
    assert has_begun.wait(DEADLINE_S)
    second = threading.Thread(target=want_all)
    second.start()
    assert not has_returned.wait(0.1)
    may_end.set()
    first.join(DEADLINE_S)
    second.join(DEADLINE_S)
    assert order == ["marked", "returned"]


def test_what_is_read_after_the_end_is_not_marked_and_leaves_no_thread() -> None:
    marked: list[Reads] = []
    unmarked = UnmarkedReads(marked.append, LONG_S)
    unmarked.add(batch(0))
    (thread,) = waiting_threads()
    unmarked.close()
    unmarked.add(batch(1))
    thread.join(DEADLINE_S)
    assert waiting_threads() == []
    assert marked == [batch(0)]
