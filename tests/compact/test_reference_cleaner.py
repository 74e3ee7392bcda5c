"""The reference cleaner (`tests/reference/cleaner.py`) has the results of Kafka's cleaner, in rounds written by hand.
"""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chance import draws
from tests.reference.batches import Rec, all_records, decode_log, encode_batch, encode_marker
from tests.reference.cleaner import Aborted, KeylessRecords, Segment, build_map, clean
from tests.reference.indexing import index_files

NOW = 2_000_000_000_000
DAY = 86_400_000


def rec(offset, key, value=b"v", timestamp=None, headers=()):
    key = key.encode() if isinstance(key, str) else key
    return Rec(offset, 1000 + offset if timestamp is None else timestamp, key, value, headers)


def batch(*records, **fields):
    return encode_batch(list(records), **fields)


def seg(base, *batches, **fields):
    return Segment(base, b"".join(batches), **fields)


def run(*segments, first_dirty=0, first_uncleanable=100, now=NOW, **given):
    return clean(segments, first_dirty=first_dirty, first_uncleanable=first_uncleanable, now_ms=now, **given)


def only(round_):
    (output,) = round_.segments
    return output


def kept(round_):
    return [r.offset for s in round_.segments for r in all_records(decode_log(s.log))]


# --- the map ---


@pytest.mark.parametrize(
    ("start", "end", "offsets", "latest"),
    [
        (0, 30, {b"a": 11, b"b": 1, b"c": 20}, 29),
        (0, 20, {b"a": 11, b"b": 1}, 19),
        (10, 20, {b"a": 11}, 19),
        (11, 20, {b"a": 11}, 19),
        (12, 20, {}, 19),
        (20, 30, {b"c": 20}, 29),
    ],
)
def test_a_map_covers_half_open_ranges(start, end, offsets, latest):
    """CONFORMANCE.md 7."""
    segments = [
        seg(0, batch(rec(0, "a"), rec(1, "b"))),
        seg(10, batch(rec(10, "a"), rec(11, "a"))),
        seg(20, batch(rec(20, "c"))),
        seg(30, batch(rec(30, "d"))),
    ]
    assert build_map(segments, start, end, 100) == (offsets, latest)


def test_a_full_map_stops_inside_a_batch_even_at_a_known_key():
    """CONFORMANCE.md 8 and 13: the rest of the batch is retained, and the next round starts there."""
    source = seg(0, batch(rec(0, "a"), rec(1, "b"), rec(2, "a"), rec(3, "c")))
    assert build_map([source], 0, 100, 2) == ({b"a": 0, b"b": 1}, 1)
    first = run(source, max_entries=2)
    assert first.end_offset == 2
    assert only(first).log == source.log
    second = run(source, first_dirty=2, max_entries=2)
    assert second.end_offset == 100
    assert kept(second) == [1, 2, 3]


def test_a_full_map_at_a_batch_start_ends_after_the_last_complete_batch():
    """CONFORMANCE.md 8: gaps below the batch that does not fit are in the mapped range, later gaps are not."""
    source = seg(0, batch(rec(0, "a"), last_offset=6), batch(rec(9, "b")))
    assert build_map([source], 0, 100, 1) == ({b"a": 0}, 6)


def test_repeated_rounds_with_a_tiny_map_make_progress():
    """CONFORMANCE.md 13."""
    log = b"".join(batch(rec(i, "abc"[i % 3])) for i in range(12))
    segments, first_dirty = [Segment(0, log), Segment(12, b"")], 0
    for _ in range(20):
        done = clean(segments, first_dirty=first_dirty, first_uncleanable=12, now_ms=NOW, max_entries=1)
        assert done.end_offset > first_dirty
        segments, first_dirty = [Segment(0, only(done).log), Segment(12, b"")], done.end_offset
        if first_dirty == 12:
            break
    assert first_dirty == 12
    assert [r.offset for r in all_records(decode_log(segments[0].log))] == [9, 10, 11]


def test_offsets_far_apart_inside_a_segment_are_mapped():
    """CONFORMANCE.md 9."""
    top = 2**31 - 1
    source = seg(0, batch(rec(0, "a")), batch(rec(top, "a")))
    done = run(source, first_uncleanable=top + 1)
    assert (done.end_offset, kept(done)) == (top + 1, [top])


