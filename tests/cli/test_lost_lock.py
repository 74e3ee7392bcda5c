"""Another process removes and recreates the `.lock` of a log dir while a command runs.

The command stops at its next commit, changes nothing more, and the next run completes.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keytail.cli.configuration import read_configuration
from keytail.cli.selection import PartitionFilter
from keytail.compact import execution as compaction
from keytail.compact.out_of_place.output_tree import MountedTree
from keytail.expire.command import Request as ExpireRequest
from keytail.expire.driver import expire
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import LockLost, hold
from keytail.undo.command import Request as UndoRequest
from keytail.undo.driver import undo
from tests.bench import commits
from tests.command_line import Run
from tests.crash import test_expire as expire_case
from tests.crash import test_rebuild as rebuild_case
from tests.import_.case import CASES as IMPORTS
from tests.log_dirs import newest_by_key, random_records, records_of, snapshot, write_log_dir
from tests.no_spark import without_spark
from tests.undo.test_command import compact as compact_and_keep

LOST = "removed or replaced while this run held the lock"
REPLACE = "import os, sys; os.unlink(sys.argv[1]); os.close(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT))"
Operation = tuple[str, str]


@pytest.fixture(autouse=True)
def no_spark() -> Iterator[None]:
    with without_spark():
        yield


class LosesLock(FileSystem):
    """A file system on which another process replaces the lock file as soon as `is_time` returns true for the
    operations so far.

    `before` and `after` have the changes before and after that, each with the name of its file.
    """

    def __init__(self, log_dir: Path, is_time: Callable[[list[Operation]], bool]) -> None:
        super().__init__()
        self.lock, self.is_time, self.is_lost = log_dir / ".lock", is_time, False
        self.before: list[Operation] = []
        self.after: list[Operation] = []

    def _change(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], Any]) -> Any:
        subject = self._path_of.get(arguments[0]) if isinstance(arguments[0], int) else arguments[-1]
        name = os.path.basename(str(subject if isinstance(subject, str) else arguments[0]))
        (self.after if self.is_lost else self.before).append((operation, name))
        result = super()._change(operation, arguments, action)
        if not self.is_lost and self.is_time(self.before):
            subprocess.run([sys.executable, "-c", REPLACE, str(self.lock)], check=True)
            self.is_lost = True
        return result


def groups_done(count: int) -> Callable[[list[Operation]], bool]:
    """Return a condition that is true when the sources of `count` groups are removed and the directory is synced."""

    def is_time(done: list[Operation]) -> bool:
        if done[-1][0] != "fsync_dir" or len(done) < 2 or not done[-2][1].endswith(".deleted"):
            return False
        steps = itertools.pairwise(done)
        return sum(a[0] == "unlink" and a[1].endswith(".deleted") and b[0] == "fsync_dir" for a, b in steps) == count

    return is_time


def written(name: str) -> Callable[[list[Operation]], bool]:
    """Return a condition that is true when a file was renamed to `name` and its directory is synced."""
    return lambda done: done[-1][0] == "fsync_dir" and ("rename", name) in done


def first_scratch(done: list[Operation]) -> bool:
    return done[-1][0] == "create" and done[-1][1].endswith(".clean")


def compact_in_process(log_dir: Path, fs: FileSystem) -> list[Any]:
    configuration = read_configuration(None, commits.SETTINGS, True)
    partition_filter = PartitionFilter(log_dirs=(str(log_dir),))
    return compaction.compact(compaction.Request(partition_filter, configuration, execute=True, fan_out="never"), fs)


@pytest.mark.parametrize("groups", [1, 3, 5])
def test_a_compaction_stops_before_its_next_group_or_checkpoint(tmp_path: Path, groups: int) -> None:
    log_dir = commits.make(tmp_path / "logs", 6)  # five groups of one segment each, and the active segment
    wanted = newest_by_key(records_of(log_dir / "orders-0"))
    fs = LosesLock(log_dir, groups_done(groups))
    [row] = compact_in_process(log_dir, fs)
    assert fs.is_lost and fs.after == []
    assert row.status == "refused"
    assert LOST in row.error and f"{groups} of 5 groups done" in row.error
    assert not (log_dir / "cleaner-offset-checkpoint").exists()
    [again] = compact_in_process(log_dir, LOCAL)
    assert again.status == "compacted"
    assert newest_by_key(records_of(log_dir / "orders-0")) == wanted
    assert not [path for path in log_dir.rglob("*") if path.suffix in (".clean", ".swap", ".deleted", ".cleaned")]


def test_a_compaction_begins_no_partition_after_a_lost_lock(tmp_path: Path) -> None:
    topics = [f"t{number}-0" for number in range(40)]
    log_dir = write_log_dir(tmp_path / "logs", {name: random_records(3, 40) for name in topics})
    settings = [f"{name[:-2]}:{setting}" for name in topics for setting in ("cleanup.policy=compact",)]
    configuration = read_configuration(None, (*settings, "min.cleanable.dirty.ratio=0"), True)
    fs = LosesLock(log_dir, groups_done(1))
    request = compaction.Request(
        PartitionFilter(log_dirs=(str(log_dir),)), configuration, execute=True, fan_out="never"
    )
    rows = compaction.compact(request, fs)
    assert fs.after == []
    assert len(rows) == 40
    assert {row.status for row in rows} == {"refused"}
    assert all(LOST in row.error for row in rows)


def test_expire_removes_nothing_after_a_lost_lock(tmp_path: Path) -> None:
    case = expire_case.CASES["by time"]
    case.make(tmp_path)
    fs = LosesLock(tmp_path, written("log-start-offset-checkpoint"))
    segments = sorted(path.name for path in (tmp_path / expire_case.PARTITION).iterdir())
    with pytest.raises(LockLost), hold([str(tmp_path)]):
        expire_case.run(fs, tmp_path, case.retention)
    assert fs.is_lost and fs.after == []
    assert sorted(path.name for path in (tmp_path / expire_case.PARTITION).iterdir()) == segments


def test_a_removal_that_had_begun_is_not_reported_as_refused(tmp_path: Path) -> None:
    """The log start has moved, so the log must not be reported as unchanged."""
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": random_records(3, 400)})
    properties = tmp_path / "server.properties"
    properties.write_text("log.retention.hours=1\n")
    configuration = read_configuration(str(properties), ["orders:cleanup.policy=delete"], True)
    fs = LosesLock(log_dir, written("log-start-offset-checkpoint"))
    [row] = expire(ExpireRequest(PartitionFilter(log_dirs=(str(log_dir),)), configuration, execute=True), fs)
    assert fs.is_lost and fs.after == []
    assert (row.status, row.segments_after) == ("failed", None)
    assert LOST in row.error and "the next run completes what was begun" in row.error


def test_rebuild_index_installs_nothing_after_a_lost_lock(tmp_path: Path) -> None:
    root = tmp_path / "logs"
    rebuild_case.LOG_DIR.make(root)
    rebuild_case.damage_files(root, only_what_a_broker_repairs=False)
    before = rebuild_case.files_of(root)
    fs = LosesLock(root, first_scratch)
    with hold([str(root)]):
        reported = str(rebuild_case.run(fs, root).reported)
    assert fs.is_lost and LOST in reported
    assert all(name.endswith(".clean") for _, name in fs.after), "only scratch files may be written"
    assert rebuild_case.files_of(root) == before
    rebuild_case.run(LOCAL, root)
    assert rebuild_case.files_of(root) != before


def test_undo_restores_nothing_after_a_lost_lock(run: Run, tmp_path: Path) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 200), "users-0": random_records(2, 200)})
    before = snapshot(log_dir)
    _, run_id = compact_and_keep(run, log_dir)
    request = UndoRequest(str(tmp_path / "kept"), run_id, execute=True, shared_storage=True)
    fs = LosesLock(log_dir, groups_done(1))
    rows = undo(request, fs)
    assert fs.is_lost
    assert [row.status for row in rows] == ["undone", "refused"] and LOST in rows[1].error
    assert {name for _, name in fs.after} <= {"manifest.json", "manifest.json.tmp", "orders-0"}, (
        "only files of the backup may change"
    )
    assert {row.status for row in undo(request)} == {"undone", "clean"}
    left = snapshot(log_dir)
    assert {name: left[name] for name in before} == before


def test_import_commits_nothing_after_a_lost_lock(tmp_path: Path) -> None:
    case = IMPORTS["after records, in a new segment"]
    case.make(tmp_path)
    [log_dir] = case.dirs(tmp_path)
    before = snapshot(log_dir)
    fs = LosesLock(log_dir, first_scratch)
    with pytest.raises(LockLost), hold([str(log_dir)]):
        case.run(fs, tmp_path)
    assert all(name.endswith(".clean") for _, name in fs.after), "only scratch files may be written"
    assert {name: facts for name, facts in snapshot(log_dir).items() if not name.endswith(".clean")} == before


def test_the_output_dir_is_unchanged_after_a_lost_lock(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    tree = MountedTree(LOCAL, str(out), str(source))
    with hold([str(out)]):
        tree.put("meta.properties", b"one")
        (out / ".lock").unlink()
        with pytest.raises(LockLost):
            tree.put("meta.properties", b"two")
        with pytest.raises(LockLost):
            tree.remove(["meta.properties"])
    assert (out / "meta.properties").read_bytes() == b"one"
