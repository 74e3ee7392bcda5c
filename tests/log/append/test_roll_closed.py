"""A closed log that is rolled in place has the files of a log that was opened, rolled and closed. A log that was not
closed as by a broker is not rolled.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keytail.errors import KeytailError, Refused
from keytail.format.producers import encode_snapshot
from keytail.log.append.partition_log import PartitionLog
from keytail.log.append.roll_closed import roll, why_not_closed
from keytail.log.append.rolling import AppendConfig
from keytail.log.empty_segment import make_empty_segment
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.one_partition import survey
from keytail.log.partition import PartitionFacts
from tests.chance import chance, draws
from tests.reference.batches import Rec, encode_batch, encode_marker

NOW_MS = 1_700_000_000_000
CONFIG = AppendConfig(segment_bytes=2000, index_interval_bytes=100)


def write_log(directory: Path) -> None:
    """Write a random log with producers, open and ended transactions, and close it as a broker does."""
    rng, sequences, opened = chance(), dict.fromkeys(range(1, 4), 0), set[int]()
    directory.mkdir(parents=True)
    with PartitionLog.open(str(directory), CONFIG, now_ms=NOW_MS) as log:
        for number in range(rng.randrange(1, 40)):
            producer = rng.choice([None, *sequences])
            times = [NOW_MS + rng.randrange(1000) + number for _ in range(rng.randrange(1, 4))]
            records = [Rec(at, time, b"k%d" % at, rng.randbytes(20)) for at, time in enumerate(times)]
            fields: dict[str, Any] = {}
            if producer in opened and rng.random() < 0.4:
                data = encode_marker(0, NOW_MS, commit=rng.random() < 0.5, producer_id=producer, producer_epoch=0)
                log.append(data, leader_epoch=number // 10, now_ms=NOW_MS)
                opened.remove(producer)
                continue
            if producer is not None:
                sequence = sequences[producer]
                fields = {"producer_id": producer, "producer_epoch": 0, "base_sequence": sequence, "transactional": 1}
                sequences[producer] += len(records)
                opened.add(producer)
            log.append(encode_batch(records, **fields), leader_epoch=number // 10, now_ms=NOW_MS)


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def facts_of(directory: Path) -> PartitionFacts:
    return survey(str(directory), log_start_offset=0, fs=LOCAL)


def rolled(directory: Path, fs: FileSystem = LOCAL) -> PartitionFacts:
    """Roll the log, and return the facts before the roll."""
    facts = facts_of(directory)
    assert why_not_closed(fs, facts) == ""
    new = roll(fs, facts.path, facts.segments[-1], facts.log_end_offset)
    assert facts_of(directory).segments == (*facts.segments, new)
    return facts


def test_the_files_are_those_of_a_log_that_was_opened_rolled_and_closed(tmp_path: Path) -> None:
    for number in range(draws(30)):
        ours, opened = (tmp_path / f"{kind}{number}" / "orders-0" for kind in ("ours", "opened"))
        write_log(ours)
        shutil.copytree(ours, opened)
        before = files_of(ours)
        facts = rolled(ours)
        with PartitionLog.open(str(opened), CONFIG, now_ms=NOW_MS) as log:
            assert log.roll(now_ms=NOW_MS) == facts.log_end_offset
        after = files_of(ours)
        assert after == files_of(opened)
        end = f"{facts.log_end_offset:020d}"
        assert after == before | {f"{end}{suffix}": b"" for suffix in (".log", ".index", ".timeindex")}


class RecordingChanges(FileSystem):
    """Records all changes."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.names: dict[int, str] = {}

    def _change(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], Any]) -> Any:
        result = super()._change(operation, arguments, action)
        what = self.names.get(arguments[0], "?") if isinstance(arguments[0], int) else Path(arguments[0]).name
        if operation == "create":
            self.names[result] = what
        self.done.append(f"{operation} {what}")
        return result

    def open_write(self, path: str) -> int:
        fd = super().open_write(path)
        self.names[fd] = Path(path).name
        return fd


