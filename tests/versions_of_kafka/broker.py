"""Brokers of any version: with KRaft as in tests/interop/broker.py, or with ZooKeeper from the same jars.

`broker_of(version, log_dir, work_dir)` chooses; `BrokerClient` (the Java clients of 4.3.1) and librdkafka work with all
of them from 2.4 on.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.interop.broker import JVM_FLAGS, NODE_ID, Broker, tool
from tests.interop.kafka import VERSION, broker_class_path
from tests.ports import free_ports
from tests.versions_of_kafka import has_zookeeper

ZOOKEEPER_LIMIT_S = 300.0
SESSION_LIMIT_S = 300.0
CONTROLLER_ID = 100  # the id in a cluster of several brokers


def broker_of(version: str, log_dirs: Path | Sequence[Path], work_dir: Path, **options: Any) -> Broker:
    """Return a stopped broker of that version; `options` are those of `Broker`."""
    kind = ZooKeeperBroker if has_zookeeper(version) else Broker
    return kind(log_dirs, work_dir, version=version, **options)


class ZooKeeper:
    """One ZooKeeper on 127.0.0.1, from the jars of a version of Kafka, with its data in `work_dir`."""

    def __init__(self, version: str, work_dir: Path) -> None:
        self.port = free_ports(1)[0]
        self.version = version
        self._work_dir = work_dir
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it unless it is running, and return when it serves requests."""
        if self._process is not None:
            return
        data = self._work_dir / "zookeeper"
        data.mkdir(parents=True, exist_ok=True)
        config, log_file = self._work_dir / "zookeeper.properties", self._work_dir / "zookeeper.log"
        values = {
            "4lw.commands.whitelist": "*",
            "admin.enableServer": "false",
            "clientPort": str(self.port),
            "clientPortAddress": "127.0.0.1",
            "dataDir": str(data),
            "tickTime": "500",
        }
        config.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [tool("java"), "-Xmx128m", *JVM_FLAGS, "-cp", broker_class_path(self.version), main, str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        atexit.register(self.kill)
        give_up = time.monotonic() + ZOOKEEPER_LIMIT_S
        while self._ask("ruok") != "imok":
            if self._process.poll() is not None or time.monotonic() > give_up:
                self.kill()
                raise RuntimeError(f"ZooKeeper did not start: {log_file.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    def wait_until_free(self, broker: int = NODE_ID) -> None:
        """Wait until the broker has no session. The session of a killed broker remains for some seconds, in which the
        broker cannot register.
        """
        give_up = time.monotonic() + SESSION_LIMIT_S
        while f"/brokers/ids/{broker}\n" in self._ask("dump"):
            assert time.monotonic() < give_up, "the session of a killed broker did not end"
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the process. ZooKeeper writes to its log before it answers, so nothing is lost."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            atexit.unregister(self.kill)

    def _ask(self, word: str) -> str:
        """Return the answer to a four-letter command; it is empty if ZooKeeper does not answer."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=10) as item:
            item.sendall(word.encode())
            with item.makefile("rb") as answer:
                return answer.read().decode()
        return ""


class ZooKeeperBroker(Broker):
    """A broker with its own ZooKeeper, which runs from the first start of the broker to the end of the `with` block."""

    ready_text = f"[KafkaServer id={NODE_ID}] started"

    def __init__(self, log_dirs: Path | Sequence[Path], work_dir: Path, *, version: str, **options: Any) -> None:
        super().__init__(log_dirs, work_dir, version=version, **options)
        self.zookeeper = ZooKeeper(version, work_dir)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self.zookeeper.kill()

    def _mode_properties(self) -> Mapping[str, str]:
        return {
            "broker.id": str(NODE_ID),
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT",
            "listeners": f"PLAINTEXT://{self.bootstrap}",
            "zookeeper.connect": f"127.0.0.1:{self.zookeeper.port}",
            "zookeeper.session.timeout.ms": "6000",
        }

    def _prepare(self, config: Path) -> None:
        self.zookeeper.start()
        self.zookeeper.wait_until_free()


class ZooKeeperMember(ZooKeeperBroker):
    """Broker `number` of a cluster whose ZooKeeper is started and killed by the caller."""

    def __init__(self, number: int, zookeeper: ZooKeeper, log_dirs: Path, work_dir: Path, **options: Any) -> None:
        super().__init__(log_dirs, work_dir, version=zookeeper.version, **options)
        self.zookeeper, self.work_dir = zookeeper, work_dir
        self._number = number
        self.ready_text = f"[KafkaServer id={number}] started"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Broker.__exit__(self, kind, error, trace)

    def _mode_properties(self) -> Mapping[str, str]:
        return {**super()._mode_properties(), "broker.id": str(self._number)}

    def _prepare(self, config: Path) -> None:
        self.zookeeper.wait_until_free(self._number)


class Follower(ZooKeeperMember):
    """Broker 2 of the cluster of `leader`. Start `leader` first, and stop it last."""

    def __init__(self, leader: ZooKeeperBroker, log_dirs: Path, work_dir: Path, **options: Any) -> None:
        super().__init__(2, leader.zookeeper, log_dirs, work_dir, **options)


class ClusterBroker(Broker):
    """Broker `number` of a KRaft cluster whose controller is a separate process, with its own work directory."""

    def __init__(
        self,
        number: int,
        controller_port: int,
        work_dir: Path,
        *,
        properties: Mapping[str, str],
        version: str = VERSION,
    ) -> None:
        super().__init__(work_dir / "logs", work_dir, properties=properties, heap="256m", version=version)
        self.work_dir = work_dir
        self._number = number
        self._controller_port = controller_port

    def _mode_properties(self) -> Mapping[str, str]:
        return {
            **super()._mode_properties(),
            "controller.quorum.voters": f"{CONTROLLER_ID}@127.0.0.1:{self._controller_port}",
            "listeners": f"PLAINTEXT://{self.bootstrap}",
            "node.id": str(self._number),
            "process.roles": "broker",
        }


def controller_of(work_dir: Path, port: int, version: str = VERSION) -> Broker:
    """Return the controller of a cluster, which is not a broker."""
    properties = {
        "controller.quorum.voters": f"{CONTROLLER_ID}@127.0.0.1:{port}",
        "listeners": f"CONTROLLER://127.0.0.1:{port}",
        "node.id": str(CONTROLLER_ID),
        "process.roles": "controller",
    }
    return Broker(work_dir / "logs", work_dir, properties=properties, heap="128m", version=version)
