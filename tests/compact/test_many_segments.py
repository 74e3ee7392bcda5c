"""Partitions of many segments: the number of file system calls increases linearly with the segments."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from keytail.cli.configuration import read_configuration
from keytail.cli.selection import PartitionFilter
from keytail.compact import execution as compaction
from keytail.errors import KeytailError
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.replacement.directory import Directory
from keytail.log.replacement.recover import recover
from keytail.undo.command import Request as UndoRequest
from keytail.undo.driver import undo
from tests.bench.commits import SETTINGS, Counting, make
from tests.no_spark import without_spark

FEW, MORE, MOST = 10, 20, 40
OPERATIONS = ("scan", "stat", "open_read", "fsync", "fsync_dir", "rename", "unlink", "create")


@pytest.fixture(autouse=True)
def no_spark() -> Iterator[None]:
    with without_spark():
        yield


def compacted(root: Path, segments: int, fs: FileSystem) -> str:
    """Compact a log dir with one group per segment, with a backup, and return the id of the run."""
    log_dir = make(root / "logs", segments)
    request = compaction.Request(
        PartitionFilter(log_dirs=(str(log_dir),)), read_configuration(None, SETTINGS, True), execute=True,
        fan_out="never",
        keep_originals=str(root / "kept"),
    )  # fmt: skip
    [row] = compaction.compact(request, fs)
    assert row.status == "compacted"
    [run_id] = os.listdir(root / "kept")
    return run_id


def counted(root: Path, segments: int, what: str) -> Counter[str]:
    fs = Counting()
    if what == "compact":
        compacted(root, segments, fs)
    elif what == "undo":
        run_id = compacted(root, segments, LOCAL)
        [row] = undo(UndoRequest(str(root / "kept"), run_id, execute=True, shared_storage=True), fs)
        assert row.status == "undone"
    else:
        path = make(root / "logs", segments) / "orders-0"
        for file in list(path.glob("*.log"))[1:]:
            (path / f"{file.stem}.log.rdead.a1.clean").touch()
        assert len(recover(fs, str(path))) == segments - 1
    return fs.counts


@pytest.mark.long
@pytest.mark.parametrize("what", ["compact", "undo", "recover"])
def test_file_system_calls_increase_linearly_and_listings_not_at_all(tmp_path: Path, what: str) -> None:
    few, more, most = (counted(tmp_path / str(number), number, what) for number in (FEW, MORE, MOST))
    assert few["scan"] == more["scan"] == most["scan"]
    for operation in OPERATIONS:
        assert most[operation] - more[operation] == 2 * (more[operation] - few[operation]), operation


def test_a_directory_changed_by_another_process_is_listed_again(tmp_path: Path) -> None:
    path = make(tmp_path, 3) / "orders-0"
    bases = tuple(sorted(int(file.stem) for file in path.glob("*.log")))
    fs = Counting()
    directory = Directory(fs, str(path))
    directory.refresh()
    directory.refresh()
    assert (fs.counts["scan"], directory.bases_between(0, bases[-1])) == (1, bases)
    directory.rename(f"{bases[1]:020d}.log", f"{bases[1]:020d}.log.deleted")
    directory.keep()
    directory.refresh()
    assert (fs.counts["scan"], directory.bases_between(0, bases[-1])) == (1, (bases[0], bases[2]))
    assert directory.base_above(bases[0]) == bases[2]
    assert [file.name for file in directory.unfinished()] == [f"{bases[1]:020d}.log.deleted"]
    (path / f"{bases[1] + 1:020d}.log").touch()
    os.utime(path, ns=(1, 1))  # without this, the directory might have the same time as before
    directory.refresh()
    assert (fs.counts["scan"], directory.bases_between(0, bases[-1])) == (2, (bases[0], bases[1] + 1, bases[2]))
    (path / "x.swap").touch()
    os.utime(path, ns=(2, 2))
    with pytest.raises(KeytailError, match="no broker writes"):
        directory.refresh()
