"""A real Kafka 4.3.1 broker and Kafka's own clients, for tests: KRaft on one node, 127.0.0.1, free ports.

`Broker` starts on a log dir (formatting it if need be), tells what it logged, and stops by SIGTERM to its own
process; `BrokerClient` produces, consumes and asks in one JVM that outlives a broker's restart. What should
be true of the answers is left to the tests.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tests.interop.kafka import TARGET, KafkaUnavailable, class_path

HERE = Path(__file__).parent
CLUSTER_ID = "a2V5dGFpbC1nb2xkZW4tMQ"
NODE_ID = 1
START_LIMIT_S = 120.0
STOP_LIMIT_S = 120.0

# Every broker of these tests has one replica of everything, and nothing that acts on old data by itself.
PROPERTIES: Mapping[str, str] = {
    "process.roles": "broker,controller",
    "node.id": str(NODE_ID),
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.enable": "false",
    "log.retention.check.interval.ms": "2000000000",
    "num.network.threads": "1",
    "num.io.threads": "2",
    "num.partitions": "1",
    "offsets.retention.minutes": "2000000000",
    "offsets.topic.num.partitions": "3",
    "offsets.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transactional.id.expiration.ms": "2000000000",
}

_JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-Djava.net.preferIPv4Stack=true")
_LOGGING = (
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=info",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
)
_LINE = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} \[(?P<thread>.*?)\] (?P<level>[A-Z]+) (?P<logger>\S+) - (?P<text>.*)")


class LogLine(NamedTuple):
    """One message of the broker."""

    level: str
    logger: str
    text: str


class Served(NamedTuple):
    """A record as a consumer got it. `timestamp_type` is Kafka's word: CreateTime or LogAppendTime."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    timestamp_type: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class ClientError(Exception):
    """Kafka's clients, or the broker through them, refused a request: the exception's class and text."""


