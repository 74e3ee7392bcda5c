"""Which messages of magic 0 and 1 are read and refused by Kafka's classes, keytail and the reference model."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from keytail.format import legacy
from tests.chance import chance
from tests.format import test_legacy as cases
from tests.interop.kafka import Kafka
from tests.reference.batches import Rec, decode_records
from tests.reference.legacy import decode_any_log, decode_message, encode_message, encode_single, encode_wrapper

pytestmark = pytest.mark.interop

CODECS = ("none", "gzip", "snappy", "lz4")
SHAPES = [(magic, codec, time) for magic in (0, 1) for codec in CODECS for time in (None, 1234) if magic or not time]


def text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def built(kafka: Kafka, records: Sequence[Rec], magic: int, codec: str, append_time: int | None) -> bytes:
    """Return the bytes that Kafka's MemoryRecordsBuilder writes."""
    wire = [{"o": r.offset, "t": r.timestamp, "k": text(r.key), "v": text(r.value)} for r in records]
    request: dict[str, Any] = {"command": "legacy_build", "magic": magic, "codec": codec, "records": wire}
    if append_time is not None:
        request["log_append_time"] = append_time
    return base64.b64decode(kafka.request(request)["bytes"])


def kafkas(kafka: Kafka, data: bytes) -> list[dict[str, Any]]:
    """Return the batches that Kafka's MemoryRecords reads, with `records` as Rec."""
    batches: list[dict[str, Any]] = kafka.request({"command": "legacy_read", "bytes": text(data)})["batches"]
    for batch in batches:
        batch["records"] = [
            Rec(offset, time, *(None if part is None else base64.b64decode(part) for part in parts))
            for offset, time, *parts in batch["records"]
        ]
    return batches


def ours(data: bytes) -> tuple[legacy.LegacyBatch, list[Rec]]:
    raw = np.frombuffer(data, np.uint8)
    batch = legacy.summarize(raw, 0, len(raw))
    block = legacy.transcode(raw, 0, len(raw), batch.base_offset, batch.base_timestamp_ms).tobytes()
    return batch, decode_records(block, batch.record_count, batch.base_offset, batch.base_timestamp_ms)


def random_records(rng: random.Random, count: int) -> list[Rec]:
    offset, records = rng.choice([0, 7, 2**40]), []
    for _ in range(count):
        key, value = (
            rng.choice([None, b"", b"k%d" % rng.randrange(9), rng.randbytes(300), b"same " * 9000]) for _ in range(2)
        )
        records.append(Rec(offset, rng.choice([-1, 0, 1700000000000 + rng.randrange(99)]), key, value))
        offset += rng.choice([1, 1, 1, 3, 70])
    return records


@pytest.mark.parametrize(("magic", "codec", "append_time"), SHAPES)
def test_messages_built_by_kafka_are_read_as_kafka_reads_them(
    kafka: Kafka, magic: int, codec: str, append_time: int | None
) -> None:
    rng = chance()
    for _ in range(12):
        data = built(kafka, random_records(rng, rng.randint(1, 12)), magic, codec, append_time)
        theirs = kafkas(kafka, data)
        models = decode_any_log(data)
        assert len(theirs) == len(models)
        for their, expected in zip(theirs, models, strict=True):
            batch, records = ours(data[expected.position : expected.position + expected.size])
            assert records == their["records"] == list(expected.records)
            assert (batch.base_offset, batch.last_offset) == (their["base_offset"], their["last_offset"])
            assert batch.max_timestamp_ms == their["max_timestamp"]
            assert bool(batch.attributes & 8) == (their["timestamp_type"] == "LogAppendTime")
            assert CODECS[batch.attributes & 7] == codec
            assert their["valid"] and their["inner_valid"]


