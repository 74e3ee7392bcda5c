"""`compact --output-dir` on a mounted path: the source is unchanged, the target equals a compaction in place, and later
runs write only changed partitions.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from keytail.log.lock import hold
from tests import golden
from tests.command_line import Run, rows_of
from tests.compact.test_command import assert_unchanged_records
from tests.log_dirs import newest_by_key, random_records, records_of, snapshot, write_log_dir
from tests.no_spark import without_spark

RECORD = "keytail-output.json"
CONFIG = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact", "--topic-config",
          "users:cleanup.policy=delete")  # fmt: skip
ROOT_FILES = ("meta.properties", ".kafka_cleanshutdown")
LAST_STDERR = [""]  # standard error of the last run


def place(run: Run, source: Path | str, out: Path | str, *more: str | Path, status: int = 0) -> dict[str, Any]:
    """Run with `--execute`, and return the rows by partition."""
    flags = ("--log-dirs", source, "--output-dir", out, *(more or CONFIG), "--execute", "--output", "json")
    with without_spark():
        done = run("compact", *flags)
    assert done.exit_code == status, done.output
    LAST_STDERR[:] = [done.stderr]
    return rows_of(done)


def last_stderr() -> str:
    return LAST_STDERR[0]


def files_of(root: Path) -> dict[str, tuple[bytes, int, int]]:
    """Return content, time and mode of the files of partitions, except output records."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode)
        for path in sorted(root.glob("*/*"))
        if path.name != RECORD
    }


def checkpoint(path: Path) -> list[str]:
    return sorted(path.read_text().splitlines()[2:]) if path.exists() else []


def append(partition: Path, text: bytes = b"") -> None:
    """Append to the active segment, as a broker does."""
    log = sorted(partition.glob("*.log"))[-1]
    log.write_bytes(log.read_bytes() + text)


