"""A Kafka broker for tests, of version 4.3.1 or another: one KRaft node on 127.0.0.1, at free ports.

`Broker` formats a log dir if needed, starts on it, returns the lines of its log, and stops it with SIGTERM.
broker_client.py contains Kafka's clients for it.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tests import class_archives
from tests.interop.kafka import VERSION, KafkaUnavailable, broker_class_path
from tests.ports import free_ports

CLUSTER_ID = "a2V5dGFpbC1nb2xkZW4tMQ"
NODE_ID = 1
START_LIMIT_S = 300.0
STOP_LIMIT_S = 300.0

# Brokers of these tests have one replica of each partition, and no background task changes old data.
PROPERTIES: Mapping[str, str] = {
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "inter.broker.listener.name": "PLAINTEXT",
    "log.cleaner.enable": "false",
    "log.initial.task.delay.ms": "2000000000",
    "log.retention.check.interval.ms": "2000000000",
    "num.network.threads": "1",
    "num.io.threads": "2",
    "num.partitions": "1",
    "offsets.retention.minutes": "2000000000",
    "offsets.topic.num.partitions": "3",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transactional.id.expiration.ms": "2000000000",
}
KRAFT_PROPERTIES: Mapping[str, str] = {
    "process.roles": "broker,controller",
    "node.id": str(NODE_ID),
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
}

JVM_FLAGS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-Djava.net.preferIPv4Stack=true")
_LOGGING = (
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=info",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
)
_LINE = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} \[(?P<thread>.*?)\] (?P<level>[A-Z]+) (?P<logger>\S+) - (?P<text>.*)")


class LogLine(NamedTuple):
    """One message in the broker's log. `exception` is the line after it, if that is not a message: the exception that
    was logged with it."""

    level: str
    logger: str
    text: str
    exception: str = ""


class Broker:
    """A broker on one or more log dirs; `with Broker(...) as broker` starts it, and stops it cleanly at the end.

    A broker with ZooKeeper is a subclass (tests/versions_of_kafka). `work_dir` contains its configuration and its log.
    The ports do not change with a restart.
    """

    ready_text = "Kafka Server started"

    def __init__(
        self,
        log_dirs: Path | Sequence[Path],
        work_dir: Path,
        *,
        version: str = VERSION,
        properties: Mapping[str, str] | None = None,
        cluster_id: str = CLUSTER_ID,
        heap: str = "512m",
        uid: int | None = None,
        java_options: Sequence[str] | None = None,
    ) -> None:
        """Create a broker. `uid` is the user and group that the process runs as; only root may set it. If
        `java_options` is None, the JVM uses an archive of its classes, if there is one.
        """
        self.log_dirs = [log_dirs] if isinstance(log_dirs, Path) else list(log_dirs)
        self.log_file = work_dir / "broker.log"
        self.version = version
        self._work_dir = work_dir
        self._properties = dict(properties or {})
        self._cluster_id = cluster_id
        self._heap = heap
        self._user: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
        self._archive = class_archives.options("kafka" if version == VERSION else f"kafka-{version}")
        self._java_options = self._archive if java_options is None else tuple(java_options)
        self._ports = free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0  # the position in the log file at which the last start begins

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    def start(self) -> None:
        """Format the log dirs if they are new, start the broker, and return when it is ready."""
        assert self._process is None
        self._work_dir.mkdir(parents=True, exist_ok=True)
        config = self._write_config()
        for log_dir in self.log_dirs:
            log_dir.mkdir(parents=True, exist_ok=True)
        self._prepare(config)
        with self.log_file.open("ab") as log:
            self._started_at = log.tell()
            command = self._java(f"-Xmx{self._heap}", *self._java_options, "kafka.Kafka", str(config))
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **self._user)
        atexit.register(self.kill)
        self._wait_until_ready()

    def stop(self) -> None:
        """Send SIGTERM and wait until the process ends. Raises RuntimeError if a log dir has no clean-shutdown file."""
        process = self._process
        assert process is not None, "the broker is not running"
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            threads = self._thread_dump(process)
            self.kill()
            raise RuntimeError(f"the broker did not stop in {STOP_LIMIT_S:.0f} s: {self._tail()}\n{threads}") from None
        self._process = None
        atexit.unregister(self.kill)
        for log_dir in self.log_dirs:
            if not (log_dir / ".kafka_cleanshutdown").exists():
                raise RuntimeError(f"the broker did not shut down cleanly: {self._tail()}")

    def _thread_dump(self, process: subprocess.Popen[bytes]) -> str:
        """Return the stacks of the JVM's threads that contain Kafka's code."""
        start = self.log_file.stat().st_size
        process.send_signal(signal.SIGQUIT)
        for _ in range(100):  # wait at most 10 s for the last part of the dump, which is about the heap
            text = self.log_file.read_bytes()[start:].decode(errors="replace")
            if "\nHeap\n" in text:
                break
            time.sleep(0.1)
        stacks = (stack for stack in text.split("\n\n") if "kafka." in stack)
        return "\n\n".join(stacks)[:100_000]

    def kill(self) -> None:
        """Kill the process if it runs, as a crash would end it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            atexit.unregister(self.kill)

    def log_lines(self) -> list[LogLine]:
        """Return the lines that the broker has logged since its last start."""
        with self.log_file.open("rb") as log:
            log.seek(self._started_at)
            text = log.read().decode(errors="replace")
        found: list[LogLine] = []
        for line in text.splitlines():
            if match := _LINE.match(line):
                found.append(LogLine(match["level"], match["logger"], match["text"]))
            elif found and not found[-1].exception:
                found[-1] = found[-1]._replace(exception=line)
        return found

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
        values = {
            **PROPERTIES,
            **self._mode_properties(),
            "log.dirs": ",".join(str(log_dir) for log_dir in self.log_dirs),
            **self._properties,
        }
        path = self._work_dir / "server.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        return path

    def _mode_properties(self) -> Mapping[str, str]:
        broker, controller = self._ports
        return {
            **KRAFT_PROPERTIES,
            "controller.quorum.voters": f"{NODE_ID}@127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}",
        }

    def _prepare(self, config: Path) -> None:
        if all((log_dir / "meta.properties").exists() for log_dir in self.log_dirs):
            return
        arguments = ("kafka.tools.StorageTool", "format", "-t", self._cluster_id, "-c", str(config))
        done = subprocess.run(
            self._java("-Xmx128m", *self._archive, *arguments, "--ignore-formatted"),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the log dir could not be formatted: {done.stdout}{done.stderr}")

    def _java(self, heap: str, *arguments: str) -> list[str]:
        return [tool("java"), heap, *JVM_FLAGS, *_LOGGING, "-cp", broker_class_path(self.version), *arguments]

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        give_up = time.monotonic() + START_LIMIT_S
        while not any(self.ready_text in line.text for line in self.log_lines()):
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


def tool(name: str) -> str:
    """Return the path of the JDK's java or javac."""
    home = os.environ.get("JAVA_HOME")
    path = str(Path(home, "bin", name)) if home else shutil.which(name)
    if path is None or not Path(path).exists():
        raise KafkaUnavailable(f"no {name}: neither JAVA_HOME nor PATH has one")
    return path
