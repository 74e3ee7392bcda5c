"""Commits of many prepared partitions: operations per partition, partitions in parallel, and the state after a signal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from keytail.cli.configuration import read_configuration
from keytail.cli.selection import PartitionFilter
from keytail.compact import execution
from keytail.compact.prepared import driver
from keytail.compact.running.bundles import MAX_COMMITS
from keytail.format import names
from keytail.log.checkpoint import read_offsets
from keytail.log.fs import LOCAL, FileSystem
from keytail.run.rows import ResultRow
from tests.chance import chance
from tests.log_dirs import newest_by_key, random_records, records_of, write_log_dir

SETTINGS = ("orders:cleanup.policy=compact",)
SEGMENTS = 10  # per partition; one output replaces all except the active one


def prepared_log_dir(path: Path, partitions: int) -> Path:
    draws = chance()
    records = {f"orders-{number}": random_records(draws.randrange(10**6), 100, 5) for number in range(partitions)}
    log_dir = write_log_dir(path, records, segments=SEGMENTS)
    rows = driver.prepare(request(log_dir, prepare=True))
    assert [row.status for row in rows] == ["prepared"] * partitions
    return log_dir


def request(log_dir: Path, **flags: Any) -> execution.Request:
    partition_filter = PartitionFilter(log_dirs=(str(log_dir),))
    return execution.Request(partition_filter, read_configuration(None, SETTINGS, True), force=True, **flags)


def commit(log_dir: Path, fs: FileSystem = LOCAL) -> list[ResultRow]:
    return execution.compact(request(log_dir, execute=True, prepared_only=True), fs)


def scratch(log_dir: Path) -> list[Path]:
    return list(log_dir.glob("*/*.clean"))


class CountingOf(FileSystem):
    """Counts the operations on a partition directory and on the files in it."""

    def __init__(self, partition: Path) -> None:
        super().__init__()
        self.partition = str(partition)
        self.counts: Counter[str] = Counter()

    def _count(self, operation: str, subject: Any) -> None:
        path = self._path_of.get(subject, "") if isinstance(subject, int) else subject
        self.counts[operation] += path == self.partition or os.path.dirname(path) == self.partition

    def _look(self, operation: str, arguments: tuple[Any, ...], action: Any) -> Any:
        self._count(operation, arguments[0])
        return super()._look(operation, arguments, action)

    def _change(self, operation: str, arguments: tuple[Any, ...], action: Any) -> Any:
        self._count(operation, arguments[0])
        return super()._change(operation, arguments, action)


def test_a_commit_needs_the_documented_number_of_operations(tmp_path: Path) -> None:
    """The numbers are those of PREPARED.md: renames and removals increase with the number of sources, syncs do not."""
    log_dir = prepared_log_dir(tmp_path / "logs", 1)
    fs = CountingOf(log_dir / "orders-0")
    [row] = commit(log_dir, fs)
    assert row.segments_after == 2, row
    replaced, files = SEGMENTS - 1, 3
    assert fs.counts["fsync_dir"] == 10
    assert fs.counts["fsync"] == 0, "the outputs are durable since the preparation"
    assert fs.counts["rename"] == files * (replaced + 1)
    assert fs.counts["link"] == files
    assert fs.counts["create"] == 2  # the guard file is created twice
    assert fs.counts["unlink"] == files * (replaced + 1) + 2 + 1  # the guard file is removed twice, and the record once
    assert fs.counts["open_read"] <= 3 * SEGMENTS + 12, "a segment was opened more than three times"
    assert fs.counts["scan"] <= 8
    assert sum(fs.counts.values()) <= 245, fs.counts


def test_many_partitions_are_committed_in_parallel(tmp_path: Path) -> None:
    log_dir = prepared_log_dir(tmp_path / "logs", 2 * MAX_COMMITS)
    together = threading.Barrier(MAX_COMMITS)

    class Waiting(FileSystem):
        """Waits in each sync of a partition until MAX_COMMITS syncs have begun."""

        def fsync_dir(self, path: str) -> None:
            if path != str(log_dir):
                together.wait(timeout=300)
            super().fsync_dir(path)

    rows = commit(log_dir, Waiting())
    assert {row.status for row in rows} == {"compacted"}
    assert scratch(log_dir) == []
    offsets = read_offsets(LOCAL, str(log_dir / names.CLEANER_CHECKPOINT))
    assert offsets == {("orders", row.partition): row.end_dirty_offset for row in rows}


@pytest.mark.long
@pytest.mark.one_of()
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_a_stopped_commit_loses_no_record(ending: signal.Signals, tmp_path: Path) -> None:
    partitions = 60
    log_dir = prepared_log_dir(tmp_path / "logs", partitions)
    before = {path.name: newest_by_key(records_of(path)) for path in log_dir.glob("orders-*")}
    command = [sys.executable, "-m", "keytail", "compact", "--log-dirs", str(log_dir), "--topics-have-no-overrides",
               "--topic-config", *SETTINGS, "--force", "--execute", "--prepared-only", "--output", "json"]  # fmt: skip
    errors = tmp_path / "errors"
    with errors.open("wb") as stderr, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as process:
        wanted = chance().randrange(1, partitions // 3)
        while process.poll() is None and _records(log_dir) > partitions - wanted:
            time.sleep(0.001)
        process.send_signal(ending)
        output, _ = process.communicate(timeout=600)
    offsets = read_offsets(LOCAL, str(log_dir / names.CLEANER_CHECKPOINT))
    if ending != signal.SIGKILL:
        assert process.returncode in (0, 128 + ending), errors.read_text()  # 0 if the run ended before the signal
        rows = {f"orders-{row['partition']}": row for row in json.loads(output)}
        for name, row in rows.items():
            is_done = row["status"] == "compacted"
            assert (("orders", row["partition"]) in offsets) == is_done, row
            assert any((log_dir / name).glob("*.prepared.*")) == (not is_done), row
            assert not any(".swap" in path.name or ".deleted" in path.name for path in (log_dir / name).iterdir())
    left = _records(log_dir)
    rows_after = execution.compact(request(log_dir, execute=True))
    assert {row.status for row in rows_after} <= {"compacted", "clean", "skipped"}
    if ending != signal.SIGKILL:
        assert sum(row.prepared == "committed" for row in rows_after) == left
    assert scratch(log_dir) == []
    assert {path.name: newest_by_key(records_of(path)) for path in log_dir.glob("orders-*")} == before
    assert len(read_offsets(LOCAL, str(log_dir / names.CLEANER_CHECKPOINT))) == partitions
    print(f"{ending.name}: {partitions - left} of {partitions} were committed, {len(offsets)} checkpoints had moved")


def _records(log_dir: Path) -> int:
    return sum(1 for _ in log_dir.glob("*/*.prepared.*"))
