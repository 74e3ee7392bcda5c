from __future__ import annotations

import json
from pathlib import Path

from tests.command_line import Run, rows_of
from tests.log_dirs import random_records, snapshot, write_log_dir


def test_a_valid_log_dir_has_no_findings(run: Run, log_dir: Path) -> None:
    before = snapshot(log_dir)
    result = run("verify", "--log-dirs", log_dir)
    assert result.exit_code == 0, result.output
    assert "3 partitions" in result.stdout
    assert "no problems found" in result.stdout
    assert snapshot(log_dir) == before
    assert not (log_dir / ".lock").exists()


def test_a_flipped_byte_is_found_with_its_position(run: Run, log_dir: Path) -> None:
    damaged = log_dir / "orders-1" / f"{100:020d}.log"
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)
    result = run("verify", "--log-dirs", log_dir, "--output", "json")
    assert result.exit_code == 1
    rows = rows_of(result)
    assert {name: row["status"] for name, row in rows.items()} == {
        "orders-0": "sound",
        "orders-1": "damaged",
        "users-0": "sound",
    }
    [finding] = [f for f in rows["orders-1"]["findings"] if f["path"] == str(damaged)]
    assert (finding["severity"], finding["byte_position"], finding["offset"]) == ("error", 0, 100)
    table = run("verify", "--log-dirs", log_dir)
    assert table.exit_code == 1
    assert f"{damaged}, byte position 0, offset 100" in table.stdout
    assert "A broker: " in table.stdout


def test_a_leftover_is_a_finding(run: Run, log_dir: Path) -> None:
    (log_dir / "users-0" / f"{0:020d}.log.swap").write_bytes(b"")
    result = run("verify", "--log-dirs", log_dir, "--topic", "users", "--output", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)[0]["findings"]


def test_a_broken_checkpoint_is_a_finding(run: Run, log_dir: Path) -> None:
    (log_dir / "cleaner-offset-checkpoint").write_text("0\nx\n")
    result = run("verify", "--log-dirs", log_dir, "--partitions", "users-0", "--output", "json")
    assert result.exit_code == 1
    assert "line 2" in json.loads(result.stdout)[0]["findings"][0]["what"]


def test_findings_about_a_log_dir_have_a_separate_row(run: Run, log_dir: Path) -> None:
    (log_dir / "lost+found").mkdir()
    (log_dir / "orders-0" / "garbage.log").touch()
    result = run("verify", "--log-dirs", log_dir, "--output", "json")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)
    assert (rows[0]["topic"], rows[0]["log_dir"], rows[0]["status"]) == (None, str(log_dir), "damaged")
    found = {(row["topic"], row["partition"]): [f["kind"] for f in row["findings"]] for row in rows}
    assert found == {
        (None, None): ["foreign-directory"],
        ("orders", 0): ["fatal-name"],
        ("orders", 1): [],
        ("users", 0): [],
    }
    table = run("verify", "--log-dirs", log_dir).stdout
    assert table.count("lost+found") == table.count("garbage.log") == 1
    assert "3 partitions" in table


def test_a_partition_in_two_log_dirs_is_a_finding(run: Run, log_dir: Path, tmp_path: Path) -> None:
    other = write_log_dir(tmp_path / "other", {"orders-0": random_records(0, 400)})
    result = run("verify", "--log-dirs", f"{log_dir},{other}", "--topic", "orders", "--output", "json")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)
    found = [(row["log_dir"], row["partition"], [f["kind"] for f in row["findings"]]) for row in rows]
    assert found == [(str(log_dir), 0, ["two-homes"]), (str(log_dir), 1, []), (str(other), 0, ["two-homes"])]


def test_a_directory_that_is_not_a_log_dir_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gtk-2").mkdir()
    (tmp_path / "gtk-2" / "gtkrc").touch()
    (tmp_path / "cron.d").mkdir()
    result = run("verify", "--log-dirs", tmp_path)
    assert result.exit_code == 2
    assert "not a log dir" in result.stderr
    assert result.stdout == ""


def test_a_start_that_would_lose_records_is_reported(run: Run, log_dir: Path) -> None:
    damaged = log_dir / "orders-1" / f"{100:020d}.log"
    damaged.write_bytes(damaged.read_bytes()[:-5])
    closed = run("verify", "--log-dirs", log_dir)
    assert closed.exit_code == 1
    assert "Do not start the broker" not in closed.output
    active = sorted((log_dir / "orders-0").glob("*.log"))[-1]
    active.write_bytes(active.read_bytes() + b"half a batch")
    found = run("verify", "--log-dirs", log_dir)
    assert "Do not start the broker: it would lose or hide acknowledged records of orders-0." in found.stdout
    assert run("verify", "--log-dirs", log_dir, "--quiet").stdout.count("Do not start the broker") == 1
    assert found.stdout.count("Starting the broker loses records") == 1
    rows = rows_of(run("verify", "--log-dirs", log_dir, "--output", "json"))
    assert [f["start_loses"] for f in rows["orders-0"]["findings"]] == [True]
    assert not any(f["start_loses"] for f in rows["orders-1"]["findings"])
