"""A small KRaft cluster of three brokers whose logs grow event by event, and copies of it at different moments."""

from __future__ import annotations

import base64
import random
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.reference import metadata as model
from tests.reference.batches import Rec, encode_batch, encode_marker

Key = tuple[str, int]
NOW = 1_750_000_000_000
OUTPUTS = (("a", 0), ("a", 1), ("b", 0))
GROUPS, STATES = ("__consumer_offsets", 0), ("__transaction_state", 0)
KEYS = (*OUTPUTS, GROUPS, STATES)
BROKERS = (1, 2, 3)
TOPICS = {"a": 1, "b": 2, GROUPS[0]: 3, STATES[0]: 4}
SEGMENT_BATCHES = 7


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def commit_record(offset: int, group: str, key: Key, committed: int | None) -> Rec:
    """Return a record of `__consumer_offsets`; None deletes the offset."""
    name = struct.pack(">h", 1) + _text(group) + _text(key[0]) + struct.pack(">i", key[1])
    if committed is None:
        return Rec(offset, NOW, name, None)
    return Rec(offset, NOW, name, struct.pack(">hqih", 3, committed, 0, 0) + struct.pack(">q", NOW))


def state_record(
    offset: int, producer_id: int, epoch: int, status: int, start_ms: int, keys: tuple[Key, ...], version: int = 2
) -> Rec:
    """Return a record of `__transaction_state`, as clients with this version of transactions cause it."""
    partitions = b""
    for topic, partition in keys:
        partitions += model.text(topic) + model.ints([partition]) + b"\0"
    value = struct.pack(">hqhib", 1, producer_id, epoch, 60000, status)
    value += model.uvarint(len(keys) + 1) + partitions + struct.pack(">qq", start_ms + status, start_ms)
    value += b"\x01\x02\x02" + struct.pack(">h", version)
    return Rec(offset, NOW, struct.pack(">h", 0) + _text(f"id-{producer_id}"), value)


@dataclass(frozen=True)
class Item:
    """One batch of a log, and what it means: the producer and number of the transaction to which it belongs or whose
    decision it is, and the group, partition and offset that it commits."""

    data: bytes
    end_offset: int
    transaction: tuple[int, int] | None = None
    commits: tuple[str, Key, int | None] | None = None
    is_marker: bool = False


@dataclass
class Log:
    items: list[Item] = field(default_factory=list)

    @property
    def end_offset(self) -> int:
        return self.items[-1].end_offset if self.items else 0

    def add(
        self,
        records: list[Rec],
        transaction: tuple[int, int] | None = None,
        commits: tuple[str, Key, int | None] | None = None,
        **fields: int | bool,
    ) -> None:
        self.items.append(Item(encode_batch(records, **fields), records[-1].offset + 1, transaction, commits))

    def marker(self, transaction: tuple[int, int], epoch: int, commit: bool, marker_ms: int = NOW) -> None:
        at, (producer_id, _) = self.end_offset, transaction
        data = encode_marker(at, marker_ms, commit=commit, producer_id=producer_id, producer_epoch=epoch)
        self.items.append(Item(data, at + 1, transaction, is_marker=True))


@dataclass
class Cluster:
    """The logs of the cluster. `version`: with 2, each transaction has its own epoch; with 1, a producer has one."""

    rng: random.Random
    version: int = 2
    logs: dict[Key, Log] = field(default_factory=lambda: {key: Log() for key in KEYS})
    sequences: dict[tuple[Key, int], int] = field(default_factory=dict)
    aborted: set[tuple[int, int]] = field(default_factory=set)

    def run(self, transactions: int) -> Iterator[None]:
        """Append events in a random order of their producers, and yield after each."""
        running = [self._producer(1000 + n, transactions) for n in range(2)] + [self._consumer(transactions * 3)]
        while running:
            one = self.rng.choice(running)
            if next(one, "ended") == "ended":
                running.remove(one)
            yield

    def append(self, key: Key, transaction: tuple[int, int] | None = None, count: int | None = None) -> None:
        log = self.logs[key]
        at, count = log.end_offset, count or self.rng.randint(1, 3)
        records = [Rec(n, NOW + n, b"k%d" % n, b"%r" % (transaction,)) for n in range(at, at + count)]
        log.add(records, transaction, **self._fields(key, transaction, count))

    def _fields(self, key: Key, transaction: tuple[int, int] | None, count: int) -> dict[str, int | bool]:
        if transaction is None:
            return {}
        producer_id, number = transaction
        epoch = number if self.version == 2 else 0
        sequence = self.sequences.get((key, producer_id), 0)
        self.sequences[key, producer_id] = 0 if self.version == 2 else sequence + count
        return {"producer_id": producer_id, "producer_epoch": epoch, "base_sequence": sequence, "transactional": True}

    def state(self, producer_id: int, number: int, status: int, keys: tuple[Key, ...] = ()) -> None:
        """Append the state of a transaction. Its status: 1 ongoing, 2 and 3 prepared, 4 and 5 completed."""
        epoch = (number + (status > 1)) if self.version == 2 else 0
        log = self.logs[STATES]
        record = state_record(log.end_offset, producer_id, epoch, status, NOW + 1000 * number, keys, self.version)
        log.add([record], (producer_id, number) if status in (2, 3) else None)

    def commit(
        self, key: Key, committed: int | None, group: str = "g", transaction: tuple[int, int] | None = None
    ) -> None:
        log = self.logs[GROUPS]
        record = commit_record(log.end_offset, group, key, committed)
        log.add([record], transaction, (group, key, committed), **self._fields(GROUPS, transaction, 1))

    def _producer(self, producer_id: int, transactions: int) -> Iterator[None]:
        for number in range(transactions):
            transaction = (producer_id, number)
            keys = tuple(sorted(self.rng.sample((*OUTPUTS, GROUPS), self.rng.randint(1, 4))))
            self.state(producer_id, number, 1, keys)
            yield
            for key in self.rng.sample(keys, len(keys)):
                if key == GROUPS:
                    source = self.rng.choice(OUTPUTS)
                    self.commit(source, self.logs[source].end_offset, f"of-{producer_id}", transaction)
                else:
                    self.append(key, transaction)
                yield
            commit = self.rng.random() < 0.7
            if not commit:
                self.aborted.add(transaction)
            self.state(producer_id, number, 2 if commit else 3, keys)
            yield
            for key in self.rng.sample(keys, len(keys)):
                self.logs[key].marker(transaction, number + 1 if self.version == 2 else 0, commit)
                yield
            self.state(producer_id, number, 4 if commit else 5)
            yield

    def _consumer(self, events: int) -> Iterator[None]:
        for _ in range(events):
            key = self.rng.choice(OUTPUTS)
            if self.rng.random() < 0.5:
                self.append(key)
            elif self.logs[key].end_offset:
                self.commit(key, self.rng.randint(0, self.logs[key].end_offset))
            yield

    def cleaned(self, items: list[Item], count: int) -> list[Item]:
        """Return the batches after a cleaner has compacted the first `count` of them: without data of aborted
        transactions, and commits that later ones replace. It keeps the markers."""
        done = {item.transaction for item in items[:count] if item.is_marker}
        left, later = [], set()
        for item in reversed(items[:count]):
            is_decided = item.transaction is None or item.transaction in done
            if is_decided and not item.is_marker and item.transaction in self.aborted:
                continue
            if item.commits is not None and is_decided:
                if item.commits[:2] in later:
                    continue
                later.add(item.commits[:2])
            left.append(item)
        return [*reversed(left), *items[count:]]

    def counts(self) -> dict[Key, int]:
        """Return the number of batches that each log has now."""
        return {key: len(log.items) for key, log in self.logs.items()}


