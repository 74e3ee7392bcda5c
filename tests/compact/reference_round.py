"""A minimal cleaner in plain Python, with Kafka's rules for v2 logs without transactions, whose output is the input of
tests of the proof. It shares no code with `keytail`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.reference.batches import Batch, Rec, decode_log, encode_batch


@dataclass(frozen=True)
class Round:
    """The offsets, the time and the settings of one round of cleaning."""

    first_dirty: int
    end: int
    first_uncleanable: int
    now_ms: int
    delete_retention_ms: int = 1000
    drop_keyless: bool = False


@dataclass
class Out:
    """One batch of the output: its bytes, and its source batch."""

    data: bytes
    source: Batch
    records: tuple[Rec, ...] = field(repr=False)


def clean(segment: bytes, round_: Round, newest: dict[bytes, int]) -> list[Out]:
    out = []
    for batch in decode_log(segment):
        kept = tuple(r for r in batch.records if _is_retained(r, batch, round_, newest))
        raw = segment[batch.position : batch.position + batch.size]
        last_of_range = batch.last_offset + 1 == round_.first_uncleanable
        needs_horizon = batch.delete_horizon_ms is None and any(r.value is None for r in kept)
        if kept and len(kept) == batch.record_count and not needs_horizon:
            out.append(Out(raw, batch, kept))
        elif kept:
            horizon = round_.now_ms + round_.delete_retention_ms if needs_horizon else batch.delete_horizon_ms
            out.append(Out(rebuild(batch, kept, horizon), batch, kept))
        elif last_of_range:
            out.append(Out(rebuild(batch, (), None), batch, ()))
    return out


def newest_offsets(segments: Iterable[bytes], round_: Round) -> dict[bytes, int]:
    newest = {}
    for segment in segments:
        for batch in decode_log(segment):
            for record in batch.records:
                if record.key is not None and round_.first_dirty <= record.offset < round_.end:
                    newest[record.key] = record.offset
    return newest


def _is_retained(record: Rec, batch: Batch, round_: Round, newest: dict[bytes, int]) -> bool:
    if record.offset >= round_.end:
        return True
    if record.key is None or record.offset < newest.get(record.key, -1):
        return False
    horizon = batch.delete_horizon_ms
    return record.value is not None or horizon is None or round_.now_ms < horizon


def rebuild(batch: Batch, records: Sequence[Rec], horizon: int | None, **changes) -> bytes:
    """Return a batch with the source's header fields and other records; `changes` are arguments of `encode_batch`."""
    fields = {
        "base_offset": batch.base_offset,
        "last_offset": batch.last_offset,
        "codec": batch.codec if records else 0,
        "timestamp_type": batch.timestamp_type,
        "leader_epoch": batch.leader_epoch,
        "producer_id": batch.producer_id,
        "producer_epoch": batch.producer_epoch,
        "base_sequence": batch.base_sequence,
        "delete_horizon_ms": horizon,
        "max_timestamp": batch.max_timestamp if batch.timestamp_type or not records else None,
    }
    return encode_batch(records, **{**fields, **changes})


def index_bytes(batches: Iterable[bytes], base: int, interval_bytes: int) -> tuple[bytes, bytes]:
    """Return the offset index and the time index of a segment of these batches."""
    index, time_index = bytearray(), bytearray()
    position = since = 0
    most, most_offset, written = -1, base, -1

    def add_time() -> int:
        if most > written:
            time_index.extend(struct.pack(">qi", most, most_offset - base))
        return max(most, written)

    for data in batches:
        (offset,) = struct.unpack_from(">q", data)
        (delta,) = struct.unpack_from(">i", data, 23)
        (timestamp,) = struct.unpack_from(">q", data, 35)
        if timestamp > most:
            most, most_offset = timestamp, offset + delta
        if since > interval_bytes:
            index.extend(struct.pack(">ii", offset + delta - base, position))
            written = add_time()
            since = 0
        since += len(data)
        position += len(data)
    add_time()
    return bytes(index), bytes(time_index)
