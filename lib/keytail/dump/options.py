"""The flags that only `dump` has: those of Kafka's DumpLogSegments under their names, and the ranges."""

from __future__ import annotations

from typing import Annotated

import typer

from keytail.cli.options import LONG_MAX, Output, within

_WHAT = "What to show of logs"
_INDEXES = "Indexes"
_RANGE = "A part of each log"

Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE...", help="Files of a log dir, or partition directories.", show_default=False),
]
FileList = Annotated[
    list[str] | None,
    typer.Option("--files", metavar="A,B", help="The same as a comma list, as Kafka's tool takes it."),
]
PrintDataLog = Annotated[
    bool, typer.Option("--print-data-log", help="Records with their keys and payloads.", rich_help_panel=_WHAT)
]
DeepIteration = Annotated[
    bool, typer.Option("--deep-iteration", help="Records, without keys and payloads.", rich_help_panel=_WHAT)
]
SkipRecordMetadata = Annotated[
    bool,
    typer.Option(
        "--skip-record-metadata",
        help="Of records only what --print-data-log adds; control records stay empty.",
        rich_help_panel=_WHAT,
    ),
]
OffsetsDecoder = Annotated[
    bool,
    typer.Option(
        "--offsets-decoder",
        help="Open keys and payloads of __consumer_offsets; implies --print-data-log.",
        rich_help_panel=_WHAT,
    ),
]
TransactionLogDecoder = Annotated[
    bool,
    typer.Option(
        "--transaction-log-decoder",
        help="Open keys and payloads of __transaction_state; implies --print-data-log.",
        rich_help_panel=_WHAT,
    ),
]
VerifyIndexOnly = Annotated[
    bool,
    typer.Option(
        "--verify-index-only",
        help="Hold index entries against the log without printing them.",
        rich_help_panel=_INDEXES,
    ),
]
IndexSanityCheck = Annotated[
    bool,
    typer.Option(
        "--index-sanity-check",
        help="Only what an index says of itself: its size, its last entry.",
        rich_help_panel=_INDEXES,
    ),
]
MaxBytes = Annotated[
    int | None,
    typer.Option(
        "--max-bytes",
        metavar="BYTES",
        parser=within(0, LONG_MAX),
        help="Only whole batches within the first so many bytes of each log.",
        rich_help_panel=_RANGE,
    ),
]
FromOffset = Annotated[
    int | None,
    typer.Option(
        "--from-offset", metavar="N", parser=within(0, LONG_MAX), help="Only records from this offset on.",
        rich_help_panel=_RANGE,
    ),
]  # fmt: skip
ToOffset = Annotated[
    int | None,
    typer.Option(
        "--to-offset", metavar="N", parser=within(0, LONG_MAX), help="Only records below this offset.",
        rich_help_panel=_RANGE,
    ),
]  # fmt: skip
FromPosition = Annotated[
    int | None,
    typer.Option(
        "--from-position", metavar="BYTE", parser=within(0, LONG_MAX),
        help="Only batches that begin at or behind this byte.", rich_help_panel=_RANGE,
    ),
]  # fmt: skip
ToPosition = Annotated[
    int | None,
    typer.Option(
        "--to-position", metavar="BYTE", parser=within(0, LONG_MAX), help="Only batches that begin before this byte.",
        rich_help_panel=_RANGE,
    ),
]  # fmt: skip
OutputFlag = Annotated[
    Output,
    typer.Option(
        "--output",
        help="table: the lines of Kafka's tool. json: an object a line on standard output, what is wrong among them.",
    ),
]
Escape = Annotated[
    bool | None,
    typer.Option(
        "--escape/--no-escape",
        show_default=False,
        help="Write control characters of the data as \\x1b and the like. Default: only on a terminal, which obeys "
        "them; elsewhere the bytes are those of Kafka's tool.",
    ),
]
