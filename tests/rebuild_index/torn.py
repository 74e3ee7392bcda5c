"""Log dirs with one torn and one intact partition, and the truncation of the torn one by keytail, for tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from keytail.errors import CorruptLog
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import PartitionFacts, survey_partition
from keytail.log.records.chunk import SegmentReader
from keytail.rebuild_index.tail import TornTail, Truncation, plan_truncation, torn_tail, truncate_tail
from tests.crash.partitions import NO_PRODUCERS, PARTITION, log_of, write_segment
from tests.reference.recovery import recovered_logs, valid_bytes

CHECKPOINTS = {
    "cleaner-offset-checkpoint": 17,
    "replication-offset-checkpoint": 33,
    "recovery-point-offset-checkpoint": 12,
}
AFTER = {**CHECKPOINTS, "cleaner-offset-checkpoint": 10, "replication-offset-checkpoint": 15}
HOSTED = (("orders", 0), ("other", 1))


def flipped(log: bytes, at: int) -> bytes:
    return log[:at] + bytes([log[at] ^ 0x55]) + log[at + 1 :]


def torn_segment() -> bytes:
    """Return a segment with offsets 10 to 14 in intact batches, and a damaged batch that begins at 15."""
    whole = log_of(range(10, 15))
    return flipped(whole + log_of(range(15, 20)), len(whole) + 70)


def torn_logs() -> dict[int, bytes]:
    return {0: log_of(range(10)), 10: torn_segment(), 20: log_of(range(20, 30)), 30: log_of(range(30, 34))}


@dataclass(frozen=True)
class Torn:
    """A log dir in which partition orders-0 is invalid from some point on. `logs` has its segments by base offset, and
    `snapshots` the offsets of its producer snapshots.
    """

    logs: Mapping[int, bytes] = field(default_factory=torn_logs)
    snapshots: tuple[int, ...] = (10, 15, 20, 30, 34)
    checkpoints: Mapping[str, int] = field(default_factory=lambda: dict(CHECKPOINTS))
    clean_shutdown: bool = False

    def make(self, root: Path) -> None:
        path = root / PARTITION
        path.mkdir(parents=True)
        for base, log in self.logs.items():
            write_segment(path, base, log[: valid_bytes(log)], "")  # indexes of the readable part
            (path / f"{base:020d}.log").write_bytes(log)
        for offset in self.snapshots:
            (path / f"{offset:020d}.snapshot").write_bytes(NO_PRODUCERS)
        (path / "leader-epoch-checkpoint").write_text("0\n0\n")
        (root / "other-1").mkdir()
        write_segment(root / "other-1", 0, log_of(range(4)), "")
        for name, offset in self.checkpoints.items():
            (root / name).write_text(f"0\n2\norders 0 {offset}\nother 1 3\n")
        if self.clean_shutdown:
            (root / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":1}')

    def recovered(self, root: Path) -> dict[int, bytes]:
        return recovered_logs(root / PARTITION, self.checkpoints["recovery-point-offset-checkpoint"])


def facts_of(root: Path, fs: FileSystem = LOCAL) -> PartitionFacts:
    (log_dir,) = survey_log_dirs(fs, [str(root)])
    (entry,) = [partition for partition in log_dir.partitions if partition.topic == "orders"]
    return survey_partition(fs, log_dir, entry)


def find(root: Path, fs: FileSystem = LOCAL, *, anywhere: bool = False) -> TornTail | None:
    """Return the torn tail in the segments from the one with the recovery point on or, with `anywhere`, in any segment;
    None if there is none.
    """
    facts = facts_of(root, fs)
    ends = [*(segment.base_offset for segment in facts.segments[1:]), 2**63]
    for segment, end in zip(facts.segments, ends, strict=True):
        next_offset = segment.base_offset
        try:
            path = f"{facts.path}/{segment.base_offset:020d}.log"
            if anywhere or end > facts.recovery_point:
                for chunk in SegmentReader(fs).chunks(path, segment.log_bytes):
                    next_offset = int(chunk.table["last_offset"][-1]) + 1
        except CorruptLog as damage:
            return torn_tail(fs, facts.path, segment, next_offset, damage)
    return None


def plan(root: Path, tail: TornTail | None = None) -> Truncation:
    tail = tail or find(root)
    assert tail is not None
    return plan_truncation(facts_of(root), tail, [path.name for path in (root / PARTITION).iterdir()])


def truncate(fs: FileSystem, root: Path, hosted: Collection[tuple[str, int]] = HOSTED) -> Truncation | None:
    """Find, plan and execute a truncation, as a run does. Return None if there is nothing to truncate."""
    tail = find(root, fs)
    if tail is None:
        return None
    planned = plan(root, tail)
    truncate_tail(fs, facts_of(root, fs), planned, hosted=hosted)
    return planned


def logs_of(root: Path) -> dict[int, bytes]:
    return {int(path.name[:20]): path.read_bytes() for path in sorted((root / PARTITION).glob("*.log"))}


def checkpoints_of(root: Path) -> dict[str, int]:
    """Return the checkpoints of the partition by file, after checking that those of the other partition are unchanged.
    """
    found = {}
    for path in sorted(root.glob("*-checkpoint")):
        lines = path.read_text().splitlines()
        assert lines[:2] == ["0", "2"] and lines[3] == "other 1 3", lines
        found[path.name] = int(lines[2].removeprefix("orders 0 "))
    return found
