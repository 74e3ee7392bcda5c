"""Compares compaction with Kafka's own Cleaner on the same files (`make bench` or `python -m tests.bench.run`).

Generates one log, and alternates between Kafka and keytail's task, command and kernels, each on a new copy that has
been read once. Kafka's seconds are the base of the ratios. A run fails if a result differs from Kafka's, but not
because of a ratio.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.copies import differences, fresh_copy
from tests.bench.report import Figure, machine, table
from tests.bench.worker import Worker
from tests.interop.kafka import Kafka

TOPIC = "bench"
KEYTAIL = Path(sys.executable).with_name("keytail")
WARM_ROUNDS = 2
# the default of log.cleaner.dedupe.buffer.size, with room for 5 million keys
KAFKA_MAP_BYTES = 128 << 20
KAFKA_MAP_ENTRIES = 5_033_164
# a key takes 24 bytes at the map's load factor; 1.5 tables exist during growth, and the proof's slots are larger
MAP_BYTES_PER_KEY = 96


@dataclass(frozen=True)
class Shape:
    """The shape of a log. With 91 `value_bytes`, records have 117 bytes, including their share of the header. The first
    `clean_records` records are the clean section, with distinct keys, some of which occur in the dirty section.
    """

    records: int = 5_000_000
    batch_records: int = 100
    keys: int = 500_000
    value_bytes: int = 91
    codec: str = "none"
    segment_bytes: int = 256 << 20
    clean_records: int = 0
    seed: int = 1

    @property
    def map_memory_bytes(self) -> int:
        return max(KAFKA_MAP_BYTES, min(self.keys, self.records - self.clean_records) * MAP_BYTES_PER_KEY)

    @property
    def task_settings(self) -> dict[str, int]:
        return {
            "map_memory_bytes": self.map_memory_bytes,
            "segment_bytes": self.segment_bytes,
            "first_dirty_offset": self.clean_records,
        }


class Bench:
    """The log in `home`/source, and the two sides; `play` runs each once."""

    def __init__(self, home: Path, shape: Shape, *, command: bool = True) -> None:
        self.home, self.shape, self.with_command = home, shape, command
        self.source = home / "source"
        self.kafka = Kafka(heap="2g", compiler="full")
        self.worker = Worker()
        self.base = Figure("Kafka's Cleaner, warm JVM")
        self.kernels = Figure("(1) kernels alone, in memory")
        self.task = Figure("(2) one task's whole work, warm")
        self.alike = Figure("(2) without unlinking, as Kafka's")
        self.command = Figure("(3) whole command with start-up")
        self.private: list[tuple[int, int]] = []
        self.kafka_round: dict[str, Any] = {}
        self.differences: list[str] = []

    @property
    def figures(self) -> list[Figure]:
        return [figure for figure in (self.base, self.kernels, self.task, self.alike, self.command) if figure.seconds]

    @property
    def log_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._partition(self.source).glob("*.log"))

    def generate(self) -> None:
        """Write the log with Kafka's classes, and the other files of a broker after a clean shutdown."""
        shape, clock_ms = self.shape, time.time_ns() // 1_000_000 - 86_400_000
        self.source.mkdir(parents=True)
        opened = self.kafka.bench_generate(
            self._partition(self.source),
            records=shape.records,
            batch_records=shape.batch_records,
            keys=shape.keys,
            value_bytes=shape.value_bytes,
            codec=shape.codec,
            seed=shape.seed,
            clean_records=shape.clean_records,
            clock_ms=clock_ms,
            configs=self._configs,
        )
        end = opened.log_end_offset
        for name in ("replication-offset-checkpoint", "recovery-point-offset-checkpoint"):
            self.kafka.write_checkpoint(self.source / name, {f"{TOPIC}-0": end})
        if shape.clean_records:
            self.kafka.write_checkpoint(self.source / "cleaner-offset-checkpoint", {f"{TOPIC}-0": shape.clean_records})
        (self.source / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":1}')

    def warm(self) -> None:
        """Run rounds that are not measured, in which the JVM compiles its code and the worker loads its kernels."""
        for _ in range(WARM_ROUNDS):
            self._kafka(self._fresh("kafka"))
            self._task(self._fresh("task"))
        if self.with_command:
            self._command(
                self._fresh("command")
            )  # fills the cache of compiled kernels, as a first run on a machine does
        for figure in (self.base, self.task, self.alike, self.command):
            figure.forget()
        self.private.clear()

    def play(self) -> None:
        self._kafka(self._fresh("kafka"))
        self._task(self._fresh("task"))
        self._compare("task")
        if self.with_command:
            self._command(self._fresh("command"))
            self._compare("command")
        answer = self.worker.ask("kernels", self.source, **self.shape.task_settings)
        self.kernels.seconds.append(answer["seconds"])

    def limits(self) -> dict[str, float]:
        """Return the seconds of the work that no cleaner can avoid (`limits.py`)."""
        before, after = self._partition(self._fresh("kafka")), self._partition(self.home / "task")
        return self.worker.ask("limits", before, output=str(after))

    def close(self) -> None:
        self.kafka.close()
        self.worker.close()

    def command_line(self, log_dir: Path) -> list[str]:
        settings = {"cleanup.policy": "compact", "segment.bytes": self.shape.segment_bytes}
        flags = ["--log-dirs", str(log_dir), "--topics-have-no-overrides", "--grouping", "kafka"]
        for key, value in settings.items():
            flags += ["--topic-config", f"{TOPIC}:{key}={value}"]
        flags += ["--force", "--map-memory", str(self.shape.map_memory_bytes), "--execute", "--output", "json"]
        return [str(KEYTAIL), "compact", *flags]

    @property
    def _configs(self) -> dict[str, Any]:
        return {"cleanup.policy": "compact", "internal.segment.bytes": self.shape.segment_bytes}

    @staticmethod
    def _partition(log_dir: Path) -> Path:
        return log_dir / f"{TOPIC}-0"

    def _fresh(self, name: str) -> Path:
        return fresh_copy(self.source, self.home / name)

    def _kafka(self, log_dir: Path) -> None:
        seconds, cpu_seconds, cleaned = self.kafka.bench_clean(
            [self._partition(log_dir)],
            map_max_entries=max(KAFKA_MAP_ENTRIES, min(self.shape.keys, self.shape.records)),
            first_dirty_offset=self.shape.clean_records,
            clock_ms=time.time_ns() // 1_000_000,
            configs=self._configs,
            recovery_point=self.shape.records,
        )
        self.base.seconds.append(seconds[0])
        self.base.cpu_seconds.append(cpu_seconds[0])
        self.kafka_round = {"records_after": cleaned.records_written, "end_offset": cleaned.end_offset}

    def _task(self, log_dir: Path) -> None:
        answer = self.worker.ask("task", log_dir, **self.shape.task_settings)
        self.task.seconds.append(answer["seconds"])
        self.task.cpu_seconds.append(answer["cpu_seconds"])
        self.alike.seconds.append(answer["seconds"] - answer["file_operations"]["unlink"])
        self.task.phases.append(answer["phases"])
        self.task.file_operations.append(answer["file_operations"])
        self.private.append((answer["private_before_bytes"], answer["private_peak_bytes"]))
        for name, theirs in self.kafka_round.items():
            if answer[name] != theirs:
                self.differences.append(f"{name}: Kafka's {theirs}, keytail's {answer[name]}")

    def _command(self, log_dir: Path) -> None:
        started = time.perf_counter()
        done = subprocess.run(self.command_line(log_dir), capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
        if done.returncode != 0:
            raise RuntimeError(f"keytail ended with status {done.returncode}: {done.stdout}{done.stderr}")
        [row] = json.loads(done.stdout)
        if row["status"] != "compacted":
            raise RuntimeError(f"keytail did not compact: {row}")
        self.command.seconds.append(seconds)
        self.command.phases.append({"task as its row times it": (row["end_ms"] - row["start_ms"]) / 1000})

    def _compare(self, name: str) -> None:
        theirs, own = self._partition(self.home / "kafka"), self._partition(self.home / name)
        found = differences(theirs, own, compressed=self.shape.codec != "none")
        self.differences += [f"{name}: {line}" for line in found]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    shape = Shape(**{name: getattr(options, name) for name in asdict(Shape())})
    started = machine()
    home = Path(tempfile.mkdtemp(prefix="keytail-bench-", dir=options.dir))
    print("command:", shlex.join([sys.executable, "-m", "tests.bench.run", *_all_flags(shape, options)]))
    bench = Bench(home, shape, command=not options.no_command)
    try:
        bench.generate()
        print(f"log: {bench.log_bytes} bytes in {home}, seed {shape.seed}", flush=True)
        bench.warm()
        for number in range(options.runs):
            bench.play()
            last = "  ".join(f"{figure.name[:3]} {figure.seconds[-1]:.2f}" for figure in bench.figures)
            print(f"run {number + 1} of {options.runs}: {last} s", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(_as_json(bench, started), indent=2) + "\n")
        _print(bench, started)
    finally:
        bench.close()
        shutil.rmtree(home)
    return 1 if bench.differences else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.run", description=__doc__)
    shape = Shape()
    for name in ("records", "batch_records", "keys", "value_bytes", "segment_bytes", "clean_records"):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=getattr(shape, name), metavar="N"
        )
    parser.add_argument("--codec", default=shape.codec, choices=("none", "gzip", "snappy", "lz4", "zstd"))
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), metavar="N")
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    parser.add_argument(
        "--dir", type=Path, help="directory for the log and its copies (four times the size of the log)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures of all runs, as JSON")
    parser.add_argument("--no-command", action="store_true", help="omit figure 3, which starts Spark")
    return parser.parse_args(arguments)


