"""Decodes Avro in Confluent's wire format into columns, and compares these with the values that were encoded."""

from __future__ import annotations

import datetime
import io
import json
import random
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest

from keytail.errors import UsageProblem
from keytail.export import driver as export_driver
from keytail.export.avro import AvroSchemas, read_schemas
from keytail.export.columns import Undecodable, decode
from keytail.export.command import format_of
from keytail.export.formats import Format, Formats
from keytail.format.columns import BytesColumn
from keytail.run.spark.engine import SparkEngine
from tests.export.test_columns import bytes_arrays
from tests.export.test_driver import GrowingLog, run, statuses
from tests.reference.batches import Rec

PLACE = {"type": "record", "name": "Place", "fields": [{"name": "x", "type": "double"}, {"name": "y", "type": "float"}]}
ORDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "order", "type": "int"},
        {"name": "text", "type": ["null", "string"], "default": None},
        {"name": "raw", "type": "bytes"},
        {"name": "paid", "type": "boolean"},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["OPEN", "DONE"]}},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 4}},
        {"name": "lines", "type": {"type": "array", "items": ["null", "long"]}},
        {"name": "tags", "type": {"type": "map", "values": "string"}},
        {"name": "home", "type": PLACE},
        {"name": "away", "type": ["null", "Place"]},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "then", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]},
        {"name": "clock", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "key", "type": {"type": "string", "logicalType": "uuid"}},
    ],
}
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def plain(schema: Any) -> Any:
    """Return the schema without logical types other than decimal: their values are encoded as numbers or text."""
    if isinstance(schema, list):
        return [plain(item) for item in schema]
    if isinstance(schema, dict):
        drop = schema.get("logicalType") not in (None, "decimal")
        return {name: plain(value) for name, value in schema.items() if not (drop and name == "logicalType")}
    return schema


def framed(schema: Any, value: Any, number: int = 17) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(plain(schema)), value)
    return b"\0" + number.to_bytes(4, "big") + out.getvalue()


def schemas(*of: Any) -> AvroSchemas:
    return AvroSchemas(tuple((17 + number, json.dumps(item)) for number, item in enumerate(of)))


def decoded(values: Sequence[bytes | None], of: AvroSchemas) -> Any:
    offsets = np.arange(1000, 1000 + len(values))
    array = decode(BytesColumn(*bytes_arrays(list(values))), Format("avro", of), offsets, "value")
    array.validate(full=True)
    assert array.type == of.arrow_type
    return array


