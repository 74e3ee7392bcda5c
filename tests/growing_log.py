"""A partition that grows as under a broker: with transactions of several producers, all codecs, old formats,
tombstones, rolls, compaction, and a new leader. It keeps all appended records, and computes the expected state from
them in plain Python.

The files on disk are those of a stopped broker. The computed state does not depend on them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from keytail.compact.one_partition import compact
from keytail.config.compaction import CompactionConfig
from keytail.log.fs import LOCAL
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import PartitionEntry, survey_partition
from tests.reference.batches import Rec, encode_batch, encode_marker
from tests.reference.cleaner import Aborted
from tests.reference.indexing import index_files
from tests.reference.legacy import encode_single, encode_wrapper

NOW_MS = 1_700_000_000_000
CODECS = (0, 1, 2, 3, 4)
EAGER = CompactionConfig(cleanup_policy=frozenset({"compact"}), min_cleanable_dirty_ratio=0.0)


@dataclass
class _Appended:
    record: Rec
    epoch: int | None
    producer: int | None  # the producer whose open transaction has the record
    aborted: bool = False


@dataclass
class _Segment:
    base: int
    log: bytes = b""
    txn_index: bytes = b""
    is_old: bool = False


@dataclass
class GrowingLog:
    rng: random.Random
    log_dir: Path
    topic: str = "t"
    partition: int = 0
    keys: int = 12
    producers: int = 3
    now_ms: int = NOW_MS
    epoch: int = 0
    end: int = 0
    start: int = 0
    cleaned_to: int | None = None
    topic_id: str = "AAAAAAAAAAAAAAAAAAAAAQ"
    _appended: list[_Appended] = field(default_factory=list)
    _rounds: int = 0
    _open: dict[int, int] = field(default_factory=dict)  # producer id -> first offset of its open transaction
    _segments: list[_Segment] = field(default_factory=lambda: [_Segment(0)])
    _epochs: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    @property
    def path(self) -> Path:
        return self.log_dir / f"{self.topic}-{self.partition}"

    @property
    def stable(self) -> int:
        """Return the last stable offset."""
        return min([self.end, *self._open.values()])

    def grow(self, batches: int, *, old: bool = False) -> None:
        """Append random batches, and sometimes end a transaction or a segment, or change the leader."""
        for _ in range(batches):
            chance = self.rng.random()
            if old:
                self.append_old(self.rng.randint(1, 5))
            elif chance < 0.2 and self._open:
                self.end_transaction(self.rng.choice(sorted(self._open)), commit=self.rng.random() < 0.5)
            else:
                producer = self.rng.randrange(self.producers) if chance < 0.6 else None
                self.append(self.rng.randint(1, 6), producer)
            if self.rng.random() < 0.1:
                self.roll()
            if self.rng.random() < 0.1:
                self.new_leader()

    def random_records(self, count: int, *, plain: bool = False) -> list[Rec]:
        records = []
        for number in range(count):
            value = None if self.rng.random() < 0.25 else b"v%d" % self.rng.randrange(10**6) * self.rng.randint(0, 9)
            headers = tuple(
                (self.rng.choice([b"h", b"", "ö".encode()]), self.rng.choice([b"", None, b"x" * 200]))
                for _ in range(self.rng.choice([0, 0, 1, 3]))
            )
            key = self.rng.choice([b"", *(b"k%d" % i for i in range(self.keys))])
            records.append(
                Rec(self.end + number, self.now_ms + self.rng.randrange(1000), key, value, () if plain else headers)
            )
        return records

    def append(self, count: int, producer: int | None = None) -> None:
        self.append_records(self.random_records(count), producer, codec=self.rng.choice(CODECS))

    def append_records(self, records: list[Rec], producer: int | None = None, **fields: int) -> None:
        if producer is not None:
            self._open.setdefault(producer, records[0].offset)
            fields |= {"producer_id": producer, "producer_epoch": 0, "base_sequence": 0, "transactional": True}
        log_append_ms = self.now_ms + 5000 if self.rng.random() < 0.2 else None
        if log_append_ms is not None:
            fields |= {"timestamp_type": 1, "max_timestamp": log_append_ms}
        self._add(encode_batch(records, leader_epoch=self.epoch, **fields), records[-1].offset + 1)
        for record in records:
            seen = record if log_append_ms is None else replace(record, timestamp=log_append_ms)
            self._appended.append(_Appended(seen, self.epoch, producer))

    def append_old(self, count: int) -> None:
        """Append messages of magic 0 or 1."""
        magic, records = self.rng.choice([0, 1]), self.random_records(count, plain=True)
        if magic == 0:
            records = [replace(record, timestamp=-1) for record in records]
        self._segments[-1].is_old = True
        codec = self.rng.choice([0, 1, 2, 3])
        if codec:
            self._add(encode_wrapper(records, codec, magic=magic), records[-1].offset + 1)
        else:
            self._add(b"".join(encode_single(record, magic=magic) for record in records), records[-1].offset + 1)
        self._appended += [_Appended(record, None, None) for record in records]

    def end_transaction(self, producer: int, *, commit: bool) -> None:
        first, marker = self._open.pop(producer), self.end
        self._add(
            encode_marker(
                marker, self.now_ms, commit=commit, producer_id=producer, producer_epoch=0, leader_epoch=self.epoch
            ),
            marker + 1,
        )
        if not commit:
            stable = min([marker + 1, *self._open.values()])
            self._segments[-1].txn_index += Aborted(producer, first, marker, stable).encode()
        for item in self._appended:
            if item.producer == producer:
                item.producer, item.aborted = None, not commit

    def settle(self) -> None:
        """End all transactions."""
        for producer in sorted(self._open):
            self.end_transaction(producer, commit=self.rng.random() < 0.5)

    def roll(self) -> None:
        if self._segments[-1].log:
            self._segments.append(_Segment(self.end))

    def new_leader(self) -> None:
        if self.end > self._epochs[-1][1]:
            self.epoch += 1
            self._epochs.append((self.epoch, self.end))

    def _add(self, data: bytes, end: int) -> None:
        self._segments[-1].log += data
        self.end = end

    def write(self, high_watermark: int | None = None) -> None:
        """Write what was appended since the last call. Closed segments that were written before are left unchanged."""
        self.path.mkdir(parents=True, exist_ok=True)
        for segment in self._segments:
            stem = self.path / f"{segment.base:020d}"
            index, time_index = (b"", b"") if segment.is_old else index_files(segment.log, segment.base, 100)
            stem.with_suffix(".log").write_bytes(segment.log)
            stem.with_suffix(".index").write_bytes(index)
            stem.with_suffix(".timeindex").write_bytes(time_index)
            if segment.txn_index:
                stem.with_suffix(".txnindex").write_bytes(segment.txn_index)
        self._segments = self._segments[-1:]
        epochs = "".join(f"{epoch} {start}\n" for epoch, start in self._epochs)
        (self.path / "leader-epoch-checkpoint").write_text(f"0\n{len(self._epochs)}\n{epochs}")
        (self.path / "partition.metadata").write_text(f"version: 0\ntopic_id: {self.topic_id}\n")
        (self.log_dir / "meta.properties").write_text("version=1\nnode.id=1\ncluster.id=a2V5dGFpbC10ZXN0cy0xMjM\n")
        (self.log_dir / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":-1}')
        self.checkpoint("replication-offset-checkpoint", self.end if high_watermark is None else high_watermark)
        self.checkpoint("recovery-point-offset-checkpoint", self.end)
        if self.start:
            self.checkpoint("log-start-offset-checkpoint", self.start)

    def checkpoint(self, name: str, offset: int) -> None:
        file = self.log_dir / name
        lines = file.read_text().splitlines()[2:] if file.exists() else []
        others = [line for line in lines if line.split()[:2] != [self.topic, str(self.partition)]]
        lines = [*others, f"{self.topic} {self.partition} {offset}"]
        file.write_text("\n".join(["0", str(len(lines)), *lines]) + "\n")

    def compact(self) -> None:
        """Run a round of keytail's own cleaner over all but the active segment, late enough to remove tombstones."""
        # there are no snapshots, so producers are read from the log
        facts = replace(self.facts(), clean_shutdown=False)
        self._rounds += 1
        now_ms = self.now_ms + self._rounds * 10**12
        result = compact(facts, EAGER, now_ms=now_ms, message_format=self.rng.choice(["v2", "keep"]), fs=LOCAL)
        if result is not None:
            self.cleaned_to = result.end_offset
            self.checkpoint("cleaner-offset-checkpoint", result.end_offset)

    def facts(self):
        [log_dir] = survey_log_dirs(LOCAL, [str(self.log_dir)])
        entry = PartitionEntry(self.topic, self.partition, str(self.log_dir), str(self.path))
        return survey_partition(LOCAL, log_dir, entry)

    def latest(self, end: int | None = None) -> dict[bytes, tuple[Rec, int | None]]:
        """Return, by key, the latest committed record below offset `end` and its leader epoch, without deleted keys."""
        found: dict[bytes, tuple[Rec, int | None]] = {}
        for item in self._appended:
            inside = self.start <= item.record.offset < (self.stable if end is None else end)
            if inside and not item.aborted and item.producer is None:
                assert item.record.key is not None
                found[item.record.key] = (item.record, item.epoch)
        return {key: pair for key, pair in found.items() if pair[0].value is not None}
