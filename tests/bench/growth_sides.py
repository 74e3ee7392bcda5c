"""The two sides that growth.py measures, and their log. Each turn is one whole compaction. The process of each side
runs for all turns; `home` has one log at a time.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.copies import fresh_copy
from tests.bench.run import KAFKA_MAP_ENTRIES, MAP_BYTES_PER_KEY, TOPIC, Shape
from tests.bench.worker import Worker
from tests.interop.kafka import Kafka

# Seconds, and other figures by name.
Turn = tuple[float, dict[str, float]]


@dataclass
class Sides:
    """The two sides. `cleaned_to` is the end offset of the last turn, and the first dirty offset of the next round."""

    home: Path
    kafka: Kafka = field(default_factory=lambda: Kafka(heap="3g", compiler="full"))
    worker: Worker = field(default_factory=Worker)
    cleaned_to: int = 0

    def close(self) -> None:
        self.kafka.close()
        self.worker.close()

    def warm(self, shape: Shape) -> None:
        """Run rounds that are not measured, in which the JVM compiles its code and the worker loads its kernels."""
        self.generate(shape)
        for _ in range(3):
            self.run_kafka(shape, [self.fresh("kafka")])
            self.run_task(shape)

    @property
    def source(self) -> Path:
        return self.home / "source"

    def generate(self, shape: Shape) -> None:
        """Write the log with Kafka's classes, and the other files of a broker after a clean shutdown."""
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

    def fresh(self, name: str) -> Path:
        return fresh_copy(self.source, self.home / name) / f"{TOPIC}-0"

    def copies(self, name: str, partitions: int) -> list[Path]:
        """Copy the partition `partitions` times into a separate log dir with high watermarks. Return the copies."""
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

    def run_kafka(self, shape: Shape, partitions: Sequence[Path], start: int = 0, entries: int = 0) -> Turn:
        """Run Kafka's Cleaner over one partition after the other, with a map for all keys, or for `entries`."""
        seconds, cpu_seconds, cleaned = self.kafka.bench_clean(
            partitions,
            map_max_entries=entries or max(KAFKA_MAP_ENTRIES, min(shape.keys, shape.records)),
            first_dirty_offset=start,
            clock_ms=time.time_ns() // 1_000_000,
            configs=self._configs(shape),
            recovery_point=shape.records,
        )
        self.cleaned_to = cleaned.end_offset
        return sum(seconds), {"cpu_seconds": sum(cpu_seconds)}

    def run_task(self, shape: Shape, start: int = 0, map_bytes: int = 0, *, fresh: bool = True) -> Turn:
        """Run a whole task of keytail on the partition."""
        if fresh:
            self.fresh("task")
        answer = self.worker.ask(
            "task",
            self.home / "task",
            map_memory_bytes=map_bytes or max(shape.map_memory_bytes, shape.records * MAP_BYTES_PER_KEY),
            segment_bytes=shape.segment_bytes,
            first_dirty_offset=start,
        )
        self.cleaned_to = answer["end_offset"]
        phases = {f"{name}_s": seconds for name, seconds in answer["phases"].items()}
        return answer["seconds"], {
            "cpu_seconds": answer["cpu_seconds"],
            "peak_bytes": answer["private_peak_bytes"],
            "before_bytes": answer["private_before_bytes"],
            "records_after": answer["records_after"],
            **phases,
        }

    def kafka_in_rounds(self, shape: Shape, entries: int) -> Turn:
        """Run rounds with a map of this number of entries until the log is clean up to its active segment."""
        partition = self.fresh("kafka")
        return self._in_rounds(shape, lambda start: self.run_kafka(shape, [partition], start, entries))

    def task_in_rounds(self, shape: Shape, map_bytes: int) -> Turn:
        return self._in_rounds(shape, lambda start: self.run_task(shape, start, map_bytes, fresh=start == 0))

    def _in_rounds(self, shape: Shape, one_round: Callable[[int], Turn]) -> Turn:
        seconds, cpu_seconds, rounds, self.cleaned_to = 0.0, 0.0, 0, 0
        while self.cleaned_to < shape.records:
            took, more = one_round(self.cleaned_to)
            seconds, cpu_seconds, rounds = seconds + took, cpu_seconds + more["cpu_seconds"], rounds + 1
        return seconds, {"cpu_seconds": cpu_seconds, "rounds": rounds}

    def run_on_spark(self, cores: int, shapes: Sequence[tuple[Shape, int]]) -> list[Turn]:
        """Run a turn for each shape with its number of partitions, all in one warm session."""
        log_dirs = []
        for number, (shape, partitions) in enumerate(shapes):
            self.generate(shape)
            log_dirs.append(str(self.copies(f"spark-{number}", partitions)[0].parent))
        warm = str(self.copies("spark-warm", 2 * cores)[0].parent)
        command = [sys.executable, "-m", "tests.bench.growth_stage", str(cores), warm, *log_dirs]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} ended with status {done.returncode}: {done.stderr[-4000:]}")
        for log_dir in [warm, *log_dirs]:
            shutil.rmtree(log_dir)
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        return [(answer["seconds"], {"survey_s": answer["survey_s"]}) for answer in answers]
