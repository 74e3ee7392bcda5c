"""`keytail salvage`: a dry run writes nothing, a run creates a directory, and unsuitable targets are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keytail.log import lock
from tests.command_line import Run, rows_of
from tests.log_dirs import snapshot
from tests.reference.varints import crc32c


def _damage_a_batch(log_dir: Path) -> Path:
    """Flip a byte of the second batch of `orders-0`'s second segment."""
    path = sorted((log_dir / "orders-0").glob("*.log"))[1]
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[8:12], "big") + 12
    data[size + 70] ^= 1
    path.write_bytes(data)
    return path


def test_a_dry_run_reports_losses_and_writes_nothing(run: Run, log_dir: Path, tmp_path: Path) -> None:
    path, to = _damage_a_batch(log_dir), tmp_path / "saved"
    before = snapshot(log_dir)
    done = run("salvage", "--log-dirs", log_dir, "--to", to, "--output", "json")
    assert done.exit_code == 1
    rows = rows_of(done)
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(rows, "would-salvage")
    [loss] = rows["orders-0"]["losses"]
    assert (loss["kind"], loss["file"], loss["first_offset"], loss["end_offset"]) == ("damaged", path.name, 110, 120)
    assert rows["orders-1"]["losses"] == []
    assert snapshot(log_dir) == before
    assert not to.exists()


def test_a_run_prints_how_to_put_the_result_in_place(run: Run, log_dir: Path, tmp_path: Path) -> None:
    _damage_a_batch(log_dir)
    before = snapshot(log_dir)
    to = tmp_path / "saved"
    done = run("salvage", "--log-dirs", log_dir, "--to", to, "--execute")
    assert done.exit_code == 0, done.output
    assert "lost: offsets 110 to 119 (damaged, 00000000000000000100.log bytes" in done.output
    assert f"\n    {to}/orders-0 to {log_dir}/orders-0\n" in done.output
    assert sorted(path.name for path in to.iterdir()) == ["orders-0", "orders-1", "users-0"]
    assert snapshot(log_dir) == before
    for name in ("orders-1", "users-0"):
        logs = {path.name: path.read_bytes() for path in (log_dir / name).glob("*.log")}
        assert logs == {path.name: path.read_bytes() for path in (to / name).glob("*.log")}
    again = run("salvage", "--log-dirs", log_dir, "--to", to, "--execute")
    assert again.exit_code == 2
    assert "--to is not empty" in again.output


def test_the_exit_status_is_not_0_if_readable_batches_are_left_out(run: Run, log_dir: Path, tmp_path: Path) -> None:
    path = sorted((log_dir / "orders-0").glob("*.log"))[1]
    data = bytearray(path.read_bytes())
    at = int.from_bytes(data[8:12], "big") + 12
    end = at + int.from_bytes(data[at + 8 : at + 12], "big") + 12
    data[at + 57 : at + 61] = (1).to_bytes(4, "big")  # the record count does not match the records
    data[at + 17 : at + 21] = crc32c(bytes(data[at + 21 : end])).to_bytes(4, "big")
    path.write_bytes(data)
    done = run("salvage", "--log-dirs", log_dir, "--to", tmp_path / "saved", "--execute", "--output", "json")
    assert done.exit_code == 3
    rows = rows_of(done)
    assert {name: row["left_out"] for name, row in rows.items()} == {"orders-0": 1, "orders-1": 0, "users-0": 0}
    assert {row["status"] for row in rows.values()} == {"salvaged"}


def test_lack_of_memory_fails_the_partition(
    run: Run, log_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("keytail.salvage.partition.scan_file", no_memory)
    done = run("salvage", "--log-dirs", log_dir, "--to", tmp_path / "saved", "--execute", "--output", "json")
    assert done.exit_code == 1
    assert {row["status"] for row in rows_of(done).values()} == {"failed"}
    assert all("out of memory on host" in row["error"] for row in rows_of(done).values())


@pytest.mark.parametrize("where", ["logs/inside", "logs", "."])
def test_a_target_in_or_around_a_log_dir_is_a_usage_error(
    where: str, run: Run, log_dir: Path, tmp_path: Path
) -> None:
    before = snapshot(tmp_path)
    done = run("salvage", "--log-dirs", log_dir, "--to", tmp_path / where, "--execute")
    assert done.exit_code == 2
    assert "[overlaps-log-dir]" in done.output
    assert snapshot(tmp_path) == before


def test_a_target_in_the_log_dir_of_another_broker_is_a_usage_error(run: Run, log_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "meta.properties").write_text("version=1\n")
    done = run("salvage", "--log-dirs", log_dir, "--to", tmp_path / "other" / "saved", "--execute")
    assert done.exit_code == 2
    assert "[overlaps-log-dir]" in done.output
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["meta.properties"]


def test_salvage_is_refused_while_a_broker_runs(run: Run, log_dir: Path, tmp_path: Path) -> None:
    with lock.hold([str(log_dir)]):
        done = run("salvage", "--log-dirs", log_dir, "--to", tmp_path / "saved", "--output", "json")
    assert done.exit_code == 1
    assert {row["status"] for row in json.loads(done.stdout)} == {"refused"}


def test_a_partition_without_valid_batches_does_not_stop_the_others(run: Run, log_dir: Path, tmp_path: Path) -> None:
    for path in (log_dir / "users-0").glob("*.log"):
        path.write_bytes(bytes(path.stat().st_size))
    done = run("salvage", "--log-dirs", log_dir, "--to", tmp_path / "saved", "--output", "json", "--execute")
    assert done.exit_code == 3
    assert {name: row["status"] for name, row in rows_of(done).items()} == {
        "orders-0": "salvaged",
        "orders-1": "salvaged",
        "users-0": "failed",
    }
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["orders-0", "orders-1"]
