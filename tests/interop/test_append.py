"""The same sets of batches are appended to Kafka's UnifiedLog and to PartitionLog. After each step, all files have the
same bytes.

Settings and traffic are random: batches of producers, coordinators and leaders, some of them sent twice, out of
sequence, too large or damaged; rolls, starts and stops. KEYTAIL_APPEND_LOGS sets the number of logs, and KEYTAIL_SEED
selects them.
"""

from __future__ import annotations

import base64
import os
import random
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.format.producers import parse_snapshot
from keytail.log.append.partition_log import PartitionLog
from keytail.log.append.rolling import MAX_LONG, AppendConfig
from tests.chance import SEED, cases
from tests.interop.kafka import CLOCK_MS, Kafka
from tests.log.invariants import check_log
from tests.reference.batches import Rec, encode_batch, encode_marker
from tests.reference.codecs import GZIP, LZ4, SNAPPY, ZSTD

LOGS = int(os.environ.get("KEYTAIL_APPEND_LOGS", "60"))
HOUR_MS = 3_600_000
MAX_MESSAGE_BYTES = 700
# Kafka may roll the segment before it throws one of these exceptions, but not before it throws any other.
AFTER_A_ROLL = ("InvalidProducerEpochException", "InvalidTxnStateException", "OutOfOrderSequenceException")


class Drawn(random.Random):
    """Returns the jitter that Kafka drew."""

    def __init__(self) -> None:
        super().__init__()
        self.jitter_ms = 0

    def randrange(self, *_: Any) -> int:  # type: ignore[override]
        return self.jitter_ms


@dataclass
class Sender:
    """A producer: its id and epoch, its next sequence, and the batches that it has sent since the last start."""

    producer_id: int
    epoch: int = 0
    sequence: int = 0
    coordinator_epoch: int = 0
    in_transaction: bool = False
    sent: list[bytes] = field(default_factory=list)


