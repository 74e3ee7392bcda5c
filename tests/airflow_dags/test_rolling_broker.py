"""A rolling run over real Kafka brokers, with Kafka's own tools as checks: the compaction is prepared while they run,
records are appended, and it is committed. Afterwards the brokers run and serve the latest record of each key.

There is one broker; with KEYTAIL_ROLL_BROKERS=2 there are two, with a separate controller and two replicas of each
partition.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.airflow_dags.conftest import Airflow
from tests.airflow_dags.rolls import connection
from tests.interop.broker import Broker
from tests.interop.broker_story import KEYTAIL, latest_by_key, start_client
from tests.interop.kafka import class_path
from tests.ports import free_ports

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("airflow")]

BROKERS = int(os.environ.get("KEYTAIL_ROLL_BROKERS", "1"))
NOW = 1_700_000_000_000
TOPIC_CONFIGS = {"cleanup.policy": "compact", "internal.segment.bytes": "16384", "min.cleanable.dirty.ratio": "0.3"}
KEYS = 20

# A script that starts and stops a broker by its process id, both idempotent. $1 is the folder, $2 the action.
SERVICE = """#!/bin/sh
pid=$(cat "$1/pid" 2>/dev/null)
up() {{ [ -n "$pid" ] && [ -d "/proc/$pid" ] && ! grep -q "^State:.Z" "/proc/$pid/status"; }}
case $2 in
start) up && exit 0
  setsid {java} >>"$1/service.log" 2>&1 </dev/null &
  echo $! >"$1/pid" ;;
stop) up || exit 0
  kill -TERM "$pid"
  while up; do sleep 0.1; done ;;
