"""The verbs with a metadata log in the log dirs: no topic needs to be named, and none is guessed at."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import golden
from tests.app.conftest import Run, rows_of
from tests.app.log_dirs import newest_by_key, random_records, records_of, snapshot, write_log_dir
from tests.reference import metadata as dull
from tests.reference.metadata import T0, MetadataLog

METADATA = "__cluster_metadata-0"
COMPACT = ("cleanup.policy", "compact")


def _write_id(partition: Path, number: int) -> None:
    from keytail.format.metadata import RemoveTopicRecord, parse_record

    record = parse_record(dull.remove(number))
    assert isinstance(record, RemoveTopicRecord)
    (partition / "partition.metadata").write_text(f"version: 0\ntopic_id: {record.topic_id}")


@pytest.fixture
def log(log_dir: Path) -> MetadataLog:
    """Metadata for `orders` (two partitions, compacted) and `users` (one, Kafka's defaults), long committed."""
    for path in log_dir.iterdir():
        if path.is_dir():
            _write_id(path, 1 if path.name.startswith("orders") else 2)
    log = MetadataLog(log_dir / METADATA)
    log.append(dull.topic("orders", 1), dull.topic_config("orders", *COMPACT))
    log.append(dull.partition(1, 0), dull.partition(1, 1, (2, 1)))
    return log.append(dull.topic("users", 2), dull.partition(2, 0)).no_ops(1000)


def plan(run: Run, log_dir: Path, *flags: str | Path) -> tuple[dict[str, dict[str, Any]], str]:
    result = run("plan", "--log-dirs", log_dir, "--output", "json", *flags)
    return rows_of(result), result.stderr


def statuses(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: row["status"] for name, row in rows.items()}


def test_no_topic_needs_to_be_named(run: Run, log_dir: Path, log: MetadataLog) -> None:
    rows, said = plan(run, log_dir)
    assert statuses(rows) == {"orders-0": "would-compact", "orders-1": "would-compact", "users-0": "skipped"}
    assert rows["users-0"]["error"] == "cleanup.policy is [delete], without compact"
    assert f"metadata as of offset {log.end_offset - 1}, time {T0 + log.end_offset - 1} ms (2023-11-14" in said
    assert METADATA in said


def test_old_metadata_is_told(run: Run, log_dir: Path, log: MetadataLog) -> None:
    as_of_ms = T0 + log.end_offset - 1
    _, said = plan(run, log_dir, "--now", str(as_of_ms + 3_600_000))
    assert "Warning" not in said
    _, said = plan(run, log_dir, "--now", str(as_of_ms + 2 * 86_400_000))
    assert "Warning: that is 2 d before this run, and settings of topics may have changed since" in said


def test_the_golden_log_dir_plans_alike_with_and_without_its_topics_named(run: Run, tmp_path: Path) -> None:
    log_dir = golden.unpack(tmp_path)
    flags = ("--config", tmp_path / "server.properties", "--now", str(golden.manifest()["generated_ms"] + 3_600_000))
    rows, said = plan(run, log_dir, *flags)
    assert "metadata as of offset 224, time 1795234673011 ms (2026-11-21 04:17:53 UTC)" in said
    named, _ = plan(run, log_dir, *flags, *golden.topic_config_arguments())
    shutil.rmtree(log_dir / METADATA)
    without_log, said = plan(run, log_dir, *flags, *golden.topic_config_arguments())
    assert "metadata" not in said
    assert rows == named == without_log
    assert rows.keys() == {f"{topic}-{number}" for topic, number in golden.partitions()}
    assert {row["status"] for row in rows.values()} == {"would-compact", "clean", "skipped"}
    assert all(rows[f"{t.name}-0"]["status"] == "skipped" for t in golden.TOPICS.values() if not t.compacted)
    unknown, _ = plan(run, log_dir, *flags)
    assert set(statuses(unknown).values()) == {"refused"}


def test_the_command_line_wins(run: Run, log_dir: Path, log: MetadataLog) -> None:
    rows, _ = plan(run, log_dir, "--topic-config", "users:cleanup.policy=compact")
    assert rows["users-0"]["status"] == "would-compact"
    rows, _ = plan(run, log_dir, "--topic-config", "orders:cleanup.policy=delete")
    assert rows["orders-0"]["status"] == "skipped"


def test_dynamic_settings_of_brokers(run: Run, log_dir: Path, log: MetadataLog, tmp_path: Path) -> None:
    properties = tmp_path / "server.properties"
    properties.write_text(f"log.dirs={log_dir}\nnode.id=1\nlog.cleaner.min.compaction.lag.ms=0\n")
    lag = "log.cleaner.min.compaction.lag.ms"
    log.append(dull.config(4, "", lag, "4000000000000")).no_ops(1000)
    rows, _ = plan(run, log_dir, "--config", properties)
    assert rows["orders-0"]["status"] == "skipped"
    assert "younger than min.compaction.lag.ms 4000000000000" in rows["orders-0"]["error"]
    log.append(dull.config(4, "1", lag, "0")).no_ops(1000)
    assert plan(run, log_dir, "--config", properties)[0]["orders-0"]["status"] == "would-compact"
    log.append(dull.config(4, "1", lag, None), dull.config(4, "2", lag, "0")).no_ops(1000)
    assert plan(run, log_dir, "--config", properties)[0]["orders-0"]["status"] == "skipped"


def test_of_a_recent_change_the_safer_value_counts(run: Run, log_dir: Path, log: MetadataLog) -> None:
    log.append(dull.topic_config("users", *COMPACT))
    rows, _ = plan(run, log_dir)
    assert rows["users-0"]["status"] == "skipped"
    assert "cleanup.policy may not be committed yet (Kafka's default or metadata log" in rows["users-0"]["error"]
    log.append(dull.topic_config("orders", "cleanup.policy", "compact,delete"))
    assert plan(run, log_dir)[0]["orders-0"]["status"] == "would-compact"
    log.no_ops(1000)
    assert plan(run, log_dir)[0]["users-0"]["status"] == "would-compact"


# Stray


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("unknown topic", "stray: the metadata log at offset 1006 has no topic users"),
        ("other id", "stray: the directory is of topic id EBAQEBAQEBAQEBAQEBAQCQ, but users has EBAQ"),
        ("no id", "stray: the directory has no partition.metadata"),
        ("no such partition", "stray: users has no partition 5"),
        ("moved away", "stray: broker 1 is not among the partition's replicas 2, 3"),
    ],
)
def test_stray_partitions_are_refused_whatever_the_command_line_says(
    run: Run, log_dir: Path, log: MetadataLog, case: str, said: str
) -> None:
    name = "users-0"
    if case == "unknown topic":
        log.append(dull.remove(2))
    elif case == "other id":
        _write_id(log_dir / name, 9)
    elif case == "no id":
        (log_dir / name / "partition.metadata").unlink()
    elif case == "no such partition":
        name = "users-5"
        (log_dir / "users-0").rename(log_dir / name)
    else:
        log.append(dull.change(2, 0, (2, 3)))
    for flags in ((), ("--topic-config", "users:cleanup.policy=compact", "--topics-have-no-overrides")):
        rows, _ = plan(run, log_dir, *flags)
        assert rows[name]["status"] == "refused"
        assert said in rows[name]["error"]
        assert rows["orders-0"]["status"] == "would-compact"


