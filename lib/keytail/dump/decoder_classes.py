"""Decodes keys and payloads as the decoder classes of Kafka's tools do, which are given by their class names."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from keytail.errors import UsageProblem
from keytail.format.messages import Json

# The packages of the decoder classes in Kafka 4, and in earlier versions.
_PACKAGES = ("org.apache.kafka.tools.api.", "kafka.serializer.")


def _number(size_bytes: int) -> Callable[[bytes], str]:
    def text(data: bytes) -> str:
        if len(data) < size_bytes:
            raise ValueError(f"has {len(data)} bytes, but the decoder requires {size_bytes}")
        return Json(int.from_bytes(data[:size_bytes], "big", signed=True))

    return text


def _bytes(data: bytes) -> str:
    return base64.b64encode(data).decode()  # Kafka's tool prints the address of the array


# The function of each decoder class; None for a class that decodes as `dump` does without a decoder.
_CLASSES: Mapping[str, Callable[[bytes], str] | None] = {
    "StringDecoder": None, "DefaultDecoder": _bytes, "IntegerDecoder": _number(4), "LongDecoder": _number(8)
}  # fmt: skip


@dataclass(frozen=True)
class ClassDecoder:
    """Decodes keys and payloads by functions. A part whose function is None is not decoded."""

    key: Callable[[bytes], str] | None
    payload: Callable[[bytes], str] | None

    @property
    def decoded(self) -> frozenset[str]:
        """The parts that are decoded: `key`, `payload`."""
        return frozenset(name for name in ("key", "payload") if getattr(self, name) is not None)

    def text(self, key: bytes | None, value: bytes | None, offset: int) -> tuple[str | None, str | None]:
        """Return key and payload of a record as Kafka's tool prints them, but bytes as base64; None for a part that is
        null or not decoded."""
        return _text(self.key, "key", key, offset), _text(self.payload, "payload", value, offset)


def _text(decode: Callable[[bytes], str] | None, what: str, data: bytes | None, offset: int) -> str | None:
    if decode is None or data is None:
        return None
    try:
        return decode(data)
    except ValueError as reason:
        return f"Error at offset {offset}, skipping. The {what} {reason}"


def decoder_of_class(flag: str, name: str) -> Callable[[bytes], str] | None:
    """Return the function of a decoder class; None for a class that decodes as `dump` does by default. Raises
    UsageProblem for a class that is unknown."""
    for package in _PACKAGES:
        if name.removeprefix(package) in _CLASSES and name.startswith(package):
            return _CLASSES[name.removeprefix(package)]
    raise UsageProblem(
        f"{flag} {name}: keytail does not run Java classes, and this class is not a decoder of Kafka itself",
        remedy=f"Give one of {', '.join(_PACKAGES[0] + item for item in _CLASSES)}, or use kafka-dump-log.sh",
        slug="unknown-decoder-class",
    )
