"""Functions shared by tests with a real broker: they run keytail, filter the broker's log, and summarise records."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.interop.broker import Broker, LogLine
from tests.interop.broker_client import BrokerClient, Served
from tests.interop.kafka import KafkaUnavailable

KEYTAIL = Path(sys.executable).with_name("keytail")
HARMLESS = (
    "The config `log.cleaner.enable` is deprecated",
    "Error processing append operation on partition",  # the answer to the gap in sequences that test_broker.py sends
)
# Loggers of the quorum and the network: they do not report on logs, and warn if a machine is slow or a node stops.
NOT_ABOUT_LOGS = re.compile(
    r"(NetworkClient|ControllerApis|QuorumController|BrokerLifecycleManager|RequestSendThread|network\.Processor"
    r"|EventPerformanceMonitor|ClientCnxn)$"
    r"|\.raft\.|Raft"
)
# Kafka's task of retention pauses the cleaning of partitions. If a broker has just started, another thread may have
# ended that pause when the task ends it.
RETENTION_RACE = "cannot be resumed since it is not paused"
REPAIRS = re.compile(
    r"recovering unflushed|rebuil|truncat|corrupt|orphan|swap|stray|offline|could not find|"
    r"not found|no clean shutdown|found file|deleting|uncleanable|unclean",
    re.IGNORECASE,
)
NO_REPAIRS = (
    "clean shutdown file was found",
    "Reloading from producer snapshot and rebuilding producer state",
    "due to log start offset",  # with `compact,delete`, the cleaner also deletes segments
)

State = dict[bytes | None, bytes]


def start_client() -> BrokerClient:
    """Start Kafka's clients. Without Kafka, skip the test with the reason, or fail if KEYTAIL_NO_SKIP=1."""
    try:
        return BrokerClient()
    except KafkaUnavailable as reason:
        if os.environ.get("KEYTAIL_NO_SKIP") == "1":
            pytest.fail(f"KEYTAIL_NO_SKIP=1, and there is no broker to start: {reason}")
        pytest.skip(f"no broker to start: {reason}")


def keytail(name: str, *arguments: str | Path, ends_with: Collection[int] = (0, 3)) -> list[dict[str, Any]]:
    """Run the command as a user does, check that its exit status is in `ends_with`, and return its rows."""
    command = [str(KEYTAIL), name, *map(str, arguments), "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in ends_with, f"status {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-1500:]}"
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def complaints(lines: Iterable[LogLine]) -> list[LogLine]:
    return [
        line
        for line in lines
        if line.level in ("WARN", "ERROR", "FATAL")
        and not NOT_ABOUT_LOGS.search(line.logger)
        and not any(known in line.text for known in HARMLESS)
        and RETENTION_RACE not in line.exception
    ]


def repairs(lines: Iterable[LogLine]) -> list[LogLine]:
    """Return messages about repairs of a log during loading, except the metadata log, which is recovered at each start.
    """
    return [
        line
        for line in lines
        if line.logger.rpartition(".")[2] in ("LogLoader", "LogManager", "UnifiedLog")
        and "__cluster_metadata" not in line.text
        and not any(normal in line.text for normal in NO_REPAIRS)
        and REPAIRS.search(line.text)
    ]


def state_of(records: Iterable[Served]) -> dict[int, State]:
    """Return, by partition, the latest value of each key, without tombstones."""
    tables: dict[int, State] = defaultdict(dict)
    for record in records:
        if record.value is None:
            tables[record.partition].pop(record.key, None)
        else:
            tables[record.partition][record.key] = record.value
    return tables


def latest_by_key(records: Iterable[Served]) -> dict[tuple[int, bytes | None], Served]:
    return {(record.partition, record.key): record for record in records}


def roll_segment(
    broker: Broker,
    client: BrokerClient,
    partition: tuple[str, int],
    first_ms: int,
    records: Sequence[tuple[bytes, bytes | None]],
) -> None:
    """Produce batches, each later than the one before, until the partition has a new active segment: a broker applies
    the setting segment.ms=1 after the controller has reported the change.
    """
    folder = broker.log_dirs[0] / "{}-{}".format(*partition)
    before, give_up, at_ms = _active_base_offset(folder), time.monotonic() + 300, first_ms
    while _active_base_offset(folder) == before:
        assert time.monotonic() < give_up, f"{folder.name} has no new segment"
        client.produce("roll", *partition, [(at_ms, key, value) for key, value in records])
        at_ms += 1000


def _active_base_offset(folder: Path) -> int:
    return max(int(path.stem) for path in folder.glob("*.log"))
