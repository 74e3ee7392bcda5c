"""Messages of magic 0 and 1: keytail compared with the cleaners of several versions, and read by an old client."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from keytail.cli.configuration import read_configuration
from keytail.cli.selection import PartitionFilter
from keytail.compact.command import Request
from keytail.compact.execution import compact
from keytail.config.broker_version import parse_broker_version
from keytail.format.batch import DELETE_HORIZON
from tests.chance import chance
from tests.compact.logs import RandomLog
from tests.compact.test_keep_magic import contents, log_of
from tests.interop.broker_client import BrokerClient, Served
from tests.interop.kafka import KafkaUnavailable, broker_class_path
from tests.reference.batches import Batch
from tests.reference.indexing import index_files
from tests.reference.legacy import decode_any_log
from tests.versions_of_kafka import VERSIONS, has_zookeeper
from tests.versions_of_kafka.broker import broker_of
from tests.versions_of_kafka.consumers import java_records, old_records

pytestmark = [pytest.mark.interop]

PARTITIONS = 40
LIMIT_S = 300.0
CLEANING = {"log.cleaner.enable": "true", "log.cleaner.backoff.ms": "50", "log.cleaner.threads": "1"}


def put(log_dir: Path, logs: list[RandomLog], dirty: list[int]) -> None:
    """Replace the partitions `t-0`, `t-1`, ... of a stopped broker with `logs`; `dirty` are the first dirty offsets."""
    now_ns = time.time_ns()
    for number, log in enumerate(logs):
        path = log_dir / f"t-{number}"
        for old in path.glob("0*"):
            old.unlink()
        (path / "leader-epoch-checkpoint").unlink(missing_ok=True)
        for segment in log.segments:
            stem = path / f"{segment.base_offset:020d}"
            index, time_index = index_files(segment.log, segment.base_offset, 4096)
            files = {".log": segment.log, ".index": index, ".timeindex": time_index}
            for suffix, data in files.items():
                stem.with_suffix(suffix).write_bytes(data)
                age_ns = (log.segments[-1].mtime_ms - segment.mtime_ms) * 10**6
                os.utime(stem.with_suffix(suffix), ns=(now_ns - age_ns, now_ns - age_ns))
    ends = [f"t {number} {log.log_end_offset}" for number, log in enumerate(logs)]
    for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
        (log_dir / name).write_text("\n".join(["0", str(len(ends)), *ends, ""]))
    starts = [f"t {number} {log.segments[0].base_offset}" for number, log in enumerate(logs)]
    (log_dir / "log-start-offset-checkpoint").write_text("\n".join(["0", str(len(starts)), *starts, ""]))
    cleaned = [f"t {number} {offset}" for number, offset in enumerate(dirty)]
    (log_dir / "cleaner-offset-checkpoint").write_text("\n".join(["0", str(len(cleaned)), *cleaned, ""]))


def checkpoint(log_dir: Path) -> dict[int, int]:
    lines = (log_dir / "cleaner-offset-checkpoint").read_text().splitlines()[2:]
    return {int(number): int(offset) for topic, number, offset in map(str.split, lines) if topic == "t"}


def wait_until_cleaned(log_dir: Path, ends: Mapping[int, int]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not ends.items() <= checkpoint(log_dir).items():
        left = {n: end for n, end in ends.items() if checkpoint(log_dir).get(n) != end}
        assert time.monotonic() < give_up, f"the broker's cleaner did not clean {left}"
        time.sleep(0.1)


def contents_of(partition: Path) -> tuple[list[object], int]:
    """Return the messages and batches of a partition, and the number of batches without records, which are left out."""
    log = b"".join(path.read_bytes() for path in sorted(partition.glob("*.log")))
    found, emptied = [], 0
    for batch, content in zip(decode_any_log(log), contents(log), strict=True):
        if log[batch.position + 16] < 2:
            found.append(content)
        elif batch.records:
            found.append(_of_version_2(batch))
        else:
            emptied += 1
    return found, emptied


def batches_of(partition: Path) -> list[Batch]:
    """Return the batches of magic 2."""
    log = b"".join(path.read_bytes() for path in sorted(partition.glob("*.log")))
    return [batch for batch in decode_any_log(log) if log[batch.position + 16] == 2]


def _of_version_2(batch: Batch) -> tuple[object, ...]:
    return batch.base_offset, batch.last_offset, batch.codec, batch.timestamp_type, batch.records


def topic_settings(version: str, retention_ms: int) -> dict[str, str]:
    settings = {
        "cleanup.policy": "compact",
        "delete.retention.ms": str(retention_ms),
        "min.cleanable.dirty.ratio": "0",
        "segment.bytes": "1048576",
    }
    return settings | ({"message.format.version": "0.10.2"} if has_zookeeper(version) else {})


@pytest.mark.one_of("old messages on an old broker")
# from 4.0 on, brokers write magic 2
@pytest.mark.parametrize("version", [v for v in VERSIONS if v < "4"], indirect=True)
@pytest.mark.parametrize("retention_ms", [0, 10**11])
def test_a_round_has_the_result_of_the_brokers_cleaner(version: str, tmp_path: Path, retention_ms: int) -> None:
    rng = chance()
    logs = [log_of(rng) for _ in range(PARTITIONS)]
    dirty = [rng.choice([segment.base_offset for segment in log.segments[:-1]]) for log in logs]
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    settings = topic_settings(version, retention_ms)
    protocol = {"inter.broker.protocol.version": "2.8"} if has_zookeeper(version) and version >= "2.8" else {}
    with broker_of(version, theirs, tmp_path / "work", properties=CLEANING | protocol) as broker:
        with BrokerClient() as client:
            client.connect(broker)
            client.create_topic("t", PARTITIONS, settings)
        broker.stop()
        put(theirs, logs, dirty)
        shutil.copytree(theirs, ours)
        broker.start()
        ends = {
            number: log.segments[-1].base_offset
            for number, log in enumerate(logs)
            if any(segment.log for segment in log.segments[:-1] if segment.base_offset >= dirty[number])
        }
        wait_until_cleaned(theirs, ends)
        broker.stop()
    given = [f"t:{name}={value}" for name, value in settings.items()]
    configuration = read_configuration(str(tmp_path / "work" / "server.properties"), given, True)
    configuration = replace(configuration, broker_version=parse_broker_version(version))
    if not has_zookeeper(version):  # without this, keytail keeps the magic only for brokers with ZooKeeper
        configuration = replace(configuration, message_format="keep")
    names = tuple(f"t-{number}" for number in ends)
    request = Request(PartitionFilter(log_dirs=(str(ours),), partitions=names), configuration, execute=True, force=True)
    rows = compact(request)
    assert {row.status for row in rows} == {"compacted"}, [row.error for row in rows if row.error]
    more_emptied = 0
    for number in ends:
        (found, emptied), (expected, their_emptied) = (
            contents_of(ours / f"t-{number}"),
            contents_of(theirs / f"t-{number}"),
        )
        assert found == expected, (number, dirty[number])
        more_emptied += emptied - their_emptied
        assert emptied - their_emptied in ((0,) if configuration.by_file_time else (0, 1)), (number, dirty[number])
        if configuration.by_file_time:
            assert not [batch for batch in batches_of(ours / f"t-{number}") if batch.attributes & DELETE_HORIZON]
    old = sum(1 for n in ends for c in contents_of(ours / f"t-{n}")[0] if not isinstance(c, tuple) or len(c) == 3)
    print(f"{len(ends)} partitions, {old} old messages retained, {more_emptied} more emptied batches of magic 2")
    assert old > 20


OLD_TOPICS = {"nine": "0.9.0", "ten": "0.10.0", "ten-two": "0.10.2"}
CODECS = ("none", "gzip", "snappy", "lz4")


def latest(records: list[Served]) -> dict[tuple[str, bytes | None], Served]:
    return {(record.topic, record.key): record for record in records}


@pytest.mark.one_of("old messages on an old broker")
def test_an_old_client_reads_the_same_latest_records_after_compaction(tmp_path: Path) -> None:
    """The topics of a broker of 2.8.2 have old message formats. If they are compacted to magic 2, the client fails."""
    version = "2.8.2"
    broker_class_path_or_skip(version)
    everything = [(topic, 0) for topic in OLD_TOPICS]
    logs = tmp_path / "logs"
    settings = {"cleanup.policy": "compact", "segment.bytes": "5000", "delete.retention.ms": "100000000"}
    settings["min.cleanable.dirty.ratio"] = "0"
    with broker_of(version, logs, tmp_path / "work") as broker, BrokerClient() as client:
        client.connect(broker)
        for topic, old in OLD_TOPICS.items():
            client.create_topic(topic, 1, settings | {"message.format.version": old})
            for number in range(24):
                records = [(1_000 + number, b"k%d" % (i * number % 31), b"v%d" % number * 9) for i in range(30)]
                codec = CODECS[number % 4]
                client.produce(f"of-{codec}", topic, 0, [*records, (2_000, b"gone", None)], codec=codec)
        before = old_records(broker, everything)
        assert len(before) == 3 * 24 * 31
        broker.stop()
        as_they_were = tmp_path / "as-they-were"
        shutil.copytree(logs, as_they_were)

        given = [f"{topic}:{name}={value}" for topic in OLD_TOPICS for name, value in settings.items()]
        given = [item for item in given if "segment.bytes" not in item]
        given += [f"{topic}:message.format.version={old}" for topic, old in OLD_TOPICS.items()]
        configuration = read_configuration(str(tmp_path / "work" / "server.properties"), given, True)
        partition_filter = PartitionFilter(log_dirs=(str(logs),), topics=tuple(OLD_TOPICS))
        rows = compact(Request(partition_filter, configuration, execute=True))
        assert [row.status for row in rows] == ["compacted"] * 3, [row.error for row in rows]
        broker.start()
        after = old_records(broker, everything)
        assert len(after) < len(before) / 2
        assert latest(after) == latest(before)
        assert java_records(broker, everything) == after
        broker.stop()

        shutil.rmtree(logs)
        shutil.copytree(as_they_were, logs)
        configuration = replace(configuration, message_format="v2")
        rows = compact(Request(partition_filter, configuration, execute=True))
        assert [row.status for row in rows] == ["compacted"] * 3, [row.error for row in rows]
        broker.start()
        with pytest.raises(ValueError, match="Unknown compression type id"):
            old_records(broker, everything)


def broker_class_path_or_skip(version: str) -> None:
    try:
        broker_class_path(version)
    except KafkaUnavailable as reason:
        if os.environ.get("KEYTAIL_NO_SKIP") == "1":
            pytest.fail(f"KEYTAIL_NO_SKIP=1, and there is no Kafka {version}: {reason}")
        pytest.skip(f"no Kafka {version}: {reason}")
