"""Prefetches the next item of a generator while the current one is processed."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import islice
from typing import TypeVar

from keytail.threads import Threads

T = TypeVar("T")


def prefetched(items: Generator[T, None, None]) -> Iterator[T]:
    """Yield the items; all but the first are produced in a separate thread.

    An error of the generator is raised in place of an item. An item must not share memory with the next item, but may
    share it with the item after that. If iteration stops early, the generator has produced at most one item more than
    was taken.
    """

    def at_most_one() -> list[T]:
        return list(islice(items, 1))

    with Threads(1, "prefetch") as thread:
        try:
            item = at_most_one()
            while item:
                coming = thread.submit(at_most_one)
                yield item[0]
                item = coming.result()
        finally:  # close in the thread, which may still run the generator if a signal has ended the wait
            thread.submit(items.close).result()
