"""A partition is refused if the `.log` of a segment is missing but other files exist, and is `corrupt` if the log end
is missing. The plan reports both.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from keytail.format.producers import ProducerEntry, encode_snapshot
from tests.command_line import Run, rows_of
from tests.log_dirs import BASE_MS, random_records, snapshot, write_log_dir
from tests.no_spark import without_spark

FLAGS = ("--now", "1800000000000", "--unsafe-clock", "--topics-have-no-overrides", "--topic-config",
         "orders:cleanup.policy=compact", "--output", "json")  # fmt: skip
SEGMENT_FILES = (".log", ".index", ".timeindex")


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Write segments at 0, 100, ... 400; the last one is active."""
    path = write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 500, 9)}, segments=5)
    (path / "orders-0" / "partition.metadata").write_text("version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ")
    for base in (200, 500):
        (path / "orders-0" / f"{base:020d}.snapshot").write_bytes(encode_snapshot([]))
    return path


def compact(run: Run, log_dir: Path, *flags: str, status: int = 0) -> dict[str, Any]:
    with without_spark():
        done = run("compact", "--log-dirs", log_dir, *FLAGS, *flags)
    assert done.exit_code == status, done.output
    return rows_of(done)["orders-0"]


def remove(log_dir: Path, base: int, suffixes: Sequence[str]) -> None:
    for suffix in suffixes:
        (log_dir / "orders-0" / f"{base:020d}{suffix}").unlink()


@pytest.mark.parametrize(
    ("base", "suffixes", "shown_by"),
    [(100, (".log",), ".index"), (300, (".log", ".index"), ".timeindex"), (200, SEGMENT_FILES, ".snapshot"),
     (400, (".log",), ".index")],
)  # fmt: skip
def test_a_partition_is_refused_until_the_other_files_of_a_missing_segment_are_removed(
    base: int, suffixes: tuple[str, ...], shown_by: str, run: Run, log_dir: Path
) -> None:
    remove(log_dir, base, suffixes)
    before = snapshot(log_dir)
    for flags in ((), ("--execute",), ("--prepare",)):
        row = compact(run, log_dir, *flags, status=1)
        assert (row["status"], row["slugs"]) == ("refused", ["segment-missing"]), flags
        assert f"base offset {base} is missing" in row["error"]
        assert f"{base:020d}{shown_by}" in row["error"]
    after = {name: file for name, file in snapshot(log_dir).items() if not name.startswith(".keytail")}
    assert after == before
    for path in (log_dir / "orders-0").glob(f"{base:020d}.*"):
        path.unlink()
    assert compact(run, log_dir, "--execute", "--high-watermark", "log-end")["status"] == "compacted"


def test_index_files_below_the_log_start_or_inside_a_segment_are_accepted(run: Run, log_dir: Path) -> None:
    partition = log_dir / "orders-0"
    (log_dir / "log-start-offset-checkpoint").write_text("0\n1\norders 0 150\n")
    for base in (100, 250):  # 100 is below the log start offset, 250 inside a segment
        shutil.copy(partition / f"{300:020d}.index", partition / f"{base:020d}.index")
    remove(log_dir, 100, (".log", ".timeindex"))
    assert compact(run, log_dir, "--execute")["status"] == "compacted"


def test_a_partition_with_a_snapshot_at_the_start_of_a_gap_is_compacted(run: Run, log_dir: Path) -> None:
    """A follower was stopped while its leader was compacted: the gap begins where the follower's log ended then."""
    remove(log_dir, 200, SEGMENT_FILES)
    partition = log_dir / "orders-0"
    closed_ns = (partition / f"{100:020d}.timeindex").stat().st_mtime_ns
    os.utime(partition / f"{200:020d}.snapshot", ns=(closed_ns - 2 * 10**9,) * 2)
    assert compact(run, log_dir, status=1)["slugs"] == ["segment-missing"], "no snapshot after the gap shows a follower"
    (partition / f"{300:020d}.snapshot").write_bytes(encode_snapshot([]))
    assert compact(run, log_dir, status=1)["slugs"] == ["segment-missing"], "a log that was never compacted has no gaps"
    (log_dir / "cleaner-offset-checkpoint").write_text("0\n1\norders 0 100\n")
    for last_offset, status in ((200, "refused"), (199, "would-compact")):  # offset 200 is in the gap
        entry = ProducerEntry(7, 0, 5, last_offset, 0, BASE_MS, -1, -1)
        (partition / f"{300:020d}.snapshot").write_bytes(encode_snapshot([entry]))
        assert compact(run, log_dir, status=int(status == "refused"))["status"] == status
    assert compact(run, log_dir, "--execute")["status"] == "compacted"


def test_only_empty_index_files_at_the_log_end_are_accepted(run: Run, log_dir: Path) -> None:
    end = log_dir / "orders-0" / f"{500:020d}"
    end.with_suffix(".index").touch()
    assert compact(run, log_dir)["status"] == "would-compact"
    end.with_suffix(".timeindex").write_bytes(bytes(12))
    assert compact(run, log_dir, status=1)["slugs"] == ["segment-missing"]
    end.with_suffix(".timeindex").write_bytes(b"")
    (log_dir / "recovery-point-offset-checkpoint").write_text("0\n1\norders 0 501\n")
    assert compact(run, log_dir, status=1)["slugs"] == ["segment-missing"]


def test_after_an_unclean_shutdown_a_missing_segment_is_accepted(run: Run, log_dir: Path) -> None:
    (log_dir / ".kafka_cleanshutdown").unlink()
    remove(log_dir, 100, (".log",))
    assert compact(run, log_dir)["status"] == "would-compact"


def test_a_truncated_active_segment_is_reported_by_the_plan(run: Run, log_dir: Path) -> None:
    log = log_dir / "orders-0" / f"{400:020d}.log"
    log.write_bytes(log.read_bytes()[:-7])
    for flags in ((), ("--execute",), ("--high-watermark", "log-end"), ("--prepare",)):
        row = compact(run, log_dir, *flags, status=1)
        assert row["status"] == "corrupt", flags
        assert "offset 490" in row["error"]
    (log_dir / ".kafka_cleanshutdown").unlink()
    assert compact(run, log_dir)["status"] == "would-compact", "a broker would truncate the log"


def test_a_missing_active_segment_is_reported_by_the_plan(run: Run, log_dir: Path) -> None:
    remove(log_dir, 400, SEGMENT_FILES)
    row = compact(run, log_dir, status=1)
    assert (row["status"], row["slugs"]) == ("corrupt", ["damaged-log-end"])
    assert "before the high watermark 500" in row["error"]
    assert compact(run, log_dir, "--high-watermark", "log-end")["status"] == "would-compact"
