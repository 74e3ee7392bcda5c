"""A round of Kafka 4.3's Cleaner over batches of any magic, in plain Python with a dictionary as its offset map.

The reference model of `keytail.compact`: everything is in memory, one record at a time, with no shared code. Unlike
Kafka, it does not re-encode malformed header keys, and raises ValueError for corrupt batches, which Kafka copies.
Compressed batches contain the same records as Kafka's, but not the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.reference import selection
from tests.reference.batches import Batch, Rec, encode_batch
from tests.reference.indexing import index_files
from tests.reference.legacy import LegacyBatch, decode_any_log, is_uniform, rebuilt_wrapper

ABORT, COMMIT = 0, 1
LONG_MAX = 2**63 - 1


@dataclass(frozen=True)
class Aborted:
    """An entry of `.txnindex`; `last_offset` is the offset of the ABORT marker."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int

    def encode(self) -> bytes:
        fields = (self.producer_id, self.first_offset, self.last_offset, self.last_stable_offset)
        return struct.pack(">hqqqq", 0, *fields)


@dataclass(frozen=True)
class Segment:
    """A source segment. The index sizes affect only the grouping."""

    base_offset: int
    log: bytes
    index_bytes: int = 0
    time_index_bytes: int = 0
    mtime_ms: int = 0
    aborted: tuple[Aborted, ...] = ()

    @property
    def log_bytes(self) -> int:
        return len(self.log)


@dataclass(frozen=True)
class CleanedSegment:
    base_offset: int
    source_bases: tuple[int, ...]
    log: bytes
    index: bytes
    time_index: bytes
    txn_index: bytes
    mtime_ms: int


@dataclass(frozen=True)
class Round:
    """The result of a round. `segments` replace all source segments with a base offset below `end_offset`.

    `messages_read` is the number of records that were read, which excludes those of batches that are removed as a
    whole.
    """

    end_offset: int
    segments: tuple[CleanedSegment, ...]
    messages_read: int
    messages_written: int
    keyless: int


class KeylessRecords(ValueError):
    def __init__(self, count: int, first_offset: int) -> None:
        super().__init__(f"{count} records without a key, the first at offset {first_offset}")
        self.count, self.first_offset = count, first_offset


@dataclass
class Transactions:
    """Determines, for batches in order, which data is aborted and which markers are no longer needed."""

    committed: set[int] = field(default_factory=set)
    open_aborts: dict[int, Aborted] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    waiting: list[Aborted] = field(default_factory=list)
    kept: list[Aborted] = field(default_factory=list)

    def can_discard(self, batch: Batch) -> bool:
        for entry in sorted((a for a in self.waiting if a.first_offset <= batch.last_offset), key=_first):
            self.waiting.remove(entry)
            if entry.producer_id not in self.open_aborts:
                self.open_aborts[entry.producer_id] = entry
        return self._marker(batch) if batch.control else self._data(batch)

    def _data(self, batch: Batch) -> bool:
        if not batch.transactional:
            return False
        if batch.producer_id in self.open_aborts:
            self.seen.add(batch.producer_id)
            return True
        self.committed.add(batch.producer_id)
        return False

    def _marker(self, batch: Batch) -> bool:
        if not batch.records:
            return True
        (kind,) = struct.unpack_from(">h", batch.records[0].key, 2)
        pid = batch.producer_id
        if kind == ABORT:
            entry = self.open_aborts.pop(pid, None)
            had_data = pid in self.seen
            self.seen.discard(pid)
            if entry is None or not had_data:
                return True
            self.kept.append(entry)
            return False
        if kind == COMMIT:
            known = pid in self.committed
            self.committed.discard(pid)
            return not known
        return False


def _first(entry: Aborted) -> int:
    return entry.first_offset


@dataclass(frozen=True)
class Settings:
    first_uncleanable: int
    now_ms: int
    delete_retention_ms: int
    producers: Mapping[int, tuple[int | None, int]]
    file_horizon_ms: int
    removal_limit: int
    keep_magic: bool
    by_file_time: bool


