"""The quirks of Kafka's cleaner, one test each, compared with Kafka itself.

Names end with `__equal` if both sides clean copies of one partition to the same bytes, and the result shows the quirk;
and with `__departed_from` if keytail differs (`lib/keytail/DECISIONS.md` has the reasons). tests/compact/test_quirks.py
has the quirks, of the numbers 1 to 35, that a cleaner's result does not show.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keytail.compact.cleaner import clean_partition, install
from keytail.compact.plan import refusals, select
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.errors import CorruptLog, Refused
from keytail.format.producers import encode_snapshot, parse_snapshot
from keytail.kernels.native import crc32c
from keytail.log.checkpoint import read_offsets, write_offsets
from keytail.log.fs import LOCAL
from keytail.log.lock import hold
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import PartitionFacts, survey_partition
from keytail.log.producers import first_unstable
from tests.interop.compare import differences
from tests.interop.kafka import Cleaned, Kafka, KafkaError, Loaded, step_delete_records, step_raw, step_roll
from tests.interop.rounds import CHOICE, Circumstances
from tests.interop.test_differential import compaction_config
from tests.reference.batches import Batch, Rec, encode_batch, encode_marker
from tests.reference.codecs import GZIP, LZ4, SNAPPY, ZSTD
from tests.reference.legacy import decode_any_log, encode_message, encode_single, encode_wrapper
from tests.reference.varints import encode_varint

pytestmark = pytest.mark.interop

NOW = 1_750_000_000_000
RETENTION_MS = 1000
DAY_MS = 86_400_000
ROLL = step_roll()


class Pair:
    """Two copies of partition t-0. Each call of `round` cleans both and compares the results; the next one starts from
    Kafka's result."""

    def __init__(
        self,
        kafka: Kafka,
        home: Path,
        steps: Iterable[Any],
        *,
        log_start_offset: int = 0,
        expiration_ms: int = DAY_MS,
        **configs: Any,
    ) -> None:
        """Write the partition. Steps of type bytes are appended as by a follower."""
        self.kafka, self.expiration_ms, self.log_start_offset = kafka, expiration_ms, log_start_offset
        self.configs = {
            "cleanup.policy": "compact",
            "internal.segment.bytes": 1_000_000,
            "index.interval.bytes": 0,
            "delete.retention.ms": RETENTION_MS,
            "retention.ms": -1,
            **{name.replace("_", "."): value for name, value in configs.items()},
        }
        self.source, self.theirs, self.ours = home / "source", home / "kafka", home / "ours"
        self.source.mkdir()
        wire = [step_raw(step) if isinstance(step, bytes) else step for step in steps]
        if log_start_offset:
            wire.append(step_delete_records(log_start_offset))
        opened = kafka.append(
            self.source / "t-0",
            wire,
            configs=self.configs,
            clock_ms=NOW,
            producer_id_expiration_ms=DAY_MS * 365,
            log_start_offset=0,
        )
        self.log_end_offset = opened.log_end_offset

    def log(self, base_offset: int = 0) -> Path:
        return self.source / "t-0" / f"{base_offset:020d}.log"

    def circumstances(
        self,
        now_ms: int = NOW,
        checkpoint: int | None = None,
        high_watermark: int | None = None,
        max_entries: int | None = None,
        **configs: Any,
    ) -> Circumstances:
        return Circumstances(
            configs={**self.configs, **{name.replace("_", "."): value for name, value in configs.items()}},
            now_ms=now_ms,
            log_start_offset=self.log_start_offset,
            log_end_offset=self.log_end_offset,
            high_watermark=self.log_end_offset if high_watermark is None else high_watermark,
            checkpoint=checkpoint,
            map_max_entries=max_entries,
            producer_id_expiration_ms=self.expiration_ms,
        )

    def opening(self, now: Circumstances) -> dict[str, Any]:
        return {
            "configs": now.configs,
            "clock_ms": now.now_ms,
            "log_start_offset": now.log_start_offset,
            "high_watermark": now.high_watermark,
            "recovery_point": now.log_end_offset,
            "producer_id_expiration_ms": now.producer_id_expiration_ms,
        }

    def copies(self, now: Circumstances) -> None:
        write = self.kafka.write_checkpoint
        base = min(int(path.stem) for path in (self.source / "t-0").glob("*[0-9].log"))
        write(self.source / "cleaner-offset-checkpoint", {} if now.checkpoint is None else {"t-0": now.checkpoint})
        start = now.log_start_offset
        write(self.source / "log-start-offset-checkpoint", {"t-0": start} if start > base else {})
        write(self.source / "replication-offset-checkpoint", {"t-0": now.high_watermark})
        write(self.source / "recovery-point-offset-checkpoint", {"t-0": now.log_end_offset})
        (self.source / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":42}')
        for copy in (self.theirs, self.ours):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(self.source, copy)

    def kafka_round(self, now: Circumstances) -> Cleaned:
        return self.kafka.clean(
            self.theirs / "t-0",
            checkpoint=now.checkpoint,
            map_max_entries=now.map_max_entries,
            only_if_cleanable=True,
            **self.opening(now),
        )

    def our_round(self, now: Circumstances, **fields: Any) -> tuple[dict[str, Any], CleaningResult | None]:
        """Return the selection, and the result of the round or None if there was nothing to clean."""
        facts = survey(self.ours)
        config = compaction_config(now)
        unstable = first_unstable(LOCAL, facts, now_ms=now.now_ms)
        selection = select(facts, config, now.now_ms, unstable=unstable)
        choice = {name: getattr(selection, name) for name in CHOICE}
        if not selection.cleanable_bytes:
            return choice, None
        task = CleaningTask(
            topic="t",
            partition=0,
            partition_path=facts.path,
            segments=facts.segments,
            snapshots=facts.snapshots,
            log_start_offset=facts.log_start_offset,
            log_end_offset=facts.log_end_offset,
            first_dirty_offset=selection.first_dirty_offset,
            first_uncleanable_offset=selection.first_uncleanable_offset,
            now_ms=now.now_ms,
            config=config,
            run_id="odd",
            message_format="v2",  # the cleaner of 4.3.1 also writes this format
            clean_shutdown=facts.clean_shutdown,
            map_memory_bytes=1 << 20,
            map_max_entries=now.map_max_entries,
            **{"grouping": "kafka", "drop_keyless": True, **fields},
        )
        result = clean_partition(LOCAL, task)
        install(LOCAL, task, result)
        return choice, result

    def round(self, **circumstances: Any) -> Cleaned:
        """Run one round on both sides, and check that the selection and the result are the same."""
        now = self.circumstances(**circumstances)
        self.copies(now)
        theirs = self.kafka_round(now)
        choice, result = self.our_round(now)
        assert theirs.total_bytes == 0 or {name: getattr(theirs, name) for name in CHOICE} == choice
        assert (result.end_offset if result else None) == (theirs.end_offset if theirs.cleaned else None)
        interval_bytes = int(now.configs["index.interval.bytes"])
        assert differences(self.theirs / "t-0", self.ours / "t-0", index_interval_bytes=interval_bytes) == []
        before = os.listdir(self.ours / "t-0")
        loaded = self.load_ours(now)
        assert loaded.repaired == [] and loaded.fetch_mismatches == ()
        assert sorted(os.listdir(self.ours / "t-0")) == sorted(before)
        shutil.rmtree(self.source)
        shutil.copytree(self.theirs, self.source)
        return theirs

    def load_ours(self, now: Circumstances) -> Loaded:
        return self.kafka.load(self.ours / "t-0", fetch=True, **self.opening(now))

    def unchanged(self) -> bool:
        """Return whether keytail's copy is still the input of the round."""
        names = sorted(os.listdir(self.source / "t-0"))
        return names == sorted(os.listdir(self.ours / "t-0")) and all(
            (self.source / "t-0" / name).read_bytes() == (self.ours / "t-0" / name).read_bytes() for name in names
        )

    def batches(self) -> dict[int, Batch]:
        """Return the batches of both sides after the last round, by base offset, without the active segment."""
        logs = sorted((self.source / "t-0").glob("*.log"))[:-1]
        return {batch.base_offset: batch for log in logs for batch in decode_any_log(log.read_bytes())}

    def offsets(self) -> list[int]:
        """Return the offsets of the records in the inactive segments."""
        return [record.offset for batch in self.batches().values() for record in batch.records]


def survey(log_dir: Path) -> PartitionFacts:
    listing = survey_log_dirs(LOCAL, [str(log_dir)])[0]
    return survey_partition(LOCAL, listing, listing.partitions[0])


def one(offset: int, key: bytes | None = b"k", value: bytes | None = b"v", time_ms: int = NOW, **fields: Any) -> bytes:
    return encode_batch([Rec(offset, time_ms, key, value)], **fields)


def many(offset: int, *pairs: tuple[bytes | None, bytes | None], **fields: Any) -> bytes:
    return encode_batch([Rec(offset + i, NOW + i, key, value) for i, (key, value) in enumerate(pairs)], **fields)


def data(offset: int, key: bytes, producer_id: int = 7, epoch: int = 0, sequence: int = 0, **fields: Any) -> bytes:
    """Return a batch of a transaction."""
    fields |= {"producer_id": producer_id, "producer_epoch": epoch, "base_sequence": sequence}
    return one(offset, key, transactional=True, **fields)


def marker(offset: int, kind: str, producer_id: int = 7, epoch: int = 0) -> bytes:
    return encode_marker(offset, NOW, commit=kind == "COMMIT", producer_id=producer_id, producer_epoch=epoch)


def newer(offset: int, *keys: bytes) -> bytes:
    """Return plain records that supersede these keys."""
    return b"".join(one(offset + i, key) for i, key in enumerate(keys))


# Deciding what to clean and what to retain


def test_18_01_the_last_batch_of_the_cleaned_range_is_retained_empty__equal(
    kafka: Kafka, fast_dir: Path
) -> None:
    removed = {"delete_horizon_ms": NOW - 1}
    steps = [
        one(0, b"a"),
        one(1, b"b", None, **removed),
        ROLL,
        one(2, b"c"),
        one(3, b"d", None, **removed),
        ROLL,
        one(4),
    ]
    pair = Pair(kafka, fast_dir, steps)
    chosen = pair.round(high_watermark=3)
    assert (chosen.first_uncleanable_offset, chosen.end_offset) == (2, 2)
    batches = pair.batches()
    assert not batches[1].records  # the emptied batch is retained, because the cleaned range ends with it
    assert batches[3].records
    assert pair.round(checkpoint=2).end_offset == 4
    assert sorted(pair.batches()) == [0, 2, 3] and not pair.batches()[3].records
    # If a full map ends the range, no batch is protected: batch 1 ends there, and is removed.
    (fast_dir / "full").mkdir()
    pair = Pair(kafka, fast_dir / "full", steps)
    assert pair.round(max_entries=2).end_offset == 2
    assert sorted(pair.batches()) == [0, 2, 3] and pair.batches()[3].records


def test_18_02_a_checkpoint_inside_a_batch_counts_its_segment_twice__equal(kafka: Kafka, fast_dir: Path) -> None:
    pair = Pair(kafka, fast_dir, [many(0, (b"a", b"0"), (b"a", b"1"), (b"a", b"2")), ROLL, one(3)])
    chosen = pair.round(checkpoint=1)
    assert chosen.first_dirty_offset == 1
    assert chosen.clean_bytes == chosen.cleanable_bytes and chosen.dirty_ratio == 0.5
    assert pair.offsets() == [2]


def test_18_03_cleaning_starts_at_the_first_segment__equal(kafka: Kafka, fast_dir: Path) -> None:
    steps = [newer(0, b"a", b"b"), ROLL, newer(2, b"c", b"d"), ROLL, newer(4, b"a", b"c"), ROLL, one(6)]
    pair = Pair(kafka, fast_dir, steps, log_start_offset=3)
    assert pair.round(checkpoint=4).first_dirty_offset == 4
    assert pair.offsets() == [1, 3, 4, 5]


def test_18_04_a_full_map_accepts_no_record_even_of_a_known_key__equal(kafka: Kafka, fast_dir: Path) -> None:
    pair = Pair(kafka, fast_dir, [many(0, (b"a", b"0"), (b"a", b"1"), (b"b", b"2")), ROLL, one(3)])
    assert pair.round(max_entries=1).end_offset == 1
    assert pair.offsets() == [0, 1, 2]


def test_18_05_batches_above_the_mapped_range_get_a_horizon__equal(kafka: Kafka, fast_dir: Path) -> None:
    pair = Pair(kafka, fast_dir, [one(0, b"a"), one(1, b"b", None), ROLL, one(2)])
    assert pair.round(max_entries=1).end_offset == 1
    assert pair.batches()[1].delete_horizon_ms == NOW + RETENTION_MS


def test_18_06_keyless_records_are_removed_inside_the_range_only__equal_with_a_flag(
    kafka: Kafka, fast_dir: Path
) -> None:
    """Decision 2: without --drop-keyless keytail refuses them."""
    pair = Pair(kafka, fast_dir, [one(0, None), newer(1, b"a", b"b"), one(3, None), ROLL, one(4)])
    now = pair.circumstances(max_entries=1)
    pair.copies(now)
    with pytest.raises(Refused, match="1 records without a key") as refusal:
        pair.our_round(now, drop_keyless=False)
    assert refusal.value.offset == 0 and pair.unchanged()
    theirs = pair.round(max_entries=1)
    assert (theirs.end_offset, theirs.records_without_key) == (2, 1)
    assert pair.offsets() == [1, 2, 3]


def test_18_07_the_last_record_of_a_key_within_a_batch_is_retained__equal(kafka: Kafka, fast_dir: Path) -> None:
    pair = Pair(kafka, fast_dir, [many(0, (b"a", b"0"), (b"b", b"1"), (b"a", b"2")), ROLL, one(3)])
    pair.round()
    assert pair.offsets() == [1, 2]
    pair.round()  # a record whose offset is in the map is retained
    assert pair.offsets() == [1, 2]


def test_18_08_only_a_retained_tombstone_sets_the_batchs_horizon__equal(kafka: Kafka, fast_dir: Path) -> None:
    superseded = many(0, (b"a", None), (b"b", b"1"))
    stays = many(2, (b"c", None), (b"d", b"3"))
    pair = Pair(kafka, fast_dir, [superseded, stays, one(4, b"a"), ROLL, one(5)])
    pair.round()
    assert pair.batches()[0].delete_horizon_ms is None
    assert pair.batches()[2].delete_horizon_ms == NOW + RETENTION_MS
    pair.round(now_ms=NOW + RETENTION_MS - 1, checkpoint=4)
    assert pair.offsets() == [1, 2, 3, 4]
    assert pair.batches()[2].delete_horizon_ms == NOW + RETENTION_MS  # the horizon never changes
    pair.round(now_ms=NOW + RETENTION_MS, checkpoint=4)
    assert pair.offsets() == [1, 3, 4]


@pytest.mark.parametrize(("log_start_offset", "kept"), [(1, [1, 2]), (2, [0, 1, 2])])
def test_18_09_aborted_data_counts_as_committed_once_its_marker_is_below_the_log_start__equal(
    kafka: Kafka, fast_dir: Path, log_start_offset: int, kept: list[int]
) -> None:
    steps = [data(0, b"a"), marker(1, "ABORT"), one(2, b"b"), ROLL, one(3)]
    pair = Pair(kafka, fast_dir, steps, log_start_offset=log_start_offset, expiration_ms=1)
    pair.round(now_ms=NOW + DAY_MS)
    assert pair.offsets() == kept


def test_18_10_markers_get_a_horizon_a_round_after_their_data__equal(kafka: Kafka, fast_dir: Path) -> None:
    steps = [data(0, b"a"), marker(1, "COMMIT"), marker(2, "COMMIT", 8), one(3, b"a"), ROLL, one(4)]
    pair = Pair(kafka, fast_dir, steps, expiration_ms=1)
    now_ms = NOW + DAY_MS
    pair.round(now_ms=now_ms)
    assert pair.offsets() == [1, 2, 3]
    assert pair.batches()[1].delete_horizon_ms is None  # the transaction still had data in this round
    assert (
        pair.batches()[2].delete_horizon_ms == now_ms + RETENTION_MS
    )  # the marker belongs to a transaction without data
    pair.round(now_ms=now_ms)
    assert pair.batches()[1].delete_horizon_ms == now_ms + RETENTION_MS
    pair.round(now_ms=now_ms + RETENTION_MS - 1)
    assert pair.offsets() == [1, 2, 3]
    pair.round(now_ms=now_ms + RETENTION_MS)
    assert pair.offsets() == [3]


def test_18_10_an_abort_marker_without_an_entry_leaves_its_producer_committed__equal(
    kafka: Kafka, fast_dir: Path
) -> None:
    """By 18.9, the data counts as committed, so that the COMMIT marker of a later empty transaction is retained."""
    steps = [data(0, b"a"), marker(1, "ABORT"), marker(2, "COMMIT"), one(3, b"b"), ROLL, one(4)]
    pair = Pair(kafka, fast_dir, steps, log_start_offset=2, expiration_ms=1)
    pair.round(now_ms=NOW + DAY_MS)
    assert pair.batches()[1].delete_horizon_ms == NOW + DAY_MS + RETENTION_MS
    assert pair.batches()[2].delete_horizon_ms is None


def test_18_11_emptied_batches_keep_their_marker__equal(kafka: Kafka, fast_dir: Path) -> None:
    steps = [data(0, b"a"), marker(1, "COMMIT"), one(2, b"a"), ROLL, one(3)]
    pair = Pair(kafka, fast_dir, steps)
    for _ in range(3):
        pair.round()
        assert not pair.batches()[0].records
        assert pair.batches()[1].delete_horizon_ms is None
    # Without its marker, the emptied batch would be read as an open transaction.
    for snapshot in (pair.ours / "t-0").glob("*.snapshot"):
        snapshot.unlink()
    replayed = pair.kafka.load(
        pair.ours / "t-0", clean=False, **(pair.opening(pair.circumstances()) | {"recovery_point": 0})
    )
    assert replayed.last_stable_offset == replayed.log_end_offset


def test_18_12_markers_that_bump_the_epoch_are_protected_and_emptied__equal(kafka: Kafka, fast_dir: Path) -> None:
    steps = [data(0, b"a"), marker(1, "COMMIT", epoch=1), one(2, b"a"), ROLL, one(3)]
    pair = Pair(kafka, fast_dir, steps)
    pair.round()
    assert pair.offsets() == [1, 2]  # no data batch is known to be the last one, so none is protected
    pair.round()
    assert pair.batches()[1].delete_horizon_ms == NOW + RETENTION_MS
    pair.round(now_ms=NOW + RETENTION_MS)
    assert pair.batches()[1].control and not pair.batches()[1].records
    pair.round(now_ms=NOW + 2 * RETENTION_MS)
    assert sorted(pair.batches()) == [1, 2] and pair.offsets() == [2]


@pytest.mark.parametrize(("age_ms", "left"), [(DAY_MS - 1, [0, 1]), (DAY_MS, [1])])
def test_18_13_producers_expire_by_the_rounds_own_clock__equal(
    kafka: Kafka, fast_dir: Path, age_ms: int, left: list[int]
) -> None:
    produced = one(0, b"a", producer_id=7, producer_epoch=0, base_sequence=0)
    pair = Pair(kafka, fast_dir, [produced, one(1, b"a"), ROLL, one(2)])
    pair.round(now_ms=NOW + age_ms)
    assert sorted(pair.batches()) == left


def test_18_14_nothing_is_cleaned_above_the_high_watermark__equal(kafka: Kafka, fast_dir: Path) -> None:
    """Decision 6: keytail refuses a partition without a high watermark."""
    pair = Pair(kafka, fast_dir, [newer(0, b"a", b"a"), ROLL, newer(2, b"a", b"a"), ROLL, one(4)])
    assert not pair.round(high_watermark=0).cleaned
    assert not pair.round(high_watermark=1).cleaned
    (pair.ours / "replication-offset-checkpoint").write_text("0\n0\n")
    facts, config = survey(pair.ours), compaction_config(pair.circumstances())
    assert select(facts, config, NOW).cleanable_bytes == 0
    assert any("no high watermark" in reason for reason in refusals(facts, config, "", NOW))
    assert pair.round(high_watermark=2).end_offset == 2
    assert pair.offsets() == [1, 2, 3]


@pytest.mark.parametrize(("age_ms", "kept"), [(RETENTION_MS - 1, [0, 1, 2]), (RETENTION_MS, [1, 2])])
def test_18_15_old_tombstones_are_removed_by_the_time_of_their_file__equal(
    kafka: Kafka, fast_dir: Path, age_ms: int, kept: list[int]
) -> None:
    tombstone = encode_single(Rec(0, NOW, b"a", None), magic=1)
    pair = Pair(kafka, fast_dir, [tombstone, ROLL, one(1, b"b"), ROLL, one(2, b"c"), ROLL, one(3)])
    for base, time_ms in ((0, NOW - age_ms), (1, NOW), (2, NOW)):
        os.utime(pair.log(base), ns=(time_ms * 10**6, time_ms * 10**6))
    pair.round(checkpoint=2)
    assert pair.offsets() == kept


# Writing bytes


def test_18_16_a_rewrite_preserves_base_offsets_but_not_base_timestamps__equal(kafka: Kafka, fast_dir: Path) -> None:
    records = [Rec(3, NOW + 9, b"a", b"0"), Rec(5, NOW + 1, b"b", b"1"), Rec(6, NOW + 2, b"c", b"2")]
    batch = encode_batch([*records, Rec(8, NOW + 99, b"a", b"3")], base_offset=1, last_offset=10)
    pair = Pair(kafka, fast_dir, [batch, one(11, b"a"), ROLL, one(12)])
    pair.round()
    (found, _) = pair.batches().values()
    assert (found.base_offset, found.last_offset) == (1, 10)
    assert (found.base_timestamp, found.max_timestamp) == (NOW + 1, NOW + 2)


def test_18_17_with_append_time_timestamp_deltas_are_0__equal(kafka: Kafka, fast_dir: Path) -> None:
    batch = many(0, (b"a", b"0"), (b"b", b"1"), (b"c", b"2"), timestamp_type=1, max_timestamp=NOW + 50)
    pair = Pair(kafka, fast_dir, [batch, one(3, b"a"), ROLL, one(4)])
    pair.round()
    found = pair.batches()[0]
    assert (found.base_timestamp, found.max_timestamp, found.record_count) == (NOW + 50, NOW + 50, 2)
    block = pair.log().read_bytes()[61 : found.size]
    assert block[2] == 0  # the timestamp delta of the first record, after length and attributes


def odd_batch(offset: int, keys: Iterable[bytes], header_key: bytes = b"h") -> bytes:
    """Return records with overlong varints, attributes, and null lengths below -1."""
    block, count = b"", 0
    for count, key in enumerate(keys, 1):
        body = b"\x55" + b"\x80\x00" + encode_varint(count - 1) + encode_varint(len(key)) + key
        body += encode_varint(-7) if key == b"null" else b"\x82\x80\x00v"
        body += b"\x02" + encode_varint(len(header_key)) + header_key + encode_varint(-3)
        block += encode_varint(len(body)) + body
    empty = encode_batch(
        [],
        base_offset=offset,
        last_offset=offset + count - 1,
        base_timestamp=NOW,
        max_timestamp=NOW,
        record_count=count,
    )
    batch = bytearray(empty + block)
    batch[8:12] = struct.pack(">i", len(batch) - 12)
    batch[17:21] = struct.pack(">I", crc32c(np.frombuffer(bytes(batch), np.uint8), 21, len(batch) - 21))
    return bytes(batch)


def test_18_18_rewritten_records_are_normalised_and_copied_ones_are_not__equal(kafka: Kafka, fast_dir: Path) -> None:
    copied, rebuilt = odd_batch(0, [b"a", b"b"]), odd_batch(2, [b"c", b"d", b"null"])
    pair = Pair(kafka, fast_dir, [copied, rebuilt, one(5, b"c"), ROLL, one(6)])
    pair.round()
    log = pair.log().read_bytes()
    assert log.startswith(copied)
    found = pair.batches()[2]
    assert (
        encode_batch(list(found.records), base_offset=2, last_offset=4, delete_horizon_ms=found.delete_horizon_ms)
        in log
    )
    assert [record.value for record in found.records] == [b"v", None]


def test_18_18_malformed_header_keys_are_not_changed__departed_from(kafka: Kafka, fast_dir: Path) -> None:
    """Decision 3: Kafka replaces them in batches that it rebuilds, keytail never does."""
    name = b"x\xed\xa0\x80y"
    batch = encode_batch([Rec(0, NOW, b"a", b"0", ((name, b"1"),)), Rec(1, NOW, b"b", b"1", ((name, b"1"),))])
    pair = Pair(kafka, fast_dir, [batch, one(2, b"a"), ROLL, one(3)])
    now = pair.circumstances()
    pair.copies(now)
    pair.kafka_round(now)
    pair.our_round(now)
    headers = [
        decode_any_log((side / "t-0" / pair.log().name).read_bytes())[0].records[0].headers
        for side in (pair.theirs, pair.ours)
    ]
    assert headers == [((b"x\xef\xbf\xbdy", b"1"),), ((name, b"1"),)]
    assert pair.load_ours(now).repaired == []


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_18_19_batches_are_recompressed_with_their_own_codec_at_its_default_level__equal(
    kafka: Kafka, fast_dir: Path, codec: int
) -> None:
    pairs = [(b"%d" % i, b"some text %d " % (i * i) * 40) for i in range(200)]
    sizes = []
    for number, configs in enumerate(({}, {"compression_type": "gzip", "compression_gzip_level": 1,
                                           "compression_lz4_level": 17, "compression_zstd_level": -5})):  # fmt: skip
        home = fast_dir / str(number)
        home.mkdir()
        pair = Pair(kafka, home, [many(0, *pairs, codec=codec), one(200, b"0"), ROLL, one(201)], **configs)
        pair.round()
        found = pair.batches()[0]
        assert (found.codec, found.record_count) == (codec, 199)
        ours = decode_any_log((pair.ours / "t-0" / pair.log().name).read_bytes())[0]
        assert ours.codec == codec
        sizes.append((found.size, ours.size))
    assert sizes[0] == sizes[1]
    # sizes of two releases of a codec may differ slightly; those of two levels would differ more
    assert abs(sizes[0][0] - sizes[0][1]) <= 0.02 * sizes[0][0]


def test_18_20_the_leader_epoch_is_not_under_the_checksum__equal(kafka: Kafka, fast_dir: Path) -> None:
    pair = Pair(kafka, fast_dir, [many(0, (b"a", b"0"), (b"b", b"1")), one(2, b"a"), ROLL, one(3)])
    damaged = bytearray(pair.log().read_bytes())
    damaged[12:16] = struct.pack(">i", 77)
    pair.log().write_bytes(damaged)
    pair.round()
    assert pair.batches()[0].leader_epoch == 77 and pair.offsets() == [1, 2]


@pytest.mark.parametrize("which", ["copied", "rebuilt"])
def test_18_21_damaged_batches_are_refused__departed_from(kafka: Kafka, fast_dir: Path, which: str) -> None:
    """Decision 1: Kafka copies them or computes new checksums; keytail refuses the partition and changes nothing."""
    copied, rebuilt = one(0, b"c", b"copied"), many(1, (b"a", b"superseded"), (b"b", b"rebuilt"))
    pair = Pair(kafka, fast_dir, [copied, rebuilt, one(3, b"a"), ROLL, one(4)])
    damaged = bytearray(pair.log().read_bytes())
    at = damaged.index(which.encode())
    damaged[at] ^= 0x20
    pair.log().write_bytes(damaged)
    now = pair.circumstances()
    pair.copies(now)
    pair.kafka_round(now)
    signed = (pair.theirs / "t-0" / pair.log().name).read_bytes()
    assert which.encode() not in signed and which[1:].encode() in signed
    with pytest.raises(CorruptLog, match="invalid CRC") as corrupt:
        pair.our_round(now)
    position = 0 if which == "copied" else len(copied)
    assert (corrupt.value.path, corrupt.value.byte_position) == (str(pair.ours / "t-0" / pair.log().name), position)
    assert pair.unchanged()


def test_18_22_index_entries_name_last_offsets_at_the_starts_of_batches__equal(kafka: Kafka, fast_dir: Path) -> None:
    batches = [many(3 * i, (b"%d" % i, b"v"), (b"x%d" % i, b"v"), last_offset=3 * i + 2) for i in range(4)]
    size = len(batches[0])
    for interval_bytes, indexed in ((size, [2]), (size - 1, [1, 2, 3])):
        home = fast_dir / str(interval_bytes)
        home.mkdir()
        pair = Pair(kafka, home, [*batches, ROLL, one(12)], **{"index_interval_bytes": interval_bytes})
        pair.round()
        index = pair.log().with_suffix(".index").read_bytes()
        assert list(struct.iter_unpack(">ii", index)) == [(3 * i + 2, i * size) for i in indexed]
        # All batches have the same largest timestamp, so the time index has only the first batch.
        time_index = pair.log().with_suffix(".timeindex").read_bytes()
        assert list(struct.iter_unpack(">qi", time_index)) == [(NOW + 1, 2)]


def test_18_23_indexes_have_no_unused_space__equal(kafka: Kafka, fast_dir: Path) -> None:
    pair = Pair(kafka, fast_dir, [newer(0, b"a", b"b", b"c"), ROLL, one(3)], preallocate="true", segment_bytes=1 << 20)
    pair.round()
    now = pair.circumstances()
    assert pair.load_ours(now).segments[0].largest_timestamp_ms == NOW
    ours = pair.ours / "t-0" / pair.log().name
    sizes = {suffix: ours.with_suffix(suffix).stat().st_size for suffix in (".index", ".timeindex", ".log")}
    assert sizes == {".index": 16, ".timeindex": 12, ".log": len(newer(0, b"a", b"b", b"c"))}


def test_18_24_aborted_entries_are_retained_until_a_round_sees_no_data__equal(kafka: Kafka, fast_dir: Path) -> None:
    steps = [data(0, b"a"), data(1, b"b", 8), marker(2, "ABORT"), marker(3, "ABORT", 8), one(4, b"c"), ROLL, one(5)]
    pair = Pair(kafka, fast_dir, steps, expiration_ms=1)
    index = pair.log().with_suffix(".txnindex")
    before = index.read_bytes()
    assert len(before) == 2 * 34
    pair.round(now_ms=NOW + DAY_MS)
    assert pair.offsets() == [2, 3, 4] and index.read_bytes() == before
    pair.round(now_ms=NOW + DAY_MS)
    assert pair.offsets() == [2, 3, 4] and not index.exists()


def test_18_25_an_output_has_the_time_of_its_last_source_in_whole_milliseconds__equal(
    kafka: Kafka, fast_dir: Path
) -> None:
    pair = Pair(kafka, fast_dir, [one(0, b"a"), ROLL, one(1, b"b"), ROLL, one(2)])
    for base in (0, 1):
        time_ns = (NOW - 5000 + base) * 10**6 + 123_456
        os.utime(pair.log(base), ns=(time_ns, time_ns))
        os.utime(pair.log(base).with_suffix(".index"), ns=(1, 1))
    pair.round()
    for suffix in (".log", ".index", ".timeindex"):
        ours = pair.ours / "t-0" / pair.log().with_suffix(suffix).name
        assert ours.stat().st_mtime_ns == (NOW - 4999) * 10**6
    assert not pair.log(1).exists()


def test_18_26_snapshots_and_checkpoints_are_equal_when_parsed__equal(kafka: Kafka, fast_dir: Path) -> None:
    ids = [1, 2**33, 40, 17, 5, 2**62 + 3]
    steps = [one(i, b"%d" % i, producer_id=pid, producer_epoch=i, base_sequence=i) for i, pid in enumerate(ids)]
    pair = Pair(kafka, fast_dir, [*steps, ROLL, one(6)])
    (newest,) = (pair.source / "t-0").glob("*7.snapshot")
    theirs = newest.read_bytes()
    entries = parse_snapshot(theirs)
    assert {(e.producer_id, e.epoch, e.last_offset) for e in entries} == {(pid, i, i) for i, pid in enumerate(ids)}
    ours = encode_snapshot(sorted(entries, key=lambda entry: entry.producer_id))
    assert ours != theirs and sorted(parse_snapshot(ours), key=str) == sorted(entries, key=str)
    offsets = {(f"topic-{i}", i): i * i for i in range(20)}
    path = fast_dir / "cleaner-offset-checkpoint"
    kafka.write_checkpoint(path, {f"{topic}-{n}": offset for (topic, n), offset in offsets.items()})
    written = path.read_bytes()
    assert read_offsets(LOCAL, str(path)) == offsets
    write_offsets(LOCAL, str(path), offsets)
    assert path.read_bytes() != written and sorted(path.read_bytes()) == sorted(written)
    assert kafka.read_checkpoint(path) == {f"{topic}-{n}": offset for (topic, n), offset in offsets.items()}


# Files


def test_18_28_snapshots_are_removed_with_the_segments_of_their_names__equal(kafka: Kafka, fast_dir: Path) -> None:
    steps = [one(0, b"a"), ROLL, one(1, b"b"), ROLL, one(2, b"c"), ROLL, one(3)]
    pair = Pair(kafka, fast_dir, steps, **{"internal_segment_bytes": 2 * len(one(0)) + len(one(0)) // 2})
    numbers = {int(path.stem) for path in (pair.source / "t-0").glob("*.snapshot")}
    assert numbers == {1, 2, 3, 4}
    pair.round()
    assert {int(path.stem) for path in (pair.ours / "t-0").glob("*.snapshot")} == {2, 3, 4}


@pytest.mark.parametrize("missing", [".timeindex", ".index"])
def test_18_29_missing_indexes_of_a_source_are_rebuilt__equal(kafka: Kafka, fast_dir: Path, missing: str) -> None:
    """For min.compaction.lag.ms, the age of a segment without a time index is that of its file. The output has all
    indexes.
    """
    pair = Pair(kafka, fast_dir, [newer(0, b"a", b"a", b"b"), ROLL, one(3)], min_compaction_lag_ms=5000)
    os.utime(pair.log(), ns=((NOW - 9000) * 10**6,) * 2)
    pair.log().with_suffix(missing).unlink()
    if missing == ".timeindex":
        assert pair.round(now_ms=NOW + 1).end_offset == 3
        assert pair.log().with_suffix(".timeindex").stat().st_size == 12
    else:
        now = pair.circumstances(now_ms=NOW + 10_000)
        pair.copies(now)
        pair.kafka_round(now)  # Kafka's loader rebuilds the index, so that file times differ
        pair.our_round(now)
        for suffix in (".log", ".index", ".timeindex"):
            name = pair.log().with_suffix(suffix).name
            assert (pair.ours / "t-0" / name).read_bytes() == (pair.theirs / "t-0" / name).read_bytes()


def test_18_30_names_that_stop_a_broker_are_problems__equal(kafka: Kafka, fast_dir: Path) -> None:
    pair = Pair(kafka, fast_dir, [newer(0, b"a", b"a"), ROLL, one(2)])
    (pair.source / "t-0" / "foo.log").write_bytes(b"")
    now = pair.circumstances()
    pair.copies(now)
    with pytest.raises(KafkaError, match="NumberFormatException"):
        pair.kafka_round(now)
    assert any("foo.log" in problem for problem in survey(pair.ours).problems)


@pytest.mark.parametrize("text", ["1\n0\n", "0\n2\nt 0 1\n", "0\n1\nt 0\n", "x\n0\n", "0\n1\nt 0 1\n\n"])
def test_18_31_an_invalid_checkpoint_affects_the_whole_log_dir__equal(kafka: Kafka, fast_dir: Path, text: str) -> None:
    pair = Pair(kafka, fast_dir, [newer(0, b"a", b"a"), ROLL, one(2)])
    pair.copies(pair.circumstances())
    path = pair.ours / "cleaner-offset-checkpoint"
    path.write_text(text)
    with pytest.raises(KafkaError):
        kafka.read_checkpoint(path)
    shutil.copytree(pair.ours / "t-0", pair.ours / "u-0")
    listing = survey_log_dirs(LOCAL, [str(pair.ours)])[0]
    assert len(listing.partitions) == 2
    for entry in listing.partitions:
        assert any("checkpoint" in problem for problem in survey_partition(LOCAL, listing, entry).problems)


def test_18_34_keytail_and_brokers_take_the_same_lock__equal(kafka: Kafka, fast_dir: Path) -> None:
    assert kafka.lock(fast_dir)
    with pytest.raises(Refused), hold([str(fast_dir)]):
        raise AssertionError("two processes hold the lock")
    kafka.unlock(fast_dir)
    assert not (fast_dir / ".lock").exists()
    with hold([str(fast_dir)]):
        assert not kafka.lock(fast_dir)
    assert kafka.lock(fast_dir)
    kafka.unlock(fast_dir)


@pytest.mark.parametrize("garbage", [b"\0" * 5, b"\0" * 300, b"garbage " * 20, one(2)[:-1]], ids=len)
def test_18_35_invalid_bytes_after_an_inactive_segment_are_refused__departed_from(
    kafka: Kafka, fast_dir: Path, garbage: bytes
) -> None:
    """Decision 1: Kafka's cleaner fails in every round, and skips the partition until the broker restarts."""
    pair = Pair(kafka, fast_dir, [newer(0, b"a", b"a"), ROLL, one(2)])
    size = pair.log().stat().st_size
    with pair.log().open("ab") as file:
        file.write(garbage)
    now = pair.circumstances()
    pair.copies(now)
    with pytest.raises(KafkaError):
        pair.kafka_round(now)
    with pytest.raises(CorruptLog) as corrupt:
        pair.our_round(now)
    assert corrupt.value.byte_position == size and pair.unchanged()


# Selection, from survey to result


@pytest.mark.parametrize(("lag_ms", "end_offset"), [(1000, 2), (1001, None), (999, 2)])
def test_minimum_lag_excludes_strictly_younger_segments(
    kafka: Kafka, fast_dir: Path, lag_ms: int, end_offset: int | None
) -> None:
    pair = Pair(kafka, fast_dir, [newer(0, b"a", b"a"), ROLL, one(2)], min_compaction_lag_ms=lag_ms)
    theirs = pair.round(now_ms=NOW + 1000)
    assert (theirs.end_offset if theirs.cleaned else None) == end_offset


@pytest.mark.parametrize(("lag_ms", "due"), [(1000, False), (999, True)])
def test_maximum_lag_makes_a_round_due_when_strictly_exceeded(
    kafka: Kafka, fast_dir: Path, lag_ms: int, due: bool
) -> None:
    """Segments whose first batch has no timestamp, or timestamp 0, are ignored."""
    timeless = [one(0, b"x", time_ms=-1), ROLL, one(1, b"y", time_ms=0), ROLL]
    pair = Pair(kafka, fast_dir, [*timeless, newer(2, b"a", b"a"), ROLL, one(4)], max_compaction_lag_ms=lag_ms)
    assert pair.round(now_ms=NOW + 1000).must_compact_now is due


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_records_below_the_log_start_are_cleaned_with_either_policy(kafka: Kafka, fast_dir: Path, policy: str) -> None:
    steps = [newer(0, b"a", b"b"), ROLL, newer(2, b"a", b"c"), ROLL, one(4)]
    pair = Pair(kafka, fast_dir, steps, log_start_offset=1, cleanup_policy=policy)
    assert pair.round().first_dirty_offset == 1
    assert pair.offsets() == [1, 2, 3]


@pytest.mark.parametrize(("checkpoint", "first_dirty"), [(0, 3), (2, 3), (3, 3), (7, 7), (8, 3), (10**12, 3)])
def test_checkpoints_outside_the_log_are_reset(
    kafka: Kafka, fast_dir: Path, checkpoint: int, first_dirty: int
) -> None:
    steps = [newer(0, b"a", b"b"), ROLL, newer(2, b"a", b"c", b"d", b"c"), ROLL, one(6)]
    pair = Pair(kafka, fast_dir, steps, log_start_offset=3)
    theirs = pair.round(checkpoint=checkpoint)
    assert (theirs.first_dirty_offset, theirs.rewrite_checkpoint) == (first_dirty, checkpoint not in (3, 7))
    assert theirs.cleaned is (checkpoint != 7)


def test_with_the_log_start_in_the_active_segment_nothing_is_cleaned(kafka: Kafka, fast_dir: Path) -> None:
    pair = Pair(kafka, fast_dir, [newer(0, b"a", b"a"), ROLL, newer(2, b"a", b"a")], log_start_offset=3)
    assert not pair.round().cleaned


def test_offset_gaps_between_segments_do_not_end_a_round(kafka: Kafka, fast_dir: Path) -> None:
    steps = [
        newer(0, b"a", b"b"),
        step_roll(1000),
        newer(1000, b"a"),
        step_roll(5000),
        step_roll(2**33),
        one(2**33 + 9),
    ]
    pair = Pair(kafka, fast_dir, steps)
    theirs = pair.round()
    assert theirs.end_offset == theirs.first_uncleanable_offset == 2**33
    assert pair.offsets() == [1, 1000]


def test_segments_are_not_merged_beyond_2_to_the_31_offsets(kafka: Kafka, fast_dir: Path) -> None:
    far = 2**31
    steps = [one(0, b"a"), ROLL, one(far - 1, b"b"), one(far, b"c"), ROLL, one(far + 1, b"d"), ROLL, one(far + 9)]
    pair = Pair(kafka, fast_dir, steps)
    pair.round()
    pair.round()
    assert pair.offsets() == [0, far - 1, far, far + 1]
    assert len(list((pair.source / "t-0").glob("*.log"))) > 2


@pytest.mark.parametrize("grouping", ["kafka", "measured"])
def test_an_overflowed_segment_is_split_while_it_is_cleaned__departed_from(
    kafka: Kafka, fast_dir: Path, grouping: str
) -> None:
    """Decision 14: Kafka splits such a segment when it loads or cleans it, and cleans the parts later."""
    far = 2**31
    pair = Pair(kafka, fast_dir, [one(0, b"a"), one(5, b"b"), ROLL, step_roll(2 * far), one(2 * far)])
    for path in (pair.source / "t-0").glob(f"{6:020d}.*"):
        path.unlink()
    pair.log().write_bytes(one(0, b"a") + one(5, b"b") + one(far, b"a") + one(far + 7, b"c"))
    now = pair.circumstances()
    pair.copies(now)
    assert survey(pair.ours).problems == ()
    _, result = pair.our_round(now, grouping=grouping)
    assert result is not None and result.end_offset == 2 * far
    assert [segment.base_offset for group in result.groups for segment in group.segments] == [0, far]
    loaded = pair.load_ours(now)
    assert loaded.repaired == [] and loaded.fetch_mismatches == ()
    assert [record.offset for record in loaded.records] == [5, far, far + 7, 2 * far]


def test_a_full_index_closes_the_output_segment__departed_from(kafka: Kafka, fast_dir: Path) -> None:
    """Decision 14: Kafka's cleaner raises an exception."""
    batches = [one(i, b"%d" % i) for i in range(12)]
    pair = Pair(kafka, fast_dir, [*batches[:6], ROLL, *batches[6:], ROLL, one(12)], index_interval_bytes=1000)
    now = pair.circumstances(index_interval_bytes=0, segment_index_bytes=24)
    pair.copies(now)
    with pytest.raises(KafkaError):
        pair.kafka_round(now)
    _, result = pair.our_round(now)
    assert result is not None and result.limits_met > 0
    loaded = pair.load_ours(now)
    assert loaded.repaired == [] and loaded.fetch_mismatches == ()
    assert [record.offset for record in loaded.records] == list(range(13))
    assert all(segment.index_bytes <= 24 and segment.time_index_bytes <= 24 for segment in loaded.segments[:-1])


def test_batches_above_max_message_bytes_are_rebuilt_and_served__equal(kafka: Kafka, fast_dir: Path) -> None:
    """max.message.bytes limits appends only; with a delete horizon, a batch may also become larger."""
    large = many(0, *((b"%d" % i, b"v" * 50) for i in range(9)), (b"a", None))
    for home, limit in (("at the limit", len(large)), ("far beyond it", 100)):
        (fast_dir / home).mkdir()
        pair = Pair(kafka, fast_dir / home, [large, ROLL, one(10)])
        pair.round(max_message_bytes=limit)
        rebuilt = pair.batches()[0]
        assert rebuilt.size > len(large) and rebuilt.delete_horizon_ms is not None
        assert pair.offsets() == list(range(10))


def test_zeros_after_the_active_segment_of_a_crashed_broker_are_accepted(kafka: Kafka, fast_dir: Path) -> None:
    """Decision 5: preallocated segments end with zeros. The log below the recovery point is cleaned."""
    pair = Pair(kafka, fast_dir, [newer(0, b"a", b"a"), ROLL, newer(2, b"b", b"b"), ROLL, one(4)])
    with pair.log(4).open("ab") as file:
        file.write(bytes(10_000))
    now = pair.circumstances()
    pair.copies(now)
    (pair.ours / ".kafka_cleanshutdown").unlink()
    kafka.write_checkpoint(pair.ours / "recovery-point-offset-checkpoint", {"t-0": 3})
    facts = survey(pair.ours)
    assert (facts.problems, facts.log_end_offset, facts.tail_bytes) == ((), 5, 10_000)
    _, result = pair.our_round(now)
    assert result is not None and result.end_offset == 2  # the segment with the recovery point is not cleaned
    loaded = kafka.load(pair.ours / "t-0", clean=False, **(pair.opening(now) | {"recovery_point": 3}))
    assert [record.offset for record in loaded.records] == [1, 2, 3, 4]


def test_an_incomplete_last_batch_after_a_clean_shutdown_is_damage__departed_from(
    kafka: Kafka, fast_dir: Path
) -> None:
    """Decision 1: Kafka ends the log before the incomplete batch, and appends after it."""
    pair = Pair(kafka, fast_dir, [newer(0, b"a", b"a"), ROLL, one(2)])
    size = pair.log(2).stat().st_size
    with pair.log(2).open("ab") as file:
        file.write(one(3)[:-1])
    now = pair.circumstances()
    pair.copies(now)
    assert pair.kafka_round(now).cleaned
    with pytest.raises(CorruptLog) as corrupt:
        pair.our_round(now)
    assert corrupt.value.byte_position == size and pair.unchanged()
    (pair.ours / ".kafka_cleanshutdown").unlink()  # after a crash, an incomplete batch is not damage
    _, result = pair.our_round(now)
    assert result is not None


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_emptied_last_batch_of_an_old_format_is_removed__departed_from(
    kafka: Kafka, fast_dir: Path, wrapped: bool
) -> None:
    """Decision 4: Kafka's cleaner fails, and skips the partition until the broker restarts."""
    records = [Rec(1, NOW, b"a", None)]
    tombstone = encode_wrapper(records, GZIP, magic=1) if wrapped else encode_message(1, b"a", None, timestamp=NOW)
    steps = [one(0, b"b"), ROLL, tombstone, ROLL, one(2)]
    pair = Pair(kafka, fast_dir, steps, delete_retention_ms=0)
    times = {0: NOW, 1: NOW - 10}
    for base, time_ms in times.items():
        os.utime(pair.log(base), ns=(time_ms * 10**6, time_ms * 10**6))
    now = pair.circumstances(checkpoint=1)
    pair.copies(now)
    with pytest.raises(KafkaError, match="Empty batches"):
        pair.kafka_round(now)
    with pytest.raises(Refused, match="magic 0 or 1"):
        pair.our_round(now)
    assert pair.unchanged()


def test_the_map_treats_committed_data_as_aborted_when_it_starts_after_a_marker__equal(
    kafka: Kafka, fast_dir: Path
) -> None:
    """CLEANING.md, "Aborted data and the map": the ABORT marker is before the batch with which the map starts."""
    filler = [one(i, b"f%d" % i) for i in range(2, 5)]
    steps = [data(0, b"a"), marker(1, "ABORT"), *filler, data(5, b"x", sequence=1), marker(6, "COMMIT"),
             one(7, b"y"), data(8, b"x", sequence=2), marker(9, "COMMIT"), ROLL, one(10)]  # fmt: skip
    pair = Pair(kafka, fast_dir, steps, expiration_ms=1)
    pair.round(now_ms=NOW + DAY_MS, checkpoint=5)
    assert 5 in pair.offsets()  # record 8 supersedes it, and it is not in the map
    pair.round(now_ms=NOW + DAY_MS, checkpoint=0)
    assert 5 not in pair.offsets() and 8 in pair.offsets()


def test_no_horizon_is_set_beyond_the_largest_timestamp__equal(kafka: Kafka, fast_dir: Path) -> None:
    pair = Pair(kafka, fast_dir, [one(0, b"a", None), ROLL, one(1)], delete_retention_ms=2**63 - 1)
    for _ in range(2):
        pair.round()
        assert pair.batches()[0].delete_horizon_ms is None and pair.offsets() == [0]


def test_a_wrong_index_of_aborted_transactions_is_corrected__departed_from(kafka: Kafka, fast_dir: Path) -> None:
    """Decision 13: Kafka uses the file, and retains aborted data as if it were committed; keytail reads the log."""
    steps = [data(0, b"a"), marker(1, "ABORT"), one(2, b"b"), ROLL, one(3)]
    pair = Pair(kafka, fast_dir, steps, expiration_ms=1)
    index = pair.log().with_suffix(".txnindex")
    right = index.read_bytes()
    index.unlink()
    now = pair.circumstances(now_ms=NOW + DAY_MS)
    pair.copies(now)
    pair.kafka_round(now)
    pair.our_round(now)
    logs = [(side / "t-0" / pair.log().name).read_bytes() for side in (pair.theirs, pair.ours)]
    assert [[r.offset for b in decode_any_log(log) for r in b.records] for log in logs] == [[0, 1, 2], [1, 2]]
    assert (pair.ours / "t-0" / index.name).read_bytes() == right
    assert pair.load_ours(now).repaired == []


def test_replay_after_a_crash_starts_with_the_batch_that_contains_the_log_start__equal(
    kafka: Kafka, fast_dir: Path
) -> None:
    """Without a snapshot, an open transaction is found whose only batch contains the log start."""
    transaction = encode_batch(
        [Rec(i, NOW, b"%d" % i, b"v") for i in range(3)],
        producer_id=7, producer_epoch=0, base_sequence=0, transactional=True,
    )  # fmt: skip
    steps = [one(0, b"x"), ROLL, transaction_at(transaction, 1), ROLL, one(4, b"y"), ROLL, one(5)]
    pair = Pair(kafka, fast_dir, steps, log_start_offset=2)
    for path in (pair.source / "t-0").glob("*.snapshot"):
        path.unlink()
    now = pair.circumstances(checkpoint=2)
    pair.copies(now)
    (pair.ours / ".kafka_cleanshutdown").unlink()
    facts = survey(pair.ours)
    unstable = first_unstable(LOCAL, facts, now_ms=NOW)
    theirs = kafka.cleanable(pair.theirs / "t-0", checkpoint=2, clean=False, **pair.opening(now))
    assert theirs.first_uncleanable_offset == 1
    assert unstable is not None and unstable.offset == theirs.last_stable_offset
    assert select(facts, compaction_config(now), NOW, unstable=unstable).first_uncleanable_offset == 1


def transaction_at(batch: bytes, offset: int) -> bytes:
    return struct.pack(">q", offset) + batch[8:]
