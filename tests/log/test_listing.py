"""A listing of a partition returns the same facts as its survey with far fewer operations, or returns None."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keytail.format import names
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import PartitionFacts, SegmentFacts, list_partition, survey_partition
from tests.log_dirs import random_records, write_log_dir

SEGMENTS = 12


class Counting(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def _look(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], Any]) -> Any:
        self.counts[operation] += 1
        return super()._look(operation, arguments, action)


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    made = write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 240)}, segments=SEGMENTS)
    (made / "orders-0" / f"{240:020d}.snapshot").write_bytes(b"")
    (made / "cleaner-offset-checkpoint").write_text("0\n1\norders 0 40\n")
    os.utime(made / "orders-0" / f"{0:020d}.log", ns=(1_700_000_000_123_456_789,) * 2)
    return made


def both(log_dir: Path) -> tuple[PartitionFacts | None, PartitionFacts]:
    [facts] = survey_log_dirs(LOCAL, [str(log_dir)])
    return list_partition(LOCAL, facts, facts.partitions[0]), survey_partition(LOCAL, facts, facts.partitions[0])


def as_listed(segment: SegmentFacts) -> SegmentFacts:
    """Replace the fields that a listing cannot determine with the values that `list_partition` returns for them."""
    segment = segment._replace(index_bytes=None, time_index_bytes=None, txn_index_bytes=None)
    return segment._replace(first_batch_timestamp_ms=-1, largest_timestamp_ms=segment.log_mtime_ns // 1_000_000)


def test_a_listing_equals_a_survey_except_for_indexes_and_times(log_dir: Path) -> None:
    listed, surveyed = both(log_dir)
    assert listed == dataclasses.replace(surveyed, segments=tuple(map(as_listed, surveyed.segments)))
    assert len(surveyed.segments) == SEGMENTS
    assert surveyed.log_end_offset == 240


def test_files_that_a_broker_ignores_are_ignored(log_dir: Path) -> None:
    for name in ("notes.txt", "partition.metadata", "99999999999999999999.txt"):
        (log_dir / "orders-0" / name).write_text("x")
    assert both(log_dir)[0] is not None


@pytest.mark.parametrize(
    "name",
    [
        f"{0:020d}.log.r1.a1.clean", f"{0:020d}.log.swap", f"{0:020d}.log.cleaned", f"{0:020d}.log.deleted",
        "1.log", "99999999999999999999.log", "x.index", "٠" * 20 + ".log",
    ],
)  # fmt: skip
def test_unusual_names_require_a_survey(name: str, log_dir: Path) -> None:
    (log_dir / "orders-0" / name).write_bytes(b"x")
    listed, surveyed = both(log_dir)
    assert listed is None
    assert surveyed.problems or surveyed.leftovers


@pytest.mark.parametrize(
    "name", [f"{0:020d}.log", f"{0:020d}.index", f"{240:020d}.snapshot", names.LEADER_EPOCHS, names.PARTITION_METADATA]
)
def test_names_that_are_not_regular_files_require_a_survey(name: str, log_dir: Path) -> None:
    (log_dir / "orders-0" / name).unlink(missing_ok=True)
    (log_dir / "orders-0" / name).symlink_to("elsewhere")
    assert both(log_dir)[0] is None


def test_a_log_that_is_too_large_requires_a_survey(log_dir: Path) -> None:
    os.truncate(log_dir / "orders-0" / f"{0:020d}.log", 2**31)
    assert both(log_dir)[0] is None


def test_damage_requires_a_survey(log_dir: Path) -> None:
    (log_dir / "orders-0" / names.LEADER_EPOCHS).write_text("7\n")
    assert both(log_dir)[0] is None


def test_a_partition_without_a_segment_requires_a_survey(log_dir: Path) -> None:
    for path in (log_dir / "orders-0").glob("*.log"):
        path.unlink()
    assert both(log_dir)[0] is None


def test_operations_do_not_grow_with_segments(log_dir: Path) -> None:
    [facts] = survey_log_dirs(LOCAL, [str(log_dir)])
    fs = Counting()
    assert list_partition(fs, facts, facts.partitions[0])
    assert fs.counts.total() <= 16
    listed = fs.counts.total()
    survey_partition(fs, facts, facts.partitions[0])
    assert fs.counts.total() - listed > 4 * SEGMENTS
