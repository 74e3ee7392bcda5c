"""The retained state of producers, and undecided transactions, compared with the reference model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.format.producers import ProducerEntry, encode_snapshot, parse_snapshot
from keytail.log.fs import LOCAL
from keytail.log.partition import PartitionFacts, SegmentFacts
from keytail.log.producers import first_unstable, load_producers, newest_snapshot
from keytail.log.records.chunk import SegmentReader
from tests.chance import draws
from tests.reference import producers as reference
from tests.reference.batches import Rec, decode_log, encode_batch, encode_marker

NOW = 1_750_000_000_000
HOUR_MS = 3_600_000


@st.composite
def logs(draw: st.DrawFn) -> list[bytes]:
    """Draw batches of a few producers, with changing epochs, sequences that wrap around, markers, and emptied batches
    of both kinds.
    """
    kinds = ["data", "data", "data", "txn", "txn", "COMMIT", "ABORT", "emptied", "emptied marker", "none"]
    shape = st.tuples(
        st.sampled_from(kinds), st.sampled_from([0, 1, 2**62]), st.integers(0, 2), st.integers(1, 3),
        st.integers(0, 2), st.integers(0, 3 * HOUR_MS),
    )  # fmt: skip
    batches, offset = [], 0
    for kind, producer_id, epoch, count, gap, age_ms in draw(st.lists(shape, max_size=25)):
        offset += gap
        batches.append(batch(kind, offset, producer_id, epoch, count, NOW - age_ms))
        offset = decode_log(batches[-1])[0].last_offset + 1
    return batches


def batch(kind: str, offset: int, producer_id: int = 1, epoch: int = 0, count: int = 1, time_ms: int = NOW) -> bytes:
    if kind in ("COMMIT", "ABORT"):
        commit = kind == "COMMIT"
        return encode_marker(
            offset, time_ms, commit=commit, producer_id=producer_id, producer_epoch=epoch, coordinator_epoch=count
        )
    fields = {"producer_id": producer_id, "producer_epoch": epoch, "base_sequence": 2**31 - 1 - epoch}
    if kind == "emptied marker":
        fields["base_sequence"] = -1
        span = {"base_offset": offset, "last_offset": offset}
        return encode_batch([], **span, max_timestamp=time_ms, transactional=True, control=True, **fields)
    if kind == "emptied":
        return encode_batch([], base_offset=offset, last_offset=offset + count, max_timestamp=time_ms, **fields)
    records = [Rec(offset + i, time_ms, b"k", b"v") for i in range(count)]
    return encode_batch(records, transactional=kind == "txn", **({} if kind == "none" else fields))


def write(path: Path, segments: dict[int, bytes], snapshots: dict[int, bytes]) -> tuple[SegmentFacts, ...]:
    path.mkdir(parents=True, exist_ok=True)
    for base, log in segments.items():
        (path / f"{base:020d}.log").write_bytes(log)
    for offset, data in snapshots.items():
        (path / f"{offset:020d}.snapshot").write_bytes(data)
    return tuple(SegmentFacts(base, len(log), 0, 0, 0, None, 0, -1) for base, log in sorted(segments.items()))


def partition(
    path: Path, segments: dict[int, bytes], snapshots: dict[int, bytes], end: int, **given: object
) -> PartitionFacts:
    facts: dict = {
        "topic": "t",
        "partition": 0,
        "log_dir": str(path.parent),
        "path": str(path),
        "segments": write(path, segments, snapshots),
        "snapshots": tuple(sorted(snapshots)),
        "log_start_offset": 0,
        "log_end_offset": end,
        "high_watermark": end,
        "recovery_point": end,
        "clean_shutdown": True,
        "cleaner_checkpoint": None,
        "problems": (),
    }
    return PartitionFacts(**facts | given)


def entries_of(known: dict[int, reference.Producer]) -> list[ProducerEntry]:
    return [
        ProducerEntry(
            producer_id=producer_id,
            epoch=producer.epoch,
            last_sequence=producer.batches[-1][0] if producer.batches else -1,
            last_offset=producer.batches[-1][1] if producer.batches else -1,
            offset_delta=producer.batches[-1][2] if producer.batches else 0,
            timestamp_ms=producer.last_timestamp,
            coordinator_epoch=producer.coordinator_epoch,
            current_txn_first_offset=-1 if producer.txn_first_offset is None else producer.txn_first_offset,
        )
        for producer_id, producer in known.items()
    ]


def as_loaded(entries: list[ProducerEntry]) -> dict[int, reference.Producer]:
    """Return the producers as loaded from a snapshot, which has only the latest batch of each."""
    return {
        e.producer_id: reference.Producer(
            e.epoch,
            [(e.last_sequence, e.last_offset, e.offset_delta)] if e.last_offset >= 0 else [],
            e.timestamp_ms,
            e.coordinator_epoch,
            e.current_txn_first_offset if e.current_txn_first_offset >= 0 else None,
        )
        for e in entries
    }


@settings(deadline=None, max_examples=draws(200))
@given(logs(), st.randoms(use_true_random=False), st.booleans(), st.sampled_from([1, HOUR_MS, 24 * HOUR_MS]))
def test_the_state_is_that_of_a_broker_that_loads_the_log(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[bytes],
    rng: random.Random,
    clean_shutdown: bool,
    expiration_ms: int,
) -> None:
    """Rows 23, 24 and 27 of CONFORMANCE.md: the log is divided into any segments, with any snapshots, some of which are
    damaged.
    """
    decoded = [decode_log(raw)[0] for raw in batches]
    end = decoded[-1].last_offset + 1 if decoded else 0
    bases = {0} | {found.base_offset for found in decoded if rng.random() < 0.3}
    segments = dict.fromkeys([*bases, end], b"")
    for raw, found in zip(batches, decoded, strict=True):
        segments[max(base for base in segments if base <= found.base_offset)] += raw
    snapshots: dict[int, bytes] = {}
    reported: dict[int, dict[int, reference.Producer] | None] = {}
    for offset in [*sorted(bases - {0}), end, end + 7]:
        if rng.random() < 0.5:
            state = reference.Producers()
            for found in decoded:
                if found.last_offset < offset:
                    state.take(found)
            snapshots[offset] = encode_snapshot(entries_of(state.known))
            reported[offset] = as_loaded(parse_snapshot(snapshots[offset]))
            if rng.random() < 0.3:
                snapshots[offset] = snapshots[offset][:-1] + bytes([snapshots[offset][-1] ^ 1])
                reported[offset] = None
    log_start = rng.choice([0, rng.randint(0, end)])
    path = tmp_path_factory.mktemp("log") / "t-0"
    facts = partition(
        path, segments, snapshots, end, log_start_offset=log_start, clean_shutdown=clean_shutdown,
        high_watermark=rng.choice([None, end, rng.randint(0, end)]),
    )  # fmt: skip
    loaded = reference.loaded(
        decoded, reported, log_start_offset=log_start, log_end_offset=end, clean_shutdown=clean_shutdown,
        expiration_ms=expiration_ms, now_ms=NOW,
    )  # fmt: skip
    found_states = load_producers(
        LOCAL, SegmentReader(LOCAL), str(path), facts, expiration_ms=expiration_ms, now_ms=NOW,
    )  # fmt: skip
    assert found_states.entries() == sorted(entries_of(loaded.known), key=lambda entry: entry.producer_id)
    unstable = first_unstable(LOCAL, facts, now_ms=NOW)
    limit = end if facts.high_watermark is None else facts.high_watermark
    expected = loaded.first_unstable(limit)
    if expected is not None and expected < log_start:
        behind = [found.base_offset for found in decoded if found.last_offset >= log_start]
        expected = behind[0] if behind else log_start
    assert (unstable.offset if unstable else None) == expected


@pytest.mark.parametrize("damage", ["crc", "cut", "empty", "version", "longer"])
def test_a_damaged_snapshot_falls_back_to_the_one_before(damage: str, tmp_path: Path) -> None:
    older, newer = (encode_snapshot(entries_of({1: reference.Producer(epoch, [(0, 4, 0)], NOW)})) for epoch in (3, 4))
    damaged = {
        "crc": newer[:-1] + b"\1",
        "cut": newer[:-1],
        "empty": b"",
        "version": b"\0\2" + newer[2:],
        "longer": newer + newer[-46:],
    }[damage]
    write(tmp_path, {}, {5: older, 8: damaged, 11: newer})
    found = newest_snapshot(LOCAL, str(tmp_path), (5, 8, 11), 10)
    assert found is not None and found[0] == 5 and found[1][0].epoch == 3
    assert newest_snapshot(LOCAL, str(tmp_path), (8,), 10) is None


def test_without_snapshots_no_producer_is_known_after_a_clean_stop_and_all_after_a_crash(tmp_path: Path) -> None:
    segments = {0: batch("data", 0) + batch("txn", 1, 2), 2: b""}
    for clean_shutdown, known in ((True, []), (False, [1, 2])):
        facts = partition(tmp_path, segments, {}, 2, clean_shutdown=clean_shutdown)
        found = load_producers(
            LOCAL, SegmentReader(LOCAL), facts.path, facts, expiration_ms=1, now_ms=NOW + HOUR_MS,
        )  # fmt: skip
        assert sorted(found.states) == known  # replayed producers do not expire
        unstable = first_unstable(LOCAL, facts, now_ms=NOW + 5)
        assert (unstable is None) is clean_shutdown
        if unstable:
            assert unstable.offset == 1
            assert unstable.why == "producer id 2, epoch 0, has an open transaction with first offset 1 and age 5 ms"


def test_idle_producers_expire_unless_a_transaction_is_open(tmp_path: Path) -> None:
    known = {
        1: reference.Producer(0, [(0, 0, 0)], NOW - HOUR_MS),
        2: reference.Producer(0, [(0, 1, 0)], NOW - HOUR_MS + 1),
        3: reference.Producer(0, [(0, 2, 0)], NOW - 9 * HOUR_MS, txn_first_offset=2),
    }
    facts = partition(tmp_path, {0: b"", 4: b""}, {4: encode_snapshot(entries_of(known))}, 4)
    found = load_producers(
        LOCAL, SegmentReader(LOCAL), facts.path, facts, expiration_ms=HOUR_MS, now_ms=NOW,
    )  # fmt: skip
    assert sorted(found.states) == [2, 3]


LOG = {0: batch("txn", 0) + batch("ABORT", 1) + batch("txn", 2, 2), 3: batch("COMMIT", 3, 2), 4: b""}


@pytest.mark.parametrize(
    ("high_watermark", "log_start", "unstable"),
    [(None, 0, None), (4, 0, None), (3, 0, 2), (2, 0, 2), (1, 0, 0), (0, 0, 0), (1, 1, 1), (3, 3, 3), (99, 0, None)],
)
def test_a_transaction_is_settled_when_its_marker_is_below_the_high_watermark(
    high_watermark: int | None, log_start: int, unstable: int | None, tmp_path: Path
) -> None:
    facts = partition(
        tmp_path, LOG, {}, 4, high_watermark=high_watermark, log_start_offset=log_start, clean_shutdown=False
    )
    found = first_unstable(LOCAL, facts, now_ms=NOW)
    if log_start:  # replay begins there and does not read batches before it
        assert found is None or found.offset >= log_start
    else:
        assert (found.offset if found else None) == unstable
        assert found is None or "ended at or above the high watermark" in found.why


@pytest.mark.parametrize(("log_start", "offset"), [(0, 0), (1, 0), (2, 0), (3, 4), (4, 4), (7, 7)])
def test_an_open_transaction_that_began_below_the_log_start_begins_at_the_next_batch(
    log_start: int, offset: int, tmp_path: Path
) -> None:
    known = {1: reference.Producer(0, [(0, 2, 2)], NOW, txn_first_offset=0)}
    segments = {0: batch("txn", 0, count=3), 4: batch("none", 4, count=2)}
    facts = partition(tmp_path, segments, {6: encode_snapshot(entries_of(known))}, 6, log_start_offset=log_start)
    found = first_unstable(LOCAL, facts, now_ms=NOW + HOUR_MS)
    assert found is not None and found.offset == offset


def test_replay_starts_with_the_batch_that_contains_the_log_start(tmp_path: Path) -> None:
    """If replay skipped that batch, an open transaction that begins in it would be cleaned after a crash without a
    snapshot."""
    segments = {0: batch("txn", 0, count=3), 3: batch("none", 3), 4: b""}
    facts = partition(tmp_path, segments, {}, 4, log_start_offset=1, clean_shutdown=False)
    found = first_unstable(LOCAL, facts, now_ms=NOW)
    assert found is not None and found.offset == 0


def test_an_incomplete_last_batch_after_a_crash_ends_the_replay(tmp_path: Path) -> None:
    segments = {0: batch("txn", 0), 1: batch("COMMIT", 1) + batch("txn", 2)[:-1]}
    facts = partition(tmp_path, segments, {}, 2, clean_shutdown=False)
    assert first_unstable(LOCAL, facts, now_ms=NOW) is None
