"""How entries of an audit travel: column by column, each as narrow as its values allow.

Most columns of a cell hold one value, or a few near each other; what is left are the hashes. Of a key's 128 bits the
lower 64 travel, which is enough to tell the keys of a shard apart. `entries` are as kernels/audit.py has them.
"""

from __future__ import annotations

import struct

import numpy as np

from keytail.kernels import audit as kernels

_HEAD = struct.Struct("<qqb")  # rows; the least value of a column, and how many bytes a value takes beside it
_WIDTHS = ((1 << 8, np.uint8), (1 << 16, np.uint16), (1 << 32, np.uint32))
_NARROW = (kernels.OFFSET, kernels.TIMESTAMP, kernels.PRODUCER, kernels.EPOCHS, kernels.WHAT)
_WHOLE = (kernels.LOW, kernels.CONTENT)


def pack_entries(entries: np.ndarray) -> bytes:
    """The cell of some entries."""
    parts = [column for word in _NARROW for column in _narrow(entries[:, word])]
    parts += [np.ascontiguousarray(entries[:, word]).tobytes() for word in _WHOLE]
    return b"".join(parts)


def unpack_entries(data: bytes) -> np.ndarray:
    """Entries as they were, HIGH but 0."""
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
    """The column that begins at byte `at`, and where it ends."""
    rows, least, width = _HEAD.unpack_from(data, at)
    at += _HEAD.size
    if width == 0:
        return least, at
    if width == 8:
        return np.frombuffer(data, np.int64, rows, at), at + 8 * rows
    narrow = np.frombuffer(data, f"<u{width}", rows, at)
    return narrow.astype(np.int64) + least, at + width * rows
