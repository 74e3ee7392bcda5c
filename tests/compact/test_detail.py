"""The counts of a rewrite for each source segment, compared with a simple count over the files before and after."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.compact import cleaner
from keytail.compact.cleaner import clean_partition, install
from keytail.compact.detail import MAX_PARTS, Part, detail_of_result, parts_of
from keytail.compact.task import SourceCounts
from keytail.format.batch import BATCH_TABLE
from keytail.log.fs import LOCAL
from keytail.log.partition import SegmentFacts
from keytail.log.records.chunk import SegmentReader
from tests.chance import SEED, draws
from tests.compact.test_passes import random_task
from tests.interop.conftest import fast_dir  # noqa: F401
from tests.reference.batches import Batch, decode_log


def batches_of(path: str) -> dict[int, list[Batch]]:
    """Return the batches of each log by the base offset of its file."""
    return {int(file.stem): decode_log(file.read_bytes()) for file in sorted(Path(path).glob("*.log"))}


@pytest.mark.parametrize("case", range(draws(25)))
def test_records_and_horizons_are_reported_by_source(
    case: int, fast_dir: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    """In every second case, a segment is read in several chunks."""
    print("seed", SEED, "case", case)
    if case % 2:
        monkeypatch.setattr(cleaner, "SegmentReader", partial(SegmentReader, chunk_bytes=300, arena_bytes=200))
    rng = random.Random(SEED * 1000 + case)
    task = random_task(rng, str(fast_dir / "t-0"), rng.choice(["kafka", "measured"]))
    before = batches_of(task.partition_path)
    result = clean_partition(LOCAL, task)
    install(LOCAL, task, result)
    after = [batch for batches in batches_of(task.partition_path).values() for batch in batches]
    bases = [segment.base_offset for segment in task.segments]
    assert [source.segment for source in result.sources] == list(range(len(result.sources)))
    for source in result.sources:
        first = bases[source.segment]
        end = bases[source.segment + 1] if source.segment + 1 < len(bases) else 2**63
        assert source.records == sum(len(batch.records) for batch in before[first])
        own = [batch for batch in after if first <= batch.base_offset < end]
        assert source.records_kept == sum(len(batch.records) for batch in own)
        horizons = [batch.base_timestamp for batch in own if batch.attributes & 0x40]
        assert source[3:] == (len(horizons), min(horizons, default=-1), max(horizons, default=-1))
    detail = detail_of_result(task, result, result.sources, {"map": 1.0})
    assert sum(part.log_bytes for part in detail.parts) == result.bytes_before
    assert detail.horizon_batches == sum(source.horizon_batches for source in result.sources)
    first_dirty = max([base for base in bases if base <= task.first_dirty_offset], default=bases[0])
    mapped = [base for base in bases if first_dirty <= base < result.end_offset]
    assert detail.dirty_records == sum(len(batch.records) for base in mapped for batch in before[base])


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 0x40, 0x44]), st.integers(0, 2**62)))))
def test_counts_of_several_tables_are_added(tables: list[list[tuple[int, int, int]]]) -> None:
    found = SourceCounts(3, 7, 0)
    for batches in tables:
        table = np.zeros(len(batches), BATCH_TABLE)
        for row, (records, attributes, time_ms) in zip(table, batches, strict=True):
            row["record_count"], row["attributes"], row["base_timestamp_ms"] = records, attributes, time_ms
        found = found.and_written(table)
    every = [batch for batches in tables for batch in batches]
    horizons = [time_ms for _, attributes, time_ms in every if attributes & 0x40]
    kept = sum(records for records, _, _ in every)
    assert found == (3, 7, kept, len(horizons), min(horizons, default=-1), max(horizons, default=-1))


def segment(base: int, size: int, time_ms: int) -> SegmentFacts:
    return SegmentFacts(base, size, 0, 0, 0, 0, time_ms, 0)


def test_many_segments_are_combined_into_few_parts() -> None:
    segments = [segment(10 * number, number, number) for number in range(10 * MAX_PARTS + 1)]
    parts = parts_of(segments, {number: SourceCounts(number, 10, 4) for number in range(20)})
    assert len(parts) <= MAX_PARTS
    assert sum(part.segments for part in parts) == len(segments)
    assert sum(part.log_bytes for part in parts) == sum(item.log_bytes for item in segments)
    assert parts[0] == Part(0, 11, 55, 10, 110, 44)
    assert parts[1].records is None, "the part with an uncounted segment must have no counts"
    assert parts_of([]) == ()
