"""Kafka's own clients for tests: producers, consumers and an admin client in one JVM, driven from Python.

The JVM continues to run when the broker stops, so that a producer can continue after a restart. broker.py starts
brokers.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests import class_archives
from tests.interop.broker import JVM_FLAGS, NODE_ID, Broker, tool
from tests.interop.kafka import class_path, compiled, compiling

HERE = Path(__file__).parent


class Served(NamedTuple):
    """A record as a consumer received it. `timestamp_type` is Kafka's name: CreateTime or LogAppendTime."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    timestamp_type: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class ClientError(Exception):
    """A request failed in Kafka's client or in the broker. The text has the class and the message of the exception."""


class BrokerClient:
    """Producers, consumers and an admin client in one JVM, as a context manager. Call `connect` first."""

    def __init__(self, heap: str = "512m") -> None:
        self._process = subprocess.Popen(
            client_command("BrokerClient", heap),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self.close)

    def connect(self, broker: Broker) -> None:
        """Use this broker from now on. Existing producers keep the address of the broker with which they were created.
        """
        self._ask("connect", bootstrap=broker.bootstrap)

    def create_topic(self, topic: str, partitions: int, configs: Mapping[str, str], *, replicas: int = 1) -> None:
        self._ask("create_topic", topic=topic, partitions=partitions, configs=dict(configs), replicas=replicas)
        self._wait_for_leaders(topic, partitions)

    def create_partition(self, topic: str, brokers: Sequence[int], configs: Mapping[str, str]) -> None:
        """Create a topic with one partition on these brokers, of which the first is the preferred leader."""
        self._ask("create_topic", topic=topic, brokers=list(brokers), configs=dict(configs))
        self._wait_for_leaders(topic, 1)

    def _wait_for_leaders(self, topic: str, partitions: int) -> None:
        """Wait until the leaders answer for a new topic. The controller reports it as created before that, and a raw
        request, unlike Kafka's clients, is not sent again.
        """
        give_up = time.monotonic() + 300
        while True:
            try:
                self.offsets([(topic, partition) for partition in range(partitions)])
            except ClientError as error:
                if "UnknownTopicOrPartitionException" not in str(error) or time.monotonic() > give_up:
                    raise
                time.sleep(0.02)
            else:
                return

    def reassign(self, topic: str, partition: int, brokers: Sequence[int]) -> None:
        """Change the brokers of a partition, of which the first is the preferred leader."""
        self._ask("reassign", topic=topic, partition=partition, brokers=list(brokers))

    def elect_leader(self, topic: str, partition: int, *, unclean: bool = False) -> None:
        """Elect the preferred leader, or if `unclean`, any replica of a partition without a leader."""
        self._ask("elect_leader", topic=topic, partition=partition, unclean=unclean)

    def alter_configs(self, topic: str, configs: Mapping[str, str]) -> None:
        self._ask("alter_configs", topic=topic, configs=dict(configs))

    def describe_topics(self) -> dict[str, dict[str, Any]]:
        """Return all topics, including internal ones: `partitions`, `id`, `leaders` (by partition, -1 for none),
        `in_sync` (the smallest number of in-sync replicas of a partition), and `configs` (those set on the topic
        itself).
        """
        answer: dict[str, dict[str, Any]] = self._ask("describe_topics")
        return answer

    def describe_log_dirs(self) -> dict[str, dict[str, Any]]:
        """Return by path: `error` (None if it is online), and `size_bytes` by "topic-partition"."""
        answer: dict[str, dict[str, Any]] = self._ask("describe_log_dirs", node=NODE_ID)
        return answer

    def describe_producers(self, topic: str, partition: int) -> list[dict[str, int]]:
        """Return the active producers of the partition: producer_id, epoch, last_sequence, last_timestamp_ms, and
        transaction_start_offset, which is -1 outside of a transaction.
        """
        answer: list[dict[str, int]] = self._ask("describe_producers", topic=topic, partition=partition)
        return answer

    def produce(
        self,
        producer: str,
        topic: str,
        partition: int,
        records: Iterable[tuple[Any, ...]],
        *,
        codec: str = "none",
        idempotent: bool = False,
        transactional_id: str | None = None,
        acks: str = "all",
    ) -> list[int]:
        """Send one batch of (timestamp, key, value[, headers]) with the producer of that name, and return the offsets.

        The producer is created with these settings if the name is new, and exists until `close_producer`.
        """
        answer: list[int] = self._ask(
            "produce",
            producer=producer,
            topic=topic,
            partition=partition,
            records=_wire(records),
            codec=codec,
            idempotent=idempotent,
            transactional_id=transactional_id,
            acks=acks,
        )
        return answer

    def produce_file(self, topic: str, path: Path, *, codec: str, batch_bytes: int) -> float:
        """Send all records of a file with a separate producer, and return the seconds of sending and of the flush,
        without reading the file. The file has a count and then, for each record, timestamp, key and value with lengths,
        big-endian.
        """
        answer: float = self._ask("produce_file", topic=topic, path=str(path), codec=codec, batch_bytes=batch_bytes)
        return answer

    def transaction(
        self, producer: str, step: str, transactional_id: str | None = None, *, timeout_ms: int = 60_000
    ) -> None:
        """Execute the `step` of a transaction: begin, commit or abort.

        The first begin creates the producer, which aborts a transaction that an earlier producer with its transactional
        id left open. The broker aborts a transaction that is open for `timeout_ms`.
        """
        self._ask("transaction", producer=producer, step=step, transactional_id=transactional_id, timeout_ms=timeout_ms)

    def send_offsets(self, producer: str, group: str, topic: str, partition: int, offset: int) -> None:
        """Commit an offset of a group in the transaction of the producer."""
        self._ask("send_offsets", producer=producer, group=group, topic=topic, partition=partition, offset=offset)

    def abort_transaction(self, topic: str, partition: int, start_offset: int) -> None:
        """Make the leader of the partition abort the open transaction that begins at this offset, as an administrator
        would.
        """
        self._ask("abort_transaction", topic=topic, partition=partition, start_offset=start_offset)

    def close_producer(self, producer: str) -> None:
        self._ask("close_producer", producer=producer)

    def raw_produce(
        self,
        topic: str,
        partition: int,
        records: Iterable[tuple[Any, ...]],
        *,
        producer_id: int,
        epoch: int,
        sequence: int,
        codec: str = "none",
    ) -> tuple[str, int]:
        """Send one batch with this producer id, epoch and first sequence, and return the name of the error ("NONE") and
        the base offset.
        """
        answer = self._ask(
            "raw_produce",
            topic=topic,
            partition=partition,
            records=_wire(records),
            producer_id=producer_id,
            epoch=epoch,
            sequence=sequence,
            codec=codec,
        )
        return answer["error"], answer["base_offset"]

    def consume(self, partitions: Iterable[tuple[str, int]], *, isolation: str = "read_uncommitted") -> list[Served]:
        """Return all records of these partitions, from the log start to the current log end."""
        rows = self._ask("consume", partitions=[list(partition) for partition in partitions], isolation=isolation)
        return sorted((from_wire(row) for row in rows), key=lambda record: record[:3])

    def first_from(self, topic: str, partition: int, offsets: Iterable[int]) -> list[int | None]:
        """Return, for each offset, the offset of the first record that a consumer starting there receives, or None."""
        asked = list(offsets)
        answer: list[int | None] = self._ask("first_from", topic=topic, partition=partition, offsets=asked)
        return answer

    def offsets(
        self, partitions: Iterable[tuple[str, int]], *, isolation: str = "read_uncommitted"
    ) -> dict[str, tuple[int, int]]:
        """Return the log start and log end offset, by "topic-partition"; for read_committed the end is the last stable
        offset.
        """
        answer = self._ask("offsets", partitions=[list(partition) for partition in partitions], isolation=isolation)
        return {name: (start, end) for name, (start, end) in answer.items()}

    def wait_until_decided(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Wait until no transaction is open. The coordinator writes the markers of a transaction after its commit has
        returned, and until then a read_committed consumer does not see the transaction.
        """
        asked, give_up = list(partitions), time.monotonic() + 300
        while self.offsets(asked) != (stable := self.offsets(asked, isolation="read_committed")):
            assert time.monotonic() < give_up, f"a transaction remains open; last stable offsets: {stable}"
            time.sleep(0.05)

    def wait_until_quiet(self, partitions: Iterable[tuple[str, int]], quiet_s: float = 1.0) -> None:
        """Wait until all ended transactions are complete and no record has been appended for `quiet_s`: after the
        markers of a transaction, the coordinator writes that it is complete.
        """
        asked, give_up = list(partitions), time.monotonic() + 300
        while any(state.startswith("PREPARE") for state in self._ask("transaction_states")):
            assert time.monotonic() < give_up, "the coordinator does not complete a transaction"
            time.sleep(0.05)
        ends, since_s = self.offsets(asked), time.monotonic()
        while time.monotonic() - since_s < quiet_s:
            time.sleep(0.1)
            if (now := self.offsets(asked)) != ends:
                ends, since_s = now, time.monotonic()

    def offsets_for_times(
        self, topic: str, partition: int, timestamps_ms: Iterable[int]
    ) -> list[tuple[int, int] | None]:
        """Return, for each time, the (offset, timestamp) of the first record at or after it, or None."""
        times = list(timestamps_ms)
        answer = self._ask("offsets_for_times", topic=topic, partition=partition, timestamps=times)
        return [None if found is None else (found[0], found[1]) for found in answer]

    def delete_records(self, topic: str, partition: int, before_offset: int) -> None:
        """Raise the log start offset. Kafka allows this only if cleanup.policy contains `delete`."""
        self._ask("delete_records", topic=topic, partition=partition, before_offset=before_offset)

    def restore(self, partitions: Iterable[tuple[str, int]], *, isolation: str = "read_committed") -> dict[str, float]:
        """Read the partitions from their beginning into a map of the latest value of each key, as an application
        restores a table; return `records`, `keys` and `seconds`."""
        wanted = [list(partition) for partition in partitions]
        answer: dict[str, float] = self._ask("restore", partitions=wanted, isolation=isolation)
        return answer

    def commit_offsets(self, group: str, topic: str, partition: int, offsets: Iterable[int], note: str = "") -> None:
        """Commit the offsets one after the other, each in a separate request."""
        self._ask("commit_offsets", group=group, topic=topic, partition=partition, offsets=list(offsets), note=note)

    def committed_offsets(self, group: str) -> dict[str, int]:
        """Return the group's offsets by "topic-partition"."""
        answer: dict[str, int] = self._ask("committed_offsets", group=group)
        return answer

    def delete_group(self, group: str) -> None:
        """Delete a group, which writes tombstones to __consumer_offsets."""
        self._ask("delete_group", group=group)

    def close(self) -> None:
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=20)
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> BrokerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, op: str, **fields: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client JVM ended with status {self._process.wait()} in {op}")
        reply = json.loads(line)
        if "error" in reply:
            where = f" {fields['topic']}-{fields['partition']}" if "partition" in fields else ""
            raise ClientError(f"{op}{where}: {reply['error']}")
        return reply["ok"]


