"""Compares the index rebuild with Kafka's own LogSegment.recover on the same files. `python -m tests.bench.recover`.

Both alternate in warm processes on the same core, with files in the page cache. Kafka's seconds are those of `recover`
alone; keytail's are those of all work of `rebuild-index --execute` for a partition: reading, checking, writing, fsync,
renames. A run fails if index files differ. The third figure is a lower limit: the bytes are only read, into one small
buffer. With `--stages`, the work is measured on Spark instead, in warm sessions with one core and with two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.copies import fresh_copy
from tests.bench.report import Figure, machine, table
from tests.bench.worker import Worker
from tests.interop.kafka import Kafka

PARTITION = "bench-0"
INDEXES = (".index", ".timeindex", ".txnindex")
WARM_ROUNDS = 2
READ_BYTES = 512 << 10  # such a buffer fits into the cache of a core; larger reads are slower
STAGE_SECONDS = 20.0


@dataclass
class Shape:
    """A log of uncompressed batches, all with the same number of records of 117 bytes."""

    batch_records: int
    records: int
    seed: int
    segment_bytes: int = 256 << 20
    theirs: Figure = field(default_factory=lambda: Figure("Kafka's LogSegment.recover"))
    ours: Figure = field(default_factory=lambda: Figure("rebuild-index of a partition"))
    reading: Figure = field(default_factory=lambda: Figure("reading alone"))
    log_bytes: int = 0
    differences: list[str] = field(default_factory=list)

    def generate(self, kafka: Kafka, log_dir: Path) -> None:
        kafka.bench_generate(
            log_dir / PARTITION,
            records=self.records,
            batch_records=self.batch_records,
            seed=self.seed,
            configs={"internal.segment.bytes": self.segment_bytes},
        )
        (log_dir / ".kafka_cleanshutdown").touch()
        self.log_bytes = sum(path.stat().st_size for path in log_dir.rglob("*.log"))

    def play(self, kafka: Kafka, worker: Worker, home: Path) -> None:
        """Run one turn of each side, on copies without any index."""
        source = home / f"source-{self.batch_records}"
        copies = {name: _without_indexes(fresh_copy(source, home / name)) for name in ("kafka", "ours")}
        bases = sorted(int(path.stem) for path in (source / PARTITION).glob("*.log"))
        self.theirs.seconds.append(kafka.bench_recover(copies["kafka"] / PARTITION, bases))
        self.ours.seconds.append(worker.ask("rebuild", copies["ours"])["seconds"])
        self.reading.seconds.append(_seconds_of_reading(copies["ours"] / PARTITION))
        item, other = ({p.name: p.read_bytes() for p in (copy / PARTITION).iterdir() if p.suffix in INDEXES}
                      for copy in copies.values())  # fmt: skip
        self.differences += [name for name in sorted(item | other) if item.get(name) != other.get(name)]

    def as_json(self) -> dict[str, Any]:
        return {
            "batch_records": self.batch_records,
            "records": self.records,
            "log_bytes": self.log_bytes,
            "figures": [figure.as_json(self.theirs) for figure in (self.theirs, self.ours, self.reading)],
            "differences": self.differences,
        }


def _without_indexes(log_dir: Path) -> Path:
    for path in (log_dir / PARTITION).iterdir():
        if path.suffix in INDEXES:
            path.unlink()
    return log_dir


def _seconds_of_reading(partition: Path) -> float:
    buffer = bytearray(READ_BYTES)
    started = time.perf_counter()
    for path in partition.glob("*.log"):
        with path.open("rb", buffering=0) as log:
            while log.readinto(buffer):
                pass
    return time.perf_counter() - started


def compare(shapes: list[Shape], home: Path, runs: int) -> None:
    """Compare the two sides on one core, to which this process and its children are pinned."""
    cores = os.sched_getaffinity(0)
    kafka, worker = Kafka(heap="1g", compiler="full"), None
    try:
        for shape in shapes:
            shape.generate(kafka, home / f"source-{shape.batch_records}")
        kafka.close()
        os.sched_setaffinity(0, {min(cores)})
        worker = Worker()
        for shape in shapes:
            for number in range(WARM_ROUNDS + runs):
                shape.play(kafka, worker, home)
                if number + 1 == WARM_ROUNDS:
                    shape.theirs.forget()
                    shape.ours.forget()
                    shape.reading.forget()
    finally:
        os.sched_setaffinity(0, cores)
        kafka.close()
        if worker is not None:
            worker.close()


def stages(shape: Shape, home: Path, seconds: float) -> dict[int, float]:
    """Measure the work with one core and with two. The partitions are hard links to one log, which is read from the
    page cache, so that the cores are compared and not the disk.
    """
    kafka = Kafka(heap="1g", compiler="full")
    try:
        shape.generate(kafka, home / "source")
    finally:
        kafka.close()
    found: dict[int, float] = {}
    copies = 20
    while True:
        many = home / "many"
        shutil.rmtree(many, ignore_errors=True)
        for number in range(copies):
            shutil.copytree(home / "source" / PARTITION, many / f"bench-{number}", copy_function=os.link)
        (many / ".kafka_cleanshutdown").touch()
        found[1] = _stage(1, many)
        if found[1] >= seconds:
            break
        copies = int(copies * max(1.3, 1.2 * seconds / found[1]))
    found[2] = _stage(2, many)
    return found


def _stage(cores: int, log_dir: Path) -> float:
    command = [sys.executable, "-m", "tests.bench.stage", str(cores), str(log_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.recover", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512, metavar="N", help="size of each log")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), metavar="N")
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    parser.add_argument("--stages", action="store_true", help="measure Spark with one core and with two")
    parser.add_argument("--stage-seconds", type=float, default=STAGE_SECONDS, metavar="S", help="minimum for one core")
    parser.add_argument("--dir", type=Path, help="directory for the logs and their copies")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    size = options.megabytes << 20
    shapes = [Shape(100, size // 117, options.seed), Shape(1, size // 177, options.seed)]
    print(f"index rebuild; seed {options.seed}", *(f"{name}: {text}" for name, text in machine().items()), sep="\n")
    home = Path(tempfile.mkdtemp(prefix="keytail-bench-", dir=options.dir))
    answer: dict[str, Any] = {"machine": machine()}
    try:
        if options.stages:
            started = time.perf_counter()
            found = stages(shapes[0], home, options.stage_seconds)
            print(f"local[1] {found[1]:.1f} s, local[2] {found[2]:.1f} s: {found[2] / found[1]:.2f} of that "
                  f"(in {time.perf_counter() - started:.0f} s)")  # fmt: skip
            answer["stages"] = found
        else:
            compare(shapes, home, options.runs)
            for shape in shapes:
                print(f"\nbatches of {shape.batch_records}, {shape.log_bytes} bytes")
                print(table([shape.theirs, shape.ours, shape.reading], shape.theirs, shape.records, shape.log_bytes))
                for name in shape.differences:
                    print(f"DIFFERS FROM KAFKA'S: {name}")
            answer["shapes"] = [shape.as_json() for shape in shapes]
        if options.json:
            options.json.write_text(json.dumps(answer, indent=2) + "\n")
    finally:
        shutil.rmtree(home)
    return 1 if any(shape.differences for shape in shapes) else 0


if __name__ == "__main__":
    sys.exit(main())
