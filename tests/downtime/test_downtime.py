"""`keytail downtime`: what it records, and how `history` and `report` show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keytail.ledger.read import read_rows
from keytail.run.engine import ThisProcess
from tests.command_line import Run
from tests.ledger.test_command import history
from tests.ledger.test_tables import begun

DOWN = 1_700_000_000_000
TIMES = ("--down-at", str(DOWN), "--reachable-at", str(DOWN + 41_300))
COLUMNS = ("broker", "down_at_ms", "reachable_at_ms", "in_sync_at_ms")


def record(run: Run, ledger: Path, *flags: str) -> dict[str, Any]:
    done = run("downtime", "--ledger", ledger, "--broker", "b1", *flags, "--output", "json")
    assert done.exit_code == 0, done.output
    [row] = json.loads(done.stdout)
    return row


def test_a_downtime_is_shown_with_its_run(run: Run, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    engine: Any = ThisProcess()
    record(run, ledger, *TIMES)  # creates the ledger
    for run_id in ("20231114T221320Z-aa", "20231114T221321Z-bb"):
        begun(engine, str(ledger), run_id, tmp_path).end((), "done")
    row = record(run, ledger, *TIMES, "--run", "aa")
    assert (row["run_id"], row["status"], row["in_sync_at_ms"]) == ("20231114T221320Z-aa", "recorded", None)
    record(run, ledger, *TIMES, "--in-sync-at", str(DOWN + 60_000), "--run", "20231114T221320Z-aa")  # a retry
    rows = {row["run_id"]: row for row in history(run, ledger)}
    assert len(rows) == 3
    assert [rows["20231114T221320Z-aa"][name] for name in COLUMNS] == ["b1", DOWN, DOWN + 41_300, DOWN + 60_000]
    assert (rows["20231114T221320Z-aa"]["command"], rows["20231114T221320Z-aa"]["status"]) == ("compact", "done")
    assert [rows["20231114T221321Z-bb"][name] for name in COLUMNS] == [None] * 4
    shown = run("history", "--ledger", ledger)
    assert shown.stdout.count("41.3 s") == 3, shown.stdout  # also in the row of the downtime without a run
    one = run("history", "--ledger", ledger, "--run", "aa").stdout
    assert "downtime: 41.3 s, broker b1, in sync after 1 min 0 s" in one
    assert "downtime:" not in run("history", "--ledger", ledger, "--run", "bb").stdout
    page = tmp_path / "page.html"
    assert run("report", "--ledger", ledger, "--run", "aa", page).exit_code == 0
    assert "<dt>downtime of b1</dt><dd>41.3 s</dd>" in page.read_text()
    assert "<dt>replicas in sync</dt><dd>2023-11-14 22:14:20 UTC</dd>" in page.read_text()
    assert "downtime\n" in shown.stdout  # the heading
    assert run("report", "--ledger", ledger, "--run", "bb", page).exit_code == 0
    assert "<dt>downtime" not in page.read_text()
    assert run("report", "--ledger", ledger, "--since", "2023-01-01", page).exit_code == 0
    assert "<dt>longest downtime</dt><dd>41.3 s</dd>" in page.read_text()
    assert page.read_text().count("<td>41.3 s (b1)</td>") == 2


def test_a_downtime_without_a_run_is_a_separate_row(run: Run, tmp_path: Path) -> None:
    ids = {record(run, tmp_path / "ledger", *TIMES)["run_id"] for _ in range(2)}  # the second call is a repetition
    assert len(ids) == 1
    [row] = history(run, tmp_path / "ledger")
    assert {row["run_id"]} == ids
    assert (row["command"], row["status"], row["broker"], row["error"]) == ("downtime", "done", "b1", "")
    assert (row["start_ms"], row["end_ms"]) == (DOWN, DOWN + 41_300)
    assert len(read_rows(str(tmp_path / "ledger"), "runs", {})) == 2


def test_unknown_times_remain_unknown(run: Run, tmp_path: Path) -> None:
    record(run, tmp_path / "ledger", "--down-at", str(DOWN))
    [row] = history(run, tmp_path / "ledger")
    assert [row[name] for name in COLUMNS] == ["b1", DOWN, None, None]
    shown = run("history", "--ledger", tmp_path / "ledger", "--run", row["run_id"]).stdout
    assert "downtime: for an unknown time, broker b1, it is unknown when all replicas were in sync again" in shown
    page = tmp_path / "page.html"
    assert run("report", "--ledger", tmp_path / "ledger", page).exit_code == 0
    assert "<dt>broker reachable</dt><dd>unknown</dd>" in page.read_text()
    assert "<dt>downtime of" not in page.read_text()


@pytest.mark.parametrize(
    ("flags", "slug"),
    [
        (("--down-at", "soon"), "invalid-time"),
        (("--down-at", str(DOWN), "--reachable-at", str(DOWN - 1)), "invalid-downtime"),
        ((*TIMES, "--in-sync-at", str(DOWN)), "invalid-downtime"),
        (("--down-at", str(DOWN), "--in-sync-at", str(DOWN)), "missing-flag"),
        (("--down-at", "2999-01-01"), "invalid-downtime"),
        ((*TIMES, "--broker", " "), "invalid-downtime"),
        ((*TIMES, "--run", "aa"), "no-ledger"),
    ],
)
def test_impossible_downtimes_are_refused(flags: tuple[str, ...], slug: str, run: Run, tmp_path: Path) -> None:
    done = run("downtime", "--ledger", tmp_path / "ledger", "--broker", "b1", *flags)
    assert (done.exit_code, f"[{slug}]" in done.stderr) == (2, True), done.output
    assert not (tmp_path / "ledger").exists()


def test_an_unknown_run_is_refused(run: Run, tmp_path: Path) -> None:
    record(run, tmp_path / "ledger", *TIMES)
    done = run("downtime", "--ledger", tmp_path / "ledger", "--broker", "b1", *TIMES, "--run", "nobody's")
    assert (done.exit_code, "[no-single-run]" in done.stderr) == (2, True)
    assert len(read_rows(str(tmp_path / "ledger"), "runs", {})) == 1
