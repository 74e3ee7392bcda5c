"""`plan --measure` and `--estimate`: rows, their order, totals, and behaviour beside a running broker."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from keytail.cli.stopping import Stopped
from keytail.compact.measure import driver, estimating, worker
from keytail.log.lock import hold
from tests.command_line import Run, rows_of
from tests.log_dirs import random_records, snapshot, write_log_dir
from tests.no_spark import without_spark

NOW = ("--now", "1800000000000", "--unsafe-clock")
CONFIG = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact", "--topic-config",
          "users:cleanup.policy=compact", "--topic-config", "events:cleanup.policy=delete")  # fmt: skip
COMPARED = ("bytes_after", "segments_after", "records_before", "records_after", "tombstones_removed", "markers_removed",
            "end_dirty_offset")  # fmt: skip


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    names = {"users-0": 200, "orders-0": 900, "orders-1": 500, "events-0": 100}
    return write_log_dir(tmp_path / "logs", {name: random_records(n, n) for name, n in names.items()})


def plan(run: Run, log_dir: Path, *flags: str, status: int = 0) -> Any:
    with without_spark():
        done = run("plan", "--log-dirs", log_dir, *CONFIG, *NOW, *flags)
    assert done.exit_code == status, done.output
    return done


def measured(run: Run, log_dir: Path, *flags: str, status: int = 0) -> dict[str, dict[str, Any]]:
    return rows_of(plan(run, log_dir, *flags, "--output", "json", status=status))


@pytest.mark.parametrize("flag", ["--measure", "--estimate"])
def test_rows_report_the_result_of_a_later_compaction(run: Run, log_dir: Path, flag: str) -> None:
    before = snapshot(log_dir)
    with hold([str(log_dir)]):  # a running broker holds the lock, too
        rows = measured(run, log_dir, flag)
    assert snapshot(log_dir) == before
    assert list(rows)[:3] == ["orders-0", "orders-1", "users-0"], "rows must be in descending order of gain"
    assert rows["events-0"]["measured"] is None
    with without_spark():
        done = rows_of(run("compact", "--log-dirs", log_dir, *CONFIG, *NOW, "--execute", "--output", "json"))
    for name, row in list(rows.items())[:3]:
        assert row["status"] == "would-compact" and done[name]["status"] == "compacted"
        assert {field: row[field] for field in COMPARED} == {field: done[name][field] for field in COMPARED}
        found = row["measured"]
        assert found["method"] == "measured", "an estimate must measure small partitions completely"
        assert found["reclaimed_bytes"] == row["bytes_before"] - row["bytes_after"]
        assert found["bytes_after_low"] == found["bytes_after_high"] == row["bytes_after"]
        assert found["prepare_s"] > 0 and found["commit_s"] > 0


def test_an_estimate_has_bounds(run: Run, log_dir: Path) -> None:
    truth = measured(run, log_dir, "--measure")
    of_sample = estimating.estimate_partition
    with patch.object(
        worker, "estimate_partition", lambda fs, task, rng: of_sample(fs, task, rng, draws=40, measured_bytes=0)
    ):
        rows = measured(run, log_dir, "--estimate")
        shown = plan(run, log_dir, "--estimate").stdout
    for name in ("orders-0", "orders-1", "users-0"):
        found = rows[name]["measured"]
        assert found["method"] == "estimated"
        assert rows[name]["segments_after"] is None
        for figure in ("bytes_after", "records_after"):
            low, high = found[f"{figure}_low"], found[f"{figure}_high"]
            assert low < high and low <= rows[name][figure] <= high
        assert found["bytes_after_low"] <= truth[name]["bytes_after"] <= found["bytes_after_high"]
    assert " KiB to " in shown and "(about " in shown


def test_tables_and_totals_by_topic_are_printed(run: Run, log_dir: Path) -> None:
    shown = plan(run, log_dir, "--measure")
    lines = shown.stdout.splitlines()
    at = lines.index("By topic")
    assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["topic", "orders", "users"]
    rows = measured(run, log_dir, "--measure")
    result = plan(run, log_dir, "--measure", "--output", "json", "--log-format", "json")
    [facts] = [item for line in result.stderr.splitlines() if (item := json.loads(line)).get("event") == "totals"]
    orders, users = facts["topics"]
    assert (orders["topic"], orders["partitions"], users["partitions"]) == ("orders", 2, 1)
    for figure in ("bytes_before", "bytes_after", "records_after"):
        assert orders[figure] == sum(rows[name][figure] for name in ("orders-0", "orders-1"))
    assert orders["reclaimed_bytes"] == orders["bytes_before"] - orders["bytes_after"]
    assert orders["tombstones_after_low"] == sum(
        rows[name]["measured"]["tombstones_after"] for name in ("orders-0", "orders-1")
    )
    assert any(line.startswith("A compaction would leave ") for line in lines)


def test_damage_and_refusals_are_reported_before_a_broker_is_stopped(run: Run, log_dir: Path) -> None:
    log = sorted((log_dir / "orders-1").glob("*.log"))[1]
    data = bytearray(log.read_bytes())
    data[100] ^= 1
    log.write_bytes(data)
    rows = measured(run, log_dir, "--measure", status=3)
    assert rows["orders-1"]["status"] == "corrupt" and rows["orders-1"]["slugs"] == ["invalid-crc"]
    assert rows["orders-1"]["measured"] is None
    assert rows["orders-0"]["measured"] is not None


def test_keys_that_do_not_fit_are_not_measured(run: Run, log_dir: Path) -> None:
    rows = measured(run, log_dir, "--measure", "--map-memory", "300")
    assert {row["status"] for name, row in rows.items() if name != "events-0"} == {"would-compact"}
    assert rows["orders-0"]["slugs"] == ["needs-fan-out"]
    assert "not measured: the partition's keys do not fit into the 300 bytes of map memory" in rows["orders-0"]["error"]


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_partition_that_changes_during_the_measurement_is_measured_again(run: Run, log_dir: Path, times: int) -> None:
    """A segment is replaced, as by the broker's cleaner."""
    real, calls = driver.refuse_changed_sources, [0]
    log = sorted((log_dir / "orders-1").glob("*.log"))[0]

    def disturbed(fs: Any, task: Any, sources: Any) -> None:
        if task.partition == 1 and calls[0] < times:
            calls[0] += 1
            new = log.with_suffix(".new")
            new.write_bytes(log.read_bytes())
            os.rename(new, log)
        real(fs, task, sources)

    with patch.object(driver, "refuse_changed_sources", disturbed):
        rows = measured(run, log_dir, "--measure")
    assert rows["orders-0"]["measured"] is not None
    assert rows["orders-1"]["status"] == "would-compact"
    assert (rows["orders-1"]["measured"] is None) == (times == 3)
    if times == 3:
        assert rows["orders-1"]["slugs"] == ["segments-changed-meanwhile"]
        assert rows["orders-1"]["error"].startswith("not measured: a segment was replaced after it was listed")


