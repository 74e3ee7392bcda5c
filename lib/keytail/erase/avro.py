"""Converts keys from Avro's JSON encoding to its binary encoding, without a prefix or in Confluent's wire format.

A schema is accepted only if each key has exactly one encoding, and JSON only if it states every field: a key whose
encoding differs from the producer's would not be found. This module converts the values, and fastavro encodes them.
fastavro's own JSON reader is not used, because it fills missing fields with defaults.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from keytail.cli.avro_schemas import parse_schema, read_schema, schema_id
from keytail.errors import UsageProblem
from keytail.extras import AVRO, require

_FLAG = "--key-schema"
_BOUNDS = {"int": 1 << 31, "long": 1 << 63, "float": (2 - 2**-23) * 2.0**127, "double": sys.float_info.max}
_BY_OTHER_FORMAT = "Encode the keys as the producer does, and give them with --key-format hex"


def read_encoders(given: Sequence[str]) -> list[tuple[str, Callable[[bytes], bytes]]]:
    """Return for each `[ID=]FILE` of --key-schema a description of a valid line, and the function that encodes a line.

    If a line does not match, the function raises ValueError, OverflowError or RecursionError, whose message may contain
    the key. Raises UsageProblem for an invalid argument, and for a schema that is invalid or not accepted.
    """
    require("--key-format avro", AVRO)
    by_id: dict[int | None, str] = {}
    for item in given:
        text, _, path = item.partition("=")
        number = schema_id(text) if path else None
        if number in by_id:
            raise UsageProblem(
                f"{_FLAG} is given twice {_with_id(number)}", remedy="Omit one of the two",
                slug="invalid-schema-argument",
            )
        by_id[number] = read_schema(_FLAG, item if number is None else path)
    return [(f"JSON for a key of the schema {_with_id(id_)}", _encoder(id_, text)) for id_, text in by_id.items()]


def _with_id(number: int | None) -> str:
    return "without an id" if number is None else f"with id {number}"


def _encoder(number: int | None, text: str) -> Callable[[bytes], bytes]:
    import fastavro  # noqa: PLC0415 (optional)

    named: dict[str, Any] = {}
    schema = parse_schema(lambda plain: fastavro.parse_schema(plain, named_schemas=named), text)
    _refuse_ambiguous(schema, named)
    frame = b"" if number is None else b"\0" + number.to_bytes(4, "big")

    def encode(line: bytes) -> bytes:
        given = json.loads(
            line.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant, parse_int=_whole_number
        )
        if given is None:
            raise ValueError("serializers write null as a record without a key")
        out = io.BytesIO()
        fastavro.schemaless_writer(out, schema, _value(schema, given, named), strict=True)
        return frame + out.getvalue()

    return encode


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(made := dict(pairs)) < len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _whole_number(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)


def _refuse_ambiguous(schema: Any, named: Mapping[str, Any]) -> None:
    """Raise UsageProblem if producers may have encoded the same key in different ways."""
    reasons = {
        "array": "a producer may divide an array into blocks in any way",
        "map": "a map has no order, and a producer may divide it into blocks in any way",
    }
    found = [why for kind in _types([schema, *named.values()]) if (why := reasons.get(kind))]
    if _type(schema) == "bytes":
        found.append("some serializers write bytes without their length")
    if found:
        raise UsageProblem(
            f"{_FLAG}: keys of this schema have several encodings: {found[0]}", remedy=_BY_OTHER_FORMAT,
            slug="ambiguous-avro-schema",
        )  # fmt: skip


def _types(schemas: Iterable[Any]) -> Iterator[str]:
    """Yield the types in parsed schemas; a reference to a named type yields the name."""
    for schema in schemas:
        if isinstance(schema, list):
            yield from _types(schema)
        else:
            yield _type(schema)
            if isinstance(schema, dict):
                yield from _types(field["type"] for field in schema.get("fields", ()))


def _type(schema: Any) -> Any:
    return schema["type"] if isinstance(schema, dict) else schema


def _value(schema: Any, given: Any, named: Mapping[str, Any]) -> Any:
    """Return a value in Avro's JSON encoding as a value that fastavro can encode. Raises ValueError if the value does
    not match the schema."""
    if isinstance(schema, list):
        return _of_union(schema, given, named)
    if isinstance(schema, str) and schema in named:
        schema = named[schema]
    match _type(schema):
        case "null" if given is None:
            return None
        case "boolean" if isinstance(given, bool):
            return given
        case "int" | "long" as name if type(given) is int and -_BOUNDS[name] <= given < _BOUNDS[name]:
            return given
        case "float" | "double" as name if type(given) in (int, float) and abs(float(given)) <= _BOUNDS[name]:
            return float(given)
        case "string" if isinstance(given, str):
            return given
        case "bytes" if isinstance(given, str):
            return given.encode("latin-1")
        case "fixed" if isinstance(given, str) and len(given) == schema["size"]:
            return given.encode("latin-1")
        case "enum" if given in schema["symbols"]:
            return given
        case "record" if isinstance(given, dict):
            fields = {field["name"]: field["type"] for field in schema["fields"]}
            if fields.keys() == given.keys():
                return {name: _value(fields[name], given[name], named) for name in fields}
    raise ValueError("the value does not match the schema")


def _of_union(branches: Sequence[Any], given: Any, named: Mapping[str, Any]) -> Any:
    """Return a union's value as fastavro expects it: None for null, (name of the branch, value) for `{"name": value}`.
    Raises ValueError if no branch matches."""
    if given is None and "null" in map(_type, branches):
        return None
    if isinstance(given, dict) and len(given) == 1:
        [(wanted, value)] = given.items()
        for branch in branches:
            name = branch.get("name", branch["type"]) if isinstance(branch, dict) else branch
            if name == wanted != "null":
                return name, _value(branch, value, named)
    raise ValueError("the value matches no type of the union")
