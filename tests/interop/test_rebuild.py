"""Index files that keytail rebuilds equal, byte for byte, those of Kafka's own recovery of the same logs."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from keytail.format.index import parse_txn_index
from keytail.log.fs import LOCAL
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import survey_partition
from keytail.rebuild_index.partition import RebuildSettings, Rest, plan_partition
from keytail.rebuild_index.tasks import PartitionOutcome, Rebuild
from tests.chance import SEED, cases
from tests.interop.kafka import Kafka
from tests.interop.traffic import Traffic, random_traffic

pytestmark = pytest.mark.interop

LOGS = int(os.environ.get("KEYTAIL_FUZZ_LOGS", "0")) // 10 or 12
INTERVALS = (0, 1, 512, 4096, 2**31 - 1)
INDEXES = (".index", ".timeindex", ".txnindex")
KINDS = {
    "idempotent": {},
    "transactional": {"transactional": True},
    "old formats": {"legacy": True},
}


def traffic_of(rng: random.Random, kind: str, **more: bool) -> Traffic:
    traffic = random_traffic(rng, **{"delete_records": False, **KINDS[kind], **more})
    traffic.configs |= {"index.interval.bytes": rng.choice(INTERVALS), "segment.index.bytes": 65_536}
    return traffic


def index_files(partition: Path) -> dict[str, bytes]:
    """Return the index files by name; a transaction index without entries counts as missing."""
    found = {path.name: path.read_bytes() for path in partition.iterdir() if path.suffix in INDEXES}
    return {name: data for name, data in found.items() if data or not name.endswith(".txnindex")}


def rebuild(log_dir: Path, traffic: Traffic, *, clean: bool = True, **more: bool) -> PartitionOutcome:
    """Return the outcome of the command for the only partition of a log dir."""
    if clean:
        (log_dir / ".kafka_cleanshutdown").touch()
    (log_dir / "log-start-offset-checkpoint").write_text(f"0\n1\nt 0 {traffic.log_start_offset}\n")
    [facts] = survey_log_dirs(LOCAL, [str(log_dir)])
    [entry] = facts.partitions
    surveyed = survey_partition(LOCAL, facts, entry)
    assert surveyed.problems == ()
    plan = plan_partition(
        LOCAL,
        surveyed,
        RebuildSettings(
            index_interval_bytes=traffic.configs["index.interval.bytes"],
            segment_index_bytes=traffic.configs["segment.index.bytes"],
            run_id="r",
            **more,
        ),
    )
    [outcome] = Rebuild([plan]).run()
    assert outcome.problem is None, outcome.problem
    assert not list(log_dir.rglob("*.clean"))
    return outcome


def copy_without(source: Path, target: Path, suffixes: tuple[str, ...] = INDEXES) -> Path:
    shutil.copytree(source, target)
    for path in target.iterdir():
        if path.suffix in suffixes:
            path.unlink()
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_rebuilt_indexes_equal_those_of_kafkas_recovery(kafka: Kafka, fast_dir: Path, kind: str) -> None:
    aborted = 0
    for number in cases(LOGS, lambda: aborted or kind != "transactional"):
        traffic = traffic_of(random.Random(f"{SEED} {kind} {number}"), kind)
        source = fast_dir / f"{number}" / "t-0"
        for _ in range(2):
            options = traffic.options
            kafka.append(source, traffic.steps(), **options)
        theirs = copy_without(source, fast_dir / f"{number}-kafka" / "t-0")
        loaded = kafka.load(theirs, records=False, clean=False, **traffic.options)
        assert any("Recovering unflushed segment" in line for line in loaded.repaired)
        own = copy_without(source, fast_dir / f"{number}-keytail" / "t-0")
        found = rebuild(own.parent, traffic, execute=True).result
        assert found is not None
        assert index_files(own) == index_files(theirs), f"log {number}, {traffic.configs}"
        aborted += sum(name.endswith(".txnindex") for name in index_files(own))
        assert len(found.wrong) == len(index_files(own))
        again = rebuild(own.parent, traffic, rebuild_all=True).result
        assert again is not None and not again.wrong
        # Files of a broker are valid as they are; with rebuild_all, they become those that a recovery writes.
        assert not rebuild(source.parent, traffic).result.wrong  # type: ignore[union-attr]
        rebuild(source.parent, traffic, rebuild_all=True, execute=True)
        assert index_files(source) == index_files(theirs)
    assert not aborted or kind == "transactional"


@pytest.mark.parametrize("kind", ["idempotent", "transactional"])
def test_cleaned_logs_are_valid_and_lose_no_aborted_transaction(kafka: Kafka, fast_dir: Path, kind: str) -> None:
    """A cleaned log no longer shows where transactions began, so that the entries of the files are retained."""
    kept = 0
    for number in cases(LOGS, lambda: kept or kind != "transactional"):
        traffic = traffic_of(random.Random(f"{SEED} cleaned {kind} {number}"), kind, delete_records=True)
        partition, checkpoint = fast_dir / f"{number}" / "t-0", None
        for _ in range(3):
            options = traffic.options
            kafka.append(partition, traffic.steps(), **options)
            cleaned = kafka.clean(partition, checkpoint=checkpoint, only_if_cleanable=True, **traffic.options)
            checkpoint = cleaned.end_offset if cleaned.cleaned else checkpoint
        before = index_files(partition)
        outcome = rebuild(partition.parent, traffic)
        assert outcome.result is not None
        assert not outcome.result.wrong, [(s.base_offset, v.suffix, v.why) for s, v in outcome.result.wrong]
        assert outcome.rest == Rest()
        theirs = copy_without(partition, fast_dir / f"{number}-kafka" / "t-0")
        kafka.load(theirs, records=False, clean=False, **traffic.options)
        own = copy_without(partition, fast_dir / f"{number}-keytail" / "t-0", (".index", ".timeindex"))
        rebuild(own.parent, traffic, execute=True)
        after = index_files(own)
        for name, data in after.items():
            if name.endswith(".txnindex"):
                assert data == before[name]
                kept += len(parse_txn_index(data))
            else:
                assert data == index_files(theirs)[name], (number, name)
        assert after.keys() == before.keys()
    assert not kept or kind == "transactional"


def test_kafka_serves_the_same_with_a_rebuilt_transaction_index(kafka: Kafka, fast_dir: Path) -> None:
    """The log start offset may be in a transaction, and the log may be cleaned."""
    for number in range(LOGS):
        rng = random.Random(f"{SEED} served {number}")
        traffic = traffic_of(rng, "transactional", delete_records=True)
        partition = fast_dir / f"{number}" / "t-0"
        for _ in range(2):
            options = traffic.options
            kafka.append(partition, traffic.steps(), **options)
        if rng.random() < 0.5:
            kafka.clean(partition, only_if_cleanable=True, **traffic.options)
        own = copy_without(partition, fast_dir / f"{number}-keytail" / "t-0")
        rebuild(own.parent, traffic, execute=True)
        before = kafka.load(partition, transactions=True, fetch=True, **traffic.options)
        after = kafka.load(own, transactions=True, fetch=True, **traffic.options)
        assert after.repaired == before.repaired
        assert (after.committed, after.records) == (before.committed, before.records)
        assert after.fetch_mismatches == ()


def test_times_are_found_through_rebuilt_indexes(kafka: Kafka, fast_dir: Path) -> None:
    for number in range(LOGS):
        rng = random.Random(f"{SEED} times {number}")
        traffic = traffic_of(rng, rng.choice(list(KINDS)))
        partition = fast_dir / f"{number}" / "t-0"
        options = traffic.options
        kafka.append(partition, traffic.steps(), **options)
        asked = [traffic.clock_ms + rng.randint(-25_000, 2_000) for _ in range(20)]
        own = copy_without(partition, fast_dir / f"{number}-keytail" / "t-0")
        rebuild(own.parent, traffic, execute=True)
        before = kafka.load(partition, timestamps=asked, **traffic.options)
        after = kafka.load(own, timestamps=asked, **traffic.options)
        assert after.timestamps == before.timestamps
        assert [s.largest_timestamp_ms for s in after.segments if s.log_bytes] == [
            s.largest_timestamp_ms for s in before.segments if s.log_bytes
        ]
