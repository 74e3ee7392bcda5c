"""`keytail compact --keep-originals` and `keytail undo` through the command line, without Spark."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from keytail.log.fs import FileSystem
from keytail.log.lock import hold
from tests.command_line import Run, rows_of
from tests.log_dirs import on_another_file_system, random_records, records_of, snapshot, write_log_dir
from tests.no_spark import without_spark

CLEANER = "cleaner-offset-checkpoint"
CONFIG = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact")
CONFIG += ("--topic-config", "users:cleanup.policy=compact")


@pytest.fixture(autouse=True)
def no_spark() -> Iterator[None]:
    with without_spark():
        yield


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    names = ("orders-0", "orders-1", "users-0")
    path = write_log_dir(tmp_path / "logs", {name: random_records(n, 200) for n, name in enumerate(names)})
    (path / CLEANER).write_text("0\n1\norders 0 50\n")
    for number, file in enumerate(sorted(path.rglob("*"))):
        os.utime(file, ns=(1_700_000_000_000_000_000 + 1_234_567_891 * number,) * 2)
        if os.geteuid() == 0 and file.is_file() and file.parent != path:
            os.chown(file, 1234, 2000 + number % 3)
    return path


def compact(run: Run, log_dir: Path, *more: str | Path) -> tuple[dict[str, dict[str, Any]], str]:
    """Compact with a backup, and return the rows and the id of the run."""
    flags: tuple[str, ...] = ("--execute", "--unsafe-clock", "--force", "--map-memory", "1m", "--output", "json-v1")
    flags = (*flags, "--keep-originals")
    if "--now" not in more:
        flags = ("--now", "1750000000000", *flags)
    result = run("compact", "--log-dirs", log_dir, *CONFIG, *flags, log_dir.parent / "kept", *more)
    assert result.exit_code in (0, 1, 3), result.stderr
    found = re.search(r"backup of run (\w+) is", result.stderr)
    assert found is None or json.loads(result.stdout)["run_id"].endswith(f"-{found[1]}")
    return rows_of(result), found[1] if found else ""


def undo(run: Run, log_dir: Path, *more: str | Path) -> tuple[int, dict[str, dict[str, Any]]]:
    result = run("undo", "--originals", log_dir.parent / "kept", "--output", "json", *more)
    return result.exit_code, rows_of(result)


def statuses(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: row["status"] for name, row in rows.items()}


def everything(log_dir: Path) -> dict[str, tuple[Any, ...]]:
    """Return bytes, times, modes and owners of all files, but only the entries of the cleaner's checkpoint."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, (data, mtime_ns) in snapshot(log_dir).items():
        facts = (log_dir / name).stat()
        found[name] = (data, mtime_ns, facts.st_mode, facts.st_uid, facts.st_gid)
    found[CLEANER] = tuple(sorted((log_dir / CLEANER).read_text().splitlines()[2:]))
    return found


def test_undo_restores_the_files_that_compact_replaced(run: Run, log_dir: Path) -> None:
    before = everything(log_dir)
    rows, run_id = compact(run, log_dir)
    assert set(statuses(rows).values()) == {"compacted"}
    left = everything(log_dir)
    assert left != before
    assert len(records_of(log_dir / "orders-0")) < 200

    status, dry = undo(run, log_dir, "--run", run_id)
    assert (status, set(statuses(dry).values())) == (0, {"would-undo"})
    assert everything(log_dir) == left
    row = dry["orders-0"]
    compacted = rows["orders-0"]
    assert (row["segments_before"], row["segments_after"]) == (
        compacted["segments_after"], compacted["segments_before"]
    )  # fmt: skip
    assert (row["bytes_before"], row["bytes_after"]) == (compacted["bytes_after"], compacted["bytes_before"])
    assert (row["cleaner_checkpoint_before"], row["cleaner_checkpoint_after"]) == (150, 50)
    assert row["bytes_after"] == sum(len(before[f"orders-0/{base:020d}.log"][0]) for base in (0, 50, 100, 150))

    status, done = undo(run, log_dir, "--run", run_id, "--execute")
    assert (status, set(statuses(done).values())) == (0, {"undone"})
    assert everything(log_dir) == before

    for more in ((), ("--execute",)):
        status, again = undo(run, log_dir, "--run", run_id, *more)
        assert (status, set(statuses(again).values())) == (0, {"clean"})
        assert all("nothing to do" in row["error"] for row in again.values())
    assert everything(log_dir) == before


