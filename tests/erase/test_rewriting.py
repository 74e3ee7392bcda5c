from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.compact.proof import state as proof_state
from keytail.compact.task import CleaningTask
from keytail.erase.finding import FoundInSegment, find_in_partition, longest_without_records
from keytail.erase.rewriting import RewriteTask, refuse_remaining, rewrite
from keytail.errors import KeytailError, Refused
from keytail.format.producers import ProducerEntry, encode_snapshot
from keytail.log.fs import LOCAL
from keytail.log.partition import SegmentFacts
from tests.chance import chance, draws
from tests.compact.logs import RandomLog, random_log
from tests.compact.proof.case import SmallWindow
from tests.compact.test_keep_magic import log_of
from tests.erase.logs import NOW, erase, keys_of, task_of, transactional_log
from tests.in_pieces import read_in_pieces
from tests.reference.batches import Batch, Rec, encode_batch
from tests.reference.cleaner import Segment
from tests.reference.erasure import erase as expected_logs
from tests.reference.erasure import is_erased
from tests.reference.indexing import index_files
from tests.reference.legacy import decode_any_log, encode_single
from tests.reference.producers import Producer, Producers

KINDS = {
    "plain": lambda rng: random_log(rng, 1_750_000_000_000, codecs=range(5), keyless=0.2),
    "old": log_of,
    "transactional": transactional_log,
}


def all_keys(log: RandomLog) -> list[bytes]:
    batches = [batch for segment in log.segments for batch in decode_any_log(segment.log) if not batch.control]
    return sorted({record.key for batch in batches for record in batch.records if record.key})


def some_keys(log: RandomLog, rng: random.Random) -> list[bytes]:
    found = all_keys(log)
    chosen = rng.sample(found, min(len(found), rng.choice([1, 2, 5, 40])))
    return [*chosen, b"in no record"]


def contents(data: bytes) -> list[Batch]:
    """Return the batches without what depends on the compressor."""
    return [replace(batch, position=0, size=0, crc=0) for batch in decode_any_log(data)]


def log_bytes(path: Path) -> dict[int, bytes]:
    return {int(file.stem): file.read_bytes() for file in sorted(path.glob("*.log"))}


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_records_of_the_keys_are_removed(tmp_path, kind):
    @settings(max_examples=draws(80), deadline=None)
    @given(st.randoms(use_true_random=False))
    def check(rng):
        path = Path(tempfile.mkdtemp(dir=tmp_path))
        log = KINDS[kind](rng)
        keys = some_keys(log, rng)
        task = task_of(path, log)
        if has_snapshot := rng.random() < 0.7:
            task = with_snapshot(task, log)
        expected = expected_logs(log.segments, keys, log.producers if has_snapshot else None)
        found, _ = erase(task, keys_of(keys))
        assert {segment.base_offset for segment in found.segments} == set(expected)
        after = log_bytes(path)
        for segment in log.segments:
            base = segment.base_offset
            assert contents(after[base]) == contents(expected.get(base, segment.log))
            if base in expected:
                index, times = index_files(after[base], base, 64)
                assert (path / f"{base:020d}.index").read_bytes() == index
                assert (path / f"{base:020d}.timeindex").read_bytes() == times
            else:
                assert after[base] == segment.log
        assert producers_of(after.values()) == producers_of(segment.log for segment in log.segments)
        records = [record for data in after.values() for batch in decode_any_log(data) for record in batch.records]
        before = [r for s in log.segments for batch in decode_any_log(s.log) for r in batch.records]
        assert found.records == len(before)
        assert found.erased == len(before) - len(records)
        assert found.keys_found == len(set(keys) & {*all_keys(log)})
        again, nothing = erase(task_again(task), keys_of(keys))
        assert nothing is None and again.records == len(records)
        assert refuse_remaining(LOCAL, task_again(task), keys_of(keys)) == sum(map(len, after.values()))
        assert log_bytes(path) == after

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_two_erasures_give_what_one_gives(tmp_path, kind):
    """An emptied batch may have an older time: that of the records which the first erasure left in it."""
    rng = chance()
    for number in range(draws(25)):
        log = KINDS[kind](rng)
        keys = some_keys(log, rng)
        some = rng.sample(keys, rng.randint(1, len(keys)))
        left = {}
        for name, parts in {"once": [keys], "twice": [some, [*set(keys) - set(some), b"unused"]]}.items():
            task = task_of(tmp_path / f"{number}-{name}", log)
            has_snapshot = number % 2 and log.producers
            if has_snapshot:
                task = with_snapshot(task, log)
            for part in parts:
                erase(task, keys_of(part))
                task = task_again(task)
            left[name] = [contents(data) for data in log_bytes(tmp_path / f"{number}-{name}").values()]
        for once, twice in zip(*left.values(), strict=True):
            assert list(map(without_time, once)) == list(map(without_time, twice))
            assert all(b.max_timestamp <= a.max_timestamp for a, b in zip(once, twice, strict=True))
            if not has_snapshot:
                # A batch whose last records have no timestamp retains -1 when these are erased.
                newest = [max([0, *(batch.max_timestamp for batch in batches)]) for batches in (once, twice)]
                assert newest[0] == newest[1]


