"""Compares Arrow batches of the latest records with a reference model in plain Python, without Spark."""

from __future__ import annotations

import random
import struct
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest

from keytail.export.columns import Undecodable, arrow_batches, decode
from keytail.export.formats import Format, FormatName, Formats
from keytail.export.latest import find_latest, latest_records, slices_of
from keytail.format.columns import BytesColumn
from keytail.log.fs import LOCAL
from keytail.run import arrow
from keytail.run.arrow import cut
from tests.export.test_latest import task_of
from tests.growing_log import GrowingLog
from tests.reference.batches import Rec
from tests.reference.encode import bytes_arrays


def batches_of(log: GrowingLog, formats: Formats | None = None) -> list[pa.RecordBatch]:
    task = task_of(log)
    [*pieces] = slices_of(task, find_latest(LOCAL, task), 300)
    return [item for piece in pieces for item in arrow_batches(latest_records(LOCAL, piece), 7, formats or Formats())]


def rows_of(log: GrowingLog, formats: Formats | None = None) -> list[dict[str, Any]]:
    return [row for batch in batches_of(log, formats) for row in batch.to_pylist()]


@pytest.mark.parametrize("most", [1, 400, 1 << 22])
def test_batches_of_random_logs_equal_the_model(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on how records are split into batches and joined."""
    monkeypatch.setattr(arrow, "BATCH_BYTES", most)
    monkeypatch.setattr(cut, "__defaults__", (most,))
    log = GrowingLog(random.Random(most), tmp_path / "logs", keys=40)
    log.grow(10, old=True)
    log.roll()
    log.grow(60)
    log.write()
    wanted = [
        {
            "partition": 7, "key": record.key, "value": record.value,
            "headers": [{"key": name.decode(), "value": value} for name, value in record.headers],
            "timestamp": None if record.timestamp == -1 else record.timestamp * 1000,
            "offset": record.offset, "leader_epoch": epoch, "deleted": False,
        }
        for record, epoch in sorted(log.latest().values(), key=lambda pair: pair[0].offset)
    ]  # fmt: skip
    found = []
    for batch in batches_of(log):
        batch.validate(full=True)
        times = batch.column("timestamp").cast(pa.int64()).to_pylist()
        found += [row | {"timestamp": at} for row, at in zip(batch.to_pylist(), times, strict=True)]
        assert batch.nbytes < 2 * most + 1000 or batch.num_rows == 1
    assert found == wanted


def test_small_batches_are_combined(tmp_path: Path) -> None:
    log = GrowingLog(random.Random(1), tmp_path / "logs")
    for number in range(50):
        log.append_records([Rec(number, 5, b"%d" % number, b"x")])
    log.write()
    assert [batch.num_rows for batch in batches_of(log)] == [50]


def test_header_names_are_those_that_a_consumer_receives(tmp_path: Path) -> None:
    log = GrowingLog(random.Random(1), tmp_path / "logs")
    log.append_records([Rec(0, 5, b"k", b"x", ((b"a\xff", None), (b"", b"")))])
    log.write()
    [row] = rows_of(log)
    assert row["headers"] == [{"key": "a\ufffd", "value": None}, {"key": "", "value": b""}]


def test_a_timestamp_outside_the_range_of_a_table_is_an_error(tmp_path: Path) -> None:
    log = GrowingLog(random.Random(3), tmp_path / "logs")
    log.append_records([Rec(0, 2**62, b"k", b"x")])
    log.write()
    with pytest.raises(Undecodable, match=r"timestamp 4611686018427387904 is out of range.*offset 0"):
        rows_of(log)


SOME_UUID = b"12345678-9ABC-def0-1234-56789abcdef0"
DECODERS: dict[
    str, tuple[Callable[[bytes], Any], list[bytes], list[bytes]]
] = {  # decoder, valid values, invalid values
    "binary": (bytes, [b"", b"\xff\0"], []),
    "utf8": (bytes.decode, [b"", "grün €".encode()], [b"\xff", b"\xc3"]),
    "json": (bytes.decode, [b"[]"], [b"\xff"]),
    "uuid": (lambda data: str(uuid.UUID(data.decode())) and data.decode(), [SOME_UUID], [b"", SOME_UUID[1:], b"\xff"]),
    "short": (lambda data: struct.unpack(">h", data)[0], [b"\0\1", b"\xff\xfe"], [b"", b"\0", b"\0\0\0"]),
    "int": (lambda data: struct.unpack(">i", data)[0], [b"\0\0\1\0", b"\x80\0\0\0"], [b"\0\0\0", bytes(8)]),
    "long": (lambda data: struct.unpack(">q", data)[0], [bytes(8), b"\xff" * 8], [bytes(4)]),
    "float": (lambda data: struct.unpack(">f", data)[0], [struct.pack(">f", 1.5)], [bytes(8)]),
    "double": (lambda data: struct.unpack(">d", data)[0], [struct.pack(">d", -1.1)], [bytes(4)]),
}


@pytest.mark.parametrize("name", [name for name in get_args(FormatName) if name != "avro"])
def test_formats_are_those_of_the_serializers_of_kafka(name: FormatName) -> None:
    """Nulls remain null, and the first invalid record is reported."""
    decoder, good, bad = DECODERS[name]
    rng = random.Random(name)
    values = [rng.choice([*good, None]) for _ in range(200)]
    offsets = np.arange(1000, 1000 + len(values))
    array = decode(BytesColumn(*bytes_arrays(values)), Format(name), offsets, "value")
    array.validate(full=True)
    assert array.to_pylist() == [None if value is None else decoder(value) for value in values]
    for data in bad:
        for at in (0, 77, 199):
            broken = [*values[:at], data, *values[at + 1 :], data]
            with pytest.raises(Undecodable) as reported:
                decode(BytesColumn(*bytes_arrays(broken)), Format(name), np.arange(1000, 1201), "value")
            assert reported.value.offset == 1000 + at
            assert "--value-format" in str(reported.value)
