"""The state of a proof, which its kernels and `compact/proof` share: one record of the dtype STATE.

All fields are int64, flags 0 or 1, so that `save` can pass the state on as a plain array. Kernels get a record
(`new_state`), and the arrays that belong together as the named tuples below. No field has the name of an attribute of
NumPy's scalars, such as `base`: outside of compiled code, the attribute would be read instead of the field.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable


def _int64s(*names: str) -> np.dtype:
    return np.dtype([(name, np.int64) for name in names])


# The rules of the proof. `horizon_ms`: delete horizon for a batch that has none, -1: none. `removal_limit`: no
# tombstone or marker at or above this offset may be removed for its age. `keep_magic`: rewritten messages of magic 0 or
# 1 keep their magic. `by_file_time`: `source.is_old` decides about tombstones and markers; no horizon is set or
# retained (CLEANING.md 16). `erases`: the records with the keys `Notes.erased` are removed, and nothing else
# (erase/ERASE.md).
RULES = _int64s(
    "first_dirty", "end_offset", "first_uncleanable", "log_start", "removal_limit", "now_ms", "horizon_ms",
    "interval_bytes", "drop_keyless", "keep_magic", "by_file_time", "erases",
)  # fmt: skip

# Fields of both windows: the index of the next batch, the end of the bytes, whether the file ends there, bytes of the
# next batch's decompressed block (-1: none), and the last offset passed.
_WINDOW = ("at", "to", "is_all", "block_bytes", "last_offset")
# `is_old`: whether the retention of the file's tombstones and markers has expired, by the time of the file.
SOURCE = _int64s(*_WINDOW, "is_old")
# `position`: position of the window in its file; `base_offset`, `number`: those of the output; `next_base`: base offset
# of the next output or segment; `is_checked`: header and index entries of the next batch are right; `newest_ms`: the
# largest timestamp of the output's batches that have records, 0 if there is none above 0.
OUTPUT = _int64s(*_WINDOW, "position", "base_offset", "number", "next_base", "is_checked", "newest_ms")

# Positions in the index files of the output, and the values on which the next entries depend.
INDEXES = _int64s(
    "index_at", "time_at", "since_last_entry", "max_timestamp", "max_timestamp_offset", "last_time_entry"
)  # fmt: skip

# The source's next batch. `at_output`: index of its output in the output window, -1: dropped. `is_whole`: the batch has
# the same bytes in source and output. `meaning`: see `meaning.py`. `last_offset` is the last offset of the records
# walked so far; `kept_count`, `first_ms`, `newest_ms` and `has_nulls` are the number of retained records among these,
# their first and largest timestamp, and whether one of them has no value.
BATCH = _int64s(
    "at_output", "is_whole", "meaning", "last_offset", "kept_count", "first_ms", "newest_ms", "has_nulls"
)  # fmt: skip

STATE = np.dtype(
    [
        ("rules", RULES),
        ("source", SOURCE),
        ("output", OUTPUT),
        ("indexes", INDEXES),
        ("batch", BATCH),
        ("noted", _int64s("count")),  # used columns of `Notes`
        # Amounts that a code requests: bytes of a window, or room in the notes for records.
        ("wanted", _int64s("bytes", "records")),
        ("totals", _int64s("batches_read", "batches_kept", "records_read", "records_kept")),
        ("failure", _int64s("at", "offset")),  # `at`: index in the window or index file
        ("knows_markers", np.int64),
    ]
)


class Windows(NamedTuple):
    """Bytes (uint8) of the windows of source and output, and room for the decompressed block of one batch of the source
    and one of the output."""

    source: np.ndarray
    output: np.ndarray
    source_block: np.ndarray
    output_block: np.ndarray


class IndexFiles(NamedTuple):
    """Bytes (uint8) of the offset index and the time index of the output."""

    offsets: np.ndarray
    times: np.ndarray


class Notes(NamedTuple):
    """Keys for the table of `table.py`: the hashes of the keys (uint64[2, n]: low, high), and the offsets and outcomes
    of their records (int64[2, n]); the `coefficients` of the hash (`key_hash.py`); and the hashes of the keys that an
    erasure removes (uint64[2, k]: low, high), sorted by the low word."""

    hashes: np.ndarray
    records: np.ndarray
    coefficients: np.ndarray
    erased: np.ndarray


def new_state(saved: np.ndarray | None = None) -> Any:
    """Return a record of STATE: zeros, or `saved`, which `save` returned."""
    values = np.zeros(STATE.itemsize // 8, np.int64) if saved is None else saved.copy()
    return values.view(STATE).view(np.recarray)[0]


def save(state: Any) -> np.ndarray:
    """Return the state as int64[n], for another process."""
    return np.frombuffer(state.tobytes(), np.int64)


@register_jitable
def fail(state, code, at, offset):
    """Note where a violation is; return `code`."""
    state.failure.at = at
    state.failure.offset = offset
    return code
