"""The segments that retention removes, compared with a reference model and with examples, and the decisions that a
broker would make from the indexes.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.errors import CorruptLog, Refused
from keytail.expire.ages import Age, AgeTask, age_tasks, read_age
from keytail.expire.partition import (
    Decision,
    Retention,
    age_candidates,
    decide,
    epochs_from,
    findings,
    refusals,
    removable,
    remove,
)
from keytail.log.fs import LOCAL
from keytail.log.partition import PartitionFacts, SegmentFacts
from tests.chance import draws
from tests.reference.batches import Rec, encode_batch
from tests.reference.legacy import encode_single
from tests.reference.retention import Seg, expired

NOW_MS = 1_700_000_000_000


def facts_of(segs: list[Seg], log_end: int, **more: object) -> PartitionFacts:
    segments = tuple(
        SegmentFacts(seg.base, seg.size, seg.time_ms * 1_000_000, 0, 12, None, seg.time_ms, -1) for seg in segs
    )
    fields: dict[str, object] = {
        "log_start_offset": segs[0].base,
        "high_watermark": log_end,
        "recovery_point": log_end,
        "clean_shutdown": True,
    }
    return PartitionFacts(
        topic="t", partition=0, log_dir="/d", path="/d/t-0", segments=segments, snapshots=(), log_end_offset=log_end,
        cleaner_checkpoint=None, problems=(), **(fields | more),  # type: ignore[arg-type]
    )  # fmt: skip


def ages_of(segs: list[Seg]) -> dict[int, Age]:
    return {seg.base: Age(seg.time_ms) for seg in segs}


# Segments 0, 10, 20 and 30 of 100 bytes each, with log end 40. The last one is a day old, and each of the others a day
# older than the next.
DAY_MS = 86_400_000
FOUR = [Seg(base, 100, NOW_MS - (4 - number) * DAY_MS) for number, base in enumerate((0, 10, 20, 30))]


def decided(retention: Retention, segs: list[Seg] = FOUR, **more: object) -> Decision:
    return decide(facts_of(segs, 40, **more), retention, NOW_MS, ages_of(segs))


def removed(decision: Decision) -> list[tuple[int, str]]:
    return [(segment.base_offset, segment.reason) for segment in decision.expired]


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[Seg], int]:
    count = draw(st.integers(1, 7))
    bases = sorted(draw(st.sets(st.integers(0, 60), min_size=count, max_size=count)))
    segs = [Seg(base, draw(st.integers(0, 4)) * 50, NOW_MS - draw(st.integers(-3, 9))) for base in bases]
    end = bases[-1] + (draw(st.integers(1, 5)) if segs[-1].size else 0)
    return segs, end


@settings(max_examples=draws(500))
@given(
    logs(),
    st.sampled_from([{"delete"}, {"delete"}, {"compact", "delete"}, {"compact"}, set()]),
    st.integers(-1, 9),
    st.integers(-1, 25),
    st.integers(0, 70),
    st.integers(0, 70),
)
def test_decisions_equal_those_of_the_model(
    log: tuple[list[Seg], int], policy: set[str], retention_ms: int, retention_bytes: int, start: int, mark: int
) -> None:
    segs, end = log
    start = min(max(start, segs[0].base), end)
    retention_bytes *= 25 if retention_bytes > 0 else 1
    facts = facts_of(segs, end, log_start_offset=start, high_watermark=mark)
    retention = Retention(frozenset(policy), retention_ms, retention_bytes)
    asked = {segment.base_offset for segment in age_candidates(facts, retention)}
    ages = {base: age for base, age in ages_of(segs).items() if base in asked}
    decision = decide(facts, retention, NOW_MS, ages)
    expected, start_after = expired(
        segs, end, policy=policy, retention_ms=retention_ms, retention_bytes=retention_bytes, log_start=start,
        high_watermark=min(max(mark, start), end), now_ms=NOW_MS,
    )  # fmt: skip
    assert removed(decision) == expected
    assert decision.log_start_offset == start_after
    assert decision.rolls == (len(expected) == len(segs))
    assert bool(decision.kept) != decision.rolls
    assert sum(segment.log_bytes for segment in decision.expired) == sum(s.size for s in segs[: len(expected)])


def test_the_passes_are_applied_in_order() -> None:
    retention = Retention(retention_bytes=200, retention_ms=DAY_MS)
    decision = decided(retention, log_start_offset=12)
    assert removed(decision) == [(0, "log-start"), (10, "size"), (20, "time")]
    assert (decision.log_start_offset, decision.rolls) == (30, False)
    assert "retention.ms is 1 d" in decision.expired[2].why
    assert decision.expired[2].timestamp_ms == NOW_MS - 2 * DAY_MS
    assert "segment 30 is retained" in decision.kept


def test_a_policy_without_delete_has_only_the_first_pass() -> None:
    for policy in ({"compact"}, set()):
        retention = Retention(frozenset(policy), 0, 0)
        assert removed(decided(retention, log_start_offset=20)) == [(0, "log-start"), (10, "log-start")]
        assert decided(retention, log_start_offset=20).log_start_offset == 20
    both = Retention(frozenset({"compact", "delete"}), 0, -1)
    assert len(decided(both).expired) == 4


def test_limits_that_are_met_exactly_are_not_exceeded() -> None:
    assert removed(decided(Retention(retention_ms=4 * DAY_MS))) == []
    assert removed(decided(Retention(retention_ms=4 * DAY_MS - 1))) == [(0, "time")]
    assert removed(decided(Retention(retention_ms=-1, retention_bytes=300))) == [(0, "size")]
    assert removed(decided(Retention(retention_ms=-1, retention_bytes=301))) == []
    assert len(decided(Retention(retention_ms=-1, retention_bytes=0)).expired) == 4
    assert removed(decided(Retention(retention_ms=-1, retention_bytes=-1))) == []


def test_a_pass_ends_at_the_first_segment_that_does_not_qualify() -> None:
    young = [FOUR[0], replace(FOUR[1], time_ms=NOW_MS + 30 * DAY_MS), *FOUR[2:]]
    assert removed(decided(Retention(retention_ms=0), young)) == [(0, "time")]


def test_no_segment_that_ends_above_the_high_watermark_is_removed() -> None:
    for mark, count in ((9, 0), (10, 1), (29, 2), (39, 3), (40, 4)):
        decision = decided(Retention(retention_ms=0), high_watermark=mark)
        assert len(decision.expired) == count
        assert "high watermark" in decision.kept or count == 4
    assert decided(Retention(retention_ms=0), high_watermark=None).expired == ()
    # A high watermark below the log start offset is not trusted.
    assert len(decided(Retention(retention_ms=0), high_watermark=0, log_start_offset=20).expired) == 2
    facts = facts_of(FOUR, 40, high_watermark=None)
    assert removable(facts, "log-end")[0] == 4


def test_the_last_segment_may_be_removed_but_not_an_empty_or_damaged_one() -> None:
    decision = decided(Retention(retention_ms=0))
    assert decision.rolls
    assert (decision.log_start_offset, decision.kept) == (40, "")
    empty = [*FOUR[:3], Seg(40, 0, 0)]
    decision = decided(Retention(retention_ms=0, retention_bytes=0), empty)
    assert len(decision.expired) == 3
    assert "empty" in decision.kept
    decision = decided(Retention(retention_ms=0), tail_bytes=7)
    assert len(decision.expired) == 3
    assert "7 bytes" in decision.kept


def test_after_an_unclean_shutdown_nothing_above_the_recovery_point_is_removed() -> None:
    for point, count in ((0, 0), (19, 1), (20, 2), (40, 3)):
        decision = decided(Retention(retention_ms=0), clean_shutdown=False, recovery_point=point)
        assert len(decision.expired) == count
        assert "unclean" in decision.kept
    decision = decided(Retention(), clean_shutdown=False, recovery_point=10, log_start_offset=30)
    assert removed(decision) == [(0, "log-start")]
    assert len(decided(Retention(retention_ms=0), recovery_point=0).expired) == 4


def test_a_log_start_below_the_first_segment_is_refused() -> None:
    facts = facts_of(FOUR[1:], 40)
    assert refusals(facts, None) == refusals(facts, 10) == refusals(facts, 35) == []
    assert "below the first segment (10)" in refusals(facts, 9)[0]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=6), st.integers(0, 60))
def test_epochs_begin_at_the_log_start(steps: list[tuple[int, int]], start: int) -> None:
    epoch = offset = 0
    entries = []
    for more, further in steps:
        epoch, offset = epoch + more + 1, offset + further + 1
        entries.append((epoch, offset))
    found = epochs_from(entries, start)
    for at in range(start, 70):  # the same epoch applies to each offset that remains
        assert max([e for e, s in found if s <= at], default=-1) == max([e for e, s in entries if s <= at], default=-1)
    assert all(s >= start for _, s in found)
    starts = [s for _, s in found]
    assert starts == sorted(set(starts))


def write_segment(path: Path, base: int, log: bytes) -> AgeTask:
    path.mkdir(exist_ok=True)
    file = path / f"{base:020d}.log"
    file.write_bytes(log)
    return AgeTask(str(path), base, base + 100, len(log), file.stat().st_mtime_ns, 2**62)


def batch(offset: int, *times: int, **more: int) -> bytes:
    return encode_batch([Rec(offset + n, at_ms, b"k", b"v") for n, at_ms in enumerate(times)], **more)


def test_an_age_is_the_largest_timestamp_of_the_checked_batches(tmp_path: Path) -> None:
    rng = random.Random(5)
    times = [rng.randint(0, 10**12) for _ in range(300)]
    log = b"".join(batch(2 * n, at_ms, at_ms - 1) for n, at_ms in enumerate(times[:49]))
    assert read_age(LOCAL, write_segment(tmp_path / "t-0", 0, log)) == Age(max(times[:49]))
    old = encode_single(Rec(0, 77, b"k", b"v"), magic=1) + encode_single(Rec(1, 5, b"k", b"v"), magic=0)
    assert read_age(LOCAL, write_segment(tmp_path / "t-0", 0, old)) == Age(77)
    appended = batch(0, 5, 6, timestamp_type=1, max_timestamp=123)
    assert read_age(LOCAL, write_segment(tmp_path / "t-0", 0, appended)) == Age(123)
    assert read_age(LOCAL, write_segment(tmp_path / "t-0", 0, batch(0, 0))) == Age(0)


def test_without_any_timestamp_the_file_time_decides(tmp_path: Path) -> None:
    for log in (b"", batch(0, -1, -1), encode_single(Rec(0, 5, b"k", b"v"), magic=0)):
        task = replace(write_segment(tmp_path / "t-0", 0, log), log_mtime_ns=1_234_999_999)
        assert read_age(LOCAL, task) == Age(1234, "file")
        assert read_age(LOCAL, replace(task, young_from_ms=-50)) == Age(1234, "file")


def test_reading_ends_at_a_recent_batch(tmp_path: Path) -> None:
    log = batch(0, 900) + bytes(40)
    task = write_segment(tmp_path / "t-0", 0, log)
    with pytest.raises(CorruptLog, match="byte position"):
        read_age(LOCAL, replace(task, young_from_ms=901))
    assert read_age(LOCAL, replace(task, young_from_ms=900)) == Age(900)


def test_damage_is_found_during_reading(tmp_path: Path) -> None:
    log = batch(0, 1) + batch(1, 2)
    flipped = bytearray(log)
    flipped[len(log) - 1] ^= 1
    for data, what in ((bytes(flipped), "invalid CRC"), (log[:-3], "does not fit"), (batch(99, 1, 2), "outside")):
        with pytest.raises(CorruptLog, match=what):
            read_age(LOCAL, write_segment(tmp_path / "t-0", 0, data))
    with pytest.raises(CorruptLog, match="outside"):
        read_age(LOCAL, write_segment(tmp_path / "t-0", 5, log))


def test_tasks_have_the_end_of_their_segments() -> None:
    tasks = age_tasks(facts_of(FOUR, 40), facts_of(FOUR, 40).segments[2:], 1000, 300)
    assert [(t.base_offset, t.end_offset, t.young_from_ms) for t in tasks] == [(20, 30, 700), (30, 40, 700)]


def found(claims: list[int], truth: list[int], retention_ms: int = 2 * DAY_MS, **more: int | None) -> list[object]:
    """Return the findings for segments that are `claims` days old by their indexes, and `truth` days by their logs."""
    facts = facts_of([replace(seg, time_ms=NOW_MS - days * DAY_MS) for seg, days in zip(FOUR, claims, strict=True)], 40)
    facts = replace(facts, segments=tuple(segment._replace(**more) for segment in facts.segments))  # type: ignore[arg-type]
    retention = Retention(retention_ms=retention_ms)
    ages: dict[int, Age] = {}
    for seg, days in zip(FOUR, truth, strict=True):
        ages[seg.base] = Age(NOW_MS - days * DAY_MS)
        if days <= 2:
            break
    return [(f.base_offset, f.broker_deletes, f.what) for f in findings(facts, retention, NOW_MS, ages)]


def test_an_index_that_changes_a_segments_age_is_a_finding() -> None:
    assert found([9, 8, 1, 0], [9, 8, 1, 0]) == []
    [(base, deletes, what)] = found([9, 19_000, 1, 0], [9, 1, 1, 0])
    assert (base, deletes) == (10, True)
    assert what.endswith("a broker that starts deletes it, although it must be retained")
    [(base, _, what)] = found([9, 19_000, 9, 9], [9, 1, 1, 0])
    assert base == 10
    assert what.endswith("and 2 segments after it")
    [(base, deletes, what)] = found([0, 8, 1, 0], [9, 8, 1, 0])
    assert (base, deletes) == (0, False)
    assert "a broker retains it" in what
    [(_, _, what)] = found([9, 19_000, 1, 0], [9, 1, 1, 0], time_index_bytes=None)
    assert "no time index" in what
    # A broker that finds no `.index` rebuilds the time index as well.
    assert found([9, 19_000, 1, 0], [9, 1, 1, 0], index_bytes=None) == []


def test_a_changed_segment_is_refused(tmp_path: Path) -> None:
    write_segment(tmp_path / "t-0", 0, batch(0, 1))
    facts = replace(facts_of([Seg(0, 100, 1), Seg(10, 5, 1)], 12), path=str(tmp_path / "t-0"), log_dir=str(tmp_path))
    decision = decide(facts, Retention(retention_ms=0), NOW_MS, ages_of([Seg(0, 1, 1), Seg(10, 5, NOW_MS)]))
    assert removed(decision) == [(0, "time")]
    with pytest.raises(Refused, match="changed since"):
        remove(LOCAL, facts, decision)
    assert (tmp_path / "t-0" / f"{0:020d}.log").exists()
