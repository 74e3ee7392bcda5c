"""Prints a table over logs of many shapes: Kafka's Cleaner, keytail's whole task, and the lower limit of the work.
`python -m tests.bench.shapes` measures all shapes; with `--shapes zstd,tiny --scale 0.1`, some smaller ones. A run
fails if the results of both sides differ. `tests/bench/README.md` describes the columns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.bench import limits
from tests.bench.report import machine, medians
from tests.bench.run import Bench, Shape

_COMPRESSED = Shape(records=2_000_000, keys=200_000, segment_bytes=64 << 20)

SHAPES = {
    "none": Shape(),
    "gzip": replace(_COMPRESSED, codec="gzip"),
    "snappy": replace(_COMPRESSED, codec="snappy"),
    "lz4": replace(_COMPRESSED, codec="lz4"),
    "zstd": replace(_COMPRESSED, codec="zstd"),
    # as in `__consumer_offsets`: three million commits of one record
    "tiny": Shape(records=3_000_000, batch_records=1, keys=100_000),
    # drawn from 25 times as many keys, so that 98 % of the records have distinct ones
    "unique": Shape(records=3_000_000, keys=75_000_000),
    # a clean section ten times as large as the dirty one, whose records are drawn from a tenth of its keys
    "clean": Shape(records=5_500_000, clean_records=5_000_000, keys=500_000),
}
_PHASES = ("check", "map", "write", "prove", "replace")


@dataclass
class Row:
    """The figures of a shape, as medians in seconds; `spread_s` has the minimum and maximum of the task."""

    name: str
    log_bytes: int
    kafka_s: float
    kafka_cpu_s: float
    task_s: float
    spread_s: tuple[float, float]
    cpu_s: float
    alike_s: float
    kernels_s: float
    limit_s: float
    peak_bytes: int
    phases_s: dict[str, float]
    phase_limits_s: dict[str, float]
    limits_s: dict[str, float]
    differences: list[str]

    @classmethod
    def of(cls, name: str, bench: Bench) -> Row:
        parts, task = bench.limits(), bench.task
        return cls(
            name=name,
            log_bytes=bench.log_bytes,
            kafka_s=bench.base.median_s,
            kafka_cpu_s=statistics.median(bench.base.cpu_seconds),
            task_s=task.median_s,
            spread_s=(min(task.seconds), max(task.seconds)),
            cpu_s=statistics.median(task.cpu_seconds),
            alike_s=bench.alike.median_s,
            kernels_s=bench.kernels.median_s,
            limit_s=limits.of_task(parts),
            peak_bytes=max(peak for _, peak in bench.private),
            phases_s=medians(task.phases),
            phase_limits_s=limits.of_phases(parts),
            limits_s=parts,
            differences=bench.differences,
        )


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.one_core:  # both sides are started by this process, and alternate
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    started = machine()
    flags = [f"--shapes={','.join(options.shapes)}", f"--scale={options.scale}", f"--runs={options.runs}"]
    flags += [f"--seed={options.seed}", *(["--one-core"] if options.one_core else [])]
    print("command:", shlex.join([sys.executable, "-m", "tests.bench.shapes", *flags]), flush=True)
    rows = []
    for name in options.shapes:
        shape = scaled(SHAPES[name], options.scale, options.seed)
        rows.append(_measure(name, shape, options.runs, options.dir))
        print(f"{name}: {rows[-1].kafka_s:.2f} and {rows[-1].task_s:.2f} s", file=sys.stderr, flush=True)
    if options.json:
        report: dict[str, Any] = {"machine": started, "command": flags, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    for fact, text in started.items():
        print(f"{fact}: {text}")
    print(f"\n{table(rows)}\n\n{phase_table(rows)}")
    for row in rows:
        for line in row.differences:
            print(f"{row.name} DIFFERS FROM KAFKA'S: {line}")
    if not any(row.differences for row in rows):
        print("both left the same in every run of every shape")
    return 1 if any(row.differences for row in rows) else 0


def scaled(shape: Shape, scale: float, seed: int) -> Shape:
    """Return the shape with multiplied records, keys and segment bytes."""
    sizes = {
        name: max(1, int(getattr(shape, name) * scale)) if getattr(shape, name) else 0
        for name in ("records", "keys", "clean_records", "segment_bytes")
    }
    return replace(shape, **sizes, seed=seed)


def _measure(name: str, shape: Shape, runs: int, directory: Path | None) -> Row:
    home = Path(tempfile.mkdtemp(prefix="keytail-bench-", dir=directory))
    bench = Bench(home, shape, command=False)
    try:
        bench.generate()
        bench.warm()
        for _ in range(runs):
            bench.play()
        return Row.of(name, bench)
    finally:
        bench.close()
        shutil.rmtree(home)


def table(rows: list[Row]) -> str:
    head = (
        f"{'shape':9}{'MB':>6}{'Kafka s':>9}{'keytail s':>11}{'min..max s':>13}{'times Kafka':>13}{'as Kafka':>10}"
        f"{'kernels':>9}{'cpu s':>13}{'times':>7}{'limit s':>9}{'share':>7}{'peak MiB':>10}"
    )
    lines = [head, "-" * len(head)]
    for row in rows:
        spread = f"{row.spread_s[0]:.2f}..{row.spread_s[1]:.2f}"
        cpu = f"{row.kafka_cpu_s:.2f} / {row.cpu_s:.2f}"
        lines.append(
            f"{row.name:9}{row.log_bytes / 1e6:>6.0f}{row.kafka_s:>9.2f}{row.task_s:>11.3f}{spread:>13}"
            f"{row.kafka_s / row.task_s:>13.2f}{row.kafka_s / row.alike_s:>10.2f}{row.kafka_s / row.kernels_s:>9.2f}"
            f"{cpu:>13}{row.kafka_cpu_s / row.cpu_s:>7.2f}"
            f"{row.limit_s:>9.3f}{row.limit_s / row.task_s:>7.0%}{row.peak_bytes / 2**20:>10.0f}"
        )
    return "\n".join(lines)


def phase_table(rows: list[Row]) -> str:
    """Return a table of the seconds of each phase, with the ratio to its limit if it has one."""
    head = f"{'shape':9}" + "".join(f"{f'{name} s':>16}" for name in _PHASES) + "   limits, s"
    lines = [head, "-" * len(head)]
    for row in rows:
        cells = ""
        for name in _PHASES:
            seconds, limit_s = row.phases_s.get(name, 0.0), row.phase_limits_s.get(name)
            cells += f"{seconds:>9.3f}" + (f" ({seconds / limit_s:>4.1f})" if limit_s else " " * 7)
        parts = "  ".join(f"{name} {seconds:.3f}" for name, seconds in row.limits_s.items())
        lines.append(f"{row.name:9}{cells}   {parts}")
    return "\n".join(lines)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.shapes", description=__doc__)
    parser.add_argument("--shapes", type=_shapes, default=list(SHAPES), metavar="A,B", help=", ".join(SHAPES))
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="factor for the records of each shape")
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), metavar="N")
    parser.add_argument(
        "--one-core", action="store_true", help="run both sides, with all threads, on the same core"
    )
    parser.add_argument("--dir", type=Path, help="directory for the logs and their copies")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all figures, as JSON")
    return parser.parse_args(arguments)


def _shapes(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(SHAPES):
        raise argparse.ArgumentTypeError(f"no shape {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
