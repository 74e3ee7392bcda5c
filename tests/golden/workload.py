"""The contents of the golden topics: their configuration, and the traffic that generate.py sends, drawn from a seed.

Times are fixed (November 2023), except in topics that need the current time. The broker adds its own ids and times.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

START_MS = 1_700_000_000_000
FOREVER_MS = "315360000000"  # ten years
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
_WORDS = "paid packed shipped returned refunded north south blue green small huge".split()

Record = tuple[int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]


@dataclass(frozen=True)
class Topic:
    """A topic as it is created. `batches` is the number of batches for each of its partitions."""

    name: str
    what: str
    configs: Mapping[str, str]
    partitions: int = 1
    batches: int = 90
    codecs: Sequence[str] = ("none",)
    keys: int = 150
    tombstones: float = 0.02  # share of records
    producers: Sequence[str] = ("plain",)  # names that begin with "idempotent" are idempotent
    flavour: str = "orders"  # orders, odd or keyless
    step_ms: int = 500
    first_ms: int = START_MS
    sent_to: Sequence[int] = (1,)  # the starts of the broker in which `batches` are sent; its cleaner runs in start 0


def _compact(segment_bytes: int, **more: str) -> dict[str, str]:
    configs = {"cleanup.policy": "compact", "internal.segment.bytes": str(segment_bytes)}
    return configs | {name.replace("_", "."): value for name, value in more.items()}


def topics(now_ms: int) -> list[Topic]:
    """Return all topics with generated traffic, in the order in which they are created."""
    cleaned = {"min_cleanable_dirty_ratio": "0.01", "file_delete_delay_ms": "0"}
    every_codec = [
        Topic(codec, f"every batch {codec}", _compact(16_384), codecs=(codec,), batches=110) for codec in CODECS[1:]
    ]
    return [
        Topic(
            "cleaned-horizon-ahead",
            "cleaned once by the broker's cleaner; its tombstones are retained for ten years; then more traffic",
            _compact(32_768, delete_retention_ms=FOREVER_MS, **cleaned),
            tombstones=0.1,
            sent_to=(0, 1),
        ),
        Topic(
            "cleaned-horizon-past",
            "cleaned once by the broker's cleaner; its tombstones may be removed now; then more traffic",
            _compact(32_768, delete_retention_ms="1000", **cleaned),
            tombstones=0.1,
            codecs=("none", "zstd"),
            sent_to=(0, 1),
        ),
        Topic("none", "uncompressed", _compact(49_152), partitions=2, batches=140, keys=400),
        *every_codec,
        Topic("mixed-codecs", "each batch its own codec", _compact(16_384), codecs=CODECS, batches=120),
        Topic("tombstones", "half of the records are tombstones", _compact(16_384), tombstones=0.5),
        Topic(
            "odd-records",
            "headers (null, empty, repeated, not ASCII), empty keys, empty and null values, large ones",
            _compact(65_536),
            codecs=("none", "lz4"),
            flavour="odd",
            keys=60,
            batches=60,
        ),
        Topic(
            "idempotent",
            "three idempotent producers that continue after a restart, and one whose sequence wraps to 0",
            _compact(24_576),
            producers=("idempotent-1", "idempotent-2", "idempotent-3"),
            codecs=("none", "none", "snappy"),
            sent_to=(1, 2),
        ),
        Topic(
            "append-time",
            "timestamps given by the broker",
            _compact(24_576, message_timestamp_type="LogAppendTime"),
            codecs=("none", "gzip"),
        ),
        Topic(
            "compact-and-delete",
            "both policies, segments rolled by time, log start offset raised by DeleteRecords",
            {"cleanup.policy": "compact,delete", "retention.ms": "-1", "segment.ms": "3600000"},
            step_ms=20_000,
        ),
        Topic(
            "recent",
            "nothing is old enough to be compacted for ten years",
            _compact(24_576, min_compaction_lag_ms=FOREVER_MS),
            first_ms=now_ms - 3_600_000,
            batches=40,
        ),
        Topic("one-segment", "only the active segment", {"cleanup.policy": "compact"}, batches=10),
        Topic("empty", "never written to", {"cleanup.policy": "compact"}, batches=0),
        Topic(
            "events",
            "delete policy, half of the records without a key",
            {"cleanup.policy": "delete", "internal.segment.bytes": "24576", "retention.ms": "-1"},
            flavour="keyless",
            batches=50,
        ),
    ]


@dataclass
class Batch:
    """A batch to send: its producer and codec."""

    producer: str
    codec: str
    records: list[Record] = field(default_factory=list)


def traffic(topic: Topic, partition: int, seed: int, start: int) -> Iterator[Batch]:
    """Yield the batches of one partition for one start of the broker."""
    rng = random.Random(f"{seed} {topic.name} {partition} {start}")
    clock_ms = topic.first_ms + (start - topic.sent_to[0]) * 40_000_000
    for number in range(topic.batches):
        pick = rng.randrange(len(topic.producers))
        # A producer keeps its codec, as real ones do; if there is only one producer, each batch draws a codec.
        codec = topic.codecs[pick] if len(topic.producers) > 1 else rng.choice(topic.codecs)
        batch = Batch(topic.producers[pick], codec)
        for _ in range(rng.choice((1, 1, 2, 5, 20, 60))):
            clock_ms += rng.randrange(2 * topic.step_ms)
            jitter_ms = rng.randrange(-5 * topic.step_ms, 1) if rng.random() < 0.1 else 0
            batch.records.append(_record(topic, rng, clock_ms + jitter_ms, number))
        yield batch


def _record(topic: Topic, rng: random.Random, timestamp_ms: int, number: int) -> Record:
    # Squaring the draw makes some keys frequent, so that they recur within a batch; others occur once in the whole log.
    key: bytes | None = f"user-{int(topic.keys * rng.random() ** 2):05d}".encode()
    words = " ".join(rng.choices(_WORDS, k=rng.randrange(4, 14)))
    value: bytes | None = f'{{"batch":{number},"total":{rng.randrange(10**6)},"note":"{words}"}}'.encode()
    headers: tuple[tuple[str, bytes | None], ...] = ()
    if rng.random() < topic.tombstones:
        value = None
    if topic.flavour == "keyless" and rng.random() < 0.5:
        key = None
    if topic.flavour == "odd":
        key, value = _odd_key(rng, key), _odd_value(rng, value)
        headers = tuple(_odd_header(rng) for _ in range(rng.choice((0, 0, 1, 2, 4))))
    return timestamp_ms, key, value, headers


def _odd_key(rng: random.Random, usual: bytes | None) -> bytes | None:
    return rng.choice((usual, usual, usual, b"", b"\x00", b"\xff\x00\xff", "ключ".encode(), b"long " * 300))


def _odd_value(rng: random.Random, usual: bytes | None) -> bytes | None:
    return rng.choice((usual, usual, usual, usual, usual, b"", None, bytes(range(256)), b"large " * rng.randrange(900)))


def _odd_header(rng: random.Random) -> tuple[str, bytes | None]:
    name = rng.choice(("trace", "trace", "", "größe", "h" * 200))
    return name, rng.choice((None, b"", b"1", b"\x00\xff", b"value " * 20))