@dataclass
class Writer:
    """Writes the steps for one log, and tracks the log end offset after each."""

    rng: random.Random
    config: AppendConfig
    transactional: bool
    large_sets: bool
    steps: list[dict[str, Any]] = field(default_factory=list)
    clock_ms: int = CLOCK_MS
    start: int = 0
    end: int = 0
    epoch: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    def write(self) -> None:
        rng = self.rng
        # The order in a snapshot depends on the slots of a broker's hash table, which some ids share. None of 64 slots
        # has more than seven ids: with eight, keytail's order may differ
        # (test_snapshots_of_producers_that_share_a_slot_differ_only_in_order).
        ids = [1, 2, 17, 33, 4001, 2**31, 2**32 + 1, 2**40 + 16, 65536, 131072, *range(90, 110)]
        ids = rng.choice([ids, range(0, 40_000, 1000), range(0, 28 * 16, 16), range(40)])
        self.senders = [Sender(producer_id) for producer_id in rng.sample(ids, rng.randint(1, rng.choice([16, 26])))]
        self.start = self.end = rng.choice([0, 0, 0, 1, 5000, 2**40])
        self.open()
        for _ in range(rng.randint(5, 60)):
            self.step()
            if rng.random() < 0.03:
                self.restart()
        self.steps.append({"close": 1})

    def step(self) -> None:
        rng = self.rng
        if rng.random() < 0.25:
            self.clock_ms += rng.choice([0, 1, 10, 1000, 20_000, HOUR_MS])
            self.steps.append({"clock_ms": self.clock_ms})
        if rng.random() < 0.15:
            self.epoch += rng.choice([1, 1, 3])
        kinds = ["leader"] * 8 + ["follower"] * 4 + ["marker"] * (4 if self.transactional else 0)
        kinds += ["crowd"] if self.large_sets else []
        kinds += ["outside"] if self.transactional else []
        kinds += ["again", "new epoch", "gap", "old", "large", "damaged", "below", "larger than a segment"]
        kinds += ["roll", "flush"]
        kind = rng.choice(kinds)
        self.seen[kind] += 1
        getattr(self, "do_" + kind.replace(" ", "_"))()

    def restart(self) -> None:
        self.clock_ms += self.rng.choice([0, 1000, HOUR_MS])
        self.steps.append({"close": 1})
        if self.rng.random() < 0.3:
            self.start = self.rng.randint(self.start, self.end)  # a DeleteRecords request has the same effect
            for sender in self.senders:
                sender.in_transaction = False  # the snapshot with this producer may be removed
        self.open()
        for sender in self.senders:
            sender.sent.clear()

    def open(self) -> None:
        self.steps.append({"open": self.clock_ms, "log_start_offset": self.start})

    def give(self, data: bytes, kind: str, leader_epoch: int | None = None) -> None:
        epoch = self.epoch if leader_epoch is None else leader_epoch
        self.steps.append({"batches": base64.b64encode(data).decode(), "as": kind, "leader_epoch": epoch})

    def records(self, base: int, *, gaps: bool = False) -> list[Rec]:
        rng = self.rng
        offset, found = base, []
        for _ in range(rng.randint(1, 4)):
            stamp = self.clock_ms + rng.choice([0, 0, -5000, rng.randint(-20_000, 5), HOUR_MS * 30])
            stamp = stamp if rng.random() < 0.95 else -1
            found.append(Rec(offset, stamp, b"k%d" % rng.randrange(9), rng.randbytes(rng.choice([0, 5, 40]))))
            offset += 1 + (rng.choice([0, 0, 3, 2**29]) if gaps and rng.random() < 0.2 else 0)
        return found

    def batch(self, records: list[Rec], sender: Sender | None, leader_epoch: int) -> bytes:
        options: dict[str, Any] = {}
        if sender is not None:
            options = {
                "producer_id": sender.producer_id,
                "producer_epoch": sender.epoch,
                "base_sequence": sender.sequence,
                "transactional": self.transactional,
            }
            sender.sequence = (sender.sequence + records[-1].offset - records[0].offset + 1) % 2**31
            sender.in_transaction = self.transactional
        codec = self.rng.choice([0, 0, 0, GZIP, SNAPPY, LZ4, ZSTD])
        return encode_batch(records, codec=codec, leader_epoch=leader_epoch, **options)

    def sender(self) -> Sender | None:
        return self.rng.choice(self.senders) if self.rng.random() < 0.6 else None

    def do_leader(self) -> None:
        sender = self.sender()
        records = self.records(0)
        data = self.batch(records, sender, leader_epoch=-1)
        if sender is not None:
            sender.sent = [*sender.sent, data][-5:]
        self.end += len(records)
        self.give(data, "leader")

    def do_follower(self) -> None:
        """Append a set of batches of a leader, with offset gaps, markers and increasing epochs."""
        parts = []
        for _ in range(self.rng.randint(1, 5) if self.large_sets else 1):
            if self.rng.random() < 0.1:
                self.end += self.rng.choice([1, 50, 2**31 - 1, 2**31, 2**33]) if not parts else 1
            if parts and self.rng.random() < 0.1:
                self.epoch += 1
            if self.transactional and self.rng.random() < 0.4:
                parts.append(self.marker(self.end) or self.plain())
            else:
                parts.append(self.plain())
        self.give(b"".join(parts), "follower")

    def do_crowd(self) -> None:
        """Append a set of so many producers that the size of a broker's hash table doubles."""
        senders = self.rng.sample(self.senders, min(self.rng.choice([7, 8, 12, 13, 14]), len(self.senders)))
        records = [Rec(self.end + i, self.clock_ms, None, b"") for i in range(len(senders))]
        batches = [self.batch([r], s, self.epoch) for r, s in zip(records, senders, strict=True)]
        for sender in senders:
            sender.sent.clear()
        self.end += len(senders)
        self.give(b"".join(batches), "follower")

    def plain(self) -> bytes:
        records = self.records(self.end, gaps=not self.large_sets)
        sender = self.sender() if records[-1].offset - records[0].offset < 1000 else None
        self.end = records[-1].offset + 1
        data = self.batch(records, sender, self.epoch)
        if sender is not None:
            # The batch may have offset gaps. If sent again, it would be recognised as a duplicate by its sequences.
            sender.sent.clear()
        return data

    def marker(self, offset: int) -> bytes | None:
        open_now = [sender for sender in self.senders if sender.in_transaction]
        if not open_now:
            return None
        sender = self.rng.choice(open_now)
        sender.in_transaction = False
        sender.coordinator_epoch += self.rng.random() < 0.2
        if self.rng.random() < 0.3:  # protocol version 2
            sender.epoch += 1
            sender.sequence = 0
            sender.sent.clear()
        self.end += 1
        return encode_marker(
            offset, self.clock_ms, commit=self.rng.random() < 0.4, producer_id=sender.producer_id,
            producer_epoch=sender.epoch, coordinator_epoch=sender.coordinator_epoch, leader_epoch=self.epoch,
        )  # fmt: skip

    def do_marker(self) -> None:
        data = self.marker(0)
        if data is not None:
            self.give(data, "coordinator")

    def do_again(self) -> None:
        """Send a batch that its producer has sent before; a broker recognises the last five of each producer."""
        sender = self.rng.choice(self.senders)
        if sender.sent:
            self.give(self.rng.choice(sender.sent), "leader")

    def do_new_epoch(self) -> None:
        """Send two batches with the same sequence numbers, each in a new producer epoch: the second is not a duplicate.
        """
        sender, records = self.rng.choice(self.senders), self.records(0)
        for _ in range(2):
            sender.epoch, sender.sequence = sender.epoch + 1, 0
            sender.sent = [self.batch(records, sender, leader_epoch=-1)]
            self.end += len(records)
            self.give(sender.sent[0], "leader")

    def do_outside(self) -> None:
        """Send a batch outside of the open transaction of its producer."""
        open_now = [sender for sender in self.senders if sender.in_transaction]
        if open_now:
            sender, kind = self.rng.choice(open_now), self.rng.choice(["leader", "follower"])
            records = self.records(self.end if kind == "follower" else 0)
            data = encode_batch(records, producer_id=sender.producer_id, producer_epoch=sender.epoch,
                                base_sequence=sender.sequence, leader_epoch=self.known_epoch())  # fmt: skip
            self.refused(data, kind)

    def do_gap(self) -> None:
        sender = self.rng.choice(self.senders)
        if sender.sent:
            data = encode_batch(self.records(0), producer_id=sender.producer_id, producer_epoch=sender.epoch,
                                base_sequence=sender.sequence + 1, transactional=self.transactional)  # fmt: skip
            self.give(data, "leader", self.known_epoch())

    def do_old(self) -> None:
        sender = self.rng.choice(self.senders)
        if sender.sent and sender.epoch:
            data = encode_batch(self.records(0), producer_id=sender.producer_id, producer_epoch=sender.epoch - 1,
                                base_sequence=2**20, transactional=self.transactional)  # fmt: skip
            self.give(data, "leader", self.known_epoch())

    def known_epoch(self) -> int:
        """Return an epoch that is already recorded: Kafka records a new epoch even if it then refuses the batch."""
        for step in reversed(self.steps):
            if step.get("as") in ("leader", "coordinator", "follower") and step.get("good", True):
                self.epoch = step["leader_epoch"]
                break
        return self.epoch

    def do_large(self) -> None:
        self.refused(encode_batch([Rec(0, 5, b"k", self.rng.randbytes(MAX_MESSAGE_BYTES))]), "leader")

    def do_larger_than_a_segment(self) -> None:
        """Send a batch larger than a segment, if its epoch was recorded since the log was opened: an epoch without
        batches is lost when the log is opened.
        """
        since = next(n for n, step in enumerate(reversed(self.steps)) if "open" in step)
        if any(step.get("as") == "leader" and step.get("good", True) for step in self.steps[len(self.steps) - since :]):
            size = self.config.segment_bytes
            data = encode_batch([Rec(self.end, 5, b"k", bytes(size))], leader_epoch=self.known_epoch())
            self.refused(data, "follower")

    def do_damaged(self) -> None:
        data = bytearray(encode_batch(self.records(self.end), leader_epoch=self.epoch))
        data[self.rng.randrange(21, len(data))] ^= 1 << self.rng.randrange(8)
        if self.end:
            self.refused(bytes(data), "follower")

    def do_below(self) -> None:
        if self.end:
            records = self.records(self.rng.randint(max(self.end - 5, 0), self.end - 1))
            self.refused(encode_batch(records, leader_epoch=self.epoch), "follower")

    def refused(self, data: bytes, kind: str) -> None:
        self.give(data, kind)
        self.steps[-1]["good"] = False

    def do_roll(self) -> None:
        self.steps.append({"roll": 1})

    def do_flush(self) -> None:
        self.steps.append({"flush": 1})


