"""The plan of an import, the contents of its segments, and the import record of an earlier run."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from keytail.errors import CorruptLog, Refused
from keytail.format.producers import encode_snapshot
from keytail.import_ import segments as import_segments
from keytail.import_.install import install, make_partition
from keytail.import_.plan import (
    Rules,
    newest_epoch,
    producers_at_end,
    refusals,
    refuse_unclosed,
    with_epoch,
)
from keytail.import_.segments import SegmentsWriter
from keytail.log.fs import LOCAL
from keytail.log.import_record import ImportRecord, parse_record
from keytail.log.partition import PartitionFacts
from tests.crash.partitions import PARTITION, write_segment
from tests.import_.case import (
    CASES,
    EMPTY,
    NOW_MS,
    PRODUCERS,
    TOPIC_ID,
    TWO_REPLICAS,
    Case,
    columns_of,
    log_of,
    some_records,
)
from tests.reference.batches import Rec, all_records, decode_log

BEHIND = CASES["after records, in a new segment"]
RULES = Rules(False, False, 1 << 30, 1 << 20, 4096, 1 << 20, False)


def made(case: Case, tmp_path: Path) -> Path:
    case.make(tmp_path / "d")
    return tmp_path / "d"


def partition(root: Path) -> Path:
    return root / "broker-0" / PARTITION


def facts(case: Case, root: Path) -> PartitionFacts:
    return case.replicas(LOCAL, root)[0].facts


def test_a_record_is_read_back_as_written() -> None:
    record = ImportRecord("an id", 15, 39, (15, 24), 0xFFFFFFFF, 24, "begun")
    assert parse_record(record.encode()) == record


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b'{"version": 1}', ImportRecord("a", 0, 1, (0,), 1, 1, "done").encode().replace(b"1", b"2", 1)],
)
def test_an_unreadable_record_is_corrupt(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_record(data)
    root = made(EMPTY, tmp_path)
    (partition(root) / "keytail-import").write_bytes(data)
    with pytest.raises(CorruptLog, match="keytail dump"):
        EMPTY.plan(LOCAL, root)


@pytest.mark.parametrize(
    ("before", "epoch", "after"),
    [
        ((), 0, ((0, 15),)),
        (((0, 0),), 0, ((0, 0),)),
        (((0, 0), (3, 15)), 3, ((0, 0), (3, 15))),
        (((0, 0),), 3, ((0, 0), (3, 15))),
        (((0, 0), (2, 15)), 3, ((0, 0), (3, 15))),  # epoch 2 has no records and will get none
    ],
)
def test_a_replica_gets_the_missing_epochs(before, epoch, after) -> None:
    assert with_epoch(before, epoch, 15) == after


def test_the_latest_epoch_of_any_replica_is_used(tmp_path: Path) -> None:
    replicas = TWO_REPLICAS.replicas(LOCAL, made(TWO_REPLICAS, tmp_path))
    assert newest_epoch(replicas, 15) == newest_epoch(replicas[::-1], 15) == 3
    assert newest_epoch(replicas[1:], 15) == 0
    assert newest_epoch([replace(replicas[0], epochs=())], 15) == 0
    with pytest.raises(Refused, match="begins at offset 15, above the log end offset 14"):
        newest_epoch(replicas, 14)


def test_unsuitable_partitions_are_refused(tmp_path: Path) -> None:
    found = facts(BEHIND, made(BEHIND, tmp_path))
    assert refusals(found, RULES) == []
    assert "did not stop cleanly" in refusals(replace(found, clean_shutdown=False), RULES)[0]
    assert "tiered" in refusals(found, replace(RULES, remote_storage_enable=True))[0]
    assert "not a complete batch" in refusals(replace(found, tail_bytes=1), RULES)[0]
    assert "below the log start" in refusals(replace(found, log_start_offset=16), RULES)[0]
    assert refusals(replace(found, problems=("broken",)), RULES) == ["broken"]


def test_appending_to_existing_records_requires_a_flag(tmp_path: Path) -> None:
    root = made(BEHIND, tmp_path)
    with pytest.raises(Refused, match=r"log start offset is 0, and its log end offset is 15.*--append"):
        BEHIND.plan(LOCAL, root, append=False)
    assert BEHIND.plan(LOCAL, root).base_offset == 15
    assert EMPTY.plan(LOCAL, made(EMPTY, tmp_path / "empty"), append=False).base_offset == 0


def test_replicas_must_have_the_same_log_end(tmp_path: Path) -> None:
    root = made(TWO_REPLICAS, tmp_path)
    log = root / "broker-1" / PARTITION / f"{10:020d}.log"
    log.write_bytes(log_of(range(10, 14)))
    with pytest.raises(Refused, match="different log end offsets: 14 here, and 15 in"):
        TWO_REPLICAS.plan(LOCAL, root)


def test_the_topic_id_must_be_known_and_unique(tmp_path: Path) -> None:
    root = made(TWO_REPLICAS, tmp_path)
    other = root / "broker-1" / PARTITION / "partition.metadata"
    other.write_text("version: 0\ntopic_id: BBBBBBBBBBBBBBBBBBBBBQ")
    with pytest.raises(Refused, match="the topic ids differ"):
        TWO_REPLICAS.plan(LOCAL, root)
    other.unlink()
    assert TWO_REPLICAS.plan(LOCAL, root).topic_id == TOPIC_ID
    TWO_REPLICAS.run(LOCAL, root)
    assert other.read_text() == f"version: 0\ntopic_id: {TOPIC_ID}"
    for path in root.glob(f"*/{PARTITION}/partition.metadata"):
        path.unlink()
    with pytest.raises(Refused, match="--topic-id"):
        TWO_REPLICAS.plan(LOCAL, root)


def test_producers_at_the_end_are_in_the_snapshot(tmp_path: Path) -> None:
    root = made(BEHIND, tmp_path)
    assert producers_at_end(LOCAL, facts(BEHIND, root)) == PRODUCERS
    (partition(root) / f"{15:020d}.snapshot").write_bytes(PRODUCERS[:-1])
    with pytest.raises(Refused, match="rebuild-index"):
        producers_at_end(LOCAL, facts(BEHIND, root))
    (partition(root) / f"{15:020d}.snapshot").unlink()
    with pytest.raises(Refused, match="there are older snapshots"):
        BEHIND.run(LOCAL, root)
    assert facts(BEHIND, root).log_end_offset == 15
    (partition(root) / f"{10:020d}.snapshot").unlink()
    assert producers_at_end(LOCAL, facts(BEHIND, root)) == encode_snapshot(())


@pytest.mark.parametrize(
    ("suffix", "change", "why"),
    [
        (".timeindex", lambda data: data + bytes(12), "ends with zeros"),
        (".timeindex", lambda data: data[:-12], "has no entry for the largest timestamp"),
        (".timeindex", lambda data: data[:-1], "ends within an entry"),
        (".index", lambda data: data + bytes(8), "ends with zeros"),
        (".index", lambda data: data[:-1] + b"\xff", ".log has invalid batches"),
        (".index", lambda data: data[:-4] + b"\0\0\xff\xff", "points beyond the end of the log"),
        (".index", None, "missing"),
    ],
)
def test_an_unclosed_active_segment_is_not_rolled(suffix, change, why, tmp_path: Path) -> None:
    root = made(BEHIND, tmp_path)
    path = partition(root) / f"{10:020d}{suffix}"
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(Refused, match=f"{why}.*rebuild-index"):
        refuse_unclosed(LOCAL, facts(BEHIND, root))
    with pytest.raises(Refused, match=why):
        BEHIND.run(LOCAL, root)
    assert facts(BEHIND, root).segments[-1].base_offset == 10


def test_an_import_is_recognised_although_a_broker_continued_after_it(tmp_path: Path) -> None:
    root = made(BEHIND, tmp_path)
    BEHIND.run(LOCAL, root)
    path = partition(root) / "keytail-import"
    path.write_bytes(replace(parse_record(path.read_bytes()), progress="begun").encode())
    last = max(partition(root).glob("*.log"))
    last.write_bytes(last.read_bytes() + log_of([39, 40], 7))
    plan = BEHIND.run(LOCAL, root, "r2")
    assert plan.states == ("committed",)
    assert facts(BEHIND, root).log_end_offset == 41
    assert BEHIND.plan(LOCAL, root).is_done
    with pytest.raises(Refused, match="not empty"):
        BEHIND.plan(LOCAL, root, "another", append=False)


def test_an_uncertain_state_is_refused(tmp_path: Path) -> None:
    root = made(BEHIND, tmp_path)
    (partition(root) / "keytail-import").write_bytes(ImportRecord("one", 15, 39, (15,), 1, 24, "begun").encode())
    assert BEHIND.plan(LOCAL, root).states == ("new",)
    log = partition(root) / f"{10:020d}.log"
    log.write_bytes(log.read_bytes() + log_of([15, 16], 7))
    with pytest.raises(Refused, match=r"cannot be determined whether .*\[import-state-unknown\]"):
        BEHIND.plan(LOCAL, root)
    assert BEHIND.plan(LOCAL, root, "another").states == ("new",)


def test_other_batches_at_the_start_of_the_import_are_not_mistaken_for_it(tmp_path: Path) -> None:
    """The import was stopped after the roll and before the commit; then a broker appended batches of another leader."""
    root = made(BEHIND, tmp_path)
    write_segment(partition(root), 15, log_of([15, 16], 7), "")
    (partition(root) / "keytail-import").write_bytes(ImportRecord("one", 15, 39, (15,), 1, 24, "begun").encode())
    with pytest.raises(Refused, match=r"cannot be determined whether .*\[import-state-unknown\]"):
        BEHIND.plan(LOCAL, root)


def write(tmp_path: Path, records: list[Rec], *, pieces: int = 1, **changes: object):
    root = made(EMPTY, tmp_path)
    task = replace(EMPTY.task(EMPTY.plan(LOCAL, root)), **changes)  # type: ignore[arg-type]
    writer = SegmentsWriter(LOCAL, task, "a1")
    step = -(-len(records) // pieces)
    for at in range(0, len(records), step):
        writer.append(columns_of(records[at : at + step]))
    return writer, root


def found(root: Path) -> list[Rec]:
    logs = sorted(partition(root).glob("*.log.r*.clean"))
    return all_records([batch for log in logs for batch in decode_log(log.read_bytes())])


def test_segments_end_at_the_size_limit_and_contain_the_given_records(tmp_path: Path) -> None:
    records = some_records(200, 0)
    writer, root = write(tmp_path, records, pieces=7)
    written = writer.finish()
    assert written is not None
    assert found(root) == records
    assert (written.records, written.end_offset, written.largest_timestamp_ms) == (200, 200, 2_000_010)
    assert len(written.segments) > 5
    for segment, following in zip(written.segments, [*written.segments[1:], None], strict=True):
        log = next(file for file in segment.files if file.suffix == ".log")
        batches = decode_log((partition(root) / log.name).read_bytes())
        assert batches[0].base_offset == segment.base_offset
        assert log.size_bytes <= EMPTY.segment_bytes
        if following is not None:
            assert batches[-1].last_offset + 1 == following.base_offset
            first_of_next = decode_log((partition(root) / following.files[0].name).read_bytes())[0]
            assert log.size_bytes + first_of_next.size > EMPTY.segment_bytes


def test_records_without_timestamp_get_the_time_of_the_import(tmp_path: Path) -> None:
    records = [replace(rec, timestamp=-1) if rec.offset % 3 else rec for rec in some_records(20, 0)]
    write(tmp_path, records)[0].finish()
    expected = [replace(rec, timestamp=NOW_MS) if rec.timestamp == -1 else rec for rec in records]
    assert found(tmp_path / "d") == expected


def test_the_append_time_is_that_of_the_import(tmp_path: Path) -> None:
    writer, root = write(tmp_path, some_records(20, 0), log_append_time=True)
    writer.finish()
    assert {rec.timestamp for rec in found(root)} == {NOW_MS}
    log = next(partition(root).glob("*.log.r*.clean"))
    assert {batch.timestamp_type for batch in decode_log(log.read_bytes())} == {1}


def test_a_record_without_key_is_refused_if_keys_are_required(tmp_path: Path) -> None:
    records = [replace(rec, key=None) if rec.offset == 17 else rec for rec in some_records(20, 0)]
    with pytest.raises(Refused, match="row 17 of the partition has no key"):
        write(tmp_path, records, pieces=2, keys_required=True)


@pytest.mark.parametrize("seed", range(4))
def test_batches_do_not_depend_on_where_pieces_end(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    records = [replace(rec, headers=() if seed == 1 else rec.headers) for rec in some_records(rng.randrange(1, 150), 0)]
    whole, root = write(tmp_path / "whole", records, codec=seed % 2)
    task, expected = whole._task, whole.finish()
    assert expected is not None
    assert found(root) == records
    for number in range(5):
        monkeypatch.setattr(import_segments, "PART_BYTES", rng.choice((1, 300, 1 << 20)))
        writer = SegmentsWriter(LOCAL, replace(task, batch_bytes=200), f"b{number}")
        at = 0
        while at < len(records):
            size = rng.choice((0, 1, 5, 70))
            columns = columns_of(records[at : at + size])
            no_headers = not any(rec.headers for rec in records[at : at + size])
            writer.append(replace(columns, headers=None) if no_headers else columns)
            at += size
        written = writer.finish()
        assert written is not None
        assert [[replace(file, name="") for file in segment.files] for segment in written.segments] == [
            [replace(file, name="") for file in segment.files] for segment in expected.segments
        ]
        assert replace(written, segments=()) == replace(expected, segments=())


def test_a_record_that_no_consumer_could_read_is_refused_and_no_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_segments, "PART_BYTES", 1)
    records = [replace(rec, value=bytes(3000)) if rec.offset == 15 else rec for rec in some_records(20, 0)]
    root = made(EMPTY, tmp_path)
    before = sorted(partition(root).iterdir())
    task = replace(EMPTY.task(EMPTY.plan(LOCAL, root)), batch_bytes=100, max_message_bytes=2000)
    writer = SegmentsWriter(LOCAL, task, "a1")
    writer.append(columns_of(records[:12]))
    with pytest.raises(Refused, match=r"row 15 .*2000"):
        writer.append(columns_of(records[12:]))
    assert sorted(partition(root).iterdir()) != before
    writer.discard()
    assert sorted(partition(root).iterdir()) == before


def test_a_created_partition_is_as_a_broker_creates_it(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o750)
    make_partition(LOCAL, str(tmp_path / "d"), "orders", 3, TOPIC_ID)
    path = tmp_path / "d" / "orders-3"
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {
        f"{0:020d}.log": b"",
        f"{0:020d}.index": b"",
        f"{0:020d}.timeindex": b"",
        "partition.metadata": f"version: 0\ntopic_id: {TOPIC_ID}".encode(),
    }
    assert path.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("name", CASES)
def test_imported_records_are_read_back_from_any_initial_state(name: str, tmp_path: Path) -> None:
    case, rng = CASES[name], random.Random(name)
    root = made(case, tmp_path)
    plan = case.plan(LOCAL, root)
    records = [replace(rec, offset=case.end + n) for n, rec in enumerate(some_records(rng.randrange(1, 60), 0))]
    writer = SegmentsWriter(LOCAL, replace(case.task(plan), codec=rng.randrange(5)), "a1")
    writer.append(columns_of(records))
    written = writer.finish()
    assert written is not None
    install(LOCAL, plan, written, "one", "r1")
    logs = sorted(partition(root).glob("*.log"))
    batches = [batch for log in logs for batch in decode_log(log.read_bytes())]
    assert all_records(batches)[-len(records) :] == records
    assert {batch.producer_id for batch in batches} == {-1}
