"""The contents of a segment, compared with the reference reader, for golden and generated logs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import xxhash

from keytail.errors import CorruptLog
from keytail.log.fs import LOCAL
from keytail.log.records.chunk import SegmentReader
from keytail.log.records.contents import SegmentContents, contents_of
from tests.golden import unpack
from tests.log_dirs import random_records, write_log_dir
from tests.reference.batches import decode_log

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def of(partition: Path, base: int, chunk_bytes: int = 1 << 23) -> SegmentContents:
    return contents_of(LOCAL, str(partition), base, SegmentReader(LOCAL, chunk_bytes=chunk_bytes))


@pytest.mark.long
def test_all_golden_segments_equal_the_reference_reader(tmp_path: Path) -> None:
    logs = [log for log in unpack(tmp_path).glob("*-*/*.log") if not log.parent.name.startswith("__cluster")]
    assert len(logs) > 50
    seen: Counter[str] = Counter()
    for log in sorted(logs):
        data = log.read_bytes()
        batches = decode_log(data)
        records = [record for batch in batches if not batch.control for record in batch.records]
        found = of(log.parent, int(log.stem), chunk_bytes=4096)
        times = [record.timestamp for record in records]
        assert found.log_bytes == len(data)
        assert found.next_offset == (batches[-1].last_offset + 1 if batches else int(log.stem))
        assert found.records == len(records)
        assert found.tombstones == sum(r.key is not None and r.value is None for r in records)
        assert (found.min_timestamp_ms, found.max_timestamp_ms) == (
            min(times, default=None), max(times, default=None)
        )  # fmt: skip
        assert found.batches_by_codec == Counter(CODECS[batch.attributes & 7] for batch in batches)
        assert found.batches_by_magic == Counter(2 for _ in batches)
        assert found.xxh3_128 == xxhash.xxh3_128(data).hexdigest()
        assert found.index_status == "good", log
        seen.update(found.batches_by_codec)
    assert set(seen) == set(CODECS)


@pytest.fixture
def partition(tmp_path: Path) -> Path:
    return write_log_dir(tmp_path / "logs", {"t-0": random_records(1, 400)}) / "t-0"


def test_a_missing_index_is_reported(partition: Path) -> None:
    (partition / f"{100:020d}.timeindex").unlink()
    assert of(partition, 100).index_status == "missing"
    assert of(partition, 0).index_status == "good"


@pytest.mark.parametrize("entry", [(5, 10**6), (2**20, 5), (-5, 5)])
def test_an_index_with_an_entry_outside_its_segment_is_bad(partition: Path, entry: tuple[int, int]) -> None:
    relative, position = entry
    packed = relative.to_bytes(4, "big", signed=True) + position.to_bytes(4, "big")
    (partition / f"{100:020d}.index").write_bytes(packed)
    assert of(partition, 100).index_status == "bad"


@pytest.mark.parametrize("suffix", ["index", "timeindex"])
def test_an_index_that_ends_with_an_incomplete_entry_is_bad(partition: Path, suffix: str) -> None:
    index = partition / f"{100:020d}.{suffix}"
    index.write_bytes(index.read_bytes() + bytes(3))
    assert of(partition, 100).index_status == "bad"


def test_zeros_after_the_entries_of_an_active_segment_are_free_space(partition: Path) -> None:
    index = partition / f"{300:020d}.index"
    index.write_bytes(index.read_bytes() + bytes(8 * 100))
    assert of(partition, 300).index_status == "good"


def test_a_damaged_segment_is_an_error(partition: Path) -> None:
    log = partition / f"{100:020d}.log"
    data = bytearray(log.read_bytes())
    data[200] ^= 1
    log.write_bytes(data)
    with pytest.raises(CorruptLog):
        of(partition, 100)
