"""`keytail rebuild-index` through the command line: its rows, and the files that it changes or leaves unchanged."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from keytail.log.lock import hold
from keytail.rebuild_index import driver as rebuild
from keytail.rebuild_index.command import REBUILD_INDEX
from tests.command_line import Run, rows_of
from tests.log_dirs import snapshot
from tests.reference.batches import decode_log
from tests.reference.indexing import index_files


@pytest.fixture
def sound(run: Run, log_dir: Path) -> Path:
    """Return a log dir with the snapshots that a broker would have left."""
    assert run("rebuild-index", "--log-dirs", log_dir, "--execute").exit_code == 0
    (log_dir / ".lock").unlink()
    return log_dir


def run_rebuild(run: Run, log_dir: Path, *more: str) -> tuple[int, dict[str, dict[str, Any]]]:
    result = run("rebuild-index", "--log-dirs", log_dir, "--output", "json", *more)
    return result.exit_code, rows_of(result)


def statuses(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: row["status"] for name, row in rows.items()}


def remove(partition: Path, suffix: str) -> int:
    files = list(partition.glob(f"*{suffix}"))
    for file in files:
        file.unlink()
    return len(files)


def test_a_valid_log_dir_is_unchanged(run: Run, sound: Path) -> None:
    before = snapshot(sound)
    for more in ((), ("--execute",), ("--all", "--execute")):
        status, rows = run_rebuild(run, sound, *more)
        assert status == 0
        assert set(statuses(rows).values()) == {"sound"}
        assert {row["files_wrong"] for row in rows.values()} == {0}
    assert snapshot(sound) == before


def test_a_dry_run_reports_missing_files_and_changes_nothing(run: Run, sound: Path) -> None:
    assert remove(sound / "orders-0", ".index") == 4
    remove(sound / "users-0", ".timeindex")
    before = snapshot(sound)
    result = run("rebuild-index", "--log-dirs", sound)
    assert result.exit_code == 1
    assert "3 partitions: 2 would-rebuild, 1 sound." in result.stdout
    assert "orders-0 segment 100 would-rebuild: .index: the file is missing" in result.stdout
    assert "--execute" in result.stderr
    status, rows = run_rebuild(run, sound)
    assert status == 1
    segment = rows["orders-0"]["segments"][1]
    assert (segment["base_offset"], segment["index"], segment["time_index"]) == (100, "missing", "sound")
    assert (segment["batches"], rows["orders-0"]["batches"]) == (10, 40)
    assert rows["orders-0"]["files_wrong"] == 4
    assert snapshot(sound) == before
    assert not (sound / ".lock").exists()


def test_missing_files_are_rebuilt_with_owner_mode_and_times(run: Run, sound: Path) -> None:
    before = snapshot(sound)
    partition = sound / "orders-0"
    wrong = partition / f"{0:020d}.timeindex"
    wrong.write_bytes(b"\0" * 24)
    wrong.chmod(0o640)
    (partition / f"{0:020d}.log").chmod(0o600)
    remove(partition, ".index")
    status, rows = run_rebuild(run, sound, "--execute")
    assert (status, rows["orders-0"]["status"], rows["orders-0"]["files_wrong"]) == (0, "rebuilt", 5)
    after = snapshot(sound)
    assert {name: data for name, (data, _) in after.items()} == {name: data for name, (data, _) in before.items()}
    for name, (_, mtime_ns) in before.items():
        assert after[name][1] == mtime_ns or name.endswith("index")
    assert wrong.stat().st_mode & 0o777 == 0o640
    assert wrong.with_suffix(".index").stat().st_mode & 0o777 == 0o600
    for log in partition.glob("*.log"):
        ours = (log.with_suffix(".index").read_bytes(), log.with_suffix(".timeindex").read_bytes())
        assert ours == index_files(log.read_bytes(), int(log.stem), 4096)
    assert run_rebuild(run, sound)[0] == 0


def test_the_interval_of_the_topic_is_used(run: Run, sound: Path) -> None:
    config = ("--topic-config", "orders:index.interval.bytes=0", "--all")
    status, rows = run_rebuild(run, sound, *config)
    assert (status, rows["orders-0"]["status"], rows["users-0"]["status"]) == (1, "would-rebuild", "sound")
    assert run_rebuild(run, sound, *config, "--execute")[0] == 0
    log = sound / "orders-0" / f"{100:020d}.log"
    assert log.with_suffix(".index").read_bytes() == index_files(log.read_bytes(), 100, 0)[0]
    status, rows = run_rebuild(run, sound)
    assert (status, set(statuses(rows).values())) == (0, {"sound"}), "other correct entries must be valid"
    status, rows = run_rebuild(run, sound, "--topic-config", "segment.index.bytes=16", *config[:2], "--all")
    assert (status, rows["orders-0"]["status"]) == (3, "refused")
    assert "segment.index.bytes" in rows["orders-0"]["error"]


def test_a_refused_row_lists_files_that_were_rebuilt_nevertheless(run: Run, sound: Path) -> None:
    partition = sound / "orders-0"
    log = partition / f"{0:020d}.log"
    data = log.read_bytes()
    second, third = (batch.position for batch in decode_log(data)[1:3])
    log.write_bytes(data[:second] + data[third:])  # as compacted: the log may lack producers
    for suffix in (".snapshot", ".index"):
        remove(partition, suffix)
    status, rows = run_rebuild(run, sound, "--execute")
    row = rows["orders-0"]
    assert (status, row["status"]) == (3, "refused")
    assert "cannot be rebuilt" in row["error"]
    assert {segment["status"] for segment in row["segments"]} == {"rebuilt"}
    assert (partition / f"{0:020d}.index").exists()
    assert "nothing was changed" not in REBUILD_INDEX.statuses["refused"].meaning


def test_a_corrupt_partition_does_not_stop_the_others(run: Run, sound: Path) -> None:
    damaged = sound / "orders-1" / f"{100:020d}.log"
    data = bytearray(damaged.read_bytes())
    position = decode_log(bytes(data))[3].position
    data[position + 70] ^= 1
    damaged.write_bytes(data)
    for name in ("orders-0", "orders-1"):
        remove(sound / name, ".index")
    before = snapshot(sound / "orders-1")
    status, rows = run_rebuild(run, sound, "--execute")
    assert status == 3
    assert statuses(rows) == {"orders-0": "rebuilt", "orders-1": "corrupt", "users-0": "sound"}
    assert f"byte position {position}" in rows["orders-1"]["error"]
    assert snapshot(sound / "orders-1") == before


def test_a_torn_tail_is_reported_and_truncated_only_on_demand(run: Run, sound: Path) -> None:
    (sound / ".kafka_cleanshutdown").unlink()
    (sound / "recovery-point-offset-checkpoint").write_text("0\n1\norders 0 300\n")
    torn = sound / "orders-0" / f"{300:020d}.log"
    whole = torn.read_bytes()
    cut_at = decode_log(whole)[-1].position
    torn.write_bytes(whole[:-7])
    before = snapshot(sound)
    status, rows = run_rebuild(run, sound, "--truncate")
    assert (status, rows["orders-0"]["status"]) == (1, "would-rebuild")
    assert f"byte position {cut_at}, offset 390" in rows["orders-0"]["error"]
    assert snapshot(sound) == before
    status, rows = run_rebuild(run, sound, "--execute")
    assert status == 1
    assert "--truncate" in rows["orders-0"]["error"]
    assert torn.read_bytes() == whole[:-7]
    status, rows = run_rebuild(run, sound, "--execute", "--truncate")
    assert (status, rows["orders-0"]["status"], rows["orders-0"]["error"]) == (0, "rebuilt", "")
    assert "truncated there" in rows["orders-0"]["notes"][0]
    assert torn.read_bytes() == whole[:cut_at]
    assert torn.with_suffix(".index").read_bytes() == index_files(whole[:cut_at], 300, 4096)[0]
    assert run_rebuild(run, sound, "--execute", "--truncate")[1]["orders-0"]["status"] == "sound"


@pytest.mark.parametrize("clean_shutdown", [True, False])
def test_damage_that_is_not_truncated_has_a_reason_and_an_effective_remedy(
    run: Run, sound: Path, tmp_path: Path, clean_shutdown: bool
) -> None:
    damaged, partition = sound / "orders-1" / f"{100:020d}.log", sound / "orders-1"
    data = bytearray(damaged.read_bytes())
    position = decode_log(bytes(data))[3].position
    data[position + 70] ^= 1
    damaged.write_bytes(data)
    why = "the broker stopped cleanly"
    if not clean_shutdown:
        (sound / ".kafka_cleanshutdown").unlink()
        (sound / "recovery-point-offset-checkpoint").write_text("0\n1\norders 1 300\n")
        why = "the damage is below the recovery point 300"
    chosen = ("--partitions", "orders-1")
    assert "`keytail rebuild-index --truncate`" in run_rebuild(run, sound, *chosen)[1]["orders-1"]["error"]
    before = snapshot(partition)
    for more in ((), ("--execute",)):
        status, rows = run_rebuild(run, sound, *chosen, "--truncate", *more)
        error = rows["orders-1"]["error"]
        assert (status, rows["orders-1"]["status"]) == (1, "corrupt")
        assert f"(batch has an invalid CRC): {why}" in error and f"byte position {position}" in error
        assert error.endswith("[damage-not-truncated]") and "--truncate" not in error
        assert snapshot(partition) == before
    assert "`keytail salvage --to DIR` saves the valid batches" in error
    saved = tmp_path / "saved"
    assert run("salvage", "--log-dirs", sound, *chosen, "--to", saved, "--execute").exit_code == 0
    partition.rename(tmp_path / "damaged")
    (saved / "orders-1").rename(partition)
    assert run("verify", "--log-dirs", sound, *chosen).exit_code == 0
    assert run_rebuild(run, sound, *chosen, "--execute", "--truncate")[1]["orders-1"]["status"] == "sound"


def test_the_end_of_the_log_is_not_checked_while_a_broker_runs(run: Run, sound: Path) -> None:
    (sound / ".kafka_cleanshutdown").unlink()
    active = sound / "orders-0" / f"{300:020d}.log"
    active.write_bytes(active.read_bytes()[:-7])
    active.with_suffix(".index").write_bytes(active.with_suffix(".index").read_bytes() + bytes(800))
    active.with_suffix(".timeindex").write_bytes(bytes(1200))
    with hold([str(sound)]):
        status, rows = run_rebuild(run, sound)
        assert (status, rows["orders-0"]["status"], rows["orders-0"]["in_use"]) == (0, "sound", True)
        remove(sound / "orders-0", f"{0:020d}.index")
        assert run_rebuild(run, sound)[1]["orders-0"]["segments"][0]["index"] == "missing"
        result = run("rebuild-index", "--log-dirs", sound, "--execute")
        assert result.exit_code == 1
        assert "in use by" in result.stderr


def test_leftovers_of_an_interrupted_run_are_resolved_first(run: Run, sound: Path) -> None:
    partition = sound / "orders-0"
    right = snapshot(sound)
    (partition / f"{0:020d}.index.rdead.as1.clean").write_bytes(b"garbage")
    os.rename(partition / f"{0:020d}.timeindex", partition / f"{0:020d}.timeindex.swap")
    status, rows = run_rebuild(run, sound)
    assert (status, rows["orders-0"]["status"]) == (3, "refused")
    assert "--execute finishes it first" in rows["orders-0"]["error"]
    status, rows = run_rebuild(run, sound, "--execute")
    assert (status, rows["orders-0"]["status"]) == (0, "sound")
    assert len(rows["orders-0"]["notes"]) == 2
    assert snapshot(sound) == right


def test_rebuild_index_changes_nothing_while_the_lock_is_held(run: Run, sound: Path) -> None:
    remove(sound / "orders-0", ".index")
    (sound / ".lock").touch()
    before = snapshot(sound)
    with (sound / ".lock").open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        result = run("rebuild-index", "--log-dirs", sound, "--execute", "--output", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == []
    assert snapshot(sound) == before


def test_unsuitable_states_are_refused(run: Run, sound: Path) -> None:
    tiered = ("--topic-config", "orders:remote.storage.enable=true")
    status, rows = run_rebuild(run, sound, *tiered)
    assert (status, rows["orders-0"]["status"]) == (3, "refused")
    assert "tiered" in rows["orders-0"]["error"]
    (sound / "users-0" / "7.log").touch()
    status, rows = run_rebuild(run, sound, "--execute")
    assert (status, rows["users-0"]["status"]) == (3, "refused")
    (sound / "users-0" / "7.log").unlink()
    (sound / "log-start-offset-checkpoint").write_text("0\n1\nusers 0 1000\n")
    assert "deletes the whole log" in run_rebuild(run, sound)[1]["users-0"]["error"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--log-dirs", "{tmp}/nowhere"), "no such log dir"),
        (("--log-dirs", "{tmp}/empty"), "empty"),
        (("--log-dirs", "{tmp}/logs/orders-0"), "not a log dir"),
        (("--log-dirs", "{tmp}/logs", "--topic", "no-such"), "[unknown-topic-or-partition]"),
        (("--log-dirs", "{tmp}/logs", "--truncated"), "No such option"),
        ((), "[no-log-dirs]"),
    ],
)
def test_wrong_usage_is_refused(run: Run, log_dir: Path, tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    (tmp_path / "empty").mkdir()
    result = run("rebuild-index", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.exit_code == 2
    assert text in result.output


def test_spark_is_not_started_for_a_few_bytes(run: Run, sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "session_of_run", None)
    remove(sound / "orders-0", ".index")
    assert run_rebuild(run, sound, "--execute")[0] == 0
