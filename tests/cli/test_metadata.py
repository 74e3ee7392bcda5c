"""Commands on log dirs with a metadata log: topics need not be named, and settings are not assumed."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from keytail.log.cluster.appended import appended_after
from keytail.log.import_record import ImportRecord
from tests import golden
from tests.command_line import Run, rows_of
from tests.log.test_listing import Counting
from tests.log_dirs import newest_by_key, random_records, records_of, snapshot, write_log_dir
from tests.no_spark import without_spark
from tests.reference import metadata as model
from tests.reference.batches import Rec, encode_batch
from tests.reference.metadata import T0, MetadataLog

METADATA = "__cluster_metadata-0"
COMPACT = ("cleanup.policy", "compact")


def _write_id(partition: Path, number: int) -> None:
    from keytail.format.metadata import RemoveTopicRecord, parse_record

    record = parse_record(model.remove(number))
    assert isinstance(record, RemoveTopicRecord)
    (partition / "partition.metadata").write_text(f"version: 0\ntopic_id: {record.topic_id}")


@pytest.fixture
def log(log_dir: Path) -> MetadataLog:
    """Write metadata, committed long ago, for `orders` (two partitions, compacted) and `users` (one, with Kafka's
    defaults).
    """
    for path in log_dir.iterdir():
        if path.is_dir():
            _write_id(path, 1 if path.name.startswith("orders") else 2)
    log = MetadataLog(log_dir / METADATA)
    log.append(model.topic("orders", 1), model.topic_config("orders", *COMPACT))
    log.append(model.partition(1, 0), model.partition(1, 1, (2, 1)))
    return log.append(model.topic("users", 2), model.partition(2, 0)).no_ops(1000)


def plan(run: Run, log_dir: Path, *flags: str | Path) -> tuple[dict[str, dict[str, Any]], str]:
    result = run("plan", "--log-dirs", log_dir, "--output", "json", *flags)
    return rows_of(result), result.stderr


def statuses(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: row["status"] for name, row in rows.items()}


def test_no_topic_needs_to_be_named(run: Run, log_dir: Path, log: MetadataLog) -> None:
    rows, message = plan(run, log_dir)
    assert statuses(rows) == {"orders-0": "would-compact", "orders-1": "would-compact", "users-0": "skipped"}
    assert rows["users-0"]["error"] == "cleanup.policy is [delete], without compact"
    assert f"metadata as of offset {log.end_offset - 1}, time 2023-11-14" in message
    assert METADATA in message


def test_old_metadata_is_reported(run: Run, log_dir: Path, log: MetadataLog) -> None:
    as_of_ms = T0 + log.end_offset - 1
    _, message = plan(run, log_dir, "--now", str(as_of_ms + 3_600_000))
    assert "Warning" not in message
    _, message = plan(run, log_dir, "--now", str(as_of_ms + 2 * 86_400_000))
    assert "Warning: this time is 2 d before this run; settings of topics may have changed since" in message


def test_the_plan_of_the_golden_log_dir_is_the_same_whether_or_not_topics_are_named(run: Run, tmp_path: Path) -> None:
    log_dir = golden.unpack(tmp_path)
    flags = ("--config", tmp_path / "server.properties", "--now", str(golden.manifest()["generated_ms"] + 3_600_000))
    rows, message = plan(run, log_dir, *flags)
    assert "metadata as of offset 224, time 2026-11-21 04:17:53 UTC" in message
    named, _ = plan(run, log_dir, *flags, *golden.topic_config_arguments())
    shutil.rmtree(log_dir / METADATA)
    without_log, message = plan(run, log_dir, *flags, *golden.topic_config_arguments())
    assert "keytail: no metadata log here: with KRaft the log is in metadata.log.dir or" in message
    assert ". As --topics-have-no-overrides states, topics have no settings but those given" in message
    assert rows == named == without_log
    assert rows.keys() == {f"{topic}-{number}" for topic, number in golden.partitions()}
    assert {row["status"] for row in rows.values()} == {"would-compact", "clean", "skipped"}
    assert all(rows[f"{t.name}-0"]["status"] == "skipped" for t in golden.TOPICS.values() if not t.compacted)
    unknown, message = plan(run, log_dir, *flags)
    assert ". Save the settings of topics from any running broker" in message
    assert set(statuses(unknown).values()) == {"refused"}


def test_the_command_line_overrides_the_metadata_log(run: Run, log_dir: Path, log: MetadataLog) -> None:
    rows, _ = plan(run, log_dir, "--topic-config", "users:cleanup.policy=compact")
    assert rows["users-0"]["status"] == "would-compact"
    rows, _ = plan(run, log_dir, "--topic-config", "orders:cleanup.policy=delete")
    assert rows["orders-0"]["status"] == "skipped"


def test_dynamic_settings_of_brokers_are_applied(run: Run, log_dir: Path, log: MetadataLog, tmp_path: Path) -> None:
    properties = tmp_path / "server.properties"
    properties.write_text(f"log.dirs={log_dir}\nnode.id=1\nlog.cleaner.min.compaction.lag.ms=0\n")
    lag = "log.cleaner.min.compaction.lag.ms"
    log.append(model.config(4, "", lag, "4000000000000")).no_ops(1000)
    rows, _ = plan(run, log_dir, "--config", properties)
    assert rows["orders-0"]["status"] == "skipped"
    assert "younger than min.compaction.lag.ms 4000000000000" in rows["orders-0"]["error"]
    log.append(model.config(4, "1", lag, "0")).no_ops(1000)
    assert plan(run, log_dir, "--config", properties)[0]["orders-0"]["status"] == "would-compact"
    log.append(model.config(4, "1", lag, None), model.config(4, "2", lag, "0")).no_ops(1000)
    assert plan(run, log_dir, "--config", properties)[0]["orders-0"]["status"] == "skipped"


def test_the_safer_value_of_a_recently_changed_setting_is_used(run: Run, log_dir: Path, log: MetadataLog) -> None:
    log.append(model.topic_config("users", *COMPACT))
    rows, _ = plan(run, log_dir)
    assert rows["users-0"]["status"] == "skipped"
    assert "cleanup.policy may have one of several values (Kafka's default or metadata log" in rows["users-0"]["error"]
    table = run("plan", "--log-dirs", log_dir).stdout
    assert "users-0 skipped: cleanup.policy is [], without compact; cleanup.policy may have one of several" in table
    assert "the safer value is used. Plan again when the broker has run for ten minutes more" in table
    log.append(model.topic_config("orders", "cleanup.policy", "compact,delete"))
    assert plan(run, log_dir)[0]["orders-0"]["status"] == "would-compact"
    log.no_ops(1000)
    assert plan(run, log_dir)[0]["users-0"]["status"] == "would-compact"


# Stray partitions


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("unknown topic", "stray: the metadata log at offset 1006 has no topic users"),
        ("other id", "stray: the topic id of the directory is EBAQEBAQEBAQEBAQEBAQCQ, but topic users has EBAQ"),
        ("no id", "stray: the directory has no partition.metadata"),
        ("no such partition", "stray: users has no partition 5"),
        ("moved away", "stray: broker 1 is not among the partition's replicas 2, 3"),
    ],
)
def test_stray_partitions_are_refused_with_any_flags(
    run: Run, log_dir: Path, log: MetadataLog, case: str, reason: str
) -> None:
    name = "users-0"
    if case == "unknown topic":
        log.append(model.remove(2))
    elif case == "other id":
        _write_id(log_dir / name, 9)
    elif case == "no id":
        (log_dir / name / "partition.metadata").unlink()
    elif case == "no such partition":
        name = "users-5"
        (log_dir / "users-0").rename(log_dir / name)
    else:
        log.append(model.change(2, 0, (2, 3)))
    for flags in ((), ("--topic-config", "users:cleanup.policy=compact", "--topics-have-no-overrides")):
        rows, _ = plan(run, log_dir, *flags)
        assert rows[name]["status"] == "refused"
        assert reason in rows[name]["error"]
        assert rows["orders-0"]["status"] == "would-compact"


def test_a_malformed_id_is_corrupt(run: Run, log_dir: Path, log: MetadataLog) -> None:
    (log_dir / "users-0" / "partition.metadata").write_text("nonsense")
    assert plan(run, log_dir)[0]["users-0"]["status"] == "corrupt"


# Outdated metadata


def test_an_old_last_batch_does_not_hide_a_late_time_index_entry(
    run: Run, log_dir: Path, log: MetadataLog
) -> None:
    later_ms = T0 + log.end_offset + 9 * HOUR_MS
    append_later(log_dir, "users-0", written_ms=1, modified_ms=later_ms)
    assert "is not used" not in plan(run, log_dir)[1]
    time_index = max((log_dir / "users-0").glob("*.timeindex"))
    time_index.write_bytes(time_index.read_bytes() + struct.pack(">qi", later_ms, 99))
    assert "is not used" in plan(run, log_dir)[1]


def test_the_previous_segment_is_checked_if_the_last_is_truncated_in_its_first_batch(
    run: Run, log_dir: Path, log: MetadataLog
) -> None:
    later_ms = T0 + log.end_offset + 9 * HOUR_MS
    append_later(log_dir, "users-0", written_ms=later_ms, modified_ms=later_ms)
    torn = log_dir / "users-0" / f"{10**6:020d}.log"
    torn.write_bytes(b"cut")
    os.utime(torn, ns=(later_ms * 10**6, later_ms * 10**6))
    assert "is not used" in plan(run, log_dir)[1]


def append_later(log_dir: Path, name: str, *, written_ms: int, modified_ms: int) -> Path:
    """Append a batch written at `written_ms` to a partition, set the file's modification time, and return its path."""
    path = max((log_dir / name).glob("*.log"))
    end = records_of(log_dir / name)[-1].offset + 1
    with path.open("ab") as file:
        file.write(encode_batch([Rec(end, written_ms, b"k", b"v")]))
    os.utime(path, ns=(modified_ms * 1_000_000, modified_ms * 1_000_000))
    return path


HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("written", "modified", "is_trusted"),
    [
        (HOUR_MS + 1, HOUR_MS + 1, False),
        (HOUR_MS, 2 * HOUR_MS, True),  # the file of a copy is newer than its batch
        (9 * HOUR_MS, HOUR_MS, True),  # a client set a later timestamp than that of any file
        (-1, 2 * HOUR_MS, True),
        (HOUR_MS, HOUR_MS, True),
        (9 * HOUR_MS, 2 * HOUR_MS, False),
    ],
)
def test_metadata_older_than_appended_records_is_not_trusted(
    run: Run, log_dir: Path, log: MetadataLog, written: int, modified: int, is_trusted: bool
) -> None:
    """A cluster that was reverted to ZooKeeper keeps the metadata log of its migration (KAFKA-16463)."""
    as_of_ms = T0 + log.end_offset - 1
    path = append_later(log_dir, "users-0", written_ms=as_of_ms + written, modified_ms=as_of_ms + modified)
    rows, message = plan(run, log_dir)
    assert (statuses(rows)["orders-0"], "is not used" in message) == (
        "would-compact" if is_trusted else "refused", not is_trusted
    )  # fmt: skip
    if is_trusted:
        return
    assert str(path) in rows["orders-0"]["error"]
    assert "--metadata-is-current" in rows["orders-0"]["error"]
    before = snapshot(log_dir)
    for name in ("compact", "expire"):
        result = run(name, "--log-dirs", log_dir, "--execute", "--output", "json")
        assert set(statuses(rows_of(result)).values()) == {"refused"}
        result = run(name, "--log-dirs", log_dir)
        assert "keytail: the metadata log" in result.stderr
        assert "is not used: its newest record" in result.stderr
    after = snapshot(log_dir)
    after.pop(".lock", None)
    assert after == before
    rows, message = plan(run, log_dir, "--metadata-is-current")
    assert statuses(rows)["orders-0"] == "would-compact", rows["orders-0"]["error"]
    assert "is not used" not in message