def test_a_compaction_can_be_repeated_after_an_undo(run: Run, log_dir: Path) -> None:
    _, run_id = compact(run, log_dir)
    left = {name: file[0] for name, file in everything(log_dir).items()}
    undo(run, log_dir, "--run", run_id, "--execute")
    rows, second = compact(run, log_dir)
    assert set(statuses(rows).values()) == {"compacted"}
    assert second not in ("", run_id)
    assert {name: file[0] for name, file in everything(log_dir).items()} == left


def test_runs_are_undone_in_reverse_order(run: Run, log_dir: Path) -> None:
    before = everything(log_dir)
    _, first = compact(run, log_dir)
    between = everything(log_dir)
    rows, second = compact(run, log_dir, "--from-log-start", "--now", "1760000000000")  # tombstones are removed
    assert set(statuses(rows).values()) == {"compacted"}
    assert everything(log_dir) != between
    status, rows = undo(run, log_dir, "--run", first, "--execute")
    assert (status, set(statuses(rows).values())) == (1, {"refused"})
    assert undo(run, log_dir, "--run", second, "--execute")[0] == 0
    assert everything(log_dir) == between
    assert undo(run, log_dir, "--run", first, "--execute")[0] == 0
    assert everything(log_dir) == before


def test_a_changed_partition_is_refused_with_every_difference_and_others_are_restored(run: Run, log_dir: Path) -> None:
    before = everything(log_dir)
    _, run_id = compact(run, log_dir)
    log = log_dir / "orders-1" / f"{0:020d}.log"
    log.write_bytes(log.read_bytes()[:-1])
    (log_dir / "orders-1" / f"{0:020d}.timeindex").unlink()
    (log_dir / "log-start-offset-checkpoint").write_text("0\n1\norders 1 33\n")
    left = everything(log_dir)
    result = run("undo", "--originals", log_dir.parent / "kept", "--run", run_id)
    assert result.exit_code == 3
    offset = "the log start offset is 33; before the run it was 0"
    for text in (f"{0:020d}.log has", f"{0:020d}.timeindex is missing", offset):
        assert f"orders-1: {text}" in result.stdout
    assert everything(log_dir) == left
    status, rows = undo(run, log_dir, "--run", run_id, "--execute")
    assert status == 3
    assert statuses(rows) == {"orders-0": "undone", "orders-1": "refused", "users-0": "undone"}
    assert len(rows["orders-1"]["differences"]) == 3
    now = everything(log_dir)
    assert {name: now[name] for name in before if "orders-1" not in name and name != CLEANER} == {
        name: before[name] for name in before if "orders-1" not in name and name != CLEANER
    }
    assert {name: now[name] for name in now if "orders-1" in name} == {n: left[n] for n in left if "orders-1" in n}
    assert now[CLEANER] == ("orders 0 50", "orders 1 150")


def test_a_single_partition_is_undone(run: Run, log_dir: Path) -> None:
    _, run_id = compact(run, log_dir)
    left = everything(log_dir)
    status, rows = undo(run, log_dir, "--run", run_id, "--partitions", "users-0", "--execute")
    assert (status, statuses(rows)) == (0, {"users-0": "undone"})
    now = everything(log_dir)
    assert {name for name in {*left, *now} if left.get(name) != now.get(name)} >= {CLEANER, f"users-0/{0:020d}.log"}
    assert all(left[name] == now[name] for name in left if name.startswith("orders"))


