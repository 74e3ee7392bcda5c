"""Plans the index entries of batches to be appended, and determines how many batches fit before an index is full.

Nothing is written here. The rules are those of format/INDEX.md, section 2; APPEND.md beside this file specifies what
a full index means for a segment.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from keytail.kernels import index as kernels
from keytail.log.append.rolling import AppendConfig, are_full

NO_TIMESTAMP = -1


@dataclass(frozen=True)
class IndexState:
    """The state of a segment's indexes, and how many entries they have room for (format/INDEX.md, section 2)."""

    values: np.ndarray  # int64[6], as defined in kernels/index.py
    max_offset_entries: int
    max_time_entries: int

    @classmethod
    def of_new_segment(cls, base_offset: int, config: AppendConfig) -> IndexState:
        values = np.array([0, NO_TIMESTAMP, base_offset, NO_TIMESTAMP, 0, 0], np.int64)
        return cls(values, config.max_offset_entries, config.max_time_entries)

    @property
    def is_full(self) -> bool:
        entries = int(self.values[kernels.OFFSET_ENTRIES]), int(self.values[kernels.TIME_ENTRIES])
        return are_full(*entries, self.max_offset_entries, self.max_time_entries)


@dataclass(frozen=True)
class IndexPlan:
    """The index entries of the first `rows` batches of a set (int64[n, 2], as stored), and the state after them."""

    rows: int
    offsets: np.ndarray
    times: np.ndarray
    state: IndexState


def plan_entries(table: np.ndarray, base_offset: int, state: IndexState, interval_bytes: int) -> IndexPlan:
    """Return the index entries for as many of these batches (BATCH_TABLE rows with positions) as the indexes can hold.
    """
    values = state.values.copy()
    offsets, times = np.empty((len(table), 2), np.int64), np.empty((len(table), 2), np.int64)
    out = np.zeros(4, np.int64)
    kernels.index_rows(
        table, len(table), base_offset, interval_bytes, state.max_offset_entries, state.max_time_entries, values,
        offsets, times, out,
    )  # fmt: skip
    after = IndexState(values, state.max_offset_entries, state.max_time_entries)
    return IndexPlan(int(out[2]), offsets[: out[0]], times[: out[1]], after)


def plan_until_full(table: np.ndarray, base_offset: int, state: IndexState, interval_bytes: int) -> IndexPlan:
    """Return the plan of `plan_entries` for the batches up to and including the first batch that fills an index."""
    plan = plan_entries(table, base_offset, state, interval_bytes)
    if plan.rows == len(table) and not plan.state.is_full:
        return plan

    def fills(rows: int) -> bool:
        return plan_entries(table[:rows], base_offset, state, interval_bytes).state.is_full

    least = bisect_left(range(1, len(table) + 1), True, key=fills) + 1
    return plan_entries(table[:least], base_offset, state, interval_bytes)


def set_positions(table: np.ndarray, size_bytes: int) -> None:
    """Set the positions of the batches of `table` at the end of a segment of `size_bytes`."""
    sizes = table["size_bytes"].astype(np.int64)
    table["position"] = size_bytes + np.cumsum(sizes) - sizes
