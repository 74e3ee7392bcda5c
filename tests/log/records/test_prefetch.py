"""Items that are prefetched from a generator arrive in order, and so do its exceptions."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from types import FrameType

import pytest

from keytail.log.records.prefetch import prefetched


def test_items_arrive_in_order_and_all_but_the_first_from_another_thread() -> None:
    makers: list[int] = []

    def items() -> Generator[int, None, None]:
        for item in range(5):
            makers.append(threading.get_ident())
            yield item

    assert list(prefetched(items())) == [0, 1, 2, 3, 4]
    assert makers[0] == threading.get_ident()
    assert len(set(makers[1:])) == 1
    assert makers[1] != makers[0]


def test_an_empty_generator_yields_nothing() -> None:
    assert list(prefetched(item for item in ())) == []


def test_the_next_item_is_produced_while_one_is_processed() -> None:
    made = [threading.Event() for _ in range(3)]

    def items() -> Generator[int, None, None]:
        for item, event in enumerate(made):
            event.set()
            yield item

    for item in prefetched(items()):
        assert item == 2 or made[item + 1].wait(120)


def test_an_error_is_raised_after_the_items_that_precede_it() -> None:
    def items() -> Generator[int, None, None]:
        yield 1
        yield 2
        raise ValueError("third")

    seen = []
    with pytest.raises(ValueError, match="third"):
        for item in prefetched(items()):
            seen.append(item)
    assert seen == [1, 2]


def test_a_loop_that_stops_early_has_prefetched_one_item_and_closes_the_generator() -> None:
    made, closed = [], threading.Event()

    def items() -> Generator[int, None, None]:
        try:
            for item in range(100):
                made.append(item)
                yield item
        finally:
            closed.set()

    taken = prefetched(items())
    for item in taken:
        if item == 3:
            break
    taken.close()  # type: ignore[attr-defined]
    assert closed.is_set()
    assert made == [0, 1, 2, 3, 4]


class _Interrupted(Exception):
    """What the handler of a signal raises."""


@pytest.fixture
def free() -> Iterator[threading.Event]:
    """An event that is set by the third alarm. Each alarm raises _Interrupted."""
    event, alarms = threading.Event(), []

    def handler(_number: int, _frame: FrameType | None) -> None:
        alarms.append(1)
        if len(alarms) == 3:
            signal.setitimer(signal.ITIMER_REAL, 0)
            event.set()
        raise _Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    yield event
    signal.signal(signal.SIGALRM, before)


def _waits_for_result(thread: threading.Thread) -> bool:
    """Return whether the thread is in Future.result()."""
    assert thread.ident is not None
    frame = sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code is not Future.result.__code__:
        frame = frame.f_back
    return frame is not None


def test_signals_while_the_next_item_is_awaited_end_the_loop_with_their_own_error(free: threading.Event) -> None:
    def items() -> Generator[int, None, None]:
        yield 1
        while not _waits_for_result(threading.main_thread()):
            time.sleep(0.001)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        free.wait()  # the first alarm ends the wait for the item, the next two end waits for the thread
        yield 2

    try:
        with pytest.raises(_Interrupted) as raised:
            for _ in prefetched(items()):
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        free.set()
    assert "already executing" not in "".join(traceback.format_exception(raised.value)), "closed while it runs"
