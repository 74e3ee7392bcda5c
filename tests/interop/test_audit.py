"""Replicas of random logs that Kafka wrote, cleaned at different times by Kafka's Cleaner and by keytail: no records
may differ.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from keytail.audit.command import Request
from keytail.audit.driver import audit
from keytail.errors import KeytailError
from tests.chance import SEED, cases
from tests.interop import test_differential as differential
from tests.interop.kafka import Kafka, KafkaError, step_marker, step_roll
from tests.interop.rounds import Circumstances
from tests.interop.traffic import Traffic, random_traffic

pytestmark = pytest.mark.interop

LOGS = int(os.environ.get("KEYTAIL_AUDIT_LOGS", "6"))


class Broker:
    """A replica and its cleaner: `kafka`, `keytail` or none."""

    def __init__(self, kafka: Kafka, path: Path, cleaner: str) -> None:
        self.kafka, self.path, self.cleaner = kafka, path, cleaner
        self.checkpoint: int | None = None
        path.mkdir(parents=True)

    def append(self, steps: list[dict[str, Any]], options: dict[str, Any]) -> int:
        return self.kafka.append(self.path / "t-0", steps, **options).log_end_offset

    def clean(self, traffic: Traffic, end: int) -> bool:
        """Clean the replica, and return whether anything was cleaned; a partition that the cleaner refuses remains
        unchanged.
        """
        now = Circumstances(
            traffic.configs, traffic.clock_ms, 0, end, end, self.checkpoint, None, traffic.producer_id_expiration_ms
        )
        self.write_checkpoints(end)
        ended = None
        try:
            if self.cleaner == "kafka":
                options = {**traffic.options, "high_watermark": end, "recovery_point": end}
                done = self.kafka.clean(
                    self.path / "t-0", checkpoint=self.checkpoint, only_if_cleanable=True, **options
                )
                ended = done.end_offset if done.cleaned else None
            elif self.cleaner == "keytail":
                ended = differential.keytail_round(self.path, now, grouping="measured", force=True).end_offset
        except (KeytailError, KafkaError):
            return False
        self.checkpoint = self.checkpoint if ended is None else ended
        self.write_checkpoints(end)
        return ended is not None

    def write_checkpoints(self, end: int) -> None:
        write = self.kafka.write_checkpoint
        write(self.path / "cleaner-offset-checkpoint", {} if self.checkpoint is None else {"t-0": self.checkpoint})
        write(self.path / "replication-offset-checkpoint", {"t-0": end})
        write(self.path / "recovery-point-offset-checkpoint", {"t-0": end})
        (self.path / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":42}')


def test_replicas_cleaned_by_either_cleaner_at_any_time_do_not_differ(
    kafka: Kafka, fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differential, "IN_PASSES", 0)
    seen: Counter[str] = Counter()
    wanted = ["rounds of kafka", "rounds of keytail", "explained: superseded"]
    wanted += ["explained: deleted"] if LOGS >= 50 else []
    for number in cases(LOGS, lambda: all(seen[what] for what in wanted)):
        rng = random.Random(f"{SEED}-{number}")
        traffic = random_traffic(
            rng, transactional=number % 2 == 0, legacy=number % 3 == 1, delete_records=False, keyless=False,
            far_jumps=number % 4 == 0,
        )  # fmt: skip
        traffic.tombstone_share = 0.5
        traffic.configs |= {"delete.retention.ms": 60_000, "min.compaction.lag.ms": 0}
        brokers = [Broker(kafka, fast_dir / f"{number}" / user, user) for user in ("nobody", "kafka", "keytail")]
        for _ in range(rng.randint(1, 3)):
            steps = traffic.steps()
            if rng.random() < 0.5:
                for producer in traffic.producers:
                    if producer.in_transaction:
                        steps.append(
                            step_marker("ABORT", producer.producer_id, producer.epoch, traffic.clock_ms)
                        )
                        producer.in_transaction = False
                        traffic.log_end_offset += 1
                steps.append(step_roll())
            end = max(broker.append(steps, traffic.options) for broker in brokers)
            for broker in brokers:
                for _ in range(rng.choice([0, 1, 2])):
                    seen[f"rounds of {broker.cleaner}"] += broker.clean(traffic, end)
                broker.write_checkpoints(end)
        [row] = audit(Request(tuple(f"{broker.cleaner}={broker.path}" for broker in brokers)))
        reported = f"KEYTAIL_SEED={SEED}, log {number}: {row}"
        assert (row.status, row.divergences, row.not_compared) == ("alike", {}, ()), reported
        assert row.records_compared is not None
        seen["records compared"] += row.records_compared
        seen.update({f"explained: {reason}": count for reason, count in (row.explained or {}).items()})
        seen.update({f"early: {what}": count for what, count in (row.dropped_early or {}).items()})
        shutil.rmtree(fast_dir / f"{number}")
    print(dict(seen))
