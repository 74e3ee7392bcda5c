"""Compares the latest records of a partition with a reference model in plain Python, for various sizes of the map and
of slices.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from keytail.errors import CorruptLog, Refused
from keytail.export import latest as module
from keytail.export.latest import LatestTask, find_latest, latest_records, slices_of
from keytail.log.fs import LOCAL
from keytail.log.records.chunk import SegmentReader
from tests.chance import SEED
from tests.growing_log import GrowingLog
from tests.in_pieces import read_in_pieces
from tests.reference.batches import Rec
from tests.reference.cleaner import Aborted

LOGS = int(os.environ.get("KEYTAIL_EXPORT_LOGS", "60"))
ROOM = 1 << 20


@pytest.fixture
def rng() -> random.Random:
    return random.Random(SEED)


def task_of(log: GrowingLog, from_offset: int = 0, end_offset: int | None = None, **fields: object) -> LatestTask:
    facts = log.facts()
    end = log.stable if end_offset is None else end_offset
    task = LatestTask(
        str(log.path), facts.segments, facts.log_start_offset, max(from_offset, facts.log_start_offset), end,
        map_memory_bytes=ROOM,
    )  # fmt: skip
    return replace(task, **fields)  # type: ignore[arg-type]


def records_of(task: LatestTask, slice_bytes: int) -> Iterator[Rec]:
    found = find_latest(LOCAL, task)
    count = 0
    for piece in slices_of(task, found, slice_bytes):
        for table in latest_records(LOCAL, piece):
            keys, values, headers = table.keys().to_list(), table.values().to_list(), table.headers()
            names, contents, at = headers.keys.to_list(), headers.values.to_list(), headers.offsets.tolist()
            for i, record in enumerate(table.records):
                pairs = tuple(zip(names[at[i] : at[i + 1]], contents[at[i] : at[i + 1]], strict=True))
                yield Rec(int(record["offset"]), int(record["timestamp_ms"]), keys[i], values[i], pairs)  # type: ignore[arg-type]
                count += 1
    assert count == found.records


def folded(task: LatestTask, slice_bytes: int = 1 << 30) -> dict[bytes | None, Rec]:
    records = list(records_of(task, slice_bytes))
    assert [record.offset for record in records] == sorted({record.offset for record in records})
    state = {record.key: record for record in records}
    assert len(state) == len(records), "a key occurs twice"
    return state


def expected(log: GrowingLog, end: int | None = None) -> dict[bytes | None, Rec]:
    return {key: record for key, (record, _) in log.latest(end).items()}


@pytest.mark.long
@pytest.mark.parametrize("in_pieces", [False, True])
def test_latest_records_of_random_logs_equal_the_model(
    in_pieces: bool, rng: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The range may begin at the end of an earlier export, follow several compactions, and end at any offset."""
    if in_pieces:
        read_in_pieces(monkeypatch)
    for number in range(LOGS):
        log = GrowingLog(rng, tmp_path / f"logs{number}", keys=rng.choice([1, 3, 40]))
        if rng.random() < 0.4:
            log.grow(rng.randint(1, 8), old=True)
            log.roll()
        log.grow(rng.randint(0, 30))
        log.write()
        few = {} if rng.random() < 0.7 else {"map_memory_bytes": 36 * rng.randint(8, 20)}
        assert folded(task_of(log, **few), rng.choice([1, 300, 1 << 30])) == expected(log)
        state, seen = expected(log), log.stable
        any_end = rng.randint(0, log.stable)
        assert folded(task_of(log, end_offset=any_end)) == expected(log, any_end)
        for _ in range(rng.randint(0, 3)):
            log.grow(rng.randint(0, 15))
            log.write()
            task = task_of(log, seen, tombstones=True, **few)
            assert not find_latest(LOCAL, task).has_gap
            state |= folded(task, rng.choice([1, 300, 1 << 30]))
            state, seen = {key: record for key, record in state.items() if record.value is not None}, log.stable
            assert state == expected(log)
        log.roll()
        log.grow(rng.randint(1, 5))
        log.write()
        for _ in range(2):
            log.compact()
            assert folded(task_of(log)) == expected(log), "the state must be the same after a compaction"


def fixed(tmp_path: Path, batches: int = 40) -> GrowingLog:
    log = GrowingLog(random.Random(7), tmp_path / "logs")
    log.grow(batches)
    log.write()
    return log


def test_keys_that_do_not_fit_into_the_map_are_processed_in_shards(tmp_path: Path) -> None:
    log = fixed(tmp_path)
    item, many = (find_latest(LOCAL, task_of(log, map_memory_bytes=n)) for n in (ROOM, 36 * 8))
    assert item.shards == 1
    assert many.shards > 1
    assert many.bits == item.bits
    assert many.tombstones == item.tombstones > 0
    with pytest.raises(Refused, match="--map-memory"):
        find_latest(LOCAL, task_of(log, map_memory_bytes=1))