def without_time(batch: Batch) -> Batch:
    return batch if batch.records else replace(batch, max_timestamp=0)


def test_a_second_erasure_lowers_the_times_of_batches_that_the_first_one_emptied(tmp_path):
    times = {b"a": NOW, b"b": NOW + 9, b"c": NOW - 9}
    data = b"".join(encode_batch([Rec(i, ms, key, b"v")]) for i, (key, ms) in enumerate(times.items()))
    task = task_of(tmp_path, RandomLog([Segment(0, data), Segment(3, b"")], [], 3, {}))
    expected = {b"b": [NOW, NOW, NOW - 9], b"a": [0, 0, NOW - 9]}
    for key, newest in expected.items():
        erase(task, keys_of([key]))
        assert [batch.max_timestamp for batch in decode_any_log(log_bytes(tmp_path)[0])] == newest
        task = task_again(task)


def producers_of(logs: Iterable[bytes]) -> dict[int, Producer]:
    """Return the state of producers that a broker rebuilds from a log, without times."""
    producers = Producers()
    for batch in (batch for log in logs for batch in decode_any_log(log)):
        producers.take(batch)
    return {key: replace(producer, last_timestamp=0) for key, producer in producers.known.items()}


def with_snapshot(task: CleaningTask, log: RandomLog) -> CleaningTask:
    """Write a producer snapshot at the log end."""
    entries = [
        ProducerEntry(producer, epoch, 0, last, 0, NOW, -1, -1) for producer, (last, epoch) in log.producers.items()
    ]
    Path(task.path(log.log_end_offset, ".snapshot")).write_bytes(encode_snapshot(entries))
    return replace(task, snapshots=(log.log_end_offset,))


def task_again(task: CleaningTask) -> CleaningTask:
    """Return the task for the files that are there now."""
    segments = []
    for segment in task.segments:
        stat = LOCAL.stat(task.path(segment.base_offset, ".log"))
        segments.append(segment._replace(log_bytes=stat.size_bytes, log_mtime_ns=stat.mtime_ns))
    return replace(task, segments=tuple(segments))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_in_pieces_give_the_same_result(tmp_path, kind):
    rng = chance()
    for number in range(draws(12)):
        log = KINDS[kind](rng)
        keys = keys_of(some_keys(log, rng))
        erase(task_of(tmp_path / f"{number}-whole", log), keys)
        with pytest.MonkeyPatch.context() as patch:
            read_in_pieces(patch)
            patch.setattr(proof_state, "Window", SmallWindow)
            erase(task_of(tmp_path / f"{number}-pieces", log), keys)
            refuse_remaining(LOCAL, task_again(task_of_there(tmp_path / f"{number}-pieces", log)), keys)
        whole, pieces = (log_bytes(tmp_path / f"{number}-{name}") for name in ("whole", "pieces"))
        assert {b: contents(d) for b, d in whole.items()} == {b: contents(d) for b, d in pieces.items()}


def task_of_there(path: Path, log: RandomLog):
    """Return a task for a log that has been written before."""
    bases = [segment.base_offset for segment in log.segments]
    task = task_of(path.parent / f"{path.name}-unused", log)
    facts = tuple(SegmentFacts(base, 0, 0, 0, 0, None, 0, 0) for base in bases)
    return replace(task, partition_path=str(path), segments=facts)


