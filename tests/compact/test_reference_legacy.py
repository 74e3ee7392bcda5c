"""Results of the reference cleaner for messages of magic 0 and 1, in rounds written by hand (LEGACY.md, "As version
2").
"""

from __future__ import annotations

import pytest

from tests.reference.batches import Batch, Rec, decode_log, encode_batch
from tests.reference.cleaner import Round, Segment, clean, file_horizon_ms
from tests.reference.legacy import encode_single, encode_wrapper

NOW = 2_000_000_000_000
RETENTION = 1000
GZIP = 1


def rec(offset: int, key: bytes | None, value: bytes | None = b"v") -> Rec:
    return Rec(offset, 5000 + offset, key, value)


def run(*segments: Segment, first_dirty: int = 0, first_uncleanable: int = 100) -> Round:
    return clean(
        segments,
        first_dirty=first_dirty,
        first_uncleanable=first_uncleanable,
        now_ms=NOW,
        delete_retention_ms=RETENTION,
    )


def batches(round_: Round) -> list[Batch]:
    return [batch for segment in round_.segments for batch in decode_log(segment.log)]


def test_unchanged_messages_are_written_as_version_2() -> None:
    records = [rec(3, b"a"), rec(7, b"b")]
    source = Segment(0, encode_single(rec(1, b"c")) + encode_wrapper(records, GZIP))
    single, packed = batches(run(source))
    assert single == decode_log(encode_batch([rec(1, b"c")], leader_epoch=-1))[0]
    assert (packed.records, packed.codec, packed.leader_epoch) == (tuple(records), GZIP, -1)
    assert len(run(source).segments[0].log) > len(source.log)


def test_the_span_shrinks_to_the_retained_records() -> None:
    source = Segment(0, encode_wrapper([rec(3, b"a"), rec(4, b"b"), rec(5, b"a")], GZIP))
    source = Segment(0, source.log + encode_single(rec(8, b"a")))
    first, _ = batches(run(source))
    assert (first.base_offset, first.last_offset, first.base_timestamp, first.max_timestamp) == (4, 4, 5004, 5004)


def test_timestamps_and_their_type_are_retained() -> None:
    old = encode_wrapper([rec(0, b"a"), rec(1, b"b")], GZIP, magic=0)
    append_time = encode_wrapper([rec(2, b"c"), rec(3, b"d")], GZIP, append_time=7777)
    first, second = batches(run(Segment(0, old + append_time)))
    assert (first.timestamp_type, first.base_timestamp, first.max_timestamp) == (0, -1, -1)
    assert (second.timestamp_type, second.base_timestamp, second.max_timestamp) == (1, 7777, 7777)


def test_append_time_applies_to_magic_0_messages_inside_only_through_the_header() -> None:
    data = encode_wrapper([rec(0, b"a"), rec(1, b"b")], GZIP, inner_magics=[0, 1], append_time=7777)
    (batch,) = batches(run(Segment(0, data)))
    assert (batch.base_timestamp, batch.max_timestamp) == (-1, 7777)


@pytest.mark.parametrize(("mtime_ms", "is_removed"), [(8999, True), (9000, True), (9001, False)])
def test_a_tombstone_is_removed_by_the_time_of_its_file(mtime_ms: int, is_removed: bool) -> None:
    """The horizon, 10000, is the time of the last clean segment minus delete.retention.ms, 1000 ms."""
    segments = [
        Segment(0, encode_single(rec(0, b"a", None)), mtime_ms=mtime_ms),
        Segment(10, encode_single(rec(10, b"b")), mtime_ms=10_000),
        Segment(20, encode_single(rec(20, b"c")), mtime_ms=99_000),
    ]
    found = batches(run(*segments, first_dirty=20))
    assert [batch.base_offset for batch in found] == ([10, 20] if is_removed else [0, 10, 20])
    if not is_removed:
        assert found[0].delete_horizon_ms == NOW + RETENTION
        assert found[0].records == (rec(0, b"a", None),)


@pytest.mark.parametrize(("first_dirty", "horizon"), [(0, 0), (1, 4000), (10, 4000), (11, 9000), (40, 19_000)])
def test_the_segment_with_the_first_dirty_offset_inside_counts_as_clean(first_dirty: int, horizon: int) -> None:
    segments = [Segment(base, b"", mtime_ms=5000 + base * 500) for base in (0, 10, 30)]
    assert file_horizon_ms(segments, first_dirty, RETENTION) == horizon


def test_without_clean_segments_only_files_of_the_year_1970_lose_tombstones() -> None:
    removed = Segment(0, encode_single(rec(0, b"a", None)), mtime_ms=0)
    kept = Segment(0, removed.log, mtime_ms=1)
    assert batches(run(removed)) == []
    assert [batch.base_offset for batch in batches(run(kept))] == [0]


def test_an_empty_last_batch_of_the_round_is_an_error() -> None:
    segments = [
        Segment(0, encode_single(rec(0, b"a", None)), mtime_ms=0),
        Segment(1, encode_single(rec(1, b"b"))),
    ]
    assert batches(run(segments[0], first_uncleanable=2)) == []
    with pytest.raises(ValueError, match="Empty batches are only supported for magic v2"):
        run(*segments, first_uncleanable=1)


def test_tombstones_of_both_kinds_in_one_file_follow_their_own_rules() -> None:
    """A tombstone of magic 2 without a horizon is retained for any file time."""
    log = encode_single(rec(0, b"a", None)) + encode_batch([rec(1, b"b", None)])
    (left,) = batches(run(Segment(0, log, mtime_ms=0)))
    assert left.base_offset == 1
