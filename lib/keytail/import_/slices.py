"""Implements the strategy of an import that bypasses the JVM: each task reads a slice of Parquet's row groups itself.

Spark lists the source's files and columns; the driver reads the files' footers. A task reads its slice, packs the
records of each partition into cells (`cells.py`), and writes them to scratch files. Spark transfers only the cells'
locations; the task of a partition reads its cells, in order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow
import pyarrow.parquet

from keytail.acting_user import as_caller, on_workers
from keytail.format.encode import RecordColumns
from keytail.import_ import cells
from keytail.import_.cells import Piece, Scratch, Slice
from keytail.import_.partition_tasks import WritePartition, write_on_spark
from keytail.import_.records import Load, Unpack
from keytail.import_.segments import Written
from keytail.import_.source import Source, chosen_columns
from keytail.log.fs import LOCAL
from keytail.run.spark.engine import attempt_name
from keytail.run.tasks import Outcome, as_problem
from keytail.threads import Threads

# The usual and the minimum decoded bytes of a slice, by Parquet's footers. A task reads a slice in at most 1 s.
SLICE_BYTES = 64 << 20
MIN_SLICE_BYTES = 4 << 20
_FOOTERS_AT_ONCE = 8
_SMALL, _LARGE = pyarrow.int32(), pyarrow.int64()
_KINDS = (_SMALL, _LARGE, _SMALL, pyarrow.string(), _LARGE, _LARGE)  # the types of PLACES_SCHEMA


@dataclass(frozen=True)
class Column:
    """A required column as a footer describes it: path, physical type and logical type of each leaf, and the Arrow type
    of the column (for a dictionary, the type of its values)."""

    leaves: tuple[tuple[str, str, str], ...]
    arrow: str


@dataclass(frozen=True)
class RowGroup:
    rows: int
    decoded_bytes: int


@dataclass(frozen=True)
class SourceFile:
    path: str
    size_bytes: int
    mtime_ns: int
    columns: Mapping[str, Column]  # columns by role
    row_groups: tuple[RowGroup, ...]


@dataclass
class Slices:
    """A source as slices that tasks read without the JVM. `columns` has the names of the source's columns by role."""

    spark: Any
    slices: Sequence[Slice]
    columns: Mapping[str, str]
    n_partitions: int
    description: str = field(default="tasks read Parquet without the JVM", init=False)

    def measure(self) -> list[Load]:
        """Return the counts of each partition, in ascending order. Reads all keys and values of the source once."""
        from pyspark.sql import functions as F  # noqa: PLC0415, N812 (only where Spark runs)

        work = partial(cells.count_slice, columns=self.columns, n_partitions=self.n_partitions)
        counted = self._on_slices(partial(cells.on_slices, slices=self.slices, work=work), cells.COUNTS_SCHEMA)
        names = ("records", "key_bytes", "value_bytes", "keyless")
        rows = counted.groupBy("partition").agg(*(F.sum(name).alias(name) for name in names)).collect()
        return sorted((Load(**row.asDict()) for row in rows), key=lambda load: load.partition)

    @property
    def is_on_one_host(self) -> bool:
        return str(self.spark.sparkContext.master).startswith("local")

    def write(self, write: WritePartition, skipped: Collection[int], scratch: Scratch) -> dict[int, Outcome[Written]]:
        """Call `write` for each partition that has records and is not in `skipped`; return its outcome by partition."""
        return write_on_spark(self.spark, self.by_partition, write, skipped, scratch)

    def by_partition(self, skipped: Collection[int], scratch: Scratch) -> tuple[Any, Unpack]:
        """Read the source once, and store its cells in `scratch`, except for the partitions in `skipped`. Returns a
        DataFrame with one task per partition, and the function with which such a task reads its records, in order."""
        store = partial(
            _store, slices=self.slices, columns=self.columns, n_partitions=self.n_partitions, skipped=skipped,
            scratch=scratch,
        )  # fmt: skip
        found: list[list[cells.Cell]] = [[] for _ in range(self.n_partitions)]
        for row in self._on_slices(store, cells.PLACES_SCHEMA).collect():
            found[row["task"]].append(cells.Cell(*row))
        for of_task in found:
            of_task.sort(key=lambda cell: cell.place)
        return self.spark.range(0, self.n_partitions, 1, self.n_partitions), partial(_load, found=found)

    @as_caller()
    def _on_slices(self, task: Callable[[Iterator[Any]], Iterator[Any]], schema: str) -> Any:
        n = len(self.slices)
        return self.spark.range(0, n, 1, max(n, 1)).mapInArrow(on_workers(task), schema)


