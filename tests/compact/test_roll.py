"""`--roll-active`: when the active segment is rolled and compacted, and the reason in the row otherwise."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keytail.compact.plan import Decision, decide
from keytail.compact.roll import EMPTY, NOT_DUE, after_roll, as_stopped, is_shown, reason_against, with_roll
from keytail.compact.rules import Rules
from keytail.compact.running import installing
from keytail.compact.running.state import Rows
from keytail.compact.task import CleaningTask
from keytail.config.compaction import CompactionConfig
from keytail.errors import NO_ERROR
from keytail.format.names import MAX_OFFSET
from keytail.format.producers import encode_snapshot
from keytail.log.append.roll_closed import roll
from keytail.log.fs import FileSystem
from keytail.log.partition import PartitionFacts, SegmentFacts
from keytail.log.producers import Unstable
from tests.command_line import Run, rows_of
from tests.compact.test_plan import NOW, config, partition, segment
from tests.log_dirs import newest_by_key, random_records, records_of, snapshot, write_log_dir
from tests.no_spark import without_spark

END = 500
NAME = "orders-0"
FLAGS = ("--now", "1800000000000", "--unsafe-clock", "--topics-have-no-overrides", "--topic-config",
         "orders:cleanup.policy=compact")  # fmt: skip


# Decisions


def decisions(facts: PartitionFacts, settings: CompactionConfig, **given: Any) -> tuple[Decision, Decision, str]:
    """Return the decisions without and with the flag, and the reason why the segment is not rolled."""
    rules = Rules(NOW, roll_active=True, force=given.pop("force", False))
    decide_on = partial(decide, config=settings, unknown=NO_ERROR, rules=rules, policy_known=True, **given)
    plain = decide_on(facts)
    decision, roll = with_roll(facts, plain, decide_on)
    return plain, decision, roll.why_not


def test_a_due_partition_is_rolled_and_cleaned_to_its_end() -> None:
    plain, decision, why = decisions(partition(), config())
    assert (plain.status, decision.status, why) == ("would-compact", "would-compact", "")
    assert plain.selection is not None and decision.selection is not None
    assert (plain.selection.first_uncleanable_offset, decision.selection.first_uncleanable_offset) == (30, 35)
    assert decision.selection.limit == "active segment"


def test_the_decision_equals_that_after_a_roll_by_a_broker() -> None:
    facts, settings = partition(), config(min_cleanable_dirty_ratio=0.3)
    rolled = replace(facts, segments=(*facts.segments, segment(35, 0, index=0, time_index=0, first=-1)))
    for checkpoint in (None, 0, 10, 25, 30, 33, 35):
        before = replace(facts, cleaner_checkpoint=checkpoint)
        _, decision, _ = decisions(before, settings)
        rules = Rules(NOW)
        expected = decide(replace(rolled, cleaner_checkpoint=checkpoint), settings, NO_ERROR, rules, policy_known=True)
        assert decision == expected, checkpoint


def test_a_partition_with_only_an_active_segment_is_rolled() -> None:
    facts = partition([segment(0)], log_end_offset=5, high_watermark=5, recovery_point=5)
    plain, decision, why = decisions(facts, config())
    assert (plain.status, decision.status, why) == ("clean", "would-compact", "")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"segments": (segment(0), segment(30, 0))}, EMPTY),
        ({"segments": ()}, EMPTY),
        ({"clean_shutdown": False}, "not stopped cleanly"),
        ({"tail_bytes": 7}, "the 7 bytes after the last batch are not a batch"),
        ({"recovery_point": 36}, "the recovery point 36 is above the log end offset 35"),
        ({"log_end_offset": MAX_OFFSET}, "no record can follow"),
    ],
)
def test_empty_segments_and_unsafe_states_are_not_rolled(change: dict[str, Any], why: str) -> None:
    facts = partition(**change)
    assert why in reason_against(facts)
    plain, decision, reported = decisions(facts, config())
    assert decision == plain
    assert reported == reason_against(facts)


@pytest.mark.parametrize(
    ("facts", "settings", "given", "why"),
    [
        (partition(high_watermark=34), config(), {}, "the high watermark is 34, and the log end offset is 35"),
        (partition(), config(), {"unstable": Unstable(33, "open transaction of 7")}, "open transaction of 7"),
        (
            partition([segment(0), segment(30, largest=NOW - 1)]), config(min_compaction_lag_ms=1000), {},
            "the segment at offset 30 is 1 ms old, younger than min.compaction.lag.ms 1000",
        ),
        (partition(cleaner_checkpoint=30), config(min_cleanable_dirty_ratio=0.9), {}, NOT_DUE),
        (partition(cleaner_checkpoint=35), config(), {"force": True}, NOT_DUE),
        (partition(log_start_offset=35), config(), {"force": True}, NOT_DUE),
    ],
)  # fmt: skip
def test_a_segment_that_a_round_would_not_clean_is_not_rolled(
    facts: PartitionFacts, settings: CompactionConfig, given: dict[str, Any], why: str
) -> None:
    plain, decision, reported = decisions(facts, settings, **given)
    assert reported.startswith(why)
    if reported != NOT_DUE:
        assert decision == plain


def test_a_reason_that_is_the_error_of_the_row_is_not_repeated() -> None:
    settings = config(min_compaction_lag_ms=10**15)
    plain, decision, why = decisions(partition(), settings)
    assert (decision, why) == (plain, NOT_DUE)
    assert "younger than min.compaction.lag.ms" in decision.error
    assert is_shown("not rolled: the high watermark is 3") and not is_shown(f"not rolled: {NOT_DUE}")
    assert not any(map(is_shown, (None, "rolled", "would-roll", "empty")))


def test_a_plan_assumes_a_clean_stop_of_a_running_broker() -> None:
    facts = partition(clean_shutdown=False, high_watermark=31, tail_bytes=40)
    assert reason_against(as_stopped(facts)) == ""
    assert as_stopped(facts).high_watermark == 35
    assert as_stopped(partition(high_watermark=None)).high_watermark is None
    assert after_roll(facts).segments[:-1] == facts.segments


# The command


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Write segments at 0, 100, ... 400 with nine keys; the last is active."""
    path = write_log_dir(tmp_path / "logs", {NAME: random_records(1, END, 9)}, segments=5)
    for base in range(100, END + 1, 100):
        (path / NAME / f"{base:020d}.snapshot").write_bytes(encode_snapshot([]))
    return path