def to_wire(record: Served) -> list[Any]:
    """Return a record as a JSON array: its fields in order, with bytes as base64."""
    headers = [[name, _text(value)] for name, value in record.headers]
    return [*record[:5], _text(record.key), _text(record.value), headers]


def from_wire(row: Sequence[Any]) -> Served:
    topic, partition, offset, timestamp_ms, timestamp_type, key, value, headers = row
    pairs = tuple((name, _bytes(content)) for name, content in headers)
    return Served(topic, partition, offset, timestamp_ms, timestamp_type, _bytes(key), _bytes(value), pairs)


def _wire(records: Iterable[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return list(_wire_records(records))


def _wire_records(records: Iterable[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for record in records:
        timestamp_ms, key, value, headers = (*record, ())[:4]
        wire = {"ts": timestamp_ms, "k": _text(key), "v": _text(value)}
        if headers:
            wire["h"] = [[name, _text(content)] for name, content in headers]
        yield wire


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def client_command(main_class: str, heap: str) -> list[str]:
    """Return the command line of a program in broker_java/, which is compiled once for each version of its sources."""
    path = class_path(with_logging=True)
    with compiling():
        classes = compiled(sorted((HERE / "broker_java").glob("*.java")), path)
    path = os.pathsep.join([path, str(classes)])  # Kafka's jars come first, as in the archive of its classes
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
    return [tool("java"), f"-Xmx{heap}", *JVM_FLAGS, *class_archives.options("kafka"), quiet, "-cp", path, main_class]
