"""A measurement equals what a compaction at the same clock leaves, and writes nothing."""

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
from tests.compact.measure.logs import outputs_of, random_task, tombstones_in
from tests.log_dirs import snapshot


@pytest.mark.parametrize("case", range(draws(160)))
def test_a_measurement_equals_the_compaction(case: int, tmp_path: Path) -> None:
    rng = random.Random(SEED * 1000 + case)
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
    result = clean_partition(LOCAL, task)
    assert found.end_offset == result.end_offset
    assert found.bytes_after.estimate == found.bytes_after.low == found.bytes_after.high == result.bytes_after
    assert found.records_after.estimate == result.records_after
    assert found.records_before == result.records_before
    assert found.segments_after == result.segments_after
    assert (found.tombstones_removed, found.markers_removed) == (result.tombstones_removed, result.markers_removed)
    assert found.tombstones_after.estimate == tombstones_in(outputs_of(path, result))