def test_gaps_between_segments_do_not_stop_the_next_round():
    """CONFORMANCE.md 10."""
    segments = [seg(0, batch(rec(0, "a"))), seg(50, batch(rec(70, "a"))), seg(90)]
    done = run(*segments, first_uncleanable=90)
    assert (done.end_offset, kept(done)) == (90, [70])
    assert build_map(segments, 0, 90, 1) == ({b"a": 0}, 49)


def test_a_start_inside_a_batch_maps_only_later_records():
    source = seg(0, batch(rec(0, "a"), rec(1, "b"), rec(2, "a")))
    assert build_map([source], 1, 100, 10) == ({b"b": 1, b"a": 2}, 99)


# --- which records are retained ---


def test_a_superseded_record_is_removed_and_an_unaffected_batch_is_copied():
    """CONFORMANCE.md 12 and 21."""
    odd = bytearray(batch(rec(4, "b"), rec(5, "c"), extra_attributes=0x4080))
    source = seg(0, batch(rec(0, "a"), rec(1, "x")), batch(rec(2, "a"), rec(3, "y")), bytes(odd))
    done = run(source)
    batches = decode_log(only(done).log)
    assert [[r.offset for r in b.records] for b in batches] == [[1], [2, 3], [4, 5]]
    assert only(done).log[batches[1].position :] == source.log[-len(odd) - batches[1].size :]
    assert batches[2].attributes == 0x4080
    assert (done.messages_read, done.messages_written) == (6, 5)


def test_the_clean_section_is_cleaned_and_the_last_record_of_a_batch_is_retained():
    """CONFORMANCE.md 12 and 20."""
    clean_part = seg(0, batch(rec(0, "a"), rec(1, "b")))
    dirty = seg(10, batch(rec(10, "a"), rec(11, "a"), rec(12, "c")))
    assert kept(run(clean_part, dirty, first_dirty=10)) == [1, 11, 12]


def test_a_rewritten_batch_keeps_its_header_and_loses_unused_bits():
    """CONFORMANCE.md 21: base and last offset, sequence, epochs and codec are kept; bits 7 to 15 are written as 0."""
    fields = {"leader_epoch": 5, "producer_id": 4001, "producer_epoch": 3, "base_sequence": 7}
    source = seg(
        0,
        batch(
            rec(0, "a", timestamp=50),
            rec(1, "b", timestamp=40),
            last_offset=8,
            extra_attributes=0x4080,
            **fields,
        ),
        batch(rec(9, "a", timestamp=60)),
    )
    rebuilt = decode_log(only(run(source)).log)[0]
    assert [r.offset for r in rebuilt.records] == [1]
    assert (rebuilt.base_offset, rebuilt.last_offset, rebuilt.attributes) == (0, 8, 0)
    assert (rebuilt.leader_epoch, rebuilt.producer_id, rebuilt.producer_epoch) == (5, 4001, 3)
    assert (rebuilt.base_sequence, rebuilt.record_count) == (7, 1)
    assert (rebuilt.base_timestamp, rebuilt.max_timestamp) == (40, 40)


def test_the_bytes_of_a_rewritten_batch_are_those_of_kafka():
    """CONFORMANCE.md 21 and 22: the batch with a retained tombstone, as Kafka's classes write it."""
    source = batch(
        rec(100, "k1", b"v1", 1700000000000, ((b"h", b"x"),)),
        rec(101, "k2", None, 1700000000005, ((b"n", None),)),
        leader_epoch=5,
        producer_id=4001,
        producer_epoch=3,
        base_sequence=7,
    )
    newer = batch(rec(102, "k1", b"v2", 1700000000009))
    done = run(seg(100, source, newer), first_dirty=100, first_uncleanable=200, now=1700000100000)
    expected = bytes.fromhex(
        "0000000000000064 00000040 00000005 02 f596d17d 0040 00000001 0000018bd50d4aa0 0000018bcfe56805"
        "0000000000000fa1 0003 00000007 00000001"
        "1c 00 b58abf52 02 04 6b32 01 02 02 6e 01"
    )
    assert only(done).log == expected + newer


