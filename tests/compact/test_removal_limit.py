"""Tombstones and markers are retained until other replicas have been cleaned: comparisons with the reference model, and
results that the proof rejects.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from keytail.compact.cleaner import clean_partition, install
from keytail.compact.fan_out.stages import Sizes
from keytail.compact.removal_limit import RemovalLimit, cleaned_to, lowest_limit
from keytail.compact.task import NO_REMOVAL_LIMIT, CleaningTask
from keytail.compact.write_phase.rewrite import Rewriter
from keytail.errors import KeytailError
from keytail.kernels.rewriting import rows as row_kernels
from keytail.log.fs import LOCAL
from keytail.log.partition import PartitionFacts, SegmentFacts
from tests.chance import SEED, draws
from tests.compact.fan_out.in_process import InProcess
from tests.compact.fan_out.test_stages import fan_out_passes, remove_scratch
from tests.compact.logs import RandomLog, task_for, write_log
from tests.compact.proof.case import Case
from tests.compact.proof.test_legacy import _example as legacy_example
from tests.compact.proof.test_transactions import _example as transactional_example
from tests.compact.test_passes import files_of
from tests.reference.batches import Rec, decode_log, encode_batch, encode_marker
from tests.reference.cleaner import Aborted, Segment, clean
from tests.reference.legacy import encode_single

NOW = 1_750_000_000_000


def mixed_log(rng: random.Random) -> RandomLog:
    """Return a log of old messages, then batches and transactions, with tombstones and markers in all states."""
    keys = [b"k%d" % n for n in range(8)]
    offset, segments, parts, entries = rng.choice([0, 1000]), [], [], []
    started: dict[int, int] = {}
    base = offset

    def horizon() -> dict:
        return {"delete_horizon_ms": NOW + rng.choice([-10**6, -1, 0, 1])} if rng.random() < 0.6 else {}

    def roll(mtime_ms: int) -> None:
        nonlocal parts, entries, base, offset
        segments.append(Segment(base, b"".join(parts), mtime_ms=mtime_ms, aborted=tuple(entries)))
        parts, entries = [], []
        offset += 1
        base = offset

    for number in range(rng.randint(2, 5)):
        for _ in range(rng.randint(1, 8)):
            value = None if rng.random() < 0.4 else b"v%d" % offset
            records = [Rec(offset, NOW - 10**6, rng.choice(keys), value)]
            for _ in range(rng.choice([0, 0, 2])):
                tomb = None if rng.random() < 0.4 else b"w"
                records.append(Rec(records[-1].offset + 1, NOW - 10**6, rng.choice(keys), tomb))
            pid, kind = rng.randint(1, 3), rng.random()
            if number == 0:
                parts.append(b"".join(encode_single(record, magic=rng.choice([0, 1])) for record in records))
                offset = records[-1].offset
            elif kind < 0.4:
                parts.append(encode_batch(records, **horizon()))
                offset = records[-1].offset
            elif kind < 0.7:
                started.setdefault(pid, offset)
                own = {"producer_id": pid, "producer_epoch": 0, "base_sequence": 0, "transactional": True}
                parts.append(encode_batch(records, **own, **horizon()))
                offset = records[-1].offset
            else:
                first, commit = started.pop(pid, None), rng.random() < 0.5
                if first is not None and not commit:
                    entries.append(Aborted(pid, first, offset, min([offset + 1, *started.values()])))
                at = dict(horizon()) if first is None else {}
                parts.append(
                    encode_marker(offset, NOW - 10**6, commit=commit, producer_id=pid, producer_epoch=0, **at)
                )
            offset += 1 + rng.choice([0, 0, 3])
        if number == 0:  # all transactions end before the active segment
            roll(NOW - rng.choice([10**7, 10]))
            continue
        roll(NOW - 5000 + number)
    for pid in list(started):
        parts.append(encode_marker(offset, NOW - 10**6, commit=True, producer_id=pid, producer_epoch=0))
        offset += 1
    if parts:
        roll(NOW - 100)
    segments.append(Segment(base, b"", mtime_ms=NOW))
    return RandomLog(segments, [s.base_offset for s in segments], base, {})


@pytest.mark.parametrize("case", range(draws(60)))
def test_retained_records_equal_the_models_with_one_task_and_with_many(case: int, tmp_path: Path) -> None:
    print("seed", SEED, "case", case)
    rng = random.Random(SEED * 1000 + case)
    log = mixed_log(rng)
    facts = write_log(str(tmp_path / "one" / "t-0"), log.segments)
    write_log(str(tmp_path / "many" / "t-0"), log.segments)
    base, end = log.segments[0].base_offset, log.segments[-1].base_offset
    first_dirty = rng.choice([base, *(segment.base_offset for segment in log.segments[:-1])])
    config = {"delete_retention_ms": 1000, "segment_bytes": 1}
    for limit in (base, rng.randint(base, end), end, NO_REMOVAL_LIMIT):
        fields = {"first_dirty": first_dirty, "config": config, "removal_limit_offset": limit, "drop_keyless": True}
        expected = clean(
            log.segments, first_dirty=first_dirty, first_uncleanable=end, now_ms=NOW, delete_retention_ms=1000,
            segment_bytes=1, index_interval_bytes=64, removal_limit=limit, log_start_offset=base,
        )  # fmt: skip
        try:
            task = task_for(str(tmp_path / "one" / "t-0"), log, facts, NOW, **fields)
            result = clean_partition(LOCAL, task)
        except KeytailError as problem:
            assert "has magic 0 or 1 and would lose all its records" in str(problem)
            return
        made = {s.base_offset: s for s in expected.segments}
        for group in result.groups:
            for out in group.segments:
                [log_file] = [file for file in out.files if file.suffix == ".log"]
                written = (tmp_path / "one" / "t-0" / log_file.name).read_bytes()
                assert written == made[out.base_offset].log, (limit, out.base_offset)
        if limit not in (base, NO_REMOVAL_LIMIT):
            held = result
            install(LOCAL, task, held)
            many = replace(task, partition_path=str(tmp_path / "many" / "t-0"))
            fan_out_passes(many, InProcess(tmp_path / "cells"), Sizes(slice_bytes=1, shards=2))
            remove_scratch(tmp_path / "many" / "t-0")
            assert files_of(tmp_path / "many" / "t-0") == files_of(tmp_path / "one" / "t-0")
            return
        remove_scratch(tmp_path / "one" / "t-0")


def some_partition(path: Path) -> tuple[RandomLog, tuple[SegmentFacts, ...]]:
    """Write a tombstone at 2 and a marker at 3, both past their delete horizons, and a tombstone at 6."""
    over = {"delete_horizon_ms": NOW - 1}
    first = encode_batch([Rec(0, NOW, b"a", b"1"), Rec(1, NOW, b"b", b"1")])
    first += encode_batch([Rec(2, NOW, b"a", None)], **over)
    first += encode_marker(3, NOW, commit=True, producer_id=4, producer_epoch=0, **over)
    first += encode_batch([Rec(4, NOW, b"c", b"1"), Rec(6, NOW, b"b", None)], **over)
    segments = [Segment(0, first, mtime_ms=NOW - 5000), Segment(7, b"", mtime_ms=NOW)]
    return RandomLog(segments, [], 7, {}), write_log(str(path), segments)


def left(task: CleaningTask) -> list[int]:
    result = clean_partition(LOCAL, task)
    install(LOCAL, task, result)
    logs = sorted(Path(task.partition_path).glob("*.log"))
    return [record.offset for log in logs for batch in decode_log(log.read_bytes()) for record in batch.records]


@pytest.mark.parametrize(
    ("limit", "stay"),
    [(0, [2, 3, 4, 6]), (2, [2, 3, 4, 6]), (3, [3, 4, 6]), (4, [4, 6]), (6, [4, 6]), (7, [4]), (NO_REMOVAL_LIMIT, [4])],
)
def test_tombstones_and_markers_are_retained_from_the_limit_on_and_removed_below_it(
    limit: int, stay: list[int], tmp_path: Path
) -> None:
    log, facts = some_partition(tmp_path / "t-0")
    assert left(task_for(str(tmp_path / "t-0"), log, facts, NOW, first_dirty=0, removal_limit_offset=limit)) == stay


def test_the_proof_rejects_a_cleaner_that_ignores_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decide_rows = Rewriter._decide_rows

    def without_limit(self, *arguments):
        self._facts[row_kernels.REMOVAL_LIMIT] = NO_REMOVAL_LIMIT
        return decide_rows(self, *arguments)

    monkeypatch.setattr(Rewriter, "_decide_rows", without_limit)
    for limit, text, offset in (
        (2, "a marker was removed above the offset to which another replica has been cleaned", 3),
        (3, "a marker was removed above the offset to which another replica has been cleaned", 3),
        (4, "the latest record of its key is not in the output", 6),
        (6, "the latest record of its key is not in the output", 6),
    ):
        for first_dirty in (0, 5):  # with 5, tombstones are also in the clean section
            log, facts = some_partition(tmp_path / f"{limit}-{first_dirty}")
            path = str(tmp_path / f"{limit}-{first_dirty}")
            task = task_for(path, log, facts, NOW, first_dirty=first_dirty, removal_limit_offset=limit)
            with pytest.raises(KeytailError, match=text) as caught:
                clean_partition(LOCAL, task)
            assert caught.value.offset == offset
            assert not list(Path(path).glob("*.clean"))


def test_the_proof_rejects_a_cleaner_that_ignores_the_limit_for_old_tombstones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide_rows = Rewriter._decide_rows

    def without_limit(self, *arguments):
        self._facts[row_kernels.REMOVAL_LIMIT] = NO_REMOVAL_LIMIT
        return decide_rows(self, *arguments)

    monkeypatch.setattr(Rewriter, "_decide_rows", without_limit)
    old = b"".join(encode_single(Rec(n, NOW, b"%d" % n, None if n == 1 else b"v"), magic=1) for n in range(3))
    newer = encode_batch([Rec(3, NOW, b"x", b"v")])
    mtimes_ms = (NOW - 10**7, NOW - 5000, NOW)
    logs = zip((0, 3, 4), (old, newer, b""), mtimes_ms, strict=True)
    segments = [Segment(base, data, mtime_ms=mtime_ms) for base, data, mtime_ms in logs]
    for limit in (1, 2):
        path = str(tmp_path / str(limit))
        log, facts = RandomLog(segments, [], 4, {}), write_log(path, segments)
        config = {"delete_retention_ms": 0}
        task = task_for(path, log, facts, NOW, first_dirty=3, config=config, removal_limit_offset=limit)
        if limit == 2:
            clean_partition(LOCAL, task)
            continue
        with pytest.raises(KeytailError, match="the latest record of its key is not in the output") as caught:
            clean_partition(LOCAL, task)
        assert caught.value.offset == 1


@pytest.mark.parametrize("first_dirty", [0, 2])
def test_the_proof_accepts_a_removed_tombstone_only_below_the_limit(first_dirty: int, tmp_path: Path) -> None:
    log = encode_batch([Rec(1, 0, b"a", None)], delete_horizon_ms=1) + encode_batch([Rec(2, 0, b"b", b"1")])
    case = Case([Segment(0, log), Segment(3, b"")], first_dirty=first_dirty)
    case.removal_limit = 2
    case.prove(tmp_path)
    case.removal_limit = 1
    with pytest.raises(KeytailError, match="the latest record of its key is not in the output") as caught:
        case.prove(tmp_path)
    assert caught.value.offset == 1


def test_the_proof_rejects_a_marker_removed_above_the_limit(tmp_path: Path) -> None:
    """The example of proof/test_transactions.py passes if the limit is above all removals; with limit 0, the removal of
    the marker is rejected.
    """
    for number, example in enumerate((transactional_example, legacy_example)):
        case = example()
        case.removal_limit = 0
        if number == 0:  # the marker at 12 was removed, because its horizon has passed
            with pytest.raises(KeytailError, match="above the offset to which another replica has been cleaned"):
                case.prove(tmp_path / str(number))
        case.removal_limit = 13
        case.prove(tmp_path / str(number))


def test_a_replica_is_cleaned_up_to_its_checkpoint() -> None:
    segments = (SegmentFacts(10, 1, 0, 0, 0, None, 0, 0),)
    facts = PartitionFacts(
        topic="t", partition=0, log_dir="d", path="d/t-0", segments=segments, snapshots=(),
        log_start_offset=15, log_end_offset=50, high_watermark=50, recovery_point=50, clean_shutdown=True,
        cleaner_checkpoint=None, problems=(),
    )  # fmt: skip
    found = [cleaned_to(replace(facts, cleaner_checkpoint=at)) for at in (None, 9, 10, 30, 50, 51)]
    assert found == [10, 10, 10, 30, 50, 10]
    assert lowest_limit({}) == RemovalLimit(None, None)
    assert lowest_limit({"a": 5, "b": 3, "c": 3}) == RemovalLimit(3, "b")
