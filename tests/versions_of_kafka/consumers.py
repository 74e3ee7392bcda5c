"""Two consumers that share no code: the Java consumer of a version of Kafka, and librdkafka (`confluent-kafka`).

Both check the CRC of each batch, and return every record of the given partitions, sorted, as `Served`.
"""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from confluent_kafka import OFFSET_BEGINNING, TIMESTAMP_LOG_APPEND_TIME, Consumer, KafkaError, Message, TopicPartition

from tests.interop.broker import JVM_FLAGS, Broker, tool
from tests.interop.broker_client import Served
from tests.interop.kafka import TARGET, broker_class_path, compiled, compiling, fetched_jars

HERE = Path(__file__).parent
OLD_CLIENT = "0.10.2.2"
LIMIT_S = 300.0
Partitions = Sequence[tuple[str, int]]


def java_records(broker: Broker, partitions: Partitions, *, isolation: str = "read_uncommitted") -> list[Served]:
    """Return the records that the Java consumer of the broker's own version receives."""
    path = broker_class_path(broker.version)
    with compiling():
        classes = compiled([HERE / "java" / "Consume.java"], path)
    command = [
        *(tool("java"), "-Xmx256m", *JVM_FLAGS, "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"),
        *("-cp", os.pathsep.join([path, str(classes)]), "Consume", broker.bootstrap, isolation),
        *(f"{topic}:{number}" for topic, number in partitions),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    return sorted((_served(line.split("\t")) for line in done.stdout.splitlines()), key=lambda record: record[:3])


def old_records(broker: Broker, partitions: Partitions) -> list[Served]:
    """Return the records that the Java consumer of 0.10.2.2 receives. It supports only magic 0 and 1.

    Raises ValueError if it fails.
    """
    jars = fetched_jars(HERE / "old_client.xml", TARGET / f"clients-{OLD_CLIENT}" / "jars", OLD_CLIENT)
    path = os.pathsep.join(map(str, sorted(jars.glob("*.jar"))))
    with compiling():
        classes = compiled([HERE / "old_java" / "ConsumeOld.java"], path)
    command = [
        *(tool("java"), "-Xmx256m", *JVM_FLAGS, "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"),
        *("-cp", os.pathsep.join([path, str(classes)]), "ConsumeOld", broker.bootstrap),
        *(f"{topic}:{number}" for topic, number in partitions),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode != 0:
        raise ValueError(done.stderr[-2000:])
    return sorted((_served(line.split("\t")) for line in done.stdout.splitlines()), key=lambda record: record[:3])


def librdkafka_records(broker: Broker, partitions: Partitions, *, isolation: str = "read_uncommitted") -> list[Served]:
    """Return the records that librdkafka receives."""
    with _librdkafka(broker, isolation) as consumer:
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for topic, number in partitions])
        found, at_end, give_up = [], set[tuple[str, int]](), time.monotonic() + LIMIT_S
        while len(at_end) < len(partitions):
            assert time.monotonic() < give_up, f"librdkafka did not reach the end of {set(partitions) - at_end}"
            message = consumer.poll(1.0)
            if message is None:
                continue
            if _is_end(message):
                at_end.add((str(message.topic()), int(message.partition() or 0)))
            else:
                found.append(_of_message(message))
        return sorted(found, key=lambda record: record[:3])


def librdkafka_first(
    broker: Broker, topic: str, offsets: Sequence[int], *, isolation: str = "read_uncommitted"
) -> list[int | None]:
    """Return, for each offset, the offset of the first record of partition 0 that librdkafka receives if it starts
    there, or None.
    """
    found: list[int | None] = []
    with _librdkafka(broker, isolation) as consumer:
        for offset in offsets:
            consumer.assign([TopicPartition(topic, 0, offset)])
            message, give_up = consumer.poll(1.0), time.monotonic() + LIMIT_S
            while message is None:
                assert time.monotonic() < give_up, f"librdkafka received nothing from offset {offset} of {topic}"
                message = consumer.poll(1.0)
            found.append(None if _is_end(message) else message.offset())
    return found


@contextlib.contextmanager
def _librdkafka(broker: Broker, isolation: str) -> Iterator[Consumer]:
    config = {
        "bootstrap.servers": broker.bootstrap,
        "group.id": "tests",
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "check.crcs": True,
        "enable.partition.eof": True,
        "isolation.level": isolation,
    }
    consumer = Consumer(config)
    try:
        yield consumer
    finally:
        consumer.close()


def _is_end(message: Message) -> bool:
    """Return whether the message is the end of a partition, and not a record. Any other error fails the test."""
    error = message.error()
    assert error is None or error.code() == KafkaError._PARTITION_EOF, error
    return error is not None


def _of_message(message: Message) -> Served:
    kind, timestamp_ms = message.timestamp()
    kind_name = "LogAppendTime" if kind == TIMESTAMP_LOG_APPEND_TIME else "CreateTime"
    headers = tuple((name, None if value is None else bytes(value)) for name, value in message.headers() or ())
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None and partition is not None and offset is not None
    return Served(topic, partition, offset, timestamp_ms, kind_name, message.key(), message.value(), headers)


def _served(fields: list[str]) -> Served:
    topic, partition, offset, timestamp_ms, kind, key, value, *headers = fields
    pairs = tuple((name, _bytes(text)) for name, text in zip(headers[::2], headers[1::2], strict=True))
    return Served(topic, int(partition), int(offset), int(timestamp_ms), kind, _bytes(key), _bytes(value), pairs)


def _bytes(text: str) -> bytes | None:
    return None if text == "-" else base64.b64decode(text)
