"""Slices of random logs, compared with the list of appended records, for any range, any slice size, and damaged
indexes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from keytail.errors import CorruptLog, Refused
from keytail.log.fs import LOCAL
from keytail.log.records import slices as module
from keytail.log.records.slices import batches, records, slices_of
from keytail.log.transactions import read_aborted
from tests.chance import SEED
from tests.growing_log import GrowingLog
from tests.reference.batches import Rec

LOGS = int(os.environ.get("KEYTAIL_SLICED_LOGS", "60"))


@pytest.fixture
def rng() -> random.Random:
    return random.Random(SEED)


def grown(rng: random.Random, path: Path, *, old: bool | None = None) -> GrowingLog:
    log = GrowingLog(rng, path)
    if old if old is not None else rng.random() < 0.3:
        log.grow(rng.randint(1, 20), old=True)
        log.roll()
    log.grow(rng.randint(1, 80))
    log.write()
    return log


def slices(
    log: GrowingLog, start: int, end: int, slice_bytes: int, *, committed: bool = False
) -> list[module.LogSlice]:
    facts = log.facts()
    aborted = read_aborted(LOCAL, facts.path, facts.segments, facts.log_start_offset) if committed else None
    return slices_of(LOCAL, facts, start, end, slice_bytes, aborted)


def read(pieces: list[module.LogSlice]) -> Iterator[Rec]:
    for piece in pieces:
        for table in records(LOCAL, piece):
            keys, values, headers = table.keys().to_list(), table.values().to_list(), table.headers()
            names, contents, at = headers.keys.to_list(), headers.values.to_list(), headers.offsets.tolist()
            for i, record in enumerate(table.records):
                pairs = tuple(zip(names[at[i] : at[i + 1]], contents[at[i] : at[i + 1]], strict=True))
                yield Rec(int(record["offset"]), int(record["timestamp_ms"]), keys[i], values[i], pairs)  # type: ignore[arg-type]


def appended(log: GrowingLog, start: int, end: int, *, committed: bool = False) -> list[Rec]:
    taken = [item for item in log._appended if start <= item.record.offset < end]
    return [item.record for item in taken if not (committed and item.aborted)]


def test_slices_of_random_logs_return_the_appended_records(rng: random.Random, tmp_path: Path) -> None:
    many = cut_inside = 0
    for number in range(LOGS):
        log = grown(rng, tmp_path / str(number))
        for _ in range(4):
            committed = rng.random() < 0.5
            start, end = sorted((rng.randint(-1, log.end), rng.randint(0, log.end)))
            end = min(end, log.stable) if committed else end
            pieces = slices(log, start, end, rng.choice([1, 200, 1000, 1 << 30]), committed=committed)
            assert list(read(pieces)) == appended(log, start, end, committed=committed)
            many = max(many, len(pieces))
            cut_inside += sum(piece.start > 0 for piece in pieces)
    assert many > 10
    assert cut_inside > LOGS


def test_batches_cover_the_range_once(rng: random.Random, tmp_path: Path) -> None:
    for number in range(LOGS // 4):
        log = grown(rng, tmp_path / str(number))
        start, end = sorted((rng.randint(0, log.end), rng.randint(0, log.end)))
        seen = [(row["base_offset"], row["last_offset"])
                for piece in slices(log, start, end, 300) for chunk in batches(LOCAL, piece) for row in chunk.table
                if row["last_offset"] >= start and row["base_offset"] < end]  # fmt: skip
        assert seen == sorted(set(seen))
        assert not seen or (seen[0][0] <= start and seen[-1][1] >= end - 1)
        assert bool(seen) == (start < end)
        assert all(after[0] == before[1] + 1 for before, after in pairwise(seen))


def test_slices_of_compacted_logs_lose_no_record(rng: random.Random, tmp_path: Path) -> None:
    """Small slices return the same as one large slice despite offset gaps and merged indexes, and no range is lost."""
    for number in range(LOGS // 6):
        log = grown(rng, tmp_path / str(number), old=False)
        log.settle()
        log.roll()
        log.grow(3)
        log.write()
        log.compact()
        everything = list(read(slices(log, 0, log.end, 1 << 30)))
        assert {item.offset for item in everything} <= {item.offset for item in appended(log, 0, log.end)}
        for _ in range(5):
            start, end = sorted((rng.randint(0, log.end), rng.randint(0, log.end)))
            found = list(read(slices(log, start, end, rng.choice([1, 500]))))
            assert found == [item for item in everything if start <= item.offset < end]


def single(rng: random.Random, path: Path, batches: int = 60) -> GrowingLog:
    """Write one segment whose index has an entry for nearly every batch."""
    log = GrowingLog(rng, path)
    for _ in range(batches):
        log.append(3)
    log.write()
    return log


@pytest.mark.parametrize("damage", ["none", "missing", "zeros after", "shifted", "another offset", "beyond the file"])
def test_records_do_not_depend_on_the_index(damage: str, rng: random.Random, tmp_path: Path) -> None:
    log = single(rng, tmp_path)
    index = log.path / f"{0:020d}.index"
    entries = np.frombuffer(index.read_bytes(), ">i4").reshape(-1, 2).copy()
    if damage == "missing":
        index.unlink()
    elif damage == "zeros after":
        index.write_bytes(entries.tobytes() + bytes(800))
    elif damage != "none":
        column, by = {"shifted": (1, 7), "another offset": (0, 1), "beyond the file": (1, 1 << 28)}[damage]
        entries[:, column] += by
        index.write_bytes(entries.tobytes())
    for start, end in [(0, log.end), (37, 120), (log.end - 1, log.end)]:
        pieces = slices(log, start, end, 400)
        assert list(read(pieces)) == appended(log, start, end)
        if damage in ("none", "zeros after", "another offset") and end - start > 30:
            assert len(pieces) > 1
        elif damage != "another offset":  # with such entries, a short range may also be divided in two
            assert len(pieces) == 1


def test_a_short_range_reads_only_a_small_part_of_the_segment(rng: random.Random, tmp_path: Path) -> None:
    log = single(rng, tmp_path, 500)
    [piece] = slices(log, 700, 705, 1 << 20)
    assert piece.size_bytes < piece.segment.log_bytes / 10  # some of the 500 batches, possibly including the largest
    assert [item.offset for item in read([piece])] == list(range(700, 705))


def test_a_slice_that_ends_inside_a_batch_is_an_error(rng: random.Random, tmp_path: Path) -> None:
    log = single(rng, tmp_path)
    first, *_ = slices(log, 0, log.end, 400)
    with pytest.raises(CorruptLog):
        list(read([module.replace(first, stop=first.stop - 1)]))


def test_an_aborted_transaction_missing_in_the_index_is_an_error(rng: random.Random, tmp_path: Path) -> None:
    log = GrowingLog(rng, tmp_path)
    log.append(2)
    log.append(3, producer=1)
    log.append(2)
    log.end_transaction(1, commit=False)
    log.append(1)
    log.write()
    assert [item.offset for item in read(slices(log, 0, log.end, 1, committed=True))] == [0, 1, 5, 6, 8]
    (log.path / f"{0:020d}.txnindex").unlink()
    with pytest.raises(CorruptLog, match="would be read as committed") as caught:
        list(read(slices(log, 0, log.end, 1 << 20, committed=True)))
    assert caught.value.offset == 2
    assert len(list(read(slices(log, 0, log.end, 1 << 20)))) == 8


def test_markers_at_the_edges_of_a_range_are_accepted(rng: random.Random, tmp_path: Path) -> None:
    """An aborted transaction that ends where the range begins, or begins where the range ends, is not a contradiction.
    """
    log = GrowingLog(rng, tmp_path)
    log.append(2, producer=1)
    log.end_transaction(1, commit=False)
    log.append(4)
    log.append(2, producer=1)
    log.end_transaction(1, commit=False)
    log.write()
    for start in range(log.end):
        for end in range(start, log.end + 1):
            found = [item.offset for item in read(slices(log, start, end, 1 << 20, committed=True))]
            assert found == [offset for offset in range(3, 7) if start <= offset < end]


def test_a_file_that_was_replaced_is_refused(rng: random.Random, tmp_path: Path) -> None:
    log = grown(rng, tmp_path, old=False)
    log.roll()
    log.grow(3)
    log.write()
    pieces = slices(log, 0, log.end, 1 << 30)
    (log.path / f"{0:020d}.log").touch()
    with pytest.raises(Refused, match="not the file that was listed"):
        list(read(pieces))


def test_a_log_that_grows_is_read_as_far_as_it_was_listed(rng: random.Random, tmp_path: Path) -> None:
    log = single(rng, tmp_path)
    pieces = slices(log, 0, log.end, 400)
    with (log.path / f"{0:020d}.log").open("ab") as file:
        file.write(b"\0" * 40)
    assert list(read(pieces)) == appended(log, 0, log.end)


def test_damage_in_the_active_segment_is_an_error_except_in_the_last_batch(rng: random.Random, tmp_path: Path) -> None:
    """The last batch may be incomplete because a broker is writing it; any damaged batch before it is an error."""
    log = single(rng, tmp_path)
    file = log.path / f"{0:020d}.log"
    data = file.read_bytes()
    # No batch follows the last one, so its end cannot be checked: only earlier batches are damaged here.
    *_, chunk = (chunk for piece in slices(log, 0, log.end, 1) for chunk in batches(LOCAL, piece))
    last = int(chunk.table["position"][-1])
    read_anyway = 0
    for _ in range(60):
        bad = bytearray(data)
        at = rng.randrange(last)
        bad[at] ^= 1 << rng.randrange(8)
        file.write_bytes(bad)
        try:
            found = list(read(slices(log, 0, log.end, rng.choice([400, 1 << 30]))))
        except (CorruptLog, Refused):
            continue
        read_anyway += 1  # no checksum covers the offset and the epoch of a batch
        wanted = appended(log, 0, log.end)
        assert [replace(item, offset=0) for item in found] == [replace(item, offset=0) for item in wanted]
    assert read_anyway < 30


def test_a_batch_below_the_base_offset_is_an_error(rng: random.Random, tmp_path: Path) -> None:
    log = single(rng, tmp_path, 3)
    log.roll()
    log.append(3)
    log.append(3)
    log.write()
    file = log.path / f"{9:020d}.log"
    file.write_bytes((4).to_bytes(8, "big") + file.read_bytes()[8:])
    with pytest.raises(CorruptLog, match="begins at offset 4, below the base offset 9 of its segment"):
        list(read(slices(log, 0, log.end, 400)))