def test_the_bytes_of_an_emptied_batch_are_those_of_kafka():
    """CONFORMANCE.md 21 and 23."""
    source = batch(
        rec(100, "k1", b"v1", 1700000000000),
        rec(101, "k2", b"v2", 1700000000005),
        codec=1,
        leader_epoch=5,
        producer_id=4001,
        producer_epoch=3,
        base_sequence=7,
    )
    newer = batch(rec(102, "k1"), rec(103, "k2"))
    done = run(seg(100, source, newer), first_dirty=100, first_uncleanable=200, producers={4001: (101, 3)})
    expected = bytes.fromhex(
        "0000000000000064 00000031 00000005 02 853b853e 0000 00000001 ffffffffffffffff 0000018bcfe56805"
        "0000000000000fa1 0003 00000007 00000000"
    )
    assert only(done).log == expected + newer


@pytest.mark.parametrize("codec", [0, 1, 2, 3, 4])
def test_duplicates_inside_a_compressed_batch_are_removed(codec):
    """CONFORMANCE.md 20 and 21: the codec is unchanged."""
    source = seg(0, batch(rec(0, "a", b"1"), rec(1, "a", b"2"), rec(2, "b"), codec=codec))
    (rebuilt,) = decode_log(only(run(source)).log)
    assert [(r.offset, r.value) for r in rebuilt.records] == [(1, b"2"), (2, b"v")]
    assert rebuilt.codec == codec


def test_with_log_append_time_rewritten_timestamp_deltas_are_0():
    source = batch(rec(0, "a", timestamp=10), rec(1, "b", timestamp=20), timestamp_type=1, max_timestamp=777)
    newer = batch(rec(2, "a"))
    output = only(run(seg(0, source, newer))).log
    expected = batch(rec(1, "b", timestamp=777), base_offset=0, last_offset=1, timestamp_type=1, max_timestamp=777)
    assert output == expected + newer
    assert decode_log(expected)[0].base_timestamp == 777


def test_a_partial_round_retains_records_above_its_end():
    """CONFORMANCE.md 13: these records are unchanged; their batch gets a delete horizon if one is a tombstone."""
    beyond = batch(rec(2, "a"), rec(3, "a"), rec(4, None, b"keyless"))
    with_null = batch(rec(5, "a", None))
    source = seg(0, batch(rec(0, "a"), rec(1, "b")), beyond, with_null)
    done = run(source, max_entries=2)
    assert done.end_offset == 2
    assert only(done).log.startswith(source.log[: -len(with_null)])
    last = decode_log(only(done).log)[-1]
    assert last.delete_horizon_ms == NOW + DAY
    assert last.records[0].timestamp == 1005


def test_keyless_records_in_the_range_are_dropped_and_counted():
    """CONFORMANCE.md 14."""
    source = seg(0, batch(rec(0, None), rec(1, "a"), rec(2, None), rec(3, b"")))
    done = run(source)
    assert (kept(done), done.keyless) == ([1, 3], 2)
    with pytest.raises(KeylessRecords, match="2 records without a key, the first at offset 0"):
        run(source, drop_keyless=False)


def test_segments_at_or_after_the_uncleanable_offset_are_not_read():
    """CONFORMANCE.md 17."""
    done = run(seg(0, batch(rec(0, "a"))), seg(10, b"garbage"), first_uncleanable=10)
    assert [s.base_offset for s in done.segments] == [0]
    assert kept(done) == [0]


# --- tombstones ---


def test_a_tombstone_deletes_older_values_and_gets_a_horizon():
    """CONFORMANCE.md 15, 16 and 22: the timestamp of the tombstone has no effect."""
    source = seg(0, batch(rec(0, "a")), batch(rec(1, "a", None, timestamp=0)))
    (rebuilt,) = decode_log(only(run(source)).log)
    assert [r.offset for r in rebuilt.records] == [1]
    assert rebuilt.delete_horizon_ms == NOW + DAY
    assert (rebuilt.records[0].timestamp, rebuilt.max_timestamp) == (0, 0)