def test_the_metadata_log_of_a_broker_with_zookeeper_is_not_trusted(run: Run, log_dir: Path, log: MetadataLog) -> None:
    (log_dir / "meta.properties").write_text("version=0\nbroker.id=1\ncluster.id=x\n")
    rows, message = plan(run, log_dir)
    assert set(statuses(rows).values()) == {"refused"}
    assert f"version=0 in {log_dir}/meta.properties, the broker runs with ZooKeeper" in message
    rows, _ = plan(run, log_dir, "--metadata-is-current")
    assert statuses(rows)["orders-0"] == "would-compact", rows["orders-0"]["error"]
    rows, _ = plan(run, log_dir, "--topic-config", "orders:cleanup.policy=compact", "--topics-have-no-overrides")
    assert statuses(rows)["orders-0"] == "would-compact", "given settings must be sufficient without metadata"


def test_the_metadata_log_of_a_migrated_broker_is_trusted(
    run: Run, log_dir: Path, log: MetadataLog, tmp_path: Path
) -> None:
    """A broker migrated from ZooKeeper to KRaft keeps version=0 in meta.properties, and Kafka 4.3.1 accepts it."""
    (log_dir / "meta.properties").write_text("version=0\nbroker.id=1\ncluster.id=x\ndirectory.id=y\n")
    rows, message = plan(run, log_dir)
    assert set(statuses(rows).values()) == {"refused"}
    assert "give its server.properties, which contains process.roles, with --config" in message
    config = tmp_path / "server.properties"
    config.write_text("process.roles=broker\nnode.id=1\n")
    rows, _ = plan(run, log_dir, "--config", config)
    assert statuses(rows)["orders-0"] == "would-compact", rows["orders-0"]["error"]
    config.write_text("zookeeper.connect=localhost\nbroker.id=1\n")
    assert set(statuses(plan(run, log_dir, "--config", config)[0]).values()) == {"refused"}
    for level, status in ((21, "refused"), (22, "would-compact")):  # levels of 3.9, and of 4.0 without ZooKeeper
        log.append(model.frame(12, 0, model.text("metadata.version") + struct.pack(">h", level))).no_ops(1000)
        rows, _ = plan(run, log_dir)
        assert statuses(rows)["orders-0"] == status, rows["orders-0"]["error"]


