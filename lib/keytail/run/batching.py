"""Divides items into bundles, each limited in bytes and in number of items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def in_bundles(
    items: Iterable[T], size_of: Callable[[T], int], most_bytes: int, most: int | None = None
) -> Iterator[list[T]]:
    """Yield the items in order, in bundles of at most `most_bytes` bytes and `most` items.

    An item of more than `most_bytes` bytes is a bundle of its own.
    """
    bundle: list[T] = []
    size_bytes = 0
    for item in items:
        size = size_of(item)
        if bundle and (len(bundle) == most or size_bytes + size > most_bytes):
            yield bundle
            bundle, size_bytes = [], 0
        bundle.append(item)
        size_bytes += size
    if bundle:
        yield bundle
