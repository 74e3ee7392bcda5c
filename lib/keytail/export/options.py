"""The flags of `export` alone; those shared with other commands are in cli/options.py."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from keytail.cli.options import LONG_MAX, RUN, one_of, within

_WHAT = "What to export"
_TARGET = "Where to"


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


To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="DIR",
        help="Directory of the tables, one per topic at DIR/TOPIC; the driver and every executor see it at this path.",
        rich_help_panel=_TARGET,
    ),
]
_FORMATS = (
    "binary: unchanged. utf8: text. json: validated text. short, int, long, float, double, uuid: as Kafka's "
    "serializers write them. avro: Confluent's wire format, with --key-schema and --value-schema."
)
KeyFormat = Annotated[
    FormatName,
    typer.Option(
        "--key-format",
        metavar="FORMAT",
        parser=one_of(FormatName),
        help=f"Format of keys. {_FORMATS}",
        rich_help_panel=_WHAT,
    ),
]
ValueFormat = Annotated[
    FormatName,
    typer.Option(
        "--value-format",
        metavar="FORMAT",
        parser=one_of(FormatName),
        help="Format of values, with the same names as --key-format.",
        rich_help_panel=_WHAT,
    ),
]
_SCHEMA = "and its id in the registry; repeatable. Records of all schemas are resolved to the first one."
KeySchema = Annotated[
    list[str] | None,
    typer.Option("--key-schema", metavar="ID=FILE", help=f"Avro schema of keys {_SCHEMA}", rich_help_panel=_WHAT),
]
ValueSchema = Annotated[
    list[str] | None,
    typer.Option("--value-schema", metavar="ID=FILE", help=f"Avro schema of values {_SCHEMA}", rich_help_panel=_WHAT),
]
AsOfOffset = Annotated[
    int | None,
    typer.Option(
        "--as-of-offset",
        metavar="N",
        parser=within(0, LONG_MAX),
        help="Export the state before offset N of each partition, N not included; needs a separate table.",
        rich_help_panel=_WHAT,
    ),
]
AsOfTimestamp = Annotated[
    str | None,
    typer.Option(
        "--as-of-timestamp",
        metavar="MS-OR-TIME",
        help="Export the state before the first record at or after this time (ms since 1970, or ISO 8601); needs a "
        "separate table.",
        rich_help_panel=_WHAT,
    ),
]
Full = Annotated[
    bool,
    typer.Option("--full", help="Export all records again, whatever the table already has.", rich_help_panel=RUN),
]
Execute = Annotated[
    bool,
    typer.Option(
        "--execute",
        help="Write the tables; without it the command prints what it would do. Log dirs are only read.",
        rich_help_panel=RUN,
    ),
]
