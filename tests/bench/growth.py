"""How the cost of a compaction grows: curves over records, keys, segments, partitions, cores, and keys beyond the map;
and one of the driver's part that grows with a log dir, its checkpoint.

`python -m tests.bench.growth --json FILE` measures all of them, `--curves records,keys` some; what the file has of the
others stays. `growth_report.py` draws it; `make bench-report` does both. Kafka's own Cleaner runs on copies of the same
logs, in turns. Every side is warm; logs are in the page cache (`copies.py`). Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keytail.log.checkpoint import update_offset, write_offsets
from keytail.log.fs import LOCAL
from tests.bench.copies import fresh_copy
from tests.bench.report import machine
from tests.bench.run import KAFKA_MAP_ENTRIES, MAP_BYTES_A_KEY, TOPIC, Shape
from tests.bench.worker import Worker
from tests.interop.kafka import Kafka

KAFKA, TASK = "Kafka's Cleaner", "keytail, one task"
KAFKA_SMALL, TASK_SMALL = "Kafka, small map", "keytail, small map"
SMALL_MAP_BYTES = 32 << 20
KAFKA_SLOT_BYTES, KAFKA_LOAD = 24, 0.9
WARM = Shape(records=300_000, keys=30_000)


@dataclass(frozen=True)
class Sizes:
    """What the curves go over. `full` takes about ten minutes on two quiet cores."""

    records: tuple[int, ...]
    keys: tuple[int, ...]
    segments: tuple[int, ...]
    partitions: tuple[int, ...]
    unique_keys: tuple[int, ...]
    entries: tuple[int, ...]
    fixed_records: int  # of the curves over something else
    core_partitions: int
    core_records: int


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
    """Both sides in processes that live through all points, and a log at a time in `home`."""

    home: Path
    sizes: Sizes
    seed: int
    runs: int
    small_map_bytes: int = SMALL_MAP_BYTES
    kafka: Kafka = field(default_factory=lambda: Kafka(heap="3g", compiler="full"))
    worker: Worker = field(default_factory=Worker)

    def close(self) -> None:
        self.kafka.close()
        self.worker.close()

    def warm(self) -> None:
        """Rounds that do not count: the JVM compiles what it will run, the worker loads its kernels."""
        shape = replace(WARM, records=min(WARM.records, self.sizes.fixed_records), seed=self.seed)
        self._generate(shape)
        for _ in range(3):
            self._kafka(shape, [self._fresh("kafka")])
            self._task(shape)

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
        """The same records in so many partitions; on Spark, with one core and with all."""
        points, cores = [], os.cpu_count() or 1
        for n in self.sizes.partitions:
            records = self.sizes.fixed_records // n
            shape = Shape(records=records, keys=max(1, records // 10), seed=self.seed)
            point = self._many(n, shape, n)
            for _ in range(self.runs):
                self._add(point, KAFKA, *self._kafka(shape, self._copies("kafka", n)))
            points.append(point)
        for count in sorted({1, cores}):
            self._on_spark(points, count, [(n, self.sizes.fixed_records // n) for n in self.sizes.partitions])
        return points

    def over_cores(self) -> list[dict[str, Any]]:
        counts = sorted({1, *(2**i for i in range(10) if 2**i < (os.cpu_count() or 1)), os.cpu_count() or 1})
        points = []
        for count in counts:
            shape = Shape(records=self.sizes.core_records, keys=self.sizes.core_records // 10, seed=self.seed)
            point = self._many(count, shape, self.sizes.core_partitions)
            self._on_spark([point], count, [(self.sizes.core_partitions, self.sizes.core_records)], "keytail on Spark")
            points.append(point)
        return points

    def over_unique_keys(self) -> list[dict[str, Any]]:
        """Records that have a key each, nearly; each side with room in its map, and in rounds with a small one."""
        entries = int(self.small_map_bytes // KAFKA_SLOT_BYTES * KAFKA_LOAD)
        points = []
        for n in self.sizes.unique_keys:
            shape = Shape(records=n, keys=n * 25, seed=self.seed)
            point = self._point(n, shape)
            for _ in range(self.runs):
                self._add(point, KAFKA_SMALL, *self._in_rounds(shape, lambda at: self._kafka_round(shape, at, entries)))
                small = self.small_map_bytes
                self._add(point, TASK_SMALL, *self._in_rounds(shape, lambda at: self._task_round(shape, at, small)))
            points.append(point)
        return points

    def over_entries(self) -> list[dict[str, Any]]:
        """One entry of a log dir's cleaner checkpoint set: what the driver does for each partition, one at a time."""
        path = self.home / "cleaner-offset-checkpoint"
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

    # One point

    def _point(self, x: float, shape: Shape) -> dict[str, Any]:
        self._generate(shape)
        point = self._new(x, shape.records, 1)
        for _ in range(self.runs):
            self._add(point, KAFKA, *self._kafka(shape, [self._fresh("kafka")]))
            self._add(point, TASK, *self._task(shape))
        return point

    def _many(self, x: float, shape: Shape, partitions: int) -> dict[str, Any]:
        self._generate(shape)
        return self._new(x, shape.records * partitions, partitions)

    def _new(self, x: float, records: int, partitions: int) -> dict[str, Any]:
        logs = list(self.source.glob("*/*.log"))
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

    @property
    def source(self) -> Path:
        return self.home / "source"

    def _generate(self, shape: Shape) -> None:
        """The log as Kafka appends it, and around it what a broker that was stopped cleanly leaves."""
        shutil.rmtree(self.source, ignore_errors=True)
        self.source.mkdir(parents=True)
        self.kafka.bench_generate(
            self.source / f"{TOPIC}-0",
            records=shape.records,
            batch_records=shape.batch_records,
            keys=min(shape.keys, 2**31 - 1),
            value_bytes=shape.value_bytes,
            codec=shape.codec,
            seed=shape.seed,
            clock_ms=time.time_ns() // 1_000_000 - 86_400_000,
            configs=self._configs(shape),
        )
        (self.source / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":1}')

    @staticmethod
    def _configs(shape: Shape) -> dict[str, Any]:
        return {"cleanup.policy": "compact", "internal.segment.bytes": shape.segment_bytes}

    def _fresh(self, name: str) -> Path:
        return fresh_copy(self.source, self.home / name) / f"{TOPIC}-0"

    def _copies(self, name: str, partitions: int) -> list[Path]:
        """The log's partition so many times in a log dir of its own, with their high watermarks."""
        log_dir = self.home / f"{name}-many"
        shutil.rmtree(log_dir, ignore_errors=True)
        log_dir.mkdir(parents=True)
        for number in range(partitions):
            fresh_copy(self.source / f"{TOPIC}-0", log_dir / f"{TOPIC}-{number}")
        end = max(int(log.stem) for log in self.source.glob("*/*.log"))
        for checkpoint in ("replication-offset-checkpoint", "recovery-point-offset-checkpoint"):
            self.kafka.write_checkpoint(log_dir / checkpoint, {f"{TOPIC}-{n}": end for n in range(partitions)})
        (log_dir / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":1}')
        return [log_dir / f"{TOPIC}-{number}" for number in range(partitions)]

    def _kafka(self, shape: Shape, partitions: list[Path], start: int = 0, entries: int = 0) -> Any:
        seconds, cpu_seconds, cleaned = self.kafka.bench_clean(
            partitions,
            map_max_entries=entries or max(KAFKA_MAP_ENTRIES, min(shape.keys, shape.records)),
            first_dirty_offset=start,
            clock_ms=time.time_ns() // 1_000_000,
            configs=self._configs(shape),
            recovery_point=shape.records,
        )
        self._cleaned_to = cleaned.end_offset
        return sum(seconds), {"cpu_seconds": sum(cpu_seconds)}

    def _task(self, shape: Shape, start: int = 0, map_bytes: int = 0, *, fresh: bool = True) -> Any:
        if fresh:
            self._fresh("task")
        answer = self.worker.ask(
            "task",
            self.home / "task",
            map_memory_bytes=map_bytes or max(shape.map_memory_bytes, shape.records * MAP_BYTES_A_KEY),
            segment_bytes=shape.segment_bytes,
            first_dirty_offset=start,
        )
        self._cleaned_to = answer["end_offset"]
        phases = {f"{name}_s": seconds for name, seconds in answer["phases"].items()}
        return answer["seconds"], {
            "cpu_seconds": answer["cpu_seconds"],
            "peak_bytes": answer["private_peak_bytes"],
            "before_bytes": answer["private_before_bytes"],
            "records_after": answer["records_after"],
            **phases,
        }

    def _kafka_round(self, shape: Shape, start: int, entries: int) -> Any:
        partition = self.home / "kafka" / f"{TOPIC}-0" if start else self._fresh("kafka")
        return self._kafka(shape, [partition], start, entries)

    def _task_round(self, shape: Shape, start: int, map_bytes: int) -> Any:
        return self._task(shape, start, map_bytes, fresh=start == 0)

    def _in_rounds(self, shape: Shape, one_round: Callable[[int], Any]) -> tuple[float, dict[str, float]]:
        """Round after round, until the log is clean up to its active segment."""
        seconds, cpu_seconds, rounds, self._cleaned_to = 0.0, 0.0, 0, 0
        while self._cleaned_to < shape.records:
            took, more = one_round(self._cleaned_to)
            seconds, cpu_seconds, rounds = seconds + took, cpu_seconds + more["cpu_seconds"], rounds + 1
        return seconds, {"cpu_seconds": cpu_seconds, "rounds": rounds}

    def _on_spark(
        self, points: list[dict[str, Any]], cores: int, logs: list[tuple[int, int]], name: str = "keytail on local"
    ) -> None:
        """`logs`: for each point how many partitions, and of how many records each."""
        label = f"{name}[{cores}]" if name.endswith("local") else name
        log_dirs: list[str] = []
        for turn in range(self.runs):
            for number, (partitions, records) in enumerate(logs):
                self._generate(Shape(records=records, keys=max(1, records // 10), seed=self.seed))
                log_dirs.append(str(self._copies(f"spark-{turn}-{number}", partitions)[0].parent))
        warm = str(self._copies("spark-warm", 2 * cores)[0].parent)
        command = [sys.executable, "-m", "tests.bench.growth_stage", str(cores), warm, *log_dirs]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} ended with status {done.returncode}: {done.stderr[-4000:]}")
        for line, number in zip(done.stdout.splitlines(), list(range(len(points))) * self.runs, strict=True):
            answer = json.loads(line)
            self._add(points[number], label, answer["seconds"], {"survey_s": answer["survey_s"]})
        for log_dir in [warm, *log_dirs]:
            shutil.rmtree(log_dir)


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
    command = shlex.join(["python", "-m", "tests.bench.growth", *flags, *(["--quick"] if options.quick else [])])
    found: dict[str, Any] = {"curves": {}}
    if options.json.exists():
        found = json.loads(options.json.read_text())
    home = Path(tempfile.mkdtemp(prefix="keytail-growth-", dir=options.dir))
    sizes, small = (QUICK, 1 << 18) if options.quick else (FULL, SMALL_MAP_BYTES)
    growth = Growth(home, sizes, options.seed, options.runs, small)
    try:
        growth.warm()
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
        growth.close()
        shutil.rmtree(home)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.growth", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="every figure; curves are added to it")
    parser.add_argument("--curves", type=_curves, default=list(CURVES), metavar="A,B", help=", ".join(CURVES))
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="turns of each side at each point")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), metavar="N")
    parser.add_argument("--dir", type=Path, help="where the logs and their copies go (up to 4 GB)")
    parser.add_argument("--quick", action="store_true", help="tiny logs, in seconds: shows that it runs, nothing else")
    return parser.parse_args(arguments)


def _curves(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(CURVES):
        raise argparse.ArgumentTypeError(f"no curve {', '.join(sorted(unknown))}; there are {', '.join(CURVES)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
