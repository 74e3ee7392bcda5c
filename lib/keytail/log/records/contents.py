"""Summarizes the contents of one segment for reports; no decision depends on the summary.

The whole `.log` is read and checked, as by every reader of chunks.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from keytail.format import names
from keytail.format.batch import CODEC_MASK, CONTROL, NO_TIMESTAMP
from keytail.format.codecs.table import CODECS
from keytail.format.index import OFFSET_ENTRY, TIME_ENTRY, parse_offset_index, parse_time_index
from keytail.kernels.native import file_digest
from keytail.log.fs import FileSystem
from keytail.log.records.chunk import SegmentReader
from keytail.log.records.scan import RecordScanner


@dataclass(frozen=True)
class SegmentContents:
    """The contents of one segment. `next_offset` is the offset after the last batch; `records` counts the records of
    producers, `tombstones` the records with a key and a null value. The timestamps are the smallest and the largest
    that a consumer sees; None if there are no records.

    `batches_by_codec` and `batches_by_magic` count all batches. `xxh3_128` is the digest of the `.log` file, in
    hexadecimal. `index_status` is `missing` if there is no offset or time index, `bad` if one of them ends with an
    incomplete entry, or its entries do not ascend or point outside of the segment, otherwise `good`.
    """

    base_offset: int
    next_offset: int
    log_bytes: int
    records: int
    tombstones: int
    min_timestamp_ms: int | None
    max_timestamp_ms: int | None
    xxh3_128: str
    index_status: str
    batches_by_codec: dict[str, int] = field(default_factory=dict)
    batches_by_magic: dict[int, int] = field(default_factory=dict)


def contents_of(fs: FileSystem, partition_path: str, base_offset: int, reader: SegmentReader) -> SegmentContents:
    """Return a summary of the segment that begins at `base_offset`. Raises CorruptLog if the bytes of the file are not
    a valid log, Refused for a batch that is too large, OSError if the file cannot be read."""
    path = os.path.join(partition_path, names.segment_file(base_offset, names.LOG))
    log_bytes = fs.stat(path).size_bytes
    digest, scanner = file_digest(), RecordScanner()
    next_offset, records, tombstones = base_offset, 0, 0
    least, largest = np.iinfo(np.int64).max, NO_TIMESTAMP
    codecs: Counter[str] = Counter()
    magics: Counter[int] = Counter()
    for chunk in reader.chunks(path, log_bytes):
        table = chunk.table
        digest.update(chunk.raw)
        next_offset = int(table["last_offset"][-1]) + 1
        numbers, counts = np.unique(table["attributes"] & CODEC_MASK, return_counts=True)
        named = [CODECS[number] if number < len(CODECS) else str(number) for number in numbers.tolist()]
        codecs.update(dict(zip(named, counts.tolist(), strict=True)))
        numbers, counts = np.unique(table["magic"], return_counts=True)
        magics.update({int(number): int(n) for number, n in zip(numbers, counts, strict=True)})
        of_producers = table["attributes"] & CONTROL == 0
        for opened in reader.open_rows(chunk, of_producers):
            for portion in scanner.portions(chunk, opened):
                if len(found := portion.records):
                    records += len(found)
                    tombstones += int(((found["key_bytes"] >= 0) & (found["value_bytes"] < 0)).sum())
                    least = min(least, int(found["timestamp_ms"].min()))
                    largest = max(largest, int(found["timestamp_ms"].max()))
    return SegmentContents(
        base_offset=base_offset,
        next_offset=next_offset,
        log_bytes=log_bytes,
        records=records,
        tombstones=tombstones,
        min_timestamp_ms=int(least) if records else None,
        max_timestamp_ms=int(largest) if records else None,
        xxh3_128=digest.hexdigest(),
        index_status=_index_status(fs, partition_path, base_offset, next_offset, log_bytes),
        batches_by_codec=dict(codecs),
        batches_by_magic=dict(magics),
    )


def _index_status(fs: FileSystem, partition_path: str, base_offset: int, next_offset: int, log_bytes: int) -> str:
    def read(suffix: str) -> bytes:
        return fs.read_bytes(os.path.join(partition_path, names.segment_file(base_offset, suffix)), whole=True)

    try:
        offset_index, time_index = read(names.INDEX), read(names.TIME_INDEX)
    except FileNotFoundError:
        return "missing"
    if len(offset_index) % OFFSET_ENTRY.itemsize or len(time_index) % TIME_ENTRY.itemsize:
        return "bad"
    offsets, times = _before_zeros(parse_offset_index(offset_index)), _before_zeros(parse_time_index(time_index))
    span = next_offset - base_offset
    good = (
        _ascends(offsets["relative_offset"], span)
        and _ascends(offsets["position"], log_bytes)
        and _ascends(times["relative_offset"], span, strictly=False)
        and bool((np.diff(times["timestamp_ms"]) >= 0).all())
    )
    return "good" if good else "bad"


def _before_zeros(entries: np.ndarray) -> np.ndarray:
    """Return the entries without the zero entries at the end: a broker preallocates the indexes of its active segment.
    """
    used = np.flatnonzero(np.logical_or.reduce([entries[name] != 0 for name in entries.dtype.names or ()]))
    return entries[: used[-1] + 1 if len(used) else 0]


def _ascends(column: np.ndarray, below: int, *, strictly: bool = True) -> bool:
    if not len(column):
        return True
    steps = np.diff(column.astype(np.int64))
    return bool(column[0] >= 0 and column[-1] < below and (steps >= int(strictly)).all())
