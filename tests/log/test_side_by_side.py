"""Items that several threads process: order, errors, the limit of items in flight, and the end of the threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from concurrent.futures import Future

import pytest

from keytail.log import side_by_side as module
from keytail.log.side_by_side import items_in_flight, side_by_side
from tests.chance import chance


def numbers(n: int, closed: list[bool], fails_at: int = -1) -> Generator[int, None, None]:
    try:
        for number in range(n):
            if number == fails_at:
                raise ValueError(f"no item {number}")
            yield number
    finally:
        closed.append(True)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_results_are_in_order_and_few_items_are_in_flight(threads: int) -> None:
    rng, closed, used = chance(), [False], 0
    taken: list[int] = []
    turns = [rng.randrange(2000) for _ in range(300)]

    def items() -> Generator[int, None, None]:
        for number in numbers(300, closed):
            taken.append(number)
            assert len(taken) - used <= items_in_flight(threads)
            yield number

    def work(number: int) -> tuple[int, int]:
        return number, sum(range(turns[number]))

    for number, _ in side_by_side(items(), work, threads):
        assert number == used
        used += 1
    assert used == 300 and closed[-1]


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("where", ["generator", "work"])
def test_the_first_error_is_raised_in_place_of_its_result(where: str, threads: int) -> None:
    closed: list[bool] = []
    before = threading.active_count()

    def work(number: int) -> int:
        if where == "work" and number >= 7:
            raise ValueError(f"no item {number}")
        return number

    found = []
    with pytest.raises(ValueError, match="no item 7"):
        found.extend(side_by_side(numbers(20, closed, 7 if where == "generator" else -1), work, threads))
    del found
    done = []
    with pytest.raises(ValueError, match="no item 7"):
        for number in side_by_side(numbers(20, closed, 7 if where == "generator" else -1), work, threads):
            done.append(number)
    assert done == list(range(7))
    assert closed == [True, True] and threading.active_count() == before


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_a_consumer_that_stops_ends_all_threads(threads: int) -> None:
    closed: list[bool] = []
    before = threading.active_count()
    results = side_by_side(numbers(10**6, closed), lambda number: number, threads)
    assert next(results) == 0
    results.close()
    assert closed == [True] and threading.active_count() == before


def test_a_signal_in_the_callers_thread_is_raised_at_once() -> None:
    closed: list[bool] = []

    def work(number: int) -> int:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return number

    with pytest.raises(KeyboardInterrupt):
        list(side_by_side(numbers(10**6, closed), work, 2))
    assert closed == [True]


def test_an_error_of_the_generator_is_not_lost_while_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's thread requests the next result while another thread stores the error."""
    is_stored = threading.Event()

    class SlowFuture(Future[int]):
        def set_exception(self, exception: BaseException | None) -> None:
            is_stored.set()
            for _ in range(1000):
                time.sleep(0)  # let the caller's thread run
            super().set_exception(exception)

    def items() -> Generator[int, None, None]:
        while threading.current_thread() is threading.main_thread():
            yield 0
        raise ValueError("no item")

    monkeypatch.setattr(module, "Future", SlowFuture)
    with pytest.raises(ValueError, match="no item"):
        for _ in side_by_side(items(), lambda number: number, 2):
            is_stored.wait()
