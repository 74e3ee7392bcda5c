"""The ledger as the deltalake package writes it: some tests of test_tables.py without a Spark session, and tests of
what only a ledger without Spark does.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keytail.ledger import of_run
from keytail.ledger.command import OF_DOWNTIME
from keytail.ledger.of_run import LedgerFlags
from keytail.ledger.read import read_rows
from keytail.ledger.tables import TABLES, Stamp, partition_fields
from keytail.ledger.write import LedgerTable, _Waiting
from keytail.run.processes import Processes
from keytail.run.rows import ResultRow
from tests.chance import SEED
from tests.command_line import Run
from tests.compact.test_command import CONFIG, KEYTAIL, keytail
from tests.downtime.test_downtime import DOWN, TIMES
from tests.ledger.test_command import history
from tests.ledger.test_tables import (  # noqa: F401 (fixtures, and tests that are run again here)
    dying,
    empty,
    path,
    test_a_bundle_whose_intent_cannot_be_written_is_not_started,
    test_a_completed_run_is_recorded,
    test_a_downtime_is_added_to_the_ledger_of_an_older_keytail,
    test_a_run_works_even_if_it_cannot_repair_the_ledger,
    test_after_a_kill_at_any_point_the_ledger_is_correct_and_the_next_run_completes_it,
    test_an_outcome_that_cannot_be_recorded_changes_the_exit_status_and_is_later_read_from_the_disk,
    test_missing_columns_are_added_to_an_older_ledger,
    test_rows_that_arrive_during_an_append_are_written_in_the_next_append,
)
from tests.log_dirs import random_records, write_log_dir


@pytest.fixture(scope="module")
def engine() -> Iterator[Processes]:
    with Processes(2) as processes:
        yield processes


@pytest.fixture
def spark() -> None:
    """Return no session, so that deltalake writes the tables."""


def test_rows_of_a_thread_that_continues_late_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[list[Any]] = []
    monkeypatch.setattr(LedgerTable, "_write", lambda self, rows: written.append(list(rows)))
    table = LedgerTable(None, str(tmp_path), "runs", "one")
    fetched = table._waiting  # by a thread that then waits for another one
    table.append([{"number": 1}])
    fetched.append(_Waiting([{"number": 2}]))
    table.append([{"number": 3}])
    assert [row["number"] for rows in written for row in rows] == [1, 2, 3]


def test_an_append_that_succeeded_despite_an_error_is_not_repeated(
    path: str, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    import deltalake
    from deltalake.exceptions import CommitFailedError

    write = deltalake.write_deltalake
    written = []

    def write_and_fail(*arguments: Any, **more: Any) -> None:
        written.append(1)
        write(*arguments, **more)
        if len(written) == 1:
            raise CommitFailedError("another came first")

    monkeypatch.setattr(deltalake, "write_deltalake", write_and_fail)
    table = LedgerTable(None, path, "partitions", "one")
    for topic in "ab":
        stamp = Stamp("one", "here", 0)
        table.append([partition_fields(stamp, "intent", 1, ResultRow(topic, 0, "/x", "would-compact"))])
    assert len(written) == 2, "the retry must find the append and not write again"
    assert sorted(row["topic"] for row in read_rows(path, "partitions", {})) == ["a", "b"]


WRITER = """
import sys
from keytail.ledger.write import LedgerTable
from keytail.ledger.tables import TABLES, Stamp
table = LedgerTable(None, sys.argv[1], "runs", sys.argv[2])
table.ensure()
for number in range(int(sys.argv[3])):
    table.append([{**Stamp(sys.argv[2], "here", 0).fields(), "event": "intent", "now_ms": number}])
    print(number, flush=True)
