"""Measures how long a broker is down for a restart, for a whole compaction, and for the commit of a prepared one.

    .venv/bin/python -m tests.bench.downtime
    .venv/bin/python -m tests.bench.downtime --partitions 10 --megabytes 50

A real broker serves partitions of one topic (50 with 200 MB each, by default), is stopped, and started again. The time
is from the signal that stops it until it serves all partitions. Requires four times the disk space of the logs, Java,
and Kafka from Maven Central.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient, ClientError
from tests.interop.kafka import Kafka

KEYTAIL = Path(sys.executable).with_name("keytail")
TOPIC = "changelog"
RECORD_BYTES = 117
START_LIMIT_S = 600.0


@dataclass(frozen=True)
class Case:
    """A row of the table: the flags of the run before and of the run after the broker is stopped, or None."""

    name: str
    before: tuple[str, ...] | None
    stopped: tuple[str, ...] | None


CASES = (
    Case("plain restart", None, None),
    Case("compact in one go", None, ("--execute",)),
    Case("prepare, then commit", ("--prepare",), ("--execute", "--prepared-only")),
)


def timed(action: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


class Bench:
    """A broker on `root`/logs, which is a new copy of `root`/source in each case."""

    def __init__(self, root: Path, partitions: int, megabytes: int) -> None:
        self._source, self._logs = root / "source", root / "logs"
        self._partitions = [(TOPIC, number) for number in range(partitions)]
        self._broker = Broker(self._logs, root / "work", properties={"log.cleaner.enable": "false"}, heap="1g")
        self._config = str(root / "work" / "server.properties")
        self._client = BrokerClient()
        self._generate(root / "one" / f"{TOPIC}-0", megabytes * 1_000_000 // RECORD_BYTES)

    def _generate(self, one: Path, records: int) -> None:
        """Write one log with Kafka's classes, and copy it into each partition of a stopped broker."""
        settings = {"segment.bytes": str(64 << 20), "cleanup.policy": "compact"}
        with self._broker:
            self._client.connect(self._broker)
            self._client.create_topic(TOPIC, len(self._partitions), settings)
        kafka = Kafka(heap="2g")
        try:
            clock_ms = time.time_ns() // 1_000_000 - 86_400_000
            opened = kafka.bench_generate(
                one, records=records, keys=records // 10, clock_ms=clock_ms, configs={"segment.bytes": 64 << 20}
            )
            ends = {f"{topic}-{number}": opened.log_end_offset for topic, number in self._partitions}
            for name in ("replication-offset-checkpoint", "recovery-point-offset-checkpoint"):
                kafka.write_checkpoint(self._logs / name, ends)
        finally:
            kafka.close()
        for topic, number in self._partitions:
            partition = self._logs / f"{topic}-{number}"
            for path in partition.glob("0*"):
                path.unlink()
            shutil.copytree(one, partition, dirs_exist_ok=True, ignore=shutil.ignore_patterns("partition.metadata"))
        self._logs.rename(self._source)

    def run(self, case: Case) -> dict[str, float]:
        """Run a case, and return the seconds of each part and of the downtime, `down`."""
        shutil.copytree(self._source, self._logs)
        subprocess.run(["sync"], check=True)
        times = dict.fromkeys(("prepare", "stop", "compact", "start"), 0.0)
        try:
            self._start()
            if case.before is not None:
                flags = case.before
                times["prepare"] = timed(lambda: self._keytail(*flags))
            start_s = time.perf_counter()
            times["stop"] = timed(self._broker.stop)
            if case.stopped is not None:
                flags = case.stopped
                times["compact"] = timed(lambda: self._keytail(*flags))
            times["start"] = timed(self._start)
            times["down"] = time.perf_counter() - start_s
            self._broker.stop()
            return times
        finally:
            self._broker.kill()
            shutil.rmtree(self._logs)

    def _start(self) -> None:
        """Start the broker, and return when it serves all partitions."""
        self._broker.start()
        self._client.connect(self._broker)
        give_up = time.monotonic() + START_LIMIT_S
        while True:
            try:
                self._client.offsets(self._partitions)
                return
            except ClientError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)

    def _keytail(self, *flags: str) -> None:
        command = [str(KEYTAIL), "compact", "--config", self._config, "--topic-list", TOPIC, *flags]
        done = subprocess.run([*command, "--quiet", "--output", "json"], check=True, capture_output=True, text=True)
        statuses = {row["status"] for row in json.loads(done.stdout)}
        assert statuses <= {"prepared", "compacted"}, statuses

    def close(self) -> None:
        self._client.close()
        self._broker.kill()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=50)
    parser.add_argument("--megabytes", type=int, default=200, help="size of each partition (default: 200)")
    parser.add_argument("--directory", help="directory for the logs (default: the temporary directory)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="keytail-downtime-", dir=options.directory) as folder:
        bench = Bench(Path(folder), options.partitions, options.megabytes)
        try:
            print(f"{options.partitions} partitions of {options.megabytes} MB, seconds")
            print(f"{'':22}{'prepare':>9}{'stop':>8}{'compact':>9}{'start':>8}{'down':>8}")
            for case in CASES:
                found = bench.run(case)
                columns = (f"{found[name]:{width}.1f}" for name, width in (
                    ("prepare", 9), ("stop", 8), ("compact", 9), ("start", 8), ("down", 8),
                ))  # fmt: skip
                print(f"{case.name:22}{''.join(columns)}", flush=True)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
