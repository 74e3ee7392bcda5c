"""Processes the items of a generator in several threads, and yields the results in the order of the items."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

from keytail.threads import Threads

# The interval at which a waiting thread checks whether the work has ended: a signal may interrupt the call that wakes
# the thread.
_WAKE_S = 1.0

T = TypeVar("T")
R = TypeVar("R")


def items_in_flight(threads: int) -> int:
    """Return how many items `side_by_side` may have taken whose results are not ready, or still in use."""
    return 2 * threads


def side_by_side(items: Generator[T, None, None], work: Callable[[T], R], threads: int) -> Generator[R, None, None]:
    """Yield `work(item)` for each item, in order. `threads` threads, one of which is the caller's, call `work`; each
    thread takes one item at a time. The caller's thread works while the next result is not ready.

    An error of the generator, or of `work`, is raised in place of the item's result. An item is taken only after the
    result of the item `items_in_flight(threads)` before it is no longer in use, so that the two items may share memory.
    When iteration ends, for whatever reason, no other thread is running and the generator is closed.
    """
    room = threading.Semaphore(items_in_flight(threads))
    taking = threading.Lock()
    coming: deque[Future[R]] = deque()
    has_ended = False

    def process_next() -> None:
        """Take an item, whose place in the order is that of its future in `coming`, and process it."""
        nonlocal has_ended
        future: Future[R] = Future()
        with taking:
            if has_ended:
                return
            try:
                item = next(items)
            except StopIteration:
                has_ended = True
                return
            except BaseException as problem:  # raised by the caller, in place of the item
                # Before `has_ended`, so that the caller's thread waits for all futures in `coming`
                coming.append(future)
                has_ended = True
                _fail(future, problem)
                return
            coming.append(future)
        try:
            future.set_result(work(item))
        except BaseException as problem:  # raised by the caller, in place of the result
            _fail(future, problem)

    def help_() -> None:
        while not has_ended:
            if room.acquire(timeout=_WAKE_S):
                process_next()
        room.release()  # another thread may be waiting

    with Threads(max(1, threads - 1), "side by side") as pool:
        try:
            helpers = [pool.submit(help_) for _ in range(threads - 1)]
            while True:
                while not (has_ended or (coming and coming[0].done())) and room.acquire(blocking=False):
                    process_next()
                if not coming:
                    break
                yield coming[0].result()
                coming.popleft()
                room.release()
            for helper in helpers:
                helper.result()
        finally:
            has_ended = True
            room.release(threads)
            with taking:
                items.close()


def _fail(future: Future[R], problem: BaseException) -> None:
    """Set the error that is raised in place of an item's result. A signal is raised at once, too."""
    with contextlib.suppress(InvalidStateError):  # a signal came after the result was set
        future.set_exception(problem)
    if not isinstance(problem, Exception):
        raise problem
