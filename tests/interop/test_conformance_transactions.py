"""Behaviours with transactions in sections B to E of tests/CONFORMANCE.md, by number, on logs written by hand.

Kafka's cleaner and keytail clean copies of each log, and the results must have the same bytes, including the indexes of
aborted transactions. Each test also has an expected result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keytail.format.index import parse_txn_index
from tests.interop.kafka import Kafka, Loaded, step_raw
from tests.interop.test_quirks import DAY_MS, NOW, RETENTION_MS, ROLL, Pair, data, marker, newer, one
from tests.reference.batches import Batch, Rec
from tests.reference.codecs import GZIP
from tests.reference.legacy import encode_wrapper

pytestmark = pytest.mark.interop

LATER = NOW + DAY_MS
COMMIT_KEY = b"\0\0\0\1"
IDLE: dict[str, Any] = {"expiration_ms": 1}  # no producer is active then, so no last batch is protected


def append(pair: Pair, *steps: Any) -> None:
    """Append to the result of the last round."""
    wire = [step_raw(step) if isinstance(step, bytes) else step for step in steps]
    opened = pair.kafka.append(pair.source / "t-0", wire, **pair.opening(pair.circumstances()))
    pair.log_end_offset = opened.log_end_offset


def consumed(pair: Pair, now_ms: int = LATER) -> Loaded:
    """Return the records that Kafka serves from keytail's result of the last round."""
    return pair.kafka.load(pair.ours / "t-0", transactions=True, **pair.opening(pair.circumstances(now_ms=now_ms)))


def aborted_in_files(pair: Pair) -> dict[int, list[tuple[int, int]]]:
    """Return the first and last offsets of the entries of each transaction index, by segment."""
    found = {}
    for path in sorted((pair.ours / "t-0").glob("*.txnindex")):
        entries = parse_txn_index(path.read_bytes())
        found[int(path.stem)] = [(int(e["first_offset"]), int(e["last_offset"])) for e in entries]
    return {base: entries for base, entries in found.items() if entries}


def test_control_batches_and_aborted_data_supersede_nothing(kafka: Kafka, fast_dir: Path) -> None:
    """11: control batches and aborted data add no key to the map."""
    steps = [one(0, b"a"), one(1, COMMIT_KEY), data(2, b"a"), data(3, b"b", 8), marker(4, "ABORT")]
    pair = Pair(kafka, fast_dir, [*steps, marker(5, "COMMIT", 8), one(6, b"c"), ROLL, one(7)], **IDLE)
    assert pair.round(now_ms=LATER).map_entries == 4  # the keys are a, b, c and the user's key
    assert pair.offsets() == [0, 1, 3, 4, 5, 6]


def test_a_user_key_that_equals_the_key_of_a_marker_removes_no_marker(kafka: Kafka, fast_dir: Path) -> None:
    """19: the user's record follows two markers with the same key bytes, one in the clean and one in the dirty section.
    """
    steps = [data(0, b"a"), marker(1, "COMMIT"), data(2, b"b"), marker(3, "COMMIT"), ROLL, one(4, COMMIT_KEY)]
    pair = Pair(kafka, fast_dir, [*steps, ROLL, one(5)], **IDLE)
    for checkpoint in (4, 0):
        pair.round(now_ms=LATER, checkpoint=checkpoint)
        assert pair.offsets() == [0, 1, 2, 3, 4]
        assert all(pair.batches()[offset].delete_horizon_ms is None for offset in (1, 3))
    assert consumed(pair).committed == (0, 2, 4, 5)


def test_wrappers_with_messages_of_another_magic_are_cleaned(kafka: Kafka, fast_dir: Path) -> None:
    """20: messages of magic 0 are in a wrapper of magic 1 (KAFKA-4298); the values remain at their offsets."""
    records = [Rec(n, NOW + n, b"k%d" % (n % 2), b"value %d" % n) for n in range(4)]
    wrapper = encode_wrapper(records, GZIP, magic=1, inner_magics=[0, 1, 0, 0])
    pair = Pair(kafka, fast_dir, [wrapper, one(4, b"other"), ROLL, one(5)])
    pair.round()
    batch = pair.batches()[2]
    assert type(batch) is Batch  # the output is a batch of magic 2
    assert [(r.offset, r.key, r.value) for r in batch.records] == [(2, b"k0", b"value 2"), (3, b"k1", b"value 3")]
    assert pair.offsets() == [2, 3, 4]