def test_records_of_an_unknown_type_cause_a_warning(run: Run, log_dir: Path, log: MetadataLog) -> None:
    assert "Warning: records of type" not in plan(run, log_dir)[1]
    log.append(model.frame(99, 0, b"\x00")).no_ops(1000)
    rows, message = plan(run, log_dir)
    assert "Warning: records of type 99 are ignored, because this release does not know them" in message
    assert statuses(rows)["orders-0"] == "would-compact"


@pytest.mark.parametrize("appended_by_broker", [False, True])
def test_records_of_an_import_do_not_count_as_appended_by_brokers(
    run: Run, log_dir: Path, log: MetadataLog, appended_by_broker: bool
) -> None:
    now_ms = T0 + log.end_offset - 1 + 2 * HOUR_MS
    append_later(log_dir, "users-0", written_ms=now_ms, modified_ms=now_ms)
    record = ImportRecord("id", 400, 401, (400,), 0, 1, "done")
    (log_dir / "users-0" / "keytail-import").write_bytes(record.encode())
    if appended_by_broker:
        append_later(log_dir, "users-0", written_ms=now_ms, modified_ms=now_ms)
    rows, _ = plan(run, log_dir)
    assert statuses(rows)["orders-0"] == ("refused" if appended_by_broker else "would-compact")


