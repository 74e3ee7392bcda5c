"""One partition cleaned on one core, with one thread, and on all cores, with as many threads: `python -m
tests.bench.cores`.

Both sides clean fresh copies of the same log in turns, in one warm process, and must leave the same bytes. With one
thread, the process is limited to one core: another thread prefetches. With `--kafka`, Kafka's Cleaner takes turns, too.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.copies import differences, fresh_copy
from tests.bench.report import Figure, machine, medians
from tests.bench.run import Bench
from tests.bench.shapes import SHAPES

GB = 10**9
PHASES = ("check", "map", "write", "prove", "replace")


class Sides:
    """The log of one shape, and the figures of both sides."""

    def __init__(self, home: Path, name: str, log_bytes: int, seed: int) -> None:
        self.name, self.home = name, home
        self.bench = Bench(home, replace(SHAPES[name], records=1000, seed=seed), command=False)
        self.bench.generate()
        records = int(log_bytes / (self.bench.log_bytes / 1000))
        self.bench.close()
        shutil.rmtree(home)
        self.bench = Bench(home, replace(SHAPES[name], records=records, seed=seed), command=False)
        self.bench.generate()
        self.one, self.all = Figure("one core"), Figure("all cores")
        self.differences: list[str] = []

    def play(self, threads: int, *, kafka: bool) -> None:
        if kafka:
            self.bench._kafka(fresh_copy(self.bench.source, self.home / "kafka"))
        for figure, cores in ((self.one, 1), (self.all, threads)):
            log_dir = fresh_copy(self.bench.source, self.home / figure.name)
            settings = {**self.bench.shape.task_settings, "threads": cores, "cores": cores}
            answer = self.bench.worker.ask("task", log_dir, **settings)
            figure.seconds.append(answer["seconds"])
            figure.cpu_seconds.append(answer["cpu_seconds"])
            figure.phases.append(answer["phases"])
        one, every = (self.bench._partition(self.home / figure.name) for figure in (self.one, self.all))
        self.differences += differences(one, every, compressed=False)

    def forget(self) -> None:
        for figure in (self.one, self.all, self.bench.base):
            figure.forget()

    def close(self) -> None:
        self.bench.close()
        shutil.rmtree(self.home, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    for fact, text in machine().items():
        print(f"{fact}: {text}")
    flags = [f"--shapes={','.join(options.shapes)}", f"--bytes={options.bytes}", f"--threads={options.threads}"]
    flags += [f"--runs={options.runs}", f"--seed={options.seed}", *(["--kafka"] if options.kafka else [])]
    print("command:", shlex.join([sys.executable, "-m", "tests.bench.cores", *flags]))
    print(f"\n{HEAD}\n{'-' * len(HEAD)}")
    status = 0
    for name in options.shapes:
        home = Path(tempfile.mkdtemp(prefix="keytail-bench-", dir=options.dir))
        sides = Sides(home / "log", name, options.bytes, options.seed)
        try:
            sides.play(options.threads, kafka=options.kafka)
            sides.forget()
            for _ in range(options.runs):
                sides.play(options.threads, kafka=options.kafka)
            kafka_s = sides.bench.base.median_s if options.kafka else None
            print(row(name, sides.bench.log_bytes, sides.one, sides.all, kafka_s), flush=True)
            for line in sides.differences:
                status = 1
                print(f"{name} DIFFERS: {line}")
        finally:
            sides.close()
            shutil.rmtree(home, ignore_errors=True)
    return status


HEAD = (
    f"{'shape':9}{'MB':>6}{'one core s':>12}{'cpu s':>7}{'all cores s':>13}{'cpu s':>7}{'elapsed':>9}{'cpu':>6}"
    f"{'Kafka s':>9}  elapsed seconds of each phase"
)


def row(name: str, log_bytes: int, one: Figure, every: Figure, kafka_s: float | None) -> str:
    """Return the medians of both sides, their ratios, and the seconds of each phase."""
    cpu_s = [sorted(figure.cpu_seconds)[len(figure.cpu_seconds) // 2] for figure in (one, every)]
    before, after = medians(one.phases), medians(every.phases)
    phases = ", ".join(f"{phase} {before[phase]:.2f} to {after[phase]:.2f}" for phase in PHASES if phase in before)
    kafka = "" if kafka_s is None else f"{kafka_s:.2f}"
    return (
        f"{name:9}{log_bytes / 1e6:>6.0f}{one.median_s:>12.2f}{cpu_s[0]:>7.2f}{every.median_s:>13.2f}{cpu_s[1]:>7.2f}"
        f"{every.median_s / one.median_s:>9.2f}{cpu_s[1] / cpu_s[0]:>6.2f}{kafka:>9}  {phases}"
    )


def _options(arguments: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.cores", description=__doc__)
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=["none", "zstd", "tiny"])
    parser.add_argument("--bytes", type=int, default=GB, metavar="N", help="of each log")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--kafka", action="store_true", help="run Kafka's Cleaner in turns with both sides")
    parser.add_argument("--dir", type=Path, help="folder for the logs (three times the size of one)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