def test_an_aborted_last_batch_is_retained_empty_until_its_producer_writes_again(kafka: Kafka, fast_dir: Path) -> None:
    """24: its marker is retained too, otherwise the empty batch would be read as an open transaction."""
    pair = Pair(kafka, fast_dir, [data(0, b"a"), marker(1, "ABORT"), one(2, b"b"), ROLL, one(3)])
    for _ in range(2):
        pair.round()
        batches = pair.batches()
        assert not batches[0].records and batches[0].transactional
        assert batches[1].records and batches[1].delete_horizon_ms is None
        assert aborted_in_files(pair) == {0: [(0, 1)]}
    append(pair, data(4, b"c", sequence=1), marker(5, "COMMIT"), ROLL, one(6))
    pair.round()
    assert 0 not in pair.batches() and pair.offsets() == [1, 2, 3, 4, 5]
    pair.round()
    assert pair.batches()[1].delete_horizon_ms == NOW + RETENTION_MS
    assert aborted_in_files(pair) == {}


def test_sequences_that_restart_at_0_allow_old_batches_and_markers_to_be_removed(kafka: Kafka, fast_dir: Path) -> None:
    """26: like a group coordinator, the producer begins every transaction at sequence 0; the last batch is determined
    by offset.
    """
    steps = [step for n in (0, 2, 4) for step in (data(n, b"a"), marker(n + 1, "COMMIT"))]
    pair = Pair(kafka, fast_dir, [*steps, ROLL, one(6)])
    pair.round()
    assert sorted(pair.batches()) == [1, 3, 4, 5]
    assert [pair.batches()[offset].delete_horizon_ms for offset in (1, 3, 5)] == [None] * 3
    pair.round()
    horizons = [pair.batches()[offset].delete_horizon_ms for offset in (1, 3, 5)]
    assert horizons == [NOW + RETENTION_MS, NOW + RETENTION_MS, None]
    pair.round(now_ms=NOW + RETENTION_MS)
    assert sorted(pair.batches()) == [4, 5]
    (producer,) = consumed(pair, NOW + RETENTION_MS).producers
    assert producer[:5] == (7, 0, 0, 4, 4)  # id, epoch, last sequence, first and last data offset


def test_aborted_records_of_any_key_are_removed_even_above_the_mapped_range(kafka: Kafka, fast_dir: Path) -> None:
    """28: also keys that were not written again, records without a key, and data above the end of a full map."""
    steps = [one(0, b"x"), data(1, b"only here"), one(2, b"y"), data(3, b"nor there", sequence=1), data(4, None, 8)]
    ends = [marker(5, "ABORT", 8), marker(6, "ABORT"), one(7, b"x")]
    pair = Pair(kafka, fast_dir, [*steps, *ends, ROLL, one(8)], **IDLE)
    theirs = pair.round(now_ms=LATER, max_entries=1)
    assert (theirs.end_offset, theirs.records_without_key) == (2, 0)
    assert pair.offsets() == [0, 2, 5, 6, 7]
    assert consumed(pair).committed == (0, 2, 7, 8)


