"""Finds where to begin reading a log for a range of offsets or bytes.

The position of an offset index entry is used if a batch begins there whose base offset is not above the entry's offset.
If the entries are not in ascending order, or the log contradicts the entry, the log is read from byte 0.
"""

from __future__ import annotations

import os

import numpy as np

from keytail.dump.command import Range
from keytail.format import index, names
from keytail.format.batch import HEADER_BYTES
from keytail.kernels.dump import batches as kernels
from keytail.log.fs import FileSystem


def start_of(fs: FileSystem, log_path: str, base: int, size: int, wanted: Range) -> tuple[int, str]:
    """Return a byte position where a batch begins, at or before the range, and a note.

    If the index cannot be used, the position is 0 and the note states the reason; in other cases the note is empty.
    """
    if not wanted.from_offset and not wanted.from_position:
        return 0, ""
    path = os.path.splitext(log_path)[0] + names.INDEX
    offsets, positions, why = offset_entries(fs, path, base)
    if why:
        return 0, why
    slots = []
    if wanted.from_offset is not None:
        slots.append(int(np.searchsorted(offsets, wanted.from_offset, side="right")) - 1)
    if wanted.from_position is not None:
        slots.append(int(np.searchsorted(positions, wanted.from_position, side="right")) - 1)
    slot = max(slots)
    if slot < 0:
        return 0, ""
    if not _agrees(fs, log_path, size, int(positions[slot]), int(offsets[slot])):
        text = f"{path} has offset {offsets[slot]} at byte position {positions[slot]}, where no such batch begins"
        return 0, f"{text}: the log is read from its start"
    return int(positions[slot]), ""


def offset_entries(fs: FileSystem, path: str, base: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the offsets and positions (int64) in the offset index at `path`, and ""; if the index cannot be searched,
    empty arrays and the reason."""
    none = np.zeros(0, np.int64)
    try:
        entries = index.parse_offset_index(fs.read_bytes(path))
    except FileNotFoundError:
        return none, none, f"there is no {path}: the log is read from its start"
    offsets, positions = entries["relative_offset"].astype(np.int64) + base, entries["position"].astype(np.int64)
    used = used_entries(offsets, base)
    offsets, positions = offsets[:used], positions[:used]
    if (np.diff(offsets) <= 0).any() or (np.diff(positions) <= 0).any() or (positions < 0).any():
        return none, none, f"the entries of {path} are not in ascending order: the log is read from its start"
    return offsets, positions, ""


def used_entries(offsets: np.ndarray, base: int) -> int:
    """Return the number of entries before the zeros of a preallocated index. Only entry 0 may be zero as well."""
    unused = np.flatnonzero(offsets[1:] == base)
    return int(unused[0]) + 1 if len(unused) else len(offsets)


def _agrees(fs: FileSystem, log_path: str, size: int, position: int, offset: int) -> bool:
    out = np.zeros(4, np.int64)
    head = np.frombuffer(fs.read_at(log_path, position, HEADER_BYTES), np.uint8)
    kernels.find_batch(head, len(head), 0, -(2**63), out)
    begins = int.from_bytes(head[:8].tobytes(), "big", signed=True)  # for an old message, this is its last offset
    return bool(out[0] == kernels.FOUND and begins <= offset and position + out[2] <= size)
