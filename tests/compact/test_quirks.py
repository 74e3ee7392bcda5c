"""Quirks of Kafka that the result of a round does not show, and the selection of segments, without Kafka.

The numbers are those of tests/interop/test_quirks.py, which compares the other quirks with Kafka itself. Each test runs
all steps from the survey of a directory to the installed result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keytail.compact.cleaner import clean_partition, install
from keytail.compact.plan import refusals, select
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.config.compaction import CompactionConfig
from keytail.errors import CorruptLog
from keytail.format import names
from keytail.log.checkpoint import read_offsets, update_offset
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.log_dirs import hosted, survey_log_dirs
from keytail.log.partition import PartitionFacts, survey_partition
from keytail.log.producers import first_unstable
from tests.reference.batches import Rec, decode_log, encode_batch
from tests.reference.indexing import index_files
from tests.reference.loader import load

NOW = 1_750_000_000_000
HOUR_MS = 3_600_000


def one(offset: int, key: bytes, time_ms: int = NOW) -> bytes:
    return encode_batch([Rec(offset, time_ms, key, b"v")])


def log_dir(home: Path, *partitions: str, segments: dict[int, list[bytes]]) -> Path:
    """Write partitions with the same `segments`, after a clean shutdown, with the high watermark at the log end."""
    home.mkdir(parents=True)
    end = max(*segments, *(decode_log(batch)[0].last_offset + 1 for found in segments.values() for batch in found))
    for partition in partitions:
        path = home / partition
        path.mkdir()
        for base, batches in segments.items():
            log = b"".join(batches)
            index, time_index = index_files(log, base, 0)
            for suffix, data in ((".log", log), (".index", index), (".timeindex", time_index)):
                file = path / f"{base:020d}{suffix}"
                file.write_bytes(data)
                os.utime(file, ns=(NOW * 10**6, NOW * 10**6))
            if base:
                (path / f"{base:020d}.snapshot").write_bytes(bytes.fromhex("0001 48674bc7 00000000"))
    (home / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":42}')
    (home / "meta.properties").write_text("version=1\n")
    lines = [f"{p.rpartition('-')[0]} {p.rpartition('-')[2]}" for p in partitions]
    for name, offset in ((names.HIGH_WATERMARK_CHECKPOINT, end), (names.RECOVERY_POINT_CHECKPOINT, end)):
        entries = "".join(f"{line} {offset}\n" for line in lines)
        (home / name).write_text(f"0\n{len(lines)}\n{entries}")
    return home


def survey(*log_dirs: Path) -> list[PartitionFacts]:
    listings = survey_log_dirs(LOCAL, [str(path) for path in log_dirs])
    return [survey_partition(LOCAL, listing, entry) for listing in listings for entry in listing.partitions]


def compact(facts: PartitionFacts, fs: FileSystem = LOCAL, **given: Any) -> CleaningResult | None:
    """Run a round if one is due, and return its result."""
    fields = {name: given.pop(name) for name in list(given) if name in CleaningTask.__dataclass_fields__}
    config = CompactionConfig(**{"cleanup_policy": frozenset({"compact"}), "index_interval_bytes": 0, **given})
    assert refusals(facts, config, "", NOW) == []
    unstable = first_unstable(fs, facts, now_ms=NOW)
    selection = select(facts, config, NOW, unstable=unstable)
    if not selection.eligible:
        return None
    task = CleaningTask.of(
        facts,
        first_dirty_offset=selection.first_dirty_offset,
        first_uncleanable_offset=selection.first_uncleanable_offset,
        now_ms=NOW,
        config=config,
        run_id="odd",
        map_memory_bytes=1 << 20,
        **fields,
    )
    result = clean_partition(fs, task)
    install(fs, task, result)
    return result


def bases(path: str | Path) -> list[int]:
    return sorted(int(name[:20]) for name in os.listdir(path) if name.endswith(".log"))


def offsets(path: str | Path) -> list[int]:
    logs = [Path(path, f"{base:020d}.log").read_bytes() for base in bases(path)]
    return [record.offset for log in logs for batch in decode_log(log) for record in batch.records]


THREE = {
    0: [one(0, b"a"), one(1, b"b")],
    2: [one(2, b"a"), one(3, b"c")],
    4: [one(4, b"c"), one(5, b"d")],
    6: [one(6, b"a")],
}


class Watching(FileSystem):
    """Calls `look` after every change inside the partition."""

    def __init__(self, look: Callable[[str, tuple[Any, ...]], None]) -> None:
        super().__init__()
        self.look = look

    def _change(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], Any]) -> Any:
        result = super()._change(operation, arguments, action)
        self.look(operation, (*arguments, result))
        return result


def test_18_27_only_one_group_has_swap_files_and_a_broker_loses_no_record__departed_from(
    tmp_path: Path,
) -> None:
    """Decision 7: a broker that starts after any operation finds the latest record of each key."""
    path = log_dir(tmp_path / "logs", "t-0", segments=THREE) / "t-0"
    newest = {1, 2, 4, 5, 6}
    stages = set()

    def look(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation in ("rename", "unlink", "create"):
            swaps = {name[:20] for name in os.listdir(path) if name.endswith(".log.swap")}
            guards = [name for name in os.listdir(path) if name.endswith(".cleaned")]
            stages.add((len(swaps), len(guards)))
            assert newest <= {record.offset for record in load(path).records()}

    (facts,) = survey(path.parent)
    size = 2 * len(one(0, b"a"))
    result = compact(facts, Watching(look), segment_bytes=size, grouping="kafka")
    assert result is not None and len(result.groups) == 3
    assert {swaps for swaps, _ in stages} == {0, 1}
    assert (1, 1) in stages and (1, 0) in stages
    assert set(offsets(path)) == newest


def test_18_30_a_foreign_directory_is_a_problem_of_all_partitions_of_the_log_dir__equal(tmp_path: Path) -> None:
    home = log_dir(tmp_path / "logs", "t-0", "u-1", segments=THREE)
    (home / "lost+found").mkdir()
    assert all(any("lost+found" in problem for problem in facts.problems) for facts in survey(home))


def test_18_32_files_that_a_broker_does_not_check_again_are_durable__departed_from(tmp_path: Path) -> None:
    """Decision 7: `.kafka_cleanshutdown` is unchanged, so that the next start recovers nothing."""
    home = log_dir(tmp_path / "logs", "t-0", "u-0", segments=THREE)
    path = home / "t-0"
    stamp = (home / ".kafka_cleanshutdown").stat()
    written: dict[int, str] = {}
    synced: set[str] = set()

    def look(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "create":
            written[arguments[-1]] = arguments[0]
        elif operation in ("write", "truncate", "set_mtime_ns"):
            synced.discard(written.get(arguments[0], str(arguments[0])))
        elif operation == "fsync":
            synced.add(written[arguments[0]])
        elif operation == "rename" and arguments[0].endswith(".clean"):
            assert arguments[0] in synced

    result = compact(survey(home)[0], Watching(look), segment_bytes=10**6)
    assert result is not None and offsets(path) == [1, 2, 4, 5, 6]
    after = (home / ".kafka_cleanshutdown").stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (stamp.st_ino, stamp.st_mtime_ns, stamp.st_size)
    assert offsets(home / "u-0") == [0, 1, 2, 3, 4, 5, 6]


def test_18_32_after_a_crash_nothing_above_the_recovery_point_is_changed__departed_from(tmp_path: Path) -> None:
    """Decision 5."""
    home = log_dir(tmp_path / "logs", "t-0", segments=THREE)
    (home / ".kafka_cleanshutdown").unlink()
    (home / names.RECOVERY_POINT_CHECKPOINT).write_text("0\n1\nt 0 5\n")
    above = {name: (home / "t-0" / name).read_bytes() for name in os.listdir(home / "t-0") if int(name[:20]) >= 4}
    result = compact(survey(home)[0])
    assert result is not None and result.end_offset == 4
    assert offsets(home / "t-0") == [1, 2, 3, 4, 5, 6]
    assert above == {name: (home / "t-0" / name).read_bytes() for name in above}


def test_18_33_the_directory_is_synced_between_the_steps_of_a_replacement__departed_from(tmp_path: Path) -> None:
    """Decision 7: Kafka syncs the directory once, and does not ensure the order of renames before that."""
    home = log_dir(tmp_path / "logs", "t-0", segments=THREE)
    steps: list[str] = []

    def look(operation: str, arguments: tuple[Any, ...]) -> None:
        kind = {"fsync_dir": "sync", "unlink": "unlink"}.get(operation, "")
        if operation == "rename":
            kind = os.path.splitext(arguments[1])[1]
        elif operation == "unlink" and arguments[0].endswith(names.CLEANED):
            kind = "commit"
        elif operation == "create" and arguments[0].endswith(names.CLEANED):
            kind = "guard"
        if kind and (not steps or steps[-1] != kind):
            steps.append(kind)

    assert compact(survey(home)[0], Watching(look)) is not None
    joined = " ".join(steps)
    assert "guard sync .swap sync .swap sync commit sync .deleted sync guard sync unlink sync" in joined
    assert joined.endswith("sync")
    for kind in (".swap", "commit"):
        assert steps[steps.index(kind) + 1] == "sync"


@pytest.mark.parametrize("tail", [bytes(1000), bytes(11), one(6, b"x")[:-1], one(6, b"x")[:30]], ids=len)
def test_18_35_bytes_after_the_last_batch_of_an_inactive_segment_are_reported_with_their_position__departed_from(
    tail: bytes, tmp_path: Path
) -> None:
    """Decision 1: these bytes may be preallocated zeros or an incomplete batch."""
    home = log_dir(tmp_path / "logs", "t-0", segments=THREE)
    log = home / "t-0" / f"{2:020d}.log"
    size = log.stat().st_size
    with log.open("ab") as file:
        file.write(tail)
    os.utime(log, ns=(NOW * 10**6, NOW * 10**6))
    before = {file.name: file.read_bytes() for file in (home / "t-0").iterdir()}
    with pytest.raises(CorruptLog) as corrupt:
        compact(survey(home)[0])
    assert (corrupt.value.path, corrupt.value.byte_position) == (str(log), size)
    assert before == {file.name: file.read_bytes() for file in (home / "t-0").iterdir()}


# Selection, from survey to result


def test_several_log_dirs_have_their_own_checkpoints(tmp_path: Path) -> None:
    first = log_dir(tmp_path / "one", "t-0", segments=THREE)
    second = log_dir(tmp_path / "two", "t-1", segments=THREE)
    (second / names.CLEANER_CHECKPOINT).write_text("0\n1\nt 1 6\n")
    results = [compact(facts) for facts in survey(first, second)]
    assert results[0] is not None and results[1] is None
    assert (offsets(first / "t-0"), offsets(second / "t-1")) == ([1, 2, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6])
    twice = log_dir(tmp_path / "three", "t-0", segments=THREE)
    problems = [facts.problems for facts in survey(first, twice)]
    assert all(any("several log dirs" in problem for problem in found) for found in problems)


def test_checkpoint_entries_of_partitions_no_longer_on_disk_are_removed(tmp_path: Path) -> None:
    """CONFORMANCE.md 68."""
    home = log_dir(tmp_path / "logs", "t-0", "u-1", segments=THREE)
    checkpoint = home / names.CLEANER_CHECKPOINT
    checkpoint.write_text("0\n3\nt 0 2\nu 1 4\ngone 0 99\n")
    listings = survey_log_dirs(LOCAL, [str(home)])
    facts = survey_partition(LOCAL, listings[0], listings[0].partitions[0])
    result = compact(facts)
    assert result is not None
    update_offset(LOCAL, str(checkpoint), ("t", 0), result.end_offset, hosted=hosted(listings))
    assert read_offsets(LOCAL, str(checkpoint)) == {("t", 0): 6, ("u", 1): 4}


@pytest.mark.parametrize(
    ("log_start", "kept"), [(3, [0, 1, 2, 4, 5, 6]), (5, [0, 1, 2, 3, 4, 5, 6]), (6, None), (7, None)]
)
def test_log_starts_inside_and_above_segments(log_start: int, kept: list[int] | None, tmp_path: Path) -> None:
    """Records below the log start offset supersede no record, and are themselves removed if superseded."""
    home = log_dir(tmp_path / "logs", "t-0", segments=THREE)
    (home / names.LOG_START_CHECKPOINT).write_text(f"0\n1\nt 0 {log_start}\n")
    (facts,) = survey(home)
    assert facts.log_start_offset == log_start
    result = compact(facts, min_cleanable_dirty_ratio=0.0)
    assert (offsets(home / "t-0") if result else None) == kept


def test_a_log_start_above_the_log_end_is_refused(tmp_path: Path) -> None:
    home = log_dir(tmp_path / "logs", "t-0", segments=THREE)
    (home / names.LOG_START_CHECKPOINT).write_text("0\n1\nt 0 8\n")
    (facts,) = survey(home)
    reasons = refusals(facts, CompactionConfig(cleanup_policy=frozenset({"compact"})), "", NOW)
    assert any("deletes the whole log" in reason for reason in reasons)


@pytest.mark.parametrize(("minimum", "due"), [(0.999, True), (1.0, False)])
def test_the_dirty_ratio_must_be_exceeded(minimum: float, due: bool, tmp_path: Path) -> None:
    home = log_dir(tmp_path / "logs", "t-0", segments=THREE)
    assert (compact(survey(home)[0], min_cleanable_dirty_ratio=minimum) is not None) is due


def test_both_lags_are_applied(tmp_path: Path) -> None:
    old = {base: [one(base + i, b"k", NOW - age) for i in range(2)] for base, age in ((0, 9000), (2, 5000), (4, 5))}
    home = log_dir(tmp_path / "logs", "t-0", segments={**old, 6: [one(6, b"k")]})
    (facts,) = survey(home)
    assert compact(facts, min_cleanable_dirty_ratio=1.0, max_compaction_lag_ms=9000) is None
    result = compact(facts, min_cleanable_dirty_ratio=1.0, max_compaction_lag_ms=8999, min_compaction_lag_ms=5000)
    assert result is not None and result.end_offset == 4
    assert offsets(home / "t-0") == [3, 4, 5, 6]


@pytest.mark.parametrize(("policy", "left"), [({"compact"}, [0, 6]), ({"compact", "delete"}, [0, 2, 4, 6])])
def test_with_time_retention_a_segment_contains_records_of_one_age_only(
    policy: set[str], left: list[int], tmp_path: Path
) -> None:
    """Decision 15: with `delete` in the policy, a measured output spans at most segment.ms."""
    aged = {base: [one(base, b"%d" % base, NOW - (6 - base) * HOUR_MS)] for base in (0, 2, 4)}
    home = log_dir(tmp_path / "logs", "t-0", segments={**aged, 6: [one(6, b"x")]})
    assert compact(survey(home)[0], cleanup_policy=frozenset(policy), segment_ms=HOUR_MS) is not None
    assert bases(home / "t-0") == left
    assert offsets(home / "t-0") == [0, 2, 4, 6]


def test_empty_segments_of_any_age_do_not_accumulate(tmp_path: Path) -> None:
    """CONFORMANCE.md 39 and decision 15: a segment without bytes counts as the latest one, so that retention would
    stop at it.
    """
    ages = {0: 9, 2: 6, 4: 3}
    aged = {base: [one(base, b"k", NOW - hours * HOUR_MS)] for base, hours in ages.items()}
    home = log_dir(tmp_path / "logs", "t-0", segments={**aged, 6: [one(6, b"x")]})
    policy = {"cleanup_policy": frozenset({"compact", "delete"}), "segment_ms": HOUR_MS}
    assert compact(survey(home)[0], **policy) is not None
    assert bases(home / "t-0") == [0, 6]
    assert offsets(home / "t-0") == [4, 6]
    # Empty segments of Kafka are also removed.
    empty = {0: [one(0, b"a", NOW - 9 * HOUR_MS)], 2: [], 4: [], 6: [one(6, b"b", NOW - HOUR_MS)], 8: [one(8, b"x")]}
    home = log_dir(tmp_path / "more", "t-0", segments=empty)
    assert compact(survey(home)[0], **policy) is not None
    assert bases(home / "t-0") == [0, 6, 8]


def test_segments_are_merged_by_their_retained_bytes(tmp_path: Path) -> None:
    """Decision 15: by their sizes before the round, no two of these segments could be merged."""
    size = len(one(0, b"k0"))
    home = log_dir(
        tmp_path / "logs",
        "t-0",
        segments={**{b: [one(b, b"a"), one(b + 1, b"k%d" % (b // 2))] for b in range(0, 20, 2)}, 20: []},
    )
    assert compact(survey(home)[0], segment_bytes=2 * size) is not None
    found = bases(home / "t-0")
    assert len(found) == 7 and found[0] == 0
    assert all((home / "t-0" / f"{base:020d}.log").stat().st_size <= 2 * size for base in found)


def test_a_batch_larger_than_all_limits_is_cleaned(tmp_path: Path) -> None:
    """CONFORMANCE.md 35. The limits also apply to rebuilt batches."""
    large = encode_batch([Rec(2 + i, NOW, b"%d" % i, b"v" * 900) for i in range(50)] + [Rec(52, NOW, b"a", None)])
    home = log_dir(tmp_path / "logs", "t-0", segments={0: [one(0, b"0"), one(1, b"z"), large, one(53, b"y")], 54: []})
    result = compact(survey(home)[0], segment_bytes=1000, max_message_bytes=100)
    assert result is not None and bases(home / "t-0") == [0, 2, 53, 54]
    assert result.large_batches == 1, "the other batches must be copied unchanged"
    assert offsets(home / "t-0") == list(range(1, 54))


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_a_rebuilt_batch_may_have_as_many_bytes_as_the_limit(missing_bytes: int, tmp_path: Path) -> None:
    both = encode_batch([Rec(0, NOW, b"a", b"v"), Rec(1, NOW, b"b", b"v")])
    home = log_dir(tmp_path / "logs", "t-0", segments={0: [both, one(2, b"a")], 3: []})
    size = len(one(1, b"b"))
    result = compact(survey(home)[0], max_message_bytes=size - missing_bytes)
    assert result is not None and offsets(home / "t-0") == [1, 2]
    assert result.large_batches == missing_bytes
