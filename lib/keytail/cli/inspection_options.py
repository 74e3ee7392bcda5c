"""Flags that only `lookup`, `describe` and `audit` have."""

from __future__ import annotations

from typing import Annotated

import typer

from keytail.cli.options import LONG_MAX, RUN, SELECT, within

# fmt: off
Replicas = Annotated[list[str] | None, typer.Option(
    "--replica", metavar="[NAME=]DIR[,DIR]", rich_help_panel=SELECT,
    help="All log dirs of one broker. Give the flag once for each broker, at least twice.",
)]
Examples = Annotated[int, typer.Option(
    "--examples", metavar="N", parser=within(1, 10_000), rich_help_panel=RUN,
    help="Maximum number of examples for each kind of difference.",
)]
Offset = Annotated[int | None, typer.Option(
    "--offset", metavar="N", parser=within(0, LONG_MAX), rich_help_panel=RUN,
    help="Find the first record at or after this offset.",
)]
Timestamp = Annotated[str | None, typer.Option(
    "--timestamp", metavar="MS-OR-TIME", rich_help_panel=RUN,
    help="Find the first record at or after this time: ms since 1970, or ISO 8601 such as 2023-11-14T22:13:20Z (UTC "
    "unless it contains a time zone).",
)]
Explain = Annotated[bool, typer.Option(
    "--explain", help="Print each step of the search, with its numbers.", rich_help_panel=RUN
)]
AllSettings = Annotated[bool, typer.Option(
    "--all", help="Show every setting, including Kafka's defaults, each with its source."
)]
CountRecords = Annotated[bool, typer.Option(
    "--records", help="Count the records, which reads every batch. Without it only offsets are known."
)]
# fmt: on
