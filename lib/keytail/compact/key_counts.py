"""How often the keys of a dirty section were written there: what was counted, merged, and told. Pure.

A size is a power of two: keys with 1, 2, 3 to 4, 5 to 8 ... records. Of the keys with most records, the hottest, a hash
is told, and their bytes only where that was asked for.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from keytail.errors import visible

HOTTEST = 20  # of a partition, and on a page
DIGEST_DIGITS = 16
MOST_KEY_BYTES = 120  # of a key that is shown
MOST_COUNTED = 2**32 - 1  # a key of so many records or more


@dataclass(frozen=True)
class Counted:
    """`keys[s]` keys of size s have `records[s]` records. `hottest`: number and ordinal of the last record of those
    keys that have most, and two at least; of equal numbers the one that was written last is the first."""

    keys: tuple[int, ...]
    records: tuple[int, ...]
    hottest: tuple[tuple[int, int], ...]


class HotKey(NamedTuple):
    """A key with `records` in the dirty section, the last of them at `offset`. `digest`: see `digest_of`. `key`: its
    first bytes, of `key_bytes`, where it is to be shown."""

    records: int
    offset: int
    digest: str
    key_bytes: int
    key: bytes | None = None


@dataclass(frozen=True)
class KeyCounts:
    """Of the mapped records of one partition; `keys` and `records` by size."""

    keys: tuple[int, ...]
    records: tuple[int, ...]
    hottest: tuple[HotKey, ...]


def merged(parts: Iterable[Counted], most: int) -> Counted:
    """Of parts that have no key in common."""
    found = list(parts)
    keys = tuple(map(sum, zip(*(one.keys for one in found), strict=True)))
    records = tuple(map(sum, zip(*(one.records for one in found), strict=True)))
    hottest = sorted((pair for one in found for pair in one.hottest), reverse=True)
    return Counted(keys, records, tuple(hottest[:most]))


def hot_key(records: int, offset: int, key: bytes, *, show: bool) -> HotKey:
    return HotKey(records, offset, digest_of(key), len(key), key[:MOST_KEY_BYTES] if show else None)


def digest_of(key: bytes) -> str:
    """As `printf %s KEY | sha256sum | cut -c-16` has it."""
    return hashlib.sha256(key).hexdigest()[:DIGEST_DIGITS]


def size_text(size: int) -> str:
    """As `1`, `2`, `3 to 4`."""
    most = 1 << size
    return f"{most:,}" if size < 2 else f"{most // 2 + 1:,} to {most:,}"


def key_text(hot: HotKey) -> str:
    """The key in quotes, else as hex digits; empty where it is not to be shown. One that is cut has its length told."""
    if hot.key is None:
        return ""
    is_cut = hot.key_bytes > len(hot.key)
    more = f"… ({hot.key_bytes:,} bytes)" if is_cut else ""
    text = _as_text(hot.key, is_cut=is_cut)
    return f"hex {hot.key.hex()}{more}" if text is None else f'"{text}{more}' + ("" if is_cut else '"')


def _as_text(data: bytes, *, is_cut: bool) -> str | None:
    """On one line; None of what is no UTF-8, or has control characters but for those of lines and tabs."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=not is_cut)
    except UnicodeDecodeError:
        return None
    return None if any(_is_control(character) for character in text) else visible(text)


def _is_control(character: str) -> bool:
    return (character < " " and character not in "\t\n\r") or "\x7f" <= character <= "\x9f"
