"""Measures `audit` of two equal replicas, and of two of which one is compacted. `python -m tests.bench.audit [--records
N] [--cores N]`.

Runs in one warm Spark session. Prints records per second and MB/s of both replicas together, and CPU seconds, including
the JVM and its workers. A run fails if the result is wrong: a difference is found, or an inserted one is not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from keytail.audit import driver as story
from keytail.compact.cleaner import clean_partition, install
from keytail.log.fs import LOCAL
from keytail.run.spark.engine import SparkEngine
from keytail.run.spark.session import local_session
from tests.bench.report import machine
from tests.compact.fan_out.test_memory import BATCH_RECORDS, task_of, write_segments

VALUE_BYTES = 91
SEGMENTS = 4


def generate(home: Path, records: int, keys: int) -> None:
    """Write the replicas: `a`, its copy `b`, and its compacted copy `c`."""
    log, facts = write_segments(home / "a" / "t-0", SEGMENTS, records // BATCH_RECORDS // SEGMENTS, keys,
                                value_bytes=VALUE_BYTES)  # fmt: skip
    for name in ("b", "c"):
        shutil.copytree(home / "a", home / name)
    task = task_of(home / "c" / "t-0", log, facts, map_memory_bytes=1 << 30)
    install(LOCAL, task, clean_partition(LOCAL, task))
    for name in ("a", "b", "c"):
        end = task.first_uncleanable_offset
        (home / name / "cleaner-offset-checkpoint").write_text(f"0\n1\nt 0 {end}\n" if name == "c" else "0\n0\n")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all its children, including running ones."""
    total, ticks = 0.0, os.sysconf("SC_CLK_TCK")
    own = {os.getpid()}
    for _ in range(4):
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) in own:
                own.add(int(stat.parent.name))
    for pid in own:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / ticks
    return total


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.audit", description=__doc__)
    parser.add_argument("--records", type=int, default=5_000_000, metavar="N", help="of each replica")
    parser.add_argument("--keys", type=int, default=500_000, metavar="N")
    parser.add_argument("--cores", type=int, default=2, metavar="N")
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="keytail-bench-") as folder:
        home = Path(folder)
        generate(home, options.records, options.keys)
        spark = local_session(f"local[{options.cores}]", "audit benchmark")
        real: Any = story.workers_of_run
        story.workers_of_run = lambda *_, **__: SparkEngine(spark)
        wrong = 0
        try:
            cases: list[tuple[str, tuple[str, str]]] = [("alike", ("a", "b")), ("one compacted", ("a", "c"))]
            figures: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in cases}
            rows: dict[str, Any] = {}
            for _ in range(options.runs + 1):
                for name, pair in cases:
                    started, cpu = time.perf_counter(), cpu_seconds()
                    [rows[name]] = story.audit(story.Request(tuple(str(home / item) for item in pair)))
                    figures[name].append((time.perf_counter() - started, cpu_seconds() - cpu))
                    wrong += rows[name].status != "alike"
        finally:
            story.workers_of_run = real
            spark.stop()
    for name, fact in machine().items():
        print(f"{name}: {fact}")
    print(f"{options.records} records a replica, {options.keys} keys, {options.cores} cores")
    for name, seconds in figures.items():
        records = sum(replica["records"] for replica in rows[name].replicas)
        size = sum(replica["bytes"] for replica in rows[name].replicas)
        took, cpu = min(seconds[1:])  # the first run is a warm-up
        explained = ", ".join(f"{count:,} {reason}" for reason, count in rows[name].explained.items())
        print(
            f"{name:<14} {records / took / 1e6:5.2f} million records/s  {size / took / 1e6:5.0f} MB/s  {took:5.2f} s "
            f"(cpu {cpu:5.2f} s)  {explained}"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
