"""Rounds by the rules of cleaners before Kafka 3.1 (CLEANING.md 16): retained records, and results that the proof
rejects.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from keytail.compact import cleaner
from keytail.compact.cleaner import clean_partition, install, next_pass
from keytail.compact.fan_out.stages import Sizes
from keytail.compact.task import CleaningTask
from keytail.compact.write_phase.rewrite import Rewriter
from keytail.errors import KeytailError
from keytail.kernels.rewriting import rows as row_kernels
from keytail.log.fs import LOCAL
from keytail.log.partition import SegmentFacts
from tests.chance import SEED, draws
from tests.compact.fan_out.in_process import InProcess
from tests.compact.fan_out.test_stages import fan_out_passes, remove_scratch
from tests.compact.logs import RandomLog, task_for, write_log
from tests.compact.test_passes import files_of
from tests.compact.test_removal_limit import mixed_log
from tests.reference.batches import Batch, Rec, decode_log, encode_batch, encode_marker
from tests.reference.cleaner import Segment, clean
from tests.reference.codecs import GZIP

NOW = 1_750_000_000_000
RETENTION = 1000
HORIZON = 0x40


@pytest.mark.parametrize("case", range(draws(60)))
@pytest.mark.parametrize("message_format", ["v2", "keep"])
def test_rounds_by_one_task_and_by_fan_out_have_the_result_of_the_model(
    case: int, message_format: str, tmp_path: Path
) -> None:
    print("seed", SEED, "case", case)
    rng = random.Random(SEED * 1000 + case)
    log = mixed_log(rng)
    ages_ms = [0, 1, RETENTION - 1, RETENTION, RETENTION + 1, 10**7]
    log.segments = [replace(segment, mtime_ms=NOW - rng.choice(ages_ms)) for segment in log.segments]
    facts = write_log(str(tmp_path / "one" / "t-0"), log.segments)
    write_log(str(tmp_path / "many" / "t-0"), log.segments)
    base, end = log.segments[0].base_offset, log.segments[-1].base_offset
    first_dirty = rng.choice([base, *(segment.base_offset for segment in log.segments[:-1])])
    config = {"delete_retention_ms": RETENTION, "segment_bytes": 1}
    fields = {"first_dirty": first_dirty, "config": config, "message_format": message_format}
    expected = clean(
        log.segments, first_dirty=first_dirty, first_uncleanable=end, now_ms=NOW, delete_retention_ms=RETENTION,
        segment_bytes=1, index_interval_bytes=64, log_start_offset=base, by_file_time=True,
        keep_magic=message_format == "keep",
    )  # fmt: skip
    task = task_for(str(tmp_path / "one" / "t-0"), log, facts, NOW, by_file_time=True, **fields)
    result = clean_partition(LOCAL, task)
    made = {segment.base_offset: segment for segment in expected.segments}
    for group in result.groups:
        for out in group.segments:
            files = {file.suffix: (tmp_path / "one" / "t-0" / file.name).read_bytes() for file in out.files}
            assert files[".log"] == made[out.base_offset].log, out.base_offset
            assert files.get(".txnindex", b"") == made[out.base_offset].txn_index
    install(LOCAL, task, result)
    many = replace(task, partition_path=str(tmp_path / "many" / "t-0"), max_scratch_bytes=rng.choice([None, 1]))
    fan_out_passes(many, InProcess(tmp_path / "cells"), Sizes(slice_bytes=1, shards=2))
    remove_scratch(tmp_path / "many" / "t-0")
    assert files_of(tmp_path / "many" / "t-0") == files_of(tmp_path / "one" / "t-0")


def some_partition(path: Path) -> tuple[RandomLog, tuple[SegmentFacts, ...]]:
    """Write tombstones at 1, 4 and 7, and markers without data at 2, 5 and 8, in segments of different file times."""
    segments, ages_ms = [], (10**6, RETENTION, RETENTION - 1)
    for number, age_ms in enumerate(ages_ms):
        at = 3 * number
        records = [Rec(at, NOW, b"v%d" % number, b"1"), Rec(at + 1, NOW, b"t%d" % number, None)]
        log = encode_batch(records) + encode_marker(at + 2, NOW, commit=True, producer_id=number, producer_epoch=0)
        segments.append(Segment(at, log, mtime_ms=NOW - age_ms))
    segments.append(Segment(9, encode_batch([Rec(9, NOW, b"w", b"1")]), mtime_ms=NOW))
    segments.append(Segment(10, b"", mtime_ms=NOW))
    return RandomLog(segments, [], 10, {}), write_log(str(path), segments)


def task_of(path: Path, **fields: object) -> CleaningTask:
    log, facts = some_partition(path)
    fields = {"first_dirty": 9, "config": {"delete_retention_ms": 0}, "by_file_time": True, **fields}
    return task_for(str(path), log, facts, NOW, **fields)


def left(path: Path) -> list[Batch]:
    return [batch for log in sorted(path.glob("*.log")) for batch in decode_log(log.read_bytes())]


def round_of(task: CleaningTask) -> list[Batch]:
    while True:
        result = clean_partition(LOCAL, task)
        install(LOCAL, task, result)
        if result.rest is None:
            return left(Path(task.partition_path))
        task = next_pass(task, result)


def offsets(batches: list[Batch]) -> list[int]:
    return [record.offset for batch in batches for record in batch.records]


@pytest.mark.parametrize(
    ("first_dirty", "retention_ms", "stay"),
    [
        (9, 0, [0, 3, 6, 9]),  # tombstones and markers are also removed if the file time equals the horizon
        (9, 1, [0, 3, 6, 7, 8, 9]),
        (9, 2, [0, 3, 4, 5, 6, 7, 8, 9]),
        (6, 0, [0, 3, 6, 7, 8, 9]),
        (4, 0, [0, 3, 6, 7, 8, 9]),  # the second segment is then the last one of the clean section
        (3, 0, [0, 3, 4, 5, 6, 7, 8, 9]),
        (3, 10**6, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (0, 0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),  # there is no clean section
    ],
)
def test_a_file_that_is_not_newer_than_the_horizon_loses_tombstones_and_markers(
    first_dirty: int, retention_ms: int, stay: list[int], tmp_path: Path
) -> None:
    config = {"delete_retention_ms": retention_ms}
    batches = round_of(task_of(tmp_path / "t-0", first_dirty=first_dirty, config=config))
    assert offsets(batches) == stay
    assert not [batch for batch in batches if batch.attributes & HORIZON]


def test_horizons_are_copied_dropped_by_rewrites_and_never_applied(tmp_path: Path) -> None:
    over, far = {"delete_horizon_ms": NOW - 10**6}, {"delete_horizon_ms": NOW + 10**6}
    old = encode_batch([Rec(0, NOW - 7, b"gone", None), Rec(1, NOW - 5, b"a", b"1")], **far)
    copied = encode_batch([Rec(2, NOW, b"b", None)], **over)
    rewritten = encode_batch(
        [Rec(3, NOW - 9, b"c", b"1"), Rec(4, NOW - 6, b"d", b"1"), Rec(5, NOW - 3, b"e", None)], codec=GZIP, **over
    )
    marker = encode_marker(6, NOW, commit=True, producer_id=4, producer_epoch=0, **over)
    newer = encode_batch([Rec(7, NOW, b"c", b"2")])
    segments = [Segment(0, old, mtime_ms=NOW - 10), Segment(2, copied + rewritten + marker + newer, mtime_ms=NOW - 9)]
    segments.append(Segment(8, b"", mtime_ms=NOW))
    log, path = RandomLog(segments, [], 8, {}), tmp_path / "t-0"
    facts = write_log(str(path), segments)
    config = {"delete_retention_ms": 0}
    batches = round_of(task_for(str(path), log, facts, NOW, first_dirty=2, config=config, by_file_time=True))
    raw = b"".join(file.read_bytes() for file in sorted(path.glob("*.log")))
    assert copied in raw and marker in raw
    assert [(b.base_offset, b.attributes & HORIZON, offsets([b]), b.base_timestamp) for b in batches] == [
        (0, 0, [1], NOW - 5),
        (2, HORIZON, [2], NOW - 10**6),
        (3, 0, [4, 5], NOW - 6),
        (6, HORIZON, [6], NOW - 10**6),
        (7, 0, [7], NOW),
    ]


def test_the_last_batch_of_the_range_is_removed_when_it_is_empty(tmp_path: Path) -> None:
    """Only Kafka 4.x retains the last batch of the range (CLEANING.md 6.1b)."""
    source = encode_batch([Rec(0, NOW, b"a", b"1")]) + encode_batch([Rec(1, NOW, b"b", None)])
    segments = [Segment(0, source, mtime_ms=0), Segment(2, b"")]
    log, facts = RandomLog(segments, [], 2, {}), write_log(str(tmp_path / "t-0"), segments)
    assert offsets(round_of(task_for(str(tmp_path / "t-0"), log, facts, NOW, first_dirty=0, by_file_time=True))) == [0]
    assert [batch.base_offset for batch in left(tmp_path / "t-0")] == [0]


@pytest.mark.parametrize("bound", [None, 1])
def test_a_second_round_removes_expired_tombstones_and_markers(tmp_path: Path, bound: int | None) -> None:
    path = tmp_path / "t-0"
    first = round_of(task_of(path, first_dirty=0, max_scratch_bytes=bound, config={"segment_bytes": 1}))
    assert offsets(first) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    logs = sorted(path.glob("*.log"))
    times = {int(file.stem): file.stat().st_mtime_ns // 10**6 for file in logs}
    segments = [Segment(base, (path / f"{base:020d}.log").read_bytes(), mtime_ms=ms) for base, ms in times.items()]
    log, facts = RandomLog(segments, [], 10, {}), write_log(str(path), segments)
    config = {"delete_retention_ms": RETENTION - 1, "segment_bytes": 1}
    task = task_for(str(path), log, facts, NOW, first_dirty=9, config=config, by_file_time=True)
    assert offsets(round_of(task)) == [0, 3, 4, 5, 6, 7, 8, 9]


def _of_newest_file(task: CleaningTask) -> int:
    return task.segments[-1].log_mtime_ns // 1_000_000 - task.config.delete_retention_ms


def _with_fact(fact: int, value: int) -> Callable:
    decide_rows = Rewriter._decide_rows

    def with_wrong_fact(self, *arguments):
        self._facts[fact] = value
        return decide_rows(self, *arguments)

    return with_wrong_fact


@pytest.mark.parametrize(("first_dirty", "offset"), [(0, 2), (1, 5)])
def test_the_proof_rejects_removal_by_the_time_of_another_file(
    first_dirty: int, offset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaner, "_file_horizon_ms", _of_newest_file)
    with pytest.raises(KeytailError, match="a marker was removed before its delete horizon") as caught:
        clean_partition(LOCAL, task_of(tmp_path / "t-0", first_dirty=first_dirty))
    assert caught.value.offset == offset
    assert not list((tmp_path / "t-0").glob("*.clean"))


def test_the_proof_rejects_removal_by_the_time_of_another_file_without_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaner, "_file_horizon_ms", _of_newest_file)
    segments = [Segment(0, encode_batch([Rec(0, NOW, b"a", None)]), mtime_ms=NOW - 9), Segment(1, b"", mtime_ms=NOW)]
    log, facts = RandomLog(segments, [], 1, {}), write_log(str(tmp_path / "t-0"), segments)
    task = task_for(
        str(tmp_path / "t-0"), log, facts, NOW, first_dirty=0, config={"delete_retention_ms": 0}, by_file_time=True
    )
    with pytest.raises(KeytailError, match="the latest record of its key is not in the output") as caught:
        clean_partition(LOCAL, task)
    assert caught.value.offset == 0


def test_the_proof_rejects_a_cleaner_that_applies_horizons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = {"delete_horizon_ms": NOW - 1}
    marker = encode_marker(2, NOW, commit=True, producer_id=4, producer_epoch=0, **over)
    for batch, text in (
        (encode_batch([Rec(1, NOW, b"b", None)], **over), "the latest record of its key is not in the output"),
        (marker, "a marker was removed before its delete horizon"),
    ):
        path = tmp_path / text[:8] / "t-0"
        segments = [Segment(0, encode_batch([Rec(0, NOW, b"a", b"1")]) + batch, mtime_ms=NOW - 9), Segment(3, b"")]
        log, facts = RandomLog(segments, [], 3, {}), write_log(str(path), segments)
        task = task_for(str(path), log, facts, NOW, first_dirty=0, by_file_time=True)
        with monkeypatch.context() as patch:
            patch.setattr(Rewriter, "_decide_rows", _with_fact(row_kernels.BY_FILE_TIME, 0))
            with pytest.raises(KeytailError, match=text):
                clean_partition(LOCAL, task)
        assert len(round_of(task)) == 2


def test_the_proof_rejects_a_cleaner_that_writes_or_keeps_a_horizon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Rewriter._build_blocks

    def with_horizon(self, *arguments, **named):
        self._horizon_ms, self._by_file_time = NOW + 5, False
        return build(self, *arguments, **named)

    monkeypatch.setattr(Rewriter, "_build_blocks", with_horizon)
    values = [Rec(0, NOW, b"a", b"1"), Rec(1, NOW, b"b", None), Rec(2, NOW, b"a", b"2")]
    for fields in ({}, {"delete_horizon_ms": NOW + 7}):
        path = tmp_path / str(len(fields)) / "t-0"
        segments = [Segment(0, encode_batch(values, **fields), mtime_ms=NOW), Segment(3, b"")]
        log, facts = RandomLog(segments, [], 3, {}), write_log(str(path), segments)
        with pytest.raises(KeytailError, match="a batch's delete horizon is missing or should not be there"):
            clean_partition(LOCAL, task_for(str(path), log, facts, NOW, first_dirty=0, by_file_time=True))


def test_the_proof_rejects_a_rebuilt_batch_that_lost_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = Rewriter._decide_rows

    def without_mode(self, *arguments):
        self._by_file_time = False  # treats batches with tombstones as if they needed a horizon
        self._facts[row_kernels.BY_FILE_TIME] = 0
        return decide(self, *arguments)

    monkeypatch.setattr(Rewriter, "_decide_rows", without_mode)
    batch = encode_batch([Rec(0, NOW, b"a", None)], extra_attributes=0x100)  # a rewrite does not keep this attribute
    segments = [Segment(0, batch, mtime_ms=NOW), Segment(1, b"")]
    log, facts = RandomLog(segments, [], 1, {}), write_log(str(tmp_path / "t-0"), segments)
    with pytest.raises(KeytailError, match="a batch from which nothing was removed differs from the source's bytes"):
        clean_partition(LOCAL, task_for(str(tmp_path / "t-0"), log, facts, NOW, first_dirty=0, by_file_time=True))
