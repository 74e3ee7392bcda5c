"""`keytail prepared`: what is ready, what is stale and why, and what `--discard` removes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from keytail.format import names
from keytail.log.lock import hold
from tests.command_line import Run, rows_of
from tests.compact.prepared.test_command import CONFIG, compact, scratch
from tests.log_dirs import snapshot


def prepared(run: Run, log_dir: Path, *flags: str, status: int = 0) -> dict[str, dict[str, Any]]:
    done = run("prepared", "--log-dirs", log_dir, *CONFIG, "--now", "1800000000000", *flags, "--output", "json")
    assert done.exit_code == status, done.output
    return rows_of(done)


@pytest.fixture
def ready(run: Run, log_dir: Path) -> Path:
    compact(run, log_dir, "--prepare")
    return log_dir


def test_without_preparations_a_message_is_printed(run: Run, log_dir: Path) -> None:
    assert prepared(run, log_dir) == {}
    assert run("prepared", "--log-dirs", log_dir, *CONFIG).stdout == "Nothing is prepared.\n"


def test_a_preparation_that_is_ready_is_listed(run: Run, ready: Path) -> None:
    rows = prepared(run, ready)
    assert {name: row["status"] for name, row in rows.items()} == {"orders-0": "ready", "orders-1": "ready"}
    row = rows["orders-0"]
    files = list((ready / "orders-0").glob("*.clean"))
    assert row["disk_bytes"] == sum(path.stat().st_size for path in files if ".prepared." not in path.name)
    assert row["prepared_ms"] == 1_800_000_000_000
    assert row["end_dirty_offset"] == 300
    assert row["bytes_before"] > row["bytes_after"] > 0
    assert any(row["run_id"] in path.name for path in files)


def test_a_stale_preparation_is_listed_with_the_reason(run: Run, ready: Path) -> None:
    os.utime(min((ready / "orders-0").glob("*.log")))
    next((ready / "orders-1").glob("*.prepared.*")).unlink()
    rows = prepared(run, ready)
    assert {name: row["status"] for name, row in rows.items()} == {"orders-0": "stale", "orders-1": "stale"}
    assert "prepared-sources-changed" in rows["orders-0"]["slugs"]
    assert "has no record" in rows["orders-1"]["error"]


def test_discard_requires_execute_and_removes_only_preparations(run: Run, log_dir: Path) -> None:
    before = snapshot(log_dir)
    compact(run, log_dir, "--prepare")
    other = log_dir / "orders-0" / f"{0:020d}.log.r3f2a.a1.clean"  # a run of another command left this file
    other.touch()
    files = scratch(log_dir)
    assert set(prepared(run, log_dir, "--discard")) == {"orders-0", "orders-1"}
    assert scratch(log_dir) == files
    with hold([str(log_dir)]):  # a running broker holds the lock, too
        rows = prepared(run, log_dir, "--discard", "--execute")
    assert {row["status"] for row in rows.values()} == {"discarded"}
    assert scratch(log_dir) == [other.name]
    other.unlink()
    after = snapshot(log_dir)
    del after[names.PREPARE_LOCK]
    assert after == before
    assert prepared(run, log_dir, "--discard", "--execute") == {}


def test_a_running_preparation_is_not_disturbed(run: Run, ready: Path) -> None:
    files = scratch(ready)
    with hold([str(ready)], name=names.PREPARE_LOCK):
        done = run("prepared", "--log-dirs", ready, *CONFIG, "--discard", "--execute")
    assert done.exit_code == 1
    assert "another run is preparing compactions" in done.stderr
    assert scratch(ready) == files