@pytest.mark.parametrize(("horizon", "stays"), [(NOW + 1, True), (NOW, False), (NOW - 1, False)])
def test_a_tombstone_is_removed_at_its_horizon(horizon, stays):
    """CONFORMANCE.md 16 and 22: a horizon never changes, and the batch is copied until then."""
    source = seg(0, batch(rec(0, "a", None), rec(1, "b"), delete_horizon_ms=horizon))
    output = only(run(source)).log
    (left,) = decode_log(output)
    assert [r.offset for r in left.records] == ([0, 1] if stays else [1])
    assert left.delete_horizon_ms == horizon
    assert (output == source.log) is stays


def test_a_horizon_is_set_only_for_a_null_that_is_retained():
    source = seg(0, batch(rec(0, "a", None), rec(1, "b")), batch(rec(2, "a")))
    assert [b.delete_horizon_ms for b in decode_log(only(run(source)).log)] == [None, None]


def test_an_overflowing_horizon_sets_no_flag():
    source = seg(0, batch(rec(0, "a", None), extra_attributes=0x80))
    (rebuilt,) = decode_log(only(run(source, delete_retention_ms=2**63 - 1)).log)
    assert (rebuilt.delete_horizon_ms, rebuilt.attributes) == (None, 0)


# --- empty batches ---


def test_the_last_batch_of_the_round_is_retained_empty_until_it_is_no_longer_last():
    """CONFORMANCE.md 25."""
    expired = seg(0, batch(rec(0, "a")), batch(rec(1, None), rec(2, "b", None), delete_horizon_ms=NOW))
    emptied = decode_log(only(run(expired, first_uncleanable=3)).log)[-1]
    assert (emptied.base_offset, emptied.last_offset, emptied.record_count) == (1, 2, 0)
    assert (emptied.base_timestamp, emptied.attributes, emptied.size) == (-1, 0, 61)
    assert [b.last_offset for b in decode_log(only(run(expired, first_uncleanable=4)).log)] == [0]


def test_with_a_full_map_no_batch_counts_as_the_last_of_the_round():
    """CONFORMANCE.md 25: the first uncleanable offset decides, not the end offset of the map."""
    expired = batch(rec(0, "a", None), delete_horizon_ms=NOW)
    source = seg(0, expired, batch(rec(1, "b")))
    done = run(source, first_uncleanable=2, max_entries=1)
    assert (done.end_offset, kept(done)) == (1, [1])
    assert [b.base_offset for b in decode_log(only(done).log)] == [1]


def test_only_the_last_batch_of_an_active_producer_is_retained_empty():
    """CONFORMANCE.md 23."""
    ids = {"producer_id": 9, "producer_epoch": 0}
    source = seg(
        0,
        batch(rec(0, "a"), base_sequence=0, **ids),
        batch(rec(1, "a"), base_sequence=1, **ids),
        batch(rec(2, "a")),
    )
    log = decode_log(only(run(source, producers={9: (1, 0)})).log)
    assert [(b.base_offset, b.record_count, b.base_sequence) for b in log] == [(1, 0, 1), (2, 1, -1)]
    assert kept(run(source, producers={})) == [2]
    again = decode_log(only(run(source, producers={9: (7, 0)})).log)
    assert [b.base_offset for b in again] == [2]


def test_sequences_reused_from_zero_do_not_protect_old_batches():
    """CONFORMANCE.md 26: the last batch is determined by offset, not by sequence."""
    ids = {"producer_id": 9, "base_sequence": 0}
    source = seg(
        0,
        batch(rec(0, "a"), producer_epoch=0, **ids),
        batch(rec(1, "a"), producer_epoch=1, **ids),
        batch(rec(2, "a")),
    )
    log = decode_log(only(run(source, producers={9: (1, 1)})).log)
    assert [(b.base_offset, b.record_count) for b in log] == [(1, 0), (2, 1)]


def test_emptied_batches_keep_the_same_bytes_in_every_round():
    """CONFORMANCE.md 23."""
    empty = batch(base_offset=0, last_offset=3, producer_id=9, producer_epoch=0, base_sequence=0, max_timestamp=5)
    source = seg(0, empty, batch(rec(4, "a")))
    assert only(run(source, producers={9: (3, 0)})).log == source.log
    assert len(decode_log(only(run(source)).log)) == 1


# --- segments ---


