"""Measures the commit of prepared compactions of many partitions, while a broker is down: seconds and operations.

    .venv/bin/python -m tests.bench.prepared 2000 10

Writes a log dir with these numbers of partitions and of segments per partition, prepares all partitions, and times the
commit and the same compaction without preparation, as a user runs them. Also prints operations on the log dir per
partition, and the time of a sync of a directory there, with one thread and with as many as a commit uses.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from keytail.cli.configuration import read_configuration
from keytail.cli.selection import PartitionFilter
from keytail.compact import execution
from keytail.compact.prepared import driver
from keytail.compact.running.bundles import MAX_COMMITS
from keytail.log.fs import LOCAL
from tests.bench.commits import SETTINGS, Counting
from tests.log_dirs import random_records, write_log_dir

KEYTAIL = Path(sys.executable).with_name("keytail")
FLAGS = ("--topics-have-no-overrides", *(word for item in SETTINGS for word in ("--topic-config", item)), "--force")
COUNTED_PARTITIONS = 20


def make(root: Path, partitions: int, segments: int) -> Path:
    records = random_records(1, 10 * segments, keys=segments)
    return write_log_dir(root, {f"orders-{number}": records for number in range(partitions)}, segments=segments)


def timed(log_dir: Path, *flags: str) -> float:
    start_s = time.perf_counter()
    command = [str(KEYTAIL), "compact", "--log-dirs", str(log_dir), *FLAGS, *flags, "--quiet", "--output", "json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start_s


def counted(root: Path, segments: int) -> Counter[str]:
    """Return the operations of a commit on the log dir, per partition."""
    log_dir = make(root, COUNTED_PARTITIONS, segments)
    partition_filter, settings = PartitionFilter(log_dirs=(str(log_dir),)), read_configuration(None, SETTINGS, True)
    driver.prepare(driver.Request(partition_filter, settings, prepare=True, force=True))
    fs = Counting()
    execution.compact(execution.Request(partition_filter, settings, execute=True, prepared_only=True, force=True), fs)
    return Counter({name: round(number / COUNTED_PARTITIONS) for name, number in fs.counts.items()})


def sync_ms(root: Path, threads: int, times: int = 50) -> float:
    """Return the mean time in ms of a sync of a directory with a new file, with one directory per thread."""

    def sync(folder: Path) -> None:
        folder.mkdir(parents=True)
        for number in range(times):
            (folder / str(number)).touch()
            LOCAL.fsync_dir(str(folder))

    start_s = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(sync, [root / f"{threads}-{number}" for number in range(threads)]))
    return (time.perf_counter() - start_s) * 1000 / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("partitions", type=int)
    parser.add_argument("segments", type=int)
    parser.add_argument("--directory", help="directory for the logs (default: the temporary directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        root = Path(folder)
        syncs = [f"{sync_ms(root / 'syncs', threads):.1f} ms in {threads} threads" for threads in (1, MAX_COMMITS)]
        print(f"sync of a directory:  {', '.join(syncs)}", flush=True)
        print(f"operations per partition: {dict(counted(root / 'few', options.segments))}", flush=True)
        prepared = make(root / "prepared", options.partitions, options.segments)
        shutil.copytree(prepared, root / "in-one-go")
        os.sync()
        print(f"prepare:             {timed(prepared, '--prepare'):8.1f} s", flush=True)
        print(f"commit:              {timed(prepared, '--execute', '--prepared-only'):8.1f} s", flush=True)
        print(f"compact in one go:   {timed(root / 'in-one-go', '--execute'):8.1f} s")


if __name__ == "__main__":
    main()
