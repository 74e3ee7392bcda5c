"""A repack of one segment in plain Python: the reference model of `keytail.compact.repack`, without shared code.

Everything is in memory, one record at a time. Which batches are merged depends on compressed sizes, so the caller gives
the function that compresses.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from tests.reference.batches import Batch, Rec, encode_batch, encode_record
from tests.reference.legacy import LegacyBatch, decode_any_log
from tests.reference.varints import crc32c

Compress = Callable[[int, bytes], bytes]


@dataclass(frozen=True)
class Rules:
    """`batch_bytes` is the limit of uncompressed records; 0 merges nothing. `codec` None keeps the codec of each batch.
    `kept`: base offsets of batches that must not be changed. `forgotten`: ids of producers that merged batches lose,
    except in transactions that are not ended by one of `commits` (producer id and offset of the COMMIT markers);
    `aborts` are the other markers.
    """

    batch_bytes: int
    max_message_bytes: int
    codec: int | None = None
    kept: Collection[int] = ()
    forgotten: Collection[int] = ()
    commits: Collection[tuple[int, int]] = ()
    aborts: Collection[tuple[int, int]] = ()


def repack(log: bytes, rules: Rules, compress: Compress) -> bytes:
    """Return the repacked log of one segment."""
    out: list[bytes] = []
    run: list[tuple[Batch, bytes]] = []
    for batch in decode_any_log(log):
        data = log[batch.position : batch.position + batch.size]
        if not _can_be_rebuilt(batch, rules):
            out += _end(run, rules, compress)
            out.append(data)
            run = []
            continue
        if run and not (_may_share(run[-1][0], batch, rules) and _fits([*run, (batch, data)], rules)):
            out += _end(run, rules, compress)
            run = []
        run.append((batch, data))
    return b"".join([*out, *_end(run, rules, compress)])


def _can_be_rebuilt(batch: Batch, rules: Rules) -> bool:
    return (
        not isinstance(batch, LegacyBatch)
        and batch.record_count > 0
        and not batch.control
        and batch.attributes < 0x80
        and batch.base_offset not in rules.kept
        and all(record.timestamp >= -1 for record in batch.records)
    )


def markers(batches: Sequence[Batch]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Return producer id and offset of each COMMIT, and of each ABORT marker."""
    found: tuple[set[tuple[int, int]], set[tuple[int, int]]] = set(), set()
    for batch in batches:
        if batch.control and batch.records:
            key = batch.records[0].key or b""
            found[key != b"\0\0\0\1"].add((batch.producer_id, batch.base_offset))
    return found


def _without_producer(batch: Batch, rules: Rules) -> Batch:
    """Return the batch as it is when it is merged."""
    if batch.producer_id not in rules.forgotten:
        return batch
    if batch.transactional:
        ends = [(at, id_) for id_, at in {*rules.commits, *rules.aborts} if id_ == batch.producer_id]
        next_ = min((end for end in ends if end[0] > batch.last_offset), default=None)
        if next_ is None or (next_[1], next_[0]) not in rules.commits:
            return batch
    attributes = batch.attributes & ~0x10
    return replace(batch, producer_id=-1, producer_epoch=-1, base_sequence=-1, attributes=attributes)


def _may_share(a: Batch, b: Batch, rules: Rules) -> bool:
    a, b = _without_producer(a, rules), _without_producer(b, rules)
    return (
        rules.batch_bytes > 0
        and a.producer_id == b.producer_id == -1
        and (a.producer_epoch, a.base_sequence) == (b.producer_epoch, b.base_sequence)
        and not a.transactional
        and not b.transactional
        and (rules.codec is not None or a.codec == b.codec)
        and a.timestamp_type == b.timestamp_type
        and a.leader_epoch == b.leader_epoch
        and a.delete_horizon_ms == b.delete_horizon_ms
        and (a.timestamp_type == 0 or a.max_timestamp == b.max_timestamp)
    )


def _fits(run: Sequence[tuple[Batch, bytes]], rules: Rules) -> bool:
    batches = [batch for batch, _ in run]
    limit = min(rules.batch_bytes, rules.max_message_bytes - 61)
    return len(_block(batches)) <= limit and batches[-1].last_offset - batches[0].base_offset < 2**31


def _records(batches: Sequence[Batch]) -> list[Rec]:
    return [record for batch in batches for record in batch.records]


def _base_timestamp(batches: Sequence[Batch]) -> int:
    horizon = batches[0].delete_horizon_ms
    return batches[0].records[0].timestamp if horizon is None else horizon


def _block(batches: Sequence[Batch]) -> bytes:
    base, base_timestamp = batches[0].base_offset, _base_timestamp(batches)
    return b"".join(encode_record(record, base, base_timestamp) for record in _records(batches))


def _end(run: list[tuple[Batch, bytes]], rules: Rules, compress: Compress) -> list[bytes]:
    """Return the bytes that are written for the sources of one batch."""
    sources = [data for _, data in run]
    if not run:
        return []
    batches = [batch for batch, _ in run]
    codec = batches[0].codec if rules.codec is None else rules.codec
    if len(batches) == 1 and batches[0].codec == codec:
        return sources
    first = batches[0] if len(batches) == 1 else _without_producer(batches[0], rules)
    merged = _batch(first, batches, codec, compress(codec, _block(batches)))
    if len(merged) > rules.max_message_bytes:
        return sources
    has_other = any(batch.codec not in (codec, 0) for batch in batches)
    if not has_other and len(merged) >= sum(map(len, sources)):
        return sources
    return [merged]


def _batch(first: Batch, batches: Sequence[Batch], codec: int, block: bytes) -> bytes:
    records = _records(batches)
    newest = first.max_timestamp if first.timestamp_type else max(record.timestamp for record in records)
    empty = encode_batch(
        [],
        base_offset=first.base_offset,
        last_offset=batches[-1].last_offset,
        timestamp_type=first.timestamp_type,
        leader_epoch=first.leader_epoch,
        producer_id=first.producer_id,
        producer_epoch=first.producer_epoch,
        base_sequence=first.base_sequence,
        transactional=first.transactional,
        extra_attributes=codec | (first.delete_horizon_ms is not None) << 6,
        base_timestamp=_base_timestamp(batches),
        max_timestamp=newest,
        record_count=len(records),
    )
    covered = empty[21:] + block
    return empty[:8] + struct.pack(">i", 9 + len(covered)) + empty[12:17] + struct.pack(">I", crc32c(covered)) + covered
