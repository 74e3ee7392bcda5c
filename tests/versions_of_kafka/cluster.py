"""A cluster of several brokers of one version, each of which is started, stopped and killed on its own.

With KRaft the controller is a separate process; with ZooKeeper, ZooKeeper is. Both run from the beginning to the end of
the `with` block.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from tests.interop.broker import Broker, LogLine
from tests.interop.broker_client import BrokerClient, ClientError
from tests.ports import free_ports
from tests.versions_of_kafka import has_zookeeper
from tests.versions_of_kafka.broker import ClusterBroker, ZooKeeper, ZooKeeperMember, controller_of

LIMIT_S = 300.0
PROPERTIES = {
    "controlled.shutdown.enable": "true",
    "log.segment.delete.delay.ms": "1000",
    "offsets.topic.num.partitions": "1",
    "replica.fetch.wait.max.ms": "100",
    # A killed broker leaves the ISR after about 10 s, whatever this value is; a broker that lags leaves it after this
    # time.
    "replica.lag.time.max.ms": "5000",
}


class Cluster:
    """`brokers` are stopped at first, and have the numbers 1 to `count`. `client` is connected by `start`."""

    def __init__(
        self, version: str, folder: Path, count: int, *, properties: Mapping[str, str] | None = None
    ) -> None:
        self.version, self.folder = version, folder
        values = {**PROPERTIES, **(properties or {})}
        self.brokers: dict[int, ClusterBroker | ZooKeeperMember] = {}
        self._base: ZooKeeper | Broker
        numbers = range(1, count + 1)
        if has_zookeeper(version):
            self._base = zookeeper = ZooKeeper(version, folder / "zookeeper")
            for number in numbers:
                home = folder / f"b{number}"
                self.brokers[number] = ZooKeeperMember(number, zookeeper, home / "logs", home, properties=values)
        else:
            [port] = free_ports(1)
            self._base = controller_of(folder / "controller", port, version)
            for number in numbers:
                home = folder / f"b{number}"
                self.brokers[number] = ClusterBroker(number, port, home, properties=values, version=version)
        self._end = ExitStack()
        self.client: BrokerClient

    def __enter__(self) -> Cluster:
        with ExitStack() as end:
            self.client = end.enter_context(BrokerClient(heap="256m"))
            end.callback(self._base.kill)
            self._base.start()
            for broker in self.brokers.values():
                end.callback(broker.kill)
            self._end = end.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.close()

    def start(self, *numbers: int) -> None:
        """Start these brokers, one after the other, and connect the client to the first of them."""
        for number in numbers:
            self.brokers[number].start()
        self.client.connect(self.brokers[numbers[0]])

    def stop(self, *numbers: int) -> None:
        for number in numbers:
            self.brokers[number].stop()

    def kill(self, *numbers: int) -> None:
        for number in numbers:
            self.brokers[number].kill()

    @contextmanager
    def frozen(self, number: int) -> Iterator[None]:
        """Let a broker make no progress, for less than its session lasts, which is 6 s."""
        process = self.brokers[number].pid
        os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(process, signal.SIGCONT)

    def partition(self, number: int, topic: str) -> Path:
        """Return the directory of partition 0 on that broker."""
        return self.brokers[number].log_dirs[0] / f"{topic}-0"

    def leader(self, topic: str) -> int:
        return int(self.client.describe_topics()[topic]["leaders"][0])

    def wait_until_leader(self, topic: str, number: int) -> None:
        wait_until(lambda: self.leader(topic) == number, f"broker {number} leads {topic}")

    def wait_until_in_sync(self, topic: str, replicas: int) -> None:
        wait_until_in_sync(self.client, (topic,), replicas)

    def wait_for_line(self, number: int, text: str) -> LogLine:
        """Return the first line since the start of the broker that contains `text`."""
        found: list[LogLine] = []

        def is_logged() -> bool:
            found.extend(self.lines(number, (text,))[:1])
            return bool(found)

        wait_until(is_logged, f"broker {number} logs {text!r}")
        return found[0]

    def log_text(self, number: int) -> str:
        """Return what all starts of the broker have logged, including traces of exceptions."""
        return self.brokers[number].log_file.read_text(errors="replace")

    def lines(self, number: int, texts: Iterable[str]) -> list[LogLine]:
        """Return the lines since the start of the broker that contain one of these texts."""
        wanted: Sequence[str] = list(texts)
        return [line for line in self.brokers[number].log_lines() if any(text in line.text for text in wanted)]


def wait_until_in_sync(client: BrokerClient, topics: Iterable[str], replicas: int) -> None:
    """Wait until each partition of the topics has this number of replicas in sync."""

    def are_in_sync() -> bool:
        found = client.describe_topics()
        return all(found[topic]["in_sync"] == replicas for topic in topics)

    wait_until(are_in_sync, f"{replicas} replicas of {', '.join(topics)} are in sync")


def wait_until(is_true: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until the condition holds. A client's error, as while a leader is elected, and a topic that a broker does
    not know yet are the same as false.
    """
    give_up, problem = time.monotonic() + limit_s, ""
    while True:
        try:
            if is_true():
                return
        except (ClientError, KeyError) as error:
            problem = f": {error}"
        assert time.monotonic() < give_up, f"not within {limit_s:.0f} s: {what}{problem}"
        time.sleep(0.1)