def test_the_previous_segment_is_checked_if_the_active_one_is_empty(run: Run, log_dir: Path, log: MetadataLog) -> None:
    now_ms = T0 + log.end_offset - 1 + 2 * HOUR_MS
    append_later(log_dir, "users-0", written_ms=now_ms, modified_ms=now_ms)
    (log_dir / "users-0" / f"{401:020d}.log").touch()
    assert set(statuses(plan(run, log_dir)[0]).values()) == {"refused"}


def test_ages_of_many_partitions_are_found_without_reading_logs(log_dir: Path, log: MetadataLog) -> None:
    fs = Counting()
    for path in log_dir.glob("*-*/*.log"):
        os.utime(path, (T0 / 1000, T0 / 1000))
    assert appended_after(fs, [str(log_dir)], T0) is None
    assert fs.counts == {"scan": 4, "stat": 3}  # the log dir and three partitions are listed


def test_internal_topics_expire_with_the_settings_of_the_metadata_log(run: Run, tmp_path: Path) -> None:
    names = ("__consumer_offsets-0", "__transaction_state-0", "__share_group_state-0")
    log_dir = write_log_dir(tmp_path / "logs", {name: random_records(1, 400) for name in names})
    log = MetadataLog(log_dir / METADATA)
    for number, name in enumerate(names, start=1):
        _write_id(log_dir / name, number)
        log.append(model.topic(name[:-2], number), model.partition(number, 0))
    log.append(model.topic_config("__transaction_state", "cleanup.policy", "compact,delete"))
    log.append(model.topic_config("__transaction_state", "retention.ms", "1")).no_ops(1000)
    flags = ("expire", "--log-dirs", log_dir, "--metadata-is-current", "--output", "json")
    found = statuses(rows_of(run(*flags)))
    assert found == {names[0]: "kept", names[1]: "would-expire", names[2]: "kept"}
    given = ("--topic-config", "__consumer_offsets:cleanup.policy=delete", "--topic-config", "retention.ms=1")
    rows = rows_of(run(*flags, *given))
    assert set(statuses(rows).values()) == {"refused"}
    assert "the given cleanup.policy, retention.ms cannot replace that log" in rows[names[0]]["error"]


def test_settings_that_no_topic_overrides_require_the_file_of_the_broker(
    run: Run, log_dir: Path, log: MetadataLog, tmp_path: Path
) -> None:
    """`users` has no overrides: its policy and retention are those of the broker, which are not in the metadata log."""
    flags = ("expire", "--log-dirs", log_dir, "--topic-list", "users", "--execute", "--output", "json")
    before = snapshot(log_dir)
    row = rows_of(run(*flags))["users-0"]
    assert row["status"] == "refused"
    assert "cleanup.policy, retention.ms of users is set by the broker's own configuration" in row["error"]
    (tmp_path / "server.properties").write_text("log.cleanup.policy=compact\n")
    assert rows_of(run(*flags, "--config", tmp_path / "server.properties"))["users-0"]["status"] == "kept"
    after = snapshot(log_dir)
    after.pop(".lock", None)
    assert after == before


@pytest.mark.parametrize("command", ["plan", "compact", "expire", "rebuild-index", "describe", "salvage"])
def test_each_command_reports_which_metadata_it_uses(
    run: Run, log_dir: Path, log: MetadataLog, tmp_path: Path, command: str
) -> None:
    more = ("--to", tmp_path / "saved") if command == "salvage" else ()
    message = run(command, "--log-dirs", log_dir, *more).stderr
    assert f"keytail: metadata as of offset {log.end_offset - 1}" in message
    shutil.rmtree(log.path)
    message = run(command, "--log-dirs", log_dir, *more).stderr
    assert "keytail: no metadata log here: with KRaft the log is in metadata.log.dir or" in message
    assert ". Save the settings of topics from any running broker" in message