def compact(run: Run, log_dir: Path, *flags: str | Path, status: int = 0) -> dict[str, Any]:
    with without_spark():
        done = run("compact", "--log-dirs", log_dir, *FLAGS, "--output", "json", *flags)
    assert done.exit_code == status, done.output
    return rows_of(done)[NAME]


def sizes_of(log_dir: Path) -> dict[int, int]:
    return {int(path.stem): path.stat().st_size for path in (log_dir / NAME).glob("*.log")}


def test_all_records_are_compacted_and_a_second_run_changes_nothing(run: Run, log_dir: Path) -> None:
    before, epochs = records_of(log_dir / NAME), (log_dir / NAME / "leader-epoch-checkpoint").read_bytes()
    recovery_points = (log_dir / "recovery-point-offset-checkpoint").read_bytes()
    row = compact(run, log_dir, "--execute", "--roll-active")
    assert (row["status"], row["active_segment"]) == ("compacted", "rolled")
    assert (row["end_dirty_offset"], row["segments_before"], row["segments_after"]) == (END, 5, 2)
    assert row["bytes_before"] > row["bytes_after"]
    assert sizes_of(log_dir) == {0: row["bytes_after"], END: 0}
    after = records_of(log_dir / NAME)
    assert set(after) <= set(before)
    assert newest_by_key(after) == newest_by_key(before)
    assert len(after) == 9
    assert (log_dir / "cleaner-offset-checkpoint").read_text() == f"0\n1\norders 0 {END}\n"
    assert (log_dir / "recovery-point-offset-checkpoint").read_bytes() == recovery_points
    assert (log_dir / NAME / "leader-epoch-checkpoint").read_bytes() == epochs
    files = snapshot(log_dir)
    assert run("verify", "--log-dirs", log_dir).exit_code == 0
    again = compact(run, log_dir, "--execute", "--roll-active", "--force")
    assert (again["status"], again["active_segment"], again["segments_before"]) == ("clean", "empty", 2)
    assert snapshot(log_dir) == files


