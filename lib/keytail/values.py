"""Serializes the results of tasks, and the state that one pass saves for the next pass.

The serialized bytes may come from another process or from another user's directory, and cannot choose code to run:
values consist of numbers, text, containers, arrays, and instances of keytail's own data classes. The modules of these
classes are imported, and their fields are set without calling the class (`_made` has two exceptions). The format is a
header (JSON) and the raw bytes of the arrays, each in its own part. Arrays are written without copying them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import struct
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from keytail.errors import ErrorText, KeytailError

_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type] = {"dict": dict, "Counter": Counter}
_ERROR_FIELDS = ("what", "path", "byte_position", "offset", "remedy", "slug")
_SIZE = struct.Struct("<Q")
_PACKAGE = "keytail"
_REMEDY = "Install the same version of keytail on all hosts, and run again"


class NotAValue(KeytailError):
    """Bytes that were not written by `to_parts`, or were written by another version of keytail."""

    default_slug = "not-a-value"


def to_parts(value: Any) -> list[memoryview]:
    """Return the header, and the arrays and bytes objects of `value`. Raises TypeError for a type that cannot be
    serialized (`_fields`).
    """
    writer = _Writer()
    header = {"value": writer.encoded(value), "classes": list(writer.classes.values())}
    return [memoryview(json.dumps(header, separators=(",", ":")).encode()), *writer.parts]


def from_parts(parts: Sequence[Any]) -> Any:
    """Return the value that `to_parts` serialized. An array is a view of its part if the part is writable, else a copy.
    Raises NotAValue."""
    try:
        header = json.loads(bytes(parts[0]))
        return _Reader(header["classes"], parts[1:]).decoded(header["value"])
    except NotAValue:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, ImportError, SyntaxError) as problem:
        raise NotAValue(f"invalid serialized data: {type(problem).__name__}: {problem}", remedy=_REMEDY) from problem


def sizes_of(parts: Sequence[memoryview]) -> bytes:
    """Return the bytes that precede the parts when these are written one after the other: the number and the sizes of
    the parts."""
    return b"".join(_SIZE.pack(number) for number in (len(parts), *(part.nbytes for part in parts)))


def to_bytes(value: Any) -> bytes:
    """Return `value` serialized into one bytes object. Raises TypeError for a type that cannot be serialized."""
    parts = to_parts(value)
    return b"".join((sizes_of(parts), *parts))


def from_bytes(data: Any) -> Any:
    """Return the value that `to_bytes` serialized; its arrays are copies. Raises NotAValue."""
    view = memoryview(data).cast("B").toreadonly()
    try:
        [count] = _SIZE.unpack_from(view)
        if count > len(view) // _SIZE.size:
            raise NotAValue("invalid serialized data: impossible number of parts", remedy=_REMEDY)
        sizes = struct.unpack_from(f"<{count}Q", view, _SIZE.size)
    except struct.error as problem:
        raise NotAValue(f"invalid serialized data: {problem}", remedy=_REMEDY) from problem
    position, parts = _SIZE.size * (1 + count), []
    for size in sizes:
        parts.append(view[position : position + size])
        position += size
    if position != len(view):
        raise NotAValue(f"invalid serialized data: {len(view)} bytes, expected {position}", remedy=_REMEDY)
    return from_parts(parts)


class _Writer:
    """Encodes a value. `parts` are the arrays and bytes objects in the value; `classes` has the name and the fields of
    each class in it."""

    def __init__(self) -> None:
        self.parts: list[memoryview] = []
        self.classes: dict[type, tuple[str, tuple[str, ...]]] = {}
        self._numbers: dict[type, int] = {}

    def encoded(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list:
            return [self.encoded(item) for item in value]
        if kind.__name__ in _CONTAINERS and kind is _CONTAINERS[kind.__name__]:
            return {kind.__name__: [self.encoded(item) for item in value]}
        if kind.__name__ in _MAPPINGS and kind is _MAPPINGS[kind.__name__]:
            return {kind.__name__: [[self.encoded(key), self.encoded(item)] for key, item in value.items()]}
        if kind in (bytes, bytearray):
            return {kind.__name__: self._part(np.frombuffer(value, np.uint8))}
        if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            is_array, descr = isinstance(value, np.ndarray), np.lib.format.dtype_to_descr(value.dtype)
            part = self._part(np.ascontiguousarray(value).reshape(-1))
            return {"array" if is_array else "scalar": [part, descr, list(value.shape)]}
        return self._of_class(value, kind)

    def _part(self, array: np.ndarray) -> int:
        self.parts.append(memoryview(array.view(np.uint8)) if array.size else memoryview(b""))
        return len(self.parts)

    def _of_class(self, value: Any, kind: type) -> Any:
        if kind not in self._numbers:
            fields = _fields(kind)
            if fields is None or "<locals>" in kind.__qualname__:
                raise TypeError(f"{kind.__module__}.{kind.__qualname__} cannot be serialized: it is not a data class")
            self._numbers[kind] = len(self.classes)
            self.classes[kind] = (f"{kind.__module__}:{kind.__qualname__}", fields)
        _, fields = self.classes[kind]
        return {"of": self._numbers[kind], "is": [self.encoded(getattr(value, name)) for name in fields]}


class _Reader:
    def __init__(self, classes: Sequence[tuple[str, list[str]]], parts: Sequence[Any]) -> None:
        self._parts = parts
        self._classes = [_class(name, fields) for name, fields in classes]

    def decoded(self, value: Any) -> Any:
        if type(value) is list:
            return [self.decoded(item) for item in value]
        if type(value) is not dict:
            return value
        if "of" in value:
            return _made(*self._classes[value["of"]], [self.decoded(item) for item in value["is"]])
        [(kind, content)] = value.items()
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](map(self.decoded, content))
        if kind in _MAPPINGS:
            return _MAPPINGS[kind]({self.decoded(key): self.decoded(item) for key, item in content})
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray)(self._part(content))
        if kind not in ("array", "scalar"):
            raise ValueError(f"unknown kind {kind!r}")
        number, descr, shape = content
        dtype = np.lib.format.descr_to_dtype(_tuples(descr))
        if dtype.hasobject:
            raise ValueError("an array of objects")
        part = self._part(number)
        array = np.frombuffer(part, np.uint8)
        array = array if array.flags.writeable else array.copy()
        array = array.view(dtype).reshape(shape)
        return array if kind == "array" else array[()]

    def _part(self, number: int) -> Any:
        if type(number) is not int or number < 1:  # a negative number would count from the end
            raise ValueError(f"no part {number}")
        return self._parts[number - 1]


def _fields(kind: type) -> tuple[str, ...] | None:
    """Return the field names of `kind`'s instances; None if they cannot be serialized.

    The instances of data classes, named tuples, enumerations, keytail's errors and classes that define `stored_fields`
    can be serialized.
    """
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if issubclass(kind, tuple):
        return getattr(kind, "_fields", None)
    if issubclass(kind, Enum):
        return ("name",)
    if issubclass(kind, KeytailError):
        return _ERROR_FIELDS
    return kind.__dict__.get("stored_fields")


def _class(name: str, fields: list[str]) -> tuple[type, tuple[str, ...]]:
    """Return a class of keytail and its fields.

    Raises ValueError unless the class has these fields and its instances can be serialized.
    """
    module, _, qualified = name.partition(":")
    if module.partition(".")[0] != _PACKAGE:
        raise ValueError(f"{name} is not part of {_PACKAGE}")
    kind: Any = importlib.import_module(module)
    for part in qualified.split("."):
        kind = vars(kind)[part]
    known = _fields(kind) if isinstance(kind, type) and kind.__module__ == module else None
    if known is None or list(known) != fields:
        raise ValueError(f"{name} is not a data class with the fields {', '.join(map(str, fields))}")
    return kind, known


def _made(kind: type, fields: tuple[str, ...], values: list[Any]) -> Any:
    """Return an instance of `kind` with these values; of all constructors, only those of KeytailError and ErrorText are
    called."""
    if len(values) != len(fields):
        raise ValueError(f"{len(values)} values for the {len(fields)} fields of {kind.__name__}")
    if issubclass(kind, Enum):
        return kind[values[0]]
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values)
    if issubclass(kind, ErrorText):
        return kind(*values)
    made = kind.__new__(kind)
    if isinstance(made, KeytailError):
        what, *where = values
        KeytailError.__init__(made, what, **dict(zip(_ERROR_FIELDS[1:], where, strict=True)))
        return made
    for name, value in zip(fields, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _tuples(descr: Any) -> Any:
    """Return a dtype's description, as read from JSON, with tuples in place of lists where NumPy requires them."""
    if isinstance(descr, str):
        return descr
    return [tuple(_tuples(part) if isinstance(part, list) and at == 1 else _shape(part) for at, part in enumerate(item))
            for item in descr]  # fmt: skip


def _shape(part: Any) -> Any:
    return tuple(part) if isinstance(part, list) else part
