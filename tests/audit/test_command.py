"""`keytail audit` as a command: rows, the table, exit statuses, usage errors, and that no file is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Run, rows_of
from tests.log_dirs import random_records, snapshot, write_log_dir
from tests.reference.batches import decode_log, encode_batch


@pytest.fixture
def brokers(tmp_path: Path) -> list[Path]:
    """Write log dirs of three brokers: all have orders-0, two have users-0, one has only-0."""
    orders, users = random_records(1, 400), random_records(2, 200)
    a = write_log_dir(tmp_path / "a", {"orders-0": orders, "users-0": users, "only-0": users})
    b = write_log_dir(tmp_path / "b", {"orders-0": orders, "users-0": users})
    c = write_log_dir(tmp_path / "c", {"orders-0": orders})
    for path in (a, b, c):
        (path / "cleaner-offset-checkpoint").write_text("0\n0\n")
    return [a, b, c]


def flags(brokers: list[Path]) -> list[str]:
    return [part for name, path in zip("abc", brokers, strict=False) for part in ("--replica", f"{name}={path}")]


def audit(run: Run, brokers: list[Path], *more: str) -> tuple[int, dict[str, dict[str, Any]]]:
    result = run("audit", *flags(brokers), "--output", "json", *more)
    return result.exit_code, rows_of(result) if result.stdout else {}


def change(log_dir: Path, segment: int, number: int, **changes: Any) -> None:
    """Change the batch of this number in the segment."""
    path = log_dir / "orders-0" / f"{segment:020d}.log"
    data = path.read_bytes()
    batches = decode_log(data)
    batch = batches[number]
    records = changes.pop("records", batch.records)
    made = encode_batch(records, **{"base_offset": batch.base_offset, "last_offset": batch.last_offset} | changes)
    path.write_bytes(data[: batch.position] + made + data[batch.position + batch.size :])


@pytest.mark.long
def test_equal_replicas_do_not_differ(run: Run, brokers: list[Path]) -> None:
    before = [snapshot(path) for path in brokers]
    status, rows = audit(run, brokers)
    assert status == 0
    found = {name: (row["status"], row["records_compared"], len(row["replicas"])) for name, row in rows.items()}
    assert found == {"orders-0": ("alike", 400, 3), "users-0": ("alike", 200, 2), "only-0": ("skipped", None, 0)}
    assert [item["records"] for item in rows["orders-0"]["replicas"]] == [400] * 3
    assert rows["orders-0"]["divergences"] == {} == rows["orders-0"]["explained"]
    assert (rows["orders-0"]["first_offset"], rows["orders-0"]["end_offset"]) == (0, 400)
    assert [snapshot(path) for path in brokers] == before, "a file was created, changed or locked"
    table = run("audit", *flags(brokers))
    assert table.exit_code == 0
    assert "3 partitions: 2 alike, 1 skipped. No differences found." in table.stdout
    assert audit(run, brokers, "--partitions", "only-0")[0] == 1, "a named partition that is skipped must be an error"
    alone = run("audit", *flags(brokers), "--partitions", "only-0")
    assert "1 partition: 1 skipped. Nothing was compared." in alone.stdout


@pytest.mark.long
def test_a_difference_is_reported_with_its_offset(run: Run, brokers: list[Path]) -> None:
    _, b, c = brokers
    change(b, 100, 3, leader_epoch=7)  # batch 3 has offsets 130 to 139
    records = decode_log((c / "orders-0" / f"{0:020d}.log").read_bytes())[2].records
    change(c, 0, 2, records=[r for r in records if r.offset != 25])
    status, rows = audit(run, brokers, "--examples", "2")
    row = rows["orders-0"]
    assert (status, row["status"], rows["users-0"]["status"]) == (3, "differs", "alike")
    assert row["divergences"] == {"leader-epoch": 10, "lost": 1}
    assert row["first_divergence"] == 25
    [lost] = [item for item in row["examples"] if item["kind"] == "lost"]
    assert (lost["offset"], lost["lacking"], sorted(lost["records"])) == (25, ["c"], ["a", "b"])
    epochs = [item for item in row["examples"] if item["kind"] == "leader-epoch"]
    assert [item["offset"] for item in epochs] == [130, 131]
    assert {name: record["leader_epoch"] for name, record in epochs[0]["records"].items()} == {"a": 0, "b": 7}
    table = run("audit", *flags(brokers), "--topic", "orders")
    assert table.exit_code == 1
    assert "lost: 1 records that are missing without a reason" in table.stdout
    assert "offset 130: a has leader_epoch 0, b has leader_epoch 7" in table.stdout


@pytest.mark.long
def test_damage_is_reported_with_its_position_and_other_batches_are_compared(run: Run, brokers: list[Path]) -> None:
    _, b, c = brokers
    path = b / "orders-0" / f"{100:020d}.log"
    data = bytearray(path.read_bytes())
    at = decode_log(bytes(data))[4]
    data[at.position + 70] ^= 1
    path.write_bytes(bytes(data))
    status, rows = audit(run, brokers)
    row = rows["orders-0"]
    assert (status, row["status"], row["divergences"]) == (3, "corrupt", {})
    [gap] = row["not_compared"]
    assert (gap["replica"], gap["first_offset"], gap["end_offset"]) == ("b", 140, 150)
    assert (gap["path"], gap["byte_position"]) == (str(path), at.position)
    assert "invalid CRC" in gap["what"]
    assert row["records_compared"] == 400, "the other two replicas must be compared at that position"
    change(c, 100, 9, leader_epoch=3)  # beyond the damage
    _, rows = audit(run, brokers)
    assert (rows["orders-0"]["status"], rows["orders-0"]["divergences"]) == ("differs", {"leader-epoch": 10})
    assert "could not be compared" in rows["orders-0"]["error"]


@pytest.mark.long
def test_a_lagging_replica_and_one_with_a_later_start_do_not_differ(run: Run, brokers: list[Path]) -> None:
    _, b, c = brokers
    path = b / "orders-0" / f"{300:020d}.log"
    path.write_bytes(path.read_bytes()[: decode_log(path.read_bytes())[6].position])
    for suffix in (".log", ".index", ".timeindex"):
        (c / "orders-0" / f"{0:020d}{suffix}").unlink()
    status, rows = audit(run, brokers)
    row = rows["orders-0"]
    assert (status, row["status"], row["end_offset"]) == (0, "alike", 360)
    assert "a continues to offset 400; its end was not compared" in row["notes"]
    shutil.rmtree(c / "orders-0")
    for base in (0, 100, 200):
        (b / "orders-0" / f"{base:020d}.log").unlink()
    status, rows = audit(run, brokers)
    assert (rows["orders-0"]["first_offset"], rows["orders-0"]["records_compared"]) == (300, 60)


def test_usage_errors_and_topics_with_another_id_are_refused(run: Run, brokers: list[Path]) -> None:
    a, b, c = brokers
    for given in ((), (a,), (a, a), (a, c / "orders-0"), (a, c / "nowhere")):
        named = [part for path in given for part in ("--replica", path)]
        assert run("audit", *named).exit_code == 2
    assert run("audit", *flags(brokers), "--topic-list", "nosuch").exit_code == 2
    for path, last in ((a, "A"), (b, "B")):
        (path / "orders-0" / "partition.metadata").write_text(f"version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAA{last}Q")
    status, rows = audit(run, brokers)
    assert (status, rows["orders-0"]["status"]) == (3, "refused")
    assert "another topic of this name" in rows["orders-0"]["error"]


@pytest.mark.long
def test_standard_output_contains_only_json(run: Run, brokers: list[Path]) -> None:
    result = run("audit", *flags(brokers), "--output", "json")
    assert [row["topic"] for row in json.loads(result.stdout)] == ["only", "orders", "users"]
