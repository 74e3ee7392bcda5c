"""The transaction tracker compared with its reference model, and transaction indexes that are missing, truncated, wrong
or of another log.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.compact.cleaner import clean_partition, install
from keytail.compact.task import CleaningTask
from keytail.errors import CorruptLog, Refused
from keytail.format.batch import BATCH_TABLE
from keytail.log.fs import LOCAL
from keytail.log.partition import SegmentFacts
from keytail.log.transactions import (
    NATIVE_ENTRY,
    Contradiction,
    TransactionTracker,
    read_aborted,
    sorted_entries,
)
from tests.chance import draws
from tests.compact.logs import RandomLog, task_for, write_log
from tests.reference.batches import Rec, decode_log, encode_batch, encode_marker
from tests.reference.cleaner import Aborted, Segment
from tests.reference.transactions import Event, broker_entries, right_entries, track

NOW = 1_750_000_000_000
TRANSACTIONAL, CONTROL = 0x10, 0x20


def table_of(events: list[Event]) -> np.ndarray:
    table = np.zeros(len(events), BATCH_TABLE)
    for row, event in zip(table, events, strict=True):
        row["base_offset"], row["last_offset"] = event.base_offset, event.last_offset
        row["producer_id"], row["record_count"], row["control_type"] = event.producer_id, 1, -1
        if event.kind != "plain":
            row["attributes"] = TRANSACTIONAL | (CONTROL if event.is_control else 0)
        row["control_type"] = {"ABORT": 0, "COMMIT": 1, "other control": 2}.get(event.kind, -1)
        if event.kind == "emptied control":
            row["record_count"] = 0
    return table


def entry_array(entries: list[Aborted]) -> np.ndarray:
    out = np.zeros(len(entries), NATIVE_ENTRY)
    for row, entry in zip(out, entries, strict=True):
        row["producer_id"], row["first_offset"] = entry.producer_id, entry.first_offset
        row["last_offset"], row["last_stable_offset"] = entry.last_offset, entry.last_stable_offset
    return sorted_entries(out, 0)


def plain(entries: np.ndarray) -> list[Aborted]:
    names = ("producer_id", "first_offset", "last_offset", "last_stable_offset")
    return [Aborted(*(int(entry[name]) for name in names)) for entry in entries]


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """Draw transactions of a few interleaved producers; some transactions are empty, some open."""
    kinds = st.sampled_from(["plain", "data", "data", "data", "ABORT", "COMMIT", "ABORT", "other control"])
    events, offset = [], draw(st.sampled_from([0, 2**40]))
    for kind, producer_id, gap, span in draw(
        st.lists(st.tuples(kinds, st.sampled_from([1, 2, 2**62]), st.integers(0, 2), st.integers(0, 3)), max_size=40)
    ):
        offset += gap
        last = offset + (span if kind in ("plain", "data") else 0)
        events.append(Event(kind, producer_id, offset, last))
        offset = last + 1
    return events


def in_pieces(table: np.ndarray, draw: random.Random) -> list[np.ndarray]:
    cuts = sorted(draw.randint(0, len(table)) for _ in range(3))
    return [table[a:b] for a, b in zip([0, *cuts], [*cuts, len(table)], strict=True)]


def cleaned(events: list[Event], rng: random.Random) -> tuple[list[Event], list[Aborted]]:
    """Remove events that rounds may remove, and return the others with their index entries. Markers and entries are
    removed only after all data of their transactions.
    """
    entries = broker_entries(events)
    share = rng.choice([0.3, 0.7, 1.0])
    left = [e for e in events if e.kind != "data" or rng.random() < share]
    open_data: set[int] = set()
    needed = set()
    for event in left:
        if event.kind == "data":
            open_data.add(event.producer_id)
        elif event.kind in ("ABORT", "COMMIT") and event.producer_id in open_data:
            open_data.remove(event.producer_id)
            needed.add(event.base_offset)
    # The entry is removed before the marker.
    entries = [a for a in entries if a.last_offset in needed or rng.random() < 0.5]
    needed |= {a.last_offset for a in entries}
    return [
        e for e in left if e.kind not in ("ABORT", "COMMIT") or e.base_offset in needed or rng.random() < 0.5
    ], entries


def corrected(table: np.ndarray, entries: np.ndarray, log_start_offset: int = 0) -> np.ndarray:
    """Return the index entries as corrected by the log."""
    tracker = TransactionTracker(entries, log_start_offset)
    tracker.follow(table)
    try:
        return tracker.finish().entries
    except Contradiction as contradiction:
        return contradiction.entries


@settings(deadline=None, max_examples=draws(300))
@given(logs(), st.randoms(use_true_random=False))
def test_the_tracker_equals_the_model_after_any_rounds(events: list[Event], rng: random.Random) -> None:
    """CONFORMANCE.md 29 to 31: valid indexes are used, whatever earlier rounds have removed."""
    events, entries = cleaned(events, rng)
    table = table_of(events)
    tracker = TransactionTracker(entry_array(entries), 0)
    # As bytes: NumPy and compiled code disagree about a bool that is neither 0 nor 1.
    discards = [flag for piece in in_pieces(table, rng) for flag in tracker.follow(piece).view(np.uint8).tolist()]
    expected, kept = track(events, entries)
    assert discards == expected
    transactions = tracker.finish()
    data = np.array([e.kind == "data" for e in events], bool)
    control = np.array([e.is_control for e in events], bool)
    for _ in range(2):  # the order does not matter, because all transactions are known now
        at = rng.sample(range(len(events)), len(events))
        assert (transactions.aborted(table[at]) == (np.array(expected, bool) & data)[at]).all()
        assert (transactions.unneeded_markers(table[at]) == (np.array(expected, bool) & control)[at]).all()
    middle = events[len(events) // 2].base_offset if events else 0
    files = [transactions.index_bytes(0, middle), transactions.index_bytes(middle, 2**63 - 1)]
    assert files[0] == b"".join(entry.encode() for entry in kept if entry.last_offset < middle)
    assert b"".join(files) == b"".join(entry.encode() for entry in kept)


@settings(deadline=None, max_examples=draws(200))
@given(logs(), st.randoms(use_true_random=False))
def test_without_indexes_the_log_itself_is_sufficient(events: list[Event], rng: random.Random) -> None:
    right = broker_entries(events)
    assert plain(corrected(table_of(events), entry_array([]))) == plain(entry_array(right))
    if right:
        left_out = rng.randrange(len(right))
        tracker = TransactionTracker(entry_array(right[:left_out] + right[left_out + 1 :]), 0)
        for piece in in_pieces(table_of(events), rng):
            tracker.follow(piece)
        with pytest.raises(Contradiction) as contradiction:
            tracker.finish()
        assert plain(contradiction.value.entries) == plain(entry_array(right))


def damaged_entries(entries: list[Aborted], events: list[Event], rng: random.Random) -> list[Aborted]:
    """Omit, duplicate and change some entries, and add wrong ones."""
    offsets = [at for e in events for at in (e.base_offset - 1, e.base_offset, e.last_offset, e.last_offset + 1)]
    out = []
    for entry in entries:
        near = [at for at in offsets if entry.first_offset - 4 <= at <= entry.last_offset + 2]
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            values = [entry.producer_id, entry.first_offset, entry.last_offset, entry.last_stable_offset]
            if rng.random() < 0.6:
                at = rng.randrange(4)
                values[at] = rng.choice([*near, values[at] + rng.choice([-2, -1, 1])]) if at else rng.choice([1, 2])
            if 0 <= values[1] < values[2]:
                out.append(Aborted(*values))
    for _ in range(rng.choice([0, 0, 1, 2]) if events else 0):
        first = max(rng.choice(offsets), 0)
        out.append(Aborted(rng.choice([1, 2, 3]), first, first + rng.randint(1, 9), rng.choice(offsets)))
    return out


@settings(deadline=None, max_examples=draws(400))
@given(logs(), st.randoms(use_true_random=False))
def test_with_any_entries_data_is_aborted_only_by_its_next_marker(events: list[Event], rng: random.Random) -> None:
    start = rng.choice([0, 0, rng.choice([e.last_offset for e in events] or [0])])
    if rng.random() < 0.7:
        events, entries = cleaned(events, rng)
    else:
        entries = broker_entries(events)
    table, wrong = table_of(events), sorted_entries(entry_array(damaged_entries(entries, events, rng)), start)
    right = corrected(table, wrong, start)
    assert plain(right) == plain(sorted_entries(entry_array(right_entries(events, plain(wrong), start)), start))
    tracker = TransactionTracker(right, start)
    discards = tracker.follow(table).tolist()
    transactions = tracker.finish()  # the log does not contradict these entries
    for number, event in enumerate(events):
        following = [e for e in events[number:] if e.producer_id == event.producer_id and e.kind in ("ABORT", "COMMIT")]
        if event.kind == "data" and event.last_offset >= start:
            is_aborted = following[:1] != [] and following[0].kind == "ABORT"
            assert discards[number] == is_aborted
            assert transactions.aborted(table[number : number + 1]).tolist() == [is_aborted]
    # A broker ends its search at an entry whose last stable offset is at or above the one sought.
    by_marker = sorted(plain(right), key=lambda entry: entry.last_offset)
    for number, entry in enumerate(by_marker):
        assert all(entry.last_stable_offset <= later.first_offset for later in by_marker[number + 1 :])


def events_of(*shorthand: tuple[str, int]) -> list[Event]:
    """Return an event of one offset for each pair (kind, producer id)."""
    return [Event(kind, producer, at, at) for at, (kind, producer) in enumerate(shorthand)]  # type: ignore[arg-type]


LOG = events_of(("data", 1), ("data", 2), ("ABORT", 1), ("COMMIT", 2), ("data", 1), ("COMMIT", 1))
RIGHT = [Aborted(1, 0, 2, 1)]


@pytest.mark.parametrize(
    ("entries", "at"),
    [
        ([], 2),
        ([Aborted(2, 0, 2, 1)], 2),  # an entry of another producer
        ([Aborted(1, 0, 5, 1)], 2),  # an entry that ends with another marker
        ([Aborted(1, 1, 2, 1)], 2),  # an entry that begins with data of another transaction
        ([*RIGHT, Aborted(2, 1, 3, 4)], 3),  # the transaction was committed
        ([*RIGHT, Aborted(1, 4, 5, 6)], 5),
        ([*RIGHT, Aborted(1, 4, 9, 6)], 9),
        ([*RIGHT, Aborted(3, 4, 9, 6)], 9),  # an entry after the log end
        ([*RIGHT, Aborted(3, 77, 99, 6)], 99),
        ([*RIGHT, Aborted(3, 2, 3, 6)], 3),  # an entry that no marker ends
    ],
)
def test_entries_that_the_log_contradicts_are_rejected(entries: list[Aborted], at: int) -> None:
    tracker = TransactionTracker(entry_array(entries), 0)
    tracker.follow(table_of(LOG))
    with pytest.raises(Contradiction) as contradiction:
        tracker.finish()
    assert contradiction.value.offset == at
    assert plain(contradiction.value.entries) == RIGHT


@pytest.mark.parametrize("stable", [-1, 0, 2, 3, 77])
def test_an_entry_with_only_a_wrong_last_stable_offset_is_corrected_immediately(stable: int) -> None:
    tracker = TransactionTracker(entry_array([Aborted(1, 0, 2, stable)]), 0)
    tracker.follow(table_of(LOG))
    transactions = tracker.finish()
    assert plain(transactions.entries) == RIGHT
    assert transactions.index_bytes(0, 9) == RIGHT[0].encode()


DATA_2, PLAIN_3, ABORT_9 = Event("data", 1, 2, 2), Event("plain", -1, 3, 5), Event("ABORT", 1, 9, 9)


@pytest.mark.parametrize(
    ("events", "entry", "right"),
    [
        ([DATA_2, PLAIN_3, ABORT_9], Aborted(1, 1, 9, 0), None),  # the data at 0 and 1 has been removed
        # the entry begins after the first data
        ([DATA_2, PLAIN_3, ABORT_9], Aborted(1, 7, 9, 10), Aborted(1, 2, 9, 10)),
        ([PLAIN_3, ABORT_9], Aborted(1, 7, 9, 10), None),
        ([PLAIN_3, ABORT_9], Aborted(1, 4, 9, 10), ()),  # the entry begins inside another batch
        ([Event("plain", -1, 0, 1), DATA_2, ABORT_9], Aborted(1, 1, 9, 10), Aborted(1, 2, 9, 10)),
        ([Event("data", 2, 0, 1), DATA_2, ABORT_9], Aborted(1, 0, 9, 0), Aborted(1, 2, 9, 0)),
        ([DATA_2, PLAIN_3, ABORT_9], Aborted(1, 2, 9, 4), Aborted(1, 2, 9, 10)),  # no transaction began there
        ([DATA_2, PLAIN_3, ABORT_9], Aborted(1, 2, 9, 7), None),
        ([DATA_2, PLAIN_3, ABORT_9], Aborted(1, 4, 9, 11), Aborted(1, 2, 9, 10)),
    ],
)
def test_an_entry_is_trusted_unless_the_log_contradicts_it(
    events: list[Event], entry: Aborted, right: Aborted | tuple[()] | None
) -> None:
    found = plain(corrected(table_of(events), entry_array([entry])))
    assert found == ([] if right == () else [right or entry])


def test_an_entry_of_another_producer_is_not_that_of_a_marker() -> None:
    """The offset at which the entry begins was removed from the log, and might have had data of either producer."""
    log = table_of([DATA_2, PLAIN_3, ABORT_9, Event("data", 1, 10, 10), Event("ABORT", 1, 11, 11)])
    right = [Aborted(1, 2, 9, 10), Aborted(1, 10, 11, 12)]
    assert plain(corrected(log, entry_array([Aborted(2, 1, 9, 10), right[1]]))) == right


def test_of_several_entries_for_a_marker_the_first_possible_one_is_trusted() -> None:
    entries = entry_array([Aborted(1, first, 9, 10) for first in (0, 1, 4, 7)])
    events = [Event("plain", -1, 0, 0), Event("data", 1, 5, 5), ABORT_9]
    assert plain(corrected(table_of(events), entries)) == [Aborted(1, 1, 9, 10)]


def test_last_stable_offsets_below_the_log_start_are_trusted() -> None:
    # If data of a transaction remains only below the log start, the log does not show where the transaction began.
    events = [Event("data", 2, 0, 0), Event("data", 1, 4, 4), Event("ABORT", 1, 5, 5), Event("COMMIT", 2, 6, 6)]
    assert plain(corrected(table_of(events), entry_array([Aborted(1, 4, 5, 0)]), 3)) == [Aborted(1, 4, 5, 0)]
    assert plain(corrected(table_of(events), entry_array([Aborted(1, 4, 5, 6)]), 0)) == [Aborted(1, 4, 5, 0)]


def test_offsets_of_removed_batches_are_trusted() -> None:
    events = LOG[1:]  # a round removed the first batch of the aborted data, and emptied later ones
    assert plain(corrected(table_of(events), entry_array(RIGHT))) == RIGHT
    events = [LOG[0], *LOG[2:]]  # a round removed the first batch of the committed data
    assert plain(corrected(table_of(events), entry_array(RIGHT))) == RIGHT
    assert plain(corrected(table_of(events), entry_array([Aborted(1, 0, 2, 2)]))) == [Aborted(1, 0, 2, 3)]
    assert plain(corrected(table_of(events), entry_array([]))) == [Aborted(1, 0, 2, 3)]


def test_a_wrong_entry_that_reaches_into_an_earlier_transaction_is_rejected() -> None:
    events = events_of(("data", 1), ("COMMIT", 1), ("data", 1), ("ABORT", 1))
    tracker = TransactionTracker(entry_array([Aborted(1, 0, 3, 4)]), 0)
    tracker.follow(table_of(events))
    with pytest.raises(Contradiction) as contradiction:
        tracker.finish()
    assert plain(contradiction.value.entries) == [Aborted(1, 2, 3, 4)]


def test_no_entry_is_requested_below_the_log_start() -> None:
    tracker = TransactionTracker(sorted_entries(entry_array(RIGHT), 3), 3)
    assert tracker.follow(table_of(LOG)).tolist() == [False, False, True, False, False, False]
    assert not len(tracker.finish().entries)


def test_an_emptied_control_batch_ends_no_transaction_and_is_not_needed() -> None:
    table = table_of(events_of(("data", 1), ("emptied control", 1), ("ABORT", 1)))
    tracker = TransactionTracker(entry_array([Aborted(1, 0, 2, 3)]), 0)
    # As bytes: NumPy and compiled code disagree about a bool that is neither 0 nor 1.
    assert tracker.follow(table).view(np.uint8).tolist() == [1, 1, 0]
    assert tracker.finish().unneeded_markers(table).view(np.uint8).tolist() == [0, 1, 0]


def test_an_entry_is_requested_for_a_batch_that_contains_the_log_start() -> None:
    events = [Event("data", 1, 0, 4), Event("ABORT", 1, 5, 5)]
    assert plain(corrected(table_of(events), entry_array([]), 4)) == [Aborted(1, 0, 5, 6)]
    assert not len(corrected(table_of(events), entry_array([]), 5))


def test_a_log_without_transactions_needs_no_entries() -> None:
    table = table_of(events_of(("plain", -1), ("plain", 5)))
    tracker = TransactionTracker(entry_array([]), 0)
    assert not tracker.follow(table).any()
    transactions = tracker.finish()
    assert not transactions.aborted(table).any() and not transactions.unneeded_markers(table).any()
    assert transactions.index_bytes(0, 2**63 - 1) == b""


def test_a_control_batch_of_another_type_does_not_end_a_transaction() -> None:
    events = events_of(("data", 1), ("other control", 1), ("data", 1), ("ABORT", 1))
    assert plain(corrected(table_of(events), entry_array([]))) == [Aborted(1, 0, 3, 4)]


# Index files


def facts(base: int, txn_index_bytes: int | None) -> SegmentFacts:
    return SegmentFacts(base, 1, NOW, 0, 0, txn_index_bytes, NOW, -1)


ENTRIES = [Aborted(1, 3, 12, 13), Aborted(2, 11, 14, 15)]


@pytest.mark.parametrize(
    ("data", "left"),
    [
        (ENTRIES[0].encode()[:-1], []),
        (ENTRIES[0].encode() + b"\0", ENTRIES[:1]),
        (b"\0\1" + ENTRIES[0].encode()[2:] + ENTRIES[1].encode(), ENTRIES[1:]),
        (Aborted(1, 13, 12, 13).encode(), []),
        (Aborted(1, -1, 12, 13).encode(), []),
        (ENTRIES[1].encode() + ENTRIES[0].encode(), ENTRIES),
        (bytes(34), []),
    ],
)
def test_impossible_entries_are_ignored(data: bytes, left: list[Aborted], tmp_path: Path) -> None:
    (tmp_path / f"{10:020d}.txnindex").write_bytes(data)
    assert plain(read_aborted(LOCAL, str(tmp_path), [facts(10, len(data))], 0)) == left


def test_indexes_of_all_segments_are_combined_from_the_log_start_on(tmp_path: Path) -> None:
    (tmp_path / f"{10:020d}.txnindex").write_bytes(ENTRIES[0].encode() + ENTRIES[1].encode())
    (tmp_path / f"{20:020d}.txnindex").write_bytes(Aborted(3, 2, 20, 21).encode())
    segments = [facts(0, None), facts(10, 68), facts(20, 34), facts(30, 0)]
    found = plain(read_aborted(LOCAL, str(tmp_path), segments, 12))
    assert found == [Aborted(3, 2, 20, 21), *ENTRIES]
    assert plain(read_aborted(LOCAL, str(tmp_path), segments, 13)) == [Aborted(3, 2, 20, 21), ENTRIES[1]]


def test_a_file_that_was_removed_after_the_survey_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        read_aborted(LOCAL, str(tmp_path), [facts(10, 34)], 0)


# Rounds


def data(offset: int, key: bytes, producer_id: int, sequence: int = 0) -> bytes:
    return encode_batch(
        [Rec(offset, NOW, key, b"v")], producer_id=producer_id, producer_epoch=0, base_sequence=sequence,
        transactional=True,
    )  # fmt: skip


def marker(offset: int, producer_id: int, *, commit: bool) -> bytes:
    return encode_marker(offset, NOW, commit=commit, producer_id=producer_id, producer_epoch=0)


SEGMENTS = {
    0: [data(0, b"a", 1), data(1, b"b", 2), data(2, b"c", 1, 1)],
    3: [marker(3, 1, commit=False), data(4, b"a", 3), marker(5, 2, commit=True)],
    6: [marker(6, 3, commit=False), encode_batch([Rec(7, NOW, b"d", b"v")])],
}
INDEXES = {3: Aborted(1, 0, 3, 1).encode(), 6: Aborted(3, 4, 6, 7).encode()}


def partition(path: Path, indexes: dict[int, bytes], batches_of: dict[int, list[bytes]] = SEGMENTS) -> CleaningTask:
    segments = [Segment(base, b"".join(batches), mtime_ms=NOW) for base, batches in batches_of.items()]
    segments.append(Segment(8, b"", mtime_ms=NOW))
    found = list(write_log(str(path), segments))
    for number, segment in enumerate(found):
        if segment.base_offset in indexes:
            contents = indexes[segment.base_offset]
            (path / f"{segment.base_offset:020d}.txnindex").write_bytes(contents)
            found[number] = SegmentFacts(
                segment.base_offset, segment.log_bytes, segment.log_mtime_ns, 0, 0, len(contents), NOW, -1
            )
    log = RandomLog(segments, [], 8, {})
    return task_for(str(path), log, tuple(found), NOW, first_dirty=0)


def left(path: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in path.iterdir() if f.suffix in (".log", ".txnindex")}


def test_without_an_offset_index_transactions_are_tracked_from_the_first_batch(tmp_path: Path) -> None:
    """The first batch contains the first dirty offset and is aborted, so its record supersedes no other."""
    aborted = encode_batch(
        [Rec(1, NOW, b"a", b"v"), Rec(2, NOW, b"b", b"v")], producer_id=1, producer_epoch=0, base_sequence=0,
        transactional=True,
    )  # fmt: skip
    batches_of = {0: [encode_batch([Rec(0, NOW, b"b", b"v")])], 1: [aborted, marker(3, 1, commit=False)]}
    task = partition(tmp_path / "t-0", {1: Aborted(1, 1, 3, 4).encode()}, batches_of)
    task = replace(task, first_dirty_offset=2)
    install(LOCAL, task, clean_partition(LOCAL, task))
    assert decode_log(left(tmp_path / "t-0")[f"{0:020d}.log"])[0].records == (Rec(0, NOW, b"b", b"v"),)


@pytest.mark.parametrize(
    "indexes",
    [
        {},
        {3: INDEXES[3]},
        {3: INDEXES[3], 6: b""},
        {3: INDEXES[3][:20], 6: INDEXES[6]},
        {3: INDEXES[6], 6: INDEXES[6]},
        {3: INDEXES[3], 6: INDEXES[3]},
        {0: Aborted(2, 1, 5, 6).encode(), **INDEXES},
        {3: Aborted(1, 0, 6, 1).encode(), 6: Aborted(3, 4, 6, 7).encode()},
        {3: Aborted(2, 0, 3, 1).encode(), 6: INDEXES[6]},
        {3: INDEXES[3], 6: Aborted(99, 2, 7, 8).encode()},
        {3: bytes(34), 6: bytes(68)},
        {0: INDEXES[3] + INDEXES[6]},  # all entries are in the wrong file
        {3: Aborted(1, 0, 3, 4).encode(), 6: Aborted(3, 4, 6, 2**62).encode()},
    ],
)  # fmt: skip
def test_with_any_indexes_aborted_data_is_removed_and_the_indexes_are_correct_afterwards(
    indexes: dict[int, bytes], tmp_path: Path
) -> None:
    task = partition(tmp_path / "right", INDEXES)
    install(LOCAL, task, clean_partition(LOCAL, task))
    expected = left(tmp_path / "right")
    records = [r.offset for name, log in expected.items() if name.endswith(".log") for b in decode_log(log)
               for r in b.records]  # fmt: skip
    assert sorted(records) == [1, 3, 5, 6, 7]
    task = partition(tmp_path / "wrong", indexes)
    install(LOCAL, task, clean_partition(LOCAL, task))
    assert left(tmp_path / "wrong") == expected
    assert expected[f"{0:020d}.txnindex"] == INDEXES[3] + INDEXES[6]


def test_a_partition_whose_log_contradicts_the_index_is_corrupt_and_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = partition(tmp_path / "t-0", {})
    before = left(tmp_path / "t-0")
    answers = iter([entry_array([Aborted(2, 1, 5, 6)]), entry_array([])])
    monkeypatch.setattr(TransactionTracker, "_right_entries", lambda *arguments: next(answers))
    with pytest.raises(CorruptLog, match="contradict each other") as corrupt:
        clean_partition(LOCAL, task)
    assert corrupt.value.offset == 5
    assert left(tmp_path / "t-0") == before


def test_a_marker_of_an_unreadable_type_is_refused(tmp_path: Path) -> None:
    unreadable = encode_batch(
        [Rec(8, NOW, b"\0\0", b"")], producer_id=1, producer_epoch=0, transactional=True, control=True
    )
    segments = [Segment(0, data(0, b"a", 1) + unreadable, mtime_ms=NOW), Segment(9, b"", mtime_ms=NOW)]
    found = write_log(str(tmp_path), segments)
    task = task_for(str(tmp_path), RandomLog(segments, [], 9, {}), found, NOW, first_dirty=0)
    with pytest.raises(Refused, match="unreadable type") as refusal:
        clean_partition(LOCAL, task)
    assert refusal.value.offset == 8
