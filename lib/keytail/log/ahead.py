"""One step ahead: the next item of a generator is made while the one before is worked on."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

T = TypeVar("T")


def one_ahead(items: Generator[T, None, None]) -> Iterator[T]:
    """The items, all but the first made in a thread of their own.

    What the generator raises comes when its turn does. An item may not share what it lies in with the next one;
    with the one after that it may. A generator that is left early has not run past the item after the last taken.
    """
    end = object()
    with closing(items), ThreadPoolExecutor(1, "ahead") as thread:
        item = next(items, end)
        while item is not end:
            coming = thread.submit(next, items, end)
            yield item  # type: ignore[misc]
            item = coming.result()
