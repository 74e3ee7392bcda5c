from __future__ import annotations

import json
from pathlib import Path

from tests.app.conftest import Run, rows_of
from tests.app.log_dirs import snapshot


def test_a_sound_log_dir(run: Run, log_dir: Path) -> None:
    before = snapshot(log_dir)
    result = run("verify", "--log-dirs", log_dir)
    assert result.exit_code == 0, result.output
    assert "3 partitions" in result.stdout
    assert "nothing wrong found" in result.stdout
    assert snapshot(log_dir) == before
    assert not (log_dir / ".lock").exists()


def test_a_flipped_byte_is_found_with_its_place(run: Run, log_dir: Path) -> None:
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
