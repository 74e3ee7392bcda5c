"""The flags of `export` alone; those shared with other commands are in cli/options.py."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from keytail.cli.options import LONG_MAX, RUN, one_of, within

_WHAT = "What to export"


def _what(flag: str, metavar: str, help_text: str, **more: Any) -> Any:
    return typer.Option(flag, metavar=metavar, help=help_text, rich_help_panel=_WHAT, **more)


class FormatName(StrEnum):
    binary = "binary"
    utf8 = "utf8"
    json = "json"
    uuid = "uuid"
    short = "short"
    int = "int"
    long = "long"
    float = "float"
    double = "double"
    avro = "avro"


# fmt: off
To = Annotated[str, typer.Option(
    "--to", metavar="DIR", rich_help_panel="Where to",
    help="Directory of the tables, one per topic at DIR/TOPIC; the driver and every executor see it at this path.",
)]
KeyFormat = Annotated[FormatName, _what(
    "--key-format", "FORMAT",
    "Format of keys. binary: unchanged. utf8: text. json: validated text. short, int, long, float, double, uuid: as "
    "Kafka's serializers write them. avro: Confluent's wire format, with --key-schema and --value-schema.",
    parser=one_of(FormatName),
)]
ValueFormat = Annotated[FormatName, _what(
    "--value-format", "FORMAT", "Format of values, with the same names as --key-format.", parser=one_of(FormatName)
)]
_SCHEMA = "and its id in the registry; repeatable. Records of all schemas are resolved to the first one."
KeySchema = Annotated[list[str] | None, _what("--key-schema", "ID=FILE", f"Avro schema of keys {_SCHEMA}")]
ValueSchema = Annotated[list[str] | None, _what("--value-schema", "ID=FILE", f"Avro schema of values {_SCHEMA}")]
AsOfOffset = Annotated[int | None, _what(
    "--as-of-offset", "N",
    "Export the state before offset N of each partition, N not included; needs a separate table.",
    parser=within(0, LONG_MAX),
)]
AsOfTimestamp = Annotated[str | None, _what(
    "--as-of-timestamp", "MS-OR-TIME",
    "Export the state before the first record at or after this time (ms since 1970, or ISO 8601); needs a "
    "separate table.",
)]
Full = Annotated[bool, typer.Option(
    "--full", help="Export all records again, whatever the table already has.", rich_help_panel=RUN
)]
Execute = Annotated[bool, typer.Option(
    "--execute", rich_help_panel=RUN,
    help="Write the tables; without it the command prints what it would do. Log dirs are only read.",
)]
# fmt: on
