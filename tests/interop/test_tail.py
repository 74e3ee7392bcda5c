"""Torn logs: truncation, snapshots and leader epochs of keytail, compared with the recovery by Kafka's loader."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from keytail.format.producers import ProducerEntry, parse_snapshot
from keytail.log.checkpoint import read_epochs
from keytail.log.fs import LOCAL
from keytail.log.partition import PartitionFacts
from keytail.log.records.chunk import SegmentReader
from keytail.rebuild_index.epochs import epochs_seen, plan_epochs, write_plan
from keytail.rebuild_index.partition import RebuildSettings, plan_partition
from keytail.rebuild_index.snapshots import (
    SnapshotRow,
    make_snapshots,
    put_snapshot,
    survey_snapshots,
    wanted_snapshots,
)
from keytail.rebuild_index.tasks import Rebuild
from tests.chance import SEED
from tests.crash.driver import Counts, State, for_every_stop
from tests.crash.partitions import PARTITION
from tests.crash.test_tail import CASES, ROWS
from tests.interop.kafka import Kafka, Loaded
from tests.interop.traffic import Traffic, random_traffic
from tests.rebuild_index.torn import Torn, facts_of, flipped, logs_of, truncate
from tests.reference.batches import decode_log

CONFIGS = {"segment.index.bytes": "8192", "index.interval.bytes": "50"}
LOGS = int(os.environ.get("KEYTAIL_FUZZ_LOGS", "12"))
pytestmark = pytest.mark.interop


def recovered_by_kafka(kafka: Kafka, torn: Torn, root: Path) -> tuple[Loaded, dict[int, bytes], dict[str, bytes]]:
    """Load a copy with Kafka's loader, and return the harness's answer, the logs, and all files."""
    copy = root.with_name(f"{root.name}-for-kafka")
    shutil.copytree(root, copy)
    point = torn.checkpoints["recovery-point-offset-checkpoint"]
    loaded = kafka.load(copy / PARTITION, configs=CONFIGS, clean=False, recovery_point=point)
    files = {path.name: path.read_bytes() for path in (copy / PARTITION).iterdir()}
    logs = logs_of(copy)
    shutil.rmtree(copy)
    return loaded, logs, files


@pytest.mark.parametrize("number", ROWS)
def test_kafka_recovers_each_row_to_the_documented_logs(number: int, kafka: Kafka, fast_dir: Path) -> None:
    build, broker, _ = ROWS[number]
    torn = Torn()
    torn.make(fast_dir / "d")
    build(fast_dir / "d")
    loaded, logs, _ = recovered_by_kafka(kafka, torn, fast_dir / "d")
    assert logs == broker
    assert loaded.log_end_offset == (15 if len(broker) == 2 else 34)


@pytest.mark.parametrize("case", CASES)
def test_kafka_recovers_every_interrupted_truncation_to_the_same_state(case: str, kafka: Kafka, fast_dir: Path) -> None:
    torn = CASES[case]
    torn.make(fast_dir / "origin")
    expected, counts = recovered_by_kafka(kafka, torn, fast_dir / "origin"), Counts()
    assert expected[1] == torn.recovered(fast_dir / "origin")

    def check(state: State) -> None:
        loaded, *files = recovered_by_kafka(kafka, torn, state.root)
        assert tuple(files) == expected[1:]
        assert loaded.log_end_offset == expected[0].log_end_offset

    for_every_stop(torn.make, truncate, check, work_dir=fast_dir / "work", counts=counts, partial_cuts=1)
    print(f"opened by Kafka: {case}: {counts}")


def rebuild_epochs_and_snapshots(facts: PartitionFacts) -> list[SnapshotRow]:
    """Rebuild leader epochs and snapshots, as a run does."""
    reader, seen = SegmentReader(LOCAL), []
    for segment in facts.segments:
        for chunk in reader.chunks(f"{facts.path}/{segment.base_offset:020d}.log", segment.log_bytes):
            seen += epochs_seen(chunk.table)
    epochs = read_epochs(LOCAL, f"{facts.path}/leader-epoch-checkpoint")
    write_plan(LOCAL, facts.path, plan_epochs(epochs, seen, facts.log_end_offset))
    wanted = wanted_snapshots(
        [segment.base_offset for segment in facts.segments],
        facts.log_start_offset,
        facts.log_end_offset,
        clean_shutdown=facts.clean_shutdown,
    )
    survey = survey_snapshots(LOCAL, facts.path, facts.snapshots, wanted)
    rows = []
    for row, data in make_snapshots(LOCAL, reader, facts.path, facts.segments, facts.log_start_offset, survey):
        rows.append(row)
        if not row.problem:
            like = LOCAL.stat(f"{facts.path}/{facts.segments[-1].base_offset:020d}.log")
            put_snapshot(LOCAL, facts.path, row.offset, data, like=like, run_id="r", attempt="a")
    return rows


def traffic_of(rng: random.Random, number: int, **more: Any) -> Traffic:
    traffic = random_traffic(
        rng, transactional=number % 2 == 0, delete_records=False, far_jumps=False, keyless=False, **more
    )
    traffic.producer_id_expiration_ms = 2**31 - 1  # no producer expires
    traffic.configs["segment.index.bytes"] = 65_536  # a recovery fails if an index becomes full
    return traffic


def written(kafka: Kafka, rng: random.Random, number: int, root: Path, **more: Any) -> Traffic:
    """Write a log dir with one partition by several rounds of traffic, and close it cleanly."""
    traffic = traffic_of(rng, number, **more)
    (root / PARTITION).mkdir(parents=True)
    for _ in range(2):
        options = traffic.options
        kafka.append(root / PARTITION, traffic.steps(), **options)
    return traffic


def tear(rng: random.Random, root: Path) -> int:
    """Tear a segment, and return the recovery point, which is at or below the damage."""
    logs = {base: log for base, log in logs_of(root).items() if log}
    base = rng.choice(sorted(logs)[-4:])
    log, batches = logs[base], decode_log(logs[base])
    batch = rng.choice(batches)
    at = batch.position + rng.randrange(17, batch.size)  # after the magic byte, because a broker accepts any magic
    torn = rng.choice([flipped(log, at), log[:at], log[:at] + bytes(rng.randint(1, 200)), log + rng.randbytes(50)])
    (root / PARTITION / f"{base:020d}.log").write_bytes(torn)
    point = rng.choice([0, base, batch.base_offset if torn[: batch.position] == log[: batch.position] else base])
    (root / "recovery-point-offset-checkpoint").write_text(f"0\n1\norders 0 {point}\n")
    (root / "replication-offset-checkpoint").write_text(f"0\n1\norders 0 {max(logs)}\n")
    (root / "cleaner-offset-checkpoint").write_text(f"0\n1\norders 0 {max(logs)}\n")
    return point


def damage_epochs(rng: random.Random, root: Path, point: int, end: int) -> None:
    """Remove the last entries, as if they had not been written before a crash (a broker restores those of the range
    that it recovers), or add an entry above the log end.
    """
    path = root / PARTITION / "leader-epoch-checkpoint"
    entries = read_epochs(LOCAL, str(path))
    first = max(base for base in logs_of(root) if base <= point)
    if rng.random() < 0.3:
        entries.append((entries[-1][0] + 7, end + 5))
    elif rng.random() < 0.7:
        written_until = rng.randint(first, end)
        entries = [entry for entry in entries if entry[1] < written_until]
    path.write_text("".join([f"0\n{len(entries)}\n", *(f"{epoch} {start}\n" for epoch, start in entries)]))


def test_random_torn_logs_are_recovered_to_the_same_files(kafka: Kafka, fast_dir: Path) -> None:
    print(f"KEYTAIL_SEED={SEED} KEYTAIL_FUZZ_LOGS={LOGS}")
    seen: Counter[str] = Counter()
    for number in range(LOGS):
        rng = random.Random(f"{SEED}-{number}")
        ours, theirs = fast_dir / f"{number}" / "ours", fast_dir / f"{number}" / "theirs"
        try:
            traffic = written(kafka, rng, number, ours)
            whole_end = traffic.log_end_offset
            point = tear(rng, ours)
            damage_epochs(rng, ours, point, whole_end)
            shutil.copytree(ours, theirs)
            options = {**traffic.options, "clean": False, "recovery_point": point, "transactions": True}
            expected = kafka.load(theirs / PARTITION, **options)
            done = truncate(LOCAL, ours, hosted=[("orders", 0)])
            assert done is not None
            seen["with segments after the damage"] += bool(done.removed_segments)
            assert logs_of(ours) == logs_of(theirs)
            facts = facts_of(ours)
            assert facts.log_end_offset == expected.log_end_offset <= whole_end
            epochs = (ours / PARTITION / "leader-epoch-checkpoint").read_bytes()
            rebuild_epochs_and_snapshots(facts)
            put = (ours / PARTITION / "leader-epoch-checkpoint").read_bytes()
            seen["with repaired epochs"] += put != epochs
            assert put == (theirs / PARTITION / "leader-epoch-checkpoint").read_bytes()
            found = kafka.load(ours / PARTITION, **options)
            assert not [line for line in found.messages if "invalid" in line.lower() or "orrupt" in line], (
                found.messages
            )
            assert known(found) == known(expected) and found.aborted == expected.aborted
            assert found.records == expected.records and found.recovery_point == expected.recovery_point
            assert files_of(ours) == files_of(theirs)
        except BaseException as problem:
            problem.add_note(f"KEYTAIL_SEED={SEED}, log {number}")
            raise
    print(dict(seen))


def known(loaded: Loaded) -> list[tuple[int, ...]]:
    """Return the producers without their first data offset: Kafka knows up to five batches of each, but from a snapshot
    only the last.
    """
    return [producer[:3] + producer[4:] for producer in loaded.producers]


def test_a_complete_run_has_the_result_of_kafkas_recovery(kafka: Kafka, fast_dir: Path) -> None:
    """All files are compared before a broker has opened the result, except the snapshot at the log end, which Kafka's
    recovery writes itself.
    """
    print(f"KEYTAIL_SEED={SEED} KEYTAIL_FUZZ_LOGS={LOGS}")
    for number in range(LOGS):
        rng = random.Random(f"{SEED}-{number}")
        ours, theirs = fast_dir / f"{number}" / "ours", fast_dir / f"{number}" / "theirs"
        try:
            traffic = written(kafka, rng, number, ours)
            tear(rng, ours)
            (ours / "recovery-point-offset-checkpoint").write_text("0\n0\n")  # this makes Kafka recover everything
            damage_epochs(rng, ours, 0, traffic.log_end_offset)
            shutil.copytree(ours, theirs)
            loaded = kafka.load(theirs / PARTITION, **{**traffic.options, "clean": False})
            plan = plan_partition(
                LOCAL,
                facts_of(ours),
                RebuildSettings(
                    index_interval_bytes=traffic.configs["index.interval.bytes"],
                    segment_index_bytes=traffic.configs["segment.index.bytes"],
                    rebuild_all=True,
                    execute=True,
                    truncate=True,
                    run_id="r",
                ),
            )
            [outcome] = Rebuild([plan], hosted={str(ours): [("orders", 0)]}).run()
            assert outcome.problem is None and outcome.done_truncation is not None and not outcome.rest.refused
            found, expected = files_of(ours), files_of(theirs)
            at_end = f"{loaded.log_end_offset:020d}.snapshot"
            if found.keys() != expected.keys():
                assert found.keys() ^ expected.keys() == {at_end}
            for name in found.keys() & expected.keys():
                if name.endswith(".snapshot"):  # compare sets, because Kafka's order is that of its hash table
                    made, kafkas = set(parse_snapshot(found[name])), set(parse_snapshot(expected[name]))
                    # Kafka loads the snapshot before each segment, and drops producers that are idle or have no time.
                    assert kafkas <= made and all(is_expired(entry, traffic) for entry in made - kafkas), name
                else:
                    assert found[name] == expected[name], name
        except BaseException as problem:
            problem.add_note(f"KEYTAIL_SEED={SEED}, log {number}")
            raise


def files_of(root: Path) -> dict[str, bytes]:
    """Return the files; an index that a broker emptied counts as missing."""
    files = {path.name: path.read_bytes() for path in sorted((root / PARTITION).iterdir())}
    return {name: data for name, data in files.items() if data or not name.endswith(".txnindex")}


def expired_by_kafka(path: Path, row: SnapshotRow, traffic: Traffic) -> set[int]:
    """Return the producers that Kafka expires when it loads the source of a new snapshot: they were idle too long, or
    have no timestamp.
    """
    if row.source is None:
        return set()
    return {
        entry.producer_id
        for entry in parse_snapshot((path / f"{row.source:020d}.snapshot").read_bytes())
        if is_expired(entry, traffic)
    }


def is_expired(entry: ProducerEntry, traffic: Traffic) -> bool:
    is_idle = traffic.clock_ms - entry.timestamp_ms >= traffic.producer_id_expiration_ms
    return is_idle and entry.current_txn_first_offset < 0


def test_missing_snapshots_and_epochs_are_rebuilt_as_kafka_wrote_them(kafka: Kafka, fast_dir: Path) -> None:
    print(f"KEYTAIL_SEED={SEED} KEYTAIL_FUZZ_LOGS={LOGS}")
    seen: Counter[str] = Counter()
    for number in range(LOGS):
        rng = random.Random(f"{SEED}-{number}")
        root = fast_dir / str(number)
        try:
            traffic = written(kafka, rng, number, root)
            (root / ".kafka_cleanshutdown").write_text("{}")
            end, path = traffic.log_end_offset, root / PARTITION
            shutil.copytree(path, fast_dir / "as written" / str(number) / PARTITION)
            copy = fast_dir / "as written" / str(number) / PARTITION
            expected = kafka.load(copy, transactions=True, **traffic.options)
            before = {
                int(file.name[:20]): sorted(parse_snapshot(file.read_bytes()), key=lambda entry: entry.producer_id)
                for file in path.glob("*.snapshot")
            }
            epochs = (path / "leader-epoch-checkpoint").read_bytes()
            for offset in before:
                if number % 3 == 0 or rng.random() < 0.5:
                    file = path / f"{offset:020d}.snapshot"
                    file.unlink() if rng.random() < 0.7 else file.write_bytes(file.read_bytes()[:-1] + b"\xaa")
            rows = rebuild_epochs_and_snapshots(facts_of(root))
            for row in rows:
                seen[row.problem.partition(": ")[0] or f"made, source {row.source is not None}"] += 1
                if not row.problem:
                    removed = expired_by_kafka(path, row, traffic)
                    entries = parse_snapshot((path / f"{row.offset:020d}.snapshot").read_bytes())
                    assert [entry for entry in entries if entry.producer_id not in removed] == [
                        entry for entry in before[row.offset] if entry.producer_id not in removed
                    ], row
            assert not any(row.problem for row in rows) or traffic.follower_share
            assert (path / "leader-epoch-checkpoint").read_bytes() == epochs
            if any(row.problem for row in rows):
                continue
            found = kafka.load(path, transactions=True, **traffic.options)
            assert known(found) == known(expected)
            assert found.log_end_offset == expected.log_end_offset == end
            assert not [line for line in found.messages if "snapshot" in line and line.startswith("WARN")]
        except BaseException as problem:
            problem.add_note(f"KEYTAIL_SEED={SEED}, log {number}")
            raise
    print(dict(seen))


def test_the_snapshot_at_the_end_of_a_cleaned_log_equals_kafkas(kafka: Kafka, fast_dir: Path) -> None:
    """The snapshot is rebuilt from an older one and the cleaned log, which still has the last batch of each
    producer."""
    print(f"KEYTAIL_SEED={SEED} KEYTAIL_FUZZ_LOGS={LOGS}")
    seen: Counter[str] = Counter()
    for number in range(LOGS):
        rng = random.Random(f"{SEED}-{number}")
        root = fast_dir / str(number)
        try:
            traffic = written(kafka, rng, number, root)
            path, end = root / PARTITION, traffic.log_end_offset
            cleaned = kafka.clean(path, only_if_cleanable=True, **traffic.options)
            last = path / f"{end:020d}.snapshot"
            assert last.exists()
            for file in path.glob("*.snapshot"):
                if file == last or rng.random() < 0.5:
                    file.unlink()
            (root / ".kafka_cleanshutdown").write_text("{}")
            theirs = fast_dir / "theirs" / str(number) / PARTITION
            shutil.copytree(path, theirs)
            kafka.load(theirs, **traffic.options)
            rows = {row.offset: row for row in rebuild_epochs_and_snapshots(facts_of(root))}
            row = rows[end]
            seen[f"cleaned {cleaned.cleaned}, {row.problem.partition(': ')[0] or 'made'}"] += 1
            if row.problem or row.source is None:  # without any snapshot, Kafka loses the state of all producers
                continue
            removed = expired_by_kafka(path, row, traffic)
            seen["with expired producers"] += bool(removed)
            made, kafkas = (
                {
                    entry.producer_id: entry
                    for entry in parse_snapshot((item / last.name).read_bytes())
                    if entry.producer_id not in removed
                }
                for item in (path, theirs)
            )
            assert made == kafkas
        except BaseException as problem:
            problem.add_note(f"KEYTAIL_SEED={SEED}, log {number}")
            raise
    print(dict(seen))