@pytest.mark.parametrize(("magic", "codec", "append_time"), SHAPES)
def test_kafka_reads_the_messages_that_the_model_writes(
    kafka: Kafka, magic: int, codec: str, append_time: int | None
) -> None:
    rng = chance()
    for _ in range(12):
        records = random_records(rng, rng.randint(1, 12))
        if codec == "none":
            stamped = [Rec(r.offset, append_time or r.timestamp, r.key, r.value) for r in records]
            data = b"".join(encode_single(r, magic=magic, append_time=append_time is not None) for r in stamped)
            assert data == built(kafka, records, magic, codec, append_time)
        else:
            data = encode_wrapper(records, CODECS.index(codec), magic=magic, append_time=append_time)
        theirs = kafkas(kafka, data)
        assert [rec for batch in theirs for rec in batch["records"]] == [
            rec for batch in decode_any_log(data) for rec in batch.records
        ]
        assert all(batch["valid"] and batch["inner_valid"] for batch in theirs)


ODD = {
    "both magics inside": encode_wrapper(cases.K3, 1, inner_magics=[0, 1, 0]),
    "both magics inside, append time": encode_wrapper(cases.K3, 1, inner_magics=[0, 1, 0], append_time=5000),
    "magic 1 inside 0": encode_wrapper(cases.K3, 2, magic=0, inner_magics=[1, 1, 0]),
    "distances from elsewhere": encode_wrapper(cases.K3, 1, offset=1000, inner_offsets=[900, 902, 907]),
    "offset 0": encode_wrapper(cases.K3, 1, offset=0, inner_offsets=[0, 1, 2]),
    "magic 0 ends after its last": encode_wrapper(cases.K3, 1, magic=0, offset=60),
    "wrong lz4 header checksum": encode_wrapper(cases.K3, 3, magic=0, wrong_lz4_checksum=True),
    "right lz4 header checksum": encode_wrapper(cases.K3, 3, magic=0, wrong_lz4_checksum=False),
    "bytes after the value": encode_message(5, b"k", b"v", tail=b"more"),
    "truncated last one inside": encode_wrapper([cases.K], 1, inner=cases.INNER + cases.INNER[:-1]),
    "attribute bits": encode_message(5, b"k", b"v", magic=0, attributes=0xF8),
    "key around others": encode_message(57, b"key", encode_wrapper(cases.K3, 1)[34:], attributes=1),
}


@pytest.mark.parametrize("name", ODD)
def test_unusual_messages_are_read_as_kafka_reads_them(kafka: Kafka, name: str) -> None:
    (their,) = kafkas(kafka, ODD[name])
    batch, records = ours(ODD[name])
    assert "problem" not in their
    assert records == their["records"] == list(decode_message(ODD[name]).records)
    assert (batch.base_offset, batch.max_timestamp_ms) == (their["base_offset"], their["max_timestamp"])
    # Kafka takes an outer offset of 0 for the last offset, although inner messages have higher ones.
    assert batch.last_offset == (2 if name == "offset 0" else their["last_offset"])


# Messages that keytail refuses, and Kafka's reader accepts, because it does not verify checksums. Kafka's cleaner would
# compute new ones.
ACCEPTED_BY_KAFKA = {
    "checksum",
    "checksum inside",
    "magic inside",
    "negative magic inside",
    "descending offsets",
    "offset below the absolute ones",
    "negative offset",
    "negative offset inside",
    "long span",
    "long span, absolute",
    "extreme offsets",
}


@pytest.mark.parametrize("name", cases.WRONG)
def test_kafka_accepts_only_the_listed_messages_that_keytail_refuses(kafka: Kafka, name: str) -> None:
    data = cases.WRONG[name]
    data = data[:8] + struct.pack(">i", len(data) - 12) + data[12:]
    (their,) = kafkas(kafka, data)
    assert ("problem" not in their) == (name in ACCEPTED_BY_KAFKA), their
    assert their["valid"] == (zlib.crc32(data[16:]) == int.from_bytes(data[12:16], "big"))
    if name == "checksum inside":
        assert their["valid"] and not their["inner_valid"]