@pytest.mark.long
def test_the_target_equals_a_compaction_in_place_of_a_copy(run: Run, tmp_path: Path) -> None:
    """The source is the log dir of a real broker, with its settings: all codecs and policies, transactions, and
    producers.
    """
    source = golden.unpack(tmp_path)
    copy, out = tmp_path / "copy", tmp_path / "out"
    shutil.copytree(source, copy, copy_function=shutil.copy2)
    before = snapshot(source)
    clock = ("--now", str(time.time_ns() // 1_000_000), "--unsafe-clock")
    rows = place(run, source, out, *clock)
    assert snapshot(source) == before
    assert not (source / ".lock").exists(), "a lock file was created in the source"
    with without_spark():
        in_place = rows_of(run("compact", "--log-dirs", copy, *clock, "--execute", "--output", "json"))
    assert files_of(out) == files_of(copy)
    for name in ("cleaner-offset", "recovery-point-offset", "replication-offset", "log-start-offset"):
        assert checkpoint(out / f"{name}-checkpoint") == checkpoint(copy / f"{name}-checkpoint"), name
    for name in ("bootstrap.checkpoint", *ROOT_FILES):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    for name, row in in_place.items():
        numbers = [key for key in row if key not in ("log_dir", "start_ms", "end_ms", "error")]
        assert {key: rows[name][key] for key in numbers} == {key: row[key] for key in numbers}, name
        if row["status"] != "compacted":
            assert rows[name]["error"] == f"copied unchanged: {row['error']}"
    assert run("verify", "--log-dirs", out).exit_code == 0


def test_only_changed_partitions_are_written_again(run: Run, log_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = place(run, log_dir, out)
    assert {name: row["status"] for name, row in first.items()} == {
        "orders-0": "compacted", "orders-1": "compacted", "users-0": "skipped"
    }  # fmt: skip
    whole = snapshot(out)
    again = place(run, log_dir, out)
    assert {row["status"] for row in again.values()} == {"clean"}
    assert all(row["error"].startswith("unchanged since ") for row in again.values())
    assert again["orders-0"]["bytes_after"] == first["orders-0"]["bytes_after"] < first["orders-0"]["bytes_before"]
    assert "copied unchanged" in again["users-0"]["error"]
    assert snapshot(out) == whole, "files were written again"

    append(log_dir / "users-0")
    os.utime(log_dir / "orders-1" / "leader-epoch-checkpoint")
    rows = place(run, log_dir, out)
    assert {name: row["status"] for name, row in rows.items()} == {
        "orders-0": "clean", "orders-1": "compacted", "users-0": "skipped"
    }  # fmt: skip
    now = snapshot(out)
    assert {name for name in {*now, *whole} if now.get(name) != whole.get(name) and "orders-0/" in name} == set()
    assert now.keys() == whole.keys()
    assert now["users-0/" + RECORD] != whole["users-0/" + RECORD]


def test_a_partition_with_another_checkpoint_is_written_again(run: Run, log_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    place(run, log_dir, out)
    path = log_dir / "replication-offset-checkpoint"
    path.write_text(path.read_text().replace("orders 0 400", "orders 0 399"))
    rows = place(run, log_dir, out)
    assert [name for name, row in rows.items() if row["status"] == "compacted"] == ["orders-0"]
    assert "orders 0 399" in checkpoint(out / "replication-offset-checkpoint")


def test_a_partition_that_has_become_due_is_written_again(run: Run, log_dir: Path, tmp_path: Path) -> None:
    """The source is unchanged, but the target is due with the settings of the next run."""
    out = tmp_path / "out"
    lag = ("--topic-config", f"orders:min.compaction.lag.ms={10**15}")
    rows = place(run, log_dir, out, *CONFIG, *lag)
    assert rows["orders-0"]["status"] == "skipped"
    assert "copied unchanged" in rows["orders-0"]["error"]
    rows = place(run, log_dir, out)
    assert rows["orders-0"]["status"] == "compacted"
    rows = place(run, log_dir, out, *CONFIG, "--from-log-start")
    assert rows["orders-0"]["status"] == "compacted"
    rows = place(run, log_dir, out, *CONFIG, "--force")
    assert rows["orders-0"]["status"] == "clean", "the partition has no dirty segment"


def test_a_partition_with_unknown_settings_is_copied(run: Run, log_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rows = place(run, log_dir, out, *CONFIG[:3], status=3)
    assert rows["users-0"]["status"] == "refused"
    assert rows["users-0"]["error"].startswith("copied unchanged: topic config unknown")
    assert records_of(out / "users-0") == records_of(log_dir / "users-0")
    assert all((out / name).exists() for name in ROOT_FILES), "no partition is missing, so these files must exist"
    rows = place(run, log_dir, out, *CONFIG[:3], status=3)
    assert rows["users-0"]["status"] == "refused"
    assert rows["users-0"]["error"].startswith("unchanged since ")


def test_a_partition_with_keyless_records_is_copied(run: Run, tmp_path: Path) -> None:
    records = random_records(1, 200)
    records[30] = type(records[30])(30, records[30].timestamp, None, b"no key")
    source, out = write_log_dir(tmp_path / "logs", {"orders-0": records}), tmp_path / "out"
    rows = place(run, source, out, status=1)
    assert rows["orders-0"]["status"] == "refused"
    assert rows["orders-0"]["error"].startswith("copied unchanged: ")
    assert "--drop-keyless" in rows["orders-0"]["error"]
    assert files_of(out) == files_of(source)
    rows = place(run, source, out, *CONFIG, "--drop-keyless")
    assert rows["orders-0"]["status"] == "compacted"


def test_a_corrupt_partition_is_missing_and_no_broker_can_start(run: Run, log_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    place(run, log_dir, out)
    assert all((out / name).exists() for name in ROOT_FILES)
    damaged = log_dir / "orders-1" / f"{100:020d}.log"
    data = bytearray(damaged.read_bytes())
    data[200] ^= 1
    damaged.write_bytes(data)
    before = files_of(out)
    rows = place(run, log_dir, out, status=3)
    assert {name: row["status"] for name, row in rows.items()} == {
        "orders-0": "clean", "orders-1": "corrupt", "users-0": "clean"
    }  # fmt: skip
    assert str(damaged) in rows["orders-1"]["error"]
    assert "do not start a broker on the target" in last_stderr() and "orders-1" in last_stderr()
    assert not any((out / name).exists() for name in ROOT_FILES)
    assert files_of(out) == before, "the earlier files of the target must remain"
    assert not list(out.rglob("*.clean"))


def test_a_target_without_all_partitions_is_not_a_log_dir(run: Run, log_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rows = place(run, log_dir, out, *CONFIG, "--partitions", "orders-0")
    assert rows.keys() == {"orders-0"}
    assert not any((out / name).exists() for name in ROOT_FILES)
    assert "orders-1 (not chosen)" in last_stderr()
    assert checkpoint(out / "replication-offset-checkpoint") == ["orders 0 400"]
    # status 3: one partition is skipped
    place(run, log_dir, out, *CONFIG, "--partitions", "orders-1,users-0", status=3)
    assert all((out / name).exists() for name in ROOT_FILES), "the target has all partitions of the source"
    assert len(checkpoint(out / "replication-offset-checkpoint")) == 3
    append(log_dir / "orders-0")
    os.utime(log_dir / "orders-0" / f"{0:020d}.log")
    place(run, log_dir, out, *CONFIG, "--topic-list", "users")
    assert not any((out / name).exists() for name in ROOT_FILES), "the source of one partition has changed"


def test_several_log_dirs_have_separate_targets(run: Run, tmp_path: Path) -> None:
    one = write_log_dir(tmp_path / "one", {"orders-0": random_records(1, 200)})
    two = write_log_dir(tmp_path / "two", {"orders-1": random_records(2, 200), "users-0": random_records(3, 50)})
    outs = tmp_path / "out-one", tmp_path / "out-two"
    rows = place(run, f"{one},{two}", f"{outs[0]},{outs[1]}")
    assert rows["orders-1"]["log_dir"] == str(two)
    assert [sorted(path.name for path in out.iterdir() if path.is_dir()) for out in outs] == [
        ["orders-0"], ["orders-1", "users-0"]
    ]  # fmt: skip
    assert all((out / "meta.properties").exists() for out in outs)
    # A partition that was moved to the other log dir must not be in both targets.
    shutil.move(two / "users-0", one / "users-0")
    rows = place(run, f"{one},{two}", f"{outs[0]},{outs[1]}")
    assert f"still in {outs[1] / 'users-0'}: remove it" in last_stderr()
    assert not any((out / name).exists() for out in outs for name in ROOT_FILES), "neither target is complete"
    shutil.rmtree(outs[1] / "users-0")
    place(run, f"{one},{two}", f"{outs[0]},{outs[1]}")
    assert all((out / "meta.properties").exists() for out in outs)


def test_partitions_removed_from_the_source_are_retained_and_reported(
    run: Run, log_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    place(run, log_dir, out)
    shutil.rmtree(log_dir / "users-0")
    place(run, log_dir, out)
    assert f"{out / 'users-0'} is still there, but the source no longer has users-0" in last_stderr()
    assert (out / "users-0").exists()
    assert not any("users" in line for line in checkpoint(out / "replication-offset-checkpoint"))


def test_an_unclean_source_is_copied_with_its_torn_tail(run: Run, tmp_path: Path) -> None:
    """An unclean source may be a snapshot of the file system of a running broker: the recovery point is inside the
    log."""
    records = random_records(5, 400)
    source, out = write_log_dir(tmp_path / "logs", {"orders-0": records}), tmp_path / "out"
    (source / ".kafka_cleanshutdown").unlink()
    (source / "recovery-point-offset-checkpoint").write_text("0\n1\norders 0 200\n")
    (source / "replication-offset-checkpoint").write_text("0\n0\n")
    active = source / "orders-0" / f"{300:020d}.log"
    active.write_bytes(active.read_bytes()[:-7])
    before = snapshot(source)
    rows = place(run, source, out)
    assert snapshot(source) == before
    assert rows["orders-0"]["status"] == "compacted"
    assert rows["orders-0"]["end_dirty_offset"] == 200
    assert "orders-0: its high watermark is unknown, so the log end offset" in last_stderr()
    for base in (200, 300):
        for suffix in ("log", "index", "timeindex"):
            name = f"orders-0/{base:020d}.{suffix}"
            assert files_of(out)[name] == files_of(source)[name]
    assert not (out / ".kafka_cleanshutdown").exists()
    assert (out / "meta.properties").exists()


def test_after_a_deadline_the_next_run_writes_the_remaining_partitions(run: Run, log_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rows = place(run, log_dir, out, *CONFIG, "--deadline", "0")
    assert {row["status"] for row in rows.values()} == {"not-begun"}
    assert "do not start a broker" in last_stderr() and not list(out.glob(f"*/{RECORD}"))
    rows = place(run, log_dir, out)
    assert rows["orders-0"]["status"] == "compacted" and (out / "meta.properties").exists()


def test_other_replicas_delay_the_removal_of_tombstones(run: Run, log_dir: Path, tmp_path: Path) -> None:
    other = write_log_dir(tmp_path / "other", {"orders-0": records_of(log_dir / "orders-0")})
    rows = place(run, log_dir, tmp_path / "out", *CONFIG, "--replica", f"b={other}")
    assert (rows["orders-0"]["removal_limit_offset"], rows["orders-0"]["removal_limit_replica"]) == (0, "b")
    assert rows["orders-1"]["removal_limit_replica"] is None
    assert "no --replica hosts orders-1: " in last_stderr()


def test_leftover_files_of_the_source_are_ignored_or_refused(run: Run, log_dir: Path, tmp_path: Path) -> None:
    """Files that a broker ignores are ignored. A partition with files that a broker would recover is refused, because
    the source must not change.
    """
    out = tmp_path / "out"
    (log_dir / "orders-0" / f"{0:020d}.log.rdead.as1.clean").write_bytes(b"garbage")
    (log_dir / "orders-0" / f"{100:020d}.log.deleted").write_bytes(b"garbage")
    (log_dir / "orders-1" / f"{0:020d}.log.swap").write_bytes((log_dir / "orders-1" / f"{0:020d}.log").read_bytes())
    before = snapshot(log_dir)
    rows = place(run, log_dir, out, status=3)
    assert rows["orders-0"]["status"] == "compacted"
    assert rows["orders-1"]["status"] == "refused"
    assert f"`keytail compact --log-dirs {log_dir} --partitions orders-1 --execute`" in (
        rows["orders-1"]["error"]
    )
    assert snapshot(log_dir) == before
    assert {path.suffix for path in (out / "orders-0").iterdir()} == {".log", ".index", ".timeindex", ".json", ""}
    assert not (out / "orders-1").exists()
    assert not (out / "meta.properties").exists()


def test_the_output_of_a_read_only_source_is_writable(run: Run, log_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for path in [*log_dir.rglob("*"), log_dir]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        rows = place(run, log_dir, out)
    finally:
        for path in [log_dir, *log_dir.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert rows["orders-0"]["status"] == "compacted"
    for path in out.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path


def test_files_that_a_broker_changed_in_the_target_are_not_replaced(run: Run, log_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    place(run, log_dir, out)
    append(out / "orders-0", b"more")
    append(log_dir / "orders-0")
    changed = files_of(out)
    rows = place(run, log_dir, out, status=3)
    assert rows["orders-0"]["status"] == "refused"
    assert "not those that keytail wrote: 00000000000000000300.log" in rows["orders-0"]["error"]
    assert files_of(out) == changed
    assert not (out / "meta.properties").exists()


@pytest.mark.parametrize("moment", ["before", "while", "after"])
def test_a_source_that_changes_during_the_run_is_refused(
    run: Run, log_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A file that no task reads changes before the source is read, after it is read, or before outputs are renamed."""
    from keytail.compact.out_of_place import partition as work
    from keytail.compact.out_of_place import placing

    def touched(real: Any, *, first: bool) -> Any:
        def wrapped(*given: Any, **more: Any) -> Any:
            path = log_dir / "orders-0" / "leader-epoch-checkpoint"
            if first:
                os.utime(path)
            answer = real(*given, **more)
            if not first:
                os.utime(path)
            return answer

        return wrapped

    if moment == "before":
        monkeypatch.setattr(placing, "place_partition", touched(placing.place_partition, first=True))
    elif moment == "while":
        monkeypatch.setattr(work, "copy_rest", touched(work.copy_rest, first=False))
    else:
        monkeypatch.setattr(placing, "place_partition", touched(placing.place_partition, first=False))
    out = tmp_path / "out"
    rows = place(run, log_dir, out, *CONFIG, "--partitions", "orders-0", status=1)
    assert rows["orders-0"]["status"] == "refused"
    assert "the source has changed since it was planned: names, sizes or times differ: leader-epoch-checkpoint" in (
        rows["orders-0"]["error"]
    )
    assert list((out / "orders-0").iterdir()) == []


@pytest.mark.parametrize("what", ["partition", "directory", "file", "metadata"])
def test_a_target_with_other_contents_is_refused(run: Run, log_dir: Path, tmp_path: Path, what: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if what == "partition":
        write_log_dir(out, {"orders-0": random_records(3, 20)})
    elif what == "directory":
        (out / "lost+found").mkdir()
    elif what == "file":
        (out / "notes.txt").write_text("mine")
    else:
        (out / "meta.properties").write_text("version=1\nnode.id=7\n")
    before = snapshot(out)
    assert place(run, log_dir, out, status=1) == {}
    assert "has files that keytail did not write" in last_stderr()
    assert snapshot(out) == before


def test_a_source_or_target_in_use_is_refused(run: Run, log_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with hold([str(log_dir)]):
        before = snapshot(log_dir)
        place(run, log_dir, out, status=1)
        assert "in use" in last_stderr()
        assert snapshot(log_dir) == before and not out.exists()
    place(run, log_dir, out)
    with hold([str(out)]):
        place(run, log_dir, out, status=1)
        assert "in use by another keytail run" in last_stderr()


def test_a_dry_run_reports_the_layout_and_creates_nothing(run: Run, log_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("compact", "--log-dirs", log_dir, "--output-dir", out, *CONFIG, "--output", "json")
    assert done.exit_code == 0, done.output
    rows = rows_of(done)
    assert rows["orders-0"]["status"] == "would-compact"
    assert rows["users-0"]["error"].startswith("would be copied unchanged: ")
    assert f"to {out}: 2 partitions would be compacted, 1 copied unchanged" in done.stderr
    assert not out.exists()
    place(run, log_dir, out)
    done = run("compact", "--log-dirs", log_dir, "--output-dir", out, *CONFIG, "--output", "json")
    assert {row["status"] for row in rows_of(done).values()} == {"clean"}


def test_conflicting_flags_are_refused(run: Run, log_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    inside = log_dir / "orders-0"
    other = write_log_dir(tmp_path / "other", {"a-0": random_records(1, 20)})
    (tmp_path / "file").write_text("")
    there = tmp_path / "there"
    there.mkdir()
    for flags, what in [
        ((out, "--keep-originals", tmp_path / "kept"), "--keep-originals"),
        ((out, "--ledger", tmp_path / "ledger"), "--ledger"),
        ((out, "--max-scratch-bytes", "1g"), "--max-scratch-bytes"),
        ((out, "--scratch-dir", tmp_path), "--scratch-dir"),
        ((f"{out},{out}",), "names 2 directories, but there are 1 log dirs"),
        ((log_dir,), "inside a log dir or contains one"),
        ((inside,), "inside a log dir or contains one"),
        ((tmp_path,), "inside a log dir or contains one"),
        ((other / "new",), "which is a log dir"),
        ((tmp_path / "no" / "such",), "does not exist"),
        ((tmp_path / "file",), "is not a directory"),
        (("nosuch://bucket/prefix",), "cannot be reached"),
        (("s3://key:12/hunter2@bucket/prefix",), "may contain a password"),
        ((there, "--rows-file", there / "rows"), "--rows-file is inside a log dir"),
        ((there, "--quarantine-report", there / "bad"), "--quarantine-report is inside a log dir"),
    ]:
        done = run("compact", "--log-dirs", log_dir, "--output-dir", *flags, *CONFIG)
        assert done.exit_code == 2, (flags, done.output)
        assert what in " ".join(done.output.split()), done.output
        assert "hunter2" not in done.output
    done = run("compact", "--log-dirs", f"{log_dir},{other}", "--output-dir", f"{out},{out / 'in'}", *CONFIG)
    assert done.exit_code == 2 and "one inside another" in done.output
    done = run("compact", "--log-dirs", log_dir, "--scratch-dir", tmp_path, *CONFIG)
    assert done.exit_code == 2
    assert not out.exists()


def test_an_unreadable_output_record_is_refused(run: Run, log_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    place(run, log_dir, out)
    record = out / "orders-0" / RECORD
    whole = json.loads(record.read_text())
    record.write_text(json.dumps(whole | {"version": 2}))
    rows = place(run, log_dir, out, status=3)
    assert rows["orders-0"]["status"] == "refused" and "version 2" in rows["orders-0"]["error"]
    record.write_text("{")
    rows = place(run, log_dir, out, status=3)
    assert "cannot be read" in rows["orders-0"]["error"]


def test_an_output_can_itself_be_a_source(run: Run, log_dir: Path, tmp_path: Path) -> None:
    """The output is compacted again, out of place and in place."""
    out, second = tmp_path / "out", tmp_path / "second"
    before = records_of(log_dir / "orders-0")
    place(run, log_dir, out)
    place(run, out, second)
    assert files_of(second) == files_of(out)
    assert_unchanged_records(before, second / "orders-0")
    assert newest_by_key(records_of(second / "orders-0")).keys() <= newest_by_key(before).keys()
    with without_spark():
        done = run("compact", "--log-dirs", second, *CONFIG, "--execute", "--output", "json")
    assert {row["status"] for row in rows_of(done).values()} == {"clean", "skipped"}
