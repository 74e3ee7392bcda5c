"""Laws of a repack of one segment: the bytes of the reference model, the same records, no change by a second run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.compact.repack import merger
from keytail.log.records.scan import RecordScanner
from tests.chance import draws
from tests.compact.repack.cases import NOW, OF_PRODUCERS, expected, forgetting, merged, rules, segments
from tests.in_pieces import read_in_pieces
from tests.reference.batches import Batch, Rec, all_records, encode_batch
from tests.reference.legacy import decode_any_log
from tests.reference.repack import Rules, markers

LAWS = settings(deadline=None, max_examples=draws(600))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("segment") / "00000000000000000000.log"


def _small(monkeypatch) -> dict[str, int]:
    """Make chunks, arenas and portions end between any two batches."""
    monkeypatch.setattr(merger, "RecordScanner", lambda: RecordScanner(3))
    return {"chunk_bytes": 200, "arena_bytes": 100}


@LAWS
@given(segments(), rules(), st.booleans(), st.data())
def test_the_bytes_are_those_of_the_reference_model(path, log, rules, are_small, data):
    bases = [batch.base_offset for batch in decode_any_log(log)]
    rules = replace(rules, kept=data.draw(st.sets(st.sampled_from(bases), max_size=2)) if bases else ())
    with pytest.MonkeyPatch.context() as monkeypatch:
        out = merged(path, log, rules, **(_small(monkeypatch) if are_small else {}))
    found = b"".join(out.parts)
    assert found == expected(log, rules)
    assert out.is_changed == (found != log)


@LAWS
@given(segments(OF_PRODUCERS), rules(), st.sets(st.integers(0, 1)), st.booleans())
def test_forgotten_producers_are_those_of_the_reference_model(path, log, rules, ids, are_small):
    rules = forgetting(log, rules, ids)
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = b"".join(merged(path, log, rules, **(_small(monkeypatch) if are_small else {})).parts)
    assert found == expected(log, rules)
    assert all_records(decode_any_log(found)) == all_records(decode_any_log(log))
    assert b"".join(merged(path, found, rules).parts) == found


@LAWS
@given(segments(OF_PRODUCERS), rules(), st.sets(st.integers(0, 1)))
def test_a_consumer_of_committed_records_receives_the_same(path, log, rules, ids):
    """With the markers of the log; transactional data without a marker is of an open transaction."""
    found = b"".join(merged(path, log, forgetting(log, rules, ids)).parts)
    assert committed(decode_any_log(found)) == committed(decode_any_log(log))


@LAWS
@given(segments(), rules())
def test_every_record_is_unchanged(path, log, rules):
    found = b"".join(merged(path, log, rules).parts)
    assert all_records(decode_any_log(found)) == all_records(decode_any_log(log))


@LAWS
@given(segments(), rules())
def test_a_second_run_changes_nothing(path, log, rules):
    once = b"".join(merged(path, log, rules).parts)
    twice = merged(path, once, rules)
    assert b"".join(twice.parts) == once
    assert not twice.is_changed


@LAWS
@given(segments(), rules())
def test_no_batch_is_above_max_message_bytes_or_split(path, log, rules):
    before, out = decode_any_log(log), merged(path, log, rules)
    after = decode_any_log(b"".join(out.parts))
    ends = {batch.last_offset for batch in before}
    sizes = {batch.base_offset: batch.size for batch in before}
    assert all(batch.last_offset in ends for batch in after)
    assert all(batch.size <= max(rules.max_message_bytes, sizes[batch.base_offset]) for batch in after)


@LAWS
@given(segments(), rules())
def test_the_tables_are_those_of_the_bytes(path, log, rules):
    out = merged(path, log, rules)
    rows = [row for table in out.tables for row in table]
    batches = decode_any_log(b"".join(out.parts))
    assert len(rows) == len(batches)
    for row, batch in zip(rows, batches, strict=True):
        of_row = (row["base_offset"], row["last_offset"], row["size_bytes"], row["crc"], row["record_count"])
        assert of_row == (batch.base_offset, batch.last_offset, batch.size, batch.crc, batch.record_count)
        of_row = (row["attributes"], row["base_timestamp_ms"], row["max_timestamp_ms"], row["leader_epoch"])
        assert of_row == (batch.attributes, batch.base_timestamp, batch.max_timestamp, batch.leader_epoch)


def committed(batches: list[Batch]) -> list[Rec]:
    """Return the records that are not of an aborted or an open transaction."""
    found: list[Rec] = []
    open_: dict[int, list[Rec]] = {}
    for batch in batches:
        if batch.control:
            of_producer = open_.pop(batch.producer_id, [])
            found += of_producer if markers([batch])[0] else []
        elif batch.transactional:
            open_.setdefault(batch.producer_id, []).extend(batch.records)
        else:
            found += batch.records
    return sorted(found, key=lambda record: record.offset)


def _batches(*sizes: int, offset: int = 0, **fields) -> bytes:
    parts = []
    for size in sizes:
        parts.append(encode_batch([Rec(offset, NOW + offset, b"k%d" % offset, b"v" * size)], **fields))
        offset += 1
    return b"".join(parts)


def test_neighbours_become_one_batch_up_to_the_limit(path):
    log = _batches(*[10] * 9)
    [a, b, c] = decode_any_log(b"".join(merged(path, log, Rules(70, 10**6)).parts))
    assert [batch.record_count for batch in (a, b, c)] == [3, 3, 3]
    [all_] = decode_any_log(b"".join(merged(path, log, Rules(1000, 10**6)).parts))
    assert (all_.base_offset, all_.last_offset, all_.record_count) == (0, 8, 9)


def test_a_batch_above_the_limit_is_compressed_again_but_not_split(path):
    log = _batches(5000, 10, 10)
    large, rest = decode_any_log(b"".join(merged(path, log, Rules(100, 10**6, codec=4)).parts))
    assert (large.record_count, large.codec, large.size < 200) == (1, 4, True)
    assert (rest.record_count, rest.codec) == (2, 4)


def test_batches_that_are_read_in_pieces_are_unchanged(path, monkeypatch):
    read_in_pieces(monkeypatch)
    log = _batches(10, codec=4) + encode_batch([Rec(i, NOW, b"key", b"v" * 30) for i in range(1, 6)], codec=1)
    log += _batches(10, 10, offset=6, codec=4)
    out = b"".join(merged(path, log, Rules(10**6, 10**6, codec=3)).parts)
    first, large, *rest = decode_any_log(out)
    assert large.codec == 1 and out[large.position : large.position + large.size] in log
    assert [batch.codec for batch in (first, *rest)] == [3, 3]


def test_batches_are_not_merged_if_that_saves_no_bytes(path):
    """Each record needs 9 bytes more when its timestamp is far from that of the first record."""
    far = 2**62

    def batch(offset: int, timestamp: int) -> bytes:
        return encode_batch([Rec(offset + i, timestamp, None, b"") for i in range(12)])

    log = batch(0, 0) + batch(12, far)
    assert b"".join(merged(path, log, Rules(10**6, 10**6)).parts) == log


def test_an_uncompressed_batch_that_compression_would_enlarge_is_unchanged(path):
    small = _batches(1)
    assert b"".join(merged(path, small, Rules(10**6, 10**6, codec=4)).parts) == small
    [compressed] = decode_any_log(b"".join(merged(path, _batches(500), Rules(10**6, 10**6, codec=4)).parts))
    assert compressed.codec == 4
    [other] = decode_any_log(b"".join(merged(path, _batches(1, codec=1), Rules(10**6, 10**6, codec=4)).parts))
    assert other.codec == 4


def test_batches_of_a_group_coordinator_are_merged(path):
    """Batches of a group coordinator have no producer, but the sequence 0."""
    log = _batches(9, 9, 9, base_sequence=0)
    [batch] = decode_any_log(b"".join(merged(path, log, Rules(10**6, 10**6)).parts))
    assert (batch.record_count, batch.base_sequence) == (3, 0)
    log = _batches(9, base_sequence=0) + _batches(9, offset=1)
    assert len(decode_any_log(b"".join(merged(path, log, Rules(10**6, 10**6)).parts))) == 2


def test_the_last_offset_is_at_most_an_int32_above_the_base_offset(path):
    log = _batches(1) + _batches(1, offset=2**31 - 1) + _batches(1, offset=2**31)
    first, second = decode_any_log(b"".join(merged(path, log, Rules(10**6, 10**6)).parts))
    assert (first.last_offset, second.base_offset) == (2**31 - 1, 2**31)