def listed_backups(run: Run, log_dir: Path, *more: str) -> list[dict[str, Any]]:
    result = run("undo", "--originals", log_dir.parent / "kept", "--output", "json", *more)
    assert result.exit_code == 0
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def test_backups_are_listed_and_removed(run: Run, log_dir: Path) -> None:
    before = everything(log_dir)
    ours = [name for name in before if name.startswith(("orders", "users")) and name[-3:] in ("log", "dex")]
    sources = [before[name][0] for name in ours if "150." not in name]
    _, run_id = compact(run, log_dir)
    left = everything(log_dir)
    [kept] = listed_backups(run, log_dir)
    assert kept == listed_backups(run, log_dir, "--list")[0]
    assert (kept["run_id"], kept["state"]) == (run_id, "kept")
    assert kept["partitions"] == ["orders-0", "orders-1", "users-0"]
    assert kept["held_bytes"] == sum(map(len, sources))
    assert run_id in run("undo", "--originals", log_dir.parent / "kept").stdout
    undo(run, log_dir, "--run", run_id, "--partitions", "users-0", "--execute")
    [kept] = listed_backups(run, log_dir)
    assert kept["state"] == "partly undone"
    assert kept["held_bytes"] < sum(map(len, sources)), (
        "files that are also in the log are not held by the backup alone"
    )

    status, rows = undo(run, log_dir, "--run", run_id, "--forget")
    assert (status, set(statuses(rows).values())) == (0, {"would-forget"})
    assert listed_backups(run, log_dir) == [kept]
    with hold([str(log_dir)]):  # a running broker holds the lock, too
        assert undo(run, log_dir, "--run", run_id, "--forget", "--partitions", "users-0", "--execute")[0] == 0
        assert listed_backups(run, log_dir)[0]["partitions"] == ["orders-0", "orders-1"]
        status, rows = undo(run, log_dir, "--run", run_id, "--forget", "--execute")
    assert (status, set(statuses(rows).values())) == (0, {"forgotten"})
    assert sum(row["held_bytes"] for row in rows.values()) == sum(
        len(data) for name, (data, *_) in before.items() if name.startswith("orders") and name[-3:] in ("log", "dex")
        and "150." not in name
    )  # fmt: skip
    assert listed_backups(run, log_dir) == []
    now = everything(log_dir)
    assert {name: now[name] for name in now if name.startswith("orders")} == {
        name: left[name] for name in left if name.startswith("orders")
    }


def test_a_partition_that_is_not_compacted_has_no_backup(run: Run, log_dir: Path) -> None:
    damaged = log_dir / "orders-1" / f"{50:020d}.log"
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)
    rows, _ = compact(run, log_dir)
    assert statuses(rows) == {"orders-0": "compacted", "orders-1": "corrupt", "users-0": "compacted"}
    assert listed_backups(run, log_dir)[0]["partitions"] == ["orders-0", "users-0"]


@pytest.mark.parametrize("execute", [[], ["--execute"]])
def test_a_log_dir_is_never_removed(run: Run, log_dir: Path, execute: list[str]) -> None:
    """The directory above the log dirs is given by mistake: `logs/orders-0` looks like the backup of a run."""
    for path in log_dir.glob("*/leader-epoch-checkpoint"):
        path.unlink()
    before = snapshot(log_dir)
    flags = ("--originals", log_dir.parent, "--run", log_dir.name, "--forget", *execute, "--output", "json")
    result = run("undo", *flags)
    assert (result.exit_code, set(statuses(rows_of(result)).values())) == (1, {"refused"})
    assert all("is a log dir" in row["error"] for row in rows_of(result).values())
    assert snapshot(log_dir) == before


def test_a_run_that_fails_before_its_first_commit_leaves_no_backup(run: Run, log_dir: Path) -> None:
    before = everything(log_dir)

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error while renaming it", "x")

    with patch("keytail.compact.cleaner.commit_group", fail):
        rows, run_id = compact(run, log_dir)
    assert set(statuses(rows).values()) == {"failed"}
    assert (run_id, listed_backups(run, log_dir)) == ("", [])
    assert everything(log_dir) == before