def test_an_open_transaction_with_an_erased_key_is_refused(tmp_path):
    rng, refused = chance(), 0
    for number in range(draws(40)):
        log = transactional_log(rng, ends_open=True)
        keys = some_keys(log, rng)
        last_marker: dict[int, int] = {}
        is_open = set()
        for batch in (batch for segment in log.segments for batch in decode_any_log(segment.log)):
            if batch.control:
                last_marker[batch.producer_id] = batch.base_offset
        for batch in (batch for segment in log.segments for batch in decode_any_log(segment.log)):
            if batch.transactional and not batch.control and any(is_erased(r.key, keys) for r in batch.records):
                if batch.base_offset > last_marker.get(batch.producer_id, -1):
                    is_open.add(batch.producer_id)
        task = task_of(tmp_path / str(number), log)
        if is_open:
            refused += 1
            with pytest.raises(Refused, match=r"producer \d has an open transaction"):
                find_in_partition(LOCAL, task, keys_of(keys))
        else:
            find_in_partition(LOCAL, task, keys_of(keys))
    assert refused


def test_scratch_files_are_removed_after_an_error(tmp_path):
    rng = chance()
    log = KINDS["plain"](rng)
    while not all_keys(log):
        log = KINDS["plain"](rng)
    keys = keys_of(all_keys(log)[:1])
    task = task_of(tmp_path, log)
    found = find_in_partition(LOCAL, task, keys)
    before = sorted(file.name for file in tmp_path.iterdir())
    bases = tuple(segment.base_offset for segment in found.segments)
    with pytest.raises(KeytailError, match="records to be erased; the first reading found"):
        rewrite(LOCAL, RewriteTask(task, keys, bases, found.transactions, found.erased + 1))
    assert sorted(file.name for file in tmp_path.iterdir()) == before


def test_a_record_that_is_left_is_found_on_the_disk(tmp_path):
    records = [Rec(i, 1000, b"k%d" % i, b"v") for i in range(9)]
    log = RandomLog([Segment(0, encode_batch(records, codec=1)), Segment(9, b"")], [], 9, {})
    task = task_of(tmp_path, log)
    refuse_remaining(LOCAL, task, keys_of([b"k9"]))
    with pytest.raises(KeytailError, match="a record with an erased key is left") as error:
        refuse_remaining(LOCAL, task, keys_of([b"k7"]))
    assert error.value.offset == 7


def test_a_message_without_a_key_is_left(tmp_path):
    data = encode_single(Rec(0, 1000, None, b"v")) + encode_single(Rec(1, 1000, b"k", b"v"))
    task = task_of(tmp_path, RandomLog([Segment(0, data), Segment(2, b"")], [], 2, {}))
    refuse_remaining(LOCAL, task, keys_of([b"other"]))
    with pytest.raises(KeytailError, match="a record with an erased key is left"):
        refuse_remaining(LOCAL, task, keys_of([b"k"]))


@pytest.mark.parametrize("is_active", [True, False])
def test_only_the_last_batch_of_an_active_producer_keeps_its_time(tmp_path, is_active):
    fields = {"producer_id": 7, "producer_epoch": 0}
    data = encode_batch([Rec(0, NOW - 100, b"other", b"v")])
    data += encode_batch([Rec(1, NOW - 50, b"k", b"v")], base_sequence=0, **fields)
    data += encode_batch([Rec(2, NOW, b"k", b"v")], base_sequence=1, **fields)
    log = RandomLog([Segment(0, data), Segment(3, b"")], [], 3, {7: (2, 0)} if is_active else {})
    task = with_snapshot(task_of(tmp_path, log), log)
    erase(task, keys_of([b"k"]))
    times = [batch.max_timestamp for batch in decode_any_log(log_bytes(tmp_path)[0])]
    assert times == [NOW - 100, NOW - 100, NOW if is_active else NOW - 100]


def test_adjacent_segments_without_records_are_counted():
    found = [FoundInSegment(base, 5, 5 if base != 40 else 4) for base in (10, 20, 40, 50)]
    assert longest_without_records([0, 10, 20, 30, 40, 50], found) == 2
    assert longest_without_records([0, 10, 20, 40, 50], found) == 2
    assert longest_without_records([0, 10, 20, 50], [*found[:2], found[3]]) == 3
    assert longest_without_records([0], []) == 0
