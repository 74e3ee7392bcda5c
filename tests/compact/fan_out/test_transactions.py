"""Fan-out of logs with transactions, with one batch per slice, wrong indexes, and data that is aborted only for the
map.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from keytail.compact.cleaner import clean_partition, install
from keytail.compact.fan_out import stages
from keytail.compact.fan_out.proof import markers_of
from keytail.compact.fan_out.stages import Sizes, fan_out
from keytail.compact.fan_out.write import Written
from keytail.compact.saved_state import load_state
from keytail.compact.task import CleaningTask
from keytail.compact.write_phase.rewrite import Rewriter
from keytail.errors import KeytailError
from keytail.kernels.proof.markers import FIRST_DATA, OFFSET, PRODUCER
from keytail.kernels.rewriting import records as kernels
from keytail.log.fs import LOCAL
from keytail.log.partition import SegmentFacts
from tests.compact.fan_out.in_process import InProcess
from tests.compact.fan_out.test_stages import fan_out_passes, remove_scratch
from tests.compact.logs import RandomLog, task_for, write_log
from tests.compact.test_transactions import INDEXES, NOW, data, left, marker, partition
from tests.reference.batches import Rec, decode_log, encode_batch
from tests.reference.cleaner import Aborted, Segment
from tests.reference.indexing import index_files

ONE_BATCH = Sizes(slice_bytes=1, shards=2)


def same_as_one_task(make, tmp_path: Path, **fields) -> None:
    item, many = make(tmp_path / "one" / "t-0"), replace(make(tmp_path / "many" / "t-0"), **fields)
    install(LOCAL, item, clean_partition(LOCAL, item))
    fan_out_passes(many, InProcess(tmp_path / "cells"), ONE_BATCH)
    remove_scratch(tmp_path / "many" / "t-0")
    assert left(tmp_path / "many" / "t-0") == left(tmp_path / "one" / "t-0")


@pytest.mark.parametrize("bound", [None, 1])
@pytest.mark.parametrize(
    "indexes",
    [INDEXES, {}, {3: INDEXES[6], 6: INDEXES[6]}, {3: Aborted(2, 0, 3, 1).encode(), 6: INDEXES[6]},
     {3: Aborted(1, 0, 3, 4).encode(), 6: Aborted(3, 4, 6, 2**62).encode()}],
)  # fmt: skip
def test_wrong_indexes_are_corrected_as_by_one_task(
    indexes: dict[int, bytes], bound: int | None, tmp_path: Path
) -> None:
    """If the log contradicts the indexes, the survey runs again. Data and markers are in different groups and, with a
    `bound` of scratch space, in different passes.
    """

    def make(path: Path) -> CleaningTask:
        task = partition(path, indexes)
        return replace(task, grouping="kafka", config=replace(task.config, segment_bytes=1))

    same_as_one_task(make, tmp_path, max_scratch_bytes=bound)


def test_the_first_data_of_each_transaction_is_recorded(tmp_path: Path) -> None:
    """Data of a transaction without a marker is not recorded as the first data of another transaction."""
    path = tmp_path / "t-0"
    first = [data(0, b"a", 1), data(1, b"b", 1, 1), marker(2, 1, commit=False), data(3, b"c", 1, 2)]
    second = [data(4, b"d", 2), marker(5, 9, commit=True), marker(6, 1, commit=True)]
    segments = [Segment(0, b"".join(first)), Segment(4, b"".join(second)), Segment(7, b"")]
    log = RandomLog(segments, [], 7, {})
    task = task_for(str(path), log, write_log(str(path), segments), NOW, first_dirty=0)
    table = load_state(LOCAL, task, markers_of(LOCAL, task, "a"))
    assert table[:, [PRODUCER, OFFSET, FIRST_DATA]].tolist() == [[1, 2, 0], [1, 6, 3], [9, 5, -1]]


def inside(path: Path, first_dirty: int, last_stable_offset: int = 13) -> CleaningTask:
    """Write the example of CLEANING.md 11.4, with more records that its keys supersede or not; return the task."""
    log = [
        data(0, b"k", 7), marker(1, 7, commit=False),
        encode_batch([Rec(2, NOW, b"u", b"v"), Rec(3, NOW, b"u", b"v"), Rec(4, NOW, b"q", b"v")]),
        data(5, b"k", 7, 1), marker(6, 7, commit=True),
        data(7, b"q", 7), data(8, b"k", 7, 2), marker(9, 7, commit=True),
        data(10, b"x", 7, 3), encode_batch([Rec(11, NOW, b"x", b"w")]), marker(12, 7, commit=False),
        data(13, b"y", 7, 4), marker(14, 7, commit=True), encode_batch([Rec(15, NOW, b"z", b"v")]),
    ]  # fmt: skip
    whole = b"".join(log)
    index, _ = index_files(whole, 0, 1)
    segments = [Segment(0, whole, mtime_ms=NOW), Segment(16, b"", mtime_ms=NOW)]
    found = list(write_log(str(path), segments))
    entries = Aborted(7, 0, 1, 2).encode() + Aborted(7, 10, 12, last_stable_offset).encode()
    (path / f"{0:020d}.index").write_bytes(index)
    (path / f"{0:020d}.txnindex").write_bytes(entries)
    found[0] = SegmentFacts(0, len(whole), found[0].log_mtime_ns, len(index), 0, len(entries), NOW, -1)
    return task_for(str(path), RandomLog(segments, [], 16, {}), tuple(found), NOW, first_dirty=first_dirty)


@pytest.mark.parametrize("first_dirty", [0, 2, 3, 4, 5, 6, 8, 10, 11, 13, 15])
def test_a_round_from_inside_a_segment_treats_the_same_data_as_aborted(first_dirty: int, tmp_path: Path) -> None:
    same_as_one_task(lambda path: inside(path, first_dirty), tmp_path)


@pytest.mark.parametrize("last_stable_offset", [4, 9, 11])
def test_impossible_index_entries_are_corrected(last_stable_offset: int, tmp_path: Path) -> None:
    """An index entry is impossible if no batch is at its first offset, or if the batch there belongs to no transaction
    or to another one.
    """
    same_as_one_task(lambda path: inside(path, 0, last_stable_offset), tmp_path)


def test_the_example_retains_the_documented_records(tmp_path: Path) -> None:
    """In a round from offset 5, neither record 5 nor 8 is in the map, so both are retained; from 0, 8 supersedes 5."""
    for first_dirty, expected in ((5, [5, 8]), (0, [8])):
        path = tmp_path / str(first_dirty) / "t-0"
        fan_out_passes(inside(path, first_dirty), InProcess(tmp_path / "cells"), ONE_BATCH)
        records = [r for b in decode_log((path / f"{0:020d}.log").read_bytes()) for r in b.records]
        assert [r.offset for r in records if r.key == b"k"] == expected


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        (0, "a batch has data of an aborted transaction"),
        (5, "the marker of a transaction that had data is not in the output"),
        (1, "latest record of its key is not in the output"),
    ],
)
def test_the_proof_of_parts_finds_a_lost_record(
    lost: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data and markers are in different groups, so that the check of each group needs facts about the other group."""
    task = partition(tmp_path / "t-0", INDEXES)
    task = replace(task, grouping="kafka", config=replace(task.config, segment_bytes=1))
    decide_rows = Rewriter._decide_rows

    def wrong(self, chunk, *arguments):
        rows = decide_rows(self, chunk, *arguments)
        at = chunk.table["base_offset"] == lost
        rows.action[at] = kernels.COPY if lost == 0 else kernels.DROP
        return rows

    monkeypatch.setattr(Rewriter, "_decide_rows", wrong)
    with pytest.raises(KeytailError, match=text):
        fan_out(LOCAL, task, InProcess(tmp_path / "cells"), ONE_BATCH)


def test_the_proof_finds_a_retained_record_that_a_stage_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage clears the bits of one shard, which has the only record of a key."""
    task = inside(tmp_path / "t-0", 0)
    load = stages.write

    def with_fewer_bits(fs, part, attempt) -> Written:
        return load(fs, replace(part, bits=part.bits[:1]), attempt)

    monkeypatch.setattr(stages, "write", with_fewer_bits)
    with pytest.raises(KeytailError, match="latest record of its key is not in the output"):
        fan_out(LOCAL, task, InProcess(tmp_path / "cells"), ONE_BATCH)
