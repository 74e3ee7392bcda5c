"""Implements the strategy of an import for small Parquet sources: everything is done in the command's own process,
without Spark.

The work and the result are the same as with the strategy of slices.py: the records of each partition are packed into
cells in scratch files, from which the partitions are written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from keytail.import_ import cells
from keytail.import_.cells import Scratch, Slice
from keytail.import_.local_source import LocalSource
from keytail.import_.partition_tasks import Records, WritePartition
from keytail.import_.records import Load
from keytail.import_.segments import Written
from keytail.import_.slices import cut, files_of, rows_needed
from keytail.import_.source import Source, chosen_columns
from keytail.log.fs import LOCAL
from keytail.run.rates import HERE_BYTES
from keytail.run.tasks import Outcome, run_attempt

# The attempt name of each task: in this process, a task has only one attempt.
_ATTEMPT = "h0"
# Maximum number of records, a limit besides HERE_BYTES: Parquet's dictionaries can store many records in few bytes.
MAX_RECORDS = 1_000_000
# Maximum number of footers that are read to find out whether the source is small.
_MAX_FILES = 100


@dataclass
class Here:
    """A source as slices that this process reads. `columns` has the names of the source's columns by role."""

    slices: Sequence[Slice]
    columns: Mapping[str, str]
    n_partitions: int
    description: str = field(default="in this process, without Spark", init=False)
    is_on_one_host: bool = field(default=True, init=False)

    def measure(self) -> list[Load]:
        """Return the counts of each partition, in ascending order. Reads all keys and values of the source once."""
        sums: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(4, np.int64))
        for item in self.slices:
            for batch in cells.count_slice(item, self.columns, self.n_partitions):
                for number, *counts in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    sums[number] += counts
        return [Load(number, *map(int, sums[number])) for number in sorted(sums)]

    def write(self, write: WritePartition, skipped: Collection[int], scratch: Scratch) -> dict[int, Outcome[Written]]:
        """Call `write` for each partition that has records and is not in `skipped`; return its outcome by partition."""
        found: list[list[cells.Cell]] = [[] for _ in range(self.n_partitions)]
        for item in self.slices:
            path = scratch.path(item, _ATTEMPT)
            for cell in cells.store_slice(LOCAL, item, self.columns, self.n_partitions, skipped, path):
                found[cell.task].append(cell)
        answers = {}
        for number, stored in enumerate(found):
            if stored:
                task: Callable[[Records, str], Any] = partial(write, number)
                answers[number] = run_attempt(task, cells.load(LOCAL, stored), _ATTEMPT)
        return answers


def source_here(local: LocalSource | None, source: Source, n_partitions: int) -> Here | None:
    """Return the source if this process can and should read it: Parquet that does not require Spark's rows and has, by
    its footers, at most HERE_BYTES and at most MAX_RECORDS. Return None for any other source."""
    if local is None or not local.uris or len(local.uris) > _MAX_FILES:
        return None
    columns = chosen_columns(local.types, source.columns)
    if rows_needed(source, local.uris, columns) is not None:
        return None
    files = files_of(local.uris, columns, {role: local.types[name] for role, name in columns.items()})
    if isinstance(files, str):
        return None
    groups = [group for file in files for group in file.row_groups]
    if sum(group.decoded_bytes for group in groups) > HERE_BYTES or sum(group.rows for group in groups) > MAX_RECORDS:
        return None
    return Here(cut(files, 1), columns, n_partitions)