def test_groups_become_one_segment_with_the_first_base_and_the_last_time():
    """CONFORMANCE.md 37."""
    segments = [
        seg(0, batch(rec(0, "a")), mtime_ms=5),
        seg(10, batch(rec(10, "b")), mtime_ms=7),
        seg(20, batch(rec(20, "c")), mtime_ms=9),
    ]
    two = len(segments[0].log) * 2
    done = run(*segments, segment_bytes=two)
    assert [(s.base_offset, s.source_bases, s.mtime_ms) for s in done.segments] == [
        (0, (0, 10), 7),
        (20, (20,), 9),
    ]
    assert done.segments[0].log == segments[0].log + segments[1].log


def test_a_segment_without_retained_records_remains_empty():
    """CONFORMANCE.md 39: empty segments are added to a group at any distance."""
    far = 2**33
    segments = [seg(0, batch(rec(0, "a"))), seg(far, b""), seg(2 * far, batch(rec(2 * far, "a")))]
    done = run(*segments, first_uncleanable=2 * far + 1)
    assert [(s.base_offset, s.source_bases, s.log == b"") for s in done.segments] == [
        (0, (0, far), True),
        (2 * far, (2 * far,), False),
    ]
    assert (done.segments[0].index, done.segments[0].time_index) == (b"", b"")


def test_an_output_has_index_entries_after_each_interval():
    """CONFORMANCE.md 67: after more bytes than the interval, with last offset and start position; the last time index
    entry has the maximum.
    """
    batches = [
        batch(rec(0, "a", timestamp=10), rec(1, "b", timestamp=90)),
        batch(rec(2, "c", timestamp=20)),
        batch(rec(3, "d", timestamp=95), rec(4, "e", timestamp=30)),
        batch(rec(5, "f", timestamp=30)),
    ]
    a, b, c, _ = map(len, batches)
    dense = only(run(seg(0, *batches), index_interval_bytes=0))
    assert dense.index == struct.pack(">6i", 2, a, 4, a + b, 5, a + b + c)
    assert dense.time_index == struct.pack(">qiqi", 90, 1, 95, 4)
    wide = only(run(seg(0, *batches), index_interval_bytes=a))
    assert wide.index == struct.pack(">ii", 4, a + b)
    assert wide.time_index == struct.pack(">qi", 95, 4)


