"""The log dirs on which the recorded commands run: small, with the same bytes, times and paths in each run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from keytail.format.producers import encode_snapshot
from tests import golden
from tests.log_dirs import BASE_MS, random_records, write_log_dir
from tests.reference.batches import decode_log, encode_batch

# The clock of all commands: an hour after the broker of the golden logs was stopped.
NOW_MS = golden.manifest()["generated_ms"] + 3_600_000
SEGMENT = "00000000000000000000"
RECORDS = 120  # the number per partition, in three segments of four batches


def place(name: str, root: Path, cache: Path) -> None:
    """Write the place `name` into the directory `root`, whose former contents are removed.

    A place is built only once, at `root`, and copied to `cache`; later calls copy it from there.
    """
    cached = cache / name
    if not cached.exists():
        _empty(root)
        PLACES[name](root)
        shutil.copytree(root, cached, copy_function=shutil.copy2)
    _empty(root)
    shutil.copytree(cached, root, copy_function=shutil.copy2, dirs_exist_ok=True)


def _empty(root: Path) -> None:
    if root.exists():
        shutil.rmtree(root)
    root.mkdir(parents=True)


def _logs(root: Path, names: tuple[str, ...] = ("orders-0", "orders-1", "users-0"), at: str = "logs") -> Path:
    """Write a log dir of a cleanly stopped broker, without a metadata log, and return its path."""
    records = {name: random_records(number, RECORDS, 12) for number, name in enumerate(names)}
    log_dir = write_log_dir(root / at, records, segments=3)
    _set_times(log_dir)
    return log_dir


def _set_times(log_dir: Path) -> None:
    for number, path in enumerate(sorted(log_dir.rglob("*"))):
        os.utime(path, ns=((BASE_MS + 1000 * number) * 1_000_000,) * 2)


def _due(root: Path) -> None:
    _logs(root)


def _clean(root: Path) -> None:
    """Write a log dir in which everything below the active segments has been compacted."""
    log_dir = _logs(root)
    (log_dir / "cleaner-offset-checkpoint").write_text("0\n2\norders 0 80\norders 1 80\n")
    _set_times(log_dir)


def _refused(root: Path) -> None:
    """Write a partition that is being moved to another log dir."""
    log_dir = _logs(root, ("orders-0",))
    (log_dir / f"orders-0.{'a' * 32}-future").mkdir()
    _set_times(log_dir)


def _damaged(root: Path) -> None:
    """Write a log dir with one flipped bit in a batch."""
    log_dir = _logs(root, ("orders-0",))
    _flip_a_bit(log_dir / "orders-0" / f"{40:020d}.log")
    _set_times(log_dir)


def _mixed(root: Path) -> None:
    """Write a partition that is due, a damaged one, a refused one, and one that is not compacted."""
    log_dir = _logs(root, ("orders-0", "orders-1", "orders-2", "users-0"))
    _flip_a_bit(log_dir / "orders-1" / f"{40:020d}.log")
    (log_dir / f"orders-2.{'a' * 32}-future").mkdir()
    _set_times(log_dir)


def _flip_a_bit(log: Path) -> None:
    """Flip a bit in the records of the second batch."""
    data = bytearray(log.read_bytes())
    data[decode_log(bytes(data))[1].position + 70] ^= 1
    log.write_bytes(data)


def _nothing(root: Path) -> None:
    (root / "logs").mkdir()


def _no_partitions(root: Path) -> None:
    _logs(root, ())


def _crashed(root: Path) -> None:
    """Write a log dir without a clean shutdown, with a missing index, a wrong one, and a torn batch above the recovery
    point.
    """
    log_dir = _logs(root)
    (log_dir / ".kafka_cleanshutdown").unlink()
    (log_dir / "orders-0" / f"{40:020d}.index").unlink()
    index = log_dir / "orders-1" / f"{SEGMENT}.timeindex"
    index.write_bytes(b"\xff" * max(12, index.stat().st_size))
    last = log_dir / "users-0" / f"{80:020d}.log"
    last.write_bytes(last.read_bytes()[:-9])
    (log_dir / "recovery-point-offset-checkpoint").write_text("0\n3\norders 0 120\norders 1 120\nusers 0 80\n")
    _set_times(log_dir)


def _two_log_dirs(root: Path) -> None:
    """Write two log dirs that both have the same partition."""
    _logs(root, ("orders-0",), "logs")
    log_dir = _logs(root, ("orders-1", "users-0"), "more")
    shutil.copytree(root / "logs" / "orders-0", log_dir / "orders-0")
    _set_times(log_dir)


def _replicas(root: Path) -> None:
    """Write three log dirs: b has a batch of another epoch; c lacks users-0 and record 15, and has a damaged batch."""
    for name in "abc":
        log_dir = _logs(root, ("orders-0", "orders-1", "users-0"), name)
        (log_dir / "cleaner-offset-checkpoint").write_text("0\n0\n")
    shutil.rmtree(root / "c" / "users-0")
    _encode_again(root / "b" / "orders-0" / f"{40:020d}.log", 2, leader_epoch=7)
    _encode_again(root / "c" / "orders-0" / f"{SEGMENT}.log", 1, without=15)
    _flip_a_bit(root / "c" / "orders-1" / f"{40:020d}.log")
    for name in "abc":
        _set_times(root / name)


def _encode_again(log: Path, number: int, *, without: int | None = None, leader_epoch: int = 0) -> None:
    """Replace a batch of the file with one without the record `without`, or with another epoch."""
    data = log.read_bytes()
    batch = decode_log(data)[number]
    records = [record for record in batch.records if record.offset != without]
    new = encode_batch(records, base_offset=batch.base_offset, last_offset=batch.last_offset, leader_epoch=leader_epoch)
    log.write_bytes(data[: batch.position] + new + data[batch.position + batch.size :])


def _broker(root: Path) -> None:
    """Write the log dir of a real Kafka 4.3.1 with its metadata log, and its properties file."""
    golden.unpack(root)
    (root / golden.LOG_DIR).rename(root / "logs")
    text = golden.PROPERTIES.read_text()
    (root / "server.properties").write_text(f"{text}log.dirs={root / 'logs'}\n")


def _erasable(root: Path) -> None:
    """Write a partition that can be rolled, one that cannot, and files of keys."""
    log_dir = _logs(root)
    (log_dir / "orders-0" / f"{RECORDS:020d}.snapshot").write_bytes(encode_snapshot([]))
    _set_times(log_dir)
    (root / "keys").write_text("key-3\nkey-11\nno-such-key\n")
    (root / "absent").write_text("6e6f\n")
    (root / "twice").write_text("key-3\nkey-11\nkey-3\n")


def _table(root: Path) -> None:
    """Write the log dir of a stopped broker, and a table of records to import."""
    _logs(root)
    columns = {
        "key": [b"customer-%d" % (number % 7) for number in range(50)],
        "value": [b'{"order": %d}' % number for number in range(50)],
    }
    pq.write_table(pa.table(columns), root / "orders.parquet")
    _set_times(root)


PLACES: dict[str, Callable[[Path], None]] = {
    "due": _due,
    "clean": _clean,
    "refused": _refused,
    "damaged": _damaged,
    "mixed": _mixed,
    "nothing": _nothing,
    "no partitions": _no_partitions,
    "crashed": _crashed,
    "two log dirs": _two_log_dirs,
    "replicas": _replicas,
    "broker": _broker,
    "erasable": _erasable,
    "table": _table,
}
