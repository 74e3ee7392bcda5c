"""Keys that are given as JSON, and erased in Avro's binary encoding."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import fastavro
import pytest

from keytail.erase.avro import read_encoders
from keytail.erase.keys import read_keys
from keytail.errors import UsageProblem
from tests.chance import chance
from tests.reference.avro import encode

USER = {
    "type": "record",
    "name": "User",
    "namespace": "org.example",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"], "default": None},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 2}},
        {"name": "other", "type": ["null", "Hash"]},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"], "default": "A"}},
    ],
}
KEY = {"id": 64, "name": {"string": "é"}, "hash": "\0ÿ", "other": {"org.example.Hash": "ab"}, "day": -1, "kind": "B"}
# By hand: 64, the second type, two bytes of text, the fixed, the second type and its bytes, -1, the second symbol.
KEY_BYTES = bytes.fromhex("8001 02 04c3a9 00ff 02 6162 01 02")


@pytest.fixture
def schema_file(tmp_path: Path) -> Any:
    def write(schema: Any, name: str = "key.avsc") -> Path:
        (tmp_path / name).write_text(json.dumps(schema))
        return tmp_path / name

    return write


def encoded(argument: str, line: str) -> bytes:
    [(_, function)] = read_encoders([argument])
    return function(line.encode())


def test_keys_have_the_bytes_that_serializers_write(schema_file: Any) -> None:
    path = schema_file(USER)
    assert encoded(str(path), json.dumps(KEY)) == KEY_BYTES
    assert encoded(f"17={path}", json.dumps(KEY, ensure_ascii=False)) == b"\0\0\0\0\x11" + KEY_BYTES
    path = schema_file("string")
    assert encoded(f"{2**31 - 1}={path}", '"foo"') == b"\0\x7f\xff\xff\xff\x06foo"
    assert encoded(str(schema_file(["null", "string"])), '{"string": "a"}') == b"\x02\x02a"
    node = {"type": "record", "name": "N", "fields": [{"name": "n", "type": ["null", "N"]}]}
    assert encoded(str(schema_file(node)), '{"n": {"N": {"n": null}}}') == b"\x02\x00"
    assert encoded(str(schema_file([node, "long", "null"])), '{"N": {"n": {"N": {"n": null}}}}') == b"\x00\x02\x00"
    assert encoded(str(schema_file("double")), "-0") == bytes(7) + b"\x80"


def random_schema(rng: random.Random, depth: int = 0) -> tuple[Any, Any, Any]:
    """Return a schema, a value in Avro's JSON encoding, and the value that fastavro reads."""
    name = f"N{rng.getrandbits(60)}"
    text = "".join(chr(rng.choice([0, 65, 127, 200, 255])) for _ in range(rng.randrange(4)))
    kind = rng.choice(["boolean", "int", "long", "float", "double", "string", "bytes", "fixed", "enum"])
    if depth < 3 and rng.random() < 0.5:
        kind = rng.choice(["record", "union"])
    if kind == "union":
        schema, given, read = random_schema(rng, 9)
        branch = schema.get("name") or schema["type"]
        branches = [schema, {"type": "null"}]
        rng.shuffle(branches)
        return (branches, {branch: given}, read) if rng.random() < 0.7 else (branches, None, None)
    if kind == "record":
        parts = {f"f{i}": random_schema(rng, depth + 1) for i in range(rng.randrange(4))}
        fields = [{"name": field, "type": part[0]} for field, part in parts.items()]
        schema = {"type": "record", "name": name, "fields": fields}
        return schema, {f: part[1] for f, part in parts.items()}, {f: part[2] for f, part in parts.items()}
    data = text.encode("latin-1")
    whole = rng.choice([0, 1, -1, 2**31 - 1, -(2**31), rng.randint(-999, 999)])
    values: dict[str, tuple[Any, Any]] = {
        "boolean": (whole > 0, whole > 0),
        "int": (whole, whole),
        "long": (whole * 2**32, whole * 2**32),
        "float": (whole % 999 / 4, whole % 999 / 4),
        "double": (whole / 3, whole / 3),
        "string": (text + "€", text + "€"),
        "bytes": (text, data),
        "fixed": (text, data),
        "enum": ("B", "B"),
    }
    more = {"fixed": {"name": name, "size": len(text)}, "enum": {"name": name, "symbols": ["A", "B"]}}
    return {"type": kind, **more.get(kind, {})}, *values[kind]


