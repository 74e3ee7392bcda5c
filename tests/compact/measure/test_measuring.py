"""A measurement reports the result of a compaction at the same clock, and writes nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from keytail.compact.cleaner import clean_partition
from keytail.compact.measure.counting import CountingFileSystem
from keytail.compact.measure.measuring import measure_partition
from keytail.errors import KeytailError
from keytail.log.fs import LOCAL
from tests.chance import SEED, draws
from tests.compact.logs import RandomLog, task_for, write_log
from tests.compact.measure.logs import NOW, compact, outputs_of, random_task, tombstones_in
from tests.log_dirs import snapshot
from tests.reference.batches import Rec, encode_batch
from tests.reference.cleaner import Segment


@pytest.mark.parametrize("case", range(draws(160)))
def test_a_measurement_equals_the_compaction(case: int, tmp_path: Path) -> None:
    _compare(random.Random(SEED * 1000 + case), tmp_path)


def test_a_source_that_needs_more_time_index_entries_in_an_output_of_its_own_is_split(tmp_path: Path) -> None:
    """Batches before the source had a larger timestamp, so that the source's own batches got no entries."""
    _compare(random.Random(1_509_994_215_030), tmp_path)


def test_a_round_that_only_the_proof_refuses_is_measured(tmp_path: Path) -> None:
    """It would remove a tombstone before an older record of its key; the second such round also has a removal limit."""
    for seed in (2_887_009_124, 2_887_010_379):
        _compare(random.Random(seed), tmp_path / f"{seed}")
        task = random_task(random.Random(seed), tmp_path / "again" / f"{seed}")
        assert task is not None
        assert compact(task) is None


def _compare(rng: random.Random, tmp_path: Path) -> None:
    path = tmp_path / "t-0"
    task = random_task(rng, path)
    if task is None:
        return
    before = snapshot(path)
    try:
        found = measure_partition(CountingFileSystem(), task)
    except KeytailError as problem:
        with pytest.raises(type(problem)) as caught:
            clean_partition(LOCAL, task)
        assert str(caught.value) == str(problem)
        assert snapshot(path) == before
        return
    assert snapshot(path) == before
    result = compact(task)
    if result is None:
        return
    assert found.end_offset == result.end_offset
    assert found.bytes_after.estimate == found.bytes_after.low == found.bytes_after.high == result.bytes_after
    assert found.records_after.estimate == result.records_after
    assert found.records_before == result.records_before
    assert found.segments_after == result.segments_after
    assert (found.tombstones_removed, found.markers_removed) == (result.tombstones_removed, result.markers_removed)
    assert found.tombstones_after.estimate == tombstones_in(outputs_of(path, result))


@pytest.mark.parametrize("by_file_time", [False, True])
def test_tombstones_in_batches_that_are_copied_unopened_are_counted(by_file_time: bool, tmp_path: Path) -> None:
    """Batches are copied unopened if they have their delete horizon, or need none, and lose no record."""
    horizon = {} if by_file_time else {"delete_horizon_ms": NOW + 10**6}
    log = encode_batch([Rec(0, NOW, b"a", None), Rec(1, NOW, b"b", None), Rec(2, NOW, b"c", b"v")], **horizon)
    segments = [Segment(0, log, 0, 0, NOW - 5000), Segment(3, b"", 0, 0, NOW)]
    facts = write_log(str(tmp_path / "t-0"), segments)
    task = task_for(
        str(tmp_path / "t-0"), RandomLog(segments, [], 3, {}), facts, NOW, first_dirty=0, by_file_time=by_file_time
    )
    found = measure_partition(CountingFileSystem(), task)
    assert (found.bytes_after.estimate, found.tombstones_after.estimate) == (len(log), 2)