def test_indexes_without_timestamps_are_relative_to_their_base():
    log = batch(rec(70, "a", timestamp=-1)) + batch(rec(79, "b", timestamp=-1))
    assert index_files(log, 70, 0) == (struct.pack(">ii", 9, len(log) // 2), b"")
    assert index_files(batch(rec(79, "a", timestamp=0)), 70, 0) == (b"", struct.pack(">qi", 0, 9))


def test_the_time_index_contains_the_earliest_batch_of_the_largest_timestamp():
    """CONFORMANCE.md 67."""
    log = b"".join(batch(rec(i, "a", timestamp=9)) for i in range(3))
    assert index_files(log, 0, 0)[1] == struct.pack(">qi", 9, 0)


def test_full_indexes_are_errors():
    """The time index reserves room for its last entry, so it is full one entry earlier."""
    untimed = [batch(rec(i, "a", timestamp=-1)) for i in range(5)]
    assert len(index_files(b"".join(untimed[:4]), 0, 0, segment_index_bytes=24)[0]) == 24
    with pytest.raises(ValueError, match="offset index is full"):
        index_files(b"".join(untimed), 0, 0, segment_index_bytes=24)
    timed = b"".join(batch(rec(i, "a", timestamp=i)) for i in range(3))
    assert len(index_files(timed, 0, 0, segment_index_bytes=36)[1]) == 24
    with pytest.raises(ValueError, match="time index is full"):
        index_files(timed, 0, 0, segment_index_bytes=35)


def test_a_second_round_at_the_same_clock_changes_nothing():
    source = seg(0, batch(rec(0, "a"), rec(1, "b", None), rec(2, "a")), batch(rec(3, "c"), codec=4))
    once = only(run(source))
    twice = only(run(Segment(0, once.log)))
    assert (twice.log, twice.index, twice.time_index) == (once.log, once.index, once.time_index)


# --- transactions ---

PID = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0, "transactional": True}
MARKER = {"producer_id": 7, "producer_epoch": 0}


def test_aborted_records_are_removed_and_their_marker_one_round_later():
    """CONFORMANCE.md 11, 28 and 30."""
    entry = Aborted(7, 0, 1, 2)
    source = seg(
        0,
        batch(rec(0, "a"), **PID),
        encode_marker(1, 1001, commit=False, **MARKER),
        batch(rec(2, "b")),
        aborted=(entry,),
    )
    assert build_map([source], 0, 100, 10) == ({b"b": 2}, 99)
    first = only(run(source))
    assert first.txn_index == entry.encode()
    assert first.log == source.log[-len(first.log) :]
    assert [b.base_offset for b in decode_log(first.log)] == [1, 2]

    second = only(run(Segment(0, first.log, aborted=(entry,)), now=NOW + 1))
    assert second.txn_index == b""
    marker = decode_log(second.log)[0]
    assert (marker.base_offset, marker.delete_horizon_ms) == (1, NOW + 1 + DAY)

    early = only(run(Segment(0, second.log), now=NOW + DAY))
    assert early.log == second.log
    late = only(run(Segment(0, second.log), now=NOW + 1 + DAY))
    assert [b.base_offset for b in decode_log(late.log)] == [2]


def test_a_commit_marker_is_retained_with_data_of_its_transaction():
    """CONFORMANCE.md 19 and 29: a record with the key of a marker does not change this."""
    source = seg(
        0,
        batch(rec(0, "a"), **PID),
        encode_marker(1, 1001, commit=True, **MARKER),
        batch(rec(2, struct.pack(">hh", 0, 1))),
    )
    assert only(run(source)).log == source.log
    without_data = seg(0, source.log[len(batch(rec(0, "a"), **PID)) :])
    marker = decode_log(only(run(without_data)).log)[0]
    assert (marker.base_offset, marker.delete_horizon_ms) == (1, NOW + DAY)


def test_transactions_across_segments_of_a_group_are_tracked():
    """CONFORMANCE.md 31."""
    entry = Aborted(7, 0, 10, 11)
    segments = [
        seg(0, batch(rec(0, "a"), **PID)),
        seg(10, encode_marker(10, 1010, commit=False, **MARKER), batch(rec(11, "b")), aborted=(entry,)),
    ]
    for limit in (10**6, 1):
        done = run(*segments, segment_bytes=limit)
        assert kept(done) == [10, 11]
        assert done.segments[-1].txn_index == entry.encode()


def test_the_aborted_last_batch_of_a_producer_is_retained_empty():
    """CONFORMANCE.md 24."""
    source = seg(
        0,
        batch(rec(0, "a"), **PID),
        encode_marker(1, 1001, commit=False, **MARKER),
        aborted=(Aborted(7, 0, 1, 2),),
    )
    log = decode_log(only(run(source, producers={7: (0, 0)})).log)
    assert [(b.base_offset, b.record_count) for b in log] == [(0, 0), (1, 1)]
    assert log[0].transactional


def test_an_empty_control_batch_is_retained_only_for_its_producer():
    """CONFORMANCE.md 27: a producer without data is known by its epoch."""
    empty = batch(base_offset=0, last_offset=0, transactional=True, control=True, producer_id=7, producer_epoch=0)
    source = seg(0, empty, batch(rec(1, "a")))
    assert only(run(source, producers={7: (None, 0)})).log == source.log
    for producers in ({7: (None, 1)}, {7: (5, 0)}, {}):
        assert [b.base_offset for b in decode_log(only(run(source, producers=producers)).log)] == [1]


def test_a_producer_without_data_protects_no_data_batch():
    """CONFORMANCE.md 27."""
    source = seg(0, batch(rec(0, "a"), **PID), batch(rec(1, "a")))
    assert len(decode_log(only(run(source, producers={7: (None, 0)})).log)) == 1


@pytest.mark.parametrize("commit", [True, False])
def test_a_marker_is_not_retained_for_the_data_of_an_earlier_transaction(commit):
    """CONFORMANCE.md 29 and 30."""
    aborted = () if commit else (Aborted(7, 0, 1, 2), Aborted(7, 2, 3, 4))
    source = seg(
        0,
        batch(rec(0, "a"), **PID),
        encode_marker(1, 1001, commit=commit, **MARKER),
        batch(rec(2, "b")),
        encode_marker(3, 1003, commit=commit, **MARKER),
        aborted=aborted,
    )
    output = only(run(source))
    horizons = {b.base_offset: b.delete_horizon_ms for b in decode_log(output.log) if b.control}
    assert horizons == {1: None, 3: NOW + DAY}
    assert output.txn_index == b"".join(entry.encode() for entry in aborted[:1])


def test_each_output_has_the_aborted_transactions_of_its_own_markers():
    """CONFORMANCE.md 32."""
    entries = Aborted(7, 0, 1, 2), Aborted(7, 10, 11, 12)
    segments = [
        seg(
            base,
            batch(rec(base, "a"), **PID),
            encode_marker(base + 1, 1000, commit=False, **MARKER),
            aborted=(entry,),
        )
        for base, entry in zip((0, 10), entries, strict=True)
    ]
    apart = run(*segments, segment_bytes=1)
    assert [s.txn_index for s in apart.segments] == [entry.encode() for entry in entries]
    assert only(run(*segments)).txn_index == entries[0].encode() + entries[1].encode()


def test_aborted_transactions_that_ended_below_the_log_start_count_as_committed():
    source = seg(
        0,
        batch(rec(0, "a"), **PID),
        encode_marker(1, 1001, commit=False, **MARKER),
        batch(rec(2, "b")),
        aborted=(Aborted(7, 0, 1, 2),),
    )
    done = run(source, first_dirty=2, log_start_offset=2)
    assert (kept(done), only(done).txn_index) == ([0, 1, 2], b"")
    assert kept(run(source, first_dirty=2, log_start_offset=1)) == [1, 2]


# Properties


@st.composite
def random_segments(draw):
    """Draw up to 4 segments of small batches over 3 keys, with gaps, tombstones and horizons of earlier rounds."""
    offset, segments = 0, []
    for _ in range(draw(st.integers(1, 4))):
        base, batches = offset, []
        for _ in range(draw(st.integers(0, 3))):
            records = []
            for key in draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=4)):
                records.append(rec(offset, key, draw(st.sampled_from([b"1", b"22", None]))))
                offset += draw(st.integers(1, 3))
            horizon = draw(st.sampled_from([None, None, NOW - 1, NOW, NOW + 1]))
            batches.append(batch(*records, delete_horizon_ms=horizon, last_offset=offset - 1))
        segments.append(seg(base, *batches, mtime_ms=base))
        offset += draw(st.integers(1, 5))
    return segments, offset


