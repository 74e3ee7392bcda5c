"""Batches encoded from columns are compared with those of Kafka's builder, and read by Kafka's reader. The partitions
of keys are also compared. KEYTAIL_SEED repeats a run.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from keytail.errors import Refused
from keytail.format.codecs.table import CODECS
from keytail.format.encode import Encoding, encode_batches
from keytail.kernels.murmur2 import partition_of_keys
from tests.chance import SEED, cases
from tests.format.test_encode import columns_of
from tests.interop.kafka import Kafka, KafkaError
from tests.reference.batches import Rec
from tests.reference.encode import bytes_arrays

pytestmark = pytest.mark.interop

LOGS = 40
LEADER_EPOCH = 6


@pytest.fixture
def rng() -> random.Random:
    return random.Random(SEED)


def text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def from_text(data: str | None) -> bytes | None:
    return None if data is None else base64.b64decode(data)


def random_bytes(rng: random.Random) -> bytes | None:
    n = rng.choice([0, 1, 3, 20, 62, 63, 64, 65, rng.randrange(300), rng.randrange(300)])
    return None if rng.random() < 0.15 else rng.randbytes(n // 2) + b"x" * (n - n // 2)


def random_records(rng: random.Random, base_offset: int) -> list[Rec]:
    time, records = rng.choice([-1, 0, 10**12, 2**63 - 1]), []
    for i in range(rng.randrange(1, 120)):
        headers = [(f"h{j}" * rng.randrange(3), random_bytes(rng)) for j in range(rng.choice([0, 0, 0, 1, 4, 70]))]
        value = b"large" * 4000 if rng.random() < 0.01 else random_bytes(rng)
        pairs = tuple((name.encode(), content) for name, content in headers)
        records.append(Rec(base_offset + i, time, random_bytes(rng), value, pairs))
        step = rng.choice([0, 1, -1, 70, -70, 10**6, -(2**40), 2**62])
        time = min(max(-1, time + step), 2**63 - 1)
    return records


def ours(records: Sequence[Rec], **options: Any) -> bytes:
    encoding = Encoding(LEADER_EPOCH, **options)
    steps = encode_batches(columns_of(records), encoding, records[0].offset)
    return b"".join(data.tobytes() for data, _ in steps)


def kafkas(kafka: Kafka, records: Sequence[Rec], batch_bytes: int) -> bytes:
    wire = [
        {"t": r.timestamp, "k": text(r.key), "v": text(r.value), "h": [[text(k), text(v)] for k, v in r.headers]}
        for r in records
    ]
    request = {"command": "encode", "records": wire, "base_offset": records[0].offset, "batch_bytes": batch_bytes}
    return base64.b64decode(kafka.request(request | {"leader_epoch": LEADER_EPOCH})["bytes"])


def read_by_kafka(kafka: Kafka, data: bytes) -> tuple[list[dict[str, Any]], list[Rec]]:
    answer = kafka.request({"command": "decode", "bytes": text(data)})
    assert answer["valid_bytes"] == len(data)
    records = [
        Rec(offset, time, from_text(key), from_text(value), tuple((k.encode(), from_text(v)) for k, v in headers))
        for offset, time, key, value, headers, _ in answer["records"]
    ]
    return answer["batches"], records


def test_encoded_batches_have_the_bytes_of_kafkas_builder(kafka: Kafka, rng: random.Random) -> None:
    cut = 0
    for _ in cases(LOGS, lambda: cut > LOGS / 4):
        records = random_records(rng, rng.choice([0, 5, 2**40, 2**62]))
        batch_bytes = rng.choice([1, 100, 500, 16384, rng.randrange(60, 2000)])
        data = ours(records, batch_bytes=batch_bytes, part_bytes=rng.choice([1, 3000, 10**6]))
        assert data == kafkas(kafka, records, batch_bytes), batch_bytes
        batches, back = read_by_kafka(kafka, data)
        assert back == records
        cut += 1 < len(batches) < len(records)


@pytest.mark.parametrize("codec", range(1, len(CODECS)))
def test_kafka_reads_back_every_codec(kafka: Kafka, rng: random.Random, codec: int) -> None:
    for _ in range(LOGS // 4):
        records = random_records(rng, rng.choice([0, 5, 2**62]))
        batch_bytes = rng.choice([1, 500, 16384, 10**6])
        level = rng.choice({"gzip": [None, -1, 1, 9], "lz4": [None, 1, 9, 17], "zstd": [None, -7, 1, 9]}.get(
            CODECS[codec], [None]
        ))  # fmt: skip
        batches, back = read_by_kafka(kafka, ours(records, codec=codec, level=level, batch_bytes=batch_bytes))
        assert back == records
        plain, _ = read_by_kafka(kafka, kafkas(kafka, records, batch_bytes))
        for batch, like in zip(batches, plain, strict=True):
            assert batch.pop("codec") == CODECS[codec]
            assert batch | {"bytes": 0, "codec": "none"} == like | {"bytes": 0}


def test_kafka_reads_back_append_times(kafka: Kafka) -> None:
    records = [Rec(9 + i, 1234, b"k", b"v" * i) for i in range(50)]
    batches, back = read_by_kafka(kafka, ours(records, batch_bytes=400, log_append_time=True))
    assert {batch["timestamp_type"] for batch in batches} == {"LogAppendTime"}
    assert len(batches) > 1
    assert back == records


def test_both_refuse_timestamps_below_minus_one(kafka: Kafka) -> None:
    record = Rec(0, -2, b"k", b"v")
    with pytest.raises(KafkaError, match="Invalid negative timestamp"):
        kafkas(kafka, [record], 100)
    with pytest.raises(Refused, match="below -1"):
        ours([record])


def test_keys_have_the_partitions_that_kafka_gives_them(kafka: Kafka, rng: random.Random) -> None:
    keys = [b"", b"\xff" * 7, *(rng.randbytes(rng.randrange(40)) for _ in range(2000))]
    for n in (1, 12, 2**31 - 1):
        request = {"command": "murmur2", "keys": [text(key) for key in keys], "partitions": n}
        data, offsets, valid = bytes_arrays(keys)
        assert partition_of_keys(data, offsets, ~valid, n).tolist() == kafka.request(request)["partitions"]
        assert partition_of_keys(data, offsets, np.ones(len(keys), bool), n).max() == -1
