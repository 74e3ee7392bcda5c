"""A repack of random partitions: every file, passes, outputs at limits, and batches that producers still need."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keytail.compact.cleaner import clean_partition, install, next_pass
from keytail.compact.repack.partition import RepackResult, producers_of_log, repack_partition
from keytail.compact.repack.task import RepackState, RepackTask
from keytail.errors import CorruptLog
from keytail.format.producers import ProducerEntry, encode_snapshot
from keytail.log.fs import LOCAL
from keytail.log.records.chunk import SegmentReader
from tests.chance import SEED, draws
from tests.compact.logs import RandomLog, task_for
from tests.compact.repack.cases import (
    NOW,
    expected,
    files_in,
    forgetting,
    log_of,
    replace_segments,
    task_of,
    written,
)
from tests.reference.batches import Rec, all_records, encode_batch, encode_marker
from tests.reference.cleaner import Aborted, Segment
from tests.reference.indexing import index_files
from tests.reference.legacy import decode_any_log
from tests.reference.repack import Rules


def run(task: RepackTask) -> list[RepackResult]:
    """Repack and install pass by pass; return the result of each."""
    results = []
    while True:
        results.append(repack_partition(LOCAL, task))
        install(LOCAL, task, results[-1])
        if results[-1].rest is None:
            return results
        task = next_pass(task, results[-1])


def model(log: RandomLog, rules: Rules, interval_bytes: int = 64) -> dict[str, bytes]:
    """Return the files after a repack; the active segment and unchanged segments keep their (empty) indexes."""
    files = {}
    for segment in log.segments:
        made = segment.log if segment is log.segments[-1] else expected(segment.log, rules)
        index, time_index = b"", b""
        if made != segment.log:
            index, time_index = index_files(made, segment.base_offset, interval_bytes)
        stem = f"{segment.base_offset:020d}"
        files |= {f"{stem}.log": made, f"{stem}.index": index, f"{stem}.timeindex": time_index}
        if segment.aborted:
            files[f"{stem}.txnindex"] = b"".join(entry.encode() for entry in segment.aborted)
    return files


@pytest.mark.parametrize("case", range(draws(80)))
def test_every_file_is_that_of_the_reference_model(case, tmp_path):
    rng = random.Random(SEED * 1000 + case)
    codecs = rng.choice([(0,), (3,), (0, 1, 2, 3, 4)])
    log = log_of(rng, codecs)
    rules = Rules(rng.choice([0, 200, 1000, 10**5]), rng.choice([300, 10**6]), rng.choice([None, 0, 1, 2, 3, 4]))
    path = str(tmp_path / "t-0")
    task = task_of(path, log, written(path, log), rules, max_scratch_bytes=rng.choice([None, 1, 1000]))
    before = [segment.log for segment in log.segments[:-1]]
    results = run(task)
    after = model(log, rules)
    assert files_in(path) == after
    last = results[-1]
    batches = sum(len(decode_any_log(data)) for data in before)
    assert last.batches_before == batches
    assert last.batches_after == sum(len(decode_any_log(expected(data, rules))) for data in before)
    assert last.records_before == last.records_after == sum(b.record_count for d in before for b in decode_any_log(d))
    assert last.bytes_before == sum(map(len, before)) + len(log.segments[-1].log)
    assert last.bytes_after == sum(len(data) for name, data in after.items() if name.endswith(".log"))
    assert last.segments_after == last.segments_before == len(log.segments)


@pytest.mark.parametrize("case", range(draws(30)))
def test_a_second_run_has_no_groups(case, tmp_path):
    rng = random.Random(SEED * 1000 + case)
    log = log_of(rng, (0, 3))
    rules = Rules(rng.choice([0, 300, 10**5]), 10**6, rng.choice([None, 4]))
    path = str(tmp_path / "t-0")
    run(task_of(path, log, written(path, log), rules))
    once = files_in(path)
    stems = [f"{segment.base_offset:020d}" for segment in log.segments]
    segments = [replace(s, log=once[f"{stem}.log"]) for s, stem in zip(log.segments, stems, strict=True)]
    for file in Path(path).iterdir():
        file.unlink()
    again = replace_segments(log, segments)
    [result] = run(task_of(path, again, written(path, again), rules))
    assert result.groups == ()
    assert result.batches_before == result.batches_after


def test_an_output_that_grows_beyond_the_limit_is_divided(tmp_path):
    """Every output has the transactions that ended in it."""
    records = [[Rec(o, NOW, b"k", b"v" * 1000)] for o in range(10)]
    data = b"".join(encode_batch(item, codec=4) for item in records)
    log = RandomLog([Segment(0, data, mtime_ms=NOW), Segment(10, b"", mtime_ms=NOW)], [], 10, {})
    entries = tuple(Aborted(9, last, last + 1, last + 1) for last in (1, 4, 5))
    log.segments[0] = replace(log.segments[0], aborted=entries)
    path, rules = str(tmp_path / "t-0"), Rules(0, 10**6, codec=0)
    facts = written(path, log)
    task = task_of(path, log, facts, rules, config={"segment_bytes": 1750})
    [result] = run(task)
    files = files_in(path)
    bases = sorted(int(name[:20]) for name in files if name.endswith(".log"))
    assert bases == [0, 3, 6, 9, 10]
    assert result.limits_met == 3
    assert b"".join(files[f"{base:020d}.log"] for base in bases) == expected(data, rules)
    found = [files.get(f"{base:020d}.txnindex", b"") for base in bases]
    first, second, third = (entry.encode() for entry in entries)
    assert found == [first, second, third, b"", b""]


def test_a_damaged_source_is_reported_and_nothing_is_left(tmp_path):
    records = [[Rec(o, NOW, b"k", b"v" * 100)] for o in range(10)]
    data = bytearray(b"".join(encode_batch(item) for item in records))
    data[-1] ^= 1
    log = RandomLog([Segment(0, bytes(data), mtime_ms=NOW), Segment(10, b"", mtime_ms=NOW)], [], 10, {})
    path = str(tmp_path / "t-0")
    task = task_of(path, log, written(path, log), Rules(500, 10**6))
    before = files_in(path)
    with pytest.raises(CorruptLog, match="invalid CRC"):
        repack_partition(LOCAL, task)
    assert files_in(path) == before


def _of_producer(producer: int, offset: int) -> bytes:
    record = Rec(offset, NOW, b"k", b"v" * 50)
    return encode_batch([record], producer_id=producer, producer_epoch=0, base_sequence=offset)


def test_the_last_five_batches_of_each_producer_are_unchanged(tmp_path):
    first = b"".join(_of_producer(offset % 2, offset) for offset in range(14))
    second = b"".join(_of_producer(1, offset) for offset in range(20, 22)) + _of_producer(2, 22)
    active = _of_producer(0, 30) + _of_producer(3, 31)
    segments = [Segment(base, data, mtime_ms=NOW) for base, data in ((0, first), (20, second), (30, active))]
    log, path = RandomLog(segments, [], 32, {}), str(tmp_path / "t-0")
    facts = written(path, log)
    Path(path, f"{32:020d}.snapshot").write_bytes(
        encode_snapshot([ProducerEntry(i, 0, 1, 31, 0, NOW - 10**12, -1, -1) for i in (0, 1)])
    )
    rules = Rules(10**5, 10**6, codec=4, kept=(6, 8, 10, 12, 30, 9, 11, 13, 20, 21))
    task = task_of(path, log, facts, rules, snapshots=(32,))
    found = producers_of_log(task, SegmentReader(LOCAL), np.array([0, 1]), 2)
    assert found.kept.tolist() == sorted(rules.kept)
    for limit in (None, 1):
        run(replace(task, max_scratch_bytes=limit))
        files = files_in(path)
        assert files[f"{0:020d}.log"] == expected(first, rules)
        assert files[f"{20:020d}.log"] == expected(second, rules)
        assert files[f"{30:020d}.log"] == active
        assert any(batch.codec == 4 for batch in decode_any_log(files[f"{20:020d}.log"]))
        facts = written(path, log)
        task = replace(task, segments=facts)


OLD, EXPIRATION_MS = NOW - 10**8, 10**7


def _random_batches(rng: random.Random, base: int, count: int, timestamp: int) -> bytes:
    """Return batches of three producers, most of them transactional, and markers."""
    parts = []
    for offset in range(base, base + count):
        producer = {"producer_id": rng.randrange(3), "producer_epoch": 0}
        if rng.random() < 0.25:
            parts.append(encode_marker(offset, timestamp, commit=rng.random() < 0.7, **producer))
        else:
            record = Rec(offset, timestamp, b"%d" % rng.randrange(9), b"v" * rng.randrange(30))
            transactional = rng.random() < 0.7
            parts.append(encode_batch([record], transactional=transactional, base_sequence=offset, **producer))
    return b"".join(parts)


@pytest.mark.parametrize("case", range(draws(40)))
def test_forgotten_producers_are_those_that_have_expired(case, tmp_path):
    """Producer 2 has a batch in the active segment that has not expired; 1 is active by the snapshot, or not."""
    rng = random.Random(SEED * 1000 + case)
    logs = [_random_batches(rng, base, 12, OLD) for base in (0, 20)]
    active = encode_batch([Rec(40, NOW - 5, b"k", b"v")], producer_id=2, producer_epoch=0, base_sequence=40)
    active += encode_marker(41, OLD, commit=True, producer_id=0, producer_epoch=0)  # not in the section
    segments = [Segment(base, data, mtime_ms=NOW) for base, data in zip((0, 20, 40), [*logs, active], strict=True)]
    log, path = RandomLog(segments, [], 42, {}), str(tmp_path / "t-0")
    facts = written(path, log)
    is_active = rng.random() < 0.5
    entry = ProducerEntry(1, 0, 1, 31, 0, NOW if is_active else OLD, -1, -1)
    Path(path, f"{42:020d}.snapshot").write_bytes(encode_snapshot([entry]))
    batches = [batch for data in logs for batch in decode_any_log(data)]
    kept = [batch.base_offset for batch in batches if batch.producer_id == 1 and not batch.control][-5:]
    rules = forgetting(b"".join(logs), Rules(10**5, 10**6, rng.choice([None, 4])), (0,) if is_active else (0, 1))
    rules = replace(rules, kept=kept if is_active else ())
    limit = rng.choice([None, 1])
    task = task_of(path, log, facts, rules, EXPIRATION_MS, snapshots=(42,), max_scratch_bytes=limit)
    run(task)
    files = files_in(path)
    for base, data in zip((0, 20, 40), [*logs, active], strict=True):
        assert files[f"{base:020d}.log"] == (active if base == 40 else expected(data, rules))


def test_a_pass_continues_where_the_last_one_ended(tmp_path):
    batches = [encode_batch([Rec(offset, NOW, b"k", b"v")]) for offset in range(10)]
    segments = [Segment(base, b"".join(batches[base : base + 5]), mtime_ms=NOW) for base in (0, 5)]
    log, path = RandomLog([*segments, Segment(10, b"", mtime_ms=NOW)], [], 10, {}), str(tmp_path / "t-0")
    task = task_of(path, log, written(path, log), Rules(10**5, 10**6), max_scratch_bytes=1)
    first, second = run(task)
    assert isinstance(first.rest, RepackState)
    assert first.rest.next_segment == 1
    assert [group.source_bases for result in (first, second) for group in result.groups] == [(0,), (5,)]
    assert (second.batches_before, second.batches_after) == (10, 2)


@pytest.mark.parametrize("case", range(draws(30)))
def test_a_compaction_afterwards_retains_the_same_records(case, tmp_path):
    rng = random.Random(SEED * 1000 + case)
    log = log_of(rng, (0, 3))
    log = replace_segments(log, [replace(segment, aborted=()) for segment in log.segments])
    first_dirty = rng.choice([log.segments[0].base_offset, *log.batch_ends])
    end = log.segments[-1].base_offset
    if end <= log.segments[0].base_offset:
        return
    found = []
    for number, rules in enumerate([None, Rules(rng.choice([300, 10**5]), 10**6, rng.choice([None, 4]))]):
        path = str(tmp_path / f"t-{number}")
        facts = written(path, log)
        if rules is not None:
            run(task_of(path, log, facts, rules))
            facts = tuple(
                fact._replace(log_bytes=Path(path, f"{fact.base_offset:020d}.log").stat().st_size) for fact in facts
            )
        task = task_for(path, log, facts, NOW, first_dirty=min(first_dirty, end - 1), drop_keyless=True)
        result = clean_partition(LOCAL, task)
        install(LOCAL, task, result)
        logs = sorted(name for name in files_in(path) if name.endswith(".log"))
        found.append(all_records([batch for name in logs for batch in decode_any_log(Path(path, name).read_bytes())]))
    assert found[0] == found[1]