def test_a_malformed_id_is_corrupt(run: Run, log_dir: Path, log: MetadataLog) -> None:
    (log_dir / "users-0" / "partition.metadata").write_text("nonsense")
    assert plan(run, log_dir)[0]["users-0"]["status"] == "corrupt"


# Metadata that cannot be read


def test_a_cut_metadata_log_leaves_topics_unknown_for_its_reason(run: Run, log_dir: Path, log: MetadataLog) -> None:
    data = log.log_path.read_bytes()
    log.log_path.write_bytes(data[:-5])
    rows, said = plan(run, log_dir)
    assert set(statuses(rows).values()) == {"refused"}
    for row in rows.values():
        assert row["error"].startswith("topic config unknown: the metadata log cannot be read: a batch of ")
        assert str(log.log_path) in row["error"]
        assert f"--topic-config {row['topic']}:key=value" in row["error"]
    assert "the metadata log cannot be read" in said
    named, _ = plan(run, log_dir, "--topic-config", "orders:cleanup.policy=compact")
    assert statuses(named) == {"orders-0": "would-compact", "orders-1": "would-compact", "users-0": "refused"}


def test_a_changed_byte_anywhere_in_the_metadata_log_is_never_another_plan(
    run: Run, log_dir: Path, log: MetadataLog
) -> None:
    data = log.log_path.read_bytes()
    rows, _ = plan(run, log_dir)
    for at in (*range(0, 200, 13), len(data) // 2, len(data) - 1):
        log.log_path.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
        damaged, _ = plan(run, log_dir)
        # The leader epoch of a batch is outside of its checksum, and means nothing here.
        assert damaged == rows or set(statuses(damaged).values()) == {"refused"}, at


def test_a_metadata_log_that_may_not_be_read(run: Run, log_dir: Path, log: MetadataLog) -> None:
    if os.geteuid() == 0:
        shutil.rmtree(log.path)
        log.path.write_text("not a directory")
    else:
        log.path.chmod(0)
    rows, _ = plan(run, log_dir)
    assert set(statuses(rows).values()) == {"refused"}
    assert "the metadata log cannot be read: " in rows["users-0"]["error"]
    if os.geteuid() != 0:
        log.path.chmod(0o700)


def test_two_metadata_logs(run: Run, log_dir: Path, log: MetadataLog, tmp_path: Path) -> None:
    other = write_log_dir(tmp_path / "more", {"others-0": random_records(5, 40)})
    shutil.copytree(log.path, other / METADATA)
    rows, _ = plan(run, log_dir, "--log-dirs", other)
    assert "several log dirs hold a metadata log" in rows["orders-0"]["error"]


def test_a_metadata_log_beside_the_log_dirs(run: Run, log_dir: Path, log: MetadataLog, tmp_path: Path) -> None:
    elsewhere = tmp_path / "metadata"
    elsewhere.mkdir()
    shutil.move(log.path, elsewhere / METADATA)
    properties = tmp_path / "server.properties"
    properties.write_text(f"log.dirs={log_dir}\nmetadata.log.dir={elsewhere}\n")
    assert plan(run, log_dir, "--config", properties)[0]["orders-0"]["status"] == "would-compact"


def test_whose_log_dirs_they_are_must_be_known(run: Run, log_dir: Path, log: MetadataLog, tmp_path: Path) -> None:
    properties = tmp_path / "server.properties"
    properties.write_text("node.id=2\n")
    rows, _ = plan(run, log_dir, "--config", properties)
    assert "topic config unknown: the broker's number differs: 1 in " in rows["orders-0"]["error"]
    (log_dir / "meta.properties").write_text("version=1\n")
    rows, _ = plan(run, log_dir)
    assert "no meta.properties names the broker's number" in rows["orders-0"]["error"]
    properties.write_text("node.id=1\n")
    assert plan(run, log_dir, "--config", properties)[0]["orders-0"]["status"] == "would-compact"


def test_secrets_in_the_metadata_log_are_not_shown(run: Run, log_dir: Path, log: MetadataLog) -> None:
    log.append(dull.config(4, "1", "ssl.key.password", "hunter2"), dull.frame(11, 0, b"hunter2 as a credential"))
    result = run("plan", "--log-dirs", log_dir)
    assert result.exit_code == 0
    assert "hunter2" not in result.output


@pytest.mark.spark
def test_compact_on_a_stopped_brokers_host_without_naming_a_topic(run: Run, log_dir: Path, log: MetadataLog) -> None:
    before = {name: records_of(log_dir / name) for name in ("orders-0", "orders-1")}
    untouched = [snapshot(log_dir / name) for name in ("users-0", METADATA)]
    (log_dir.parent / "server.properties").write_text(f"log.dirs={log_dir}\nnode.id=1\n")
    result = run(
        "compact", "--config", log_dir.parent / "server.properties", "--execute", "--master", "local[1]",
        "--output", "json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert statuses(rows_of(result)) == {"orders-0": "compacted", "orders-1": "compacted", "users-0": "skipped"}
    assert [snapshot(log_dir / name) for name in ("users-0", METADATA)] == untouched
    for name, records in before.items():
        after = records_of(log_dir / name)
        assert len(after) < len(records)
        kept = {key: record for key, record in newest_by_key(records).items() if record.value is not None}
        assert {key: record for key, record in newest_by_key(after).items() if record.value is not None} == kept
    assert json.loads(result.stdout)[0]["records_after"] is not None
