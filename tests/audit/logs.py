"""Replicas of a partition for audits: one log, cleaned at different times in each, with inserted differences."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from keytail.audit.compare import ReplicaLog, compared_range
from keytail.audit.scan import AuditTask
from tests.reference import audit as reference
from tests.reference.batches import Batch, Rec, encode_batch, encode_marker
from tests.reference.cleaner import Aborted, Segment, clean
from tests.reference.legacy import decode_any_log, encode_single, encode_wrapper

NOW = 1_750_000_000_000
SIMPLE = ("value", "headers", "timestamp", "leader-epoch", "producer-id", "producer-epoch", "sequence", "key")
DIFFERENCES = (*SIMPLE, "transactional", "control-type", "lost", "marker-lost")


@dataclass
class Replica:
    """The segments of one replica; the last is active."""

    segments: list[Segment]
    log_start: int = 0
    cleaned_to: int | None = 0
    end: int | None = None  # the log end offset, if the reference model cannot read the log

    def batches(self) -> list[Batch]:
        return [batch for segment in self.segments for batch in decode_any_log(segment.log)]

    @property
    def log_end(self) -> int:
        if self.end is not None:
            return self.end
        return max([self.segments[-1].base_offset, *(batch.last_offset + 1 for batch in self.batches())])


def random_segments(rng: random.Random, *, keyless: bool = False, legacy: bool = True) -> list[Segment]:
    """Return the segments of a log of a leader; all but the last are closed."""
    keys = [b"k%d" % n for n in range(rng.choice([3, 12, 60]))] + [b""]
    offset = rng.choice([0, 0, 2**33])
    segments, parts, entries = [], [], []
    started: dict[int, int] = {}
    sequences: dict[int, int] = {}
    base, epoch = offset, 0
    count = rng.randint(2, 6)
    for number in range(count):
        for _ in range(rng.randint(1, 9)):
            epoch += rng.random() < 0.1
            records = []
            for at in range(offset, offset + rng.choice([1, 1, 2, 6])):
                key = None if keyless and rng.random() < 0.3 else rng.choice(keys)
                value = None if key is not None and rng.random() < 0.3 else b"v%d" % at * rng.randint(0, 3)
                headers = ((b"h", b"%d" % at),) if rng.random() < 0.2 else ()
                records.append(Rec(at, NOW - 10**6 + at % 1000, key, value, headers))
            kind, codec, pid = rng.random(), rng.choice([0, 0, 1, 2, 3, 4]), rng.randint(1, 3)
            fields = {"codec": codec, "leader_epoch": epoch}
            if legacy and number == 0 and kind < 0.5:
                records = [replace(record, headers=()) for record in records]
                magic = rng.choice([0, 1])
                if codec in (1, 2, 3):
                    parts.append(encode_wrapper(records, codec, magic=magic))
                else:
                    parts.append(b"".join(encode_single(record, magic=magic) for record in records))
            elif kind < 0.6:
                if rng.random() < 0.2:
                    fields |= {"timestamp_type": 1, "max_timestamp": NOW - 10**5}
                parts.append(encode_batch(records, **fields))
            elif kind < 0.85 or pid not in started:
                started.setdefault(pid, offset)
                fields |= {"producer_id": pid, "producer_epoch": 1, "base_sequence": sequences.get(pid, 2**31 - 3)}
                sequences[pid] = (fields["base_sequence"] + len(records)) % 2**31
                parts.append(encode_batch(records, **fields, transactional=True))
            else:
                commit, first = rng.random() < 0.5, started.pop(pid)
                if not commit:
                    entries.append(Aborted(pid, first, offset, min([offset + 1, *started.values()])))
                own = {"producer_id": pid, "producer_epoch": 1, "leader_epoch": epoch}
                parts.append(encode_marker(offset, NOW - 10**6, commit=commit, **own))
                records = [Rec(offset, 0, None, None)]
            offset = records[-1].offset + 1
        if number == count - 1:  # all transactions end below the active segment
            for pid in list(started):
                started.pop(pid)
                parts.append(
                    encode_marker(offset, NOW, commit=True, producer_id=pid, producer_epoch=1, leader_epoch=epoch)
                )
                offset += 1
        segments.append(Segment(base, b"".join(parts), mtime_ms=NOW - 10**6 + number, aborted=tuple(entries)))
        parts, entries, base = [], [], offset
    tail = [encode_batch([Rec(offset + n, NOW, rng.choice(keys), b"tail")], leader_epoch=epoch) for n in range(3)]
    segments.append(Segment(offset, b"".join(tail), mtime_ms=NOW))
    return segments


def cleaned(replica: Replica, to: int, now_ms: int, rng: random.Random) -> Replica:
    """Clean the replica up to the base offset of a segment, as in a round of Kafka's cleaner, and again if delete
    horizons have passed.
    """
    first = max(replica.cleaned_to or 0, replica.segments[0].base_offset)
    if first >= to:
        first = replica.segments[0].base_offset
    try:
        done = clean(
            replica.segments, first_dirty=first, first_uncleanable=to, now_ms=now_ms, delete_retention_ms=1000,
            segment_bytes=rng.choice([1, 10**6]), log_start_offset=replica.segments[0].base_offset,
        )  # fmt: skip
    except ValueError:  # Kafka raises an exception if an old message would be retained empty
        return replica
    made = [
        Segment(s.base_offset, s.log, mtime_ms=s.mtime_ms, aborted=_entries(s.txn_index)) for s in done.segments
    ]
    rest = [s for s in replica.segments if s.base_offset >= done.end_offset]
    return Replica(made + rest, replica.log_start, max(replica.cleaned_to or 0, done.end_offset))


def _entries(data: bytes) -> tuple[Aborted, ...]:
    import struct

    return tuple(Aborted(*struct.unpack_from(">qqqq", data, at + 2)) for at in range(0, len(data), 34))


def recompressed(replica: Replica, rng: random.Random) -> Replica:
    """Compress every v2 batch of data with another codec."""
    segments = []
    for segment in replica.segments:
        log = b""
        for batch in decode_any_log(segment.log):
            raw = segment.log[batch.position : batch.position + batch.size]
            old = getattr(batch, "magic", 2) < 2 or batch.control
            log += raw if old or not batch.records else _reencoded(batch, codec=rng.randint(0, 4))
        segments.append(replace(segment, log=log))
    return replace(replica, segments=segments)


def _reencoded(batch: Batch, records=None, **changes) -> bytes:
    fields = {
        "base_offset": batch.base_offset,
        "last_offset": batch.last_offset,
        "codec": batch.codec,
        "timestamp_type": batch.timestamp_type,
        "leader_epoch": batch.leader_epoch,
        "producer_id": batch.producer_id,
        "producer_epoch": batch.producer_epoch,
        "base_sequence": batch.base_sequence,
        "transactional": batch.transactional,
        "control": batch.control,
        "delete_horizon_ms": batch.delete_horizon_ms,
        "max_timestamp": batch.max_timestamp if batch.timestamp_type else None,
    }
    return encode_batch(batch.records if records is None else records, **{**fields, **changes})


def variants(rng: random.Random, segments: list[Segment], count: int) -> list[Replica]:
    """Return replicas that differ only as intact replicas may."""
    made = []
    base = segments[0].base_offset
    for _ in range(count):
        replica = Replica(list(segments), base)
        for _ in range(rng.choice([0, 1, 2, 3])):
            to = rng.choice([s.base_offset for s in replica.segments[1:]])
            replica = cleaned(replica, to, NOW + rng.choice([0, 0, 5000, 10**6]), rng)
        if rng.random() < 0.3:
            replica = recompressed(replica, rng)
        if rng.random() < 0.3:  # the replica has not fetched all records
            tail = decode_any_log(replica.segments[-1].log)
            cut = rng.choice(tail).position
            replica.segments[-1] = replace(replica.segments[-1], log=replica.segments[-1].log[:cut])
        if rng.random() < 0.3:  # segments were removed by retention
            offsets = [batch.base_offset for batch in replica.batches()]
            replica.log_start = rng.choice(offsets[: len(offsets) // 2] or [base])
        made.append(replica)
    return made


def logs_of(replicas: list[Replica], home: Path) -> tuple[ReplicaLog, ...]:
    """Write the replicas to disk, each in a separate folder."""
    logs = []
    for number, replica in enumerate(replicas):
        path = home / f"r{number}" / "t-0"
        path.mkdir(parents=True, exist_ok=True)
        for file in path.glob("*.log"):
            file.unlink()
        listed = []
        for segment in replica.segments:
            file = path / f"{segment.base_offset:020d}.log"
            file.write_bytes(segment.log)
            listed.append((segment.base_offset, len(segment.log), file.stat().st_mtime_ns))
        logs.append(
            ReplicaLog(
                f"r{number}", str(path), tuple(listed), replica.log_start, replica.log_end, None, replica.cleaned_to
            )
        )
    return tuple(logs)


def task_of(replicas: list[Replica], home: Path, *, shards: int = 1, examples: int = 1000) -> tuple[AuditTask, int]:
    logs = logs_of(replicas, home)
    first, end = compared_range(logs)
    return AuditTask("t", 0, logs, end, shards, examples, 12345), first


def expected(replicas: list[Replica], task: AuditTask) -> reference.Found:
    starts = [replica.log_start for replica in replicas]
    segments = [[(s.base_offset, decode_any_log(s.log)) for s in replica.segments] for replica in replicas]
    limits = reference.limits(segments, starts, [replica.cleaned_to for replica in replicas])
    return reference.audit([replica.batches() for replica in replicas], starts, task.end_offset, limits)


def insert_difference(rng: random.Random, replicas: list[Replica], kind: str, end: int) -> int | None:
    """Change one record of one replica. Return its offset, or None if this kind of change is impossible."""
    numbers = list(range(len(replicas)))
    rng.shuffle(numbers)
    for number in numbers:
        candidates = [
            (at, batch, record)
            for at, segment in enumerate(replicas[number].segments)
            for batch in decode_any_log(segment.log)
            if getattr(batch, "magic", 2) == 2
            for record in batch.records
            if _fits(kind, replicas, number, batch, record, end)
        ]
        if not candidates:
            continue
        at, batch, record = rng.choice(candidates)
        segment = replicas[number].segments[at]
        log = segment.log[: batch.position] + _changed(kind, batch, record) + segment.log[batch.position + batch.size :]
        replicas[number].segments[at] = replace(segment, log=log)
        return record.offset
    return None


def _fits(kind: str, replicas: list[Replica], number: int, batch: Batch, record: Rec, end: int) -> bool:
    if not replicas[number].log_start <= record.offset < end:
        return False
    others = [r for k, r in enumerate(replicas) if k != number and r.log_start <= record.offset]
    holding = [r for r in others if any(record.offset == x.offset for b in r.batches() for x in b.records)]
    if not holding:
        return False
    if kind in ("control-type", "marker-lost"):
        data = [
            b.base_offset for b in replicas[number].batches()
            if b.transactional and not b.control and b.producer_id == batch.producer_id and b.records
            and replicas[number].log_start <= b.base_offset < record.offset
        ]  # fmt: skip
        before = [
            b.base_offset for r in replicas for b in r.batches()
            if b.control and b.producer_id == batch.producer_id and b.base_offset < record.offset
        ]  # fmt: skip
        return batch.control and bool(data) and max(data) > max(before, default=-1)
    if batch.control:
        return False
    if kind == "timestamp":  # impossible with append time, or if a replica has an old message without a timestamp
        times = [x.timestamp for r in holding for b in r.batches() for x in b.records if x.offset == record.offset]
        return batch.timestamp_type == 0 and -1 not in times
    if kind in ("producer-id", "producer-epoch", "sequence"):
        return batch.producer_id >= 0
    if kind == "transactional":
        return not batch.transactional
    if kind == "lost":
        own = replicas[number]
        same = [x for b in own.batches() if not b.transactional for x in b.records if x.key == record.key]
        newer = [x for b in own.batches() for x in b.records if x.key == record.key and x.offset > record.offset]
        # The missing record is also explained by a later record that this replica has not fetched, below the offset up
        # to which it was cleaned.
        limit = max(r.cleaned_to or 0 for r in replicas)
        newer += [
            x for r in replicas for b in r.batches() for x in b.records
            if x.key == record.key and record.offset < x.offset < limit
        ]  # fmt: skip
        # A tombstone may be removed with all records that it deletes.
        left = record.value is not None or any(own.log_start <= x.offset < record.offset for x in same)
        return not batch.transactional and left and not newer and record.key is not None
    return True


def _changed(kind: str, batch: Batch, record: Rec) -> bytes:
    def with_record(other: Rec | None) -> bytes:
        records = [other if r is record else r for r in batch.records]
        return _reencoded(batch, [r for r in records if r is not None])

    simple: dict[str, Callable[[], bytes]] = {
        "value": lambda: with_record(replace(record, value=b"planted")),
        "headers": lambda: with_record(replace(record, headers=((b"planted", None),))),
        "timestamp": lambda: with_record(replace(record, timestamp=record.timestamp + 1)),
        "key": lambda: with_record(replace(record, key=b"planted")),
        "leader-epoch": lambda: _reencoded(batch, leader_epoch=batch.leader_epoch + 1),
        "producer-id": lambda: _reencoded(batch, producer_id=batch.producer_id + 50),
        "producer-epoch": lambda: _reencoded(batch, producer_epoch=batch.producer_epoch + 1),
        "sequence": lambda: _reencoded(batch, base_sequence=(batch.base_sequence + 7) % 2**31),
        "transactional": lambda: _reencoded(batch, transactional=True),
        "lost": lambda: with_record(None),
        "marker-lost": lambda: b"",
    }
    if kind == "control-type":
        key = record.key or b""
        return with_record(replace(record, key=key[:2] + bytes([0, 1 - key[3]]) + key[4:]))
    return simple[kind]()
