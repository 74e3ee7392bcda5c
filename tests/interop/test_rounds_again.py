"""Promise 4: clean logs are cleaned again from the log start, at the same clock and at later ones, until nothing
changes.

Kafka cleans its own result in the same rounds: records are removed when Kafka removes them. At the same clock, these
changes are allowed: markers get their delete horizon one round after their data was removed, and their entries are
removed from the transaction indexes; smaller segments may be merged, by Kafka's grouping and by age.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chance import SEED, cases
from tests.interop.kafka import Kafka, step_marker, step_roll
from tests.interop.rounds import Case, Circumstances, Mode, Round
from tests.interop.test_differential import keytail_round, measured_round
from tests.interop.traffic import DAY_MS, Traffic, random_traffic
from tests.reference.batches import Batch, decode_log

pytestmark = pytest.mark.interop

LOGS = 10
RETENTION_MS = 60_000
MAX_ROUNDS = 12
NEVER_MISSED = (
    "horizons of markers",
    "entries removed", "tombstones removed", "markers removed",
    "second rounds that changed no byte",
)


class Again:
    """A log that Kafka and keytail repeatedly clean from its start."""

    def __init__(self, kafka: Kafka, home: Path, traffic: Traffic, mode: Mode) -> None:
        self.case = Case(kafka, home, Counter(), mode)
        self.side = keytail_round if mode == "drift" else measured_round
        self.traffic = traffic
        self.expiration_ms = 3650 * DAY_MS
        # In other cases, groups may change: segments lose records and thus age, and Kafka's groups depend on sizes
        # before the round.
        self.stays_grouped = mode == "measured" and traffic.configs["cleanup.policy"] == "compact"
        self.files: dict[str, tuple[bytes, int]] = {}
        self.batches: dict[int, tuple[Batch, bytes]] = {}
        self.entries: set[bytes] = set()

    def round(self, clock_ms: int, steps: list[dict[str, Any]] | None = None) -> bool:
        """Run a round, and return whether it changed any file."""
        before = self.files
        options = {**self.traffic.options, "clock_ms": clock_ms, "producer_id_expiration_ms": self.expiration_ms}
        start, end = self.traffic.log_start_offset, self.traffic.log_end_offset
        now = Circumstances(self.traffic.configs, clock_ms, start, end, end, None, None, self.expiration_ms)
        assert self.case.play(self.side, Round(steps or [], options, None, now, own_checkpoint=False))
        self._look()
        return self.files != before

    def repeat_until_unchanged(self, clock_ms: int, step_ms: int = 0) -> int:
        """Run rounds until one of them changes nothing, and return its clock."""
        for _ in range(MAX_ROUNDS):
            if not self.round(clock_ms):
                return clock_ms
            clock_ms += step_ms
        raise AssertionError(f"the files still change after {MAX_ROUNDS} rounds")

    def _look(self) -> None:
        """Read only the segments that were cleaned, because the others get new file times."""
        paths = sorted((self.case.ours / "t-0").glob("*.*index")) + sorted((self.case.ours / "t-0").glob("*.log"))
        end = self.case.checkpoint or 0
        self.files = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths if int(path.stem) < end}
        self.batches, self.entries = {}, set()
        for name, (data, _) in self.files.items():
            if name.endswith(".log"):
                for batch in decode_log(data):
                    raw = data[batch.position : batch.position + batch.size]
                    self.batches[batch.base_offset] = replace(batch, position=0), raw
            elif name.endswith(".txnindex"):
                self.entries |= {data[at : at + 34] for at in range(0, len(data), 34)}


@pytest.mark.parametrize("mode", ["drift", "measured"])
def test_repeated_rounds_reach_a_state_that_does_not_change(kafka: Kafka, fast_dir: Path, mode: Mode) -> None:
    seen: Counter[str] = Counter()
    wanted = [name for name in NEVER_MISSED if not (mode == "drift" and "byte" in name)]
    for number in cases(LOGS, lambda: all(seen[name] for name in wanted)):
        traffic = random_traffic(
            random.Random(f"{SEED}-{number}"),
            transactional=number % 3 > 0, delete_records=False, far_jumps=False, keyless=False, codecs=["none"],
        )  # fmt: skip
        traffic.configs |= {"segment.index.bytes": 65_536, "delete.retention.ms": RETENTION_MS}
        traffic.configs |= {"min.compaction.lag.ms": 0}
        if number % 3 == 0:
            traffic.configs["cleanup.policy"] = "compact"
        try:
            run_rounds(Again(kafka, fast_dir / f"log-{number}", traffic, mode), seen)
        except Exception as problem:
            problem.add_note(f"KEYTAIL_SEED={SEED}, log {number}, mode {mode}")
            raise
        shutil.rmtree(fast_dir / f"log-{number}")
    print(dict(seen))


def run_rounds(log: Again, seen: Counter[str]) -> None:
    steps = log.traffic.steps()
    clock_ms = log.traffic.clock_ms
    for producer in log.traffic.producers:
        if producer.in_transaction:
            steps.append(step_marker("ABORT", producer.producer_id, producer.epoch, clock_ms))
            log.traffic.log_end_offset += 1
    steps.append(step_roll())
    log.round(clock_ms, steps)

    # At the same clock, only markers without data change: they get their horizon.
    batches, entries, files = log.batches, log.entries, log.files
    assert batches
    log.round(clock_ms)
    check_only_horizons_of_markers(batches, log.batches, clock_ms + RETENTION_MS, seen)
    assert log.entries <= entries
    seen["entries removed"] += len(entries) - len(log.entries)
    if log.stays_grouped and (log.batches, log.entries) == (batches, entries):
        assert log.files == files
        seen["second rounds that changed no byte"] += 1
    batches, entries = log.batches, log.entries
    changed = log.round(clock_ms)
    assert not (changed and log.stays_grouped)
    log.repeat_until_unchanged(clock_ms)
    assert (log.batches, log.entries) == (batches, entries)

    # Before a horizon nothing more is removed, and at the horizon everything is.
    horizons = [batch.delete_horizon_ms for batch, _ in batches.values() if batch.delete_horizon_ms is not None]
    for horizon_ms in sorted({h for h in horizons if h > clock_ms})[:3]:
        if horizon_ms - 1 > clock_ms:
            assert not log.round(horizon_ms - 1), "something changed before its horizon"
        clock_ms = horizon_ms
        log.repeat_until_unchanged(clock_ms)
        for batch, _ in log.batches.values():
            if batch.delete_horizon_ms is not None and batch.delete_horizon_ms <= clock_ms:
                assert not (batch.control and batch.records), f"a marker remains after its horizon: {batch}"
                assert all(record.value is not None for record in batch.records), (
                    f"a tombstone remains after its horizon: {batch}"
                )
    seen["tombstones removed"] += tombstones(batches) - tombstones(log.batches)
    seen["markers removed"] += markers(batches) - markers(log.batches)

    # When no producer is active any more, a few rounds reach a state that does not change again.
    log.expiration_ms = 1
    clock_ms = log.repeat_until_unchanged(clock_ms + 20 * DAY_MS, RETENTION_MS)
    assert not log.round(clock_ms + 365 * DAY_MS)


def check_only_horizons_of_markers(
    before: dict[int, tuple[Batch, bytes]], after: dict[int, tuple[Batch, bytes]], horizon_ms: int, seen: Counter[str]
) -> None:
    assert before.keys() == after.keys()
    for base, (batch, raw) in after.items():
        old, old_raw = before[base]
        if raw != old_raw:
            assert batch.control and old.delete_horizon_ms is None, f"{old} was changed to {batch}"
            reported = {"attributes": old.attributes | 0x40, "base_timestamp": horizon_ms}
            assert batch == replace(old, size=batch.size, crc=batch.crc, **reported), f"{old} was changed to {batch}"
            seen["horizons of markers"] += 1


def tombstones(batches: dict[int, tuple[Batch, bytes]]) -> int:
    return sum(record.value is None for batch, _ in batches.values() for record in batch.records)


def markers(batches: dict[int, tuple[Batch, bytes]]) -> int:
    return sum(batch.control for batch, _ in batches.values())
