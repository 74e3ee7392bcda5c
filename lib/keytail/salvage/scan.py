"""Finds the intact batches of one damaged segment file, checks them to the last record, and orders them by offset.

The file is read into memory once, except for unreadable pages, so the bytes that were checked are the bytes that are
written later. SALVAGE.md, "What counts as intact", defines intact batches, and how the bytes between them are reported.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from keytail.errors import Refused, is_loss
from keytail.format.batch import BATCH_TABLE, CODEC_MASK, CONTROL, HEADER_BYTES
from keytail.format.legacy import summarize
from keytail.kernels import batch_header as v2
from keytail.kernels import batches as header_kernels
from keytail.kernels import salvage as kernels
from keytail.kernels.legacy import OUT_SIZE, check_message, check_plain
from keytail.kernels.verify.codes import MAX_TIMESTAMP_OFF, RECORD_TIMESTAMP
from keytail.kernels.verify.columns import STATE_SIZE
from keytail.limits import max_record_bytes
from keytail.log.fs import FileSystem
from keytail.log.partition import MAX_LOG_BYTES
from keytail.log.records.block_check import check_block

_READ_BYTES = 8 << 20
_PAGE_BYTES = 4096
_ROWS = 1 << 14
# A search through damage computes the CRC of at most this many bytes, plus _SEARCH_TIMES the size of the file: only
# crafted data has many bytes that look like batches.
_MIN_SEARCH_BYTES = 1 << 30
_SEARCH_TIMES = 16

_HEADER_TEXTS = {
    header_kernels.SIZE_TOO_SMALL: "no batch begins here",
    header_kernels.INVALID_MAGIC: "invalid magic byte",
    header_kernels.TOO_SHORT_FOR_V2: "batch is shorter than its header",
    header_kernels.CRC_MISMATCH: "batch has an invalid CRC",
    header_kernels.NEGATIVE_COUNT: "negative record count",
    header_kernels.NEGATIVE_SPAN: "negative offset or span",
    header_kernels.OFFSETS_GO_BACK: "negative offset",
}
_CUT = "the file ends within a batch"
_REST = "bytes that are not a batch"
_OLD = "message has an invalid CRC or invalid fields"
_REPEATED = "repeats a batch"
UNREADABLE = "cannot be read"
ZEROS = "all zeros"


@dataclass(frozen=True)
class Hole:
    """Bytes [start, end) of a file that are in no intact batch, and the reason.

    The bytes are between the batch with last offset `last_before` and the batch with base offset `first_after` (None:
    the file has no such batch). `is_empty`: nothing was lost with these bytes.
    """

    start: int
    end: int
    last_before: int | None
    first_after: int | None
    why: str
    is_empty: bool = False


@dataclass
class FileScan:
    """The bytes of a segment file, and its intact batches (BATCH_TABLE, ascending by offset and position)."""

    raw: np.ndarray
    table: np.ndarray
    holes: tuple[Hole, ...]
    left_out: int = 0  # number of batches with a valid CRC that are not intact, without repeated batches
    gave_up: bool = False  # the search ended at its limit of bytes, before the end of the file

    def runs(self) -> Iterator[np.ndarray]:
        """Yield the bytes of the intact batches; adjacent batches are one array."""
        if not len(self.table):
            return
        starts = self.table["position"]
        ends = starts + self.table["size_bytes"]
        breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
        for a, b in zip(np.concatenate(([0], breaks)), np.concatenate((breaks, [len(starts)])), strict=True):
            yield self.raw[starts[a] : ends[b - 1]]


def scan_file(fs: FileSystem, path: str, size_bytes: int, low: int, high: int) -> FileScan:
    """Find the intact batches with offsets in [low, high). The scan needs memory for the whole file, and some hundred
    bytes per batch.

    Raises OSError if the file cannot be read for a reason that does not imply a loss; Refused for a compressed message
    of magic 0 or 1 that decompresses to more than `max_record_bytes`.
    """
    raw, unreadable = read_around(fs, path, min(size_bytes, MAX_LOG_BYTES))
    table, problems, gave_up = _batches(raw, low, high)
    damaged = len(problems)
    try:
        table = _kept(raw, table, low, high, problems)
    except Refused as problem:
        problem.path = path
        raise
    left_out = sum(text != _REPEATED for _, text in problems[damaged:])
    problems += [(start, UNREADABLE) for start, _ in unreadable]
    return FileScan(raw, table, tuple(_holes(raw, table, size_bytes, sorted(problems))), left_out, gave_up)


def read_around(fs: FileSystem, path: str, size_bytes: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return the file's bytes, with zeros for unreadable pages, and the byte ranges of these pages. There are fewer
    than `size_bytes` bytes if the file has become shorter."""
    raw = np.zeros(size_bytes, np.uint8)
    unreadable: list[tuple[int, int]] = []
    fd = fs.open_read(path)
    try:
        at = 0
        while at < size_bytes:
            end = min(at + _READ_BYTES, size_bytes)
            got = _read(fs, fd, raw, at, end)
            if got is None:
                got = _read_pages(fs, fd, raw, at, end, unreadable)
            at += got
            if at < end:
                break
    finally:
        fs.close(fd)
    return raw[:at], _joined(unreadable)


