"""Defines the formats of keys and values, which determine the types of a table's columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from keytail.export.avro import AvroSchemas

FormatName = Literal["binary", "utf8", "json", "uuid", "short", "int", "long", "float", "double", "avro"]

# The formats with a fixed length, with Spark's type of the column, and the NumPy type of the bytes (big-endian).
FIXED = {
    "short": ("smallint", ">i2"),
    "int": ("int", ">i4"),
    "long": ("bigint", ">i8"),
    "float": ("float", ">f4"),
    "double": ("double", ">f8"),
}
_TEXT = ("utf8", "json", "uuid")


@dataclass(frozen=True)
class Format:
    """The format of keys or values; `avro` has the schemas of the format `avro`, and is None for other formats."""

    name: FormatName = "binary"
    avro: AvroSchemas | None = None

    @property
    def sql_type(self) -> str:
        if self.avro is not None:
            return self.avro.sql_type
        if self.name in FIXED:
            return FIXED[self.name][0]
        return "string" if self.name in _TEXT else "binary"

    @property
    def distinguishes_keys(self) -> bool:
        """Whether different bytes decode to different keys; False for floats (NaNs) and Avro (schema ids)."""
        return self.name not in ("float", "double", "avro")

    def __str__(self) -> str:
        return self.name if self.avro is None else f"avro (schema {self.avro.digest})"


@dataclass(frozen=True)
class Formats:
    key: Format = Format()
    value: Format = Format()

    def as_json(self) -> dict[str, str]:
        return {"key": str(self.key), "value": str(self.value)}