def test_the_closed_segment_is_durable_before_the_next_one_exists(tmp_path: Path) -> None:
    write_log(tmp_path / "orders-0")
    fs = RecordingChanges()
    facts = rolled(tmp_path / "orders-0", fs)
    base, end = f"{facts.segments[-1].base_offset:020d}", f"{facts.log_end_offset:020d}"
    synced = [line for line in fs.done[: fs.done.index(f"create {end}.index")] if line.startswith("fsync ")]
    wanted = [f"fsync {base}{suffix}" for suffix in (".log", ".index", ".timeindex")] + [f"fsync {end}.snapshot"]
    assert set(wanted) <= set(synced)
    created = [line for line in fs.done if line.startswith(("create", "fsync_dir"))]
    assert created == [
        f"create {end}.index", f"create {end}.timeindex", "fsync_dir orders-0", f"create {end}.log",
        "fsync_dir orders-0",
    ]  # fmt: skip


def zeros(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(240))


def shorter(size_bytes: int) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[:-size_bytes])


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("suffix", "change", "why"),
    [
        (".index", zeros, "ends with zeros"),
        (".timeindex", zeros, "ends with zeros"),
        (".index", shorter(3), "ends within an entry"),
        (".timeindex", shorter(12), "has no entry for the largest timestamp"),
        (".index", Path.unlink, "one index is missing"),
        (".timeindex", Path.unlink, "one index is missing"),
        (".log", damaged, ".log has invalid batches"),
    ],
)
def test_a_segment_whose_indexes_are_not_closed_is_not_rolled(
    suffix: str, change: Callable[[Path], Any], why: str, tmp_path: Path
) -> None:
    directory = tmp_path / "orders-0"
    directory.mkdir()
    with PartitionLog.open(str(directory), CONFIG, now_ms=NOW_MS) as log:
        for number in range(5):
            records = [Rec(0, NOW_MS + number, b"k", b"v" * 90)]
            log.append(encode_batch(records), leader_epoch=0, now_ms=NOW_MS)
    change(directory / f"{0:020d}{suffix}")
    assert why in why_not_closed(LOCAL, facts_of(directory))


@pytest.mark.parametrize("change", ["removed", "damaged", "one above"])
def test_a_log_without_a_valid_snapshot_at_its_end_is_not_rolled(change: str, tmp_path: Path) -> None:
    directory = tmp_path / "orders-0"
    write_log(directory)
    end = facts_of(directory).log_end_offset
    path = directory / f"{end:020d}.snapshot"
    if change == "removed":
        path.unlink()
    elif change == "damaged":
        damaged(path)
    else:
        (directory / f"{end + 1:020d}.snapshot").write_bytes(encode_snapshot([]))
    assert f"at the log end offset, {end:020d}.snapshot" in why_not_closed(LOCAL, facts_of(directory))


def test_a_log_that_changed_since_it_was_surveyed_is_not_rolled(tmp_path: Path) -> None:
    directory = tmp_path / "orders-0"
    write_log(directory)
    facts = facts_of(directory)
    log = directory / f"{facts.segments[-1].base_offset:020d}.log"
    log.write_bytes(log.read_bytes() + b"more")
    before = files_of(directory)
    with pytest.raises(Refused, match="segment changed since it was planned"):
        roll(LOCAL, facts.path, facts.segments[-1], facts.log_end_offset)
    assert files_of(directory) == before


def test_a_segment_that_is_not_empty_is_never_replaced_by_an_empty_one(tmp_path: Path) -> None:
    log = tmp_path / f"{7:020d}.log"
    log.write_bytes(encode_batch([Rec(7, NOW_MS, b"k", b"v")]))
    before = files_of(tmp_path)
    with pytest.raises(KeytailError, match="a segment that is not empty exists"):
        make_empty_segment(LOCAL, str(tmp_path), 7, LOCAL.stat(str(tmp_path)))
    assert files_of(tmp_path) == before
