"""Implements the tasks of the strategy that bypasses the JVM: each task reads a slice of Parquet and divides it into
cells.

A cell (format/cells.py) has records of one partition, in the order of the source. The cells of a partition, ordered by
place, have all its records. Cells are in scratch files, one file per slice, in partition directories, because these
have the same path for all tasks; the tasks that write partitions read the cells from these files. Spark's shuffle would
copy the data six times in the JVM, which took 1.4 of 2.8 s of CPU time per million records.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet

from keytail.acting_user import as_caller
from keytail.errors import KeytailError, Refused
from keytail.format import cells, names
from keytail.format.columns import BytesColumn
from keytail.format.encode import RecordColumns
from keytail.import_.records import columns_of
from keytail.kernels.murmur2 import partition_of_keys
from keytail.log.fs import FileSystem

PLACES_SCHEMA = "task int, place bigint, partition int, path string, position bigint, size_bytes bigint"
COUNTS_SCHEMA = "partition int, records bigint, key_bytes bigint, value_bytes bigint, keyless bigint"

PART_BYTES = 16 << 20  # approximate maximum of bytes of decoded records that are divided at a time
# Maximum number of rows of Parquet that are decoded at a time: the same as in Spark's own reader.
_MAX_ROWS = 4096
_READ_BYTES = 1 << 20
# For each record: a partition number (int64), and whether that number is valid (bool).
Numbers = tuple[np.ndarray, np.ndarray]
_NO_PARTITION = -1  # stands for a partition number that does not fit into an int, and for records to omit


@dataclass(frozen=True)
class Piece:
    """A row group. `file_number` is the number of the row group's file in the order of names, and `first_row` the
    number of its first row in that file, both from 0. `size_bytes` and `mtime_ns` are the file's size and modification
    time when its footer was read."""

    path: str
    file_number: int
    size_bytes: int
    mtime_ns: int
    row_group: int
    first_row: int
    rows: int
    decoded_bytes: int  # size of the required columns, from Parquet's footer


@dataclass(frozen=True)
class Slice:
    """A part of the source that one task reads. All slices, in the order of `number`, contain the whole source."""

    number: int
    pieces: tuple[Piece, ...]


class Cell(NamedTuple):
    """The location of records of one partition. Task `task` writes that partition, and reads its cells by `place`."""

    task: int
    place: int
    partition: int
    path: str
    position: int
    size_bytes: int


@dataclass(frozen=True)
class Scratch:
    """The partition directories (`folders`) in which the run `run_id` may write cells. The run's scratch files are
    removed when the run ends."""

    folders: Sequence[str]
    run_id: str

    def path(self, item: Slice, attempt: str) -> str:
        folder = self.folders[item.number % len(self.folders)]
        return os.path.join(folder, names.scratch_file(item.number, self.run_id, attempt, names.CELLS))


def on_slices(
    batches: Iterator[Any], *, slices: Sequence[Slice], work: Callable[[Slice], Iterator[Any]]
) -> Iterator[Any]:
    """Run a Spark task: call `work` with each slice whose number is in the batches, and yield what `work` yields."""
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield from work(slices[number])


def store_slice(
    fs: FileSystem, item: Slice, columns: Mapping[str, str], n_partitions: int, skipped: Collection[int], path: str
) -> list[Cell]:
    """Write the cells of `pack_slice` to a new file, and return their locations. After an error the file is removed."""
    stored: list[Cell] = []
    position = 0
    try:
        fd = fs.create(path, fs.stat(os.path.dirname(path)))
        try:
            for task, place, partition, packed in pack_slice(item, columns, n_partitions, skipped):
                size_bytes = fs.write(fd, packed)
                stored.append(Cell(task, place, partition, path, position, size_bytes))
                position += size_bytes
        finally:
            fs.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):  # if this fails, the driver or the next run removes the file
            fs.unlink(path)
        raise
    return stored


def load(fs: FileSystem, stored: Sequence[Cell]) -> Iterator[tuple[int, RecordColumns]]:
    """Yield the partition number and the records of each cell. Raises KeytailError if a scratch file is too short."""
    for path, of_path in itertools.groupby(stored, key=lambda cell: cell.path):
        fd = fs.open_read(path)
        try:
            for cell in of_path:
                packed = np.empty(cell.size_bytes, np.uint8)
                if fs.read_into(fd, packed, cell.position) != cell.size_bytes:
                    raise KeytailError(
                        "a scratch file of this import is too short", path=path, byte_position=cell.position,
                        remedy="Run the import again; none of its records are in the partitions",
                        slug="scratch-file-too-short",
                    )  # fmt: skip
                yield cell.partition, cells.opened(packed)
        finally:
            fs.close(fd)


def pack_slice(
    item: Slice, columns: Mapping[str, str], n_partitions: int, skipped: Collection[int]
) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """Yield task, place, partition and bytes (uint8) of each cell of the slice, without records of the partitions in
    `skipped`. The bytes are valid until the next cell is yielded.

    Records for a partition that the topic does not have are omitted. Instead, an empty cell with the number of such a
    partition is yielded before the other cells of the part; its task, the number modulo `n_partitions`, reports the
    error.
    """
    divider = cells.Divider(n_partitions)
    place = item.number << 32
    for piece in item.pieces:
        for part in _parts(piece, columns, n_partitions):
            records, found = [records for records, _ in part], [numbers for _, numbers in part]
            wrong = np.unique(np.concatenate([numbers[~_exists(numbers, n_partitions)] for numbers in found]))
            reported = {int(number) % n_partitions: int(number) for number in wrong[::-1]}
            for numbers in found:
                numbers[~_exists(numbers, n_partitions) | np.isin(numbers, list(skipped))] = _NO_PARTITION
            empty = [(number, cells.empty_cell()) for number in reported.values()]
            for partition, cell in (*empty, *divider.divide(records, found)):
                yield partition % n_partitions, place, partition, cell
                place += 1


def _exists(numbers: np.ndarray, n_partitions: int) -> np.ndarray:
    return (numbers >= 0) & (numbers < n_partitions)


def count_slice(item: Slice, columns: Mapping[str, str], n_partitions: int) -> Iterator[Any]:
    """Yield Arrow batches of COUNTS_SCHEMA, one per part of the slice. Partitions that do not exist are counted,
    too."""
    counted = {role: name for role, name in columns.items() if role in ("key", "value", "partition")}
    for piece in item.pieces:
        for part in _parts(piece, counted, n_partitions):
            numbers, of = np.unique(np.concatenate([found for _, found in part]), return_inverse=True)
            keys = np.concatenate([np.diff(records.keys.offsets) for records, _ in part])
            values = np.concatenate([np.diff(records.values.offsets) for records, _ in part])
            keyless = np.concatenate([~records.keys.valid for records, _ in part])
            sums = [np.zeros(len(numbers), np.int64) for _ in range(4)]
            for total, weight in zip(sums, (np.ones(len(of), np.int64), keys, values, keyless), strict=True):
                np.add.at(total, of, weight)
            yield pyarrow.RecordBatch.from_arrays(
                [pyarrow.array(column) for column in (numbers, *sums)],
                ["partition", "records", "key_bytes", "value_bytes", "keyless"],
            )


def partitions_of(keys: BytesColumn, own: Numbers | None, first_turn: int, n_partitions: int) -> np.ndarray:
    """Return the partition of each record (int32): the record's number in `own`, if that number is valid. If it is not
    valid, the key determines the partition; that of a record without a key is `first_turn` plus the record's index,
    modulo `n_partitions`."""
    found: np.ndarray = partition_of_keys(keys.data, keys.offsets, ~keys.valid, n_partitions)
    keyless = np.flatnonzero(~keys.valid)
    found[keyless] = (first_turn + keyless) % n_partitions
    if own is not None:
        numbers, valid = own
        beyond = (numbers < -(2**31)) | (numbers > 2**31 - 1)
        found = np.where(valid, np.where(beyond, _NO_PARTITION, numbers), found).astype(np.int32)
    return found


def _parts(
    piece: Piece, columns: Mapping[str, str], n_partitions: int
) -> Iterator[list[tuple[RecordColumns, np.ndarray]]]:
    """Yield parts of about PART_BYTES of the piece. A part is a list of (some records, their partitions (int32))."""
    row, pending_bytes = piece.first_row, 0
    pending: list[tuple[RecordColumns, np.ndarray]] = []
    for batch in _decoded(piece, columns):
        if pending and pending_bytes + batch.nbytes > PART_BYTES:
            yield pending
            pending, pending_bytes = [], 0
        records = columns_of(batch)
        numbers = partitions_of(records.keys, _own(batch), piece.file_number + row, n_partitions)
        pending.append((records, numbers))
        pending_bytes += batch.nbytes
        row += len(batch)
    if pending:
        yield pending


def _decoded(piece: Piece, columns: Mapping[str, str]) -> Iterator[Any]:
    """Yield Arrow batches of the piece's records, with the columns named by role. Raises Refused if the file has
    changed."""
    with as_caller(), open(piece.path, "rb") as opened:
        status = os.fstat(opened.fileno())
        if (status.st_size, status.st_mtime_ns) != (piece.size_bytes, piece.mtime_ns):
            raise Refused(
                f"on host {os.uname().nodename}, the file has another size or modification time than when the driver "
                "read its footer",
                path=piece.path,
                remedy="Import a source that is not written during the import, at the same path on all hosts",
                slug="source-file-changed",
            )
    # Without a buffer size, a column of a row group, which may be most of the file, is read at once.
    with as_caller():
        file = pyarrow.parquet.ParquetFile(piece.path, buffer_size=_READ_BYTES, pre_buffer=False)
    rows = max(1, min(_MAX_ROWS, PART_BYTES * piece.rows // max(piece.decoded_bytes, 1)))
    names = list(dict.fromkeys(columns.values()))
    for batch in file.iter_batches(rows, [piece.row_group], names, use_threads=False):
        arrays = [_plain(batch.column(name)) for name in columns.values()]
        yield pyarrow.RecordBatch.from_arrays(arrays, list(columns))


def _plain(array: Any) -> Any:
    """Return the array without dictionary encoding. Timestamps become ms (int64, rounded down as in Spark), -1 for
    null."""
    kind = array.type
    if pyarrow.types.is_dictionary(kind):
        return array.dictionary_decode()
    if pyarrow.types.is_timestamp(kind):
        times = array.cast(pyarrow.int64()).fill_null(-1).to_numpy()
        return pyarrow.array(times if kind.unit == "ms" else times // 1000)
    return array


def _own(batch: Any) -> Numbers | None:
    """Return the values of the batch's column `partition`, and which values are valid; None if there is no such
    column."""
    at = batch.schema.get_field_index("partition")
    if at < 0:
        return None
    column = batch.column(at)
    numbers = column.cast(pyarrow.int64()).fill_null(0).to_numpy()
    return numbers, column.is_valid().to_numpy(zero_copy_only=False)
