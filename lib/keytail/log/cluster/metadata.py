"""Reads the cluster metadata of a log dir: topics and configs, from the latest snapshot and the log after it.

Nothing is changed, so a broker may be running. If the metadata cannot be read to the end, Refused is raised, with place
and reason. The last records may not be committed by the cluster yet; therefore `Values` contains every possible value
of a config. `config/` decides which config applies.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from keytail.errors import CorruptLog, KeytailError, Refused, is_denied, of_system
from keytail.format import names
from keytail.format.batch import CONTROL
from keytail.format.control import ControlType, parse_control_record
from keytail.format.metadata import (
    MetadataRecord,
    ResourceType,
    parse_record,
    parse_snapshot_header,
    parse_topic_id,
    parse_voters,
)
from keytail.format.record import Record, decode_records
from keytail.log.cluster.replay import Replay, Topic, Values
from keytail.log.fs import FileSystem

if TYPE_CHECKING:
    from keytail.log.records.chunk import SegmentReader

METADATA_DIR = names.partition_dir(names.CLUSTER_METADATA_TOPIC, 0)
# The maximum number of records at the end of the metadata log that may be uncommitted, and may be truncated. Brokers
# apply committed records only.
UNCOMMITTED_RECORDS = 1000
_CHUNK_BYTES = 1 << 20
_ATTEMPTS = 3
_RESTORE = "Restore it from another controller or a backup, or give the topic settings with --topic-config"


@dataclass(frozen=True)
class ClusterMetadata:
    """The contents of the metadata log when it was read: all topics, and the requested configs by name."""

    path: str
    topics: Mapping[str, Topic]
    topic_configs: Mapping[str, Mapping[str, Values]]
    cluster_configs: Mapping[str, Values]  # dynamic defaults of all brokers
    broker_configs: Mapping[str, Values]  # dynamic configs of the requested broker
    as_of_offset: int  # offset of the last record read; -1 if there is none
    as_of_ms: int  # time at which the record at `as_of_offset` was written
    as_of_epoch: int = -1  # leader epoch of the record at `as_of_offset`; -1 if there is none
    features: Mapping[str, int] = field(default_factory=dict)  # levels by name, including metadata.version
    # For topics with uncertain settings, the reason, by topic name.
    uncertain_topics: Mapping[str, str] = field(default_factory=dict)
    # Epoch of the latest registration of each broker, by its id
    broker_epochs: Mapping[int, int] = field(default_factory=dict)
    unknown_types: tuple[int, ...] = ()  # types of records that were skipped because they are unknown
    voters: tuple[int, ...] = ()  # ids of the quorum's voters; empty if no record has them


def find_metadata_dir(fs: FileSystem, log_dirs: Sequence[str]) -> str | None:
    """Return the directory of the metadata log, or None. Raises Refused if there are several, because no broker would
    start."""
    paths = [os.path.join(log_dir, METADATA_DIR) for log_dir in dict.fromkeys(log_dirs)]
    found = [path for path in paths if fs.exists(path)]
    if len(found) > 1:
        raise Refused(
            f"several log dirs contain a metadata log: {', '.join(found)}",
            remedy="Give the log dirs of one broker only: a broker starts only with one metadata log",
            slug="several-metadata-logs",
        )
    return found[0] if found else None


def read_topic_id(fs: FileSystem, partition_path: str) -> str | None:
    """Return the topic id in `partition.metadata` of a partition directory, or None if there is no such file.
    Raises CorruptLog if the file is malformed."""
    path = os.path.join(partition_path, names.PARTITION_METADATA)
    try:
        return parse_topic_id(fs.read_bytes(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        what = f"the topic id cannot be read: {error}"
        raise CorruptLog(what, path=path, remedy=_RESTORE, slug="invalid-topic-id") from error


def read_metadata(
    fs: FileSystem, path: str, broker: int, kept_configs: Collection[str], *, torn_tail: bool = False
) -> ClusterMetadata:
    """Return the metadata after all records in the directory `path`, with the configs of broker `broker`.

    Raises Refused, with place and reason, if anything is missing or cannot be read. If a running broker changes the
    directory during the reading, the directory is read again. `torn_tail`: the log may end with an incomplete batch.
    """
    try:
        listing = _list(fs, path)
        for _ in range(_ATTEMPTS):
            try:
                return _read(fs, listing, broker, kept_configs, torn_tail)
            except (KeytailError, OSError) as problem:
                failed = problem
            now = _list(fs, path)
            if now == listing:
                break
            listing = now
    except OSError as problem:
        failed = problem
    raise _unreadable(path, failed) from failed


def _unreadable(path: str, problem: KeytailError | OSError) -> Refused:
    remedy = (
        "If a broker is running, try again. If not, start and stop the broker once: it repairs its metadata log or "
        "reports why it cannot"
    )
    if isinstance(problem, KeytailError):
        return Refused(
            f"the metadata log cannot be read: {problem.what}",
            path=problem.path or path,
            byte_position=problem.byte_position,
            offset=problem.offset,
            remedy=remedy,
            slug="unreadable-metadata-log",
        )
    return Refused(
        f"the metadata log cannot be read: {problem.strerror}",
        path=problem.filename or path,
        remedy=of_system(problem).remedy if is_denied(problem) else remedy,
        slug="unreadable-metadata-log",
    )


@dataclass(frozen=True, order=True)
class _Snapshot:
    end_offset: int  # the end is exclusive
    epoch: int
    path: str
    size_bytes: int


@dataclass(frozen=True)
class _Listing:
    path: str
    snapshots: tuple[_Snapshot, ...]
    segments: tuple[tuple[int, int], ...]  # base offset and size in bytes, ascending

    def log_path(self, base_offset: int) -> str:
        return os.path.join(self.path, names.segment_file(base_offset, names.LOG))


def _list(fs: FileSystem, path: str) -> _Listing:
    snapshots, segments = [], []
    for entry in fs.scan(path):
        parsed = names.parse_file_name(entry.name)
        snapshot = names.parse_metadata_snapshot(entry.name)
        if snapshot is not None:
            snapshots.append(_Snapshot(*snapshot, os.path.join(path, entry.name), entry.size_bytes))
        elif parsed.kind == "live" and parsed.suffix == names.LOG and parsed.base_offset is not None:
            segments.append((parsed.base_offset, entry.size_bytes))
    return _Listing(path, tuple(sorted(snapshots)), tuple(sorted(segments)))


def _read(
    fs: FileSystem, listing: _Listing, broker: int, kept_configs: Collection[str], torn_tail: bool
) -> ClusterMetadata:
    from keytail.log.records.chunk import SegmentReader  # noqa: PLC0415 (brings in the kernels)

    replay, reader = Replay(kept_configs), SegmentReader(fs, _CHUNK_BYTES)
    start_offset, as_of_ms, as_of_epoch = 0, -1, -1
    if listing.snapshots:
        newest = listing.snapshots[-1]
        start_offset, as_of_ms = newest.end_offset, _load_snapshot(reader, newest, replay)
        as_of_epoch = newest.epoch
    end_offset, last = _load_log(reader, listing, start_offset, replay, torn_tail)
    topics = replay.topics()
    _refuse_uncertain_broker(replay, listing.path, broker)
    return ClusterMetadata(
        path=listing.path,
        topics=topics,
        topic_configs={topic: replay.configs(ResourceType.TOPIC, topic) for topic in topics},
        cluster_configs=replay.configs(ResourceType.BROKER, ""),
        broker_configs=replay.configs(ResourceType.BROKER, str(broker)),
        as_of_offset=end_offset - 1,
        as_of_ms=as_of_ms if last is None else last.max_timestamp_ms,
        as_of_epoch=as_of_epoch if last is None else last.leader_epoch,
        features=replay.features(),
        uncertain_topics=replay.newer(ResourceType.TOPIC),
        broker_epochs=replay.broker_epochs(),
        unknown_types=replay.unknown_types(),
        voters=replay.voters,
    )


def _refuse_uncertain_broker(replay: Replay, path: str, broker: int) -> None:
    """Raise Refused if settings of the broker are uncertain, because these settings are the defaults of every topic."""
    for name, why in replay.newer(ResourceType.BROKER).items():
        if name in ("", str(broker)):
            whose = f"broker {name}" if name else "all brokers"
            raise Refused(
                f"the settings of {whose} are uncertain: {why}",
                path=path,
                remedy=_RESTORE,
                slug="uncertain-broker-settings",
            )


@dataclass(frozen=True)
class _Batch:
    path: str
    position: int
    base_offset: int
    last_offset: int
    max_timestamp_ms: int
    leader_epoch: int
    control: bool
    records: list[Record]

    def fail(self, what: str) -> CorruptLog:
        return CorruptLog(
            what,
            path=self.path,
            byte_position=self.position,
            offset=self.base_offset,
            slug="invalid-metadata-batch",
        )


def _load_snapshot(reader: SegmentReader, snapshot: _Snapshot, replay: Replay) -> int:
    """Load the snapshot and return the time in ms of the last record that it covers. Raises CorruptLog if the snapshot
    is not complete from header to footer."""
    last_ms: int | None = None
    next_offset, ended = 0, False
    for batch in _batches(reader, snapshot.path, snapshot.size_bytes):
        if ended or batch.base_offset != next_offset:
            raise batch.fail("the snapshot continues after its footer" if ended else "the snapshot has gaps")
        next_offset = batch.last_offset + 1
        if not batch.control:
            if last_ms is None:
                raise batch.fail("the snapshot does not begin with its header")
            _replay(batch, replay, settled=True)
            continue
        for record in batch.records:
            control_type = _control_type(batch, record)
            replay.voters = parse_voters(record.key, record.value) or replay.voters
            if control_type == ControlType.SNAPSHOT_HEADER:
                last_ms = _snapshot_time(batch, record)
            ended = control_type == ControlType.SNAPSHOT_FOOTER
    if replay.in_transaction:
        what = "the snapshot ends inside a transaction"
        raise CorruptLog(what, path=snapshot.path, remedy=_RESTORE, slug="incomplete-metadata-snapshot")
    if not ended or last_ms is None:
        what = "the snapshot is incomplete: its footer is missing"
        raise CorruptLog(what, path=snapshot.path, remedy=_RESTORE, slug="incomplete-metadata-snapshot")
    return last_ms


def _load_log(
    reader: SegmentReader, listing: _Listing, start_offset: int, replay: Replay, torn_tail: bool
) -> tuple[int, _Batch | None]:
    """Replay the log from `start_offset` on; return the offset after the last record, and the batch of the last record
    (None if the log has no records there)."""
    segments = _segments_from(listing, start_offset)
    next_offset, last = segments[0][0], None
    uncommitted: deque[_Batch] = deque()
    for base_offset, size_bytes in segments:
        path = listing.log_path(base_offset)
        if base_offset != next_offset:
            gap = f"the log has no records from offset {next_offset} up to the segment at offset {base_offset}"
            raise CorruptLog(gap, path=path, remedy=_RESTORE, slug="metadata-log-gap")
        for batch in _batches(reader, path, size_bytes, torn_tail=torn_tail and base_offset == segments[-1][0]):
            if batch.base_offset != next_offset:
                raise batch.fail(f"the log has no record of offset {next_offset}")
            next_offset = batch.last_offset + 1
            if next_offset <= start_offset:
                continue
            if batch.base_offset < start_offset:
                raise batch.fail(f"the snapshot ends at offset {start_offset}, inside this batch")
            last = batch
            uncommitted.append(batch)
            while uncommitted[0].last_offset < next_offset - UNCOMMITTED_RECORDS:
                _replay(uncommitted.popleft(), replay, settled=True)
    for batch in uncommitted:
        _replay(batch, replay, settled=False)
    return max(next_offset, start_offset), last


def _segments_from(listing: _Listing, start_offset: int) -> tuple[tuple[int, int], ...]:
    """Return (base offset, size) of each segment from the one that contains `start_offset` on."""
    first = sum(base <= start_offset for base, _ in listing.segments) - 1
    if not listing.segments:
        raise CorruptLog(
            "the metadata log has no segments", path=listing.path, remedy=_RESTORE, slug="no-metadata-segments"
        )
    if first < 0:
        what = f"the log begins at offset {listing.segments[0][0]}, and no snapshot covers earlier offsets"
        raise CorruptLog(what, path=listing.path, remedy=_RESTORE, slug="metadata-log-gap")
    return listing.segments[first:]


def _batches(reader: SegmentReader, path: str, size_bytes: int, *, torn_tail: bool = False) -> Iterator[_Batch]:
    from keytail.kernels.records import IN_ARENA  # noqa: PLC0415 (brings in the kernels)

    for chunk in reader.chunks(path, size_bytes, torn_tail=torn_tail):
        table = chunk.table
        if np.any(table["magic"] != 2):
            row = table[np.flatnonzero(table["magic"] != 2)[0]]
            raise CorruptLog(
                "the metadata log contains a batch of an old message format",
                path=path,
                byte_position=int(row["position"]),
                slug="invalid-metadata-batch",
            )
        for opened in reader.open_rows(chunk, np.ones(len(table), bool)):
            if opened.is_piece:
                raise Refused(
                    "a batch of the metadata log is larger than any batch that a controller writes",
                    path=path,
                    byte_position=int(table["position"][opened.first]),
                    remedy="Nothing was changed. Use `keytail dump` to find out what wrote the batch",
                    slug="metadata-batch-too-large",
                )
            for row in range(opened.first, opened.end):
                source = opened.arena if opened.where[row] == IN_ARENA else chunk.raw
                start = int(opened.start[row])
                yield _batch(path, table[row], source[start : start + int(opened.size[row])].tobytes())


def _batch(path: str, row: np.void, block: bytes) -> _Batch:
    batch = _Batch(
        path,
        int(row["position"]),
        int(row["base_offset"]),
        int(row["last_offset"]),
        int(row["max_timestamp_ms"]),
        int(row["leader_epoch"]),
        bool(row["attributes"] & CONTROL),
        [],
    )
    try:
        batch.records.extend(decode_records(block, int(row["record_count"])))
    except ValueError as error:
        raise batch.fail(f"a record cannot be read: {error}") from error
    deltas = [record.offset_delta for record in batch.records]
    if len(deltas) != batch.last_offset - batch.base_offset + 1 or deltas != list(range(len(deltas))):
        raise batch.fail("a batch of the metadata log has gaps in its offsets")
    return batch


def _replay(batch: _Batch, replay: Replay, *, settled: bool) -> None:
    """Apply the records of the batch to `replay`; from a control batch, apply only the voters."""
    if batch.control:
        for record in batch.records:
            replay.voters = parse_voters(record.key, record.value) or replay.voters
        return
    try:
        records: list[MetadataRecord] = [parse_record(record.value) for record in batch.records]
        replay.batch(records, settled=settled)
    except ValueError as error:
        raise batch.fail(f"a metadata record cannot be read: {error}") from error


def _control_type(batch: _Batch, record: Record) -> int:
    try:
        return parse_control_record(record.key, record.value).control_type
    except ValueError as error:
        raise batch.fail(str(error)) from error


def _snapshot_time(batch: _Batch, record: Record) -> int:
    try:
        return parse_snapshot_header(record.value)
    except ValueError as error:
        raise batch.fail(str(error)) from error
