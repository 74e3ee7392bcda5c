"""Logs written by Kafka 2.8.2 and 3.6.2 have no problems, damage to them is found or harmless, and lookups return the
brokers' answers.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from keytail.cli.kafka_version import infer_kafka_version
from keytail.format.index import parse_offset_index, parse_time_index
from keytail.log.fs import LOCAL
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.log_end import log_end
from keytail.log.partition import PartitionFacts, survey_partition
from keytail.lookup.steps import lookup_offset, lookup_time
from keytail.rebuild_index.indexes import SegmentTask, finish, index_segment, scan, slices_of
from keytail.rebuild_index.partition import RebuildSettings, plan_partition, segment_tasks, settle
from keytail.verify.task import verify_partition
from tests.chance import chance, draws
from tests.golden import older
from tests.reference.batches import Batch
from tests.reference.legacy import decode_any_log

ALL = [(version, topic) for version in older.VERSIONS for topic in (*older.topics_of(version), "transactional")]


@pytest.fixture(scope="module")
def log_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {version: older.unpack(version, tmp_path_factory.mktemp("older")) for version in older.VERSIONS}


def facts_of(log_dir: Path, name: str) -> PartitionFacts:
    [found] = survey_log_dirs(LOCAL, [str(log_dir)])
    entry = next(entry for entry in found.partitions if Path(entry.path).name == name)
    return survey_partition(LOCAL, found, entry)


def tasks_of(facts: PartitionFacts) -> list[SegmentTask]:
    return segment_tasks(plan_partition(LOCAL, facts, RebuildSettings(512, segment_index_bytes=10 << 20)))


def batches_of(path: Path) -> list[tuple[int, Batch]]:
    """Return (byte position, batch) of each batch, in order."""
    data, found, at = path.read_bytes(), [], 0
    for batch in decode_any_log(data):
        found.append((at, batch))
        at += 12 + struct.unpack_from(">i", data, at + 8)[0]
    return found


@pytest.mark.parametrize("version", older.VERSIONS)
def test_unpacking_refuses_changed_bytes(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(older, "answers", lambda _: {"sha256": "0"})
    with pytest.raises(ValueError, match="differs from the committed file"):
        older.unpack(version, tmp_path)


def test_generating_refuses_to_replace_existing_files(capsys: pytest.CaptureFixture[str]) -> None:
    before = (older.HERE / "older-2.8.2.tar.xz").stat().st_mtime_ns
    assert older.main(["2.8.2"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (older.HERE / "older-2.8.2.tar.xz").stat().st_mtime_ns == before


@pytest.mark.parametrize("version", older.VERSIONS)
def test_the_bytes_contain_entries_that_a_newer_broker_does_not_write(version: str, log_dirs: dict[str, Path]) -> None:
    seen: Counter[str] = Counter()
    for path in log_dirs[version].rglob("*.log"):
        base, batches = int(path.stem), batches_of(path)
        ends = {batch.last_offset for _, batch in batches}
        end_at = {position: batch.last_offset for position, batch in batches}
        offsets = parse_offset_index(path.with_suffix(".index").read_bytes())
        for relative, position in offsets.tolist():
            seen["entry of a set of batches"] += base + relative > end_at[position]
            seen["entry of the last retained record"] += base + relative not in ends
        times = parse_time_index(path.with_suffix(".timeindex").read_bytes())
        named = [base + relative for relative in times["relative_offset"].tolist()]
        seen["time entry of a record"] += sum(offset not in ends for offset in named)
        seen["old format"] += sum(getattr(batch, "magic", 2) < 2 for _, batch in batches)
    assert seen["entry of a set of batches"] >= 3
    assert seen["entry of the last retained record"] > 0
    assert seen["time entry of a record"] > 30
    assert (seen["old format"] > 100) == version.startswith("2.")


@pytest.mark.parametrize(("version", "expected"), [("2.8.2", "before 3.7"), ("3.6.2", "2.8 or later, before 3.7")])
def test_the_version_of_kafka_is_inferred(version: str, expected: str, log_dirs: dict[str, Path]) -> None:
    inferred = infer_kafka_version(LOCAL, survey_log_dirs(LOCAL, [str(log_dirs[version])]), None)
    assert inferred.sentence == expected
    seen = [item.seen for item in inferred.evidence]
    assert "version=0 in meta.properties" in seen
    assert "an empty clean-shutdown file" in seen
    assert ("messages of format v0 (v0-0) and v1 (v1-0)" in seen) == (version == "2.8.2")
    topic_ids = "no partition.metadata in 11" if version == "2.8.2" else "partition.metadata in 7 of 7"
    assert f"{topic_ids} partitions" in seen


@pytest.mark.parametrize(("version", "topic"), ALL)
def test_verify_has_no_findings(version: str, topic: str, log_dirs: dict[str, Path]) -> None:
    report = verify_partition(LOCAL, str(log_dirs[version] / f"{topic}-0"))
    assert [finding.what for finding in report] == []
    assert report.counts.index_entries > 5


@pytest.mark.parametrize(("version", "topic"), ALL)
def test_rebuild_has_nothing_to_rebuild(version: str, topic: str, log_dirs: dict[str, Path]) -> None:
    facts = facts_of(log_dirs[version], f"{topic}-0")
    plan = plan_partition(LOCAL, facts, RebuildSettings(512, segment_index_bytes=10 << 20))
    result = settle(LOCAL, plan, [index_segment(LOCAL, task) for task in segment_tasks(plan)])
    assert [verdict.why for _, verdict in result.wrong] == []


@pytest.mark.parametrize(("version", "topic"), ALL)
def test_indexes_of_older_brokers_divide_segments_into_slices(
    version: str, topic: str, log_dirs: dict[str, Path]
) -> None:
    for task in tasks_of(facts_of(log_dirs[version], f"{topic}-0")):
        parts = slices_of(LOCAL, task, 1000)
        scans = [scan(LOCAL, task, part) for part in parts]
        assert all(item.batches for item in scans) or not task.log_bytes
        assert finish(LOCAL, task, scans).next_offset == index_segment(LOCAL, task).next_offset


@pytest.mark.parametrize(("version", "topic"), ALL)
def test_lookups_return_the_answers_of_the_broker(version: str, topic: str, log_dirs: dict[str, Path]) -> None:
    facts = facts_of(log_dirs[version], f"{topic}-0")
    for name, at_ms, answer in older.answers(version)["times"]:
        if name == topic:
            found = lookup_time(LOCAL, facts, at_ms)
            assert not found.notes
            assert (found.record and [found.record.offset, found.record.timestamp_ms]) == answer, at_ms
    start, end = older.answers(version)["offsets"][f"{topic}-0"]
    assert (facts.log_start_offset, facts.log_end_offset) == (start, end)
    there = [
        record.offset
        for path in sorted(Path(facts.path).glob("*.log"))
        for _, batch in batches_of(path)
        for record in batch.records
    ]
    for offset in range(start, end, 7):
        found = lookup_offset(LOCAL, facts, offset)
        assert not found.notes
        assert (found.record and found.record.offset) == next((item for item in there if item >= offset), None)


@pytest.mark.parametrize(("version", "topic"), ALL)
def test_the_log_end_is_found_from_the_last_entry(
    version: str, topic: str, log_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = facts_of(log_dirs[version], f"{topic}-0")
    for segment in facts.segments:
        path = Path(facts.path) / f"{segment.base_offset:020d}.log"
        entries = parse_offset_index(path.with_suffix(".index").read_bytes())
        if not len(entries):
            continue
        data = bytearray(path.read_bytes())
        data[8] ^= 0x40  # a read from the start would end at the first batch
        copy = path.with_name("copy")
        copy.write_bytes(data)
        found = log_end(LOCAL, str(copy), segment.base_offset, str(path.with_suffix(".index")))
        copy.unlink()
        assert found == log_end(LOCAL, str(path), segment.base_offset)
        assert found.tail_bytes == 0


@pytest.mark.parametrize("version", older.VERSIONS)
def test_a_changed_byte_of_an_index_is_found_or_harmless(version: str, log_dirs: dict[str, Path]) -> None:
    rng, found = chance(), Counter[bool]()
    files = [
        path
        for suffix in ("index", "timeindex")
        for path in sorted(log_dirs[version].rglob(f"*.{suffix}"))
        if path.stat().st_size and not path.parent.name.startswith("__")
    ]
    partitions = {path.parent.name for path in files}
    tasks = {task.path(".log"): task for name in partitions for task in tasks_of(facts_of(log_dirs[version], name))}
    for _ in range(draws(400)):
        path = rng.choice(files)
        data = path.read_bytes()
        changed = flipped(rng, data) if rng.random() < 0.7 else with_a_moved_offset(rng, data, path.suffix)
        path.write_bytes(changed)
        is_found = any(finding.path == str(path) for finding in verify_partition(LOCAL, str(path.parent)))
        verdicts = index_segment(LOCAL, tasks[str(path.with_suffix(".log"))]).files
        is_rebuilt = any(verdict.suffix == path.suffix and verdict.state == "wrong" for verdict in verdicts)
        found[is_found] += 1
        assert is_found == is_rebuilt, (path, changed.hex())
        assert is_found or answers_are_right(path.with_suffix(".log")), (path, changed.hex())
        path.write_bytes(data)
    if found.total() >= 50:  # about 97 % are found; the share of fewer draws is not meaningful
        assert found[True] > 3 * found[False], found


def flipped(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def with_a_moved_offset(rng: random.Random, data: bytes, suffix: str) -> bytes:
    """Replace the offset of one entry with another one nearby."""
    entry_bytes, offset_at = (8, 0) if suffix == ".index" else (12, 8)
    at = rng.randrange(len(data) // entry_bytes) * entry_bytes + offset_at
    offset = int.from_bytes(data[at : at + 4], "big") + rng.choice((-3, -2, -1, 1, 2, 3))
    return data[:at] + max(offset, 0).to_bytes(4, "big") + data[at + 4 :]


def answers_are_right(log: Path) -> bool:
    """Return whether a broker that uses the indexes finds, for each offset and time, the same batch as a full scan."""
    base, batches = int(log.stem), batches_of(log)
    positions = [position for position, _ in batches]
    offsets = parse_offset_index(log.with_suffix(".index").read_bytes())
    times = parse_time_index(log.with_suffix(".timeindex").read_bytes())

    def floor(offset: int) -> int:
        at = np.searchsorted(offsets["relative_offset"].astype(np.int64) + base, offset, side="right") - 1
        return int(offsets["position"][at]) if at >= 0 else 0

    def first(begin: int, fits: list[bool]) -> int:
        return next((n for n, good in enumerate(fits) if good and positions[n] >= begin), -1)

    for offset in range(base, batches[-1][1].last_offset + 1):
        fits = [batch.last_offset >= offset for _, batch in batches]
        if floor(offset) not in positions or first(floor(offset), fits) != first(0, fits):
            return False
    stamps = {record.timestamp for _, batch in batches for record in batch.records}
    for at_ms in {stamp + step for stamp in stamps for step in (-1, 0, 1)}:
        slot = int(np.searchsorted(times["timestamp_ms"], at_ms, side="right")) - 1
        begin = floor(base + int(times["relative_offset"][slot])) if slot >= 0 else 0
        fits = [any(record.timestamp >= at_ms for record in batch.records) for _, batch in batches]
        if first(begin, fits) != first(0, fits):
            return False
    return int(times["timestamp_ms"][-1]) == max(stamps) if len(times) else max(stamps) < 0


@pytest.mark.parametrize("version", older.VERSIONS)
def test_a_changed_byte_of_a_batch_is_found(version: str, log_dirs: dict[str, Path]) -> None:
    rng = chance()
    files = [path for path in sorted(log_dirs[version].rglob("*.log")) if path.stat().st_size]
    for _ in range(draws(200)):
        path = rng.choice(files)
        data = path.read_bytes()
        position, _ = rng.choice(batches_of(path))
        length = 12 + struct.unpack_from(">i", data, position + 8)[0]
        header = 21 if data[position + 16] == 2 else 16  # the checksummed bytes begin here
        at = position + rng.randrange(header, length)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        findings = verify_partition(LOCAL, str(path.parent)).findings
        path.write_bytes(data)
        assert any(f.path == str(path) and f.byte_position == position for f in findings), (path, at)