def random_config(rng: random.Random, *, large_sets: bool) -> AppendConfig:
    # Kafka fails after the write if a set of several batches exceeds an index.
    index_bytes = 4000 if large_sets else rng.choice([12, 24, 30, 40, 60, 100, 1000])
    return AppendConfig(
        segment_bytes=rng.choice([1500, 2500, 6000]) if large_sets else rng.choice([800, 1500, 6000]),
        segment_ms=rng.choice([1, 5000, HOUR_MS, 604_800_000]),
        segment_jitter_ms=rng.choice([0, 0, 1000, HOUR_MS]),
        index_bytes=index_bytes,
        index_interval_bytes=rng.choice([0, 1, 150, 400]),
        max_message_bytes=MAX_MESSAGE_BYTES,
        max_compaction_lag_ms=rng.choice([MAX_LONG, MAX_LONG, 2000, HOUR_MS]),
        compact=rng.random() < 0.8,
        flush_messages=rng.choice([MAX_LONG, MAX_LONG, 1, 20]),
        preallocate=rng.random() < 0.3,
        log_append_time=rng.random() < 0.2,
    )


def kafka_names(config: AppendConfig) -> dict[str, Any]:
    return {
        "internal.segment.bytes": config.segment_bytes,
        "segment.ms": config.segment_ms,
        "segment.jitter.ms": config.segment_jitter_ms,
        "segment.index.bytes": config.index_bytes,
        "index.interval.bytes": config.index_interval_bytes,
        "max.message.bytes": config.max_message_bytes,
        "max.compaction.lag.ms": config.max_compaction_lag_ms,
        "cleanup.policy": "compact" if config.compact else "delete",
        "flush.messages": config.flush_messages,
        "preallocate": str(config.preallocate).lower(),
        "message.timestamp.type": "LogAppendTime" if config.log_append_time else "CreateTime",
    }