def test_a_dry_run_reports_that_links_save_no_space_and_creates_nothing(run: Run, log_dir: Path) -> None:
    kept = log_dir.parent / "kept"
    result = run("compact", "--log-dirs", log_dir, *CONFIG, "--keep-originals", kept)
    assert result.exit_code == 0
    assert f"kept as hard links in {kept}: replaced files free no space until" in result.stderr
    assert "(because of --max-scratch-bytes, or for lack of space) frees nothing between the passes" in result.stderr
    assert "--forget" in result.stderr
    assert not kept.exists()


@pytest.mark.parametrize("execute", [[], ["--execute"]])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--keep-originals", "logs/kept"], "is inside a log dir"),
        (["--keep-originals", "logs"], "is inside a log dir"),
        (["--keep-originals", "."], "contains one"),
        (["--keep-originals", "link/kept"], "is inside a log dir"),
        (["--keep-originals", "others/kept"], "which is a log dir"),
        (["--keep-originals", "nowhere/kept"], "does not exist"),
        (["--keep-originals", "file"], "is not a directory"),
        (["--copy-originals"], "requires --keep-originals"),
    ],
)
def test_wrong_usage_is_refused(run: Run, log_dir: Path, execute: list[str], flags: list[str], message: str) -> None:
    root = log_dir.parent
    shutil.copytree(log_dir, root / "others")
    (root / "link").symlink_to(log_dir)
    (root / "file").write_text("")
    before = snapshot(root)
    where = [str(root / flag) if not flag.startswith("--") else flag for flag in flags]
    result = run("compact", "--log-dirs", log_dir, *CONFIG, *execute, *where)
    assert result.exit_code == 2
    assert message in result.stderr
    assert snapshot(root) == before


def test_wrong_usage_of_undo_is_refused(run: Run, log_dir: Path) -> None:
    _, run_id = compact(run, log_dir)
    kept = log_dir.parent / "kept"
    for flags, reported in (
        (["--run", "nosuch"], f"has a backup here ({run_id})"),
        (["--run", run_id, "--partitions", "orders-9"], "[no-backup-of-partition]"),
        (["--execute"], "require --run"),
        (["--forget"], "require --run"),
        (["--list", "--run", run_id, "--execute"], "--list cannot be combined with --forget or --execute"),
    ):
        result = run("undo", "--originals", kept, *flags)
        assert (result.exit_code, reported in result.stderr) == (2, True), result.stderr
    result = run("undo", "--originals", log_dir.parent / "nowhere")
    assert (result.exit_code, "--originals is not a directory" in result.stderr) == (2, True)


def test_undo_is_refused_while_a_process_holds_the_lock(run: Run, log_dir: Path) -> None:
    _, run_id = compact(run, log_dir)
    left = everything(log_dir)
    with hold([str(log_dir)]):
        result = run("undo", "--originals", log_dir.parent / "kept", "--run", run_id, "--execute")
    assert result.exit_code == 1
    assert "in use" in result.stderr
    assert everything(log_dir) == left


def test_undo_requires_a_flag_for_a_log_dir_that_was_moved(run: Run, log_dir: Path) -> None:
    before = everything(log_dir)
    _, run_id = compact(run, log_dir)
    moved = log_dir.parent / "moved"
    log_dir.rename(moved)
    status, rows = undo(run, log_dir, "--run", run_id, "--execute")
    assert (status, set(statuses(rows).values())) == (1, {"refused"})
    assert "--log-dirs" in rows["orders-0"]["error"]
    assert undo(run, log_dir, "--run", run_id, "--log-dirs", moved, "--execute")[0] == 0
    assert everything(moved) == before


def test_copies_on_another_file_system_are_restored(run: Run, log_dir: Path) -> None:
    before = everything(log_dir)
    target = on_another_file_system(log_dir)
    (log_dir.parent / "kept").symlink_to(target)
    try:
        result = run("compact", "--log-dirs", log_dir, *CONFIG, "--execute", "--keep-originals", target)
        assert (result.exit_code, "--copy-originals" in result.stderr) == (1, True)
        assert everything(log_dir) == before
        _, run_id = compact(run, log_dir, "--copy-originals")
        assert everything(log_dir) != before
        status, rows = undo(run, log_dir, "--run", run_id, "--execute")
        assert (status, set(statuses(rows).values())) == (0, {"undone"})
        assert everything(log_dir) == before
        assert undo(run, log_dir, "--run", run_id, "--forget", "--execute")[0] == 0
        assert list(target.iterdir()) == []
    finally:
        shutil.rmtree(target, ignore_errors=True)


