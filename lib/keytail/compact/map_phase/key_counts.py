"""The counts of records per key in a dirty section, by size: their sums and their text. Pure functions.

The size of a key is the class of its number of records: size 0 is 1 record, size 1 is 2, size 2 is 3 to 4, size 3 is 5
to 8, and so on. For the hottest keys, which have the most records, a hash is reported; the bytes of the keys are
reported only on request.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from keytail.errors import visible

HOTTEST = 20  # maximum number of keys reported per partition, and per page
DIGEST_DIGITS = 16
MAX_KEY_BYTES = 120  # a longer key is truncated
MAX_COUNTED = 2**32 - 1  # a count of this value means that many records or more


@dataclass(frozen=True)
class Counted:
    """Counts by size: the `keys[s]` keys of size s have `records[s]` records together.

    `hottest` has pairs (number of records, ordinal of the last record) of the keys with the most records, by descending
    number of records, then descending ordinal; each key has at least two records.
    """

    keys: tuple[int, ...]
    records: tuple[int, ...]
    hottest: tuple[tuple[int, int], ...]


class HotKey(NamedTuple):
    """A key with `records` records in the dirty section, the last of them at `offset`. `digest`: see `digest_of`. `key`
    has at most MAX_KEY_BYTES of the key's `key_bytes` bytes, or is None if keys are not to be shown.
    """

    records: int
    offset: int
    digest: str
    key_bytes: int
    key: bytes | None = None


@dataclass(frozen=True)
class KeyCounts:
    """Counts of the mapped records of one partition; `keys` and `records` are by size, as in Counted."""

    keys: tuple[int, ...]
    records: tuple[int, ...]
    hottest: tuple[HotKey, ...]


def merged(parts: Iterable[Counted], most: int) -> Counted:
    """Return the sum of parts that have no key in common, with at most `most` hottest keys."""
    found = list(parts)
    keys = tuple(map(sum, zip(*(item.keys for item in found), strict=True)))
    records = tuple(map(sum, zip(*(item.records for item in found), strict=True)))
    hottest = sorted((pair for item in found for pair in item.hottest), reverse=True)
    return Counted(keys, records, tuple(hottest[:most]))


def hot_key(records: int, offset: int, key: bytes, *, show: bool) -> HotKey:
    return HotKey(records, offset, digest_of(key), len(key), key[:MAX_KEY_BYTES] if show else None)


def digest_of(key: bytes) -> str:
    """Return what `printf %s KEY | sha256sum | cut -c-16` prints."""
    return hashlib.sha256(key).hexdigest()[:DIGEST_DIGITS]


def size_text(size: int) -> str:
    """Return the numbers of records of a key of this size as text: `1`, `2`, `3 to 4`, ..."""
    most = 1 << size
    return f"{most:,}" if size < 2 else f"{most // 2 + 1:,} to {most:,}"


def key_text(hot: HotKey) -> str:
    """Return the key in quotes or as hex digits, with its length if it is truncated; "" if it is not to be shown."""
    if hot.key is None:
        return ""
    is_cut = hot.key_bytes > len(hot.key)
    more = f"… ({hot.key_bytes:,} bytes)" if is_cut else ""
    text = _as_text(hot.key, is_cut=is_cut)
    return f"hex {hot.key.hex()}{more}" if text is None else f'"{text}{more}' + ("" if is_cut else '"')


def _as_text(data: bytes, *, is_cut: bool) -> str | None:
    """Return the decoded data on one line; None if the data is not UTF-8 or has control characters except tabs and line
    breaks."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=not is_cut)
    except UnicodeDecodeError:
        return None
    return None if any(_is_control(character) for character in text) else visible(text)


def _is_control(character: str) -> bool:
    return (character < " " and character not in "\t\n\r") or "\x7f" <= character <= "\x9f"
