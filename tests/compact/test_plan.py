"""The selection of segments to clean and their grouping: examples, and comparisons with the reference model."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.compact.plan import (
    decide,
    group_segments,
    refusals,
    segments_between,
    select,
    settings_of_compaction,
)
from keytail.compact.rules import Rules
from keytail.config.compaction import CompactionConfig
from keytail.log.partition import PartitionFacts, SegmentFacts
from keytail.log.producers import Unstable
from tests.chance import draws
from tests.reference import selection as model

NOW = 1_700_000_000_000
COMPACT = CompactionConfig(cleanup_policy=frozenset({"compact"}))
INT_MAX = 2**31 - 1


def segment(base, log_bytes=100, *, index=8, time_index=12, largest=1000, first=1000, mtime=1000):
    return SegmentFacts(
        base_offset=base,
        log_bytes=log_bytes,
        log_mtime_ns=mtime * 1_000_000,
        index_bytes=index,
        time_index_bytes=time_index,
        txn_index_bytes=None,
        largest_timestamp_ms=largest,
        first_batch_timestamp_ms=first,
    )


def partition(segments=None, **given):
    """Return a partition, cleanly shut down, with segments of 100 bytes at 0, 10, 20 and an active one of 5 offsets."""
    fields = {
        "topic": "orders",
        "partition": 0,
        "log_dir": "/logs",
        "path": "/logs/orders-0",
        "segments": tuple(map(segment, (0, 10, 20, 30))) if segments is None else tuple(segments),
        "snapshots": (),
        "log_start_offset": 0,
        "log_end_offset": 35,
        "high_watermark": 35,
        "recovery_point": 35,
        "clean_shutdown": True,
        "cleaner_checkpoint": None,
        "problems": (),
    }
    return PartitionFacts(**fields | given)


def config(**given):
    return dataclasses.replace(COMPACT, **given)


# --- the first dirty offset ---


@pytest.mark.parametrize(
    ("checkpoint", "log_start", "first_dirty", "rewrite"),
    [
        (None, 0, 0, False),
        (None, 12, 12, False),
        (15, 0, 15, False),
        (12, 12, 12, False),
        (35, 0, 35, False),
        (36, 0, 0, True),
        (11, 12, 12, True),
    ],
)
def test_checkpoint_outside_the_log_is_reset_to_the_log_start(checkpoint, log_start, first_dirty, rewrite):
    """CONFORMANCE.md 54."""
    got = select(partition(cleaner_checkpoint=checkpoint, log_start_offset=log_start), COMPACT, NOW)
    assert (got.first_dirty_offset, got.rewrite_checkpoint) == (first_dirty, rewrite)


def test_a_reset_checkpoint_is_rewritten_even_if_no_round_is_due():
    """CONFORMANCE.md 54."""
    got = select(partition(cleaner_checkpoint=99), config(min_cleanable_dirty_ratio=1.0), NOW)
    assert (got.eligible, got.rewrite_checkpoint) == (False, True)


def test_from_log_start_ignores_the_checkpoint_only():
    got = select(partition(cleaner_checkpoint=20, log_start_offset=3), COMPACT, NOW, from_log_start=True)
    assert (got.first_dirty_offset, got.rewrite_checkpoint) == (3, False)
    assert select(partition(cleaner_checkpoint=36), COMPACT, NOW, from_log_start=True).rewrite_checkpoint


@pytest.mark.parametrize("start", [30, 33])
def test_dirty_offset_in_the_active_segment_is_not_selected(start):
    """CONFORMANCE.md 55."""
    for facts in (partition(cleaner_checkpoint=start), partition(log_start_offset=start)):
        got = select(facts, COMPACT, NOW, force=True)
        assert (got.eligible, got.cleanable_bytes, got.first_uncleanable_offset) == (False, 0, 30)
        assert got.is_clean
        assert "the active segment starts at offset 30" in got.blocker


# --- the first uncleanable offset ---


@pytest.mark.parametrize(
    ("high_watermark", "first_uncleanable", "limit"),
    [
        (0, 0, "high watermark"),
        (9, 0, "high watermark"),
        (10, 10, "high watermark"),
        (29, 20, "high watermark"),
        (30, 30, "active segment"),
        (35, 30, "active segment"),
        (10**12, 30, "active segment"),
        (-5, 0, "high watermark"),
    ],
)
def test_high_watermark_is_bounded_and_rounded_down_to_a_segment(high_watermark, first_uncleanable, limit):
    """CONFORMANCE.md 56."""
    got = select(partition(high_watermark=high_watermark), COMPACT, NOW)
    assert (got.first_uncleanable_offset, got.limit) == (first_uncleanable, limit)


def test_high_watermark_below_the_log_start_is_treated_as_the_log_start():
    got = select(partition(high_watermark=3, log_start_offset=12), COMPACT, NOW)
    assert (got.first_dirty_offset, got.first_uncleanable_offset, got.cleanable_bytes) == (12, 10, 0)


def test_without_a_high_watermark_nothing_is_cleaned_unless_the_log_end_replaces_it():
    got = select(partition(high_watermark=None), COMPACT, NOW)
    assert (got.first_uncleanable_offset, got.eligible, got.limit) == (0, False, "high watermark")
    assert "the partition has no high watermark" in got.blocker
    taken = select(partition(high_watermark=None), COMPACT, NOW, high_watermark="log-end")
    assert (taken.first_uncleanable_offset, taken.eligible) == (30, True)
    kept = select(partition(high_watermark=10), COMPACT, NOW, high_watermark="log-end")
    assert kept.first_uncleanable_offset == 10


def test_open_transaction_bounds_cleaning_and_is_raised_to_the_log_start():
    """CONFORMANCE.md 34 and 56."""
    got = select(partition(), COMPACT, NOW, unstable=Unstable(25, "why"))
    assert (got.first_uncleanable_offset, got.limit) == (20, "open transaction")
    got = select(partition(log_start_offset=12), COMPACT, NOW, unstable=Unstable(3, "open transaction of"))
    assert (got.first_uncleanable_offset, got.cleanable_bytes) == (10, 0)
    assert got.blocker.endswith("open transaction of")


def test_unclean_shutdown_bounds_cleaning_by_the_recovery_point():
    got = select(partition(clean_shutdown=False, recovery_point=25), COMPACT, NOW)
    assert (got.first_uncleanable_offset, got.limit) == (20, "recovery point")
    assert select(partition(clean_shutdown=True, recovery_point=25), COMPACT, NOW).limit == "active segment"
    never = select(partition(clean_shutdown=False, recovery_point=5), COMPACT, NOW, force=True)
    assert not never.eligible
    assert "the recovery point after an unclean shutdown is 5" in never.blocker


def test_with_a_checkpoint_above_the_recovery_point_nothing_is_cleaned():
    """A round also rewrites the clean section, so no round may run if the dirty section starts above that point."""
    facts = partition(clean_shutdown=False, recovery_point=5, cleaner_checkpoint=20)
    assert not select(facts, COMPACT, NOW, force=True).eligible


@pytest.mark.parametrize(("largest", "first_uncleanable"), [(NOW - 101, 30), (NOW - 100, 30), (NOW - 99, 10)])
def test_minimum_lag_is_strict(largest, first_uncleanable):
    """CONFORMANCE.md 56."""
    facts = partition([segment(0), segment(10, largest=largest), segment(20), segment(30, largest=NOW)])
    got = select(facts, config(min_compaction_lag_ms=100), NOW)
    assert got.first_uncleanable_offset == first_uncleanable


def test_minimum_lag_applies_to_dirty_segments_only():
    """CONFORMANCE.md 56."""
    facts = partition([segment(0, largest=NOW), segment(10), segment(20), segment(30)], cleaner_checkpoint=10)
    assert select(facts, config(min_compaction_lag_ms=100), NOW).first_uncleanable_offset == 30
    inside = partition([segment(0, largest=NOW), segment(10), segment(20), segment(30)], cleaner_checkpoint=9)
    assert select(inside, config(min_compaction_lag_ms=100), NOW).first_uncleanable_offset == 0


def test_without_a_minimum_lag_the_newest_segment_is_cleanable():
    facts = partition([segment(0, largest=NOW + 5), segment(10)], log_end_offset=15, high_watermark=15)
    assert select(facts, COMPACT, NOW).first_uncleanable_offset == 10


# --- bytes, ratio, lag ---


def test_bytes_and_ratio_exclude_uncleanable_and_active_segments():
    """CONFORMANCE.md 57."""
    facts = partition(
        [segment(0, 300), segment(10, 100), segment(20, 7000), segment(30, 9000)],
        cleaner_checkpoint=10,
        high_watermark=22,
    )
    got = select(facts, COMPACT, NOW)
    assert (got.clean_bytes, got.cleanable_bytes, got.total_bytes) == (300, 100, 400)
    assert got.dirty_ratio == 0.25


def test_a_segment_with_the_first_dirty_offset_inside_counts_twice():
    facts = partition([segment(0, 646), segment(10)], cleaner_checkpoint=5, log_end_offset=12)
    got = select(facts, COMPACT, NOW)
    assert (got.clean_bytes, got.cleanable_bytes, got.dirty_ratio) == (646, 646, 0.5)


@pytest.mark.parametrize(
    ("dirty_bytes", "minimum", "eligible"),
    [(100, 0.5, False), (101, 0.5, True), (0, 0.0, False), (1, 0.0, True), (100, 1.0, False)],
)
def test_the_ratio_must_be_exceeded(dirty_bytes, minimum, eligible):
    """CONFORMANCE.md 69."""
    facts = partition([segment(0, 100), segment(10, dirty_bytes), segment(20)], cleaner_checkpoint=10)
    got = select(facts, config(min_cleanable_dirty_ratio=minimum), NOW)
    assert got.eligible is eligible


def test_a_whole_dirty_log_does_not_exceed_a_ratio_of_one():
    """CONFORMANCE.md 69."""
    assert select(partition(), COMPACT, NOW).dirty_ratio == 1.0
    assert not select(partition(), config(min_cleanable_dirty_ratio=1.0), NOW).eligible


def test_the_ratio_of_empty_segments_is_0():
    got = select(partition([segment(0, 0), segment(10, 0), segment(20, 0)]), COMPACT, NOW)
    assert (got.total_bytes, got.dirty_ratio, got.eligible) == (0, 0.0, False)


def test_force_ignores_the_ratio_but_not_an_empty_section():
    never_due = config(min_cleanable_dirty_ratio=1.0)
    assert select(partition(), never_due, NOW, force=True).eligible
    assert not select(partition(high_watermark=3), never_due, NOW, force=True).eligible
    assert not select(partition(), CompactionConfig(), NOW, force=True).eligible


@pytest.mark.parametrize(("first", "overdue"), [(NOW - 101, True), (NOW - 100, False), (0, False), (-1, False)])
def test_maximum_lag_is_strict_and_ignores_missing_times(first, overdue):
    """CONFORMANCE.md 56 and 69."""
    facts = partition([segment(0, first=NOW), segment(10, first=first), segment(20, first=NOW), segment(30)])
    got = select(facts, config(max_compaction_lag_ms=100, min_cleanable_dirty_ratio=1.0), NOW)
    assert (got.must_compact_now, got.eligible) == (overdue, overdue)


def test_maximum_lag_applies_to_dirty_inactive_segments_only():
    """CONFORMANCE.md 56."""
    lag = config(max_compaction_lag_ms=100, min_cleanable_dirty_ratio=1.0)
    old_clean = [segment(0, first=1), segment(10, first=NOW), segment(20, first=NOW), segment(30, first=1)]
    assert not select(partition(old_clean, cleaner_checkpoint=10), lag, NOW).must_compact_now
    assert select(partition(old_clean, cleaner_checkpoint=9), lag, NOW).must_compact_now


def test_maximum_lag_needs_cleanable_bytes():
    """CONFORMANCE.md 69."""
    lag = config(max_compaction_lag_ms=100)
    got = select(partition(high_watermark=5), lag, NOW)
    assert (got.must_compact_now, got.eligible) == (True, False)


def test_logs_without_bytes_are_skipped():
    """CONFORMANCE.md 69."""
    got = select(partition([segment(0, 0), segment(10, 0)]), COMPACT, NOW, force=True)
    assert not got.eligible
    assert got.total_bytes == 0
    nothing = select(partition([]), COMPACT, NOW)
    assert (nothing.eligible, nothing.blocker) == (False, "the partition has no segments")
    assert not nothing.rewrite_checkpoint and not nothing.must_compact_now and nothing.is_clean


@pytest.mark.parametrize(
    ("facts", "given", "blocker"),
    [
        (
            partition([segment(0, 69), segment(10, 31), segment(20)], cleaner_checkpoint=10),
            {},
            "dirty ratio 0.31 is not above min.cleanable.dirty.ratio 0.5",
        ),
        (
            partition(high_watermark=9),
            {},
            "nothing to clean from first dirty offset 0 on: the high watermark is 9",
        ),
        (
            partition([segment(0, largest=NOW - 5), segment(10)]),
            {"min_compaction_lag_ms": 60_000},
            "nothing to clean from first dirty offset 0 on: the segment at offset 0 is 5 ms old, younger "
            "than min.compaction.lag.ms 60000 (1 min)",
        ),
        (
            partition(),
            {"cleanup_policy": frozenset({"delete"})},
            "cleanup.policy is [delete], without compact",
        ),
        (partition(), {"cleanup_policy": frozenset()}, "cleanup.policy is [], without compact"),
    ],
)
def test_blockers_name_the_rule_and_its_numbers(facts, given, blocker):
    assert select(facts, config(**given), NOW).blocker == blocker


@pytest.mark.parametrize(
    ("facts", "given", "remedy"),
    [
        (partition([segment(0, 69), segment(10, 31), segment(20)], cleaner_checkpoint=10), {}, "--force compacts"),
        (partition(high_watermark=9), {}, "followers catch up"),
        (partition(clean_shutdown=False, recovery_point=3), {}, "Start the broker, which recovers the log"),
        (partition([segment(0, largest=NOW - 5), segment(10)]), {"min_compaction_lag_ms": 60_000}, "Nothing to do"),
        (partition(), {"cleanup_policy": frozenset({"delete"})}, "Nothing to do"),
        (partition([segment(0)]), {}, "Nothing to do"),
        (partition([]), {}, "Nothing to do"),
    ],
)
def test_each_reason_not_to_compact_has_a_remedy(facts, given, remedy):
    got = select(facts, config(**given), NOW)
    assert got.blocker
    assert remedy in got.remedy
    assert got.held_back == ""


def test_the_reason_why_the_section_of_a_due_partition_ends_is_named():
    got = select(partition(), COMPACT, NOW, unstable=Unstable(25, "open transaction of producer id 7"))
    assert (got.eligible, got.remedy) == (True, "")
    assert got.held_back == (
        "cleaned only up to offset 20: open transaction of producer id 7. Let the transaction end, or abort it "
        "(kafka-transactions.sh), while the broker runs"
    )
    assert select(partition(), COMPACT, NOW).held_back == "", "no reason is needed for the active segment"


# --- refusals and decisions ---


UNKNOWN = "topic config unknown: no metadata log"


def test_a_valid_partition_is_not_refused():
    assert refusals(partition(), COMPACT, "", NOW) == []


@pytest.mark.parametrize(
    ("facts", "given", "unknown", "start"),
    [
        (partition(), {}, UNKNOWN, "topic config unknown: no metadata log"),
        (partition(high_watermark=None), {}, "", "no high watermark: "),
        (partition(), {"remote_storage_enable": True}, "", "tiered topic: remote.storage.enable is true"),
        (
            partition(log_start_offset=40),
            {},
            "",
            "log end offset 35 is below the log start offset 40",
        ),
        (
            partition([segment(0, mtime=NOW + 3_600_001), segment(10)]),
            {},
            "",
            f"the clock ({NOW} ms) is 1 h behind the newest segment",
        ),
        (partition(problems=("a -future directory exists",)), {}, "", "a -future directory exists"),
    ],
)
def test_each_reason_to_refuse_is_reported(facts, given, unknown, start):
    (reason,) = refusals(facts, config(**given), unknown, NOW)
    assert reason.startswith(start)
    decision = decide(facts, config(**given), unknown, Rules(NOW, force=True), policy_known=not unknown)
    assert (decision.status, decision.error, decision.selection) == ("refused", reason, None)


def test_small_differences_and_states_that_a_flag_allows_are_not_refused():
    assert refusals(partition([segment(0, mtime=NOW + 3_600_000)]), COMPACT, "", NOW) == []
    late = partition([segment(0, mtime=NOW * 2)])
    assert refusals(late, COMPACT, "", NOW, unsafe_clock=True) == []
    assert refusals(partition(high_watermark=None), COMPACT, "", NOW, high_watermark="log-end") == []


def test_all_reasons_are_reported_together():
    decision = decide(partition(high_watermark=None, problems=("x",)), COMPACT, UNKNOWN, Rules(NOW), policy_known=False)
    assert decision.status == "refused"
    assert decision.error.startswith("x; topic config unknown")
    assert "; no high watermark" in decision.error


def test_a_known_policy_without_compact_is_skipped_and_not_refused():
    facts = partition(high_watermark=None, problems=("x",))
    decision = decide(facts, CompactionConfig(), UNKNOWN, Rules(NOW), policy_known=True)
    assert (decision.status, decision.error) == ("skipped", "cleanup.policy is [delete], without compact")
    assert decide(facts, CompactionConfig(), UNKNOWN, Rules(NOW), policy_known=False).status == "refused"


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        (partition(), "would-compact"),
        (partition(cleaner_checkpoint=30), "clean"),
        (partition([segment(0)]), "clean"),
        (partition(high_watermark=3), "skipped"),
        (partition([segment(0, 100), segment(10, 50), segment(20)], cleaner_checkpoint=10), "skipped"),
    ],
)
def test_the_status_of_a_plan_follows_from_the_decision(facts, status):
    decision = decide(facts, COMPACT, "", Rules(NOW), policy_known=True)
    assert decision.status == status
    assert bool(decision.error) == (status != "would-compact")


def test_settings_of_a_compaction_are_listed():
    """Without `force`, the settings that make a partition due are also listed."""
    assert set(settings_of_compaction(force=True)) == {
        "cleanup.policy", "delete.retention.ms", "min.compaction.lag.ms", "remote.storage.enable"
    }  # fmt: skip
    due = {*settings_of_compaction()} - {*settings_of_compaction(force=True)}
    assert due == {"max.compaction.lag.ms", "min.cleanable.dirty.ratio"}


# --- ranges of segments ---


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 30, (0, 3)),
        (5, 30, (0, 3)),
        (10, 30, (1, 3)),
        (10, 31, (1, 4)),
        (29, 30, (2, 3)),
        (29, 29, (3, 3)),
        (10, 10, (1, 1)),
        (99, 100, (3, 4)),
    ],
)
def test_segments_between_two_offsets_are_found(start, end, expected):
    assert segments_between(partition().segments, start, end) == expected


def test_segments_between_without_a_lower_bound_starts_at_the_first_segment():
    segments = [segment(10), segment(20)]
    assert segments_between(segments, 3, 15) == (0, 1)
    assert segments_between(segments, 3, 10) == (0, 0)
    assert segments_between(segments, 3, 99) == (0, 2)
    with pytest.raises(ValueError, match="ends at 4, before its start 5"):
        segments_between(segments, 5, 4)


# --- grouping ---


def grouped(segments, end=30, uncleanable=30, segment_bytes=10**9, index_bytes=10**9):
    return group_segments(segments, end, uncleanable, segment_bytes, index_bytes)


ALL, TWO_AND_ONE, ALONE = ((0, 3),), ((0, 2), (2, 3)), ((0, 1), (1, 2), (2, 3))


@pytest.mark.parametrize(("limit", "expected"), [(300, ALL), (299, TWO_AND_ONE), (1, ALONE)])
def test_the_logs_of_a_group_may_reach_the_limit_exactly(limit, expected):
    """CONFORMANCE.md 37."""
    assert grouped(partition().segments, segment_bytes=limit) == expected


@pytest.mark.parametrize(("limit", "expected"), [(48, ALL), (47, TWO_AND_ONE), (1, ALONE)])
def test_either_index_of_a_group_may_reach_the_limit_exactly(limit, expected):
    """CONFORMANCE.md 37."""
    by_offset_index = [segment(base, index=16, time_index=12) for base in (0, 10, 20, 30)]
    assert grouped(by_offset_index, index_bytes=limit) == expected
    by_time_index = [segment(base, index=0, time_index=12) for base in (0, 10, 20, 30)]
    assert grouped(by_time_index, index_bytes=limit * 3 // 4) == expected


def test_indexes_count_in_whole_entries_and_a_missing_one_as_empty():
    segments = [segment(0, index=15, time_index=23), segment(10, index=None, time_index=None), segment(20)]
    assert grouped(segments, end=20, index_bytes=12) == ((0, 2),)
    assert grouped(segments, end=20, index_bytes=11) == ((0, 1), (1, 2))
    assert grouped([segment(0), segment(10, index=15, time_index=0)], end=11, index_bytes=16) == ((0, 2),)


def test_groups_stop_at_the_end_offset_and_start_at_the_first_segment():
    segments = partition().segments
    assert grouped(segments, end=20) == ((0, 2),)
    assert grouped(segments, end=21) == ((0, 3),)
    assert grouped(segments, end=0) == ()


def test_span_of_a_group_uses_the_next_base_and_for_the_last_the_uncleanable_offset():
    """CONFORMANCE.md 38."""
    sparse = [segment(0), segment(10), segment(INT_MAX + 1), segment(INT_MAX + 11)]
    top = INT_MAX + 11
    assert grouped(sparse, end=top, uncleanable=top) == ((0, 2), (2, 3))
    further = [segment(0), segment(10), segment(INT_MAX + 2), segment(INT_MAX + 12)]
    assert grouped(further, end=INT_MAX + 11, uncleanable=INT_MAX + 11) == ((0, 1), (1, 3))
    assert grouped(further, end=INT_MAX + 12, uncleanable=INT_MAX + 12) == ((0, 1), (1, 2), (2, 3))
    pair = [segment(0), segment(10)]
    assert grouped(pair, end=11, uncleanable=INT_MAX + 1) == ((0, 2),)
    assert grouped(pair, end=11, uncleanable=INT_MAX + 2) == ((0, 1), (1, 2))


def test_empty_segments_join_a_group_of_any_span():
    """CONFORMANCE.md 38 and 39."""
    far = [segment(0), segment(INT_MAX * 2, 0), segment(INT_MAX * 4, 0), segment(INT_MAX * 6)]
    assert grouped(far, end=INT_MAX * 5, uncleanable=INT_MAX * 6) == ((0, 3),)
    no_index = [segment(0, index=0, time_index=0), segment(INT_MAX, 1, index=0), segment(INT_MAX + 9)]
    assert grouped(no_index, end=INT_MAX + 9, uncleanable=INT_MAX + 9) == ((0, 1), (1, 2))


# Properties

SIZES = st.sampled_from([0, 0, 1, 8, 12, 24, 50, 100])
TIMES = st.sampled_from([-1, 0, 1, 500, NOW - 100, NOW - 99, NOW - 1, NOW, NOW + 9])
GAPS = st.one_of(st.integers(1, 40), st.sampled_from([INT_MAX - 1, INT_MAX, INT_MAX + 1, 2**33]))


@st.composite
def segment_lists(draw):
    base, segments = draw(st.integers(0, 5)), []
    for gap in draw(st.lists(GAPS, min_size=1, max_size=8)):
        segments.append(
            segment(
                base,
                draw(SIZES),
                index=draw(SIZES | st.none()),
                time_index=draw(SIZES | st.none()),
                largest=draw(TIMES),
                first=draw(TIMES),
            )
        )
        base += gap
    return tuple(segments)


@st.composite
def offsets_near(draw, segments):
    """Draw an offset at, near or between the base offsets."""
    near = draw(st.sampled_from([s.base_offset for s in segments]))
    return max(0, near + draw(st.integers(-2, 45)))


@settings(deadline=None, max_examples=draws(300))
@given(st.data())
def test_ranges_equal_those_of_the_model(data):
    segments = data.draw(segment_lists())
    start, end = sorted(data.draw(st.tuples(offsets_near(segments), offsets_near(segments))))
    a, b = segments_between(segments, start, end)
    assert list(segments[a:b]) == model.between(segments, start, end)


@settings(deadline=None, max_examples=draws(400))
@given(st.data())
def test_groups_of_random_segments_equal_those_of_the_model(data):
    """CONFORMANCE.md 37 to 39: the groups cover the range in order, within their limits, and are as large as allowed.
    """
    segments = data.draw(segment_lists())
    end = data.draw(offsets_near(segments))
    uncleanable = end + data.draw(st.sampled_from([0, 1, 7, INT_MAX]))
    log_limit = data.draw(st.sampled_from([0, 1, 100, 150, 10**6]))
    index_limit = data.draw(st.sampled_from([0, 1, 12, 24, 10**6]))
    groups = group_segments(segments, end, uncleanable, log_limit, index_limit)
    assert [[s.base_offset for s in segments[a:b]] for a, b in groups] == model.groups(
        segments, end, uncleanable, log_limit, index_limit
    )

    covered = [i for a, b in groups for i in range(a, b)]
    assert covered == list(range(segments_between(segments, 0, end)[1]))
    for a, b in groups:
        if b - a > 1:
            members = segments[a:b]
            assert sum(s.log_bytes for s in members) <= log_limit
            assert sum((s.index_bytes or 0) // 8 * 8 for s in members) <= index_limit
            assert sum((s.time_index_bytes or 0) // 12 * 12 for s in members) <= index_limit
            filled = [s for s in members[1:] if s.log_bytes]
            assert all(s.base_offset - members[0].base_offset <= INT_MAX for s in filled)


@settings(deadline=None, max_examples=draws(500))
@given(st.data())
def test_selection_equals_that_of_the_model(data):
    """CONFORMANCE.md 54 to 57 and 69, over logs of any shape."""
    segments = data.draw(segment_lists())
    place = offsets_near(segments)
    log_end = segments[-1].base_offset + data.draw(st.integers(0, 9))
    facts = partition(
        segments,
        log_start_offset=min(max(data.draw(place), segments[0].base_offset), log_end),
        log_end_offset=log_end,
        high_watermark=data.draw(place | st.none()),
        cleaner_checkpoint=data.draw(place | st.none()),
        recovery_point=data.draw(place),
        clean_shutdown=data.draw(st.booleans()),
    )
    chosen = config(
        cleanup_policy=frozenset(data.draw(st.sampled_from([("compact",), ("compact", "delete"), ()]))),
        min_compaction_lag_ms=data.draw(st.sampled_from([0, 100, NOW])),
        max_compaction_lag_ms=data.draw(st.sampled_from([1, 100, NOW, 2**63 - 1])),
        min_cleanable_dirty_ratio=data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
    )
    force, whole = data.draw(st.booleans()), data.draw(st.booleans())
    source = data.draw(st.sampled_from(["checkpoint", "log-end"]))
    unstable = data.draw(place | st.none())
    got = select(
        facts,
        chosen,
        NOW,
        force=force,
        from_log_start=whole,
        high_watermark=source,
        unstable=None if unstable is None else Unstable(unstable, "why"),
    )
    expected = model.selection(
        facts, chosen, NOW, force=force, from_log_start=whole, high_watermark=source, unstable=unstable
    )
    assert {name: getattr(got, name) for name in expected} == expected
    assert bool(got.blocker) == (not got.eligible)

    if got.eligible:  # a round changes only segments below all bounds
        bounds = [segments[-1].base_offset]
        bounds += [] if facts.clean_shutdown else [facts.recovery_point]
        bounds += [] if unstable is None else [max(unstable, facts.log_start_offset)]
        assert got.first_dirty_offset < got.first_uncleanable_offset <= min(bounds)