"""


def start_writer(ledger: Path, run_id: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(ledger), run_id, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def numbers(ledger: Path, run_id: str) -> list[int]:
    return sorted(row["now_ms"] for row in read_rows(str(ledger), "runs", {"run_id": run_id}))


@pytest.mark.long
def test_concurrent_writers_lose_no_row(tmp_path: Path) -> None:
    writers = {f"run-{n}": start_writer(tmp_path / "ledger", f"run-{n}", 12) for n in range(3)}
    for run_id, writer in writers.items():
        writer.communicate()
        assert writer.returncode == 0
        assert numbers(tmp_path / "ledger", run_id) == list(range(12))


@pytest.mark.long
def test_after_a_kill_the_table_has_each_append_completely_or_not_at_all(tmp_path: Path) -> None:
    """Each append that a writer reported before the kill is in the table, and the next writer continues."""
    rng = random.Random(SEED)
    ledger = tmp_path / "ledger"
    for attempt in range(3):
        writer = start_writer(ledger, f"killed-{attempt}", 10_000)
        assert writer.stdout is not None
        reported = [int(writer.stdout.readline()) for _ in range(rng.randint(1, 6))]
        time.sleep(rng.random() / 20)
        os.kill(writer.pid, signal.SIGKILL)
        reported += [int(line) for line in writer.stdout.read().split()]
        writer.wait()
        found = numbers(ledger, f"killed-{attempt}")
        assert found == list(range(len(found))), f"seed {SEED}"
        assert len(found) in (len(reported), len(reported) + 1)
    assert not (ledger / "runs" / "_delta_log" / "_temporary").exists()


@pytest.mark.long
def test_two_concurrent_runs_share_a_new_ledger_and_start_no_jvm(run: Run, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    environment = {**os.environ, "JAVA_HOME": str(tmp_path / "no-java"), "PATH": ""}
    runs = {}
    for name in "ab":
        log_dir = write_log_dir(tmp_path / name, {f"orders-{n}": random_records(n, 400) for n in range(2)})
        command = [str(KEYTAIL), "compact", "--log-dirs", str(log_dir), *CONFIG, "--execute", "--ledger", str(ledger)]
        runs[str(log_dir)] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    errors = {log_dir: process.communicate()[1] for log_dir, process in runs.items()}
    assert [process.returncode for process in runs.values()] == [0, 0], errors
    known = {row["log_dirs"][0]: row for row in history(run, ledger)}
    assert {log_dir: row["status"] for log_dir, row in known.items()} == dict.fromkeys(runs, "done")
    for log_dir, row in known.items():
        assert row["counts"] == {"compacted": 2}
        assert f"--run {row['run_id']}" in errors[log_dir]
    assert len(read_rows(str(ledger), "segments", {})) == 4


OF_COMPACT = {"first_dirty_offset", "end_dirty_offset", "records_before", "records_after", "tombstones_removed",
              "markers_removed"}  # fmt: skip
SIZES = {"segments_before", "segments_after", "bytes_before", "bytes_after"}


def always_null(ledger: Path, table: str, command: str) -> set[str]:
    """Return the columns that are null in all rows of the command, but not `error` and `repaired_by`: no run failed."""
    rows = [row for row in read_rows(str(ledger), table, {}) if row["command"] == command]
    assert rows
    return {name for name in TABLES[table] if all(row[name] is None for row in rows)} - {"error", "repaired_by"}


@pytest.mark.long
def test_each_command_fills_its_columns(run: Run, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": random_records(0, 400)})
    compacted = write_log_dir(tmp_path / "compacted", {"orders-0": random_records(0, 400)})
    flags = ("--execute", "--ledger", ledger, "--output", "json-v1")
    done = keytail("compact", "--log-dirs", compacted, *CONFIG, *flags)
    assert done.returncode == 0, done.stderr
    ids = [json.loads(done.stdout)["run_id"]]
    done = keytail("downtime", "--ledger", ledger, "--broker", "b1", *TIMES, "--in-sync-at", str(DOWN + 60_000))
    assert done.returncode == 0, done.stderr
    (log_dir / "orders-0" / f"{100:020d}.timeindex").unlink()
    policy = ("--topics-have-no-overrides", "--topic-config", "retention.ms=1", "--topic-config",
              "orders:cleanup.policy=delete")  # fmt: skip
    for command, more in (("rebuild-index", ()), ("expire", policy)):
        done = keytail(command, "--log-dirs", log_dir, *flags, *more)
        assert done.returncode == 0, done.stderr
        assert "Spark" not in done.stderr
        ids.append(json.loads(done.stdout)["run_id"])
    assert [row["run_id"] for row in history(run, ledger)[1:]] == ids
    assert [(row["command"], row["status"]) for row in history(run, ledger)] == [
        ("downtime", "done"), ("compact", "done"), ("rebuild-index", "done"), ("expire", "done"),
    ]  # fmt: skip
    [segment] = read_rows(str(ledger), "segments", {"command": "rebuild-index"})
    assert (segment["base_offset"], segment["index_status"]) == (100, "good")
    of_downtime = set(OF_DOWNTIME)
    assert always_null(ledger, "partitions", "compact") == set()
    assert always_null(ledger, "partitions", "expire") == OF_COMPACT
    assert always_null(ledger, "partitions", "rebuild-index") == OF_COMPACT | SIZES
    assert always_null(ledger, "segments", "compact") == always_null(ledger, "segments", "rebuild-index") == set()
    assert always_null(ledger, "runs", "compact") == of_downtime
    assert always_null(ledger, "runs", "expire") == of_downtime | {"records_before", "records_after"}
    assert not of_downtime & always_null(ledger, "runs", "downtime")


def test_the_reason_for_starting_spark_for_a_ledger_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LedgerFlags().why_spark() == ""
    assert LedgerFlags("/srv/ledger").why_spark() == LedgerFlags("file:///srv/ledger").why_spark() == ""
    assert "its path is not local" in LedgerFlags("s3a://b/ledger").why_spark()
    monkeypatch.setattr(of_run, "needs_spark", lambda: True)
    assert "pip install 'keytail[history]'" in LedgerFlags("/srv/ledger").why_spark()
    assert LedgerFlags().why_spark() == ""
