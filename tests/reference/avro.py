"""Avro's binary encoding of values in Avro's JSON encoding, by the specification. Types are spelled out in full."""

from __future__ import annotations

import struct
from typing import Any


def _number(value: int) -> bytes:
    value = value * 2 if value >= 0 else -value * 2 - 1
    out = []
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def encode(schema: Any, value: Any) -> bytes:
    if isinstance(schema, list):
        name = "null" if value is None else next(iter(value))
        at = [branch.get("name") or branch["type"] for branch in schema].index(name)
        return _number(at) + encode(schema[at], None if value is None else value[name])
    kind = schema["type"]
    if kind == "null":
        return b""
    if kind == "boolean":
        return bytes([value])
    if kind in ("int", "long"):
        return _number(value)
    if kind in ("float", "double"):
        return struct.pack("<f" if kind == "float" else "<d", value)
    if kind == "enum":
        return _number(schema["symbols"].index(value))
    if kind == "record":
        return b"".join(encode(field["type"], value[field["name"]]) for field in schema["fields"])
    data = value.encode("utf-8" if kind == "string" else "latin-1")
    return data if kind == "fixed" else _number(len(data)) + data
