"""Compares fan-out of one partition, in warm Spark sessions of one core and of two, with one task with enough memory
for all keys. `python -m tests.bench.fan_out` prints the seconds of each stage, the ratio of two cores to one, the
start-up time of a session, and the number of cores from which fan-out is faster than one task. No result is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from keytail.compact.cleaner import clean_partition
from keytail.compact.fan_out.on_spark import fan_out_on_spark
from keytail.log.fs import LOCAL
from keytail.run.spark.engine import SparkEngine
from keytail.run.spark.session import end_jvm, local_session
from tests.bench.report import machine
from tests.compact.fan_out.test_memory import BATCH_RECORDS, task_of, write_segments

VALUE_BYTES = 91
SEGMENTS = 16
ONE_TASK_MAP_BYTES = 2 << 30


def one_task(payload: Any, attempt: str) -> Any:
    return clean_partition(LOCAL, replace(payload, attempt=attempt, map_memory_bytes=ONE_TASK_MAP_BYTES))


def generate(home: Path, records: int) -> None:
    """Write the log unless it exists: records of 117 bytes, almost all with distinct keys."""
    if not (home / "facts").exists():
        batches = records // BATCH_RECORDS // SEGMENTS
        made = write_segments(home / "t-0", SEGMENTS, batches, 2**40, value_bytes=VALUE_BYTES)
        (home / "facts").write_bytes(pickle.dumps(made))


def stage(home: str, cores: int, budget_bytes: int) -> dict[str, Any]:
    """Run each strategy twice on a small log to warm up, and once measured, in a session of this process. The process
    is pinned to `cores` cores: the JVM, and threads that prefetch and hash, would use a second core in a session of
    one.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    path = Path(home) / "t-0"
    log, facts = pickle.loads((Path(home) / "facts").read_bytes())
    task = task_of(path, log, facts, grouping="kafka", config={"segment_bytes": 256 << 20})
    task = replace(task, run_id="bench", map_memory_bytes=budget_bytes)
    small = Path(home) / f"small-{cores}"
    few, small_facts = write_segments(small, 2 * cores, 300, 2**40)
    warm = replace(task_of(small, few, small_facts), run_id="bench", map_memory_bytes=budget_bytes)
    started = time.perf_counter()
    spark = local_session(f"local[{cores}]")
    engine = SparkEngine(spark)
    start_s = time.perf_counter() - started
    try:
        for _ in range(2):
            assert fan_out_on_spark(engine, warm).problem is None
            engine.run_bundle([warm] * cores, one_task)
        started = time.perf_counter()
        outcome = fan_out_on_spark(engine, task, on_trace=print)
        fan_out_s = time.perf_counter() - started
        assert outcome.problem is None and outcome.value is not None, outcome.problem
        remove_scratch(path)
        started = time.perf_counter()
        [alone] = engine.run_bundle([task], one_task)
        one_task_s = time.perf_counter() - started
        assert alone.problem is None and alone.value is not None, alone.problem
        assert replace(alone.value, groups=(), phases_s={}) == replace(outcome.value, groups=(), phases_s={})
    finally:
        spark.stop()
        end_jvm()
        remove_scratch(path)
        shutil.rmtree(small)
    size = sum(segment.log_bytes for segment in facts)
    return {
        "start_s": start_s,
        "fan_out_s": fan_out_s,
        "one_task_s": one_task_s,
        "phases_s": outcome.value.phases_s,
        "keys": outcome.value.keys,
        "bytes": size,
    }


def remove_scratch(path: Path) -> None:
    for file in path.glob("*.clean"):
        file.unlink()


def measured(home: Path, cores: int, budget_bytes: int) -> dict[str, Any]:
    request = json.dumps({"home": str(home), "cores": cores, "budget_bytes": budget_bytes})
    command = [sys.executable, "-m", "tests.bench.fan_out", "--stage", request]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def report(one: dict[str, Any], two: dict[str, Any], budget_bytes: int) -> str:
    where = ", ".join(f"{name} {value}" for name, value in machine().items() if name in ("cpu", "cores", "system"))
    lines = [
        f"{one['keys']:,} keys in {one['bytes'] / 1e6:,.0f} MB, {budget_bytes / 2**20:.0f} MiB map per task; {where}",
        f"{'stage':12}{'local[1]':>10}{'local[2]':>10}{'ratio':>8}",
    ]
    for name in one["phases_s"]:
        a, b = one["phases_s"][name], two["phases_s"][name]
        lines.append(f"{name:12}{a:9.2f}s{b:9.2f}s{b / a if a else 0:8.2f}")
    a, b = one["fan_out_s"], two["fan_out_s"]
    lines.append(f"{'all':12}{a:9.2f}s{b:9.2f}s{b / a:8.2f}")
    lines.append(f"start of the session: {one['start_s']:.1f} s, {two['start_s']:.1f} s")
    alone = min(one["one_task_s"], two["one_task_s"])
    lines.append(f"one task with room for all keys: {alone:.2f} s; a fan-out on one core: {a / alone:.1f} times that")
    # By Amdahl's law: the parallel part of the CPU seconds, and the number of cores at which both strategies take the
    # same time.
    divided = 2 * (a - b)
    serial = a - divided
    even = divided / (alone - serial) if alone > serial else float("inf")
    lines.append(f"break-even: {even:.1f} cores" if even != float("inf") else "break-even: none at this size")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=16_000_000)
    parser.add_argument("--budget-mib", type=int, default=32)
    parser.add_argument("--dir", default="/dev/shm" if Path("/dev/shm").is_dir() else None)
    parser.add_argument("--keep", help="directory in which the log is kept, and used again by the next run")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stage:
        print(json.dumps(stage(**json.loads(given.stage))))
        return
    with contextlib.ExitStack() as run:
        home = Path(given.keep or run.enter_context(tempfile.TemporaryDirectory(dir=given.dir)))
        home.mkdir(exist_ok=True)
        generate(home, given.records)
        one, two = (measured(home, cores, given.budget_mib << 20) for cores in (1, 2))
    print(report(one, two, given.budget_mib << 20))


if __name__ == "__main__":
    main()
