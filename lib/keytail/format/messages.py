"""Decodes Kafka's generated messages from a table of their fields, and prints them as JSON (COORDINATOR.md,
"Messages").

A schema is one line of fields `name:type`, followed by `?` if null is allowed, `/3+` or `/1` for the versions that have
the field, `#0` for the tag of a tagged field, `=-1` or `=null` for its default; `[type]` is an array, `(fields)` a
structure. Invalid data raises ValueError with the reason.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

_NUMBERS = {
    "bool": struct.Struct(">?"),
    "int8": struct.Struct(">b"),
    "int16": struct.Struct(">h"),
    "uint16": struct.Struct(">H"),
    "int32": struct.Struct(">i"),
    "int64": struct.Struct(">q"),
    "float64": struct.Struct(">d"),
}
_LENGTHS = {"string": _NUMBERS["int16"], "bytes": _NUMBERS["int32"], "array": _NUMBERS["int32"]}
_ABSENT: Any = {"string": "", "bytes": b"", "uuid": bytes(16), "bool": False}
_TOKEN = re.compile(r"[\[\]()]|[A-Za-z0-9]+:|[a-z0-9]+|\?|/[0-9]+\+?|#[0-9]+|=-?[a-z0-9]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
NEVER = 2**15  # larger than every version of a message
_TO_ESCAPE = re.compile('["\\\\\x00-\x1f]')


class Uuid(bytes):
    """A 16-byte id, printed as Kafka prints topic ids."""

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(self).decode().rstrip("=")


class Json(str):
    """Text that is JSON."""


@dataclass
class Buffer:
    """Bytes, and the position up to which the bytes were read."""

    data: bytes
    at: int = 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ValueError(f"a field declares {size} bytes, but {len(self.data) - self.at} are left")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, layout: struct.Struct) -> Any:
        return layout.unpack(self.take(layout.size))[0]

    def uvarint(self) -> int:
        value = 0
        for shift in range(0, 35, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFFFFFF
        raise ValueError("a varint is longer than 5 bytes")


@dataclass(frozen=True)
class Field:
    """A field of a schema, in versions `first_version` to `last_version`. `tag` is None for an untagged field.

    `kind` is the name of a scalar type, "array" or "struct"; `parts` is the item of an array, or the fields of a
    struct.
    """

    name: str
    kind: str
    parts: tuple[Field, ...] = ()
    nullable: bool = False
    first_version: int = 0
    last_version: int = NEVER
    tag: int | None = None
    default: Any = None

    def is_in(self, version: int) -> bool:
        return self.first_version <= version <= self.last_version


@dataclass(frozen=True)
class Message:
    """The schema of a message. From version `flexible_from` on, lengths are compact and fields may be tagged."""

    fields: tuple[Field, ...]
    flexible_from: int

    def read(self, data: bytes, version: int, start: int = 0) -> dict[str, Any]:
        """Return the fields by name, in the schema's order; bytes after them are ignored, as in Kafka."""
        return self.take(Buffer(data, start), version)

    def take(self, buffer: Buffer, version: int) -> dict[str, Any]:
        """Return the fields of the next message in the buffer, as `read` does, and advance the buffer to the end of the
        message."""
        return _structure(buffer, self.fields, version, version >= self.flexible_from)

    def take_untagged(self, buffer: Buffer, version: int) -> dict[str, Any]:
        """Return the untagged fields by name; tagged fields and everything after them remain unread in the buffer."""
        return _untagged(buffer, self.fields, version, version >= self.flexible_from)


class Definition(NamedTuple):
    """The name of a message, its latest version, its first flexible version, and its fields as a schema line."""

    name: str
    newest_version: int
    flexible_from: int
    fields: str

    def message(self) -> Message:
        tokens = _TOKEN.findall(self.fields)
        assert "".join(tokens) == "".join(self.fields.split()), self.fields
        fields, rest = _fields(tokens)
        assert not rest, self.fields
        return Message(fields, self.flexible_from)


def _fields(tokens: list[str]) -> tuple[tuple[Field, ...], list[str]]:
    fields = []
    while tokens and tokens[0] != ")":
        name = tokens[0][:-1]
        kind, parts, tokens = _type(tokens[1:])
        facts: dict[str, Any] = {}
        while tokens and tokens[0][0] in "?/#=":
            mark, text = tokens[0][0], tokens[0][1:]
            tokens = tokens[1:]
            if mark == "?":
                facts["nullable"] = True
            elif mark == "/":
                facts["first_version"] = int(text.rstrip("+"))
                facts["last_version"] = NEVER if text.endswith("+") else int(text)
            elif mark == "#":
                facts["tag"] = int(text)
            else:
                facts["default"] = None if text == "null" else int(text)
        if "default" not in facts:
            # A tagged array that may be null is nevertheless empty by default, unless `=null` follows.
            is_null = facts.get("nullable") and not (kind == "array" and "tag" in facts)
            facts["default"] = None if is_null else _ABSENT.get(kind, [] if kind == "array" else 0)
        fields.append(Field(name, kind, parts, **facts))
    return tuple(fields), tokens