def _read(fs: FileSystem, fd: int, raw: np.ndarray, start: int, end: int) -> int | None:
    try:
        return fs.read_into(fd, raw[start:end], start)
    except OSError as error:
        if not is_loss(error):
            raise
        raw[start:end] = 0
        return None


def _read_pages(
    fs: FileSystem, fd: int, raw: np.ndarray, start: int, end: int, unreadable: list[tuple[int, int]]
) -> int:
    for at in range(start, end, _PAGE_BYTES):
        page_end = min(at + _PAGE_BYTES, end)
        got = _read(fs, fd, raw, at, page_end)
        if got is None:
            unreadable.append((at, page_end))
        elif got < page_end - at:
            return at + got - start
    return end - start


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _batches(raw: np.ndarray, low: int, high: int) -> tuple[np.ndarray, list[tuple[int, str]], bool]:
    """Return the batches with a valid CRC, in file order; the position and the kind of each damage; and whether the
    search ended at its limit."""
    rows, out, found = np.empty(_ROWS, BATCH_TABLE), np.zeros(4, np.int64), np.zeros(2, np.int64)
    most = _MIN_SEARCH_BYTES + _SEARCH_TIMES * len(raw)
    tables, problems, at = [np.empty(0, BATCH_TABLE)], [], 0
    while at < len(raw):
        header_kernels.index_batches(raw[at:], len(raw) - at, at, -1, rows, out)
        n, code = int(out[header_kernels.ROWS]), int(out[header_kernels.CODE])
        end = at + int(out[header_kernels.CONSUMED])
        table = rows[:n].copy()
        good = _good_old(raw, table)
        if good < n:
            why, end = _OLD, int(table["position"][good])
        elif code == header_kernels.OK:
            why = _CUT if out[header_kernels.NEEDED] else _REST
        else:
            why = _HEADER_TEXTS.get(code, "")
        tables.append(table[:good])
        at = end
        continues = good == n > 0 and code in (header_kernels.TABLE_FULL, header_kernels.OFFSETS_GO_BACK)
        if continues or at == len(raw):
            continue
        problems.append((at, why))
        kernels.next_batch(raw, at, low, high, most, found)
        at = int(found[kernels.FOUND])
    return np.concatenate(tables), problems, bool(found[kernels.CHECKED_BYTES] > most)


def _good_old(raw: np.ndarray, table: np.ndarray) -> int:
    """Return the number of rows before the first invalid message of magic 0 or 1."""
    old = np.flatnonzero(table["magic"] < 2)
    if not len(old):
        return len(table)
    out = np.zeros(OUT_SIZE, np.int64)
    check_plain(raw, 0, table, out)
    bad = int(out[1]) if out[0] else len(table)
    for row in old[old < bad]:
        start, size = int(table["position"][row]), int(table["size_bytes"][row])
        if raw[start + 17] & CODEC_MASK:
            check_message(raw, start + 12, start + size, out)
            if out[0]:
                return int(row)
    return bad


def _kept(
    raw: np.ndarray, table: np.ndarray, low: int, high: int, problems: list[tuple[int, str]]
) -> np.ndarray:
    """Return the rows that are intact and consistent with each other; add the problems of the other rows to `problems`.
    """
    why = _wrong_rows(raw, table, low, high)
    good = np.ones(len(table), bool)
    for row, text in why.items():
        good[row] = False
        problems.append((int(table["position"][row]), text))
    table = table[good]
    if len(table) < 2 or (table["base_offset"][1:] > table["last_offset"][:-1]).all():
        return table
    keep = _chain(table, low)
    kept = table[keep]
    for row in table[~keep]:
        at = min(int(np.searchsorted(kept["base_offset"], row["base_offset"])), len(kept) - 1)
        position, text = int(row["position"]), _REPEATED
        if any(kept[at][name] != row[name] for name in ("base_offset", "last_offset", "crc", "size_bytes")):
            text = f"offsets {row['base_offset']} to {row['last_offset']} are out of order, or also in another batch"
        elif position < kept["position"][at] and (at == 0 or position > kept["position"][at - 1]):
            position = int(kept["position"][at])  # the first of two equal batches is retained
            kept[at] = row
        problems.append((position, text))
    return kept


