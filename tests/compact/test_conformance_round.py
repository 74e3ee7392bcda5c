"""Behaviours of tests/CONFORMANCE.md, by number, on small logs written by hand. Random logs in test_cleaner.py and in
tests/interop cover more of the same code.
"""

from __future__ import annotations

import functools
import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from keytail.compact import cleaner
from keytail.compact.cleaner import clean_partition, install
from keytail.compact.task import CleaningResult
from keytail.format.batch import BATCH_TABLE
from keytail.format.index import parse_offset_index, parse_time_index
from keytail.log.fs import LOCAL
from keytail.log.index.indexer import SegmentIndexer
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import SegmentFacts, survey_partition
from keytail.log.records.chunk import SegmentReader
from tests.compact.logs import RandomLog, task_for, write_log
from tests.reference.batches import Batch, Rec, decode_log, encode_batch, encode_marker
from tests.reference.cleaner import Aborted, Segment

NOW = 1_750_000_000_000
DAY_MS = 86_400_000


def one(offset: int, key: bytes | None = b"k", value: bytes | None = b"v", **fields: int) -> bytes:
    return encode_batch([Rec(offset, fields.pop("timestamp", NOW), key, value)], **fields)


class Log:
    """A partition on disk: closed segments by base offset, and an empty active segment at `end`."""

    def __init__(self, tmp_path: Path, segments: dict[int, bytes], end: int) -> None:
        self.path = str(tmp_path / "t-0")
        self.end = end
        made = [Segment(base, data, 0, 0, NOW - DAY_MS) for base, data in segments.items()]
        self.segments = [*made, Segment(end, b"", 0, 0, NOW)]
        self.facts: tuple[SegmentFacts, ...] = write_log(self.path, self.segments)

    def round(self, first_dirty: int = 0, **fields: object) -> CleaningResult:
        log = RandomLog(self.segments, [], self.end, {})
        task = task_for(self.path, log, self.facts, fields.pop("now_ms", NOW), first_dirty=first_dirty, **fields)
        result = clean_partition(LOCAL, task)
        install(LOCAL, task, result)
        self.survey()
        return result

    def survey(self) -> None:
        listing = survey_log_dirs(LOCAL, [os.path.dirname(self.path)])[0]
        self.facts = survey_partition(LOCAL, listing, listing.partitions[0]).segments

    def batches(self) -> list[Batch]:
        return [batch for data in self.logs().values() for batch in decode_log(data)]

    def offsets(self) -> list[int]:
        return [record.offset for batch in self.batches() for record in batch.records]

    def logs(self) -> dict[int, bytes]:
        names = sorted(name for name in os.listdir(self.path) if name.endswith(".log"))
        return {int(name[:20]): Path(self.path, name).read_bytes() for name in names}


def test_offsets_far_apart_inside_one_segment_are_mapped(tmp_path: Path) -> None:
    """9: nearly 2^31 offsets inside one segment, far from offset 0, are mapped like a smaller span."""
    base, far = 2**40, 2**40 + 2**31 - 1
    log = Log(tmp_path, {base: one(base, b"a") + one(base + 1, b"b") + one(far, b"a")}, far + 1)
    assert log.round(first_dirty=base).end_offset == far + 1
    assert log.offsets() == [base + 1, far]


@pytest.mark.parametrize("starts", [(0, 1000), (0, 1000, 5_000_000_000)])
def test_gaps_between_segments_do_not_stop_the_next_round(tmp_path: Path, starts: tuple[int, ...]) -> None:
    """10: after a gap of offsets between segments, or before the active one, the next round begins after the gap."""
    end = starts[-1] + 500
    log = Log(tmp_path, {start: one(start) for start in starts}, end)
    assert log.round().end_offset == end
    assert log.offsets() == [starts[-1]]


def test_every_round_with_a_small_map_cleans_some_records(tmp_path: Path) -> None:
    """8, 13: a full map ends the round inside a segment; later records are retained, and cleaned by later rounds."""
    keys = [b"k%d" % (n % 6) for n in range(24)]
    segments = {k: b"".join(one(n, keys[n]) for n in range(k, k + 12)) for k in (0, 12)}
    log, at, ends = Log(tmp_path, segments, 24), 0, []
    while at < 24:
        before = log.offsets()
        at = log.round(at, map_max_entries=4).end_offset
        ends.append(at)
        assert [n for n in log.offsets() if n >= at] == [n for n in before if n >= at]
    assert ends == sorted(set(ends))
    assert len(ends) > 2
    assert log.offsets() == list(range(18, 24))


