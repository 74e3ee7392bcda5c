"""`--ledger` and `history`: two concurrent runs that create one ledger, runs of other commands, and refusals."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from keytail.ledger.read import read_rows
from tests.cli.forked import keytail
from tests.command_line import Run
from tests.compact.test_command import CONFIG, KEYTAIL
from tests.log_dirs import random_records, snapshot, write_log_dir


def history(run: Run, ledger: Path, *more: str) -> list[dict[str, Any]]:
    done = run("history", "--ledger", ledger, "--output", "json", *more)
    assert done.exit_code == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


@pytest.mark.spark
@pytest.mark.soak("ledger/test_tables.py: concurrent appends")
def test_two_concurrent_runs_create_and_share_a_ledger(run: Run, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    log_dirs = [
        write_log_dir(tmp_path / name, {f"orders-{n}": random_records(n, 400) for n in range(2)}) for name in "ab"
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYSPARK_", "SPARK_"))}
    runs = [
        subprocess.Popen(
            [
                str(KEYTAIL), "compact", "--log-dirs", str(log_dir), *CONFIG, "--execute", "--master", "local[1]",
                "--output", "json", "--ledger", str(ledger),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for log_dir in log_dirs
    ]  # fmt: skip
    reported = [item.communicate() for item in runs]
    assert [item.returncode for item in runs] == [0, 0], reported
    known = history(run, ledger)
    assert [row["status"] for row in known] == ["done", "done"]
    assert sorted(row["log_dirs"][0] for row in known) == sorted(map(str, log_dirs))
    for (out, err), log_dir in zip(reported, log_dirs, strict=True):
        [row] = [row for row in known if row["log_dirs"] == [str(log_dir)]]
        assert f"--run {row['run_id']}" in err, "the run must print the id that it has in the ledger"
        assert "found io.delta" not in err, "Ivy must print nothing"
        rows = {(row["topic"], row["partition"]): row for row in json.loads(out)}
        _, *of_run = history(run, ledger, "--run", row["run_id"].rpartition("-")[2])
        assert len(of_run) == len(rows) == 2
        for row in of_run:
            of_result = rows[row["topic"], row["partition"]]
            same = set(of_result) & set(row)
            assert len(same) > 12
            assert {name: row[name] for name in same} == {name: of_result[name] for name in same}
    over_time = history(run, ledger, "--partitions", "orders-1")
    assert [(row["partition"], row["status"]) for row in over_time] == [(1, "compacted"), (1, "compacted")]
    for flags, message in (([], "2 of 2 partitions compacted."), (["--since", "2020-01-01"], "4 of 4 partitions")):
        done = run("report", "--ledger", ledger, *flags, tmp_path / "page.html")
        assert done.exit_code == 0, done.stderr
        assert message in (tmp_path / "page.html").read_text()


@pytest.mark.spark
def test_runs_of_rebuild_index_and_expire_are_recorded(run: Run, on_spark: None, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": random_records(0, 400), "users-0": random_records(1, 100)})
    (log_dir / "orders-0" / f"{100:020d}.timeindex").unlink()
    flags = ("--log-dirs", log_dir, "--execute", "--ledger", ledger, "--output", "json")
    done = run("rebuild-index", *flags)
    assert done.exit_code == 0, done.stderr
    policies = ("--topics-have-no-overrides", "--topic-config", "retention.ms=1", "--topic-config",
                "orders:cleanup.policy=delete", "--topic-config", "users:cleanup.policy=delete")  # fmt: skip
    done = run("expire", *flags, *policies)
    assert done.exit_code == 0, done.stderr
    removed = json.loads(done.stdout)
    assert {row["status"] for row in removed} == {"expired"}
    runs = [(row["command"], row["status"]) for row in history(run, ledger)]
    assert runs == [("rebuild-index", "done"), ("expire", "done")]
    rows = history(run, ledger, "--partitions", "orders-0,users-0")
    reported = [(row["command"], row["topic"], row["status"]) for row in rows]
    assert reported == [
        ("rebuild-index", "orders", "rebuilt"), ("rebuild-index", "users", "rebuilt"),
        ("expire", "orders", "expired"), ("expire", "users", "expired"),
    ]  # fmt: skip
    for row in removed:
        [of_ledger] = [item for item in rows if (item["command"], item["topic"]) == ("expire", row["topic"])]
        assert (of_ledger["bytes_before"], of_ledger["bytes_after"]) == (row["bytes_before"], row["bytes_after"])
    [segment] = read_rows(str(ledger), "segments", {})
    assert (segment["topic"], segment["base_offset"], segment["index_status"]) == ("orders", 100, "good")


def test_a_ledger_in_a_log_dir_is_refused_and_a_dry_run_creates_none(tmp_path: Path) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": random_records(0, 100)})
    before = snapshot(log_dir)
    for ledger in (str(log_dir / "ledger"), f"file://{log_dir}/ledger"):
        done = keytail("compact", "--log-dirs", log_dir, *CONFIG, "--execute", "--ledger", ledger)
        assert done.returncode == 2
        assert "--ledger is inside a log dir" in done.stderr
    assert snapshot(log_dir) == before
    done = keytail("compact", "--log-dirs", log_dir, *CONFIG, "--ledger", tmp_path / "ledger")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ledger").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--run", "x", "--maintain"), "cannot be combined"),
        (("--execute",), "require --maintain"),
        (("--partitions", "orders"), "[invalid-partition-name]"),
        ((), "there is no ledger"),
    ],
)
def test_invalid_flags_of_history_are_refused(
    run: Run, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    done = run("history", "--ledger", tmp_path, *flags)
    assert done.exit_code == 2
    assert message in done.stderr