def test_doctor_reports_whether_settings_are_known(run: Run, log_dir: Path, log: MetadataLog) -> None:
    def row() -> dict[str, Any]:
        found = json.loads(run("doctor", "--log-dirs", log_dir, "--output", "json").stdout)
        [row] = [row for row in found if row["check"] == "metadata log"]
        return dict(row)

    assert row()["found"].startswith(f"metadata as of offset {log.end_offset - 1}")
    assert "start and stop this broker" in row()["remedy"], "a metadata log that is years old must have a remedy"
    (log_dir / "meta.properties").write_text("version=0\nbroker.id=1\n")
    assert row()["status"] == "warn"
    assert "is not used" in row()["found"]
    shutil.rmtree(log.path)
    (log_dir / "meta.properties").unlink()
    assert (row()["status"], row()["found"]) == ("warn", "no metadata log here")
    assert "kafka-configs.sh --bootstrap-server" in row()["remedy"]
    (log_dir / "meta.properties").write_text("version=0\nbroker.id=1\n")
    where = log_dir / "meta.properties"
    assert row()["found"] == f"no metadata log here: the broker runs with ZooKeeper, according to version=0 in {where}"


@pytest.mark.parametrize("source", ["metadata", "file", "flag", "broker"])
def test_segment_bytes_of_kafka_before_4_1_is_accepted_with_a_warning(
    run: Run, log_dir: Path, log: MetadataLog, tmp_path: Path, source: str
) -> None:
    flags: dict[str, tuple[str | Path, ...]] = {
        "metadata": (),
        "file": ("--topic-configs", tmp_path / "configs"),
        "flag": ("--topic-config", "orders:segment.bytes=16384"),
        "broker": ("--config", tmp_path / "server.properties"),
    }
    (tmp_path / "configs").write_text("orders:segment.bytes=16384\n")
    (tmp_path / "server.properties").write_text("log.segment.bytes=16384\nbroker.id=1\n")
    if source == "metadata":
        log.append(model.topic_config("orders", "segment.bytes", "16384")).no_ops(1000)
    rows, message = plan(run, log_dir, *flags[source])
    assert statuses(rows) == {"orders-0": "would-compact", "orders-1": "would-compact", "users-0": "skipped"}
    named = "topics without a value of their own (" if source == "broker" else "orders (16384)"
    assert f"segment.bytes is below 1048576 for {named}" in message
    assert "Kafka 4.1 and later do not start with such a value" in message
    if source in ("metadata", "broker"):
        found = json.loads(run("doctor", "--log-dirs", log_dir, "--output", "json", *flags[source]).stdout)
        [row] = [row for row in found if row["check"] == "segment.bytes"]
        assert row["status"] == "warn"
        assert named in row["found"]


def test_segment_bytes_of_1_mib_and_internal_ones_cause_no_warning(run: Run, log_dir: Path, log: MetadataLog) -> None:
    log.append(model.topic_config("orders", "segment.bytes", "1048576")).no_ops(1000)
    _, message = plan(run, log_dir, "--topic-config", "orders:internal.segment.bytes=300")
    assert "segment.bytes" not in message


def test_segment_bytes_below_14_is_refused(run: Run, log_dir: Path, log: MetadataLog) -> None:
    log.append(model.topic_config("orders", "segment.bytes", "13")).no_ops(1000)
    rows, _ = plan(run, log_dir)
    assert rows["orders-0"]["status"] == "refused"
    assert "Use a whole number from 14 to 2147483647" in rows["orders-0"]["error"]


def test_with_zookeeper_a_plan_succeeds_after_following_the_advice(run: Run, log_dir: Path, tmp_path: Path) -> None:
    (log_dir / "meta.properties").write_text("version=0\nbroker.id=1\n")
    rows, message = plan(run, log_dir)
    assert set(statuses(rows).values()) == {"refused"}
    assert all("kafka-configs.sh --bootstrap-server" in row["error"] for row in rows.values())
    assert "the broker runs with ZooKeeper" in message
    assert "then run again with --topic-configs topics.txt" in message
    configs = tmp_path / "topics.txt"
    configs.write_text(
        "".join(
            f"Dynamic configs for topic {topic} are:\n"
            f"  cleanup.policy={policy} sensitive=false synonyms={{DYNAMIC_TOPIC_CONFIG:cleanup.policy={policy}}}\n"
            for topic, policy in (("orders", "compact"), ("users", "delete"))
        )
    )
    rows, message = plan(run, log_dir, "--topic-configs", configs)
    assert statuses(rows) == {"orders-0": "would-compact", "orders-1": "would-compact", "users-0": "skipped"}
    assert f"Settings of topics are read from {configs}" in message
    assert "kafka-configs.sh" not in message, "a file that was given must not be requested"