def _all_flags(shape: Shape, options: argparse.Namespace) -> list[str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(shape).items()]
    flags.append(f"--runs={options.runs}")
    return flags + (["--no-command"] if options.no_command else [])


def _private(bench: Bench) -> dict[str, int]:
    before, peak = min(before for before, _ in bench.private), max(peak for _, peak in bench.private)
    return {"warm_worker_bytes": before, "peak_bytes": peak, "map_bytes": bench.shape.map_memory_bytes}


def _as_json(bench: Bench, started: dict[str, str]) -> dict[str, Any]:
    return {
        "machine": started,
        "shape": asdict(bench.shape) | {"log_bytes": bench.log_bytes},
        "kafka_round": bench.kafka_round,
        "figures": [figure.as_json(bench.base) for figure in bench.figures],
        "private_memory": _private(bench),
        "differences": bench.differences,
        "keytail_command": bench.command_line(Path("DIR")),
    }


def _print(bench: Bench, started: dict[str, str]) -> None:
    for name, text in started.items():
        print(f"{name}: {text}")
    print(f"figure 3 runs: {shlex.join(bench.command_line(Path('DIR')))}\n")
    print(table(bench.figures, bench.base, bench.shape.records, bench.log_bytes))
    memory = _private(bench)
    print(
        f"private memory of the task's process (anonymous, by VmHWM): peak {memory['peak_bytes'] / 2**20:.0f} MiB, "
        f"of which {memory['warm_worker_bytes'] / 2**20:.0f} MiB before it began; "
        f"map budget {memory['map_bytes'] / 2**20:.0f} MiB"
    )
    for line in bench.differences:
        print(f"DIFFERS FROM KAFKA'S: {line}")
    if not bench.differences:
        same = "records and headers" if bench.shape.codec != "none" else ".log, .index and .timeindex bytes"
        print(f"both left the same {same} in every run ({bench.kafka_round['records_after']} records)")


if __name__ == "__main__":
    sys.exit(main())