def _type(tokens: list[str]) -> tuple[str, tuple[Field, ...], list[str]]:
    if tokens[0] == "[":
        kind, parts, rest = _type(tokens[1:])
        return "array", (Field("", kind, parts),), rest[1:]
    if tokens[0] == "(":
        parts, rest = _fields(tokens[1:])
        return "struct", parts, rest[1:]
    return tokens[0], (), tokens[1:]


def _structure(buffer: Buffer, fields: tuple[Field, ...], version: int, flexible: bool) -> dict[str, Any]:
    values = _untagged(buffer, fields, version, flexible)
    if not flexible:
        return values
    tagged = _tagged(buffer, fields, version)
    if not tagged:
        return values
    # As in Kafka's own JSON, fields are in the schema's order, without tagged fields that have their defaults.
    every = values | tagged
    return {field.name: every[field.name] for field in fields if field.name in every}


def _untagged(buffer: Buffer, fields: tuple[Field, ...], version: int, flexible: bool) -> dict[str, Any]:
    return {
        field.name: _value(buffer, field, version, flexible)
        for field in fields
        if field.tag is None and field.is_in(version)
    }


def _tagged(buffer: Buffer, fields: tuple[Field, ...], version: int) -> dict[str, Any]:
    found = {}
    by_tag = {field.tag: field for field in fields if field.tag is not None and field.is_in(version)}
    for _ in range(buffer.uvarint()):
        tag, size = buffer.uvarint(), buffer.uvarint()
        content = Buffer(buffer.take(size))
        if tag in by_tag:
            field = by_tag[tag]
            value = _value(content, field, version, True)
            blank = {part.name: part.default for part in field.parts} if field.kind == "struct" else field.default
            if value not in (field.default, blank):
                found[field.name] = value
    return found


def _value(buffer: Buffer, field: Field, version: int, flexible: bool) -> Any:
    kind = field.kind
    if kind in _NUMBERS:
        return buffer.number(_NUMBERS[kind])
    if kind == "uuid":
        return Uuid(buffer.take(16))
    if kind == "struct":
        if field.nullable and buffer.number(_NUMBERS["int8"]) < 0:
            return None
        return _structure(buffer, field.parts, version, flexible)
    size = buffer.uvarint() - 1 if flexible else buffer.number(_LENGTHS[kind])
    if size < 0:
        if not field.nullable:
            raise ValueError(f"{field.name or 'an item'} is null")
        return None
    if kind == "array":
        if size > len(buffer.data) - buffer.at:
            raise ValueError(f"{field.name} declares {size} items, but {len(buffer.data) - buffer.at} bytes are left")
        item = field.parts[0]
        if item.kind in _NUMBERS:
            layout = _NUMBERS[item.kind]
            return [value for (value,) in layout.iter_unpack(buffer.take(size * layout.size))]
        return [_value(buffer, item, version, flexible) for _ in range(size)]
    content = buffer.take(size)
    return content.decode("utf-8", "replace") if kind == "string" else content


def to_json(value: Any) -> str:
    """Return `value` as compact JSON, as Kafka's tools print it: bytes in base64, ids as text, only necessary
    escapes."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return f'"{_TO_ESCAPE.sub(_escaped, value)}"'
    if isinstance(value, float):
        return _java_double(value)
    if isinstance(value, Uuid):
        return f'"{value}"'
    if isinstance(value, bytes):
        return f'"{base64.b64encode(value).decode()}"'
    if isinstance(value, list):
        return f"[{','.join(map(to_json, value))}]"
    return "{" + ",".join(f'"{name}":{to_json(item)}' for name, item in value.items()) + "}"


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    return _ESCAPES.get(character) or f"\\u{ord(character):04X}"


def _java_double(value: float) -> str:
    """Return the shortest digits that identify the number, in the notation of Java's Double.toString."""
    if not math.isfinite(value):
        return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return repr(value)
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    text = "".join(map(str, digits))
    exponent = int(exponent) + len(text) - 1
    return f"{'-' * sign}{text[0]}.{text[1:].rstrip('0') or '0'}E{exponent}"