def _store(
    batches: Iterator[Any], *, slices: Sequence[Slice], columns: Mapping[str, str], n_partitions: int,
    skipped: Collection[int], scratch: Scratch,
) -> Iterator[Any]:  # fmt: skip
    """Run a Spark task that reads slices: store their cells, and yield Arrow batches of PLACES_SCHEMA."""

    def work(item: Slice) -> Iterator[Any]:
        try:
            stored = cells.store_slice(LOCAL, item, columns, n_partitions, skipped, scratch.path(item, attempt_name()))
        except OSError as problem:
            raise as_problem(problem) from problem
        columns_of_cells = zip(*stored, strict=True) if stored else ((),) * len(cells.Cell._fields)
        yield pyarrow.RecordBatch.from_arrays(
            [pyarrow.array(column, kind) for column, kind in zip(columns_of_cells, _KINDS, strict=True)],
            list(cells.Cell._fields),
        )

    yield from cells.on_slices(batches, slices=slices, work=work)


def _load(batch: Any, *, found: Sequence[Sequence[cells.Cell]]) -> Iterator[tuple[int, RecordColumns]]:
    for number in batch.column(0).to_pylist():
        yield from cells.load(LOCAL, found[number])


def slices_of(spark: Any, frame: Any, source: Source, n_partitions: int) -> Slices | str:
    """Return the source as slices, or the reason why it must be read as Spark's rows. `frame` is the result of
    `source.opened`."""
    types = dict(frame.dtypes)
    columns = chosen_columns(types, source.columns)
    uris = sorted(frame.inputFiles()) if source.format == "parquet" else []
    why = rows_needed(source, uris, columns)
    if why is not None:
        return why
    files = files_of(uris, columns, {role: types[name] for role, name in columns.items()})
    if isinstance(files, str):
        return files
    return Slices(spark, cut(files, spark.sparkContext.defaultParallelism), columns, n_partitions)


def files_of(
    uris: Sequence[str], columns: Mapping[str, str], types: Mapping[str, str]
) -> list[SourceFile] | str:
    """Read the footers of the files. Return the files, or the reason why only Spark can read them, as a string.
    `columns` has the columns' names by role, and `types` their types in Spark."""
    try:
        with Threads(_FOOTERS_AT_ONCE, "footers") as readers:
            paths = (unquote(urlsplit(uri).path) for uri in uris)
            files = list(readers.map(partial(_look_into, columns=columns), paths))
    except Exception as problem:  # an error of any type: Spark may be able to read the files, or reports the fault
        fault = f"{type(problem).__name__}: {str(problem)[:200]}"
        return f"the footers of the source cannot be read without the JVM ({fault})"
    why = rows_needed_by_types(files, types)
    return files if why is None else why


def rows_needed(source: Source, uris: Sequence[str], columns: Mapping[str, str]) -> str | None:
    """Return the reason in flags, URIs or column names why the source must be read as Spark's rows, or None. Opens no
    file."""
    if source.format != "parquet":
        return f"the source is {source.format}"
    if source.sort_by:
        return "--sort-by is given"
    wanted = {name.lower() for name in columns.values()}
    dotted = next((name for name in columns.values() if "." in name), None)
    if dotted is not None:
        return f"column {dotted} has a dot in its name"
    for uri in uris:
        parts = urlsplit(uri)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            return f"{uri} is not at a local path"
        for folder in unquote(parts.path).split("/")[:-1]:
            name, is_one, _ = folder.partition("=")
            if is_one and unquote(name).lower() in wanted:
                return f"column {unquote(name)} is a partition column: its values are in directory names"
    return None