@pytest.mark.parametrize("kind", ["COMMIT", "ABORT"])
def test_a_marker_is_removed_a_round_and_a_horizon_after_its_data(
    kafka: Kafka, fast_dir: Path, kind: str
) -> None:
    """29, 30: the entry of an aborted transaction is removed when the marker gets its horizon."""
    steps = [data(0, b"a"), data(1, b"b", sequence=1), marker(2, kind), one(3, b"a"), one(4, b"c")]
    pair = Pair(kafka, fast_dir, [*steps, ROLL, one(5)], **IDLE)
    entries = {0: [(0, 2)]} if kind == "ABORT" else {}
    pair.round(now_ms=LATER)
    assert (pair.batches()[2].delete_horizon_ms, aborted_in_files(pair)) == (None, entries)
    if kind == "COMMIT":  # b at offset 1 is the latest record of its key until the last round
        pair.round(now_ms=LATER)
        assert pair.offsets() == [1, 2, 3, 4] and pair.batches()[2].delete_horizon_ms is None
        append(pair, one(6, b"b"), ROLL, one(7))
        pair.round(now_ms=LATER)
    assert 1 not in pair.batches() and pair.batches()[2].delete_horizon_ms is None
    pair.round(now_ms=LATER)
    assert (pair.batches()[2].delete_horizon_ms, aborted_in_files(pair)) == (LATER + RETENTION_MS, {})
    pair.round(now_ms=LATER + RETENTION_MS - 1)
    assert 2 in pair.batches()
    pair.round(now_ms=LATER + RETENTION_MS)
    assert 2 not in pair.batches()


@pytest.mark.parametrize("segment_bytes", [1, 1_000_000], ids=["one segment per group", "one group"])
def test_transactions_across_segments_lose_only_aborted_data(kafka: Kafka, fast_dir: Path, segment_bytes: int) -> None:
    """31: transactions have data in three segments, and markers in later ones; only aborted data is removed."""
    steps = [
        *(data(0, b"a", 7), data(1, b"b", 8), ROLL),
        *(data(2, b"c", 7, sequence=1), data(3, b"d", 8, sequence=1), one(4, b"x"), ROLL),
        *(marker(5, "ABORT", 7), data(6, b"e", 8, sequence=2), ROLL),
        *(marker(7, "COMMIT", 8), ROLL),
        one(8, b"y"),
    ]
    pair = Pair(kafka, fast_dir, steps, **IDLE)
    bases = [0, 2, 5, 7] if segment_bytes == 1 else [0]
    pair.round(now_ms=LATER, internal_segment_bytes=segment_bytes)
    assert [int(path.stem) for path in sorted((pair.ours / "t-0").glob("*.log"))] == [*bases, 8]
    assert pair.offsets() == [1, 3, 4, 5, 6, 7]
    assert aborted_in_files(pair) == {5 if segment_bytes == 1 else 0: [(0, 5)]}
    assert consumed(pair).committed == (1, 3, 4, 6, 8)
    pair.round(now_ms=LATER, internal_segment_bytes=segment_bytes)
    assert [pair.batches()[offset].delete_horizon_ms for offset in (5, 7)] == [LATER + RETENTION_MS, None]
    assert pair.offsets() == [1, 3, 4, 5, 6, 7] and aborted_in_files(pair) == {}


def test_with_a_tiny_map_transaction_indexes_are_correct_after_every_pass(kafka: Kafka, fast_dir: Path) -> None:
    """32: each pass rewrites more segments; an entry is removed one pass after its data, and is in the segment of its
    marker.
    """
    steps: list[Any] = []
    for n in range(0, 24, 6):
        steps += [data(n, b"aborted", 7), data(n + 1, b"%d" % n, 8), newer(n + 2, b"k%d" % n, b"k%d" % (n + 1))]
        steps += [marker(n + 4, "ABORT", 7), marker(n + 5, "COMMIT", 8), ROLL]
    pair = Pair(kafka, fast_dir, [*steps, one(24)], **IDLE)
    checkpoint, passes, right = 0, [], tuple(n for n in range(24) if n % 6 in (1, 2, 3))
    while checkpoint < 24:
        theirs = pair.round(now_ms=LATER, checkpoint=checkpoint, max_entries=4, internal_segment_bytes=1)
        passes.append(checkpoint)
        checkpoint = theirs.end_offset
        assert consumed(pair).committed == (*right, 24)
        data_left = [b for b in pair.batches().values() if b.transactional and not b.control and b.producer_id == 7]
        # The segments that this pass rewrote have no aborted data; a later segment still has some, with its entry.
        for batch in data_left:
            assert batch.base_offset >= checkpoint
        listed = aborted_in_files(pair)
        assert all((batch.base_offset, batch.base_offset + 4) in listed[batch.base_offset] for batch in data_left)
    assert len(passes) > 2
