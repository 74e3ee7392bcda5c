"""Disk reads and writes of a compaction that starts with a cold page cache. `python -m tests.bench.cold`, as root.

One log is compacted in memory control groups of different sizes, so that it fits into the page cache or does not. The
log is removed from the page cache before each run. Another file of the same group is read before the run; the share of
it that is still cached afterwards shows what the run displaces. Only bytes are measured, because other load on the
machine does not change them.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keytail.log.fs import LOCAL
from keytail.log.quiet import cached_share
from tests.interop.kafka import Kafka

KEYTAIL = Path(sys.executable).with_name("keytail")
GROUPS = Path("/sys/fs/cgroup")
_LIMITS_MIB = (0, 1024)
RECORD_BYTES = 117


def generate(log_dir: Path, megabytes: int, codec: str, seed: int) -> None:
    kafka = Kafka(heap="1g", compiler="full")
    try:
        records = (megabytes << 20) // RECORD_BYTES
        kafka.bench_generate(log_dir / "bench-0", records=records, keys=records // 50, codec=codec, seed=seed)
    finally:
        kafka.close()
    (log_dir / ".kafka_cleanshutdown").touch()


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path | None]:
    """Create a memory control group (version 1 or 2) and yield the file that takes the ids of its processes; None
    without a limit.
    """
    if not limit_bytes:
        yield None
        return
    is_first_version = (GROUPS / "memory").is_dir()
    group = (GROUPS / "memory" if is_first_version else GROUPS) / f"keytail-bench-{os.getpid()}"
    group.mkdir()
    try:
        name = "memory.limit_in_bytes" if is_first_version else "memory.max"
        (group / name).write_text(str(limit_bytes))
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def drop_from_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compact(log_dir: Path, other: Path, limit_bytes: int, cores: int, *, quiet: bool) -> dict[str, float]:
    """Compact the log in a group with this limit, and return bytes read and written, by all processes of the run."""
    log_bytes = sum(path.stat().st_size for path in log_dir.rglob("*.log"))
    drop_from_cache(log_dir)
    drop_from_cache(other.parent)
    mode = ["--prepare"] if quiet else ["--execute"]
    settings = ["--topics-have-no-overrides", "--topic-config", "bench:cleanup.policy=compact"]
    flags = ["--high-watermark", "log-end", "--force", "--fan-out", "never", "--map-memory", "128m", *mode]
    command = [str(KEYTAIL), "compact", "--log-dirs", str(log_dir), *settings, *flags, "--output", "json"]
    with memory_group(limit_bytes) as procs:

        def enter() -> None:
            if procs is not None:
                procs.write_text(str(os.getpid()))
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])

        subprocess.run(["cat", other], stdout=subprocess.DEVNULL, check=True, preexec_fn=enter)
        # This Python process starts the command and prints the counters, which include those of ended children.
        counted = (
            "import subprocess, sys; done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL);"
            "print(open('/proc/self/io').read()); sys.exit(done.returncode)"
        )
        done = subprocess.run(
            [sys.executable, "-c", counted, *command], stdout=subprocess.PIPE, text=True, check=True, preexec_fn=enter
        )
        fields = dict(line.split(": ") for line in done.stdout.split("\n") if line)
        return {
            "limit_bytes": limit_bytes,
            "log_bytes": log_bytes,
            "read_bytes": int(fields["read_bytes"]),
            "written_bytes": int(fields["write_bytes"]),
            "other_cached": cached_share(LOCAL, str(other), other.stat().st_size),
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.cold", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2048, metavar="N", help="size of the log")
    parser.add_argument("--limits", default=",".join(map(str, _LIMITS_MIB)), metavar="MIB,...", help="0: no limit")
    parser.add_argument("--codec", default="none")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), metavar="N")
    parser.add_argument("--cores", type=int, default=2, metavar="N", help="a partition gets a thread for each core")
    parser.add_argument("--prepare", action="store_true", help="prepare, as beside a running broker")
    parser.add_argument("--dir", type=Path, help="folder for the log and its copy: on a disk, and not in memory")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="keytail-bench-", dir=options.dir))
    try:
        generate(home / "source", options.megabytes, options.codec, options.seed)
        other = home / "other" / "file"
        other.parent.mkdir()
        other.write_bytes(os.urandom(256 << 20))
        for limit_mib in map(int, options.limits.split(",")):
            shutil.copytree(home / "source", home / "copy")
            figures = compact(home / "copy", other, limit_mib << 20, options.cores, quiet=options.prepare)
            shutil.rmtree(home / "copy")
            times = figures["read_bytes"] / figures["log_bytes"]
            print(json.dumps(figures | {"reads_of_the_log": round(times, 2)}), flush=True)
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    main()