def replicas_of(key: Key) -> tuple[int, ...]:
    return (1, 2) if key == ("b", 0) else BROKERS


def topic_id(topic: str) -> str:
    return base64.urlsafe_b64encode(model.topic_uuid(TOPICS[topic])).rstrip(b"=").decode()


def register_broker(broker: int, epoch: int) -> bytes:
    fields = struct.pack(">i?", broker, False) + bytes(16) + struct.pack(">q", epoch)
    return model.frame(0, 4, fields + model.uvarint(1) + model.uvarint(1) + b"\0" + b"\1\0")


def write_metadata(path: Path, *more: bytes, records: int = 0, voters: tuple[int, ...] = ()) -> None:
    """Write a metadata log with all topics, then `more`, `records` no-op records, and a leader with its voters."""
    log = model.MetadataLog(path)
    log.append(*(model.topic(name, number) for name, number in TOPICS.items()))
    log.append(*(model.partition(TOPICS[key[0]], key[1], replicas_of(key)) for key in KEYS))
    log.append(*(register_broker(broker, 40 + broker) for broker in BROKERS), *more)
    log.no_ops(records)
    if voters:
        # version, leader, voters (each with an empty list of tagged fields), granting voters
        listed = model.uvarint(len(voters) + 1) + b"".join(struct.pack(">i", voter) + b"\0" for voter in voters)
        log.control(value=struct.pack(">hi", 0, voters[0]) + listed + b"\1\0")


def write_copy(
    path: Path,
    cluster: Cluster,
    broker: int,
    counts: Mapping[Key, int],
    *,
    torn: bytes = b"",
    metadata: int = 0,
    cleaned: Mapping[Key, int] | None = None,
) -> Path:
    """Write the log dir of a broker as it was when its logs had `counts` batches, never stopped cleanly. `cleaned`: how
    many batches of a log its cleaner had compacted."""
    path.mkdir(parents=True)
    (path / "meta.properties").write_text(f"version=1\nnode.id={broker}\ncluster.id=a2V5dGFpbC10ZXN0cy0xMjM\n")
    write_metadata(path / "__cluster_metadata-0", records=metadata)
    (path / "__cluster_metadata-0" / "quorum-state").write_text(f'{{"votedId":{broker}}}')
    for key in KEYS:
        if broker in replicas_of(key):
            items = cluster.cleaned(cluster.logs[key].items[: counts[key]], (cleaned or {}).get(key, 0))
            _write_partition(path / f"{key[0]}-{key[1]}", key[0], items, torn)
    for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
        _write_offsets(path / name, dict.fromkeys(KEYS, 0))
    ends = {key: cluster.logs[key].items[count - 1].end_offset for key, count in (cleaned or {}).items() if count}
    _write_offsets(path / "cleaner-offset-checkpoint", ends)
    return path


def _write_offsets(path: Path, offsets: Mapping[Key, int]) -> None:
    lines = "".join(f"{topic} {partition} {offset}\n" for (topic, partition), offset in offsets.items())
    path.write_text(f"0\n{len(offsets)}\n{lines}")


def _write_partition(path: Path, topic: str, items: list[Item], torn: bytes) -> None:
    path.mkdir()
    starts = [0, *(item.end_offset for item in items)]
    for first in range(0, max(len(items), 1), SEGMENT_BATCHES):
        log = b"".join(item.data for item in items[first : first + SEGMENT_BATCHES])
        is_last = first + SEGMENT_BATCHES >= len(items)
        (path / f"{starts[first]:020d}.log").write_bytes(log + (torn if is_last else b""))
    (path / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
    (path / "partition.metadata").write_text(f"version: 0\ntopic_id: {topic_id(topic)}")
