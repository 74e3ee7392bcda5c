"""The flags that only `dump` has: those of Kafka's DumpLogSegments under their names, and the ranges."""

from __future__ import annotations

from typing import Annotated

import typer

from keytail.cli.options import LONG_MAX, Output, within

_WHAT = "Content of logs to print"
_INDEXES = "Indexes"
_RANGE = "Range of each log to print"

Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE...", help="Files of a log dir, or partition directories.", show_default=False),
]
FileList = Annotated[
    list[str] | None,
    typer.Option("--files", metavar="A,B", help="Comma-separated list of such files, as for Kafka's tool."),
]
PrintDataLog = Annotated[
    bool, typer.Option("--print-data-log", help="Print records with their keys and payloads.", rich_help_panel=_WHAT)
]
DeepIteration = Annotated[
    bool, typer.Option("--deep-iteration", help="Print records without keys and payloads.", rich_help_panel=_WHAT)
]
SkipRecordMetadata = Annotated[
    bool,
    typer.Option(
        "--skip-record-metadata",
        help="Print only those fields of records that --print-data-log adds; none of control records.",
        rich_help_panel=_WHAT,
    ),
]
OffsetsDecoder = Annotated[
    bool,
    typer.Option(
        "--offsets-decoder",
        help="Decode keys and payloads of __consumer_offsets; implies --print-data-log.",
        rich_help_panel=_WHAT,
    ),
]
TransactionLogDecoder = Annotated[
    bool,
    typer.Option(
        "--transaction-log-decoder",
        help="Decode keys and payloads of __transaction_state; implies --print-data-log.",
        rich_help_panel=_WHAT,
    ),
]
VerifyIndexOnly = Annotated[
    bool,
    typer.Option(
        "--verify-index-only",
        help="Check index entries against the log without printing them.",
        rich_help_panel=_INDEXES,
    ),
]
IndexSanityCheck = Annotated[
    bool,
    typer.Option(
        "--index-sanity-check",
        help="Check only the index itself: its size and its last entry.",
        rich_help_panel=_INDEXES,
    ),
]
MaxBytes = Annotated[
    int | None,
    typer.Option(
        "--max-bytes",
        metavar="BYTES",
        parser=within(0, LONG_MAX),
        help="Print only complete batches within the first BYTES bytes of each log. Default: all.",
        rich_help_panel=_RANGE,
    ),
]
FromOffset = Annotated[
    int | None,
    typer.Option(
        "--from-offset", metavar="N", parser=within(0, LONG_MAX), help="Print only records from this offset on.",
        rich_help_panel=_RANGE,
    ),
]  # fmt: skip
ToOffset = Annotated[
    int | None,
    typer.Option(
        "--to-offset", metavar="N", parser=within(0, LONG_MAX), help="Print only records below this offset.",
        rich_help_panel=_RANGE,
    ),
]  # fmt: skip
FromPosition = Annotated[
    int | None,
    typer.Option(
        "--from-position", metavar="BYTE", parser=within(0, LONG_MAX),
        help="Print only batches that begin at or after this byte position.", rich_help_panel=_RANGE,
    ),
]  # fmt: skip
ToPosition = Annotated[
    int | None,
    typer.Option(
        "--to-position", metavar="BYTE", parser=within(0, LONG_MAX),
        help="Print only batches that begin before this byte position.", rich_help_panel=_RANGE,
    ),
]  # fmt: skip
OutputFlag = Annotated[
    Output,
    typer.Option(
        "--output",
        help="Output format. table: the lines of Kafka's tool. json: one object per line, including the problems.",
    ),
]
Escape = Annotated[
    bool | None,
    typer.Option(
        "--escape/--no-escape",
        show_default=False,
        help="Write control characters of the data as text such as \\x1b. Default: only on a terminal, which would "
        "interpret them; otherwise the bytes are those of Kafka's tool.",
    ),
]
