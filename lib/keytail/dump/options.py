"""The flags that only `dump` has: those of Kafka's DumpLogSegments under their names, and the ranges."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from keytail.cli.options import LONG_MAX, Output, within

_WHAT = "Content of logs to print"
_INDEXES = "Indexes"
_RANGE = "Range of each log to print"


def _flag(name: str, panel: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel)


def _bound(name: str, unit: str, text: str) -> Any:
    return typer.Option(name, metavar=unit, parser=within(0, LONG_MAX), help=text, rich_help_panel=_RANGE)


Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE...", help="Files of a log dir, or partition directories.", show_default=False),
]
FileList = Annotated[
    list[str] | None,
    typer.Option("--files", metavar="A,B", help="Comma-separated list of such files, as for Kafka's tool."),
]
PrintDataLog = Annotated[bool, _flag("--print-data-log", _WHAT, "Print records with their keys and payloads.")]
DeepIteration = Annotated[bool, _flag("--deep-iteration", _WHAT, "Print records without keys and payloads.")]
SkipRecordMetadata = Annotated[
    bool,
    _flag("--skip-record-metadata", _WHAT,
          "Print only those fields of records that --print-data-log adds; none of control records."),
]  # fmt: skip
OffsetsDecoder = Annotated[
    bool,
    _flag("--offsets-decoder", _WHAT,
          "Decode keys and payloads of __consumer_offsets; implies --print-data-log."),
]  # fmt: skip
TransactionLogDecoder = Annotated[
    bool,
    _flag("--transaction-log-decoder", _WHAT,
          "Decode keys and payloads of __transaction_state; implies --print-data-log."),
]  # fmt: skip
VerifyIndexOnly = Annotated[
    bool, _flag("--verify-index-only", _INDEXES, "Check index entries against the log without printing them.")
]
IndexSanityCheck = Annotated[
    bool, _flag("--index-sanity-check", _INDEXES, "Check only the index itself: its size and its last entry.")
]
MaxBytes = Annotated[
    int | None,
    _bound("--max-bytes", "BYTES",
           "Print only complete batches within the first BYTES bytes of each log. Default: all."),
]  # fmt: skip
FromOffset = Annotated[int | None, _bound("--from-offset", "N", "Print only records from this offset on.")]
ToOffset = Annotated[int | None, _bound("--to-offset", "N", "Print only records below this offset.")]
FromPosition = Annotated[
    int | None,
    _bound("--from-position", "BYTE", "Print only batches that begin at or after this byte position."),
]
ToPosition = Annotated[
    int | None, _bound("--to-position", "BYTE", "Print only batches that begin before this byte position.")
]
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