def _chain(table: np.ndarray, low: int) -> np.ndarray:
    base, last = np.ascontiguousarray(table["base_offset"]), np.ascontiguousarray(table["last_offset"])
    different = np.unique(last)
    below = np.searchsorted(different, base)
    touching = (below > 0) & (different[below - 1] == base - 1)
    keep = np.zeros(len(table), np.uint8)
    ranks = np.searchsorted(different, last)
    kernels.best_chain(base, last, below, touching.astype(np.int64), ranks, low, keep)
    return keep.view(bool)


def _wrong_rows(raw: np.ndarray, table: np.ndarray, low: int, high: int) -> dict[int, str]:
    """Return the reasons, by row, why batches with a valid CRC are not intact. Completes the rows of compressed
    messages of magic 0 and 1."""
    why: dict[int, str] = {}
    codecs = table["attributes"] & CODEC_MASK
    is_old = table["magic"] < 2
    for row in np.flatnonzero(is_old):
        start = int(table["position"][row])
        if raw[start + 17] & CODEC_MASK:
            try:
                inside = summarize(raw, start, int(table["size_bytes"][row]), max_record_bytes())
            except Refused as problem:
                problem.byte_position, problem.offset = start, int(table["base_offset"][row])
                raise
            except ValueError as problem:
                why[int(row)] = f"messages cannot be read: {problem}"
                continue
            table["base_offset"][row], table["last_offset"][row] = inside.base_offset, inside.last_offset
            table["record_count"][row], table["attributes"][row] = inside.record_count, inside.attributes
            table["base_timestamp_ms"][row] = inside.base_timestamp_ms
            table["max_timestamp_ms"][row] = inside.max_timestamp_ms
    outside = (table["base_offset"] < low) | (table["last_offset"] >= high) | (codecs > v2.MAX_CODEC)
    bad = outside.astype(np.uint8)
    kernels.check_records(raw, table, bad)
    for row in np.flatnonzero(~is_old & (codecs > 0) & (bad == 0) & (table["record_count"] > 0)):
        if text := _packed_problem(raw, table[row]):
            why[int(row)] = text
    unreadable = (table["attributes"] & CONTROL != 0) & (table["record_count"] > 0) & (table["control_type"] < 0)
    for row in np.flatnonzero((bad != 0) | (unreadable & ~is_old)):
        text = "its records contradict its header"
        if outside[row]:
            text = f"offsets {table['base_offset'][row]} to {table['last_offset'][row]} do not belong to this segment"
            text = "unknown codec" if codecs[row] > v2.MAX_CODEC else text
        why.setdefault(int(row), text)
    return why


def _packed_problem(raw: np.ndarray, row: np.void) -> str:
    """Return what is wrong with the records of a compressed batch, or an empty string."""
    start, end = int(row["position"]) + HEADER_BYTES, int(row["position"]) + int(row["size_bytes"])
    try:
        code = check_block(
            memoryview(raw)[start:end], base=int(row["base_offset"]),
            last=int(row["last_offset"]), count=int(row["record_count"]),
            base_timestamp_ms=int(row["base_timestamp_ms"]), max_timestamp_ms=int(row["max_timestamp_ms"]),
            attributes=int(row["attributes"]), state=np.zeros(STATE_SIZE, np.int64),
        )  # fmt: skip
    except Refused:  # the batch is too large to be checked, but its CRC is correct
        return ""
    except ValueError as problem:
        return f"its records cannot be decompressed: {problem}"
    return "" if code in (0, RECORD_TIMESTAMP, MAX_TIMESTAMP_OFF) else "its records contradict its header"


def _holes(
    raw: np.ndarray,
    table: np.ndarray,
    size_bytes: int,
    problems: list[tuple[int, str]],
) -> Iterator[Hole]:
    """Yield the holes before, between and after the intact batches."""
    starts, ends = table["position"].astype(np.int64), (table["position"] + table["size_bytes"]).astype(np.int64)
    before, after = np.concatenate(([0], ends)), np.concatenate((starts, [size_bytes]))
    for n in np.flatnonzero(after > before):
        start, end = int(before[n]), int(after[n])
        first = bisect.bisect_left(problems, (start, ""))
        texts = [text for _, text in problems[first : bisect.bisect_left(problems, (end, ""))]]
        lost = [text for text in texts if text != _REPEATED]
        why = (lost or texts or [f"the file ends at byte {len(raw)}"])[0]
        if UNREADABLE in lost:
            why = UNREADABLE
        elif end <= len(raw) and not raw[start:end].any():
            why = ZEROS
        yield Hole(
            start,
            end,
            int(table["last_offset"][n - 1]) if n else None,
            int(table["base_offset"][n]) if n < len(table) else None,
            why if len(lost) < 2 else f"{why}; damaged at {len(lost)} places",
            is_empty=bool(texts) and not lost,
        )
