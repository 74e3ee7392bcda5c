"""For each drawn batch, the sample finds which records a compaction retains, whichever other batches are drawn."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from keytail.compact.map_phase.reading import with_aborted
from keytail.compact.measure import sampling
from keytail.compact.measure.counting import CountingFileSystem
from keytail.compact.measure.estimating import rewrite_sample
from keytail.compact.measure.sampling import draw_positions, follow_sampled
from keytail.compact.plan import segments_between
from keytail.compact.task import CleaningTask
from keytail.errors import KeytailError
from keytail.log.fs import LOCAL
from keytail.log.records.chunk import SegmentReader
from tests.chance import SEED, chance, draws
from tests.compact.measure.logs import compact, outputs_of, random_task, tombstones_in
from tests.reference.legacy import decode_any_log


def batch_positions(task: CleaningTask) -> list[np.ndarray]:
    """Return the byte positions of the batches of each segment that is cleaned."""
    _, end = segments_between(task.segments, task.segments[0].base_offset, task.first_uncleanable_offset)
    found = []
    for segment in task.segments[:end]:
        path = task.path(segment.base_offset, ".log")
        tables = [chunk.table["position"].copy() for chunk in SegmentReader(LOCAL).chunks(path, segment.log_bytes)]
        found.append(np.concatenate([*tables, np.empty(0, np.int64)]))
    return found


def left_of(task: CleaningTask, positions: list[np.ndarray]) -> dict[int, tuple[float, ...]]:
    """Return, by base offset, the size of each batch at `positions`, and the bytes, records and tombstones that are
    retained.
    """
    fs, reader = CountingFileSystem(), SegmentReader(LOCAL)
    sample, transactions = with_aborted(fs, task, lambda found: follow_sampled(fs, task, reader, found, positions))
    if not any(map(len, positions)):
        return {}
    sizes, left = rewrite_sample(fs, task, reader, sample, transactions)
    offsets = np.concatenate(sample.draws).tolist()
    return {offset: (size, *row) for offset, size, row in zip(offsets, sizes, left.tolist(), strict=True)}


@pytest.mark.parametrize("case", range(draws(160)))
def test_each_batch_is_decided_as_in_a_compaction(case: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(SEED * 1000 + case)
    path = tmp_path / "t-0"
    task = random_task(rng, path)
    if task is None:
        return
    monkeypatch.setattr(sampling, "CHUNK_BYTES", rng.choice([200, 8 << 20]))
    positions = batch_positions(task)
    try:
        result = compact(task)
    except KeytailError as problem:
        with pytest.raises(type(problem)):
            left_of(task, positions)
        return
    if result is None:
        return
    log = outputs_of(path, result)
    by_batch = left_of(task, positions)
    assert sum(row[1] for row in by_batch.values()) == len(log)
    assert sum(row[2] for row in by_batch.values()) == sum(len(batch.records) for batch in decode_any_log(log))
    assert sum(row[3] for row in by_batch.values()) == tombstones_in(log)
    some = [np.array([at for at in found if rng.random() < 0.4], np.int64) for found in positions]
    assert left_of(task, some).items() <= by_batch.items()


def test_one_position_is_drawn_in_each_equal_part() -> None:
    rng = chance()
    sizes = [rng.choice([0, 1, 1000, rng.randrange(10**6)]) for _ in range(20)]
    positions = draw_positions(sizes, 100, rng)
    starts = np.cumsum([0, *sizes[:-1]])
    places = np.concatenate([start + found for start, found in zip(starts, positions, strict=True)])
    assert len(places) == 100
    parts = np.floor(places * 100 / sum(sizes)).astype(int)
    assert (np.abs(parts - np.arange(100)) <= 1).all()
    assert all((found >= 0).all() and (found < size).all() for found, size in zip(positions, sizes, strict=True))
