"""Measures the time until the first line, the first result and the end of a command (`python -m tests.bench.start`).
On ten small partitions, a run without Spark, a run with it, and a dry run alternate, after one run of each to warm up.
Also measures `--version`, `--help` and a plan. `processor` is the CPU time of the command and all its children.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.log_dirs import random_records, write_log_dir

KEYTAIL = Path(sys.executable).with_name("keytail")
FLAGS = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact", "--output", "json")
STRATEGIES = {
    "without Spark": ("--execute",),
    "--master local[2]": ("--execute", "--master", "local[2]"),
    "dry run": (),
}


SHORT = {
    "--version": ("--version",),
    "--help": ("--help",),
    "compact --help": ("compact", "--help"),
    "plan": ("plan", *FLAGS),
}


def short(log_dir: Path, arguments: tuple[str, ...]) -> tuple[float, float]:
    """Run a command, and return its seconds and its CPU seconds."""
    more = ("--log-dirs", str(log_dir)) if "plan" in arguments else ()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start_s = time.perf_counter()
    subprocess.run([str(KEYTAIL), *arguments, *more], capture_output=True, check=True)
    end_s = time.perf_counter() - start_s
    return end_s, _processor_s(before)


def _processor_s(before: resource.struct_rusage) -> float:
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def turn(source: Path, work: Path, more: tuple[str, ...]) -> tuple[float, float, float, float]:
    """Run a compaction; return the seconds until the first line, the first result and the end, and the CPU seconds."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(source, work)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start_s = time.perf_counter()
    command = [str(KEYTAIL), "compact", "--log-dirs", str(work), *FLAGS, *more]
    first = result = 0.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        for line in run.stderr:
            now_s = time.perf_counter() - start_s
            first = first or now_s
            if "[1/" in line:
                result = now_s
    end = time.perf_counter() - start_s
    assert run.returncode == 0
    return first, result, end, _processor_s(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory(prefix="keytail-start-") as home:
        source = write_log_dir(
            Path(home) / "source", {f"orders-{n}": random_records(n, 2000) for n in range(10)}
        )
        found: dict[str, list[tuple[float, float, float, float]]] = {strategy: [] for strategy in STRATEGIES}
        found_short: dict[str, list[tuple[float, float]]] = {name: [] for name in SHORT}
        for number in range(runs + 1):
            for name, arguments in SHORT.items():
                took = short(source, arguments)
                if number:
                    found_short[name].append(took)
            for strategy, more in STRATEGIES.items():
                figures = turn(source, Path(home) / "work", more)
                if number:
                    found[strategy].append(figures)
    print(f"{'median seconds of ' + str(runs):20}  first line  first result  end  processor")
    for strategy, turns in found.items():
        first, result, end, processor = (statistics.median(column) for column in zip(*turns, strict=True))
        print(f"{strategy:20}  {first:10.2f}  {result or float('nan'):12.2f}  {end:.2f}  {processor:9.2f}")
    for name, ends in found_short.items():
        end, processor = (statistics.median(column) for column in zip(*ends, strict=True))
        print(f"{name:20}  {'':10}  {'':12}  {end:.2f}  {processor:9.2f}")


if __name__ == "__main__":
    main()
