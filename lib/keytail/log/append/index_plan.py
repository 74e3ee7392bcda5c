"""Which index entries batches earn that are to be appended, and how many of them go in before an index is full.

Nothing is written here. The rules are those of format/INDEX.md, section 2; what fullness means for a segment stands
in APPEND.md beside this file.
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
    """Where the indexes of a segment stand, and how many entries fit (format/INDEX.md, section 2)."""

    values: np.ndarray  # int64[6], as kernels/index.py has them
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
    """Entries that the first `rows` batches of a set earn (int64[n, 2], as stored), and the state behind them."""

    rows: int
    offsets: np.ndarray
    times: np.ndarray
    state: IndexState


def plan_entries(table: np.ndarray, base_offset: int, state: IndexState, interval_bytes: int) -> IndexPlan:
    """The entries of these batches (BATCH_TABLE rows with their positions), as far as there is room for them."""
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
    """The same of as many batches as go in before an index is full, but of one at least."""
    plan = plan_entries(table, base_offset, state, interval_bytes)
    if plan.rows == len(table) and not plan.state.is_full:
        return plan

    def fills(rows: int) -> bool:
        return plan_entries(table[:rows], base_offset, state, interval_bytes).state.is_full

    least = bisect_left(range(1, len(table) + 1), True, key=fills) + 1
    return plan_entries(table[:least], base_offset, state, interval_bytes)


def place(table: np.ndarray, size_bytes: int) -> None:
    """Give the batches of `table` their positions at the end of a segment of `size_bytes`."""
    sizes = table["size_bytes"].astype(np.int64)
    table["position"] = size_bytes + np.cumsum(sizes) - sizes
