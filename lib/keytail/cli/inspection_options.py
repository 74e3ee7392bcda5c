"""Flags that only `lookup`, `describe` and `audit` have."""

from __future__ import annotations

from typing import Annotated

import typer

from keytail.cli.options import LONG_MAX, RUN, SELECT, within

Replicas = Annotated[
    list[str] | None,
    typer.Option(
        "--replica",
        metavar="[NAME=]DIR[,DIR]",
        help="The log directories of one broker, all of them. Give it once for each broker, at least twice.",
        rich_help_panel=SELECT,
    ),
]
Examples = Annotated[
    int,
    typer.Option(
        "--examples",
        metavar="N",
        parser=within(1, 10_000),
        help="Most examples of each kind of difference.",
        rich_help_panel=RUN,
    ),
]
Offset = Annotated[
    int | None,
    typer.Option(
        "--offset",
        metavar="N",
        parser=within(0, LONG_MAX),
        help="Find the first record at this offset or behind it.",
        rich_help_panel=RUN,
    ),
]
Timestamp = Annotated[
    str | None,
    typer.Option(
        "--timestamp",
        metavar="MS-OR-TIME",
        help="Find the first record at or after this time: ms since 1970, or ISO 8601 such as 2023-11-14T22:13:20Z "
        "(UTC unless it names a zone).",
        rich_help_panel=RUN,
    ),
]
Explain = Annotated[
    bool,
    typer.Option("--explain", help="Say each step of the search, with its numbers.", rich_help_panel=RUN),
]
AllSettings = Annotated[
    bool,
    typer.Option("--all", help="Show every setting, Kafka's defaults too, each with where it comes from."),
]
CountRecords = Annotated[
    bool,
    typer.Option("--records", help="Count the records: reads every batch. Without it only offsets are known."),
]
