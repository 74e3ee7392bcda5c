"""The rows and errors that `keytail export` prints before it starts Spark, and those of a dry run."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keytail.cli.selection import PartitionFilter
from keytail.cli.stopping import Stopped
from keytail.errors import Refused
from keytail.export import driver as export_driver
from keytail.export.columns import table_columns
from keytail.export.command import ExportRow, Request, exit_status, show_rows
from keytail.export.delta_table import TableState, _state_of, read_state
from keytail.export.driver import export
from keytail.export.formats import Formats
from keytail.export.plan import Exported, LogNow, plan_export
from keytail.log.lock import hold
from tests.command_line import Run, rows_of
from tests.growing_log import GrowingLog
from tests.log_dirs import random_records, snapshot, write_log_dir
from tests.reference.batches import Rec


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(export_driver, "session_of_run", started)


def test_a_dry_run_reports_its_plan_and_changes_nothing(run: Run, log_dir: Path, tmp_path: Path) -> None:
    """A dry run is possible while a broker holds the lock of the log dir."""
    before = snapshot(log_dir)
    with hold([str(log_dir)]):
        result = run("export", "--log-dirs", log_dir, "--to", tmp_path / "lake", "--topic", "or.*", "--output", "json")
    assert result.exit_code == 0, result.output
    rows = rows_of(result)
    assert set(rows) == {"orders-0", "orders-1"}
    sizes = {name: sum(file.stat().st_size for file in (log_dir / name).glob("*.log")) for name in rows}
    for name, row in rows.items():
        assert (row["status"], row["strategy"], row["why"]) == ("would-export", "full", "there is no table yet")
        assert (row["from_offset"], row["end_offset"], row["log_bytes"]) == (0, 400, sizes[name])
        assert row["table"] == str(tmp_path / "lake" / "orders")
    assert snapshot(log_dir) == before
    assert not (tmp_path / "lake").exists()
    table = run("export", "--log-dirs", log_dir, "--to", tmp_path / "lake")
    assert "run the same command with --execute" in table.stderr
    assert "3 partitions: 3 would-export." in table.stdout


MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "inside of a log dir": (("--to", "{logs}/lake"), "[overlaps-log-dir]"),
    "a log dir": (("--to", "{logs}"), "[overlaps-log-dir]"),
    "around a log dir": (("--to", "{logs}/.."), "[overlaps-log-dir]"),
    "another broker's log dir": (("--to", "{other}/lake"), "which is a log dir"),
    "another name of S3": (("--to", "s3://bucket/lake"), "s3a://BUCKET/PATH"),
    "credentials in a URI": (("--to", "s3a://key:hunter2@bucket/lake"), "[credentials-in-uri]"),
    "options of another client": (("--to", "s3a://bucket/lake?region=eu-west-1"), "[unsupported-uri]"),
    "a URI in a log dir": (("--to", "file://{logs}/lake"), "[overlaps-log-dir]"),
    "no parent": (("--to", "/no/such/place"), "does not exist"),
    "a file": (("--to", "{logs}/../file"), "is not a directory"),
    "two values of --as-of": (
        ("--to", "{free}", "--as-of-offset", "1", "--as-of-timestamp", "5"), "Give only one of the two"
    ),
    "an invalid time": (("--to", "{free}", "--as-of-timestamp", "noon"), "[invalid-time]"),
    "an unknown format": (("--to", "{free}", "--value-format", "protobuf"), "'protobuf' is not one of binary, utf8"),
    "no such topic": (("--to", "{free}", "--topic-list", "order"), "Did you mean orders?"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_flags_are_refused(name: str, run: Run, log_dir: Path, tmp_path: Path) -> None:
    arguments, message = MISTAKES[name]
    write_log_dir(tmp_path / "other", {"x-0": random_records(1, 5)})
    (tmp_path / "file").write_text("")
    places = {"logs": log_dir, "other": tmp_path / "other", "free": tmp_path / "free"}
    filled = [argument.format(**places) for argument in arguments]
    result = run("export", "--log-dirs", log_dir, *filled, "--execute")
    assert result.exit_code == 2, result.output
    assert message in result.output.replace("\n", " ")
    assert "hunter2" not in result.output


def only_row(log: GrowingLog, tmp_path: Path, **flags: Any) -> ExportRow:
    [row] = export(Request(PartitionFilter(log_dirs=(str(log.log_dir),)), str(tmp_path / "lake"), Formats(), **flags))
    return row


def test_an_export_ends_at_the_first_unreplicated_or_uncommitted_record(tmp_path: Path) -> None:
    """A later export reads records that a replica may lack, and transactions that are open or end above the exported
    offset.
    """
    log = GrowingLog(random.Random(1), tmp_path / "logs")
    log.append_records([Rec(0, 5, b"a", b"x"), Rec(1, 5, b"b", b"x")])
    log.append_records([Rec(2, 5, b"a", b"y")], 1)
    log.append_records([Rec(3, 5, b"c", b"y")])
    log.write(high_watermark=1)
    assert only_row(log, tmp_path).end_offset == 1
    log.write(high_watermark=4)
    row = only_row(log, tmp_path)
    assert row.end_offset == 2
    assert "producer id 1, epoch 0, has an open transaction" in row.notes[0]
    log.end_transaction(1, commit=True)
    log.write(high_watermark=4)
    assert only_row(log, tmp_path).end_offset == 2
    assert only_row(log, tmp_path, high_watermark="log-end").end_offset == 5
    log.write()
    assert only_row(log, tmp_path).end_offset == 5
    (log.log_dir / "replication-offset-checkpoint").unlink()
    row = only_row(log, tmp_path)
    assert (row.status, "--high-watermark log-end" in row.error) == ("refused", True)
    assert only_row(log, tmp_path, high_watermark="log-end").end_offset == 5


def test_a_partition_that_moves_to_another_log_dir_is_refused(run: Run, log_dir: Path, tmp_path: Path) -> None:
    (log_dir / f"orders-0.{'a' * 32}-future").mkdir()
    result = run("export", "--log-dirs", log_dir, "--to", tmp_path / "lake", "--output", "json")
    assert result.exit_code == 3
    rows = rows_of(result)
    assert [rows[name]["status"] for name in sorted(rows)] == ["refused", "would-export", "would-export"]
    assert "moving to another log dir" in rows["orders-0"]["error"]


def test_a_stopped_run_reports_its_exported_partitions(
    run: Run, log_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(request: Request, planned: Any, states: Any, rows: dict[str, ExportRow], *_: Any) -> None:
        rows["orders-1"] = replace(rows["orders-1"], status="exported")
        raise Stopped(15)

    monkeypatch.setattr(export_driver, "_execute", stopped)
    result = run("export", "--log-dirs", log_dir, "--to", tmp_path / "lake", "--execute", "--output", "json")
    assert result.exit_code == 143
    rows = rows_of(result)
    assert [rows[name]["status"] for name in sorted(rows)] == ["failed", "exported", "failed"]
    assert rows["users-0"]["error"] == "interrupted"


def test_a_directory_with_other_contents_is_refused(tmp_path: Path) -> None:
    log = GrowingLog(random.Random(1), tmp_path / "logs")
    log.append(3)
    log.write()
    place = tmp_path / "lake" / "t"
    place.mkdir(parents=True)
    assert only_row(log, tmp_path).status == "would-export"
    (place / "partition=7").mkdir()
    (place / "_delta_log").mkdir()
    assert only_row(log, tmp_path).status == "would-export"
    (place / "notes.txt").write_text("mine")
    row = only_row(log, tmp_path)
    assert (row.status, "notes.txt" in row.error) == ("refused", True)
    assert exit_status([row]) == 1


def commit(place: Path, version: int, operation: str, state: TableState | None = None) -> None:
    info = {"timestamp": 1, "operation": operation} | ({"userMetadata": state.as_metadata()} if state else {})
    log = place / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{version:020d}.json").write_text(json.dumps({"commitInfo": info}) + '\n{"add": {}}\n')


def test_a_table_contains_its_export_state(tmp_path: Path) -> None:
    state = TableState("t", Formats().as_json(), table_columns(), "", {3: Exported(7, 0, 2, "id"), 12: Exported(9, 1)})
    place = tmp_path / "t"
    assert read_state(str(place)) is None
    commit(place, 0, "WRITE")
    with pytest.raises(Refused, match=r"\[not-an-export\]"):
        read_state(str(place))
    commit(place, 1, "MERGE", state)
    assert read_state(str(place)) == state
    commit(place, 2, "OPTIMIZE")
    commit(place, 3, "VACUUM END")
    assert read_state(str(place)) == state
    commit(place, 4, "RESTORE")
    commit(place, 5, "OPTIMIZE")
    changed = read_state(str(place))
    assert changed is not None
    assert (dict(changed.partitions), changed.changed) == ({}, "the table was changed by RESTORE, version 4")
    first = json.loads(state.as_metadata())
    assert _state_of(json.dumps(first)) == state
    del first["columns"]
    assert _state_of(json.dumps(first)) == state, "an older version, which wrote no columns, had these"
    later = changed.with_partitions({1: Exported(1, 0)})
    commit(place, 6, "WRITE", later)
    assert read_state(str(place)) == later
    text = (place / "_delta_log" / f"{6:020d}.json").read_text().replace('keytail_export\\":1', 'keytail_export\\":2')
    (place / "_delta_log" / f"{6:020d}.json").write_text(text)
    with pytest.raises(Refused, match="version 2"):
        read_state(str(place))


KNOWN = Exported(end_offset=100, log_start_offset=10, leader_epoch=3, topic_id="A")
NOW = LogNow(10, 120, 110, 90, "A", ((1, 0), (3, 50), (4, 105)))
PLANS: dict[str, tuple[dict[str, Any], str, str]] = {
    "new records": ({}, "incremental", "from offset 100 on"),
    "nothing new": ({"stable_offset": 100}, "none", "no new records"),
    "no new stable records": ({"stable_offset": 60}, "none", "known to be stable only below offset 60"),
    "another topic": ({"topic_id": "B"}, "full", "replaced by another topic of the same name"),
    "no topic id": ({"topic_id": None}, "incremental", ""),
    "a shorter log": ({"log_end_offset": 99, "stable_offset": 99}, "full", "the log ends at offset 99"),
    "another leader": ({"epochs": ((1, 0), (3, 50), (4, 99))}, "full", "another leader has written offset 99"),
    "another leader after the export": ({"epochs": ((1, 0), (3, 50), (4, 100))}, "incremental", ""),
    "no epochs": ({"epochs": ()}, "incremental", ""),
    "expired": ({"log_start_offset": 11}, "full", "log start offset has moved from 10 to 11"),
    "compacted up to the end": ({"cleaner_checkpoint": 100}, "incremental", ""),
    "compacted past the end": ({"cleaner_checkpoint": 101}, "full", "tombstones may have been removed"),
    "compacted past the end, no new records": ({"cleaner_checkpoint": 101, "stable_offset": 100}, "full", "tombstones"),
    "never compacted": ({"cleaner_checkpoint": None}, "incremental", ""),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_state_of_the_log_determines_a_full_or_incremental_export(name: str) -> None:
    changes, strategy, why = PLANS[name]
    now = LogNow(**{**NOW.__dict__, **changes})
    plan = plan_export(KNOWN, now)
    assert plan.strategy == strategy
    assert why in plan.why
    assert plan.from_offset == (now.log_start_offset if strategy == "full" else 100)
    assert plan_export(None, now).strategy == "full"


def test_the_next_plan_continues_from_the_exported_offsets() -> None:
    assert NOW.exported() == Exported(110, 10, 4, "A")
    assert plan_export(NOW.exported(), NOW).strategy == "none"


def test_the_exit_status_follows_from_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [ExportRow("t", number, "/l", status) for number, status in enumerate(("exported", "refused", "clean"))]
    assert [exit_status(rows), exit_status(rows[:1]), exit_status(rows[1:2]), exit_status([])] == [3, 0, 1, 0]
    show_rows(rows, Request(PartitionFilter(), "/lake", execute=True))
    assert "1 exported, 1 refused, 1 clean" in capsys.readouterr().out
