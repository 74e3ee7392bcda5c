"""In at least 95 % of random logs, the true value is within the bounds of the estimate."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from keytail.compact.measure.counting import CountingFileSystem
from keytail.compact.measure.estimating import estimate_partition
from keytail.compact.measure.measuring import measure_partition
from keytail.errors import Refused
from tests.chance import SEED, chance
from tests.compact.logs import RandomLog, task_for, write_log
from tests.compact.measure.logs import NOW, task_of_many_batches
from tests.compact.test_cleaner import one
from tests.reference.cleaner import Segment

FIGURES = ("bytes_after", "records_after", "tombstones_after")


def count_outside(directory: Path, logs: int) -> Counter[str]:
    """Return, for each figure, the number of logs in which the true value is outside the bounds."""
    found: Counter[str] = Counter()
    for case in range(logs):
        rng = random.Random(SEED * 10_000 + case)
        path = directory / "t-0"
        task = task_of_many_batches(rng, path)
        truth = measure_partition(CountingFileSystem(), task)
        draws = rng.choice([2, 10, 50, 200, 1000])
        estimate = estimate_partition(CountingFileSystem(), task, rng, draws=draws, measured_bytes=0)
        assert estimate.method == "estimated"
        assert (estimate.records_before, estimate.end_offset) == (truth.records_before, truth.end_offset)
        for name in FIGURES:
            interval = getattr(estimate, name)
            assert interval.low <= interval.estimate <= interval.high
            found[name] += not interval.low <= getattr(truth, name).estimate <= interval.high
        shutil.rmtree(path)
    return found


def test_the_true_value_is_between_the_bounds(tmp_path: Path) -> None:
    """If 5 % of all logs were outside the bounds, 14 of 40 would be outside in one of a billion runs."""
    found = count_outside(tmp_path, 40)
    assert all(found[name] < 14 for name in FIGURES), found


@pytest.mark.soak("test_the_true_value_is_between_the_bounds: 40 logs")
def test_the_true_value_is_between_the_bounds_in_95_percent_of_a_thousand_logs(tmp_path: Path) -> None:
    found = count_outside(tmp_path, 1000)
    print(f"outside the bounds, of 1,000 random logs: {dict(found)}")
    assert all(found[name] <= 50 for name in FIGURES), found


def test_a_small_partition_is_measured(tmp_path: Path) -> None:
    task = task_of_many_batches(chance(), tmp_path / "t-0")
    found = estimate_partition(CountingFileSystem(), task, chance())
    assert found == measure_partition(CountingFileSystem(), task)
    assert found.method == "measured"


def test_there_is_no_estimate_if_the_keys_of_the_sample_do_not_fit(tmp_path: Path) -> None:
    log = b"".join(one(offset, key=b"%d" % offset) for offset in range(500))
    segments = [Segment(0, log, 0, 0, NOW - 5000), Segment(500, b"", 0, 0, NOW)]
    path = str(tmp_path / "t-0")
    facts = write_log(path, segments)
    task = task_for(path, RandomLog(segments, [], 500, {}), facts, NOW, first_dirty=0, map_memory_bytes=4000)
    with pytest.raises(Refused, match="no estimate: the keys of the sample do not fit") as caught:
        estimate_partition(CountingFileSystem(), task, chance(), draws=400, measured_bytes=0)
    assert caught.value.slug == "sample-too-large"
    few = estimate_partition(CountingFileSystem(), task, chance(), draws=50, measured_bytes=0)
    assert few.records_after.low <= 500 <= few.records_after.high, "an estimate must need less memory than a compaction"
