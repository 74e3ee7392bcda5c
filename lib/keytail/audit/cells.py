"""Serializes audit entries for the shuffle, column by column, each as narrow as its values allow.

Most columns of a cell have one value, or values close to each other; the hashes take most of the bytes. Only the lower
64 bits of a key's hash of 128 bits are included, which suffices to distinguish the keys of a shard. `entries` have the
layout of kernels/audit/entries.py.
"""

from __future__ import annotations

import struct

import numpy as np

from keytail.kernels.audit import entries as kernels

_HEAD = struct.Struct("<qqb")  # number of rows; smallest value of a column; bytes of each difference from that value
_WIDTHS = ((1 << 8, np.uint8), (1 << 16, np.uint16), (1 << 32, np.uint32))
_NARROW = (kernels.OFFSET, kernels.TIMESTAMP, kernels.PRODUCER, kernels.EPOCHS, kernels.WHAT)
_WHOLE = (kernels.LOW, kernels.CONTENT)


def pack_entries(entries: np.ndarray) -> bytes:
    """Return the entries as the bytes of a cell."""
    parts = [column for word in _NARROW for column in _narrow(entries[:, word])]
    parts += [np.ascontiguousarray(entries[:, word]).tobytes() for word in _WHOLE]
    return b"".join(parts)


def unpack_entries(data: bytes) -> np.ndarray:
    """Return the entries in the bytes of a cell, with HIGH set to 0."""
    (rows,) = struct.unpack_from("<q", data)
    entries = np.zeros((rows, kernels.WORDS), np.int64)
    at = 0
    for word in _NARROW:
        entries[:, word], at = _wide(data, at)
    for word in _WHOLE:
        entries[:, word] = np.frombuffer(data, np.int64, rows, at)
        at += 8 * rows
    return entries


def pack_places(places: np.ndarray) -> bytes:
    return b"".join([*_narrow(places[:, 0]), np.ascontiguousarray(places[:, 1]).tobytes()])


def unpack_places(data: bytes) -> np.ndarray:
    (rows,) = struct.unpack_from("<q", data)
    places = np.empty((rows, kernels.PLACE_WORDS), np.int64)
    places[:, 0], at = _wide(data, 0)
    places[:, 1] = np.frombuffer(data, np.int64, rows, at)
    return places


def _narrow(column: np.ndarray) -> tuple[bytes, bytes]:
    least, most = int(column.min()), int(column.max())
    if least == most:
        return _HEAD.pack(len(column), least, 0), b""
    for limit, dtype in _WIDTHS:
        if most - least < limit:
            return _HEAD.pack(len(column), least, np.dtype(dtype).itemsize), (column - least).astype(dtype).tobytes()
    return _HEAD.pack(len(column), 0, 8), np.ascontiguousarray(column).tobytes()


def _wide(data: bytes, at: int) -> tuple[np.ndarray | int, int]:
    """Return the column that begins at byte `at`, or the only value in it, and the position of its end."""
    rows, least, width = _HEAD.unpack_from(data, at)
    at += _HEAD.size
    if width == 0:
        return least, at
    if width == 8:
        return np.frombuffer(data, np.int64, rows, at), at + 8 * rows
    narrow = np.frombuffer(data, f"<u{width}", rows, at)
    return narrow.astype(np.int64) + least, at + width * rows
