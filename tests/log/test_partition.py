"""The survey: the facts of partitions that planning uses, and all states in which a partition must not be changed."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from keytail.errors import UsageProblem
from keytail.log.fs import LOCAL
from keytail.log.log_dirs import hosted, survey_log_dirs
from keytail.log.partition import PartitionFacts, SegmentFacts, survey_partition
from tests.crash.partitions import INTERVAL_BYTES, log_of, write_segment
from tests.reference.batches import Rec, encode_batch

MTIME_NS = 1_700_000_000_123_456_789


def _log_dir(tmp_path: Path, *partitions: str, name: str = "logs") -> Path:
    """Write partitions of two segments, 0 to 9 and 10 to 13, cleanly shut down."""
    log_dir = tmp_path / name
    log_dir.mkdir()
    (log_dir / "meta.properties").write_text("version=1\n")
    (log_dir / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":42}')
    for partition in partitions:
        path = log_dir / partition
        path.mkdir()
        write_segment(path, 0, log_of(range(10)), "")
        write_segment(path, 10, log_of(range(10, 14)), "")
        for base in (10, 14):
            (path / f"{base:020d}.snapshot").write_bytes(b"")
        (path / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
        (path / "partition.metadata").write_text("version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ")
    return log_dir


def _survey(*log_dirs: Path) -> dict[str, PartitionFacts]:
    found = survey_log_dirs(LOCAL, [str(log_dir) for log_dir in log_dirs])
    return {
        f"{entry.topic}-{entry.partition}": survey_partition(LOCAL, facts, entry)
        for facts in found
        for entry in facts.partitions
    }


def test_the_facts_of_a_partition_are_read(tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0")
    path = log_dir / "orders-0"
    for name, offset in [
        ("cleaner-offset-checkpoint", 5),
        ("recovery-point-offset-checkpoint", 14),
        ("log-start-offset-checkpoint", 3),
        ("replication-offset-checkpoint", 13),
    ]:
        (log_dir / name).write_text(f"0\n1\norders 0 {offset}\n")
    os.utime(path / "00000000000000000000.log", ns=(MTIME_NS, MTIME_NS))
    facts = _survey(log_dir)["orders-0"]
    assert facts.problems == ()
    assert facts.leftovers == ()
    assert (facts.topic, facts.partition, facts.log_dir, facts.path) == ("orders", 0, str(log_dir), str(path))
    assert facts.snapshots == (10, 14)
    assert (facts.log_start_offset, facts.log_end_offset, facts.tail_bytes) == (3, 14, 0)
    assert (facts.high_watermark, facts.recovery_point, facts.cleaner_checkpoint) == (13, 14, 5)
    assert facts.clean_shutdown
    assert facts.segments[0] == SegmentFacts(
        base_offset=0,
        log_bytes=len(log_of(range(10))),
        log_mtime_ns=MTIME_NS,
        index_bytes=(path / "00000000000000000000.index").stat().st_size,
        time_index_bytes=(path / "00000000000000000000.timeindex").stat().st_size,
        txn_index_bytes=None,
        largest_timestamp_ms=1_000_009,
        first_batch_timestamp_ms=1_000_001,
    )
    assert [segment.base_offset for segment in facts.segments] == [0, 10]


def test_without_checkpoints_and_clean_shutdown_marker_offsets_have_defaults(tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0")
    (log_dir / ".kafka_cleanshutdown").unlink()
    facts = _survey(log_dir)["orders-0"]
    assert not facts.clean_shutdown
    assert (facts.high_watermark, facts.cleaner_checkpoint) == (None, None)
    assert (facts.recovery_point, facts.log_start_offset) == (0, 0)


@pytest.mark.parametrize("contents", [None, b"", struct.pack(">qi", -1, 0), b"\0" * 11])
def test_without_a_time_index_the_largest_timestamp_is_the_time_of_the_log(
    contents: bytes | None, tmp_path: Path
) -> None:
    log_dir = _log_dir(tmp_path, "orders-0")
    path = log_dir / "orders-0" / "00000000000000000000.timeindex"
    path.unlink()
    if contents is not None:
        path.write_bytes(contents)
    os.utime(path.with_suffix(".log"), ns=(MTIME_NS, MTIME_NS))
    assert _survey(log_dir)["orders-0"].segments[0].largest_timestamp_ms == MTIME_NS // 1_000_000


def test_a_time_index_of_zeros_has_the_timestamp_0_as_in_a_broker(tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0")
    (log_dir / "orders-0" / "00000000000000000000.timeindex").write_bytes(bytes(120))
    assert _survey(log_dir)["orders-0"].segments[0].largest_timestamp_ms == 0


def _legacy(offset: int, magic: int, timestamp: int) -> bytes:
    body = bytes([0, 0, 0, 0, magic, 0]) + (struct.pack(">q", timestamp) if magic else b"") + bytes(8)
    return struct.pack(">qi", offset, len(body)) + body


def test_timestamps_of_first_batches_are_read(tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0")
    path = log_dir / "orders-0"
    expected = []
    for base, log, timestamp in [
        (20, b"", -1),
        (21, _legacy(21, 0, 0), -1),
        (22, _legacy(22, 1, 77), 77),
        (23, encode_batch([Rec(23, -1, b"k", b"v")]), -1),
        (24, encode_batch([Rec(24, 55, b"k", b"v"), Rec(25, 50, b"k", b"v")]), 55),
        (26, encode_batch([Rec(26, 66, b"k", b"v")])[:40], -1),
    ]:
        write_path = path / f"{base:020d}.log"
        write_path.write_bytes(log)
        expected.append((base, timestamp))
    facts = _survey(log_dir)["orders-0"]
    assert [(s.base_offset, s.first_batch_timestamp_ms) for s in facts.segments[2:]] == expected


def test_an_incomplete_last_batch_is_reported_but_is_not_a_problem(tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0")
    with open(log_dir / "orders-0" / "00000000000000000010.log", "ab") as log:
        log.write(log_of(range(2))[:30])
    facts = _survey(log_dir)["orders-0"]
    assert (facts.log_end_offset, facts.tail_bytes, facts.problems) == (14, 30, ())


# Partitions that must not be changed


@pytest.mark.parametrize(
    "name",
    [
        "foo.log",
        "foo.swap",
        "foo.cleaned",
        "foo.index",
        "7.log",
        "00000000000000000007.log.extra.swap",
        "99999999999999999999.log",
    ],
)
def test_names_that_stop_a_broker_are_problems(name: str, tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0", "orders-1")
    (log_dir / "orders-0" / name).touch()
    facts = _survey(log_dir)
    assert len(facts["orders-0"].problems) == 1
    assert str(log_dir / "orders-0" / name) in facts["orders-0"].problems[0]
    assert facts["orders-1"].problems == ()


def test_other_names_are_ignored(tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0")
    for name in ("notes.txt", "00000000000000000000.log.bak", "README"):
        (log_dir / "orders-0" / name).touch()
    (log_dir / "orders-0" / "subdir").mkdir()
    assert _survey(log_dir)["orders-0"].problems == ()


@pytest.mark.parametrize("make", ["symlink", "fifo", "directory"])
def test_segment_files_that_are_not_regular_files_are_problems(make: str, tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0")
    path = log_dir / "orders-0" / "00000000000000000000.index"
    path.rename(tmp_path / "elsewhere")
    {"symlink": lambda: path.symlink_to(tmp_path / "elsewhere"), "fifo": lambda: os.mkfifo(path),
     "directory": path.mkdir}[make]()  # fmt: skip
    assert _survey(log_dir)["orders-0"].problems == (f"this is not a regular file: {path} [not-a-regular-file]",)


def test_a_log_of_more_than_two_gibibytes_is_a_problem(tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0")
    path = log_dir / "orders-0" / "00000000000000000000.log"
    os.truncate(path, 2**31 - 1)
    assert _survey(log_dir)["orders-0"].problems == ()
    os.truncate(path, 2**31)
    assert "larger than 2147483647 bytes" in _survey(log_dir)["orders-0"].problems[0]


def test_a_first_batch_below_the_base_offset_is_a_problem(tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0")
    (log_dir / "orders-0" / "00000000000000000010.log").write_bytes(log_of(range(8, 12)))
    assert "below the base offset 10 of its segment" in _survey(log_dir)["orders-0"].problems[0]


def test_a_partition_without_a_segment_is_a_problem(tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0")
    (log_dir / "orders-1").mkdir()
    facts = _survey(log_dir)
    assert facts["orders-1"].problems == (f"no segments in {log_dir / 'orders-1'} [no-segments]",)
    assert facts["orders-0"].problems == ()


def test_leftovers_are_reported_but_only_a_pending_swap_is_a_problem(tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0")
    path = log_dir / "orders-0"
    harmless = [
        "00000000000000000000.log.cleaned",
        "00000000000000000000.log.rx.a0.clean",
        "00000000000000000005.log.deleted",
    ]
    for name in harmless:
        (path / name).touch()
    facts = _survey(log_dir)["orders-0"]
    assert (facts.leftovers, facts.problems) == (tuple(harmless), ())
    (path / "00000000000000000000.log.swap").touch()
    facts = _survey(log_dir)["orders-0"]
    assert "00000000000000000000.log.swap" in facts.leftovers
    assert "a replacement of segments was interrupted" in facts.problems[0]


def test_a_leader_epoch_checkpoint_with_a_syntax_error_is_a_problem(tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0", "orders-1")
    path = log_dir / "orders-0" / "leader-epoch-checkpoint"
    path.write_text("0\n1\nzero 0\n")
    facts = _survey(log_dir)
    assert "line 3" in facts["orders-0"].problems[0]
    assert str(path) in facts["orders-0"].problems[0]
    assert facts["orders-1"].problems == ()


# Log dirs


def test_a_checkpoint_with_a_syntax_error_is_a_problem_of_its_dir_only(tmp_path: Path) -> None:
    bad, good = _log_dir(tmp_path, "a-0", "a-1", name="bad"), _log_dir(tmp_path, "b-0", name="good")
    (bad / "cleaner-offset-checkpoint").write_text("0\n2\na 0 1\n")
    facts = _survey(bad, good)
    for name in ("a-0", "a-1"):
        assert "line 2" in facts[name].problems[0]
        assert str(bad / "cleaner-offset-checkpoint") in facts[name].problems[0]
    assert facts["b-0"].problems == ()


def test_other_directories_are_ignored(tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0", "__cluster_metadata-0")
    marked = [
        f"orders-{i}.0a1b2c3d4e5f60718293a4b5c6d7e8f9-{kind}" for i, kind in enumerate(("delete", "stray"), 1)
    ]
    for name in (*marked, "remote-log-index-cache"):
        (log_dir / name).mkdir()
    (log_dir / "a-file-9").touch()
    (facts,) = survey_log_dirs(LOCAL, [str(log_dir)])
    assert [entry.path for entry in facts.partitions] == [str(log_dir / "orders-0")]
    assert facts.partitions[0].problems == ()
    assert set(facts.skipped) == {*marked, "__cluster_metadata-0"}
    assert hosted([facts]) == {("orders", 0)}


def test_a_foreign_directory_which_would_stop_a_broker_is_a_problem(tmp_path: Path) -> None:
    log_dir, other = _log_dir(tmp_path, "orders-0"), _log_dir(tmp_path, "orders-1", name="other")
    (log_dir / "lost+found").mkdir()
    facts = _survey(log_dir, other)
    assert "directory lost+found is not a partition directory" in facts["orders-0"].problems[0]
    assert facts["orders-1"].problems == ()


def test_a_partition_that_is_being_moved_is_a_problem(tmp_path: Path) -> None:
    item, two = _log_dir(tmp_path, "orders-0", "orders-1"), _log_dir(tmp_path, name="two")
    (two / "orders-0.0a1b2c3d4e5f60718293a4b5c6d7e8f9-future").mkdir()
    facts = _survey(item, two)
    assert "moving to another log dir" in facts["orders-0"].problems[0]
    assert facts["orders-1"].problems == ()


def test_a_partition_in_two_log_dirs_is_a_problem_in_both(tmp_path: Path) -> None:
    item, two = _log_dir(tmp_path, "orders-0", "orders-1"), _log_dir(tmp_path, "orders-0", name="two")
    found = survey_log_dirs(LOCAL, [str(item), str(two)])
    problems = {entry.path: entry.problems for facts in found for entry in facts.partitions}
    assert "several log dirs" in problems[str(item / "orders-0")][0]
    assert "several log dirs" in problems[str(two / "orders-0")][0]
    assert problems[str(item / "orders-1")] == ()


def test_a_partition_directory_that_is_a_link_is_a_problem(tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0")
    (log_dir / "orders-0").rename(tmp_path / "orders-0")
    (log_dir / "orders-0").symlink_to(tmp_path / "orders-0")
    assert "symbolic link" in _survey(log_dir)["orders-0"].problems[0]


def test_a_directory_that_is_not_a_log_dir_is_a_usage_problem(tmp_path: Path) -> None:
    log_dir = _log_dir(tmp_path, "orders-0")
    (tmp_path / "empty").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "documents").mkdir()
    (tmp_path / "file").touch()
    for path, complaint in [
        (tmp_path / "none", "no such log dir"),
        (tmp_path / "empty", "not a log dir: the directory is empty"),
        (tmp_path / "home", "not a log dir"),
        (tmp_path / "file", "must be a directory"),
        (log_dir / "orders-0", "not a log dir"),
    ]:
        with pytest.raises(UsageProblem, match=complaint) as caught:
            survey_log_dirs(LOCAL, [str(log_dir), str(path)])
        assert caught.value.path == str(path)


def test_a_log_dir_without_partitions_is_accepted(tmp_path: Path) -> None:
    (facts,) = survey_log_dirs(LOCAL, [str(_log_dir(tmp_path))])
    assert facts.partitions == ()


def test_the_synthetic_segments_have_index_entries() -> None:
    """Without entries, half of the tests of this file would have no effect."""
    assert len(log_of(range(2))) > INTERVAL_BYTES
