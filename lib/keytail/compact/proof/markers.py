"""The proof's independent table of transactions: every marker of the log. The transaction index of an output is checked
against this table.

The batch headers of the whole log, including the segments above the rewritten ones, are read once to build the table.
The proof uses neither the results of cleaning nor the `.txnindex` files of the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from keytail.errors import CorruptLog, KeytailError
from keytail.format import names
from keytail.kernels.proof import markers as kernels
from keytail.log.fs import FileSystem
from keytail.log.window import Window

if TYPE_CHECKING:
    from keytail.log.partition import SegmentFacts

SOURCE_REMEDY = "Nothing was replaced. Run `keytail verify`, which lists the errors of the partition"
_FIRST_ROWS = 1 << 10
_ENTRY = np.dtype([("version", ">i2"), ("producer", ">i8"), ("first", ">i8"), ("last", ">i8"), ("stable", ">i8")])
_PROBLEMS = {
    kernels.CUT: "a batch is cut off by the end of the file",
    kernels.BAD_SIZE: "a batch has an impossible size",
    kernels.BAD_CRC: "a control batch has an invalid CRC",
    kernels.BAD_ORDER: "a batch's offsets do not follow those of the previous batch",
    kernels.BAD_MAGIC: "a batch has an unknown format",
}
_SLUGS = {kernels.CUT: "incomplete-batch", kernels.BAD_CRC: "invalid-crc"}


def collect_markers(
    fs: FileSystem, partition_path: str, segments: Sequence[SegmentFacts], limit_bytes: int
) -> np.ndarray | None:
    """Return the table of all markers (kernels/proof/markers.py), or None if it would be larger than `limit_bytes`.

    Reading of the last segment ends at the first invalid batch, since its tail may be incomplete.
    """
    cursor = np.zeros(kernels.CURSOR_SIZE, dtype=np.int64)
    cursor[kernels.LAST_OFFSET] = -1
    found = np.empty((_FIRST_ROWS, kernels.COLUMNS), dtype=np.int64)

    def collect(data: np.ndarray) -> int:
        nonlocal found
        while (code := int(kernels.collect(data, cursor, found))) == kernels.NEED_ROOM:
            if 2 * found.nbytes > limit_bytes:
                raise _NoRoom
            found = np.concatenate([found, np.empty_like(found)])
        return code

    try:
        walk_headers(fs, partition_path, segments, cursor, collect)
    except _NoRoom:
        return None
    found = found[: cursor[kernels.FOUND]]
    order = np.lexsort((found[:, kernels.OFFSET], found[:, kernels.PRODUCER]))
    return np.ascontiguousarray(found[order])


def note_first_data(
    fs: FileSystem, partition_path: str, segments: Sequence[SegmentFacts], markers: np.ndarray, log_start_offset: int
) -> None:
    """Note in the table of all markers where the data of each transaction begins, at or above the log start offset."""
    cursor = np.zeros(kernels.CURSOR_SIZE, np.int64)

    def note(data: np.ndarray) -> int:
        return int(kernels.note_first_data(data, cursor, markers, log_start_offset))

    walk_headers(fs, partition_path, segments, cursor, note)


class _NoRoom(Exception):
    """The table of markers would exceed its limit."""


def walk_headers(
    fs: FileSystem,
    partition_path: str,
    segments: Sequence[SegmentFacts],
    cursor: np.ndarray,
    read: Callable[[np.ndarray], int],
) -> None:
    """Call `read` with the bytes of each segment, from `cursor` on (kernels/proof/markers.py), until all bytes have
    been read.

    Reading of the last segment ends at its first invalid batch; an invalid batch of another segment raises CorruptLog.
    """
    window = Window(fs)
    try:
        for segment in segments:
            path = f"{partition_path}/{names.segment_file(segment.base_offset, names.LOG)}"
            window.open(path, segment.log_bytes)
            cursor[kernels.FROM] = 0
            code = kernels.NEED_BYTES
            while code != kernels.COLLECTED:
                cursor[kernels.TO], cursor[kernels.IS_ALL] = window.filled, window.is_all
                code = read(window.bytes)
                if code == kernels.NEED_BYTES:
                    window.advance(int(cursor[kernels.FROM]), int(cursor[kernels.WANTED]))
                    cursor[kernels.FROM] = 0
                elif code != kernels.COLLECTED:
                    if segment is segments[-1]:
                        break
                    raise CorruptLog(
                        _PROBLEMS[code],
                        path=path,
                        byte_position=window.position + int(cursor[kernels.FROM]),
                        remedy=SOURCE_REMEDY,
                        slug=_SLUGS.get(code, "invalid-batch"),
                    )
    finally:
        window.close()


def check_txn_index(
    data: bytes, path: str, markers: np.ndarray, output: int, log_start_offset: int, remedy: str
) -> None:
    """Check the transaction index of output number `output` against the ABORT markers in the output."""
    if len(data) % _ENTRY.itemsize:
        at = len(data) // _ENTRY.itemsize * _ENTRY.itemsize
        raise KeytailError(
            "the transaction index ends within an entry",
            path=path,
            byte_position=at,
            remedy=remedy,
            slug="invalid-output-index",
        )
    entries = np.frombuffer(data, dtype=_ENTRY)
    listed = set()
    before = -1
    for number, entry in enumerate(entries):
        last = int(entry["last"])
        problem = _problem(entry, before, markers, output)
        if problem:
            raise KeytailError(
                f"an entry of the transaction index {problem}",
                path=path,
                byte_position=number * _ENTRY.itemsize,
                offset=max(last, 0),
                remedy=remedy,
                slug="invalid-output-index",
            )
        listed.add((int(entry["producer"]), last))
        before = last
    kept = markers[(markers[:, kernels.OUTPUT] == output) & (markers[:, kernels.KIND] == kernels.ABORT)]
    kept = kept[(kept[:, kernels.FIRST_DATA] >= 0) & (kept[:, kernels.OFFSET] >= log_start_offset)]
    for marker in kept:
        if (int(marker[kernels.PRODUCER]), int(marker[kernels.OFFSET])) not in listed:
            raise KeytailError(
                "an aborted transaction has no entry in the transaction index",
                path=path,
                byte_position=len(data),
                offset=int(marker[kernels.OFFSET]),
                remedy=remedy,
                slug="invalid-output-index",
            )


def _problem(entry: np.void, before: int, markers: np.ndarray, output: int) -> str:
    """Return what is wrong with an entry of a transaction index; "" if it is valid. `before` is the last offset of the
    previous entry."""
    first, last = int(entry["first"]), int(entry["last"])
    if entry["version"] != 0:
        return f"has the unknown version {int(entry['version'])}"
    if last <= before:
        return "does not follow the previous entry"
    row = int(kernels.marker_at(markers, int(entry["producer"]), last))
    if row < 0 or markers[row, kernels.KIND] != kernels.ABORT or markers[row, kernels.OUTPUT] != output:
        return "has no ABORT marker in its segment"
    if not 0 <= first <= last or not 0 <= int(entry["stable"]) <= last + 1:
        return "has invalid offsets"
    data = int(markers[row, kernels.FIRST_DATA])
    if data >= 0 and first > data:
        return "begins after the first data of its transaction"
    has_before = row > 0 and markers[row - 1, kernels.PRODUCER] == entry["producer"]
    if has_before and first <= markers[row - 1, kernels.OFFSET]:
        return "begins before the end of the previous transaction"
    return ""
