"""Index files of a segment compared with sorted lists: any sequence of operations, and the refusals of each."""

from __future__ import annotations

import os
import random
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from keytail.errors import CorruptLog, KeytailError
from keytail.log.fs import LOCAL
from keytail.log.index.files import (
    AbortedTransaction,
    OffsetIndex,
    TimeIndex,
    TransactionIndex,
)
from tests.chance import draws
from tests.crash.recorder import RecordingFileSystem, Stopped
from tests.crash.trees import write_tree
from tests.log.invariants import check_index

BASE = 1000
FAR = 2**31 - 1
steps = st.integers(1, 9)
# The examples of a class share one directory, so that they need no fixture.
STATEFUL = settings(
    max_examples=draws(40), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


class _Machine(RuleBasedStateMachine):
    """An index file in its own directory, and `rows`, the sorted list that is its model."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="keytail-index-"))
        self.path = str(self.directory / "index")
        self.like = LOCAL.stat(str(self.directory))
        self.rows: list[tuple[int, ...]] = []

    def teardown(self) -> None:
        shutil.rmtree(self.directory)


class OffsetIndexModel(_Machine):
    @initialize(capacity=st.integers(0, 12), odd=st.integers(0, 7))
    def create(self, capacity: int, odd: int) -> None:
        self.capacity, self.max_bytes = capacity, capacity * 8 + odd
        self.writing = True
        self.index = OffsetIndex.open_for_append(LOCAL, self.path, BASE, self.max_bytes, self.like)

    def teardown(self) -> None:
        self.index.close()
        super().teardown()

    @property
    def last(self) -> tuple[int, ...]:
        return self.rows[-1] if self.rows else (BASE - 1, -1)

    @rule(offsets=steps, bytes_=steps)
    def append(self, offsets: int, bytes_: int) -> None:
        row = (self.last[0] + offsets, self.last[1] + bytes_)
        if self.writing and len(self.rows) < self.capacity:
            self.index.append(*row)
            self.rows.append(row)
        else:
            with pytest.raises(KeytailError, match="the index is full" if self.writing else "read-only"):
                self.index.append(*row)

    @precondition(lambda self: self.rows and self.writing and len(self.rows) < self.capacity)
    @rule(back=st.integers(0, 20), ahead=steps)
    def append_not_increasing(self, back: int, ahead: int) -> None:
        for row in ((self.last[0] - back, self.last[1] + ahead), (self.last[0] + ahead, self.last[1] - back)):
            with pytest.raises(KeytailError, match=r"cannot follow|an entry holds offsets up to"):
                self.index.append(*row)

    @precondition(lambda self: self.writing and len(self.rows) < self.capacity)
    @rule(beyond=st.sampled_from([BASE - 1, BASE + FAR + 1, 0]))
    def append_out_of_range(self, beyond: int) -> None:
        with pytest.raises(KeytailError, match=r"an entry holds offsets up to 2147483647|cannot follow"):
            self.index.append(beyond, self.last[1] + 1)

    @rule(asked=st.integers(BASE - 3, BASE + 120))
    def lookup(self, asked: int) -> None:
        below = [(slot, *row) for slot, row in enumerate(self.rows) if row[0] <= asked]
        assert self.index.lookup(asked) == (below[-1] if below else (-1, BASE, 0))

    @precondition(lambda self: self.writing)
    @rule()
    def trim(self) -> None:
        self.index.trim()
        self.writing = False
        assert os.path.getsize(self.path) == 8 * len(self.rows)

    @precondition(lambda self: not self.writing)
    @rule()
    def continue_(self) -> None:
        """Reopen the segment as the active one, as a broker does with its last segment when it starts."""
        self.index.close()
        self.index = OffsetIndex.open_for_append(LOCAL, self.path, BASE, self.max_bytes, self.like)
        self.writing = True

    @invariant()
    def same(self) -> None:
        check_index(self.index)
        self.index.sanity_check()
        assert [self.index.entry(slot)[1:] for slot in range(len(self.index))] == self.rows
        assert self.index.entries().tolist() == [(offset - BASE, position) for offset, position in self.rows]
        assert self.index.last == ((len(self.rows) - 1, *self.rows[-1]) if self.rows else (-1, BASE, 0))
        if self.writing:
            assert os.path.getsize(self.path) == self.capacity * 8
            assert self.index.is_full == (len(self.rows) == self.capacity)
        # A reader sees the whole file if it is trimmed, and the entries before its zeros if it is active. An entry of
        # zeros in the first slot cannot be distinguished from preallocated space, and has no meaning.
        with OffsetIndex.open(LOCAL, self.path, BASE, active=self.writing) as seen:
            unseen = self.writing and self.rows == [(BASE, 0)]
            assert [seen.entry(slot)[1:] for slot in range(len(seen))] == ([] if unseen else self.rows)
            check_index(seen)


class TimeIndexModel(_Machine):
    @initialize(capacity=st.integers(1, 12), odd=st.integers(0, 11))
    def create(self, capacity: int, odd: int) -> None:
        self.capacity, self.max_bytes = capacity, capacity * 12 + odd
        self.writing = True
        self.index = TimeIndex.open_for_append(LOCAL, self.path, BASE, self.max_bytes, self.like)

    def teardown(self) -> None:
        self.index.close()
        super().teardown()

    @property
    def last(self) -> tuple[int, ...]:
        return self.rows[-1] if self.rows else (-1, BASE)

    @rule(later=st.integers(0, 3), offsets=st.integers(0, 3), closing=st.booleans())
    def append(self, later: int, offsets: int, closing: bool) -> None:
        row = (self.last[0] + later, self.last[1] + offsets)
        needs_room = later > 0 or not closing
        if not self.writing or (needs_room and len(self.rows) >= self.capacity - (not closing)):
            with pytest.raises(KeytailError, match="the index is full" if self.writing else "read-only"):
                self.index.maybe_append(*row, closing=closing)
            return
        assert self.index.maybe_append(*row, closing=closing) == (later > 0)
        if later:
            self.rows.append(row)

    @precondition(lambda self: self.rows and self.writing and len(self.rows) < self.capacity - 1)
    @rule(back=steps)
    def append_decreasing(self, back: int) -> None:
        for row in ((self.last[0] - back, self.last[1] + 1), (self.last[0] + 1, self.last[1] - back)):
            with pytest.raises(KeytailError, match="cannot follow"):
                self.index.maybe_append(*row)

    @rule(asked=st.integers(-2, 60))
    def lookup(self, asked: int) -> None:
        below = [(slot, *row) for slot, row in enumerate(self.rows) if row[0] <= asked]
        assert self.index.lookup(asked) == (below[-1] if below else (-1, -1, BASE))

    @precondition(lambda self: self.writing)
    @rule()
    def trim_and_continue(self) -> None:
        self.index.trim()
        assert os.path.getsize(self.path) == 12 * len(self.rows)
        check_index(self.index)
        self.index.close()
        self.index = TimeIndex.open_for_append(LOCAL, self.path, BASE, self.max_bytes, self.like)

    @precondition(lambda self: self.writing)
    @rule()
    def trim(self) -> None:
        self.index.trim()
        self.writing = False

    @invariant()
    def same(self) -> None:
        check_index(self.index)
        self.index.sanity_check()
        assert self.index.entries().tolist() == [(timestamp, offset - BASE) for timestamp, offset in self.rows]
        assert self.index.last == (len(self.rows) - 1, *self.last)
        if self.writing:
            assert os.path.getsize(self.path) == self.capacity * 12
            assert self.index.is_full == (len(self.rows) >= self.capacity - 1)


class TransactionIndexModel(_Machine):
    @initialize()
    def create(self) -> None:
        self.index = TransactionIndex(LOCAL, self.path, BASE, self.like)

    @rule(before=st.integers(0, 30), after=steps, stable=st.integers(-20, 1), producer=st.integers(0, 3))
    def append(self, before: int, after: int, stable: int, producer: int) -> None:
        last = max((row[2] for row in self.rows), default=BASE) + after
        row = AbortedTransaction(producer, last - before, last, last + stable)
        self.index.append(row)
        self.rows.append(row)

    @precondition(lambda self: self.rows)
    @rule(back=st.integers(0, 9))
    def append_decreasing(self, back: int) -> None:
        with pytest.raises(KeytailError, match="cannot follow"):
            self.index.append(AbortedTransaction(1, BASE, self.rows[-1][2] - back, BASE + 5))

    @rule(chance=st.randoms(use_true_random=False))
    def collect(self, chance: random.Random) -> None:
        bounds = [BASE, *(offset for row in self.rows for offset in row[1:])]
        start = chance.choice(bounds) + chance.choice([-1, 0, 0, 1, 5])
        upper = max(chance.choice(bounds) + chance.choice([-1, 0, 0, 1, 5]), start)
        found, complete = [], False
        for row in self.rows:
            if row[2] >= start and row[1] < upper:
                found.append(row)
            if row[3] >= upper:
                complete = True
                break
        assert self.index.collect(start, upper) == (found, complete)

    @rule()
    def open_again(self) -> None:
        self.index.flush()
        self.index = TransactionIndex(LOCAL, self.path, BASE, self.like)

    @invariant()
    def same(self) -> None:
        check_index(self.index)
        self.index.sanity_check()
        assert self.index.entries().tolist() == [(0, *row) for row in self.rows]


def test_operations_on_an_offset_index_equal_those_on_a_sorted_list() -> None:
    run_state_machine_as_test(OffsetIndexModel, settings=STATEFUL)


def test_operations_on_a_time_index_equal_those_on_a_sorted_list() -> None:
    run_state_machine_as_test(TimeIndexModel, settings=STATEFUL)


def test_operations_on_a_transaction_index_equal_those_on_a_sorted_list() -> None:
    run_state_machine_as_test(TransactionIndexModel, settings=STATEFUL)


def _offset_bytes(*entries: tuple[int, int]) -> bytes:
    return b"".join(struct.pack(">ii", *entry) for entry in entries)


def _time_bytes(*entries: tuple[int, int]) -> bytes:
    return b"".join(struct.pack(">qi", *entry) for entry in entries)


def _txn_bytes(*entries: tuple[int, int, int, int, int]) -> bytes:
    return b"".join(struct.pack(">hqqqq", *entry) for entry in entries)


@pytest.mark.parametrize(
    ("kind", "data", "slot", "says"),
    [
        (OffsetIndex, _offset_bytes((1, 0), (5, 90)) + b"abc", 2, "3 bytes after slot 1 are not a complete entry"),
        (OffsetIndex, _offset_bytes((-1, 0)), 0, "slot 0 has relative offset -1, position 0"),
        (OffsetIndex, _offset_bytes((1, 0), (1, 90)), 1, "slot 1 has relative offset 1, position 90 after relative"),
        (OffsetIndex, _offset_bytes((1, 50), (2, 50)), 1, "slot 1 has relative offset 2, position 50 after"),
        (OffsetIndex, _offset_bytes((1, 5), (2, 50), (0, 0), (0, 0)), 2, "2 entries from slot 2 on are zeros"),
        (OffsetIndex, _offset_bytes((0, 0), (0, 0), (0, 0)), 0, "3 entries from slot 0 on are zeros"),
        (TimeIndex, _time_bytes((5, 1))[:-1], 0, "11 bytes after slot -1 are not a complete entry"),
        (TimeIndex, _time_bytes((5, 1), (5, 2)), 1, "slot 1 has timestamp ms 5, relative offset 2 after timestamp"),
        (TimeIndex, _time_bytes((5, 2), (6, 1)), 1, "slot 1 has timestamp ms 6, relative offset 1 after"),
        (TimeIndex, _time_bytes((-1, 2)), 0, "slot 0 has timestamp ms -1"),
        (TimeIndex, _time_bytes((5, 1), (0, 0)), 1, "1 entries from slot 1 on are zeros: the file was not trimmed"),
        (TransactionIndex, _txn_bytes((1, 4, BASE, BASE + 2, BASE + 3)), 0, "slot 0 has version 1"),
        (TransactionIndex, _txn_bytes((0, 4, 1, BASE - 1, BASE)), 0, f"in a segment with base offset {BASE}"),
        (TransactionIndex, _txn_bytes(*[(0, 4, 1, BASE + 1, BASE)] * 2), 1, f"after last offset {BASE + 1}"),
        (TransactionIndex, _txn_bytes((0, 4, 1, BASE + 1, BASE)) + b"x", 1, "1 bytes after slot 0"),
    ],
)
def test_the_sanity_check_reports_file_and_slot(kind: type, data: bytes, slot: int, says: str, tmp_path: Path) -> None:
    path = tmp_path / f"{BASE:020d}.index"
    path.write_bytes(data)
    index = TransactionIndex(LOCAL, str(path), BASE) if kind is TransactionIndex else kind.open(LOCAL, str(path), BASE)
    with pytest.raises(CorruptLog) as caught:
        index.sanity_check()
    assert says in str(caught.value)
    assert caught.value.path == str(path)
    assert caught.value.byte_position == slot * {OffsetIndex: 8, TimeIndex: 12, TransactionIndex: 34}[kind]
    if kind is not TransactionIndex:
        with pytest.raises(CorruptLog):
            kind.open_for_append(LOCAL, str(path), BASE, 1024, LOCAL.stat(str(tmp_path)))
        assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (OffsetIndex, b""),
        (OffsetIndex, _offset_bytes((0, 0))),  # an entry at the base offset is valid
        (OffsetIndex, _offset_bytes((0, 0), (FAR, 2**31 - 1))),
        (TimeIndex, _time_bytes((0, 0), (1, 0), (2**63 - 1, FAR))),
    ],
)
def test_valid_files_pass_the_check(kind: type, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "index"
    path.write_bytes(data)
    with kind.open(LOCAL, str(path), BASE) as index:
        index.sanity_check()
        assert len(index) * {OffsetIndex: 8, TimeIndex: 12}[kind] == len(data)
        with pytest.raises(KeytailError, match="read-only"):
            index.trim()


def test_the_entries_of_an_active_index_end_where_its_zeros_begin(tmp_path: Path) -> None:
    path = tmp_path / "index"
    for used in range(6):
        path.write_bytes(_time_bytes(*((100 + n, n) for n in range(used))) + bytes(12 * 4))
        with TimeIndex.open(LOCAL, str(path), BASE, active=True) as index:
            assert len(index) == used
        with TimeIndex.open(LOCAL, str(path), BASE) as index:
            assert (len(index), index.used) == (used + 4, used)


def test_an_index_over_billions_of_offsets_is_searched_in_place(tmp_path: Path) -> None:
    """The index has a broker's default size and is full, and covers the maximum range of a segment."""
    count = 10_485_760 // 8
    relative = np.linspace(1, FAR, count).astype(">i4")
    entries = np.empty(count, [("offset", ">i4"), ("position", ">i4")])
    entries["offset"], entries["position"] = relative, np.arange(count)
    path = tmp_path / "index"
    path.write_bytes(entries.tobytes())
    with OffsetIndex.open(LOCAL, str(path), BASE) as index:
        for slot in (0, 1, count // 2, count - 2):
            at, behind = BASE + int(relative[slot]), BASE + int(relative[slot + 1])
            assert index.lookup(at) == (slot, at, slot)
            assert index.lookup(behind - 1) == (slot, at, slot)
        assert index.lookup(BASE + FAR).slot == count - 1


def test_a_transaction_index_creates_its_file_with_the_first_entry(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index = TransactionIndex(LOCAL, str(path), BASE, LOCAL.stat(str(tmp_path)))
    assert index.collect(0, 10**9) == ([], False)
    index.flush()
    assert not path.exists()
    index.append(AbortedTransaction(4001, BASE, BASE + 2, BASE + 3))
    assert path.read_bytes() == _txn_bytes((0, 4001, BASE, BASE + 2, BASE + 3))
    with pytest.raises(KeytailError, match="read-only"):
        TransactionIndex(LOCAL, str(path), BASE).append(AbortedTransaction(1, BASE, BASE + 9, BASE + 9))


@pytest.mark.parametrize("torn", [False, True])
def test_an_index_left_by_a_stop_is_continued_or_refused(torn: bool, tmp_path: Path) -> None:
    """An entry that was not appended is never returned; an index that was not trimmed must be rebuilt."""
    rows = [(BASE + 5, 100), (BASE + 9, 300), (BASE + 12, 450), (BASE + 20, 700)]

    def work(fs: RecordingFileSystem, directory: Path) -> None:
        name = str(directory / "index")
        with OffsetIndex.open_for_append(fs, name, BASE, 100, fs.stat(str(directory))) as index:
            for row in rows:
                index.append(*row)
            index.flush()
            index.trim()

    outcomes = set()
    for stop in range(100):
        directory = tmp_path / f"{stop}"
        directory.mkdir()
        fs = RecordingFileSystem(directory).stop_at(stop, torn=torn)
        try:
            work(fs, directory)
            fs.check()
            break
        except Stopped:
            write_tree(fs.as_it_is(), tmp_path / f"{stop} is")
            write_tree(fs.power_cut(), tmp_path / f"{stop} cut")
        for left in (tmp_path / f"{stop} is", tmp_path / f"{stop} cut"):
            try:
                with OffsetIndex.open_for_append(LOCAL, str(left / "index"), BASE, 100, LOCAL.stat(str(left))) as index:
                    found = [index.entry(slot)[1:] for slot in range(len(index))]
            except CorruptLog:
                outcomes.add("refused")
            else:
                assert found in ([], rows)
                outcomes.add(len(found))
    assert outcomes == {"refused", 0, 4}
    assert stop > 8
    assert (directory / "index").read_bytes() == b"".join(struct.pack(">ii", o - BASE, p) for o, p in rows)
