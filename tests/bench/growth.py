"""Measures how the cost of a compaction grows with records, keys, segments, partitions, cores, and keys that do not fit
into the map, and how the driver's work grows with the checkpoint of a log dir.

`python -m tests.bench.growth --json FILE` measures all curves, `--curves records,keys` some; other curves in the file
are kept. `growth_report.py` draws them; `make bench-report` does both. Kafka's own Cleaner and keytail alternate on
copies of the same logs. All sides are warm, and logs are in the page cache (`copies.py`). No result is compared.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keytail.log.checkpoint import update_offset, write_offsets
from keytail.log.fs import LOCAL
from tests.bench.growth_sides import Sides
from tests.bench.report import machine
from tests.bench.run import TOPIC, Shape

KAFKA, TASK = "Kafka's Cleaner", "keytail, one task"
KAFKA_SMALL, TASK_SMALL = "Kafka, small map", "keytail, small map"
SMALL_MAP_BYTES = 32 << 20
KAFKA_SLOT_BYTES, KAFKA_LOAD = 24, 0.9
WARM = Shape(records=300_000, keys=30_000)


@dataclass(frozen=True)
class Sizes:
    """The x values of the curves. `full` takes about ten minutes on two idle cores."""

    records: tuple[int, ...]
    keys: tuple[int, ...]
    segments: tuple[int, ...]
    partitions: tuple[int, ...]
    unique_keys: tuple[int, ...]
    entries: tuple[int, ...]
    fixed_records: int  # the number of records in the logs of the other curves
    core_partitions: int
    core_records: int

    def scaled(self, scale: float) -> Sizes:
        """Return the sizes with multiplied records and keys."""
        many = {name: tuple(max(1, int(n * scale)) for n in getattr(self, name))
                for name in ("records", "keys", "unique_keys")}  # fmt: skip
        item = {name: max(1, int(getattr(self, name) * scale)) for name in ("fixed_records", "core_records")}
        return replace(self, **many, **item)


FULL = Sizes(
    records=(125_000, 250_000, 500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000),
    keys=(1_000, 10_000, 100_000, 500_000, 2_000_000, 50_000_000),
    segments=(1, 4, 16, 64, 256, 1024),
    partitions=(1, 4, 16, 64, 256),
    unique_keys=(500_000, 1_000_000, 2_000_000, 3_000_000, 5_000_000),
    entries=(100, 1_000, 4_000, 10_000, 40_000),
    fixed_records=2_000_000,
    core_partitions=16,
    core_records=1_000_000,
)
QUICK = Sizes(
    records=(5_000, 10_000, 20_000),
    keys=(100, 10_000),
    segments=(1, 8),
    partitions=(1, 4),
    unique_keys=(10_000, 20_000),
    entries=(10, 100),
    fixed_records=10_000,
    core_partitions=2,
    core_records=5_000,
)


@dataclass
class Growth:
    """Measures the curves. Each method returns the points of one curve, with the runs of all sides."""

    sides: Sides
    sizes: Sizes
    seed: int
    runs: int
    small_map_bytes: int = SMALL_MAP_BYTES

    # The curves

    def over_records(self) -> list[dict[str, Any]]:
        return [self._point(n, Shape(records=n, keys=max(1, n // 10), seed=self.seed)) for n in self.sizes.records]

    def over_keys(self) -> list[dict[str, Any]]:
        return [
            self._point(n, Shape(records=self.sizes.fixed_records, keys=n, seed=self.seed)) for n in self.sizes.keys
        ]

    def over_segments(self) -> list[dict[str, Any]]:
        records = self.sizes.fixed_records
        points = []
        for n in self.sizes.segments:
            shape = Shape(records=records, keys=records // 10, segment_bytes=int(records * 117.2 / n), seed=self.seed)
            points.append(self._point(n, replace(shape, segment_bytes=max(shape.segment_bytes, 14_000))))
        return points

    def over_partitions(self) -> list[dict[str, Any]]:
        """Measure the same records in more and more partitions, compacted on Spark with one core and with all."""
        points, shapes = [], []
        for n in self.sizes.partitions:
            records = self.sizes.fixed_records // n
            shape = Shape(records=records, keys=max(1, records // 10), seed=self.seed)
            point = self._many(n, shape, n)
            for _ in range(self.runs):
                self._add(point, KAFKA, *self.sides.run_kafka(shape, self.sides.copies("kafka", n)))
            points.append(point)
            shapes.append((shape, n))
        for cores in sorted({1, os.cpu_count() or 1}):
            self._on_spark(points, cores, shapes, f"keytail on local[{cores}]")
        return points

    def over_cores(self) -> list[dict[str, Any]]:
        counts = sorted({1, *(2**i for i in range(10) if 2**i < (os.cpu_count() or 1)), os.cpu_count() or 1})
        points = []
        for count in counts:
            shape = Shape(records=self.sizes.core_records, keys=self.sizes.core_records // 10, seed=self.seed)
            point = self._many(count, shape, self.sizes.core_partitions)
            self._on_spark([point], count, [(shape, self.sizes.core_partitions)], "keytail on Spark")
            points.append(point)
        return points

    def over_unique_keys(self) -> list[dict[str, Any]]:
        """Measure records with almost only distinct keys. Each side runs with a map for all keys, and in several rounds
        with a small map.
        """
        entries = int(self.small_map_bytes // KAFKA_SLOT_BYTES * KAFKA_LOAD)
        points = []
        for n in self.sizes.unique_keys:
            shape = Shape(records=n, keys=n * 25, seed=self.seed)
            point = self._point(n, shape)
            for _ in range(self.runs):
                self._add(point, KAFKA_SMALL, *self.sides.kafka_in_rounds(shape, entries))
                self._add(point, TASK_SMALL, *self.sides.task_in_rounds(shape, self.small_map_bytes))
            points.append(point)
        return points

    def over_entries(self) -> list[dict[str, Any]]:
        """Measure how long the driver takes to set an entry in a cleaner checkpoint, as it does for each partition."""
        path = self.sides.home / "cleaner-offset-checkpoint"
        points = []
        for n in self.sizes.entries:
            hosted = {(TOPIC, number) for number in range(n)}
            write_offsets(LOCAL, str(path), dict.fromkeys(hosted, 0))
            point: dict[str, Any] = {"x": n, "records": 0, "log_bytes": path.stat().st_size, "segments": 0, "sides": {}}
            for number in range(5 * self.runs):
                started = time.perf_counter()
                update_offset(LOCAL, str(path), (TOPIC, number % n), number, hosted=hosted)
                self._add(point, "keytail's driver", time.perf_counter() - started, {})
            points.append(point)
        return points

    # Points of the curves

    def _point(self, x: float, shape: Shape) -> dict[str, Any]:
        self.sides.generate(shape)
        point = self._new(x, shape.records, 1)
        for _ in range(self.runs):
            self._add(point, KAFKA, *self.sides.run_kafka(shape, [self.sides.fresh("kafka")]))
            self._add(point, TASK, *self.sides.run_task(shape))
        return point

    def _many(self, x: float, shape: Shape, partitions: int) -> dict[str, Any]:
        self.sides.generate(shape)
        return self._new(x, shape.records * partitions, partitions)

    def _new(self, x: float, records: int, partitions: int) -> dict[str, Any]:
        logs = list(self.sides.source.glob("*/*.log"))
        log_bytes = sum(log.stat().st_size for log in logs) * partitions
        found = {"x": x, "records": records, "log_bytes": log_bytes, "segments": len(logs) - 1, "sides": {}}
        print(f"  {x:,}: {log_bytes / 1e6:,.0f} MB", file=sys.stderr, flush=True)
        return found

    @staticmethod
    def _add(point: dict[str, Any], side: str, seconds: float, more: dict[str, float]) -> None:
        of_side = point["sides"].setdefault(side, {"seconds": []})
        of_side["seconds"].append(seconds)
        for name, value in more.items():
            of_side.setdefault(name, []).append(value)

    def _on_spark(self, points: list[dict[str, Any]], cores: int, shapes: list[tuple[Shape, int]], side: str) -> None:
        turns = self.sides.run_on_spark(cores, shapes * self.runs)
        for number, (seconds, more) in enumerate(turns):
            self._add(points[number % len(points)], side, seconds, more)


CURVES: dict[str, tuple[str, str, Callable[[Growth], list[dict[str, Any]]]]] = {
    "records": ("Records in one partition", "records", Growth.over_records),
    "keys": ("Keys among the same records", "keys that records are drawn from", Growth.over_keys),
    "segments": ("Segments of the same records", "segments", Growth.over_segments),
    "partitions": ("Partitions of the same records", "partitions", Growth.over_partitions),
    "cores": ("Cores for the same partitions", "cores", Growth.over_cores),
    "checkpoint": ("Entries of a checkpoint", "entries", Growth.over_entries),
    "unique": ("Keys beyond the map", "records, nearly each with a key of its own", Growth.over_unique_keys),
}


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    flags = [f"--curves={','.join(options.curves)}", f"--runs={options.runs}", f"--seed={options.seed}"]
    flags += [f"--scale={options.scale}"] if options.scale != 1 else []
    command = shlex.join(["python", "-m", "tests.bench.growth", *flags, *(["--quick"] if options.quick else [])])
    found: dict[str, Any] = {"curves": {}}
    if options.json.exists():
        found = json.loads(options.json.read_text())
    home = Path(tempfile.mkdtemp(prefix="keytail-growth-", dir=options.dir))
    sizes, small = (QUICK, 1 << 18) if options.quick else (FULL, SMALL_MAP_BYTES)
    sizes, small = sizes.scaled(options.scale), int(small * options.scale)
    sides = Sides(home)
    growth = Growth(sides, sizes, options.seed, options.runs, small)
    try:
        sides.warm(replace(WARM, records=min(WARM.records, sizes.fixed_records), seed=options.seed))
        for name in options.curves:
            title, x, measure = CURVES[name]
            print(f"{title}:", file=sys.stderr, flush=True)
            before, started_s = machine(), time.monotonic()
            points = measure(growth)
            found["curves"][name] = {
                "title": title,
                "x": x,
                "points": points,
                "machine": before,
                "load_at_end": f"{os.getloadavg()[0]:.1f}",
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
                "command": command,
                "seed": options.seed,
                "runs": options.runs,
                "took_s": round(time.monotonic() - started_s, 1),
            }
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        sides.close()
        shutil.rmtree(home)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.growth", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="figures; keeps other curves")
    parser.add_argument("--curves", type=_curves, default=list(CURVES), metavar="A,B", help=", ".join(CURVES))
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="runs of each side at each point")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), metavar="N")
    parser.add_argument("--dir", type=Path, help="directory for logs and copies (up to 4 GB)")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="factor for records, keys and map")
    parser.add_argument("--quick", action="store_true", help="tiny logs, for a test: figures are not meaningful")
    return parser.parse_args(arguments)


def _curves(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(CURVES):
        raise argparse.ArgumentTypeError(f"no curve {', '.join(sorted(unknown))}; there are {', '.join(CURVES)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