@pytest.mark.parametrize("limit", [(), ("--max-scratch-bytes", "100m")])
def test_copies_are_counted_in_the_space_check(run: Run, log_dir: Path, limit: tuple[str, ...]) -> None:
    """The free space is enough for scratch files of the largest partition and for links, but not also for copies."""
    before = everything(log_dir)
    size = sum(len(data) for name, (data, *_) in before.items() if name.startswith("orders-0"))
    free = (1 << 20) + int(1.1 * size)

    with patch.object(FileSystem, "free_bytes", lambda self, path: free):
        rows, run_id = compact(run, log_dir, "--copy-originals", *limit)
        assert set(statuses(rows).values()) == {"refused"}
        assert all("the backup needs up to" in row["error"] for row in rows.values())
        assert everything(log_dir) == before
        assert run_id == ""
        rows, run_id = compact(run, log_dir, *limit)
    assert set(statuses(rows).values()) == {"compacted"}
    with contextlib.suppress(FileNotFoundError):
        assert [kept["run_id"] for kept in listed_backups(run, log_dir)] == [run_id]


def test_undo_is_refused_without_space_for_copies(run: Run, log_dir: Path) -> None:
    _, run_id = compact(run, log_dir)
    left = everything(log_dir)
    for path in (log_dir.parent / "kept" / run_id / "orders-0").glob("*.log"):
        os.utime(path, ns=(1, 1))  # with other times, a copy is needed
    with patch.object(FileSystem, "free_bytes", lambda self, path: 100):
        status, rows = undo(run, log_dir, "--run", run_id, "--partitions", "orders-0", "--execute")
    assert (status, statuses(rows)) == (1, {"orders-0": "refused"})
    assert re.search(r"restoring the backup needs [\d.]+ KiB, but 100 B are free", rows["orders-0"]["error"])
    assert everything(log_dir) == left


def test_a_damaged_backup_is_refused(run: Run, log_dir: Path) -> None:
    _, run_id = compact(run, log_dir)
    left = everything(log_dir)
    kept = log_dir.parent / "kept" / run_id / "orders-0" / f"{50:020d}.log"
    kept.write_bytes(kept.read_bytes()[:-1])
    (log_dir.parent / "kept" / run_id / "orders-1" / "manifest.json").write_text("{}")
    (log_dir.parent / "kept" / run_id / "users-0" / "manifest.json").unlink()
    assert listed_backups(run, log_dir)[0]["state"] == "unfinished"
    status, rows = undo(run, log_dir, "--run", run_id, "--execute")
    assert (status, statuses(rows)) == (1, {"orders-0": "corrupt", "orders-1": "corrupt", "users-0": "refused"})
    assert str(kept) in rows["orders-0"]["error"]
    assert everything(log_dir) == left
    assert undo(run, log_dir, "--run", run_id, "--forget", "--execute")[0] == 0


def test_leftovers_are_resolved_by_a_run_with_execute(run: Run, log_dir: Path) -> None:
    before = everything(log_dir)
    _, run_id = compact(run, log_dir)
    for suffix in (".log", ".index", ".timeindex"):
        file = log_dir / "orders-0" / f"{0:020d}{suffix}"
        file.rename(f"{file}.swap")
    status, rows = undo(run, log_dir, "--run", run_id, "--partitions", "orders-0")
    assert (status, statuses(rows)) == (1, {"orders-0": "refused"})
    assert "--execute finishes it first" in rows["orders-0"]["error"]
    assert undo(run, log_dir, "--run", run_id, "--execute")[0] == 0
    assert everything(log_dir) == before