def test_a_tombstone_also_removes_its_key_from_the_clean_section(tmp_path: Path) -> None:
    """15: no value of a deleted key remains in a cleanable segment, dirty or clean."""
    log = Log(tmp_path, {0: one(0, b"a") + one(1, b"b"), 2: one(2, b"a") + one(3, b"a", None) + one(4, b"c")}, 5)
    log.round(first_dirty=2)
    assert [(r.offset, r.value) for b in log.batches() for r in b.records] == [(1, b"v"), (3, None), (4, b"v")]


@pytest.mark.parametrize("timestamp", [0, NOW - 1000 * DAY_MS, NOW + DAY_MS])
def test_a_tombstone_of_any_timestamp_is_retained_until_its_horizon(tmp_path: Path, timestamp: int) -> None:
    """16, 22: the horizon, now + delete.retention.ms, is set once, as the base timestamp. The tombstone is removed only
    after the horizon has passed.
    """
    log = Log(tmp_path, {0: one(0, b"a", None, timestamp=timestamp) + one(1, b"b")}, 2)
    config = {"delete_retention_ms": 1000}
    for now_ms, there in ((NOW, True), (NOW + 999, True), (NOW + 1000, False)):
        log.round(now_ms=now_ms, config=config)
        assert log.offsets() == [0, 1] if there else [1]
        if there:
            tombstone = log.batches()[0]
            assert (tombstone.delete_horizon_ms, tombstone.records[0].timestamp) == (NOW + 1000, timestamp)


def test_segments_from_the_uncleanable_offset_on_are_not_changed(tmp_path: Path) -> None:
    """17: the files of these segments are unchanged, and their records supersede no other record."""
    log = Log(tmp_path, {0: one(0) + one(1), 2: one(2) + one(3)}, 4)
    untouched = Path(log.path, f"{2:020d}.log")
    before = (untouched.read_bytes(), os.stat(untouched).st_ino, os.stat(untouched).st_mtime_ns)
    log.round(first_uncleanable=2)
    assert log.offsets() == [1, 2, 3]
    assert (untouched.read_bytes(), os.stat(untouched).st_ino, os.stat(untouched).st_mtime_ns) == before


def test_the_counters_of_a_round_match_the_disk(tmp_path: Path) -> None:
    """12, 18, 41: the counters include the clean section, and the files have no padding."""
    segments = {0: one(0, b"a") + one(1, b"b"), 2: one(2, b"a") + one(3, b"a", None) + one(4, b"c")}
    log = Log(tmp_path, segments, 5)
    result = log.round(first_dirty=2)
    assert (result.records_before, result.records_after) == (5, 3) == (5, len(log.offsets()))
    assert result.bytes_before == sum(map(len, segments.values()))
    assert result.bytes_after == sum(map(len, log.logs().values())) == sum(b.size for b in log.batches())
    assert (result.segments_before, result.segments_after) == (3, len(log.logs()))


@pytest.mark.parametrize("codec", range(5))
def test_duplicates_inside_one_batch_are_removed(tmp_path: Path, codec: int) -> None:
    """20, 21: the latest record of each key is retained at its offset; the batch keeps its offsets, sequence and codec.
    """
    records = [Rec(n, NOW + n, b"k%d" % (n % 3), b"value %d" % n) for n in range(10, 40)]
    fields = {"producer_id": 7, "producer_epoch": 2, "base_sequence": 55, "leader_epoch": 4}
    log = Log(tmp_path, {10: encode_batch(records, codec=codec, **fields) + one(40, b"other", codec=codec)}, 41)
    copied = log.logs()[10][-len(one(40, b"other", codec=codec)) :]
    log.round(first_dirty=10)
    rebuilt = log.batches()[0]
    assert [(r.offset, r.value) for r in rebuilt.records] == [(n, b"value %d" % n) for n in (37, 38, 39)]
    assert (rebuilt.base_offset, rebuilt.last_offset, rebuilt.codec) == (10, 39, codec)
    assert {name: getattr(rebuilt, name) for name in fields} == fields
    assert log.logs()[10].endswith(copied)


