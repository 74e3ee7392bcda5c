"""Decodes the records that a cut needs: committed offsets in `__consumer_offsets`, decisions in `__transaction_state`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, TypeVar

import numpy as np

from keytail.cut.fixed_point import Commit, PartitionKey
from keytail.cut.scan import Scan
from keytail.cut.transactions import Decision, Piece, State
from keytail.errors import CorruptLog, Refused
from keytail.format import names
from keytail.format.batch import CONTROL, TRANSACTIONAL
from keytail.format.kafka_messages import GROUP_KEYS, GROUP_VALUES, TRANSACTION_VALUES
from keytail.format.messages import Message
from keytail.format.record import Record, decode_records
from keytail.kernels.records import IN_ARENA
from keytail.log.records.chunk import SegmentReader
from keytail.log.records.opening import OpenedRows

T = TypeVar("T")

GROUPS_TOPIC, TRANSACTIONS_TOPIC = "__consumer_offsets", "__transaction_state"

_OFFSET_COMMITS = (0, 1)
# States of a transaction that follow its decision: PrepareCommit, PrepareAbort, CompleteCommit and CompleteAbort.
_DECISIONS: dict[int, Decision] = {2: "prepared", 3: "prepared", 4: "completed", 5: "completed"}

_TABLES = {"group-key": GROUP_KEYS, "group": GROUP_VALUES, "value": TRANSACTION_VALUES}


@cache
def _message(table: str, number: int) -> Message:
    return _TABLES[table][number].message()


def _read(table: str, number: int, data: bytes) -> dict[str, Any]:
    """Return the fields of a record value, which begins with its version. Raises ValueError if the version is newer
    than the newest supported one."""
    version, newest = _version(data), _TABLES[table][number].newest_version
    if version > newest:
        raise ValueError(f"its value has version {version}, but this release supports only versions up to {newest}")
    return _message(table, number).read(data, version, 2)


def commits_of(reader: SegmentReader, scan: Scan, pieces: Sequence[Piece]) -> list[Commit]:
    """Return the committed offsets in the log of a replica of `__consumer_offsets`, ascending by record offset. A
    deleted offset is a commit of offset -1. Commits in a transaction are returned only if it was committed.

    `pieces` are the parts of transactions in this log. Raises CorruptLog if a record cannot be decoded.
    """
    committed: dict[int, list[tuple[int, int]]] = {}
    for piece in pieces:
        if piece.is_commit and piece.marker_offset is not None:
            committed.setdefault(piece.producer_id, []).append((piece.first_offset, piece.marker_offset))

    def counts(row: np.void) -> bool:
        spans = committed.get(int(row["producer_id"]), ())
        return any(first <= row["base_offset"] < marker for first, marker in spans)

    return list(_decoded_records(reader, scan, _commit, counts))


def states_of(reader: SegmentReader, scan: Scan) -> list[State]:
    """Return the states of transactions in the log of a replica of `__transaction_state`, in the order of the log.
    Raises CorruptLog if a record cannot be decoded."""
    return list(_decoded_records(reader, scan, _state, lambda row: True))


def _commit(offset: int, record: Record) -> Iterator[Commit]:
    number = _version(record.key)
    if number not in _OFFSET_COMMITS or record.key is None:
        return
    group, partition = _group_and_partition(record.key)
    committed = -1
    if record.value is not None:
        committed = _read("group", number, record.value)["offset"]
    yield Commit(offset, group, partition, committed)


@lru_cache(maxsize=1 << 16)  # keys recur, and commits with the same key share the result
def _group_and_partition(key: bytes) -> tuple[str, PartitionKey]:
    fields = _message("group-key", _version(key)).read(key, 0, 2)
    return fields["group"], (fields["topic"], fields["partition"])


def _state(offset: int, record: Record) -> Iterator[State]:
    if record.value is None or _version(record.key) != 0:
        return
    value = _read("value", 0, record.value)
    partitions = tuple(
        (topic["topic"], partition)
        for topic in value["transactionPartitions"] or ()
        for partition in topic["partitionIds"]
    )
    yield State(
        offset,
        value["producerId"],
        value["producerEpoch"],
        _DECISIONS.get(value["transactionStatus"], "none"),
        value["transactionStartTimestampMs"],
        value["transactionLastUpdateTimestampMs"],
        partitions,
    )


def _version(data: bytes | None) -> int:
    if data is None or len(data) < 2:
        raise ValueError("the record has no type or version")
    return int.from_bytes(data[:2], "big", signed=True)


def _decoded_records(
    reader: SegmentReader, scan: Scan, decode: Callable[[int, Record], Iterator[T]], counts: Callable[[np.void], bool]
) -> Iterator[T]:
    """Yield what `decode` yields for the offset and the record of each record, in the order of the log, up to its valid
    end. Control records are left out, as are batches of a transaction for which `counts` returns False."""
    for segment in scan.facts.segments:
        path = os.path.join(scan.facts.path, names.segment_file(segment.base_offset, names.LOG))
        if segment.base_offset >= scan.end_offset:
            return
        for chunk in reader.chunks(path, segment.log_bytes, torn_tail=True):
            table = chunk.table
            wanted = (table["attributes"] & CONTROL == 0) & (table["record_count"] > 0)
            wanted &= table["last_offset"] < scan.end_offset
            _refuse_old(path, table[wanted])
            for row in np.flatnonzero(wanted & (table["attributes"] & TRANSACTIONAL != 0)):
                wanted[row] = counts(table[row])
            for opened in reader.open_rows(chunk, wanted):
                _refuse_piece(path, table, opened)
                for row in np.flatnonzero(wanted[opened.first : opened.end]) + opened.first:
                    source: Any = opened.arena if opened.where[row] == IN_ARENA else chunk.raw
                    start = int(opened.start[row])
                    block = source[start : start + int(opened.size[row])].tobytes()
                    yield from _of_batch(path, table[row], block, decode)


def _of_batch(path: str, row: np.void, block: bytes, decode: Callable[[int, Record], Iterator[T]]) -> list[T]:
    base_offset = int(row["base_offset"])
    try:
        records = decode_records(block, int(row["record_count"]))
        return [item for record in records for item in decode(base_offset + record.offset_delta, record)]
    except ValueError as problem:
        raise CorruptLog(
            f"a record of an internal topic cannot be decoded: {problem}",
            path=path,
            byte_position=int(row["position"]),
            offset=base_offset,
            remedy="Nothing was written. Use `keytail dump` to show the batch",
            slug="invalid-coordinator-record",
        ) from problem


def _refuse_old(path: str, table: np.ndarray) -> None:
    old = table[table["magic"] < 2]
    if len(old):
        raise Refused(
            "messages of magic 0 or 1 in an internal topic are not supported",
            path=path,
            byte_position=int(old["position"][0]),
            remedy="Nothing was written. Compact the partition, which rewrites these messages with magic 2",
            slug="old-messages-in-internal-topic",
        )


def _refuse_piece(path: str, table: np.ndarray, opened: OpenedRows) -> None:
    if opened.is_piece:
        raise Refused(
            "a batch of an internal topic is larger than any batch that a broker writes",
            path=path,
            byte_position=int(table["position"][opened.first]),
            remedy="Nothing was written. Use `keytail dump` to find out what wrote the batch",
            slug="internal-batch-too-large",
        )