esac
"""


class Cluster:
    """The brokers of a cluster, which scripts start and stop; if there are two, the controller is a third process."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        controller_port, *ports = free_ports(count + 1)
        apart = count > 1
        common = {
            "controller.quorum.voters": f"{100 if apart else 1}@127.0.0.1:{controller_port}",
            "offsets.topic.replication.factor": str(count),
            "log.cleaner.enable": "false",
            "controlled.shutdown.enable": "true",
            "replica.lag.time.max.ms": "5000",
            "log.flush.offset.checkpoint.interval.ms": "200",
            "replica.high.watermark.checkpoint.interval.ms": "200",
            "log.initial.task.delay.ms": "100",
        }
        own = f"CONTROLLER://127.0.0.1:{controller_port}"
        self.brokers: dict[str, Broker] = {}
        for number, port in enumerate(ports, 1):
            listeners = f"PLAINTEXT://127.0.0.1:{port}" + ("" if apart else f",{own}")
            roles = "broker" if apart else "broker,controller"
            properties = {**common, "node.id": str(number), "process.roles": roles, "listeners": listeners}
            self._add(f"b{number}", properties)
        if apart:
            properties = {**common, "node.id": "100", "process.roles": "controller", "listeners": own}
            self._add("controller", properties)
        self.bootstrap = ",".join(f"127.0.0.1:{port}" for port in ports)
        self.ports = ports

    def _add(self, name: str, properties: dict[str, str]) -> None:
        work = self.folder / name
        broker = self.brokers[name] = Broker(work / "logs", work, properties=properties, heap="256m")
        (work / "logs").mkdir(parents=True)
        config = broker._write_config()
        broker._prepare(config)
        script = work / "service"
        script.write_text(SERVICE.format(java=shlex.join(broker._java("-Xmx256m", "kafka.Kafka", str(config)))))
        script.chmod(0o755)

    def service(self, name: str, what: str) -> list[str]:
        return [str(self.folder / name / "service"), str(self.folder / name), what]

    def start(self) -> None:
        for name in reversed(list(self.brokers)):
            subprocess.run(self.service(name, "start"), check=True)

    def kill(self) -> None:
        for name in self.brokers:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.folder / name / "pid").read_text()), signal.SIGKILL)

    def tool(self, name: str, *words: str, port: int | None = None) -> list[str]:
        bootstrap = self.bootstrap if port is None else f"127.0.0.1:{port}"
        flags = ["-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
        main = f"org.apache.kafka.tools.{name}"
        return ["java", *flags, "-cp", class_path(), main, "--bootstrap-server", bootstrap, *words]

    def inventory(self) -> dict[str, str]:
        made: list[dict[str, Any]] = []
        for number, port in enumerate(self.ports, 1):
            name = f"b{number}"
            commands = {
                "stop": self.service(name, "stop"),
                "start": self.service(name, "start"),
                "reachable": self.tool("BrokerApiVersionsCommand", port=port),
                "under_replicated": self.tool("TopicCommand", "--describe", "--under-replicated-partitions"),
                "unavailable": self.tool("TopicCommand", "--describe", "--unavailable-partitions"),
            }
            if len(self.ports) > 1:  # with one replica, every partition is at its minimum of in-sync replicas
                commands["at_min_isr"] = self.tool("TopicCommand", "--describe", "--under-min-isr-partitions")
            config = str(self.folder / name / "server.properties")
            made.append({"name": name, "keytail": str(KEYTAIL), "flags": ["--topic", "users"], "config": config,
                         "on_host": ["sh", "-c"], "commands": commands})  # fmt: skip
        return connection(*made)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    made = Cluster(folder, BROKERS)
    made.start()
    try:
        yield made
    finally:
        made.kill()


def retry_until_success(words: Sequence[str]) -> None:
    give_up = time.monotonic() + 300
    while (done := subprocess.run(words, capture_output=True, check=False)).returncode:
        assert time.monotonic() < give_up, done.stdout + done.stderr
        time.sleep(0.2)


def wait_for(is_true: Callable[[], bool], seconds: float = 300) -> None:
    give_up = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def is_flushed(log_dir: Path) -> bool:
    """Return whether the recovery point of each partition is known and above 0: a preparation covers only
    flushed records.
    """
    path = log_dir / "recovery-point-offset-checkpoint"
    lines = [line.split() for line in path.read_text().splitlines() if line.startswith("users ")]
    return len(lines) == 2 and all(int(offset) > 0 for _, _, offset in lines)


def is_prepared(log_dir: Path) -> bool:
    return all(list((log_dir / f"users-{number}").glob("*.prepared.*")) for number in range(2))


@pytest.mark.one_of("real work under Airflow")
def test_a_rolling_run_over_real_brokers_compacts_and_restarts_each(airflow_runs: Airflow, tmp_path: Path) -> None:
    with start_client() as client, cluster(tmp_path) as brokers:
        configs = [word for key, value in TOPIC_CONFIGS.items() for word in ("--config", f"{key}={value}")]
        create = ["--create", "--topic", "users", "--partitions", "2", "--replication-factor", str(BROKERS), *configs]
        retry_until_success(brokers.tool("TopicCommand", *create))
        client.connect(brokers)  # type: ignore[arg-type]  # it asks for `bootstrap` alone
        for number in range(120):
            records = [(NOW + number, b"k%d" % (i % KEYS), b"%d" % number * 40) for i in range(10)]
            client.produce("p", "users", number % 2, records)
        client.close_producer("p")
        partitions = [("users", 0), ("users", 1)]
        before, ends = client.consume(partitions), client.offsets(partitions)
        logs = {name: brokers.folder / name / "logs" for name in brokers.brokers if name != "controller"}
        wait_for(lambda: all(map(is_flushed, logs.values())), 300)
        pids = {name: (brokers.folder / name / "pid").read_text() for name in brokers.brokers}
        env = {**brokers.inventory(), "KEYTAIL_ALERT": ""}
        ledger = str(tmp_path / "ledger")
        conf = {"poll_seconds": 0.3, "stop_minutes": 10, "wait_for_sync_minutes": 10, "ledger": ledger}
        appended: list[int] = []

        def append() -> None:
            """Write the latest records after the compaction of the first broker was prepared, and while it is still
            running.
            """
            wait_for(lambda: is_prepared(logs["b1"]))
            for number in range(2):
                client.produce("late", "users", number, [(NOW + 500, b"k0", b"late"), (NOW + 500, b"new", b"late")])
                appended.append(number)

        writer = threading.Thread(target=append)
        writer.start()
        [answer] = airflow_runs.rolls([{"env": env, "conf": conf, "retries": 0}])
        writer.join()
        assert appended == [0, 1]
        assert answer["state"] == "success", (answer["states"], answer["xcoms"])
        names = [f"b{number}" for number in range(1, BROKERS + 1)]
        assert answer["xcoms"]["roll return_value"] == dict.fromkeys(names, "up")
        for name in names:
            assert answer["xcoms"][f"{name}.prepare return_value"]["counts"] == {"prepared": 2}
            compacted: dict[str, Any] = answer["xcoms"][f"{name}.compact return_value"]
            assert compacted["counts"] == {"compacted": 2}
            assert compacted["prepared"] == {"committed": 2}
            assert compacted["to_verify"] == ["users-0", "users-1"]
            assert compacted["bytes_after"] < compacted["bytes_before"] / 2
            assert answer["xcoms"][f"{name}.verify verdict"]["ran"]
            assert (brokers.folder / name / "pid").read_text() != pids[name]
            check_downtime(answer["xcoms"], name, ledger)
        after = client.consume(partitions)
        known = latest_by_key(record for record in after if record.value != b"late")
        expected = latest_by_key(before)
        assert known == {key: record for key, record in expected.items() if key in known}
        assert {key for key in expected if key not in known} <= {(0, b"k0"), (1, b"k0")}
        late = sorted((number, key) for number in range(2) for key in (b"k0", b"new"))
        assert sorted((record.partition, record.key) for record in after if record.value == b"late") == late
        assert len(after) < len(before) / 2
        assert client.offsets(partitions) == {name: (start, end + 2) for name, (start, end) in ends.items()}
        client.produce("q", "users", 0, [(NOW + 999, b"k0", b"new")])
        for name in names:  # each broker can be stopped cleanly
            subprocess.run(brokers.service(name, "stop"), check=True, timeout=300)
            assert (brokers.folder / name / "logs" / ".kafka_cleanshutdown").exists()


def check_downtime(xcoms: dict[str, Any], name: str, ledger: str) -> None:
    """Check that the ledger has the times that the task returned, and the run of `compact`."""
    times = xcoms[f"{name}.downtime return_value"]
    down, reachable, in_sync = (times[key] for key in ("down_at_ms", "reachable_at_ms", "in_sync_at_ms"))
    assert 0 < reachable - down < in_sync - down < 3_600_000
    command = [str(KEYTAIL), "history", "--ledger", ledger, "--run", xcoms[f"{name}.compact run_id"]]
    run, *rows = json.loads(subprocess.run([*command, "--output", "json"], check=True, capture_output=True).stdout)
    assert [run[key] for key in ("broker", "down_at_ms", "reachable_at_ms", "in_sync_at_ms")] == [
        name, down, reachable, in_sync
    ]  # fmt: skip
    assert (run["status"], [row["status"] for row in rows]) == ("done", ["compacted", "compacted"])
    assert down < run["start_ms"] < run["end_ms"] < reachable