def random_order(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an order as it is encoded, and as it is expected to be decoded."""
    def place() -> dict[str, float]:
        return {"x": rng.random(), "y": rng.randrange(100) / 4}

    millis, micros = rng.randrange(-(10**12), 10**13), rng.randrange(10**16)
    given = {
        "id": rng.randrange(-(2**63), 2**63), "order": rng.randrange(-(2**31), 2**31),
        "text": rng.choice([None, "", "grün"]), "raw": rng.randbytes(rng.randrange(5)), "paid": rng.random() < 0.5,
        "state": rng.choice(["OPEN", "DONE"]), "hash": rng.randbytes(4),
        "lines": [rng.choice([None, rng.randrange(9)]) for _ in range(rng.randrange(4))],
        "tags": {f"t{n}": f"v{rng.randrange(9)}" for n in range(rng.randrange(3))}, "home": place(),
        "away": rng.choice([None, place()]), "price": Decimal(rng.randrange(-(10**9), 10**9)).scaleb(-2),
        "day": rng.randrange(-20000, 40000), "at": millis, "then": rng.choice([None, micros]),
        "clock": rng.randrange(86_400_000), "key": "123e4567-e89b-12d3-a456-426614174000",
    }  # fmt: skip
    wanted = {
        **given,
        "tags": list(given["tags"].items()),
        "day": datetime.date(1970, 1, 1) + datetime.timedelta(days=given["day"]),
        "at": EPOCH + datetime.timedelta(milliseconds=millis),
        "then": None if given["then"] is None else EPOCH + datetime.timedelta(microseconds=micros),
    }
    return given, wanted


def test_every_type_is_read_back() -> None:
    rng = random.Random(3)
    pairs = [random_order(rng) for _ in range(300)]
    values = [None if number % 7 == 0 else framed(ORDER, given) for number, (given, _) in enumerate(pairs)]
    found = decoded(values, schemas(ORDER)).to_pylist()
    assert found == [None if number % 7 == 0 else wanted for number, (_, wanted) in enumerate(pairs)]


def test_records_of_other_schemas_are_read_with_the_first_schema() -> None:
    new = {"type": "record", "name": "R", "fields": [
        {"name": "a", "type": "long"}, {"name": "b", "type": "string", "default": "none"},
    ]}  # fmt: skip
    old = {"type": "record", "name": "R", "fields": [{"name": "gone", "type": "int"}, {"name": "a", "type": "int"}]}
    values = [framed(new, {"a": 1, "b": "x"}), framed(old, {"gone": 5, "a": 2}, number=18)]
    assert decoded(values, schemas(new, old)).to_pylist() == [{"a": 1, "b": "x"}, {"a": 2, "b": "none"}]
    assert schemas(new, old).digest == schemas(new).digest != schemas(old).digest
    assert decoded([framed("string", "as it is")], schemas("string")).to_pylist() == ["as it is"]


GOOD = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "string"}]}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not in Confluent's wire format"),
        (b"\0\0\0\0", "not in Confluent's wire format"),
        (b"\1" + framed(GOOD, {"a": "x"})[1:], "not in Confluent's wire format"),
        (framed(GOOD, {"a": "x"}, number=99), "schema id 99, for which no schema was given"),
        (framed(GOOD, {"a": "x"})[:-1], "does not match its schema"),
        (framed(GOOD, {"a": "x"}) + b"\0", "1 bytes follow the record"),
        (framed(GOOD, {"a": "x"})[:5] + b"\x04\xff\xff", "does not match its schema"),
    ],
)
def test_an_invalid_record_is_reported(data: bytes, why: str) -> None:
    values = [framed(GOOD, {"a": "x"}), None, data, framed(GOOD, {"a": "y"}), data]
    with pytest.raises(Undecodable, match=why) as reported:
        decoded(values, schemas(GOOD))
    assert reported.value.offset == 1002


def test_a_value_that_a_table_cannot_contain_is_reported() -> None:
    schema = {"type": "long", "logicalType": "timestamp-millis"}
    values = [framed(schema, 5), framed(schema, 2**62)]
    with pytest.raises(Undecodable, match="cannot be stored in a table") as reported:
        decoded(values, schemas(schema))
    assert reported.value.offset == 1001


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no json", "invalid Avro schema"),
        ('{"type": "recrod", "name": "R"}', "invalid Avro schema"),
        ('["null", "int", "string"]', "a union of 2 types"),
        ('"null"', "Avro type null"),
        ('{"type": "record", "name": "R", "fields": [{"name": "next", "type": ["null", "R"]}]}', "contains itself"),
        ('{"type": "record", "name": "R", "fields": []}', "no fields"),
        ('{"type": "bytes", "logicalType": "decimal", "precision": 40}', "decimals of 40 digits"),
    ],
)
def test_schemas_without_a_table_type_are_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "s.avsc").write_text(text)
    with pytest.raises(UsageProblem, match="--value-schema: ") as reported:
        read_schemas("--value-schema", [f"17={tmp_path / 's.avsc'}"])
    assert why in reported.value.what


@pytest.mark.parametrize(
    ("name", "given", "why"),
    [
        ("avro", None, "must be given together"),
        ("json", ["17=x"], "must be given together"),
        ("avro", ["x.avsc"], "expected ID=FILE"),
        ("avro", ["-1=x.avsc"], "expected ID=FILE"),
        ("avro", ["17=/nowhere.avsc"], "cannot be read"),
    ],
)
def test_wrong_flags_of_formats_are_refused(name: str, given: list[str] | None, why: str) -> None:
    with pytest.raises(UsageProblem, match=why):
        format_of("key", name, given)


@pytest.mark.spark
def test_a_table_of_avro_keys_and_values_is_exported(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are compared by their bytes, as by the broker's cleaner: one id encoded with two schema ids is two keys."""
    monkeypatch.setattr(export_driver, "session_of_run", lambda *_, **__: SparkEngine(spark))
    log = GrowingLog(random.Random(1), tmp_path / "logs")
    key = {"type": "record", "name": "K", "fields": [{"name": "id", "type": "long"}]}
    item, other = framed(key, {"id": 1}), framed(key, {"id": 1}, number=18)
    value, wanted = random_order(random.Random(4))
    log.append_records([Rec(0, 5, item, framed(ORDER, value)), Rec(1, 5, other, framed(ORDER, value))])
    log.write()
    formats = Formats(Format("avro", schemas(key, key)), Format("avro", schemas(ORDER)))
    assert statuses(run(tmp_path, log, formats=formats)) == [("exported", "full")]
    log.append_records([Rec(2, 5, item, None), Rec(3, 5, other, framed(ORDER, {**value, "id": 7}))])
    log.write()
    assert statuses(run(tmp_path, log, formats=formats)) == [("exported", "incremental")]
    [row] = spark.read.format("delta").load(str(tmp_path / "lake" / "t")).collect()
    assert (row.offset, bytes(row.key_bytes), row.key.id) == (3, other, 1)
    found = row.value.asDict(recursive=True)
    assert found["id"] == 7
    assert {name: found[name] for name in ("order", "text", "state", "home", "price", "day", "clock")} == {
        name: wanted[name] for name in ("order", "text", "state", "home", "price", "day", "clock")
    }
    refused = run(tmp_path, log, formats=Formats(Format("avro", schemas(key)), Format("avro", schemas(GOOD))))
    assert statuses(refused) == [("refused", "")]
    assert "the table was exported with" in refused[0].error
