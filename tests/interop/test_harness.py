"""The harness itself: it loads what it has appended, and its cleaner has the expected result in small cases."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.chance import SEED
from tests.interop.kafka import (
    CLOCK_MS,
    Kafka,
    KafkaError,
    KafkaUnavailable,
    Record,
    slots_for,
    step_batch,
    step_delete_records,
    step_marker,
    step_raw,
    step_roll,
)
from tests.interop.traffic import random_traffic

pytestmark = pytest.mark.interop

NOW = CLOCK_MS
SMALL = {"internal.segment.bytes": 4096, "index.interval.bytes": 100, "segment.index.bytes": 1200}
HORIZON = {**SMALL, "delete.retention.ms": 60_000}


def values(kafka: Kafka, partition: Path, **options: Any) -> list[tuple[int, bytes | None]]:
    return [(record.offset, record.value) for record in kafka.load(partition, configs=SMALL, **options).records]


def test_appended_records_are_loaded(kafka: Kafka, fast_dir: Path) -> None:
    partition = fast_dir / "orders-0"
    sent: list[tuple[Any, ...]] = [
        (NOW, b"a", b"1", (("h", b"x"), ("h", None), ("", b""))),
        (NOW + 5, b"", b"empty key"),
        (NOW - 3, b"gone", None),
        (-1, b"a", b""),
    ]
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        opened = kafka.append(partition, [step_batch(sent, codec=codec)], configs=SMALL)
    assert opened.log_end_offset == 20
    assert opened.segment_bases == [0]
    loaded = kafka.load(partition, configs=SMALL, fetch=True, batches=True, timestamps=[NOW, NOW + 5, NOW + 6])
    expected = [Record(4 * turn + i, *(*item, ())[:4]) for turn in range(5) for i, item in enumerate(sent)]
    assert list(loaded.records) == expected
    assert [batch["codec"] for batch in loaded.batches] == ["none", "gzip", "snappy", "lz4", "zstd"]
    assert loaded.fetch_mismatches == ()
    assert loaded.repaired == []
    assert loaded.timestamps == {NOW: (NOW, 0), NOW + 5: (NOW + 5, 1), NOW + 6: None}


def test_a_follower_appends_offsets_times_and_horizons_unchanged(kafka: Kafka, fast_dir: Path) -> None:
    partition = fast_dir / "orders-0"
    batch = step_batch(
        [Record(7, NOW, b"a", b"1"), Record(9, NOW, b"b", None)],
        follower=True,
        base_offset=5,
        last_offset=12,
        log_append_time=NOW + 50,
        delete_horizon_ms=NOW + 99,
        leader_epoch=3,
        producer=(41, 2, 10),
    )
    opened = kafka.append(partition, [batch], configs=SMALL)
    assert opened.log_end_offset == 13
    loaded = kafka.load(partition, configs=SMALL, batches=True)
    assert [(record.offset, record.timestamp_ms) for record in loaded.records] == [
        (7, NOW + 50),
        (9, NOW + 50),
    ]
    header = loaded.batches[0]
    assert (header["base_offset"], header["last_offset"], header["leader_epoch"]) == (5, 12, 3)
    assert (header["producer_id"], header["producer_epoch"], header["base_sequence"]) == (41, 2, 10)
    assert (header["delete_horizon_ms"], header["timestamp_type"]) == (NOW + 99, "LogAppendTime")
    raw = (partition / f"{0:020d}.log").read_bytes()
    other = fast_dir / "orders-1"
    kafka.append(other, [step_raw(raw, leader_epoch=3)], configs=SMALL)
    assert (other / f"{0:020d}.log").read_bytes() == raw


def test_log_append_time_is_the_time_of_the_clock(kafka: Kafka, fast_dir: Path) -> None:
    configs = {**SMALL, "message.timestamp.type": "LogAppendTime"}
    kafka.append(fast_dir / "t-0", [step_batch([(5, b"a", b"1")])], configs=configs, clock_ms=NOW + 7)
    assert kafka.load(fast_dir / "t-0", configs=configs).records[0].timestamp_ms == NOW + 7


def test_a_round_retains_the_latest_record_of_each_key(kafka: Kafka, fast_dir: Path) -> None:
    partition = fast_dir / "orders-0"
    steps = [step_batch([(NOW, key, value)]) for key, value in ((b"a", b"1"), (b"b", b"2"), (b"a", b"3"))]
    kafka.append(partition, [*steps, step_roll(), step_batch([(NOW, b"b", b"4")])], configs=SMALL)
    cleaned = kafka.clean(partition, configs=SMALL)
    assert (cleaned.first_dirty_offset, cleaned.first_uncleanable_offset, cleaned.end_offset) == (0, 3, 3)
    assert (cleaned.records_read, cleaned.records_written, cleaned.map_entries) == (3, 2, 2)
    assert cleaned.dirty_ratio == 1.0
    assert values(kafka, partition) == [(1, b"2"), (2, b"3"), (3, b"4")]
    assert not [name for name in os.listdir(partition) if name.endswith((".deleted", ".cleaned", ".swap"))]


def test_a_full_map_ends_the_round_inside_a_batch(kafka: Kafka, fast_dir: Path) -> None:
    partition = fast_dir / "orders-0"
    batch = step_batch([(NOW, key, b"1") for key in (b"a", b"b", b"a", b"c")])
    kafka.append(partition, [batch, step_batch([(NOW, b"a", b"2")]), step_roll()], configs=SMALL)
    cleaned = kafka.clean(partition, configs=SMALL, map_max_entries=2)
    # Two keys fit. The size is checked before a put, so that the map is full even for the known key "a" at offset 2.
    assert (cleaned.map_max_entries, cleaned.map_entries, cleaned.end_offset) == (2, 2, 2)
    assert [offset for offset, _ in values(kafka, partition)] == [0, 1, 2, 3, 4]
    again = kafka.clean(partition, configs=SMALL, checkpoint=cleaned.end_offset, map_max_entries=10)
    assert (again.first_dirty_offset, again.end_offset) == (2, 5)
    assert [offset for offset, _ in values(kafka, partition)] == [1, 3, 4]


def test_a_tombstone_gets_a_horizon_and_is_removed_when_it_has_passed(kafka: Kafka, fast_dir: Path) -> None:
    partition = fast_dir / "orders-0"
    steps = [step_batch([(NOW, b"a", None)]), step_batch([(NOW, b"b", b"2")]), step_roll()]
    kafka.append(partition, steps, configs=HORIZON)
    kafka.clean(partition, configs=HORIZON, clock_ms=NOW)
    assert kafka.load(partition, configs=HORIZON, batches=True).batches[0]["delete_horizon_ms"] == NOW + 60_000
    more = [step_batch([(NOW, b"c", b"3")]), step_roll()]
    kafka.append(partition, more, configs=HORIZON)
    kafka.clean(partition, configs=HORIZON, clock_ms=NOW + 59_999, checkpoint=2)
    assert [offset for offset, _ in values(kafka, partition)] == [0, 1, 2]
    kafka.clean(partition, configs=HORIZON, clock_ms=NOW + 60_000, checkpoint=2)
    assert [offset for offset, _ in values(kafka, partition)] == [1, 2]


def test_the_last_batch_of_an_active_producer_is_retained_empty(kafka: Kafka, fast_dir: Path) -> None:
    partition = fast_dir / "orders-0"
    steps = [
        step_batch([(NOW, b"a", b"1")], producer=(41, 0, 0)),
        step_batch([(NOW, b"a", b"2")]),
        step_roll(),
    ]
    kafka.append(partition, steps, configs=SMALL)
    kafka.clean(partition, configs=SMALL)
    loaded = kafka.load(partition, configs=SMALL, batches=True)
    assert [(batch["base_offset"], batch["records"]) for batch in loaded.batches] == [(0, 0), (1, 1)]
    kafka.clean(partition, configs=SMALL, first_dirty_offset=0, clock_ms=NOW + 86_400_000)
    loaded = kafka.load(partition, configs=SMALL, batches=True)
    assert [(batch["base_offset"], batch["records"]) for batch in loaded.batches] == [(1, 1)]


def test_cleanable_segments_are_reported(kafka: Kafka, fast_dir: Path) -> None:
    partition = fast_dir / "orders-0"
    batches = [step_batch([(NOW + number, b"a", b"1")]) for number in range(6)]
    steps = [*batches[:2], step_roll(), *batches[2:4], step_roll(), *batches[4:]]
    kafka.append(partition, steps, configs=SMALL)
    numbers = kafka.cleanable(partition, configs=SMALL)
    assert (numbers.first_dirty_offset, numbers.first_uncleanable_offset) == (0, 4)
    numbers = kafka.cleanable(partition, configs=SMALL, high_watermark=3)
    assert (numbers.first_uncleanable_dirty_offset, numbers.first_uncleanable_offset) == (3, 2)
    numbers = kafka.cleanable(partition, configs=SMALL, checkpoint=3)
    assert (numbers.first_dirty_offset, numbers.dirty_ratio) == (3, 1 / 3)
    numbers = kafka.cleanable(partition, configs=SMALL, checkpoint=99)
    assert (numbers.first_dirty_offset, numbers.rewrite_checkpoint) == (0, True)
    lag = {**SMALL, "min.compaction.lag.ms": 10}
    assert kafka.cleanable(partition, configs=lag, clock_ms=NOW + 12).first_uncleanable_offset == 2
    lag = {**SMALL, "max.compaction.lag.ms": 10}
    assert kafka.cleanable(partition, configs=lag, clock_ms=NOW + 12).must_compact_now
    assert not kafka.cleanable(partition, configs=lag, clock_ms=NOW + 10).must_compact_now


def test_records_below_the_log_start_are_not_served(kafka: Kafka, fast_dir: Path) -> None:
    partition = fast_dir / "orders-0"
    steps = [step_batch([(NOW, b"a", b"1"), (NOW, b"b", b"1")]), step_delete_records(1)]
    assert kafka.append(partition, steps, configs=SMALL).log_start_offset == 1
    assert kafka.load(partition, configs=SMALL, log_start_offset=1, fetch=True).fetch_mismatches == ()


def test_a_transaction_is_aborted(kafka: Kafka, fast_dir: Path) -> None:
    partition = fast_dir / "orders-0"
    steps = [
        step_batch([(NOW, b"a", b"1")], producer=(41, 0, 0), transactional=True),
        step_marker("ABORT", 41, 0, NOW),
        step_roll(),
    ]
    kafka.append(partition, steps, configs=SMALL)
    assert (partition / f"{0:020d}.txnindex").stat().st_size == 34
    assert [record.control for record in kafka.load(partition, configs=SMALL).records] == [False, True]
    assert kafka.clean(partition, configs=SMALL).map_entries == 0


def test_recover_builds_the_indexes_of_the_appends(kafka: Kafka, fast_dir: Path) -> None:
    partition = fast_dir / "orders-0"
    steps = [step_batch([(NOW + number, b"k%d" % number, b"v" * 30)]) for number in range(40)]
    kafka.append(partition, [*steps, step_roll()], configs=SMALL)
    before = sorted(os.listdir(partition))
    indexes = kafka.recover(partition, 0, configs=SMALL)
    assert indexes.truncated_bytes == 0
    assert len(indexes.offset_index) > 0
    assert indexes.offset_index == (partition / f"{0:020d}.index").read_bytes()
    assert indexes.time_index == (partition / f"{0:020d}.timeindex").read_bytes()
    assert sorted(os.listdir(partition)) == before


def test_the_loader_reports_repairs_and_wrong_indexes(kafka: Kafka, fast_dir: Path) -> None:
    partition = fast_dir / "orders-0"
    steps = [step_batch([(NOW + number, b"k%d" % number, b"v" * 30)]) for number in range(40)]
    kafka.append(partition, [*steps, step_roll()], configs=SMALL)
    index = partition / f"{0:020d}.index"
    good = index.read_bytes()
    # The first entry of the index has a wrong position, so that fetches through it start too late.
    index.write_bytes(good[:4] + (3000).to_bytes(4, "big"))
    loaded = kafka.load(partition, configs=SMALL, fetch=True)
    assert loaded.fetch_mismatches
    index.unlink()
    loaded = kafka.load(partition, configs=SMALL, fetch=True)
    assert any("rebuilding index" in line for line in loaded.repaired)
    assert loaded.fetch_mismatches == ()
    assert index.read_bytes() == good
    (partition / f"{0:020d}.log.cleaned").write_bytes(b"")
    assert any("Deleting stray" in line for line in kafka.load(partition, configs=SMALL).repaired)


def test_after_an_unclean_shutdown_the_tail_is_recovered(kafka: Kafka, fast_dir: Path) -> None:
    partition = fast_dir / "orders-0"
    steps = [step_batch([(NOW, b"a", b"1")]), step_batch([(NOW, b"a", b"2")])]
    kafka.append(partition, steps, configs=SMALL)
    log = partition / f"{0:020d}.log"
    log.write_bytes(log.read_bytes()[:-1])
    shutil.copytree(partition, fast_dir / "orders-1")
    assert kafka.load(fast_dir / "orders-1", configs=SMALL, recovery_point=2).repaired == []
    loaded = kafka.load(partition, configs=SMALL, clean=False)
    assert [record.value for record in loaded.records] == [b"1"]
    assert any("Recovering unflushed segment" in line for line in loaded.repaired)
    assert loaded.log_end_offset == 1


def test_swap_files_are_promoted_unless_a_cleaned_file_forbids_it(kafka: Kafka, fast_dir: Path) -> None:
    partition, swapped = fast_dir / "orders-0", fast_dir / "orders-1"
    kafka.append(partition, [step_batch([(NOW, b"a", b"1")]), step_batch([(NOW, b"a", b"2")])], configs=SMALL)
    shutil.copytree(partition, swapped)
    kafka.append(swapped, [step_roll()], configs=SMALL)
    kafka.clean(swapped, configs=SMALL)
    for suffix in (".log", ".index", ".timeindex"):
        shutil.copy2(swapped / f"{0:020d}{suffix}", partition / f"{0:020d}{suffix}.swap")
    guard = partition / f"{0:020d}.log.cleaned"
    guard.write_bytes(b"")
    loaded = kafka.load(partition, configs=SMALL)
    assert [record.value for record in loaded.records] == [b"1", b"2"]
    assert any("Deleting invalid swap file" in line for line in loaded.repaired)
    for suffix in (".log", ".index", ".timeindex"):
        shutil.copy2(swapped / f"{0:020d}{suffix}", partition / f"{0:020d}{suffix}.swap")
    loaded = kafka.load(partition, configs=SMALL)
    assert [record.value for record in loaded.records] == [b"2"]
    assert not [name for name in loaded.files if name.endswith((".swap", ".cleaned"))]


def test_the_log_of_the_benchmark_has_the_requested_records(kafka: Kafka, fast_dir: Path) -> None:
    shape = {"records": 2_050, "keys": 300, "configs": {"internal.segment.bytes": 100_000}}
    opened = kafka.bench_generate(fast_dir / "b-0", **shape)
    kafka.bench_generate(fast_dir / "b-1", **shape)
    assert opened.log_end_offset == opened.segment_bases[-1] == 2_050
    sizes = [segment.log_bytes for segment in opened.segments]
    assert 115 < sum(sizes) / 2_050 < 119
    first = f"{0:020d}.log"
    assert (fast_dir / "b-0" / first).read_bytes() == (fast_dir / "b-1" / first).read_bytes()
    seconds, _, cleaned = kafka.bench_clean([fast_dir / "b-0", fast_dir / "b-1"], configs=shape["configs"])
    assert len(seconds) == 2
    assert (cleaned.records_read, cleaned.map_entries) == (2_050, cleaned.records_written)


def test_missing_java_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(KafkaUnavailable, match="no java"):
        Kafka()


def test_kafkas_exceptions_are_returned_and_the_jvm_continues(kafka: Kafka, fast_dir: Path) -> None:
    partition = fast_dir / "orders-0"
    with pytest.raises(KafkaError, match="Compacted topic cannot accept message without key") as caught:
        kafka.append(partition, [step_batch([(NOW, None, b"1")])], configs=SMALL)
    assert caught.value.java_class == "RecordValidationException"
    (partition / "foo.log").write_bytes(b"")
    with pytest.raises(KafkaError) as caught:
        kafka.load(partition, configs=SMALL)
    assert caught.value.java_class == "NumberFormatException"


def test_a_dead_jvm_is_restarted(kafka: Kafka, fast_dir: Path) -> None:
    kafka.append(fast_dir / "t-0", [step_batch([(NOW, b"a", b"1")])], configs=SMALL)
    with pytest.raises(RuntimeError, match="the JVM died with status 3 in halt"):
        kafka.request({"command": "halt"})
    assert len(kafka.load(fast_dir / "t-0", configs=SMALL).records) == 1
    process = kafka._started()
    process.kill()
    process.wait()
    assert len(kafka.load(fast_dir / "t-0", configs=SMALL).records) == 1


def test_the_lock_is_held_until_it_is_released(kafka: Kafka, fast_dir: Path) -> None:
    assert kafka.lock(fast_dir)
    other = Kafka()
    assert not other.lock(fast_dir)
    kafka.unlock(fast_dir)
    assert other.lock(fast_dir)
    other.close()


def test_checkpoints_are_read_and_written(kafka: Kafka, fast_dir: Path) -> None:
    path = fast_dir / "cleaner-offset-checkpoint"
    kafka.write_checkpoint(path, {"orders-1-12": 7, "t-0": 2**40})
    assert kafka.read_checkpoint(path) == {"orders-1-12": 7, "t-0": 2**40}


def test_slots_for_returns_the_smallest_table_for_any_number_of_keys() -> None:
    for entries in [*range(1, 2000), 5_033_164]:
        assert int(slots_for(entries) * 0.9) == entries


@pytest.mark.parametrize("transactional", [False, True])
def test_random_traffic_is_accepted_and_counted(kafka: Kafka, fast_dir: Path, transactional: bool) -> None:
    for number in range(25):
        traffic = random_traffic(random.Random(f"{SEED}-{number}"), transactional=transactional)
        for _ in range(3):
            before = traffic.options
            opened = kafka.append(fast_dir / f"t-{number}", traffic.steps(), **before)
            assert opened.log_end_offset == traffic.log_end_offset
            assert opened.log_start_offset == traffic.log_start_offset
