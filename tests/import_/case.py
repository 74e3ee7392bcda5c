"""Small log dirs, and imports into them that do the work of the driver and its tasks in this process, without Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from keytail.format.columns import BytesColumn, HeadersColumn
from keytail.format.encode import RecordColumns
from keytail.format.producers import ProducerEntry, encode_snapshot
from keytail.import_.install import finish, install
from keytail.import_.plan import ImportPlan, ReplicaFacts, plan_import, survey_replica
from keytail.import_.segments import SegmentsTask, SegmentsWriter, Written
from keytail.log.fs import FileSystem
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import survey_partition
from keytail.log.replacement.recover import recover
from keytail.log.writer import Limits
from tests.crash.partitions import PARTITION, write_segment
from tests.reference.batches import Rec, encode_batch
from tests.reference.encode import bytes_arrays, headers_arrays

INTERVAL_BYTES = 50
NOW_MS = 1_700_000_000_000
TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAQ"
PRODUCERS = encode_snapshot([ProducerEntry(4001, 3, 8, 9, 1, 1_000_000, -1, -1)])
OLDER = encode_snapshot([ProducerEntry(4001, 3, 4, 5, 1, 1_000_000, -1, -1)])


def columns_of(records: Sequence[Rec]) -> RecordColumns:
    times = np.array([rec.timestamp for rec in records], np.int64)
    keys, values = (BytesColumn(*bytes_arrays([getattr(rec, name) for rec in records])) for name in ("key", "value"))
    offsets, header_keys, header_values = headers_arrays(records)
    headers = HeadersColumn(offsets, BytesColumn(*header_keys), BytesColumn(*header_values))
    return RecordColumns(times, keys, values, headers)


def some_records(count: int, base_offset: int) -> list[Rec]:
    """Return records with nulls and headers, whose timestamps do not ascend."""
    return [
        Rec(
            base_offset + i,
            2_000_000 + i * 7 % 11,
            b"key-%d" % (i % 5),
            None if i % 4 == 3 else b"imported-%d" % i,
            ((b"h", None), (b"g", b"x" * i)) if i % 3 == 0 else (),
        )
        for i in range(count)
    ]


def log_of(offsets: Sequence[int], leader_epoch: int = 0) -> bytes:
    """Return the bytes of batches of two records each."""
    batches = []
    for at in range(0, len(offsets), 2):
        records = [Rec(o, 1_000_000 + o, f"key-{o}".encode(), b"value") for o in offsets[at : at + 2]]
        batches.append(encode_batch(records, leader_epoch=leader_epoch))
    return b"".join(batches)


@dataclass(frozen=True)
class Case:
    """A partition before an import, in `n_replicas` log dirs: the offsets of its segments by base offset, snapshots,
    and leader epochs. The import adds `count` records, in segments of about `segment_bytes`.
    """

    segments: Mapping[int, Sequence[int]]
    snapshots: Mapping[int, bytes]
    epochs: tuple[tuple[int, int], ...]
    n_replicas: int = 1
    count: int = 24
    segment_bytes: int = 700
    follower_epochs: tuple[tuple[int, int], ...] | None = None

    @property
    def end(self) -> int:
        last = max(self.segments)
        return max(self.segments[last], default=last - 1) + 1

    @property
    def records(self) -> list[Rec]:
        return some_records(self.count, self.end)

    def dirs(self, root: Path) -> list[Path]:
        return [root / f"broker-{number}" for number in range(self.n_replicas)]

    def make(self, root: Path) -> None:
        for number, log_dir in enumerate(self.dirs(root)):
            path = log_dir / PARTITION
            path.mkdir(parents=True)
            for base, offsets in self.segments.items():
                write_segment(path, base, log_of(offsets), "")
            for offset, data in self.snapshots.items():
                (path / f"{offset:020d}.snapshot").write_bytes(data)
            epochs = self.epochs if not number or self.follower_epochs is None else self.follower_epochs
            lines = ["0", str(len(epochs)), *(f"{epoch} {start}" for epoch, start in epochs)]
            (path / "leader-epoch-checkpoint").write_text("\n".join(lines) + "\n")
            (path / "partition.metadata").write_text(f"version: 0\ntopic_id: {TOPIC_ID}")
            (log_dir / "meta.properties").write_text(f"version=1\nnode.id={number}\n")
            (log_dir / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":-1}')
            for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
                (log_dir / name).write_text(f"0\n2\norders 0 {self.end}\nother 3 17\n")

    def replicas(self, fs: FileSystem, root: Path, *, resolve: bool = True) -> list[ReplicaFacts]:
        found = []
        for path in self.dirs(root):
            if resolve:
                recover(fs, str(path / PARTITION))
            [log_dir] = survey_log_dirs(fs, [str(path)])
            found.append(survey_replica(fs, survey_partition(fs, log_dir, log_dir.partitions[0])))
        return found

    def plan(self, fs: FileSystem, root: Path, import_id: str = "one", *, append: bool = True) -> ImportPlan:
        return plan_import(self.replicas(fs, root), import_id, append=append, topic_id=None)

    def task(self, plan: ImportPlan, run_id: str = "r1") -> SegmentsTask:
        return SegmentsTask(
            plan.path, plan.base_offset, plan.leader_epoch, 0, None, 200, 1 << 20,
            Limits(self.segment_bytes, 8192, INTERVAL_BYTES), False, False, NOW_MS, run_id,
        )  # fmt: skip

    def write(self, fs: FileSystem, plan: ImportPlan, run_id: str = "r1") -> Written:
        writer = SegmentsWriter(fs, self.task(plan, run_id), "a1")
        records = self.records
        try:
            writer.append(columns_of(records[:10]))
            writer.append(columns_of(records[10:]))
            written = writer.finish()
        except BaseException:
            writer.discard()
            raise
        assert written is not None
        return written

    def run(self, fs: FileSystem, root: Path, run_id: str = "r1") -> ImportPlan:
        """Import into the partition, as a run with `--execute` does, and return the plan."""
        plan = self.plan(fs, root)
        if plan.record is not None:
            finish(fs, plan, run_id)
        else:
            install(fs, plan, self.write(fs, plan, run_id), "one", run_id)
        return plan


EMPTY = Case({0: ()}, {}, ())
CASES = {
    "into an empty partition": EMPTY,
    "after records, in a new segment": Case(
        {0: range(10), 10: range(10, 15)}, {10: OLDER, 15: PRODUCERS}, ((0, 0), (3, 12))
    ),
    "after an empty active segment with the only snapshot": Case(
        {0: range(10), 10: ()}, {10: PRODUCERS}, ((2, 0),)
    ),
    "after the only segment, with the only snapshot at its end": Case({0: range(7)}, {7: PRODUCERS}, ((0, 0), (1, 7))),
    "one segment": replace(EMPTY, count=3),
}
TWO_REPLICAS = Case(
    {0: range(10), 10: range(10, 15)}, {10: OLDER, 15: PRODUCERS}, ((0, 0), (3, 15)), 2, follower_epochs=((0, 0),)
)