def rows_needed_by_types(files: Sequence[SourceFile], types: Mapping[str, str]) -> str | None:
    """Return the reason why the columns of the files must be read as Spark's rows, or None. `types` has Spark's types
    by role."""
    for file in files:
        for role, kind in types.items():
            column, first = file.columns.get(role), files[0].columns.get(role)
            if column is None or first is None or column.leaves != first.leaves:
                return f"the column for {role} is not the same in all files of the source"
            if not _is_known(role, kind, column):
                leaves = ", ".join(" ".join(item) for item in column.leaves)
                return f"the source's column for {role} has the type {column.arrow} ({leaves})"
    return None


_BYTES = ("binary", "large_binary", "string", "large_string")
_WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


def _is_known(role: str, kind: str, column: Column) -> bool:
    """Return whether Arrow is known to read the same values from `column` as Spark; `kind` is Spark's type."""
    _, physical, logical = column.leaves[0]
    if role in ("key", "value"):
        return len(column.leaves) == 1 and _is_bytes(physical, logical) and column.arrow in _BYTES
    if role == "headers":
        lists = {f"list<element: struct<key: {key}, value: {value}>>" for key in _BYTES for value in _BYTES}
        return column.arrow in lists and all(_is_bytes(*leaf[1:]) for leaf in column.leaves)
    if kind == "timestamp":
        return physical == "INT64" and logical in ("UTC milliseconds", "UTC microseconds") and (
            column.arrow.startswith(("timestamp[ms, ", "timestamp[us, "))
        )  # fmt: skip
    return physical in ("INT32", "INT64") and logical in ("None", "Int") and column.arrow in _WHOLE


def _is_bytes(physical: str, logical: str) -> bool:
    return physical == "BYTE_ARRAY" and logical in ("None", "String")


@as_caller()
def _look_into(path: str, columns: Mapping[str, str]) -> SourceFile:
    """Return the facts in the footer of one file. Raises any error that pyarrow or the file system raises."""
    status = os.stat(path)
    with pyarrow.parquet.ParquetFile(path) as file:
        schema, arrow, metadata = file.schema, file.schema_arrow, file.metadata
        leaves = [schema.column(number) for number in range(len(schema))]
        tops = [leaf.path.partition(".")[0] for leaf in leaves]
        found = {}
        for role, name in columns.items():
            own = [leaf for leaf, top in zip(leaves, tops, strict=True) if top == name]
            if own:
                described = tuple((leaf.path, leaf.physical_type, _logical(leaf)) for leaf in own)
                kind = arrow.field(name).type
                kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
                found[role] = Column(described, str(kind))
        numbers = [number for number, top in enumerate(tops) if top in columns.values()]
        groups = []
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            groups.append(RowGroup(group.num_rows, sum(group.column(n).total_uncompressed_size for n in numbers)))
    return SourceFile(path, status.st_size, status.st_mtime_ns, found, tuple(groups))


def _logical(leaf: Any) -> str:
    described = json.loads(leaf.logical_type.to_json())
    if described["Type"] == "Timestamp":
        return f"{'UTC' if described['isAdjustedToUTC'] else 'local'} {described['timeUnit']}"
    return str(described["Type"])


def cut(files: Sequence[SourceFile], tasks: int) -> tuple[Slice, ...]:
    """Divide the row groups of the files into slices of about SLICE_BYTES. If there would be fewer slices than `tasks`,
    slices are smaller, but have at least MIN_SLICE_BYTES."""
    total = sum(group.decoded_bytes for file in files for group in file.row_groups)
    enough = min(SLICE_BYTES, max(MIN_SLICE_BYTES, -(-total // max(tasks, 1))))
    slices: list[Slice] = []
    pieces: list[Piece] = []
    taken_bytes = 0
    for number, file in enumerate(files):
        row = 0
        for index, group in enumerate(file.row_groups):
            if group.rows:
                piece = Piece(
                    file.path, number, file.size_bytes, file.mtime_ns, index, row, group.rows, group.decoded_bytes
                )
                pieces.append(piece)
                taken_bytes += group.decoded_bytes
            row += group.rows
            if taken_bytes >= enough:
                slices.append(Slice(len(slices), tuple(pieces)))
                pieces, taken_bytes = [], 0
    if pieces:
        slices.append(Slice(len(slices), tuple(pieces)))
    return tuple(slices)
