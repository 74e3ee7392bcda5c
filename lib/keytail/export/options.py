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
        help="Where the tables are: a topic's is at DIR/TOPIC. The driver and every executor see it at this path.",
        rich_help_panel=_TARGET,
    ),
]
_FORMATS = (
    "binary: as it is. utf8. json: text that was checked. short, int, long, float, double, uuid: as Kafka's "
    "serializers write them. avro: in Confluent's frame, by --key-schema and --value-schema."
)
KeyFormat = Annotated[
    FormatName,
    typer.Option(
        "--key-format",
        metavar="FORMAT",
        parser=one_of(FormatName),
        help=f"What keys are decoded to. {_FORMATS}",
        rich_help_panel=_WHAT,
    ),
]
ValueFormat = Annotated[
    FormatName,
    typer.Option(
        "--value-format",
        metavar="FORMAT",
        parser=one_of(FormatName),
        help="What values are decoded to, by the same names.",
        rich_help_panel=_WHAT,
    ),
]
_SCHEMA = "An Avro schema and its id in the registry; repeatable. Records of each are read as the first one has it."
KeySchema = Annotated[
    list[str] | None,
    typer.Option("--key-schema", metavar="ID=FILE", help=f"Of keys. {_SCHEMA}", rich_help_panel=_WHAT),
]
ValueSchema = Annotated[
    list[str] | None,
    typer.Option("--value-schema", metavar="ID=FILE", help=f"Of values. {_SCHEMA}", rich_help_panel=_WHAT),
]
AsOfOffset = Annotated[
    int | None,
    typer.Option(
        "--as-of-offset",
        metavar="N",
        parser=within(0, LONG_MAX),
        help="The state before offset N of each partition, N not included. Into a table of its own.",
        rich_help_panel=_WHAT,
    ),
]
AsOfTimestamp = Annotated[
    str | None,
    typer.Option(
        "--as-of-timestamp",
        metavar="MS-OR-TIME",
        help="The state before the first record at or after this time: ms since 1970, or ISO 8601. Into a table of its "
        "own.",
        rich_help_panel=_WHAT,
    ),
]
Full = Annotated[
    bool,
    typer.Option("--full", help="Export all anew, whatever the table has already.", rich_help_panel=RUN),
]
Execute = Annotated[
    bool,
    typer.Option(
        "--execute",
        help="Write the tables. Without it the verb prints what it would do. Log dirs are only ever read.",
        rich_help_panel=RUN,
    ),
]
