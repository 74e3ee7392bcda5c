"""The hosts on which the commands of the guide run: log dirs of the golden broker, complete or damaged, by name.

For example, `/var/lib/kafka` on a page is `root/var/lib/kafka` here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.golden import unpack

LOG_DIR = "var/lib/kafka"
_FIRST = "00000000000000000000"


def place(name: str, root: Path, golden: Path) -> None:
    """Create `root` again as the page requires it; `golden` is the unpacked log dir, which is copied."""
    if root.exists():
        shutil.rmtree(root)
    root.mkdir(parents=True)
    PLACES[name](root, golden)


def unpacked(folder: Path) -> Path:
    return unpack(folder)


def _broker(root: Path, golden: Path) -> Path:
    """Create a stopped broker with its settings, and folders for the output of runs."""
    log_dir = root / LOG_DIR
    log_dir.parent.mkdir(parents=True)
    shutil.copytree(golden, log_dir, copy_function=shutil.copy2)
    for folder in ("etc/kafka", "backup", "srv", "tmp"):
        (root / folder).mkdir(parents=True)
    settings = (golden.parent / "server.properties").read_text().splitlines()
    kept = [line for line in settings if not line.startswith("log.dirs=")]
    (root / "etc/kafka/server.properties").write_text("\n".join([*kept, f"log.dirs={log_dir}"]) + "\n")
    return log_dir


def _crashed(root: Path, golden: Path) -> None:
    """Create a killed broker: without a clean shutdown, with a missing index, an index full of zeros, and half a batch
    at the end of a log.
    """
    log_dir = _broker(root, golden)
    (log_dir / ".kafka_cleanshutdown").unlink()
    (log_dir / "none-0" / f"{_FIRST}.index").unlink()
    index = log_dir / "zstd-0" / f"{_FIRST}.timeindex"
    index.write_bytes(bytes(index.stat().st_size))
    last = sorted((log_dir / "lz4-0").glob("*.log"))[-1]
    data = last.read_bytes()
    last.write_bytes(data[: len(data) - 40])
    recovered = log_dir / "recovery-point-offset-checkpoint"
    lines = [f"{' '.join(line.split()[:2])} 0" if line.startswith("lz4 ") else line for line in
             recovered.read_text().splitlines()]
    recovered.write_text("\n".join(lines) + "\n")


def _damaged(root: Path, golden: Path) -> None:
    """Create a broker with one flipped bit in one batch."""
    _flip_a_bit(_broker(root, golden) / "gzip-0" / f"{_FIRST}.log", 2000)


def _flip_a_bit(path: Path, byte: int) -> None:
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _replicas(root: Path, golden: Path) -> None:
    """Create the log dirs of three brokers. In the third, only the empty file of the last segment of one partition is
    left.
    """
    for name in ("broker-1", "broker-2", "broker-3"):
        shutil.copytree(golden, root / "mnt" / name, copy_function=shutil.copy2)
    _flip_a_bit(root / "mnt/broker-2/gzip-0" / f"{_FIRST}.log", 2000)
    removed = sorted((root / "mnt/broker-3/none-1").glob("*.log"))[1]
    for path in removed.parent.glob(f"{removed.stem}.*"):
        path.unlink()


def _table(root: Path, golden: Path) -> None:
    """Create a stopped broker, and a table of a thousand orders of fifty customers."""
    _broker(root, golden)
    columns = {
        "key": [b"customer-%d" % (n % 50) for n in range(1000)],
        "value": [b'{"order": %d}' % n for n in range(1000)],
    }
    pq.write_table(pa.table(columns), root / "srv/orders.parquet")


PLACES: dict[str, Callable[[Path, Path], object]] = {
    "broker": _broker,
    "crashed": _crashed,
    "damaged": _damaged,
    "replicas": _replicas,
    "table": _table,
}
