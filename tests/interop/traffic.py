"""Random traffic for one partition, in rounds, as steps for Kafka.append.

Everything is drawn from the given generator, so that a seed repeats a log. Only the state that the next steps require
is tracked: log end offset, sequences, open transactions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.interop.kafka import (
    CLOCK_MS,
    Record,
    step_batch,
    step_clock,
    step_delete_records,
    step_marker,
    step_raw,
    step_roll,
)
from tests.reference.batches import Rec
from tests.reference.codecs import GZIP, LZ4, SNAPPY
from tests.reference.legacy import encode_single, encode_wrapper

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
HEADER_NAMES = ("", "h", "trace-id", "schlüssel")
DAY_MS = 86_400_000
FAR = 2**31
FOREVER_MS = 2**63 - 1  # with this retention time, the delete horizon overflows, and Kafka sets none


@dataclass
class Producer:
    """An idempotent producer: its identity, its next sequence, and whether it has an open transaction."""

    producer_id: int
    epoch: int = 0
    next_sequence: int = 0
    in_transaction: bool = False


@dataclass
class Traffic:
    """The traffic of one partition. `configs` are those of the topic; `steps()` returns the steps of the next round."""

    rng: random.Random
    configs: dict[str, Any]
    codecs: Sequence[str]
    keys: list[bytes]
    producers: list[Producer]
    producer_id_expiration_ms: int
    tombstone_share: float
    header_share: float
    follower_share: float
    keyless_share: float  # the share of records without a key in replicated batches; a leader accepts none
    transactional: bool
    delete_records: bool
    far_jumps: bool
    bumped_share: float = 0.0  # the share of transactions that are ended with protocol version 2
    huge_share: float = 0.0  # the share of produced batches that are nearly as large as a segment may be
    legacy_codecs: Sequence[int] = (GZIP, SNAPPY, LZ4)
    legacy_share: float = 0.0  # the share of batches that are messages of magic 0 and 1
    clock_ms: int = CLOCK_MS
    leader_epoch: int = 0
    log_end_offset: int = 0
    log_start_offset: int = 0
    batches_a_round: tuple[int, int] = (8, 40)
    rounds: int = field(default=0)

    @property
    def options(self) -> dict[str, Any]:
        """Return the settings with which every command opens this partition."""
        return {
            "configs": self.configs,
            "clock_ms": self.clock_ms,
            "log_start_offset": self.log_start_offset,
            "producer_id_expiration_ms": self.producer_id_expiration_ms,
        }

    def steps(self) -> list[dict[str, Any]]:
        """Return the steps of the next round, and advance the clock, the log end offset and the log start offset."""
        rng = self.rng
        steps: list[dict[str, Any]] = []
        if self.rounds:
            self.pass_time()
            steps.append(step_clock(self.clock_ms))
        self.rounds += 1
        self.leader_epoch += rng.random() < 0.3
        for _ in range(rng.randint(*self.batches_a_round)):
            if rng.random() < 0.03:
                steps.append(step_roll())
            if self.far_jumps and rng.random() < 0.04:
                self.log_end_offset += rng.choice([1, 1000, FAR - 1, FAR, FAR + 7])
                steps.append(self._replicated())
            elif self.legacy_share and rng.random() < self.legacy_share:
                steps.append(self._legacy())
            else:
                steps.append(self._replicated() if rng.random() < self.follower_share else self._produced())
            if self.transactional and rng.random() < 0.3:
                steps.extend(self._marker())
        if rng.random() < 0.4:
            steps.append(step_roll())
        if self.delete_records and rng.random() < 0.3:
            # not the log end, where starts of Kafka alternately write and delete snapshots
            self.log_start_offset = rng.randint(self.log_start_offset, self.log_end_offset - 1)
            steps.append(step_delete_records(self.log_start_offset))
        return steps

    def pass_time(self) -> None:
        """Advance the clock by a random time, from 0 ms to more than the longest delete horizon."""
        retention_ms = min(int(self.configs["delete.retention.ms"]), DAY_MS)
        self.clock_ms += self.rng.choice([0, 1, 10_000, 15_000, retention_ms, retention_ms + 60_000, 9 * DAY_MS])

    def _produced(self) -> dict[str, Any]:
        """Draw a batch that a producer sends; the leader assigns its offsets."""
        count = self.rng.randint(1, 8)
        if self.huge_share and self.rng.random() < self.huge_share:
            count = int(self.configs["internal.segment.bytes"]) // 300
        records = [self._record() for _ in range(count)]
        producer = self._producer()
        step = step_batch(
            records,
            codec=self.rng.choice(self.codecs),
            producer=self._sequence(producer, len(records)),
            leader_epoch=self.leader_epoch,
            transactional=producer is not None and self.transactional,
        )
        self.log_end_offset += len(records)
        return step

    def _replicated(self) -> dict[str, Any]:
        """Draw a batch that a follower receives from a cleaned leader: with offset gaps, delete horizons, and both
        timestamp types.
        """
        rng = self.rng
        base_offset = offset = self.log_end_offset
        records = []
        for _ in range(rng.randint(1, 6)):
            offset += rng.choice([0, 0, 0, 1, 5])
            timestamp_ms, key, value, headers = self._record()
            sent_key = None if rng.random() < self.keyless_share else key
            records.append(Record(offset, timestamp_ms, sent_key, value, headers))
            offset += 1
        last_offset = offset - 1 + rng.choice([0, 0, 0, 2])
        append_time = self.clock_ms - rng.randint(0, 5000) if rng.random() < 0.3 else None
        producer = None if self.transactional else self._producer()
        step = step_batch(
            records,
            codec=rng.choice(self.codecs),
            producer=self._sequence(producer, last_offset - base_offset + 1),
            leader_epoch=self.leader_epoch,
            follower=True,
            base_offset=base_offset,
            last_offset=last_offset,
            log_append_time=append_time,
            delete_horizon_ms=self.clock_ms + rng.randint(-2, 2) * 30_000 if rng.random() < 0.3 else None,
        )
        self.log_end_offset = last_offset + 1
        return step

    def _legacy(self) -> dict[str, Any]:
        """Draw a message of an old leader: plain or a wrapper, perhaps after cleaning and conversion."""
        rng = self.rng
        offset = self.log_end_offset
        records = []
        for _ in range(rng.randint(1, 6)):
            offset += rng.choice([0, 0, 0, 1, 5])
            timestamp_ms, key, value, _ = self._record()
            sent_key = None if rng.random() < self.keyless_share else key
            records.append(Rec(offset, timestamp_ms, sent_key, value))
            offset += 1
        magic = rng.randint(0, 1)
        codec = rng.choice([0, 0, *self.legacy_codecs])
        if codec == 0:
            records = records[:1]
            data = encode_single(records[0], magic=magic, append_time=rng.random() < 0.3)
        else:
            mixed = rng.random() < 0.2
            data = encode_wrapper(
                records,
                codec,
                magic=magic,
                inner_magics=[rng.randint(0, 1) if mixed else magic for _ in records],
                append_time=self.clock_ms - rng.randint(0, 5000) if magic and rng.random() < 0.3 else None,
            )
        self.log_end_offset = records[-1].offset + 1
        return step_raw(data, self.leader_epoch)

    def _record(self) -> tuple[int, bytes, bytes | None, tuple[tuple[str, bytes | None], ...]]:
        rng = self.rng
        # The timestamp is often the current time, so that limits in ms are met exactly.
        timestamp_ms = self.clock_ms + (rng.randint(-20_000, 1_000) if rng.random() < 0.5 else 0)
        if rng.random() < 0.05:
            timestamp_ms = rng.choice([-1, -1, -1, 0, 1, timestamp_ms + 3_000 * DAY_MS])
        value: bytes | None = None
        if rng.random() >= self.tombstone_share:
            size = rng.choice([0, 1, 7, 30, 120])
            value = rng.randbytes(size) if rng.random() < 0.5 else (b"same text " * 12)[:size]
        headers: tuple[tuple[str, bytes | None], ...] = ()
        if rng.random() < self.header_share:
            headers = tuple(
                (rng.choice(HEADER_NAMES), rng.choice([None, b"", b"x", b"0123456789"]))
                for _ in range(rng.randint(1, 3))
            )
        return timestamp_ms, rng.choice(self.keys), value, headers

    def _producer(self) -> Producer | None:
        if not self.producers or self.rng.random() < 0.4:
            return None
        producer = self.rng.choice(self.producers)
        if self.rng.random() < 0.05 and not producer.in_transaction:
            producer.epoch += 1
            producer.next_sequence = 0
        return producer

    def _sequence(self, producer: Producer | None, count: int) -> tuple[int, int, int] | None:
        if producer is None:
            return None
        base_sequence = producer.next_sequence
        producer.next_sequence += count
        producer.in_transaction = self.transactional
        return producer.producer_id, producer.epoch, base_sequence

    def _marker(self) -> list[dict[str, Any]]:
        open_now = [producer for producer in self.producers if producer.in_transaction]
        if not open_now:
            return []
        producer = self.rng.choice(open_now)
        producer.in_transaction = False
        self.log_end_offset += 1
        kind = self.rng.choice(["COMMIT", "ABORT"])
        # in protocol version 2, the epoch of the marker is that of the next transaction
        if self.rng.random() < self.bumped_share:
            producer.epoch += 1
            producer.next_sequence = 0
            options = {"transaction_version": 2, "leader_epoch": self.leader_epoch}
        else:
            options = {"leader_epoch": self.leader_epoch}
        return [step_marker(kind, producer.producer_id, producer.epoch, self.clock_ms, **options)]


def random_traffic(
    rng: random.Random,
    *,
    codecs: Sequence[str] = CODECS,
    idempotent: bool = True,
    tombstones: bool = True,
    empty_keys: bool = True,
    headers: bool = True,
    log_append_time: bool | None = None,
    replicated: bool = True,
    keyless: bool = True,
    transactional: bool = False,
    delete_records: bool = True,
    far_jumps: bool = True,
    legacy: bool = False,
) -> Traffic:
    """Draw the traffic of one partition, with what the flags allow. If `log_append_time` is None, the timestamp type is
    drawn.
    """
    if log_append_time is None:
        log_append_time = rng.random() < 0.2
    keys = [f"key-{number}".encode() * rng.choice([1, 1, 4]) for number in range(rng.choice([2, 8, 30, 90]))]
    if empty_keys:
        keys.append(b"")
    return Traffic(
        rng=rng,
        configs=_configs(rng, log_append_time=log_append_time),
        codecs=["none"] if rng.random() < 0.35 and "none" in codecs else list(codecs),
        keys=keys,
        producers=[Producer(4000 + number) for number in range(rng.randint(1, 4))] if idempotent else [],
        producer_id_expiration_ms=rng.choice([DAY_MS, DAY_MS, 10_000]),
        tombstone_share=rng.choice([0.0, 0.1, 0.5]) if tombstones else 0.0,
        header_share=rng.choice([0.0, 0.3]) if headers else 0.0,
        follower_share=rng.choice([0.0, 0.2]) if replicated else 0.0,
        keyless_share=0.2 if keyless and rng.random() < 0.15 else 0.0,
        transactional=transactional,
        delete_records=delete_records and rng.random() < 0.3,
        far_jumps=far_jumps and rng.random() < 0.2,
        legacy_codecs=[CODECS.index(codec) for codec in codecs if codec in ("gzip", "snappy", "lz4")],
        legacy_share=rng.choice([0.3, 0.7, 1.0]) if legacy else 0.0,
        bumped_share=rng.choice([0.0, 0.5, 1.0]) if transactional else 0.0,
        huge_share=rng.choice([0.0, 0.0, 0.15]),
    )


def _configs(rng: random.Random, *, log_append_time: bool) -> dict[str, Any]:
    configs: dict[str, Any] = {
        # The limit is at least as large as the largest set that is appended at once.
        "internal.segment.bytes": rng.choice([2_500, 4_000, 10_000]),
        "index.interval.bytes": rng.choice([0, 1, 150, 600, 4096]),
        "segment.index.bytes": rng.choice([96, 240, 1_200, 65_536]),
        "delete.retention.ms": rng.choice([0, 1, 60_000, DAY_MS, DAY_MS, FOREVER_MS]),
        "cleanup.policy": rng.choice(["compact", "compact", "compact,delete"]),
        "retention.ms": -1,
    }
    if log_append_time:
        configs["message.timestamp.type"] = "LogAppendTime"
    if rng.random() < 0.25:
        configs["min.compaction.lag.ms"] = rng.choice([1, 15_000, 3_600_000])
    if rng.random() < 0.2:
        configs["max.compaction.lag.ms"] = rng.choice([3_600_000, 30 * DAY_MS])
    return configs