@settings(deadline=None, max_examples=draws(150))
@given(random_segments(), st.integers(1, 4), st.integers(50, 400))
def test_invariants_of_a_round(made, max_entries, segment_bytes):
    """CONFORMANCE.md 12 to 16, 18: what may be removed, what must be retained, and that nothing is added or moved."""
    segments, end = made
    source = [(r, b) for s in segments for b in decode_log(s.log) for r in b.records]
    given = {"first_uncleanable": end, "segment_bytes": segment_bytes}
    done = run(*segments, max_entries=max_entries, **given)
    result = [r for s in done.segments for r in all_records(decode_log(s.log))]
    untouched = [r for s in segments if s.base_offset >= done.end_offset for r in all_records(decode_log(s.log))]
    assert set(result) <= {r for r, _ in source}
    assert [r.offset for r in result] == sorted(r.offset for r in result)
    assert done.messages_written == len(result)
    assert done.messages_read == len(source) - len(untouched)

    newest = {r.key: r.offset for r, _ in source if r.offset < done.end_offset}
    for record, home in source:
        if record in untouched:
            continue
        expired = record.value is None and home.delete_horizon_ms is not None and home.delete_horizon_ms <= NOW
        beyond = record.offset >= done.end_offset
        stays = beyond or (record.offset == newest[record.key] and not expired)
        assert (record in result) is stays


@settings(deadline=None, max_examples=draws(150))
@given(random_segments(), st.integers(50, 400))
def test_a_second_round_changes_no_batch(made, segment_bytes):
    segments, end = made
    given = {"first_uncleanable": end, "segment_bytes": segment_bytes}
    once = run(*segments, **given)
    twice = run(*(Segment(s.base_offset, s.log, mtime_ms=s.mtime_ms) for s in once.segments), **given)
    assert b"".join(s.log for s in twice.segments) == b"".join(s.log for s in once.segments)