def test_without_the_flag_the_active_segment_is_unchanged(run: Run, log_dir: Path) -> None:
    active = sizes_of(log_dir)[400]
    row = compact(run, log_dir, "--execute")
    assert (row["active_segment"], row["end_dirty_offset"]) == (None, 400)
    assert sizes_of(log_dir)[400] == active


@pytest.mark.parametrize("command", ["plan", "compact"])
def test_a_plan_shows_what_is_due_with_the_flag_and_changes_nothing(run: Run, log_dir: Path, command: str) -> None:
    before = snapshot(log_dir)
    flags = (command, "--log-dirs", log_dir, *FLAGS, "--roll-active")
    row = rows_of(run(*flags, "--output", "json"))[NAME]
    assert (row["status"], row["active_segment"], row["end_dirty_offset"]) == ("would-compact", "would-roll", END)
    assert (row["segments_before"], row["bytes_before"]) == (5, sum(sizes_of(log_dir).values()))
    assert "Active segments to roll: 1." in run(*flags).output
    assert snapshot(log_dir) == before
    assert not (log_dir / ".lock").exists()


def lower_high_watermark(log_dir: Path) -> None:
    (log_dir / "replication-offset-checkpoint").write_text("0\n1\norders 0 499\n")


def stop_uncleanly(log_dir: Path) -> None:
    (log_dir / ".kafka_cleanshutdown").unlink()


def remove_snapshot(log_dir: Path) -> None:
    (log_dir / NAME / f"{END:020d}.snapshot").unlink()


def untrim_index(log_dir: Path) -> None:
    with (log_dir / NAME / f"{400:020d}.timeindex").open("ab") as file:
        file.write(bytes(120))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lower_high_watermark, "not rolled: the high watermark is 499, and the log end offset is 500"),
        (stop_uncleanly, "not rolled: the broker was not stopped cleanly"),
        (remove_snapshot, f"not rolled: the producer snapshot at the log end offset, {END:020d}.snapshot, is missing"),
        (untrim_index, "not rolled: the indexes of the segment are not as a broker leaves them: "),
    ],
)
def test_if_the_segment_is_not_rolled_the_others_are_compacted_and_the_row_reports_why(
    change: Any, why: str, run: Run, log_dir: Path
) -> None:
    change(log_dir)
    active = {path.name: path.read_bytes() for path in (log_dir / NAME).glob("*400.*")}
    planned = compact(run, log_dir, "--roll-active")
    assert planned["active_segment"].startswith(why)
    assert "the active segment is not rolled: " in run("plan", "--log-dirs", log_dir, *FLAGS, "--roll-active").output
    row = compact(run, log_dir, "--roll-active", "--execute")
    assert row["status"] == "compacted"
    assert row["active_segment"] == planned["active_segment"]
    assert row["end_dirty_offset"] == 400
    assert active.items() <= {path.name: path.read_bytes() for path in (log_dir / NAME).iterdir()}.items()
    assert not (log_dir / NAME / f"{END:020d}.log").exists()


