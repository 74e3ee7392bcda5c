"""Lookups by offset and time, compared with a reference model that reads everything, on valid, damaged and live files.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from keytail.errors import CorruptLog
from keytail.log.fs import LOCAL
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import PartitionFacts, survey_partition
from keytail.lookup import search
from keytail.lookup.steps import Lookup, lookup_offset, lookup_time
from tests.chance import SEED
from tests.compact.logs import random_log
from tests.reference.batches import Batch, Rec, decode_log, encode_batch
from tests.reference.indexing import index_files
from tests.reference.lookup import Files, at_offset, at_time

NOW = 1_750_000_000_000
Damage = Callable[[Path, Files, random.Random], Files | None]


@pytest.fixture(autouse=True, params=["large chunks", "tiny chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with large chunks, and with tiny ones, so that there is a boundary between any two batches."""
    if request.param == "tiny chunks":
        monkeypatch.setattr(search, "_CHUNK_BYTES", 200)


def write_segment(partition: Path, segment: Files, interval: int) -> Files:
    """Write the segment's files, and return those on which a lookup is based."""
    index, time_index = index_files(segment.log, segment.base_offset, interval)
    stem = partition / f"{segment.base_offset:020d}"
    for suffix, data in ((".log", segment.log), (".index", index), (".timeindex", time_index)):
        stem.with_suffix(suffix).write_bytes(data)
    os.utime(stem.with_suffix(".log"), ns=(segment.mtime_ms * 10**6, segment.mtime_ms * 10**6))
    return replace(segment, time_index=time_index)


def survey(partition: Path, *, log_start: int | None = None, clean: bool = True) -> PartitionFacts:
    root = partition.parent
    (root / "meta.properties").write_text("version=1\n")
    if clean:
        (root / ".kafka_cleanshutdown").write_text("{}")
    if log_start is not None:
        (root / "log-start-offset-checkpoint").write_text(f"0\n1\nt 0 {log_start}\n")
    [log_dir] = survey_log_dirs(LOCAL, [str(root)])
    facts = survey_partition(LOCAL, log_dir, log_dir.partitions[0])
    assert not facts.problems
    return facts


def random_segments(rng: random.Random, partition: Path, *, drop_active: bool = False) -> tuple[list[Files], int, int]:
    """Write the files of a random log with gaps in its offsets. Return them, and the start and end of the log."""
    while True:
        log = random_log(rng, NOW, codecs=(0, 1, 2, 3, 4), max_gap=3)
        segments = log.segments[:-1] if drop_active else log.segments
        if not drop_active or (segments and segments[-1].log):
            break
    shutil.rmtree(partition.parent, ignore_errors=True)
    partition.mkdir(parents=True)
    interval = rng.choice([0, 64, 300, 4096])
    files = [write_segment(partition, Files(s.base_offset, s.log, b"", s.mtime_ms), interval) for s in segments]
    batches = decode_log(segments[-1].log)
    end = batches[-1].last_offset + 1 if batches else segments[-1].base_offset
    start = rng.choice([files[0].base_offset, rng.randint(files[0].base_offset, min(end, files[-1].base_offset))])
    return files, start, end


def asked_times(rng: random.Random, files: list[Files]) -> list[int]:
    times = {record.timestamp for file in files for batch in decode_log(file.log) for record in batch.records}
    times |= {batch.max_timestamp for file in files for batch in decode_log(file.log)} | {f.mtime_ms for f in files}
    some = rng.sample(sorted(times), min(len(times), 15))
    return [t + step for t in some for step in (-1, 0, 1) if t + step >= 0] + [0, NOW, NOW + 10**9]


def assert_same(result: Lookup, expected: tuple[Batch, Rec] | str | None) -> None:
    if expected == "out-of-range":
        assert result.status == "out-of-range"
        return
    assert (result.status == "found") == (expected is not None), (result, expected)
    if expected is None or result.record is None:
        assert result.record is None
        assert result.reason
        return
    batch, record = expected  # type: ignore[misc]
    found = result.record
    assert (found.offset, found.timestamp_ms) == (record.offset, record.timestamp)
    assert (found.key, found.value) == (record.key, record.value)
    assert (found.leader_epoch, found.byte_position, found.batch_bytes) == (
        batch.leader_epoch,
        batch.position,
        batch.size,
    )
    assert (found.batch_base_offset, found.batch_last_offset, found.batch_records) == (
        batch.base_offset,
        batch.last_offset,
        batch.record_count,
    )
    assert f"offset {found.offset}, timestamp {found.timestamp_ms}" in result.steps[-1 if not result.reason else -2]


