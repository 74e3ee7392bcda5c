"""Compares the cost of `plan --measure` and `--estimate` with a compaction, and prints the width of the bounds.

`python -m tests.bench.measure [--mib 256]` prints a table by codec and share of the clean section: the CPU seconds of
one task for a compaction, a measurement and an estimate, with the log in the page cache.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keytail.compact.cleaner import clean_partition
from keytail.compact.measure.counting import CountingFileSystem
from keytail.compact.measure.estimating import estimate_partition
from keytail.compact.measure.intervals import Interval
from keytail.compact.measure.measuring import measure_partition
from keytail.compact.task import CleaningTask
from keytail.log.fs import LOCAL
from tests.bench.report import machine
from tests.compact.logs import RandomLog, task_for, write_log
from tests.reference.batches import Rec, encode_batch
from tests.reference.cleaner import Segment

NOW = 1_750_000_000_000
CODECS = {"none": 0, "gzip": 1, "zstd": 4}
BATCH_RECORDS = 40
KEYS = 100_000
SEGMENT_BYTES = 64 << 20


def generate(path: Path, mib: int, codec: int, clean_share: float) -> CleaningTask:
    """Write a log of batches of about 16 KiB before compression; the keys of its clean section are distinct."""
    rng = random.Random(1)
    words = [b"%08x" % rng.getrandbits(32) for _ in range(256)]
    segments, parts, size, offset, total, first_dirty = [], [], 0, 0, 0, 0
    base = 0
    while total < mib << 20:
        is_clean = total < clean_share * (mib << 20)
        records = []
        for _ in range(BATCH_RECORDS):
            key = offset % KEYS if is_clean else int(KEYS * rng.random() ** 2)
            value = None if rng.random() < 0.02 else b" ".join(rng.choices(words, k=45))
            records.append(Rec(offset, NOW - 10**6, b"key-%d" % key, value))
            offset += 1
        parts.append(encode_batch(records, codec=codec))
        size, total = size + len(parts[-1]), total + len(parts[-1])
        if is_clean:
            first_dirty = offset
        if size >= SEGMENT_BYTES:
            segments.append(Segment(base, b"".join(parts), 0, 0, NOW - 10**6))
            base, parts, size = offset, [], 0
    segments += [Segment(base, b"".join(parts), 0, 0, NOW - 10**6), Segment(offset, b"", 0, 0, NOW)]
    facts = write_log(str(path), segments)
    log = RandomLog(segments, [], offset, {})
    config = {"segment_bytes": 1 << 30, "index_interval_bytes": 4096}
    return task_for(str(path), log, facts, NOW, first_dirty=first_dirty, config=config, grouping="measured",
                    map_memory_bytes=256 << 20)  # fmt: skip


def cpu_s(work: Callable[[], Any]) -> tuple[float, Any]:
    start_s = time.process_time()
    return (found := work()) and (time.process_time() - start_s, found)


def width(interval: Interval, log_bytes: int) -> str:
    return f"{100 * (interval.high - interval.low) / 2 / max(log_bytes, 1):.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    mib = parser.parse_args().mib
    print(machine())
    print("| log | compaction | measured | estimated | estimated / measured | bytes left, of the log | bounds, +- |")
    print("|---|---|---|---|---|---|---|")
    for codec, number in CODECS.items():
        for clean_share in (0.0, 0.5, 0.9):
            home = Path(tempfile.mkdtemp(dir="/dev/shm"))
            try:
                task = generate(home / "t-0", mib, number, clean_share)
                log_bytes = sum(segment.log_bytes for segment in task.segments)
                measure_partition(CountingFileSystem(), task)  # loads kernels, and fills the page cache
                compact_s, _ = cpu_s(lambda: clean_partition(LOCAL, task))
                measure_s, exact = cpu_s(lambda: measure_partition(CountingFileSystem(), task))
                estimate_s, about = cpu_s(
                    lambda: estimate_partition(CountingFileSystem(), task, random.Random(1), measured_bytes=0)
                )
            finally:
                shutil.rmtree(home)
            assert about.bytes_after.low <= exact.bytes_after.estimate <= about.bytes_after.high
            print(
                f"| {codec}, {100 * clean_share:.0f} % clean | {compact_s:.1f} s | {measure_s:.1f} s | "
                f"{estimate_s:.1f} s | {estimate_s / measure_s:.2f} | "
                f"{100 * exact.bytes_after.estimate / log_bytes:.0f} % | {width(about.bytes_after, log_bytes)} |"
            )


if __name__ == "__main__":
    main()