def test_describe_and_doctor_report_which_kafka_wrote_the_log_dirs(run: Run, tmp_path: Path) -> None:
    log_dir = golden.unpack(tmp_path)
    described = run("describe", "--log-dirs", log_dir, "--output", "json")
    for row in json.loads(described.stdout):
        assert row["kafka"]["versions"] == "4.3 or later"
        assert "metadata.version 30 in the metadata log" in row["kafka"]["evidence"]
    assert "Kafka version that wrote the log dirs: 4.3 or later" in run("describe", "--log-dirs", log_dir).stdout
    found = json.loads(run("doctor", "--log-dirs", log_dir, "--output", "json").stdout)
    [row] = [row for row in found if row["check"] == "Kafka"]
    assert (row["status"], row["found"]) == ("ok", "version 4.3 or later")
    assert "Kafka: metadata.version 30 in the metadata log" in {row["check"] for row in found}


# Unreadable metadata


def test_a_truncated_metadata_log_is_the_reason_for_unknown_topics(run: Run, log_dir: Path, log: MetadataLog) -> None:
    data = log.log_path.read_bytes()
    log.log_path.write_bytes(data[:-5])
    rows, message = plan(run, log_dir)
    assert set(statuses(rows).values()) == {"refused"}
    for row in rows.values():
        assert row["error"].startswith("topic config unknown: the metadata log cannot be read: a batch of ")
        assert str(log.log_path) in row["error"]
        assert f"--topic-config {row['topic']}:key=value" in row["error"]
    assert "the metadata log cannot be read" in message
    named, _ = plan(run, log_dir, "--topic-config", "orders:cleanup.policy=compact", "--topics-have-no-overrides")
    assert statuses(named) == {"orders-0": "would-compact", "orders-1": "would-compact", "users-0": "refused"}