def clean(
    segments: Sequence[Segment],
    *,
    first_dirty: int,
    first_uncleanable: int,
    now_ms: int,
    delete_retention_ms: int = 86_400_000,
    max_entries: int = 1_000_000,
    segment_bytes: int = 1_073_741_824,
    segment_index_bytes: int = 10_485_760,
    index_interval_bytes: int = 4096,
    log_start_offset: int = 0,
    producers: Mapping[int, tuple[int | None, int]] | None = None,
    drop_keyless: bool = True,
    removal_limit: int = LONG_MAX,
    keep_magic: bool = False,
    by_file_time: bool = False,
) -> Round:
    """Run one round over all segments of a partition, in ascending order; segments with a base offset at or above the
    end are retained.

    `producers` maps the producer id of each active producer to (last data offset or None, epoch). If `drop_keyless` is
    false, a record without a key in the range to be cleaned raises KeylessRecords. In batches that reach
    `removal_limit`, no tombstone or marker expires. With `keep_magic`, messages of magic 0 and 1 are treated as by the
    cleaners before 4.0; with `by_file_time`, tombstones, markers and horizons are treated as by the cleaners before
    3.1.
    """
    offsets, latest = build_map(
        segments, first_dirty, first_uncleanable, max_entries, log_start_offset=log_start_offset
    )
    end_offset = latest + 1
    horizon_ms = file_horizon_ms(segments, first_dirty, delete_retention_ms)
    settings = Settings(
        first_uncleanable, now_ms, delete_retention_ms, producers or {}, horizon_ms, removal_limit, keep_magic,
        by_file_time,
    )  # fmt: skip
    transactions = Transactions()
    tally = {"read": 0, "written": 0}
    keyless: list[int] = []
    outputs = []
    by_base = {s.base_offset: s for s in segments}
    grouped = selection.groups(segments, end_offset, first_uncleanable, segment_bytes, segment_index_bytes)
    for bases in grouped:
        log = b""
        transactions.kept = []
        for at, base in enumerate(bases):
            source = by_base[base]
            batches = decode_any_log(source.log)
            upper = bases[at + 1] if at + 1 < len(bases) else _next_offset(source, batches)
            transactions.waiting += _aborted(segments, base, upper, log_start_offset)
            for batch in batches:
                raw = source.log[batch.position : batch.position + batch.size]
                log += _clean_batch(
                    batch, raw, source.mtime_ms, transactions, offsets, latest, settings, tally, keyless
                )
        index, time_index = index_files(
            log, bases[0], index_interval_bytes, segment_index_bytes=segment_index_bytes
        )
        txn_index = b"".join(entry.encode() for entry in transactions.kept)
        mtime_ms = by_base[bases[-1]].mtime_ms
        outputs.append(CleanedSegment(bases[0], tuple(bases), log, index, time_index, txn_index, mtime_ms))
    if keyless and not drop_keyless:
        raise KeylessRecords(len(keyless), keyless[0])
    return Round(end_offset, tuple(outputs), tally["read"], tally["written"], len(keyless))


def build_map(
    segments: Sequence[Segment], start: int, end: int, max_entries: int, *, log_start_offset: int = 0
) -> tuple[dict[bytes, int], int]:
    """Return the last offset of each key in [start, end), and the last offset that was reached before the map was full.
    """
    dirty = selection.between(segments, start, end)
    if not dirty:
        raise ValueError(f"nothing to clean from {start} to {end}")
    transactions = Transactions(waiting=_aborted(segments, start, end, log_start_offset))
    offsets: dict[bytes, int] = {}
    latest = -1
    for at, segment in enumerate(dirty):
        for batch in decode_any_log(segment.log):
            if not transactions.can_discard(batch) and not batch.control:
                for record in batch.records:
                    if record.key is None or record.offset < start:
                        continue
                    if len(offsets) >= max_entries:
                        return offsets, latest
                    offsets[record.key] = latest = record.offset
            if batch.last_offset >= start:
                latest = batch.last_offset
        latest = (dirty[at + 1].base_offset if at + 1 < len(dirty) else end) - 1
    return offsets, latest


def file_horizon_ms(segments: Sequence[Segment], first_dirty: int, delete_retention_ms: int) -> int:
    """Return the file time up to which segments lose tombstones of magic 0 and 1, or before Kafka 3.1 all tombstones.
    """
    cleaned = selection.between(segments, 0, first_dirty) if first_dirty > 0 else []
    return cleaned[-1].mtime_ms - delete_retention_ms if cleaned else 0


def _next_offset(segment: Segment, batches: Sequence[Batch]) -> int:
    return batches[-1].last_offset + 1 if batches else segment.base_offset