def test_a_topic_that_is_deleted_during_the_measurement_is_not_measured(run: Run, log_dir: Path) -> None:
    real = driver.refuse_changed_sources

    def disturbed(fs: Any, task: Any, sources: Any) -> None:
        if task.topic == "users" and (log_dir / "users-0").exists():
            (log_dir / "users-0").rename(log_dir / "users-0.2f9a3b1c4d5e4f60a1b2c3d4e5f60718-delete")
        real(fs, task, sources)

    with patch.object(driver, "refuse_changed_sources", disturbed):
        rows = measured(run, log_dir, "--measure", "--topic-list", "users,orders")
    assert rows["users-0"]["error"].startswith("not measured: a segment was removed after it was listed")
    assert rows["orders-0"]["measured"] is not None


def test_a_stopped_run_prints_the_rows_so_far(run: Run, log_dir: Path) -> None:
    def stop(*_: Any) -> None:
        raise Stopped(15)

    real = driver.measured_row
    calls = iter(range(10))
    with patch.object(driver, "measured_row", lambda *given: real(*given) if next(calls) < 1 else stop()):
        rows = measured(run, log_dir, "--measure", status=143)
    assert len(rows) == 4
    assert [row["measured"] is not None for row in rows.values()] == [True, False, False, False]


def test_conflicting_flags_are_refused(run: Run, log_dir: Path) -> None:
    assert "--measure and --estimate cannot be combined" in plan(
        run, log_dir, "--measure", "--estimate", status=2
    ).stderr
    assert run("compact", "--log-dirs", log_dir, "--measure").exit_code == 2


def test_the_report_shows_what_would_be_removed(run: Run, log_dir: Path, tmp_path: Path) -> None:
    plan(run, log_dir, "--measure", "--report", tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "records to remove" in page and "records removed" not in page
