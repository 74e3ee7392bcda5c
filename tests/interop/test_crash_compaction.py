"""Kafka's loader opens every state in which a compaction, its recovery, or the next run can stop.

It finds the latest record of each key, no new record, and the same log end offset (promises 1 and 2); it finds each
record through the indexes, and reads the checkpoint. From every recovered state, the next run has the same result as a
round of Kafka's cleaner (promise 5).
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from keytail.log.fs import LOCAL
from tests.chance import SEED
from tests.crash.compactions import CHECKPOINT, INTERVAL_BYTES, NOW, RETENTION_MS, Log, LogDir, find
from tests.crash.explorer import Explorer, Visit
from tests.crash.test_compaction import MAX_CUTS, RANDOM, SHAPES, SOAK, shape
from tests.interop.conftest import fast_dir, kafka  # noqa: F401
from tests.interop.kafka import Kafka, Loaded
from tests.reference import loader
from tests.reference.batches import Rec

pytestmark = pytest.mark.interop


@pytest.mark.one_of()
@pytest.mark.parametrize("name", [*SHAPES, *(f"random {n}" for n in range(RANDOM))])
def test_kafka_loads_every_state_of_a_stopped_compaction_without_loss(
    name: str,
    kafka: Kafka,  # noqa: F811
    fast_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_dir, opened, cleaned = shape(name), set[str](), set[str]()

    def visit(state: Visit) -> None:
        for log in log_dir.logs:
            path = state.root / log.name
            if is_new(path, opened):
                open_with_kafka(kafka, log_dir, log, path, state.found.logs[log.name])
        if is_new(state.root / CHECKPOINT, opened):
            assert kafka.read_checkpoint(state.root / CHECKPOINT) == state.found.checkpoints
        log_dir.recover(LOCAL, state.root)
        clean_with_kafka(kafka, log_dir, state.root, state.found.checkpoints, cleaned)

    explorer = Explorer(log_dir, fast_dir, visit, SEED, soak=SOAK, partial_cuts=8 if SOAK or name == MAX_CUTS else 1)
    explorer.explore()
    with capsys.disabled():
        print(f"\nby Kafka: {name} (seed {SEED}): {len(opened)} opened, {len(cleaned)} cleaned; losses 0; {explorer}")
    if name in SHAPES:  # a random log may have nothing to remove
        assert len(opened) > 20
        assert len(cleaned) > 2


def is_new(path: Path, seen: set[str]) -> bool:
    """Return whether this state was not checked before: its names and contents without scratch files."""
    if not path.exists():
        return False
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix != ".clean")
    contents = repr([(file.name, file.read_bytes()) for file in files])
    digest = hashlib.blake2b(f"{path.name} {contents}".encode()).hexdigest()
    if digest in seen:
        return False
    seen.add(digest)
    return True


def open_with_kafka(kafka: Kafka, log_dir: LogDir, log: Log, path: Path, model: loader.Loaded) -> None:  # noqa: F811
    copy = path.parent.with_name("for-kafka") / path.name
    shutil.copytree(path, copy)
    try:
        loaded = kafka.load(copy, fetch=True, transactions=True, **options(log_dir))
        records = [Rec(r.offset, r.timestamp_ms, r.key, r.value) for r in loaded.records]
        log.judge(records, loaded.log_end_offset, loaded.segment_bases)
        assert loaded.fetch_mismatches == ()
        assert loaded.segment_bases == sorted(model.segments)
        assert records == model.records(), "Kafka and the model of its loader find different records"
        check_transactions(log, loaded)
        for base, segment in model.segments.items():
            assert (copy / f"{base:020d}.log").read_bytes() == segment.log
    finally:
        shutil.rmtree(copy.parent)


def check_transactions(log: Log, loaded: Loaded) -> None:
    """Check the open transactions, the last stable offset, and the records that a read_committed consumer receives."""
    open_from = log.transactions.open_from
    stable = min(open_from.values(), default=log.end)
    assert loaded.last_stable_offset == stable
    assert {producer[0]: producer[-1] for producer in loaded.producers if producer[-1] >= 0} == open_from
    assert {producer[0]: producer[4] for producer in loaded.producers if producer[4] >= 0} == log.producers
    there = [record.offset for record in loaded.records]
    assert list(loaded.committed) == [offset for offset in there if offset < stable and offset not in log.hidden]


def clean_with_kafka(
    kafka: Kafka,  # noqa: F811
    log_dir: LogDir,
    root: Path,
    checkpoints: dict[str, int],
    cleaned: set[str],
) -> None:
    """Compare the next run after a recovery with a round of Kafka's cleaner."""
    new = [log for log in log_dir.logs if log.compacted and is_new(root / log.name, cleaned)]
    if not new:
        return
    theirs = root.with_name("cleaned-by-kafka")
    for log in new:
        shutil.copytree(root / log.name, theirs / log.name)
        kafka.clean(theirs / log.name, checkpoint=checkpoints.get(log.name), only_if_cleanable=True, **options(log_dir))
    log_dir.run(LOCAL, root, "r2")
    for log in new:
        assert logs_of(root / log.name) == logs_of(theirs / log.name)
        open_with_kafka(kafka, log_dir, log, root / log.name, find(log_dir, root).logs[log.name])
    shutil.rmtree(theirs)


def logs_of(path: Path) -> dict[str, bytes]:
    """Return the logs and the indexes of aborted transactions."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix in (".log", ".txnindex")}


def options(log_dir: LogDir) -> dict[str, Any]:
    configs = {
        "cleanup.policy": "compact",
        "internal.segment.bytes": max(log_dir.segment_bytes, 1),
        "index.interval.bytes": INTERVAL_BYTES,
        "delete.retention.ms": RETENTION_MS,
        "min.cleanable.dirty.ratio": 0,
        "segment.index.bytes": 8192,
    }
    return {"configs": configs, "clock_ms": NOW}