@pytest.mark.parametrize("codec", [0, 4])
def test_batches_larger_than_buffers_and_the_topics_limit_are_cleaned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: int
) -> None:
    """35: batches larger than a chunk, or than a max.message.bytes that was lowered later, are cleaned."""
    small = functools.partial(SegmentReader, chunk_bytes=200, arena_bytes=200)
    monkeypatch.setattr(cleaner, "SegmentReader", small)
    noise = random.Random(1)
    records = [Rec(n, NOW, b"k%d" % (n % 2), noise.randbytes(5000)) for n in range(8)]
    log = Log(tmp_path, {0: encode_batch(records, codec=codec) + one(8)}, 9)
    log.round(config={"max_message_bytes": 100})
    assert log.offsets() == [6, 7, 8]


def test_skipped_batches_do_not_grow_buffers(tmp_path: Path) -> None:
    """33: aborted data is not decompressed, so a chunk of such data needs no memory for its 40 MB."""
    peaks = []
    # a first round to warm up
    for n, (commit, batches) in enumerate(((False, 1), (False, 1), (False, 200), (True, 200))):
        fields = {"producer_id": 7, "producer_epoch": 0, "transactional": True, "codec": 4}
        data = [
            encode_batch([Rec(n, NOW, b"%d" % n, bytes(200_000))], base_sequence=n, **fields) for n in range(batches)
        ]
        data.append(encode_marker(batches, NOW, commit=commit, producer_id=7, producer_epoch=0))
        log = Log(tmp_path / str(n), {0: b"".join(data) + one(batches + 1)}, batches + 2)
        if not commit:
            entry = Aborted(7, 0, batches, batches + 1)
            Path(log.path, f"{0:020d}.txnindex").write_bytes(entry.encode())
            log.survey()
        tracemalloc.start()
        log.round()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert log.offsets() == [*(range(batches) if commit else ()), batches, batches + 1]
    _, few, many, opened = peaks
    assert many < few + 1_000_000  # the proof opens the batches one at a time
    assert opened > few + 8_000_000  # two arenas have at most 4 MiB each
    assert opened < few + 12_000_000


def test_empty_segments_are_merged_across_any_span(tmp_path: Path) -> None:
    """38, 39: a group spans at most 2^31 - 1 offsets, but segments without bytes are always added to it, so that such
    segments do not accumulate.
    """
    bases = [0, 10, 2**32, 2**33]
    log = Log(tmp_path, {0: one(0, b"a"), 10: b"", 2**32: b"", 2**33: one(2**33, b"b")}, 2**33 + 5)
    log.round()
    assert list(log.logs()) == [0, 2**33, 2**33 + 5]
    assert log.offsets() == [bases[0], bases[3]]


def batch_rows(*rows: tuple[int, int, int, int]) -> np.ndarray:
    """Return rows of (position, size, last offset, max timestamp)."""
    table, columns = np.zeros(len(rows), BATCH_TABLE), zip(*rows, strict=True)
    for name, column in zip(("position", "size_bytes", "last_offset", "max_timestamp_ms"), columns, strict=True):
        table[name] = column
    table["base_offset"] = table["last_offset"]
    return table


def test_index_entries_are_added_after_more_bytes_than_the_interval(tmp_path: Path) -> None:
    """67: an entry is added after more bytes than the interval, and never for the first batch; the time index gets a
    last entry.
    """
    indexer = SegmentIndexer(0, 200, 1 << 20)
    rows = [(0, 100, 1, 50), (100, 100, 2, 60), (200, 100, 3, 60), (300, 100, 4, 55), (400, 100, 5, 70)]
    indexer.add(batch_rows(*rows))
    offsets, times = indexer.close()
    assert [tuple(entry) for entry in parse_offset_index(offsets).tolist()] == [(4, 300)]
    assert [tuple(entry) for entry in parse_time_index(times).tolist()] == [(60, 2), (70, 5)]