def _aborted(segments: Sequence[Segment], start: int, upper: int, log_start_offset: int) -> list[Aborted]:
    """Return the aborted transactions that may have data in [start, upper)."""
    found = []
    for segment in selection.between(segments, start, LONG_MAX):
        for entry in segment.aborted:
            if entry.last_offset >= log_start_offset and entry.first_offset < upper:
                found.append(entry)
            if entry.last_stable_offset >= upper:
                return found
    return found


def _clean_batch(batch, raw, mtime_ms, transactions, offsets, latest, settings, tally, keyless) -> bytes:
    """Return the bytes that remain of one batch."""
    now_ms, horizon = settings.now_ms, batch.delete_horizon_ms
    legacy = isinstance(batch, LegacyBatch)
    if legacy or settings.by_file_time:
        is_over = mtime_ms <= settings.file_horizon_ms
    else:
        is_over = horizon is not None and now_ms >= horizon
    is_over = is_over and batch.last_offset < settings.removal_limit
    discardable = transactions.can_discard(batch)
    drop_records = discardable
    if batch.control:
        drop_records = discardable and is_over
    keep_empty = _is_last_of_producer(batch, settings.producers)
    if not settings.by_file_time:
        keep_empty = keep_empty or batch.last_offset + 1 == settings.first_uncleanable
    keep_empty = keep_empty and not (legacy and settings.keep_magic)
    if drop_records and not keep_empty:
        return b""

    kept = []
    for record in batch.records:
        if drop_records:
            continue
        if batch.control or record.offset > latest:
            kept.append(record)
        elif record.key is None:
            keyless.append(record.offset)
        elif record.offset >= offsets.get(record.key, -1):
            if record.value is not None or not is_over:
                kept.append(record)
    tally["read"] += len(batch.records)
    tally["written"] += len(kept)
    if not kept:
        if keep_empty and legacy:
            raise ValueError("Empty batches are only supported for magic v2 and above")
        return _emptied(batch) if keep_empty else b""
    if legacy and settings.keep_magic:
        is_whole = len(kept) == len(batch.records)
        return raw if is_whole and is_uniform(batch, raw) else rebuilt_wrapper(batch, kept)
    has_null = any(record.value is None for record in kept)
    set_horizon = horizon is None and (has_null or (batch.control and discardable))
    if settings.by_file_time:
        set_horizon, horizon = False, None
    if len(kept) == len(batch.records) and not set_horizon and not legacy:
        return raw
    return _rebuilt(batch, kept, now_ms + settings.delete_retention_ms if set_horizon else horizon)


def _is_last_of_producer(batch: Batch, producers: Mapping[int, tuple[int | None, int]]) -> bool:
    if batch.producer_id < 0 or batch.producer_id not in producers:
        return False
    last_data_offset, epoch = producers[batch.producer_id]
    if last_data_offset is not None:
        return batch.last_offset == last_data_offset
    return batch.control and batch.producer_epoch == epoch


def _rebuilt(batch: Batch, kept: Sequence[Rec], horizon: int | None) -> bytes:
    if horizon is not None and not 0 <= horizon <= LONG_MAX:
        horizon = None  # Java's sum overflows to a negative number, which means "none"
    append_time = batch.timestamp_type == 1
    return encode_batch(
        kept,
        codec=batch.codec,
        delete_horizon_ms=horizon,
        max_timestamp=batch.max_timestamp if append_time else max(r.timestamp for r in kept),
        **_unchanged(batch) | _legacy_offsets(batch, kept),
    )


def _legacy_offsets(batch: Batch, kept: Sequence[Rec]) -> dict:
    """Return the offset range of a rebuilt batch; only version 2 retains that of removed records."""
    if not isinstance(batch, LegacyBatch):
        return {}
    return {"base_offset": kept[0].offset, "last_offset": kept[-1].offset}


def _emptied(batch: Batch) -> bytes:
    return encode_batch(
        [], codec=0, base_timestamp=-1, max_timestamp=batch.max_timestamp, **_unchanged(batch)
    )


def _unchanged(batch: Batch) -> dict:
    return {
        "base_offset": batch.base_offset,
        "last_offset": batch.last_offset,
        "timestamp_type": batch.timestamp_type,
        "leader_epoch": batch.leader_epoch,
        "producer_id": batch.producer_id,
        "producer_epoch": batch.producer_epoch,
        "base_sequence": batch.base_sequence,
        "transactional": batch.transactional,
        "control": batch.control,
    }
