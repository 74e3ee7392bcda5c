"""Measures `keytail plan` on many partitions: seconds, CPU seconds and peak memory of the whole command.

`python -m tests.bench.plan HOME [--partitions N] [--segments N]`. Creates the log dirs in HOME unless they exist, with
hard links to the files of a few partitions: a plan reads only names, sizes, the ends of indexes and first headers.
100,000 partitions of 20 segments are six million names, for which ext4 takes about two minutes and 700 MiB. HOME
remains for the next run; remove it by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.log_dirs import random_records, write_partition

KEYTAIL = Path(sys.executable).with_name("keytail")
DIRS = 10
TOPIC_PARTITIONS = 100
MAX_LINKS = 60_000  # ext4 allows 65,000 hard links to a file
RECORDS_PER_SEGMENT = 20


def make(home: Path, partitions: int, segments: int) -> list[Path]:
    """Write log dirs with this number of partitions in total, as after a clean shutdown."""
    log_dirs = [home / f"logs-{number}" for number in range(DIRS)]
    shares = [range(number, partitions, DIRS) for number in range(DIRS)]
    with ProcessPoolExecutor() as pool:
        list(pool.map(_make_log_dir, log_dirs, shares, [segments] * DIRS))
    return log_dirs


def _make_log_dir(path: Path, numbers: range, segments: int) -> None:
    path.mkdir(parents=True)
    (path / "meta.properties").write_text("version=1\nnode.id=1\ncluster.id=a2V5dGFpbC10ZXN0cy0xMjM\n")
    (path / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":-1}')
    end = segments * RECORDS_PER_SEGMENT
    template: Path | None = None
    lines = []
    for at, number in enumerate(numbers):
        topic, partition = f"topic-{number // TOPIC_PARTITIONS}", number % TOPIC_PARTITIONS
        here = path / f"{topic}-{partition}"
        lines.append(f"{topic} {partition} {end}\n")
        if template is None or at % MAX_LINKS == 0:
            write_partition(here, random_records(number, end), segments)
            template, names = here, os.listdir(here)
            continue
        here.mkdir()
        for name in names:
            os.link(f"{template}/{name}", f"{here}/{name}")
    text = f"0\n{len(lines)}\n{''.join(lines)}"
    (path / "recovery-point-offset-checkpoint").write_text(text)
    (path / "replication-offset-checkpoint").write_text(text)


def measure(log_dirs: list[Path], name: str, policy: str, output: str, more: list[str]) -> dict[str, float]:
    properties = log_dirs[0].parent / "server.properties"
    properties.write_text(f"log.dirs={','.join(map(str, log_dirs))}\n")
    topics = sorted({path.name.rpartition("-")[0] for log_dir in log_dirs for path in log_dir.glob("topic-*")})
    configs = log_dirs[0].parent / "topic-configs"
    configs.write_text("".join(f"{topic}:cleanup.policy={policy}\n" for topic in topics))
    flags = [*(["--topic-configs", str(configs)] if name != "verify" else []), "--output", output, *more]
    command = [str(KEYTAIL), name, "--config", str(properties), *flags]
    timed = ["/usr/bin/env", "time", "-f", "%e %U %S %M", *command] if _has_time() else command
    start_s = time.perf_counter()
    with open(log_dirs[0].parent / "rows", "wb") as rows:
        done = subprocess.run(timed, stdout=rows, stderr=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - start_s
    figures = {"seconds": seconds, "status": done.returncode}
    if _has_time():
        _, user, system, kilobytes = map(float, done.stderr.splitlines()[-1].split())
        figures |= {"processor_s": user + system, "largest_process_mib": kilobytes / 1024}
    return figures


def _has_time() -> bool:
    return subprocess.run(["/usr/bin/env", "time", "true"], capture_output=True, check=False).returncode == 0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("home", type=Path)
    parser.add_argument("--partitions", type=int, default=100_000)
    parser.add_argument("--segments", type=int, default=20)
    parser.add_argument("--command", default="plan")
    parser.add_argument("--policy", default="compact")
    parser.add_argument("--output", default="json")
    parser.add_argument("more", nargs="*")
    given = parser.parse_args(arguments)
    log_dirs = sorted(given.home.glob("logs-*")) or make(given.home, given.partitions, given.segments)
    print(json.dumps(measure(log_dirs, given.command, given.policy, given.output, given.more)))


if __name__ == "__main__":
    main()
