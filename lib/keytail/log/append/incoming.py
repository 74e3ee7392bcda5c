"""Reads and checks sets of batches to be appended; for a leader, assigns offsets and epochs. No file is touched.

APPEND.md beside this file specifies what a leader and a follower refuse, and what neither of them checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from keytail.errors import CorruptLog, Refused, UsageProblem
from keytail.format.batch import BATCH_TABLE, CODEC_MASK, CONTROL, LOG_APPEND_TIME
from keytail.format.codecs.table import CODECS
from keytail.kernels import append as stamping
from keytail.kernels import batches as kernels
from keytail.log.append.rolling import AppendConfig
from keytail.log.records.chunk import HEADER_ERRORS

NOTHING_WRITTEN = "No batch of this set was written"
_MAGIC_AT = 16
_OLD = "its message format is old, and supported for compaction only"


@dataclass(frozen=True)
class Incoming:
    """Whole batches: `table` (BATCH_TABLE rows, positions from 0) over the bytes `data`."""

    data: np.ndarray
    table: np.ndarray

    def rows(self, first: int, end: int) -> Incoming:
        sizes = self.table["size_bytes"].astype(np.int64)
        at, to = int(sizes[:first].sum()), int(sizes[:end].sum())
        return Incoming(self.data[at:to], self.table[first:end])

    @property
    def as_one_row(self) -> np.ndarray:
        """The whole set as one row of BATCH_TABLE: whether a set that is appended as a whole needs a roll is decided
        from this row."""
        row = self.table[-1:].copy()
        row["size_bytes"] = len(self.data)
        row["max_timestamp_ms"] = self.table["max_timestamp_ms"].max()
        return row


def as_leader(
    data: bytes | np.ndarray, next_offset: int, leader_epoch: int, config: AppendConfig, now_ms: int
) -> Incoming:
    """Return a copy of the batches with new offsets from `next_offset` on; each batch is checked like a producer's
    request. Raises CorruptLog for bytes that are not whole, valid batches, and Refused for batches that a leader
    refuses."""
    raw = np.array(np.frombuffer(data, np.uint8))
    stamping.stamp(raw, len(raw), next_offset, leader_epoch)
    incoming = _read(raw, next_offset)
    table = incoming.table
    counts = table["last_offset"] - table["base_offset"] + 1
    control = (table["attributes"] & CONTROL) != 0
    has_producer = table["producer_id"] >= 0
    append_time = (table["attributes"] & LOG_APPEND_TIME) != 0
    for bad, what in (
        (table["size_bytes"] > config.max_message_bytes, f"it is larger than {config.max_message_bytes} bytes"),
        (table["size_bytes"] > config.segment_bytes, f"it is larger than a segment, {config.segment_bytes} bytes"),
        (counts != table["record_count"], "its number of records differs from its number of offsets"),
        (append_time & ~control, "its timestamp type is LogAppendTime, which only a leader sets"),
        (control & ~has_producer, "it is a control batch without a producer id"),
        (has_producer & ~control & (table["base_sequence"] < 0), "it has a producer id but no sequence number"),
    ):
        _refuse_any(bad, what, table)
    if config.log_append_time:
        stamping.set_append_time(raw, table, now_ms)
    return incoming


def as_follower(
    data: bytes | np.ndarray, next_offset: int, leader_epoch: int | None, config: AppendConfig
) -> Incoming | None:
    """Return a copy of the batches before the first batch with an epoch above `leader_epoch`; None if the copy would be
    empty. Raises CorruptLog for bytes that are not whole, valid batches, and Refused for batches that a follower
    refuses."""
    incoming = _read(np.array(np.frombuffer(data, np.uint8)), next_offset)
    table = incoming.table
    _refuse_any(table["leader_epoch"] < 0, "it has no leader epoch", table)
    if leader_epoch is not None:
        later = np.flatnonzero(table["leader_epoch"] > leader_epoch)
        if len(later):
            incoming = incoming.rows(0, int(later[0]))
    if not len(incoming.table):
        return None
    if len(incoming.data) > config.segment_bytes:
        raise Refused(
            f"a set of {len(incoming.data)} bytes is larger than the segment size of {config.segment_bytes} bytes",
            offset=int(incoming.table["base_offset"][0]),
            remedy=f"{NOTHING_WRITTEN}; append the batches in smaller sets",
            slug="set-exceeds-segment",
        )
    return incoming


def _read(raw: np.ndarray, next_offset: int) -> Incoming:
    if not len(raw):
        raise UsageProblem("no batch to append: a set must have at least one", slug="no-batch-to-append")
    table = np.empty(stamping.count(raw, len(raw)) + 1, BATCH_TABLE)
    out = np.zeros(4, np.int64)
    kernels.index_batches(raw, len(raw), 0, next_offset - 1, table, out)
    rows, consumed, code = (int(out[i]) for i in (kernels.ROWS, kernels.CONSUMED, kernels.CODE))
    if consumed < len(raw):
        _fail(raw, consumed, code, next_offset)
    table = table[:rows]
    _refuse_any(table["magic"] != 2, _OLD, table)
    _refuse_any((table["attributes"] & CODEC_MASK) >= len(CODECS), "its compression codec is unknown", table)
    return Incoming(raw, table)


def _fail(raw: np.ndarray, position: int, code: int, next_offset: int) -> NoReturn:
    if code == kernels.OFFSETS_GO_BACK and raw[position + _MAGIC_AT] >= 2:
        raise Refused(
            "a batch to append begins below the log end offset or below the end of the previous batch",
            byte_position=position,
            offset=int.from_bytes(raw[position : position + 8].tobytes(), "big", signed=True),
            remedy=f"{NOTHING_WRITTEN}. The log end offset is {next_offset}; append each batch once, in order",
            slug="append-below-log-end",
        )
    left = len(raw) - position
    if left > _MAGIC_AT and raw[position + _MAGIC_AT] < 2 and code not in (kernels.SIZE_TOO_SMALL, kernels.TABLE_FULL):
        what = f"cannot append a batch: {_OLD}"
        raise Refused(what, byte_position=position, remedy=NOTHING_WRITTEN, slug="batch-not-appendable")
    what = HEADER_ERRORS.get(code, f"the {left} bytes after the last complete batch are not a batch")
    raise CorruptLog(
        f"cannot append a set of batches: {what}",
        byte_position=position,
        remedy=NOTHING_WRITTEN,
        slug="corrupt-appended-batch",
    )


def _refuse_any(bad: np.ndarray, what: str, table: np.ndarray) -> None:
    if bad.any():
        row = table[int(np.argmax(bad))]
        raise Refused(
            f"cannot append a batch: {what}",
            byte_position=int(row["position"]),
            offset=int(row["base_offset"]),
            remedy=NOTHING_WRITTEN,
            slug="batch-not-appendable",
        )
