"""Declares the layouts of a segment's three index files, and converts them to and from arrays of entries.

INDEX.md beside this file specifies when entries are written and how they are looked up. Entries are not validated
here; callers compare them with their log.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

Buffer: TypeAlias = bytes | bytearray | memoryview | np.ndarray

# The layouts on disk. Relative offsets are relative to the base offset of the segment.
OFFSET_ENTRY = np.dtype([("relative_offset", ">i4"), ("position", ">i4")])
TIME_ENTRY = np.dtype([("timestamp_ms", ">i8"), ("relative_offset", ">i4")])
TXN_ENTRY = np.dtype(
    [
        ("version", ">i2"),  # 0
        ("producer_id", ">i8"),
        ("first_offset", ">i8"),  # base offset of the transaction's first batch
        ("last_offset", ">i8"),  # offset of its ABORT marker
        ("last_stable_offset", ">i8"),
    ]
)
# Maximum distance of an offset from its segment's base offset, as in Kafka's LogSegment
MAX_RELATIVE_OFFSET = 2**31 - 1
assert (OFFSET_ENTRY.itemsize, TIME_ENTRY.itemsize, TXN_ENTRY.itemsize) == (8, 12, 34)


def parse_offset_index(data: Buffer) -> np.ndarray:
    """Return the entries of a `.index` file: fields `relative_offset` and `position`, native int32."""
    return parse_entries(data, OFFSET_ENTRY)


def parse_time_index(data: Buffer) -> np.ndarray:
    """Return the entries of a `.timeindex` file: fields `timestamp_ms` (int64) and `relative_offset` (int32), native.
    """
    return parse_entries(data, TIME_ENTRY)


def parse_txn_index(data: Buffer) -> np.ndarray:
    """Return the entries of a `.txnindex` file: the fields of TXN_ENTRY in native byte order."""
    return parse_entries(data, TXN_ENTRY)


def encode_txn_index(entries: np.ndarray) -> bytes:
    """Return the bytes of a `.txnindex` file for entries with the fields of TXN_ENTRY in any byte order."""
    return entries.astype(TXN_ENTRY).tobytes()


def parse_entries(data: Buffer, entry: np.dtype) -> np.ndarray:
    """Return the whole entries of a file in native byte order, as a broker counts them: floor(size / entry size)."""
    raw = np.frombuffer(data, np.uint8)
    whole_bytes = len(raw) // entry.itemsize * entry.itemsize
    return raw[:whole_bytes].view(entry).astype(entry.newbyteorder("="))