def files(path: Path) -> dict[str, list[int]]:
    return {file.name: [file.stat().st_size, zlib.crc32(file.read_bytes())] for file in path.iterdir()}


class Replay:
    """Runs the steps in keytail, and compares the results with Kafka's."""

    def __init__(self, path: Path, config: AppendConfig, seen: Counter[str]) -> None:
        path.mkdir(parents=True)
        self.path, self.config, self.seen = path, config, seen
        self.drawn = Drawn()
        self.log: PartitionLog | None = None
        self.clock_ms = 0
        self.kafka_files: set[str] = set()
        self.epoch_refused = False

    def play(self, steps: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
        for number, (step, answer) in enumerate(zip(steps, answers, strict=True)):
            try:
                self.drawn.jitter_ms = answer.get("jitter_ms", 0)
                self.one(step, answer)
                self.compare(files(self.path), answer["files"])
                self.kafka_files = set(answer["files"])
            except Exception as problem:
                reported = {key: value for key, value in step.items() if key != "batches"}
                problem.add_note(f"step {number} {reported}, Kafka: {answer}")
                raise
        if self.log is not None:
            self.log.abandon()

    def compare(self, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        """Compare the results of a step.

        A broker records a new epoch even if it then refuses the set; keytail records it when it accepts a set of that
        epoch.
        """
        if ours == theirs:
            self.epoch_refused = False
        elif self.epoch_refused:
            epochs = "leader-epoch-checkpoint"
            assert {**ours, epochs: None} == {**theirs, epochs: None}
        else:
            assert ours == theirs

    def one(self, step: dict[str, Any], answer: dict[str, Any]) -> None:
        if "open" in step:
            self.clock_ms = step["open"]
            start = step["log_start_offset"]
            self.log = PartitionLog.open(
                str(self.path), self.config, now_ms=self.clock_ms, rng=self.drawn, log_start_offset=start
            )
            assert self.log.log_start_offset == start
            return
        log = self.log
        assert log is not None
        if "close" in step:
            closed = log.close()
            assert closed.recovery_point == answer["recovery_point"]
            starts_late = log.log_start_offset > log.segments[0]
            assert closed.log_start_offset == (log.log_start_offset if starts_late else None)
            return
        if "clock_ms" in step:
            self.clock_ms = step["clock_ms"]
        elif "roll" in step:
            log.roll(now_ms=self.clock_ms)
        elif "flush" in step:
            log.flush(now_ms=self.clock_ms)
        else:
            self.append(log, step, answer)
        check_log(log)
        self.seen["segments"] = max(self.seen["segments"], len(log.segments))
        assert log.log_end_offset == answer["log_end_offset"]
        assert log.recovery_point == answer["recovery_point"]

    def append(self, log: PartitionLog, step: dict[str, Any], answer: dict[str, Any]) -> None:
        data = base64.b64decode(step["batches"])
        epoch = step["leader_epoch"]
        try:
            if step["as"] == "follower":
                appended = log.append_as_follower(data, leader_epoch=epoch, now_ms=self.clock_ms)
            else:
                appended = log.append(data, leader_epoch=epoch, now_ms=self.clock_ms)
        except KeytailError as refusal:
            assert isinstance(refusal, Refused | CorruptLog)
            assert "refused" in answer, refusal
            self.seen["refused " + answer["refused"]] += 1
            makes_new = any(name.endswith(".log") and name not in self.kafka_files for name in answer["files"])
            self.epoch_refused |= answer["refused"] in AFTER_A_ROLL
            renews = f"{log.segments[-1]:020d}.index" not in answer["files"]
            if answer["refused"] in AFTER_A_ROLL and (makes_new or renews):
                # A broker rolls the segment before it refuses the batch; keytail refuses first (APPEND.md).
                self.seen["refused after a roll"] += 1
                log.roll(now_ms=self.clock_ms)
            return
        assert "refused" not in answer
        if appended.duplicates:
            self.seen["duplicates"] += 1
            (same,) = appended.duplicates
            assert (same.first_offset, same.last_offset) == (answer["first_offset"], answer["last_offset"])
        else:
            assert (appended.first_offset, appended.last_offset) == (answer["first_offset"], answer["last_offset"])


@pytest.mark.interop
def test_random_logs_have_the_bytes_of_kafka_after_every_step(kafka: Kafka, fast_dir: Path) -> None:
    only = os.environ.get("KEYTAIL_APPEND_LOG")
    print(f"KEYTAIL_SEED={SEED} KEYTAIL_APPEND_LOGS={LOGS}", flush=True)
    seen: Counter[str] = Counter()
    started = time.monotonic()
    wanted = ["duplicates", "refused after a roll", "transactions aborted", "refused OutOfOrderSequenceException",
              "refused InvalidTxnStateException", "new epoch"]  # fmt: skip
    numbers = cases(LOGS, lambda: LOGS < 60 or all(seen[name] for name in wanted))
    for number in numbers if only is None else [int(only)]:
        rng = random.Random(f"{SEED}-{number}")
        large_sets = rng.random() < 0.5
        writer = Writer(rng, random_config(rng, large_sets=large_sets), rng.random() < 0.6, large_sets, seen=seen)
        writer.write()
        request = {
            "command": "append_watched",
            "dir": str(fast_dir / f"kafka-{number}" / "log-0"),
            "clock_ms": CLOCK_MS,
            "configs": {name: str(value) for name, value in kafka_names(writer.config).items()},
            "steps": writer.steps,
        }
        try:
            answers = kafka.request(request)["steps"]
            seen["steps"] += len(answers)
            seen["transactions aborted"] += any(name.endswith(".txnindex") for name in answers[-1]["files"])
            Replay(fast_dir / f"ours-{number}" / "log-0", writer.config, seen).play(writer.steps, answers)
        except Exception as problem:
            problem.add_note(f"KEYTAIL_SEED={SEED} KEYTAIL_APPEND_LOG={number}, {writer.config}")
            raise
    print(f"{dict(sorted(seen.items()))} in {time.monotonic() - started:.1f} s", flush=True)


@pytest.mark.interop
def test_snapshots_of_producers_that_share_a_slot_differ_only_in_order(kafka: Kafka, fast_dir: Path) -> None:
    """The order in the snapshot differs from Kafka's; log/append/APPEND.md explains this under "Producers"."""
    ids = [4096 * i for i in (3, 1, 4, 15, 9, 2, 6, 5, 8, 7, 10, 11)]
    batches = [
        encode_batch([Rec(0, CLOCK_MS, b"k", b"v")], producer_id=i, producer_epoch=0, base_sequence=0) for i in ids
    ]
    steps: list[dict[str, Any]] = [{"open": CLOCK_MS}]
    steps += [{"batches": base64.b64encode(data).decode(), "as": "leader", "leader_epoch": 0} for data in batches]
    theirs, ours = fast_dir / "kafka-crowd" / "log-0", fast_dir / "ours-crowd" / "log-0"
    kafka.request({"command": "append_watched", "dir": str(theirs), "clock_ms": CLOCK_MS, "configs": {},
                   "steps": [*steps, {"close": 1}]})  # fmt: skip
    ours.mkdir(parents=True)
    with PartitionLog.open(str(ours), now_ms=CLOCK_MS) as log:
        log.append(b"".join(batches), leader_epoch=0, now_ms=CLOCK_MS)
    name = f"{len(ids):020d}.snapshot"
    wanted, found = (parse_snapshot((path / name).read_bytes()) for path in (theirs, ours))
    assert {entry.producer_id: entry for entry in found} == {entry.producer_id: entry for entry in wanted}
    assert found != wanted, "the orders are equal, so this is not a departure"
    again = kafka.request({"command": "append_watched", "dir": str(ours), "clock_ms": CLOCK_MS, "configs": {},
                           "steps": [*steps, {"close": 1}]})  # fmt: skip
    offsets = [answer["first_offset"] for answer in again["steps"][1:-1]]
    assert offsets == list(range(len(ids))), "a broker that loads keytail's snapshot must recognise every batch"
