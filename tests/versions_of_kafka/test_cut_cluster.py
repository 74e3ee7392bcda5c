"""A cluster of three brokers under transactional load, copied broker by broker, is cut, and starts on the result.

Each broker is stopped by SIGSTOP while its log dir is copied, so that the copy is of one moment, as a volume's snapshot
is; the copies of the brokers are of different moments, between which transactions continue.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.chance import chance
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient
from tests.interop.broker_story import keytail
from tests.ports import free_ports
from tests.versions_of_kafka.broker import CONTROLLER_ID, ClusterBroker, controller_of
from tests.versions_of_kafka.consumers import java_records, librdkafka_records
from tests.versions_of_kafka.test_prepared_cluster import BROKERS, PROPERTIES

pytestmark = [pytest.mark.interop, pytest.mark.soak("tests/cut/test_command.py: the same on generated logs")]

TOPICS = ("x", "y", "z")
PARTITIONS = [(topic, 0) for topic in TOPICS]
GROUP = "readers"


class Load:
    """Transactions in a thread: each writes its number to all topics, and commits the end of the first for a group."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.done = 0
        self.problem: BaseException | None = None

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=120)

    def _run(self) -> None:
        try:
            with BrokerClient(heap="128m") as client:
                client.connect(self._broker)
                while not self._over.is_set():
                    self._transaction(client)
        except BaseException as problem:  # reported by wait_for
            self.problem = problem

    def _transaction(self, client: BrokerClient) -> None:
        client.transaction("load", "begin", "load")
        for topic in TOPICS:
            record = (int(time.time() * 1000), b"k%d" % (self.done % 7), b"%d" % self.done)
            [offset] = client.produce("load", topic, 0, [record], transactional_id="load")
            if topic == TOPICS[0]:
                client.send_offsets("load", GROUP, topic, 0, offset + 1)
        client.transaction("load", "commit" if self.done % 5 else "abort")
        self.done += 1

    def wait_for(self, more: int) -> None:
        wanted, give_up = self.done + more, time.monotonic() + 300
        while self.done < wanted:
            assert self.problem is None, self.problem
            assert time.monotonic() < give_up, "the load makes no progress"
            time.sleep(0.05)


def _has_stopped(process: int | None) -> bool:
    try:
        texts = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/stat")]
    except OSError:  # a thread has ended
        return False
    return {text.rpartition(")")[2].split()[0] for text in texts} == {"T"}


@contextmanager
def frozen(broker: Broker) -> Iterator[None]:
    process = broker.pid
    os.kill(process, signal.SIGSTOP)
    try:
        give_up = time.monotonic() + 300
        while not _has_stopped(process):  # each thread stops when it next runs, or its call to the system ends
            assert time.monotonic() < give_up, "a thread of the broker does not stop"
            time.sleep(0.01)
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def test_a_cluster_starts_on_the_cut_of_copies_of_different_moments(tmp_path: Path) -> None:
    rng, [port] = chance(), free_ports(1)
    nodes: dict[int, Broker] = {CONTROLLER_ID: controller_of(tmp_path / "controller", port)}
    nodes |= {n: ClusterBroker(n, port, tmp_path / f"b{n}", properties=PROPERTIES) for n in BROKERS}
    copies = {number: tmp_path / f"copy-{number}" / "logs" for number in nodes}
    with ExitStack() as cluster:
        for node in nodes.values():
            cluster.callback(node.kill)
            node.start()
        with BrokerClient(heap="128m") as admin:
            admin.connect(nodes[1])
            for topic in TOPICS:
                admin.create_topic(topic, 1, {}, replicas=3)
        with Load(nodes[1]) as load:
            load.wait_for(5)
            for number in rng.sample(list(nodes), len(nodes)):
                with frozen(nodes[number]):
                    shutil.copytree(nodes[number].log_dirs[0], copies[number])
                    (copies[number] / ".lock").unlink(missing_ok=True)
                load.wait_for(rng.randint(1, 4))
        assert load.problem is None
    output = tmp_path / "output"
    given = [text for number in nodes for text in ("--replica", f"{number}={copies[number]}")]
    rows = keytail("cut", *given, "--output-dir", output, "--execute")
    assert {row["status"] for row in rows} <= {"cut", "whole"}
    assert any(row["status"] == "cut" for row in rows), "the copies were consistent"
    written = {number: output / f"node-{number}" / "logs" for number in nodes}
    replicas = [text for number in BROKERS for text in ("--replica", f"b{number}={written[number]}")]
    assert {row["status"] for row in keytail("audit", *replicas)} == {"alike"}
    for number, node in nodes.items():
        shutil.rmtree(node.log_dirs[0])
        shutil.copytree(written[number], node.log_dirs[0])
    with ExitStack() as cluster:
        for node in nodes.values():
            cluster.callback(node.kill)
            node.start()
        admin = cluster.enter_context(BrokerClient(heap="128m"))
        admin.connect(nodes[2])
        ends = admin.offsets(PARTITIONS)
        by_name = {f"{row['topic']}-{row['partition']}": row for row in rows}
        # If the last state of a transaction was cut, its coordinator writes markers again.
        assert {end - by_name[name]["cut_offset"] for name, (_, end) in ends.items()} <= {0, 1}
        assert admin.offsets(PARTITIONS, isolation="read_committed") == ends, "a transaction is open"
        for records in (java_records, librdkafka_records):
            found = records(nodes[2], PARTITIONS, isolation="read_committed")
            values = {topic: [int(one.value) for one in found if one.topic == topic] for topic in TOPICS}
            assert values["x"] == values["y"] == values["z"]
            assert values["x"] == [number for number in range(values["x"][-1] + 1) if number % 5]
        committed = admin.committed_offsets(GROUP)
        assert committed["x-0"] <= ends["x-0"][1]
        with Load(nodes[3]) as load:  # the same transactional id goes on
            load.wait_for(3)
        admin.wait_until_decided(PARTITIONS)
        for node in [*nodes.values()][::-1]:
            node.stop()