def test_answers_for_random_logs_equal_those_of_the_model(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    for _ in range(15):
        files, start, end = random_segments(rng, tmp_path / "logs" / "t-0")
        facts = survey(tmp_path / "logs" / "t-0", log_start=start)
        assert (facts.log_start_offset, facts.log_end_offset) == (start, end)
        span = min(end - start, 200)
        for offset in {max(start - 1, 0), start, end, end + 1, *(start + rng.randint(0, span) for _ in range(30))}:
            assert_same(lookup_offset(LOCAL, facts, offset), at_offset(files, start, end, offset))
        for timestamp in asked_times(rng, files):
            result = lookup_time(LOCAL, facts, timestamp)
            assert_same(result, at_time(files, start, timestamp))
            assert not result.notes


def test_a_log_that_is_being_written_is_read_to_its_last_batch(tmp_path: Path) -> None:
    """The last segment has free space in its indexes, and no entry yet for its latest timestamp."""
    rng = random.Random(SEED)
    for _ in range(15):
        files, start, end = random_segments(rng, tmp_path / "logs" / "t-0", drop_active=True)
        stem = tmp_path / "logs" / "t-0" / f"{files[-1].base_offset:020d}"
        interval = rng.choice([0, 64, 300])
        index, time_index = index_files(files[-1].log, files[-1].base_offset, interval)
        if rng.random() < 0.8:  # the last entry of the segment is removed
            positions = [position for _, position in struct.iter_unpack(">ii", index)]
            last = max(positions, default=-1)
            indexed = sum(batch.size for batch in decode_log(files[-1].log) if batch.position <= last)
            time_index = index_files(files[-1].log[:indexed], files[-1].base_offset, interval)[1] if positions else b""
        stem.with_suffix(".index").write_bytes(index + bytes(8 * 50))
        stem.with_suffix(".timeindex").write_bytes(time_index + bytes(12 * 50))
        with stem.with_suffix(".log").open("ab") as log:
            log.write(bytes(rng.randint(0, 40)))  # preallocated space, or a batch that is not written yet
        os.utime(stem.with_suffix(".log"), ns=(files[-1].mtime_ms * 10**6,) * 2)
        facts = survey(stem.parent, log_start=start, clean=False)
        for offset in {start, end, *(start + rng.randint(0, min(end - start, 200)) for _ in range(20))}:
            assert_same(lookup_offset(LOCAL, facts, offset), at_offset(files, start, end, offset))
        for timestamp in asked_times(rng, files):
            result = lookup_time(LOCAL, facts, timestamp)
            assert_same(result, at_time(files, start, timestamp))
            assert not result.notes


def _no_index(stem: Path, file: Files, rng: random.Random) -> Files | None:
    stem.with_suffix(".index").unlink()
    if rng.random() < 0.5:
        stem.with_suffix(".timeindex").unlink()
    return file  # a broker rebuilds all of them


def no_time_index(stem: Path, file: Files, rng: random.Random) -> Files | None:
    stem.with_suffix(".timeindex").unlink()
    return replace(file, time_index=b"")


def _empty_time_index(stem: Path, file: Files, rng: random.Random) -> Files | None:
    stem.with_suffix(".timeindex").write_bytes(b"")
    return replace(file, time_index=b"")


def zeros(stem: Path, file: Files, rng: random.Random) -> Files | None:
    """Write a time index that was not trimmed, or one that contains only zeros."""
    kept = file.time_index if rng.random() < 0.5 else b""
    data = kept + bytes(12 * rng.choice([2, 1000]))
    stem.with_suffix(".timeindex").write_bytes(data)
    return replace(file, time_index=data)


def _untrimmed_index(stem: Path, file: Files, rng: random.Random) -> Files | None:
    data = stem.with_suffix(".index").read_bytes()
    stem.with_suffix(".index").write_bytes(data + bytes(8 * rng.choice([1, 3000])))
    return file


def _wrong_index(stem: Path, file: Files, rng: random.Random) -> Files | None:
    """Write entries that point next to their batches, past the file, or at another batch; a broker's answer is then not
    predictable.
    """
    data = stem.with_suffix(".index").read_bytes()
    shift, last = rng.choice([1, 7, 61, 10**6]), decode_log(file.log)[-1]
    entries = [(offset, position + shift) for offset, position in struct.iter_unpack(">ii", data)]
    if rng.random() < 0.5:
        entries = [(offset, last.position) for offset, _ in entries if offset + file.base_offset != last.last_offset]
    stem.with_suffix(".index").write_bytes(b"".join(struct.pack(">ii", *entry) for entry in entries))
    return None


def _wrong_time_index(stem: Path, file: Files, rng: random.Random) -> Files | None:
    """Write an offset below the segment, or above later ones. The timestamps, which select the segment, are valid."""
    entries = [list(entry) for entry in struct.iter_unpack(">qi", file.time_index)]
    if entries:
        entries[0][1] = -1 if len(entries) == 1 else 2**31 - 1
    stem.with_suffix(".timeindex").write_bytes(b"".join(struct.pack(">qi", *entry) for entry in entries))
    return None


@pytest.mark.parametrize(
    "damage",
    [_no_index, no_time_index, _empty_time_index, zeros, _untrimmed_index, _wrong_index, _wrong_time_index],
)
def test_wrong_indexes_are_reported_and_not_trusted(damage: Damage, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    seen, logs = set(), 0
    while logs < 10 or not seen:  # many answers do not depend on the damaged entries
        logs += 1
        files, start, end = random_segments(rng, tmp_path / "logs" / "t-0")
        believed: list[Files] | None = list(files)
        for number, file in enumerate(files):
            if file.log and rng.random() < 0.6:
                changed = damage(tmp_path / "logs" / "t-0" / f"{file.base_offset:020d}", file, rng)
                believed = None if changed is None or believed is None else believed
                if changed is not None and believed is not None:
                    believed[number] = changed
        facts = survey(tmp_path / "logs" / "t-0", log_start=start)
        for offset in {start, end, *(start + rng.randint(0, min(end - start, 200)) for _ in range(10))}:
            result = lookup_offset(LOCAL, facts, offset)
            assert_same(result, at_offset(files, start, end, offset))
            seen |= {note.partition(" ")[2][:20] for note in result.notes}
        for timestamp in asked_times(rng, files):
            result = lookup_time(LOCAL, facts, timestamp)
            assert_same(result, at_time(files, start, timestamp))
            seen |= {note.partition(" ")[2][:20] for note in result.notes}
            broker = [note for note in result.notes if note.startswith("A broker that starts on these files")]
            if believed is None:
                assert not broker
            else:
                expected, answer = at_time(believed, start, timestamp), at_time(files, start, timestamp)
                if expected == answer:
                    assert all(note.endswith("returns the same answer") for note in broker)
                elif expected is None:
                    assert [note.endswith("returns nothing") for note in broker] == [True]
                else:
                    assert [f"returns offset {expected[1].offset}, timestamp" in note for note in broker] == [True]
        assert logs < 200, "no wrong index is reported"


def write_three_segments(partition: Path, damage: Damage) -> Path:
    """Write three segments with offsets and times 0 to 59, damage the second one, and return their directory."""
    partition.mkdir(parents=True)
    for base in (0, 20, 40):
        batches = [encode_batch([Rec(n, NOW + n, b"k", b"v")]) for n in range(base, base + 20)]
        file = write_segment(partition, Files(base, b"".join(batches), b"", NOW - 1), 300)
        if base == 20:
            damage(partition / f"{base:020d}", file, random.Random(SEED))
    return partition


@pytest.mark.parametrize("damage", [no_time_index, zeros, _wrong_time_index])
@pytest.mark.parametrize("recovery_point", [0, 21, 40])
def test_after_an_unclean_shutdown_a_broker_rebuilds_the_indexes_after_the_recovery_point(
    damage: Damage, recovery_point: int, tmp_path: Path
) -> None:
    """Rebuilt indexes agree with the records; for segments below the recovery point, a broker uses the existing
    indexes.
    """
    partition = write_three_segments(tmp_path / "logs" / "t-0", damage)
    (tmp_path / "logs" / "recovery-point-offset-checkpoint").write_text(f"0\n1\nt 0 {recovery_point}\n")
    result = lookup_time(LOCAL, survey(partition, clean=False), NOW + 25)
    assert result.record is not None and result.record.offset == 25
    if recovery_point < 40:
        expected = "returns the same answer"
    elif damage is _wrong_time_index:
        expected = "on these files is unknown"
    else:  # the segment counts as older than the time, and the next one begins later
        expected = f"returns offset 40, timestamp {NOW + 40} (2025-06-15T15:06:40.040Z)"
    assert result.notes[-1].endswith(expected)


def test_every_step_is_printed_with_its_numbers(tmp_path: Path) -> None:
    partition = tmp_path / "logs" / "t-0"
    partition.mkdir(parents=True)
    pairs = [[Rec(n, NOW + n, b"k", b"v"), Rec(n + 1, NOW + n, b"k", b"v")] for n in range(0, 20, 2)]
    log = b"".join(map(encode_batch, pairs))
    size = len(log) // 10
    write_segment(partition, Files(0, log, b"", NOW), 4 * size)  # one index entry: offset 11, batch 5
    write_segment(partition, Files(20, encode_batch([Rec(21, NOW + 99, b"k", None)]), b"", NOW), 4 * size)
    facts = survey(partition)
    reported = lookup_offset(LOCAL, facts, 19).steps
    assert reported[0] == "The log has offsets 0 to 21 in 2 segments."
    assert reported[1].endswith(f"with the largest base offset not above 19 is {0:020d}.log (number 1 of 2).")
    assert f"{0:020d}.index has 1 entry," in reported[2]
    assert reported[2].endswith(f"The last entry not above 19 is in slot 0: offset 11, byte {5 * size}.")
    assert reported[3].startswith(
        f"4 batches are skipped (last offset below 19). The batch at byte {9 * size} has offsets 18 to 19, 2 records,"
    )
    assert reported[4].startswith(
        f"The first matching record: offset 19, timestamp {NOW + 18} (2025-06-15T15:06:40.018Z)"
    )
    reported = lookup_time(LOCAL, facts, NOW + 17).steps
    assert f"is number 1 of 2: {0:020d}.log {NOW + 18} (2025-06-15T15:06:40.018Z) (last entry" in reported[1]
    assert f"in slot 0: up to offset 11 no timestamp is above {NOW + 10} " in reported[2]
    assert reported[3].endswith(f"The last entry not above 11 is in slot 0: offset 11, byte {5 * size}.")
    assert reported[4].startswith(f"4 batches are skipped (largest timestamp before {NOW + 17} ")
    gap = lookup_offset(LOCAL, facts, 20)
    assert gap.record is not None and gap.record.offset == 21 and gap.record.value is None
    assert gap.reason == "no record has offset 20 (removed by compaction, or never written): this is the next record"


def test_a_wrong_entry_is_reported_with_its_slot(tmp_path: Path) -> None:
    partition = tmp_path / "logs" / "t-0"
    partition.mkdir(parents=True)
    log = b"".join(encode_batch([Rec(n, NOW + n, b"k", b"v" * 50)]) for n in range(20))
    write_segment(partition, Files(0, log, b"", NOW), 100)
    path = partition / f"{0:020d}.index"
    data = bytearray(path.read_bytes())
    data[8 + 7] ^= 1  # change a byte of slot 1
    path.write_bytes(data)
    facts = survey(partition)
    offset, position = struct.unpack_from(">ii", data, 8)
    result = lookup_offset(LOCAL, facts, offset)
    [note] = result.notes
    assert f"{0:020d}.index, slot 1: no batch at or below offset {offset} begins at byte {position}" in note
    assert result.record is not None and result.record.offset == offset
    assert not lookup_offset(LOCAL, facts, offset - 1).notes


def test_only_damage_in_batches_that_a_lookup_reads_is_an_error(tmp_path: Path) -> None:
    partition = tmp_path / "logs" / "t-0"
    partition.mkdir(parents=True)
    log = b"".join(encode_batch([Rec(n, NOW + n, b"k", b"v")]) for n in range(3))
    size = len(log) // 3
    write_segment(partition, Files(0, log, b"", NOW), 10**6)
    write_segment(partition, Files(3, b"", b"", NOW), 10**6)
    (partition / f"{0:020d}.log").write_bytes(log[: size + 66] + b"?" + log[size + 67 :])
    facts = survey(partition)
    found = lookup_offset(LOCAL, facts, 0).record
    assert found is not None and found.offset == 0
    with pytest.raises(CorruptLog, match="invalid CRC") as caught:
        lookup_offset(LOCAL, facts, 1)
    assert caught.value.byte_position == size


def test_an_empty_partition_has_no_records(tmp_path: Path) -> None:
    partition = tmp_path / "logs" / "t-0"
    partition.mkdir(parents=True)
    write_segment(partition, Files(0, b"", b"", NOW), 4096)
    facts = survey(partition)
    assert lookup_offset(LOCAL, facts, 0).status == "none"
    assert lookup_offset(LOCAL, facts, 1).status == "out-of-range"
    assert lookup_time(LOCAL, facts, NOW).status == "none"
    assert "empty" in lookup_time(LOCAL, facts, NOW + 1).steps[0]