def test_a_changed_byte_in_the_metadata_log_never_leads_to_another_plan(
    run: Run, log_dir: Path, log: MetadataLog
) -> None:
    data = log.log_path.read_bytes()
    rows, _ = plan(run, log_dir)
    for at in (*range(0, 200, 13), len(data) // 2, len(data) - 1):
        log.log_path.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
        damaged, _ = plan(run, log_dir)
        # The checksum of a batch does not cover its leader epoch, which a plan does not use.
        assert damaged == rows or set(statuses(damaged).values()) == {"refused"}, at


def test_a_metadata_log_without_read_permission_is_reported(run: Run, log_dir: Path, log: MetadataLog) -> None:
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


def test_two_metadata_logs_are_refused(run: Run, log_dir: Path, log: MetadataLog, tmp_path: Path) -> None:
    other = write_log_dir(tmp_path / "more", {"others-0": random_records(5, 40)})
    shutil.copytree(log.path, other / METADATA)
    rows, _ = plan(run, log_dir, "--log-dirs", other)
    assert "several log dirs contain a metadata log" in rows["orders-0"]["error"]


def test_a_metadata_log_in_another_directory_is_used(run: Run, log_dir: Path, log: MetadataLog, tmp_path: Path) -> None:
    elsewhere = tmp_path / "metadata"
    elsewhere.mkdir()
    shutil.move(log.path, elsewhere / METADATA)
    properties = tmp_path / "server.properties"
    properties.write_text(f"log.dirs={log_dir}\nmetadata.log.dir={elsewhere}\n")
    assert plan(run, log_dir, "--config", properties)[0]["orders-0"]["status"] == "would-compact"


def test_the_broker_of_the_log_dirs_must_be_known(run: Run, log_dir: Path, log: MetadataLog, tmp_path: Path) -> None:
    properties = tmp_path / "server.properties"
    properties.write_text("node.id=2\n")
    rows, _ = plan(run, log_dir, "--config", properties)
    assert "topic config unknown: the broker ids differ: 1 in " in rows["orders-0"]["error"]
    (log_dir / "meta.properties").write_text("version=1\n")
    rows, _ = plan(run, log_dir)
    assert "no meta.properties contains the broker id" in rows["orders-0"]["error"]
    properties.write_text("node.id=1\n")
    assert plan(run, log_dir, "--config", properties)[0]["orders-0"]["status"] == "would-compact"


def test_secrets_in_the_metadata_log_are_not_shown(run: Run, log_dir: Path, log: MetadataLog) -> None:
    log.append(model.config(4, "1", "ssl.key.password", "hunter2"), model.frame(11, 0, b"hunter2 as a credential"))
    result = run("plan", "--log-dirs", log_dir)
    assert result.exit_code == 0
    assert "hunter2" not in result.output


def test_compact_needs_no_topic_names_on_the_host_of_a_stopped_broker(
    run: Run, log_dir: Path, log: MetadataLog
) -> None:
    before = {name: records_of(log_dir / name) for name in ("orders-0", "orders-1")}
    untouched = [snapshot(log_dir / name) for name in ("users-0", METADATA)]
    (log_dir.parent / "server.properties").write_text(f"log.dirs={log_dir}\nnode.id=1\n")
    with without_spark():
        result = run("compact", "--config", log_dir.parent / "server.properties", "--execute", "--output", "json")
    assert result.exit_code == 0, result.output
    assert statuses(rows_of(result)) == {"orders-0": "compacted", "orders-1": "compacted", "users-0": "skipped"}
    assert [snapshot(log_dir / name) for name in ("users-0", METADATA)] == untouched
    for name, records in before.items():
        after = records_of(log_dir / name)
        assert len(after) < len(records)
        kept = {key: record for key, record in newest_by_key(records).items() if record.value is not None}
        assert {key: record for key, record in newest_by_key(after).items() if record.value is not None} == kept
    assert json.loads(result.stdout)[0]["records_after"] is not None


def newer(data: bytes) -> bytes:
    """Return the record with version 9 and an additional field at its end."""
    return data[:2] + b"\x09" + data[3:] + b"\x01\x02"


def test_a_record_of_a_newer_version_leaves_its_own_topic_unknown(run: Run, log_dir: Path, log: MetadataLog) -> None:
    log.append(newer(model.topic_config("orders", "retention.ms", "1")), model.frame(99, 7, b"of a later Kafka"))
    rows, message = plan(run, log_dir)
    assert statuses(rows) == {"orders-0": "refused", "orders-1": "refused", "users-0": "skipped"}
    why = "a record of type 4 has version 9, which this release does not support"
    assert f"topic config unknown: {why}" in rows["orders-0"]["error"]
    assert METADATA in rows["orders-0"]["error"]
    assert f"Warning: the settings of orders are unknown: {why}" in message
    rows, _ = plan(run, log_dir, "--topic-config", "orders:cleanup.policy=compact", "--topics-have-no-overrides")
    assert statuses(rows)["orders-0"] == "would-compact"


def test_a_newer_version_of_the_broker_settings_leaves_every_topic_unknown(
    run: Run, log_dir: Path, log: MetadataLog
) -> None:
    log.append(newer(model.config(4, "2", "retention.ms", "1")))
    assert statuses(plan(run, log_dir)[0])["orders-0"] == "would-compact", "another broker's record must have no effect"
    log.append(newer(model.config(4, "", "retention.ms", "1")))
    rows, _ = plan(run, log_dir)
    assert set(statuses(rows).values()) == {"refused"}
    assert "the settings of all brokers are uncertain: a record of type 4 has version 9" in rows["users-0"]["error"]