def test_random_keys_are_encoded_as_by_the_reference_and_are_decoded_to_the_same(schema_file: Any) -> None:
    rng = chance()
    for _ in range(100):
        schema, given, read = random_schema(rng)
        if given is None or (isinstance(schema, dict) and schema["type"] == "bytes"):
            continue
        made = encoded(str(schema_file(schema)), json.dumps(given))
        assert made == encode(schema, given), (schema, given)
        assert fastavro.schemaless_reader(io.BytesIO(made), schema, None) == read


WITHOUT_DEFAULT = {key: value for key, value in KEY.items() if key != "name"}


@pytest.mark.parametrize(
    ("schema", "line"),
    [
        *((USER, json.dumps(KEY | changed)) for changed in (
            {"id": "secret"}, {"id": 2**63}, {"id": True}, {"id": 1.0}, {"name": "secret"}, {"name": {"null": None}},
            {"name": {"bytes": "secret"}}, {"hash": "secret"}, {"hash": "€€"}, {"other": {"Hash": "ab"}},
            {"kind": "C"}, {"kind": None}, {"secret": 1}, {"day": 2**31},
        )),
        (USER, json.dumps(WITHOUT_DEFAULT)),
        (USER, json.dumps(KEY)[:-1] + ', "id": 1}'),
        ("string", '"secret\\ud800"'),
        ("string", "secret"),
        ("string", "1"),
        ("string", '"secret" "secret"'),
        ("double", "NaN"),
        ("double", "1e999"),
        ("double", "1" + "0" * 400),
        ("float", "1e300"),
        ("long", "-0"),
        ("long", "[" * 100_000),
        (["null", "string"], "null"),
        ("int", '"\xff"'),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_json_that_does_not_match_is_refused_by_its_line(schema_file: Any, schema: Any, line: str) -> None:
    file = io.BytesIO(line.encode("latin-1" if "\xff" in line else "utf-8"))
    with pytest.raises(UsageProblem, match="line 1 of F is not JSON for a key of the schema with id 17") as error:
        read_keys(file, "F", "avro", [f"17={schema_file(schema)}"])
    assert "secret" not in repr((error.value, error.value.__cause__))


def test_keys_with_several_encodings_are_refused(schema_file: Any) -> None:
    inner = {"type": "record", "name": "I", "fields": [{"name": "a", "type": {"type": "array", "items": "int"}}]}
    outer = {"type": "record", "name": "O", "fields": [{"name": "i", "type": ["null", inner]}]}
    for schema in (outer, {"type": "map", "values": "int"}, "bytes", {"type": "bytes"}, ["null", outer]):
        with pytest.raises(UsageProblem, match="several encodings") as error:
            read_encoders([f"17={schema_file(schema)}"])
        assert "--key-format hex" in error.value.remedy


def test_a_line_is_a_key_of_each_schema(schema_file: Any) -> None:
    given = [str(schema_file("string")), f"7={schema_file('string')}", f"8={schema_file('string')}"]
    assert read_keys(io.BytesIO(b'"a"\n"b"\n'), "F", "avro", given).count == 6
    with pytest.raises(UsageProblem, match="line 3 of F has the same key as line 1"):
        read_keys(io.BytesIO(b'"a"\n"b"\n "a"\n'), "F", "avro", given)
    nothing = str(schema_file({"type": "record", "name": "Empty", "fields": []}))
    with pytest.raises(UsageProblem, match="line 1 of F is the empty key"):
        read_keys(io.BytesIO(b"{}\n"), "F", "avro", [nothing])


@pytest.mark.parametrize(
    ("key_format", "arguments", "message"),
    [
        ("avro", [], "must be given together"),
        ("hex", ["{}"], "must be given together"),
        ("avro", ["{}", "{}"], "given twice without an id"),
        ("avro", ["7={}", "7={}"], "given twice with id 7"),
        ("avro", ["x={}"], "cannot be read"),
    ],
)
def test_invalid_arguments_are_refused(schema_file: Any, key_format: Any, arguments: list[str], message: str) -> None:
    path = schema_file("string")
    with pytest.raises(UsageProblem, match=message):
        read_keys(io.BytesIO(b'"a"\n'), "F", key_format, [item.format(path) for item in arguments])
