"""The reference models of selection and cleaning compared with Kafka itself, including transactions. Unit tests compare
keytail with these models.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.interop.fuzz import run_cases
from tests.interop.kafka import Kafka
from tests.interop.rounds import CHOICE, Circumstances, Outcome
from tests.reference import cleaner, selection
from tests.reference.legacy import decode_any_log

pytestmark = pytest.mark.interop

PRODUCER = struct.Struct(">qhiqiqiq")
ABORTED = struct.Struct(">hqqqq")
TIME_ENTRY = struct.Struct(">qi")
NO_LAG = 2**63 - 1


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("transactional", [False, True])
def test_the_reference_models_have_the_results_of_kafka(
    kafka: Kafka, fast_dir: Path, transactional: bool, legacy: bool
) -> None:
    # Kafka reads the first dirty segment from an index entry. If an ABORT marker is before it, Kafka also treats later
    # transactions of the producer as aborted, and retains older records; the model reads the whole segment.
    from_inside = not transactional
    logs = int(os.environ.get("KEYTAIL_FUZZ_TWIN_LOGS", "15"))
    run_cases(
        kafka,
        fast_dir,
        model_round,
        logs=logs,
        from_inside=from_inside,
        transactional=transactional,
        legacy=legacy,
        enough=lambda seen: seen["rounds that cleaned"] > 10,
    )


def model_round(log_dir: Path, now: Circumstances) -> Outcome:
    directory = log_dir / "t-0"
    bases = sorted(int(path.stem) for path in directory.glob("*.log"))
    segments = [segment(directory, base) for base in bases]
    producers, unstable = producer_state(directory, now)
    if unstable is not None and unstable < now.log_start_offset:
        unstable = batch_at_or_after(segments, now.log_start_offset)
    facts = SimpleNamespace(
        segments=[listed(directory, item) for item in segments],
        log_start_offset=now.log_start_offset,
        log_end_offset=now.log_end_offset,
        high_watermark=now.high_watermark,
        recovery_point=now.log_end_offset,
        clean_shutdown=True,
        cleaner_checkpoint=now.checkpoint,
    )
    lags = SimpleNamespace(
        cleanup_policy={"compact"},
        min_compaction_lag_ms=int(now.configs.get("min.compaction.lag.ms", 0)),
        max_compaction_lag_ms=int(now.configs.get("max.compaction.lag.ms", NO_LAG)),
        min_cleanable_dirty_ratio=0.0,
    )
    choice = selection.selection(facts, lags, now.now_ms, unstable=unstable)
    chosen = {name: choice[name] for name in CHOICE}
    if not choice["cleanable_bytes"]:
        return Outcome(chosen, None)
    done = cleaner.clean(
        segments,
        first_dirty=choice["first_dirty_offset"],
        first_uncleanable=choice["first_uncleanable_offset"],
        now_ms=now.now_ms,
        delete_retention_ms=int(now.configs["delete.retention.ms"]),
        max_entries=now.map_max_entries or 1_000_000,
        segment_bytes=int(now.configs["internal.segment.bytes"]),
        segment_index_bytes=int(now.configs["segment.index.bytes"]),
        index_interval_bytes=int(now.configs["index.interval.bytes"]),
        log_start_offset=now.log_start_offset,
        producers=producers,
    )
    for output in done.segments:
        install(directory, output)
    return Outcome(chosen, done.end_offset)


def batch_at_or_after(segments: list[cleaner.Segment], offset: int) -> int:
    """Return where a broker finds a transaction that began below the log start: at the batch there, or the next one."""
    for item in segments:
        for batch in decode_any_log(item.log):
            if batch.last_offset >= offset:
                return batch.base_offset
    return offset


def segment(directory: Path, base: int) -> cleaner.Segment:
    log, index, time_index, txn_index = (
        directory / f"{base:020d}{suffix}" for suffix in (".log", ".index", ".timeindex", ".txnindex")
    )
    entries = ABORTED.iter_unpack(txn_index.read_bytes()) if txn_index.exists() else ()
    return cleaner.Segment(
        base,
        log.read_bytes(),
        index.stat().st_size,
        time_index.stat().st_size,
        log.stat().st_mtime_ns // 1_000_000,
        tuple(cleaner.Aborted(*fields) for _, *fields in entries),
    )


def listed(directory: Path, item: cleaner.Segment) -> SimpleNamespace:
    """Return a segment as selection uses it, with times from the end of the time index and from the header of the first
    batch.
    """
    time_index = (directory / f"{item.base_offset:020d}.timeindex").read_bytes()
    last = TIME_ENTRY.unpack(time_index[-12:])[0] if time_index else -1
    return SimpleNamespace(
        base_offset=item.base_offset,
        log_bytes=item.log_bytes,
        index_bytes=item.index_bytes,
        time_index_bytes=item.time_index_bytes,
        largest_timestamp_ms=last if last >= 0 else item.mtime_ms,
        first_batch_timestamp_ms=max_timestamp(item.log) if item.log else -1,
    )


def max_timestamp(batch: bytes) -> int:
    """Return the largest timestamp in the header of the first batch, of any magic."""
    if batch[16] == 0:
        return -1
    at = 35 if batch[16] == 2 else 18
    return int.from_bytes(batch[at : at + 8], "big", signed=True)


def producer_state(directory: Path, now: Circumstances) -> tuple[dict[int, Any], int | None]:
    """Return the active producers as the cleaner knows them, and where the first open transaction below the high
    watermark begins.
    """
    newest = max(directory.glob("*.snapshot"), key=lambda path: int(path.stem))
    producers: dict[int, Any] = {}
    unstable = []
    for row in PRODUCER.iter_unpack(newest.read_bytes()[10:]):
        producer_id, epoch, _, last_offset, _, timestamp_ms, _, open_since = row
        if open_since < 0 and now.now_ms - timestamp_ms >= now.producer_id_expiration_ms:
            continue
        producers[producer_id] = (None if last_offset < 0 else last_offset, epoch)
        if 0 <= open_since < now.high_watermark:
            unstable.append(open_since)
    return producers, min(unstable, default=None)


def install(directory: Path, output: cleaner.CleanedSegment) -> None:
    for base in output.source_bases:
        for suffix in (".log", ".index", ".timeindex", ".txnindex"):
            (directory / f"{base:020d}{suffix}").unlink(missing_ok=True)
        if base != output.base_offset:
            (directory / f"{base:020d}.snapshot").unlink(missing_ok=True)
    contents = {".log": output.log, ".index": output.index, ".timeindex": output.time_index}
    if output.txn_index:
        contents[".txnindex"] = output.txn_index
    for suffix, content in contents.items():
        path = directory / f"{output.base_offset:020d}{suffix}"
        path.write_bytes(content)
        os.utime(path, ns=(0, output.mtime_ms * 1_000_000))
