"""Small synthetic log dirs for tests of the command line and of Spark runs, as a stopped broker leaves them."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.reference.batches import Rec, all_records, decode_log, encode_batch
from tests.reference.indexing import index_files

BASE_MS = 1_700_000_000_000


def random_records(seed: int, count: int, keys: int = 20) -> list[Rec]:
    """Return records of a few keys, with offsets from 0 on; one in ten is a tombstone."""
    chance = random.Random(seed)
    return [
        Rec(
            offset,
            BASE_MS + offset,
            b"key-%d" % chance.randrange(keys),
            None if chance.random() < 0.1 else b"value-%d-%d" % (seed, offset),
        )
        for offset in range(count)
    ]


def write_partition(path: Path, records: Sequence[Rec], segments: int = 4, batch: int = 10) -> None:
    """Write `records` in batches and segments of equal counts; the last segment is the active one."""
    path.mkdir(parents=True)
    a_segment = -(-len(records) // segments)
    for start in range(0, len(records), a_segment):
        of_segment = records[start : start + a_segment]
        log = b"".join(encode_batch(of_segment[at : at + batch]) for at in range(0, len(of_segment), batch))
        stem = path / f"{of_segment[0].offset:020d}"
        index, time_index = index_files(log, of_segment[0].offset, 4096)
        stem.with_suffix(".log").write_bytes(log)
        stem.with_suffix(".index").write_bytes(index)
        stem.with_suffix(".timeindex").write_bytes(time_index)
    (path / "leader-epoch-checkpoint").write_text(f"0\n1\n0 {records[0].offset}\n")


def write_log_dir(
    path: Path, partitions: Mapping[str, Sequence[Rec]], *, high_watermarks: bool = True, segments: int = 4
) -> Path:
    """Write a cleanly closed log dir with these partitions, given by names such as `orders-0`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "meta.properties").write_text("version=1\nnode.id=1\ncluster.id=a2V5dGFpbC10ZXN0cy0xMjM\n")
    (path / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":-1}')
    ends = []
    for name, records in partitions.items():
        write_partition(path / name, records, segments)
        topic, _, number = name.rpartition("-")
        ends.append(f"{topic} {number} {records[-1].offset + 1}")
    text = "\n".join(["0", str(len(ends)), *ends]) + "\n"
    (path / "recovery-point-offset-checkpoint").write_text(text)
    if high_watermarks:
        (path / "replication-offset-checkpoint").write_text(text)
    return path


def records_of(partition: Path) -> list[Rec]:
    """Return all records of a partition's segments, in order."""
    logs = sorted(partition.glob("*.log"))
    return [record for log in logs for record in all_records(decode_log(log.read_bytes()))]


def newest_by_key(records: Sequence[Rec]) -> dict[bytes | None, Rec]:
    return {record.key: record for record in records}


def snapshot(path: Path) -> dict[str, tuple[bytes, int]]:
    """Return every file below `path` with its bytes and modification time, to check that nothing was changed.

    The lock file is excluded, because a run with `--execute` leaves it.
    """
    return {
        str(file.relative_to(path)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != ".lock"
    }


def on_another_file_system(log_dir: Path) -> Path:
    """Return a path on another file system, which does not exist and which the test removes."""
    for folder in map(Path, ("/dev/shm", "/var/tmp")):
        if folder.is_dir() and folder.stat().st_dev != log_dir.stat().st_dev and os.access(folder, os.W_OK):
            return folder / f"keytail-{os.getpid()}"
    pytest.skip("there is no other file system")