def test_a_log_that_its_task_refuses_remains_rolled_and_the_row_reports_it(run: Run, log_dir: Path) -> None:
    damaged = log_dir / NAME / f"{100:020d}.log"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    before = {path.name: path.read_bytes() for path in (log_dir / NAME).iterdir()}
    row = compact(run, log_dir, "--execute", "--roll-active", status=1)
    assert (row["status"], row["active_segment"]) == ("corrupt", "rolled")
    assert (row["segments_before"], row["segments_after"]) == (5, 6)
    assert "the active segment was rolled" in row["error"]
    new = {f"{END:020d}{suffix}": b"" for suffix in (".log", ".index", ".timeindex")}
    assert {path.name: path.read_bytes() for path in (log_dir / NAME).iterdir()} == before | new


def test_a_roll_that_fails_fails_its_partition_only(
    run: Run, log_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_log_dir(tmp_path / "other", {"orders-1": random_records(2, END, 9)}, segments=5)
    (other / "orders-1" / f"{END:020d}.snapshot").write_bytes(encode_snapshot([]))
    before = {path.name: path.read_bytes() for path in (log_dir / NAME).iterdir()}

    def on_a_full_disk(fs: FileSystem, path: str, *arguments: Any) -> SegmentFacts:
        if path.endswith(NAME):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return roll(fs, path, *arguments)

    monkeypatch.setattr(installing, "roll", on_a_full_disk)
    with without_spark():
        flags = (*FLAGS, "--output", "json", "--execute", "--roll-active")
        done = run("compact", "--log-dirs", f"{log_dir},{other}", *flags)
    assert done.exit_code == 3, done.output
    rows = rows_of(done)
    assert (rows["orders-1"]["status"], rows["orders-1"]["active_segment"]) == ("compacted", "rolled")
    assert (rows[NAME]["status"], rows[NAME]["segments_after"]) == ("failed", 5)
    assert rows[NAME]["active_segment"] == "not rolled: the partition is not compacted"
    assert "No space left on device" in rows[NAME]["error"]
    assert {path.name: path.read_bytes() for path in (log_dir / NAME).iterdir()} == before


def test_a_stopped_run_reports_segments_that_it_had_rolled() -> None:
    facts = after_roll(partition())
    tasks = [
        CleaningTask.of(
            replace(facts, path=f"/logs/orders-{n}"), roll="due", first_dirty_offset=0, first_uncleanable_offset=35,
            now_ms=NOW, config=config(), run_id="r",
        )
        for n in range(3)
    ]  # fmt: skip
    rows = Rows(lambda row: None, threading.Condition())
    rows.begin(tasks[:2])
    rows.begin([replace(tasks[0], roll="done")])
    found = [(row.status, row.active_segment, row.segments_after) for row in rows.of_stopped_run(tasks)]
    assert found == [("not-begun", "rolled", 5), ("not-begun", None, 4), ("not-begun", None, 4)]


def test_a_partition_that_is_not_due_is_not_rolled(run: Run, log_dir: Path) -> None:
    compact(run, log_dir, "--execute")
    before = snapshot(log_dir)
    flags = ("--roll-active", "--execute", "--topic-config", "orders:min.cleanable.dirty.ratio=0.99")
    row = compact(run, log_dir, *flags)
    assert (row["status"], row["active_segment"]) == ("skipped", f"not rolled: {NOT_DUE}")
    assert snapshot(log_dir) == before


@pytest.mark.parametrize(
    "other", [("--prepare",), ("--execute", "--prepared-only"), ("--output-dir", "out"), ("--output-dir", "s3://b/p")]
)
def test_roll_active_is_refused_with_conflicting_flags(other: tuple[str, ...], run: Run, log_dir: Path) -> None:
    before = snapshot(log_dir)
    done = run("compact", "--log-dirs", log_dir, *FLAGS, "--roll-active", *other)
    assert done.exit_code == 2
    assert "--roll-active cannot be combined with --" in done.output
    assert snapshot(log_dir) == before


@pytest.mark.parametrize("other", ["--measure", "--estimate"])
def test_roll_active_cannot_be_combined_with_a_measurement(other: str, run: Run, log_dir: Path) -> None:
    done = run("plan", "--log-dirs", log_dir, *FLAGS, "--roll-active", other)
    assert done.exit_code == 2
    assert "--roll-active cannot be combined with --measure or --estimate" in done.output


def test_a_prepared_compaction_is_committed_first_and_the_next_run_rolls(run: Run, log_dir: Path) -> None:
    flags = [flag for flag in FLAGS if flag not in ("--now", "1800000000000")]
    newest = newest_by_key(records_of(log_dir / NAME))

    def run_here(*more: str) -> dict[str, Any]:
        with without_spark():
            done = run("compact", "--log-dirs", log_dir, *flags, "--output", "json", *more)
        assert done.exit_code == 0, done.output
        return rows_of(done)[NAME]

    assert run_here("--prepare")["status"] == "prepared"
    row = run_here("--execute", "--roll-active")
    assert (row["status"], row["prepared"], row["end_dirty_offset"]) == ("compacted", "committed", 400)
    assert row["active_segment"].startswith("not rolled: what was prepared is committed")
    row = run_here("--execute", "--roll-active", "--force")
    assert (row["status"], row["active_segment"], row["end_dirty_offset"]) == ("compacted", "rolled", END)
    assert newest_by_key(records_of(log_dir / NAME)) == newest


def test_a_prepared_compaction_that_is_discarded_does_not_prevent_the_roll(run: Run, log_dir: Path) -> None:
    assert compact(run, log_dir, "--prepare")["status"] == "prepared"
    os.utime(log_dir / NAME / f"{0:020d}.log", ns=(1, 1))
    row = compact(run, log_dir, "--execute", "--roll-active")
    assert (row["status"], row["active_segment"], row["end_dirty_offset"]) == ("compacted", "rolled", END)
    assert row["prepared"].startswith("discarded: ")


def test_undo_restores_the_records_and_the_log_remains_rolled(run: Run, log_dir: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    before = {path.name: path.read_bytes() for path in (log_dir / NAME).iterdir()}
    compact(run, log_dir, "--execute", "--roll-active", "--keep-originals", backup)
    [run_id] = [path.name for path in backup.iterdir()]
    done = run("undo", "--originals", backup, "--run", run_id, "--execute")
    assert done.exit_code == 0, done.output
    after = {path.name: path.read_bytes() for path in (log_dir / NAME).iterdir()}
    new = {f"{END:020d}{suffix}": b"" for suffix in (".log", ".index", ".timeindex")}
    assert after == before | new
    assert run("verify", "--log-dirs", log_dir).exit_code == 0
    row = compact(run, log_dir, "--execute")
    assert (row["status"], row["end_dirty_offset"]) == ("compacted", END)


@contextmanager
def lock_held(log_dir: Path) -> Iterator[None]:
    """Hold the lock as a broker does, in another process."""
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); "
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(log_dir / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield
        holder.communicate(b"")


def test_beside_a_running_broker_a_plan_expects_a_clean_stop(run: Run, log_dir: Path) -> None:
    stop_uncleanly(log_dir)
    lower_high_watermark(log_dir)
    remove_snapshot(log_dir)
    untrim_index(log_dir)  # a running broker has not trimmed its indexes
    flags = ("plan", "--log-dirs", log_dir, *FLAGS, "--output", "json")
    with lock_held(log_dir):
        done = run(*flags, "--roll-active")
        plain = rows_of(run(*flags))[NAME]
    row = json.loads(done.stdout)[0]
    assert (row["status"], row["active_segment"], row["end_dirty_offset"]) == ("would-compact", "would-roll", END)
    assert "as if the broker were stopped cleanly" in done.stderr
    assert (plain["active_segment"], plain["end_dirty_offset"]) == (None, 400)