class Broker:
    """One broker on one or more log dirs; `with Broker(...) as broker` starts it and stops it cleanly.

    `work_dir` takes its configuration and its log. The ports stay the same over restarts of one object.
    """

    def __init__(
        self,
        log_dirs: Path | Sequence[Path],
        work_dir: Path,
        *,
        properties: Mapping[str, str] | None = None,
        cluster_id: str = CLUSTER_ID,
        heap: str = "512m",
    ) -> None:
        self.log_dirs = [log_dirs] if isinstance(log_dirs, Path) else list(log_dirs)
        self.log_file = work_dir / "broker.log"
        self._work_dir = work_dir
        self._properties = dict(properties or {})
        self._cluster_id = cluster_id
        self._heap = heap
        self._ports = _free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0  # position in the log file

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    def start(self) -> None:
        """Format what was never formatted, start, and return when the broker serves."""
        assert self._process is None
        self._work_dir.mkdir(parents=True, exist_ok=True)
        config = self._write_config()
        for log_dir in self.log_dirs:
            log_dir.mkdir(parents=True, exist_ok=True)
        if any(not (log_dir / "meta.properties").exists() for log_dir in self.log_dirs):
            self._format(config)
        with self.log_file.open("ab") as log:
            self._started_at = log.tell()
            command = self._java(f"-Xmx{self._heap}", "kafka.Kafka", str(config))
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        atexit.register(self.kill)
        self._wait_until_ready()

    def stop(self) -> None:
        """SIGTERM, and wait: afterwards each log dir has its clean-shutdown file, or this raises."""
        process = self._process
        assert process is not None, "the broker is not running"
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"the broker did not stop in {STOP_LIMIT_S:.0f} s: {self._tail()}") from None
        self._process = None
        atexit.unregister(self.kill)
        for log_dir in self.log_dirs:
            if not (log_dir / ".kafka_cleanshutdown").exists():
                raise RuntimeError(f"the broker did not shut down cleanly: {self._tail()}")

    def kill(self) -> None:
        """End the process at once, if it runs, as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            atexit.unregister(self.kill)

    def log_lines(self) -> list[LogLine]:
        """What the broker logged since its last start."""
        with self.log_file.open("rb") as log:
            log.seek(self._started_at)
            text = log.read().decode(errors="replace")
        matches = (_LINE.match(line) for line in text.splitlines())
        return [LogLine(match["level"], match["logger"], match["text"]) for match in matches if match]

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._process is not None:
            self.stop()
        else:
            self.kill()

    def _write_config(self) -> Path:
        broker, controller = self._ports
        values = {
            **PROPERTIES,
            "controller.quorum.voters": f"{NODE_ID}@127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}",
            "log.dirs": ",".join(str(log_dir) for log_dir in self.log_dirs),
            **self._properties,
        }
        path = self._work_dir / "server.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        return path

    def _format(self, config: Path) -> None:
        arguments = ("kafka.tools.StorageTool", "format", "-t", self._cluster_id, "-c", str(config))
        done = subprocess.run(
            self._java("-Xmx128m", *arguments, "--ignore-formatted"),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the log dir could not be formatted: {done.stdout}{done.stderr}")

    @staticmethod
    def _java(heap: str, *arguments: str) -> list[str]:
        return [_tool("java"), heap, *_JVM, *_LOGGING, "-cp", class_path(with_logging=True), *arguments]

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        give_up = time.monotonic() + START_LIMIT_S
        while not any("Kafka Server started" in line.text for line in self.log_lines()):
            status = self._process.poll()
            if status is not None:
                self.kill()
                raise RuntimeError(f"the broker ended with status {status} at start: {self._tail()}")
            if time.monotonic() > give_up:
                self.kill()
                raise RuntimeError(f"the broker was not ready in {START_LIMIT_S:.0f} s: {self._tail()}")
            time.sleep(0.1)

    def _tail(self) -> str:
        return "\n" + "\n".join(self.log_file.read_text(errors="replace").splitlines()[-40:])


class BrokerClient:
    """Producers, consumers and an admin client in one JVM. A context manager; `connect` comes first."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(_client_classes()), class_path(with_logging=True)])
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
        self._process = subprocess.Popen(
            [_tool("java"), "-Xmx512m", *_JVM, quiet, "-cp", path, "BrokerClient"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self.close)

    def connect(self, broker: Broker) -> None:
        """Talk to this broker from now on. Producers keep the address they were made with."""
        self._ask("connect", bootstrap=broker.bootstrap)

    def create_topic(self, topic: str, partitions: int, configs: Mapping[str, str]) -> None:
        self._ask("create_topic", topic=topic, partitions=partitions, configs=dict(configs))

    def alter_configs(self, topic: str, configs: Mapping[str, str]) -> None:
        self._ask("alter_configs", topic=topic, configs=dict(configs))

    def describe_topics(self) -> dict[str, dict[str, Any]]:
        """Every topic, internal ones too: `partitions`, `id`, and `configs` set on the topic itself."""
        answer: dict[str, dict[str, Any]] = self._ask("describe_topics")
        return answer

    def describe_log_dirs(self) -> dict[str, dict[str, Any]]:
        """By path: `error` (None when online) and `size_bytes` by "topic-partition"."""
        answer: dict[str, dict[str, Any]] = self._ask("describe_log_dirs", node=NODE_ID)
        return answer

    def describe_producers(self, topic: str, partition: int) -> list[dict[str, int]]:
        """The partition's live producers: producer_id, epoch, last_sequence, last_timestamp_ms."""
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
    ) -> list[int]:
        """One batch of (timestamp, key, value[, headers]) by the producer of that name; the offsets it got.

        The settings count when the name is new: the producer lives until `close_producer`.
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
        )
        return answer

    def transaction(self, producer: str, step: str, transactional_id: str | None = None) -> None:
        """`step` is begin, commit or abort; the first begin makes the producer."""
        self._ask("transaction", producer=producer, step=step, transactional_id=transactional_id)

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
        """One batch with this producer id, epoch and first sequence: error name ("NONE") and base offset."""
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
        """Every record of these partitions, from the start to the end that each has now."""
        rows = self._ask("consume", partitions=[list(one) for one in partitions], isolation=isolation)
        return sorted((from_wire(row) for row in rows), key=lambda record: record[:3])

    def first_from(self, topic: str, partition: int, offsets: Iterable[int]) -> list[int | None]:
        """For each offset, that of the first record a consumer gets which begins there; None at the end."""
        asked = list(offsets)
        answer: list[int | None] = self._ask("first_from", topic=topic, partition=partition, offsets=asked)
        return answer

    def offsets(self, partitions: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
        """Log start and log end offset, by "topic-partition"."""
        answer = self._ask("offsets", partitions=[list(one) for one in partitions])
        return {name: (start, end) for name, (start, end) in answer.items()}

    def offsets_for_times(
        self, topic: str, partition: int, timestamps_ms: Iterable[int]
    ) -> list[tuple[int, int] | None]:
        """For each time, (offset, timestamp) of the first record at or after it, or None."""
        times = list(timestamps_ms)
        answer = self._ask("offsets_for_times", topic=topic, partition=partition, timestamps=times)
        return [None if found is None else (found[0], found[1]) for found in answer]

    def delete_records(self, topic: str, partition: int, before_offset: int) -> None:
        """Raise the log start offset. Kafka allows it only where the policy has `delete`."""
        self._ask("delete_records", topic=topic, partition=partition, before_offset=before_offset)

    def commit_offsets(self, group: str, topic: str, partition: int, offsets: Iterable[int], note: str = "") -> None:
        """Commit each offset in turn, a request each."""
        self._ask("commit_offsets", group=group, topic=topic, partition=partition, offsets=list(offsets), note=note)

    def committed_offsets(self, group: str) -> dict[str, int]:
        """The group's offsets by "topic-partition"."""
        answer: dict[str, int] = self._ask("committed_offsets", group=group)
        return answer

    def delete_group(self, group: str) -> None:
        """Forget a group: tombstones in __consumer_offsets."""
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
    """A record as a JSON array: fields in order, bytes as base64."""
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


def _tool(name: str) -> str:
    home = os.environ.get("JAVA_HOME")
    path = str(Path(home, "bin", name)) if home else shutil.which(name)
    if path is None or not Path(path).exists():
        raise KafkaUnavailable(f"no {name}: neither JAVA_HOME nor PATH has one")
    return path


def _client_classes() -> Path:
    """target/broker-classes, compiled once for each state of the client's source."""
    source = HERE / "broker_java" / "BrokerClient.java"
    classes = TARGET / "broker-classes"
    stamp = classes / "stamp"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return classes
    shutil.rmtree(classes, ignore_errors=True)
    classes.mkdir(parents=True)
    command = [_tool("javac"), "-encoding", "UTF-8", "-d", str(classes), "-cp", class_path(with_logging=True)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the broker's client does not compile:\n{done.stdout}{done.stderr}")
    stamp.write_text(digest)
    return classes


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different: the sockets are open at the same time."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