@pytest.mark.parametrize("entries", [[], [(1, 1, 2)], [(2, 3, 4)], [(1, 1, 2), (2, 3, 4)], [(2, 0, 4)]])
def test_wrong_transaction_indexes_do_not_override_the_log(
    entries: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    """The second set of entries is correct: the first transaction of producer 1 was aborted."""
    log = GrowingLog(random.Random(1), tmp_path / "logs")
    log.append_records([Rec(0, 1, b"a", b"old")])
    log.append_records([Rec(1, 1, b"a", b"aborted")], 1)
    log.end_transaction(1, commit=False)
    log.append_records([Rec(3, 1, b"b", b"committed")], 2)
    log.end_transaction(2, commit=True)
    log.write()
    index = log.path / f"{0:020d}.txnindex"
    index.write_bytes(b"".join(Aborted(*entry, entry[2] + 1).encode() for entry in entries))
    assert {key: record.value for key, record in folded(task_of(log)).items()} == {b"a": b"old", b"b": b"committed"}


def test_aborted_data_before_the_end_of_an_earlier_export_is_not_exported(tmp_path: Path) -> None:
    """The abort marker is after that end, as when the high watermark was below the end of the transaction."""
    log = GrowingLog(random.Random(1), tmp_path / "logs")
    log.append_records([Rec(0, 1, b"a", b"old")])
    log.append_records([Rec(1, 1, b"a", b"aborted")], 1)
    log.append_records([Rec(2, 1, b"b", b"aborted")], 1)
    log.end_transaction(1, commit=False)
    log.append_records([Rec(4, 1, b"c", b"good")], 1)
    log.end_transaction(1, commit=True)
    log.write()
    for seen in range(1, 6):
        assert set(folded(task_of(log, seen, tombstones=True))) == ({b"c"} if seen <= 4 else set())


def test_a_gap_in_the_range_is_detected(tmp_path: Path) -> None:
    log = GrowingLog(random.Random(1), tmp_path / "logs")
    log.append_records([Rec(0, 1, b"a", b"x")])
    log.append_records([Rec(1, 1, b"a", b"x"), Rec(3, 1, b"b", b"x")])
    log.append_records([Rec(6, 1, b"c", b"x")])
    log.append_records([Rec(9, 1, b"c", b"x")])
    log.write()
    ends = {(0, 1): False, (0, 2): True, (4, 7): True, (6, 7): False, (0, 7): True, (6, 9): True, (4, 6): True}
    for (start, end), gap in ends.items():
        assert find_latest(LOCAL, task_of(log, start, end)).has_gap == gap, (start, end)


def test_records_without_a_key_are_refused_or_counted(tmp_path: Path) -> None:
    log = GrowingLog(random.Random(1), tmp_path / "logs")
    log.append_records([Rec(0, 1, b"a", b"x"), Rec(1, 1, None, b"x"), Rec(2, 1, None, b"x")])
    log._appended.clear()
    log.write()
    with pytest.raises(Refused, match=r"2 records have no key.*offset 1"):
        find_latest(LOCAL, task_of(log))
    dropping = task_of(log, drop_keyless=True)
    assert find_latest(LOCAL, dropping).keyless == 2
    assert set(folded(dropping)) == {b"a"}
    assert find_latest(LOCAL, task_of(log, end_offset=2, drop_keyless=True)).keyless == 1


def test_files_that_change_during_the_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fixed(tmp_path)
    task = task_of(log)
    found = find_latest(LOCAL, task)
    [piece] = slices_of(task, found)
    first = log.path / f"{piece.segments[0].base_offset:020d}.log"
    data = first.read_bytes()
    tables = latest_records(LOCAL, piece)
    next(tables)
    first.write_bytes(data[: len(data) // 2])
    with pytest.raises(Refused, match="not the file that was listed"):
        list(tables)
    with pytest.raises(Refused, match="not the file that was listed"):
        find_latest(LOCAL, task)
    first.unlink()
    with pytest.raises(Refused, match="not the file that was listed"):
        find_latest(LOCAL, task)


def test_damage_is_reported_as_corrupt(tmp_path: Path) -> None:
    log = fixed(tmp_path)
    first = sorted(log.path.glob("*.log"))[0]
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(CorruptLog):
        find_latest(LOCAL, task_of(log))


def test_batches_appended_during_the_run_are_not_read(tmp_path: Path) -> None:
    log = fixed(tmp_path)
    task, before = task_of(log), expected(log)
    log.grow(5)
    log._segments = log._segments[:1]
    log.write()
    assert folded(task) == before


def test_only_segments_with_latest_records_have_slices(tmp_path: Path) -> None:
    log = fixed(tmp_path)
    task = task_of(log)
    found = find_latest(LOCAL, task)
    pieces = slices_of(task, found, 1)
    assert all(len(piece.segments) == 1 for piece in pieces)
    assert len(pieces) < len(task.sources)
    assert module.SLICE_BYTES > 1


def test_damage_in_the_active_segment_is_corrupt_below_the_end(rng: random.Random, tmp_path: Path) -> None:
    """A batch after the requested end may be incomplete, because a broker is writing it. A damaged batch before the end
    is an error, and no other batch is skipped because of it.
    """
    log = GrowingLog(rng, tmp_path)
    for _ in range(20):
        log.append(3)
    log.write()
    file = log.path / f"{0:020d}.log"
    data = file.read_bytes()
    file.write_bytes(data + bytes(30))
    assert set(folded(task_of(log))) == set(log.latest())
    # The last batch is not damaged: nothing after it shows where it should end.
    [chunk] = SegmentReader(LOCAL).chunks(str(file), len(data))
    last = int(chunk.table["position"][-1])
    for _ in range(20):
        bad = bytearray(data)
        bad[rng.randrange(last)] ^= 1 << rng.randrange(8)
        file.write_bytes(bad)
        try:
            state = folded(task_of(log))
        except CorruptLog:
            continue
        # No checksum covers the offset and leader epoch of a batch; if only these are changed, all batches are read.
        assert set(state) == set(log.latest())
