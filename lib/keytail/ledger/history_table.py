"""Print the output of `history`: runs, one run, partitions over time, and the maintenance of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from keytail.cli import rows as show
from keytail.durations import time_text
from keytail.ledger.history import PartitionRow, RunRow

if TYPE_CHECKING:
    from keytail.ledger.maintain import MaintainRow


def print_runs(rows: Sequence[RunRow], path: str) -> None:
    lines = [
        (
            row.run_id,
            "" if row.start_ms is None else time_text(row.start_ms),
            row.host,
            row.command,
            row.status,
            ", ".join(f"{number} {status}" for status, number in row.counts.items()),
            _sizes(row) if row.bytes_before else "",
            show.human_seconds(row.start_ms, row.end_ms),
        )
        for row in rows
    ]
    names = ("run", "started", "host", "command", "status", "partitions", "log size", "took")
    show.print_lines(f"Runs in {path}", names, lines, start=5)
    show.print_reasons([(row.run_id, row.status, row.error) for row in rows if row.error])
    show.output_console().print(f"\n{len(rows)} run{'s' if len(rows) != 1 else ''}.")


def print_run(run: RunRow, rows: Sequence[PartitionRow]) -> None:
    console = show.output_console()
    lines = {
        "run": run.run_id,
        "started": "" if run.start_ms is None else time_text(run.start_ms),
        "took": show.human_seconds(run.start_ms, run.end_ms),
        "status": run.status,
        "host": run.host,
        "command line": " ".join(run.arguments),
        "log dirs": ", ".join(run.log_dirs),
        "versions": ", ".join(f"{name} {value}" for name, value in run.versions.items()),
        "settings given": ", ".join(f"{name}={value}" for name, value in sorted(run.config.items())),
        "recorded by run": run.repaired_by or "",
    }
    for name, value in lines.items():
        if value:
            console.print(f"{name}: {escape(value)}", soft_wrap=True)
    console.print()
    print_partitions(rows, "Partitions of the run", with_run=False)


def print_partitions(rows: Sequence[PartitionRow], title: str, *, with_run: bool = True) -> None:
    first = ("run", "command") if with_run else ()
    names = (*first, "partition", "status", "segments", "log size", "records", "cleaned up to", "took")
    lines = [
        (
            *((row.run_id, row.command) if with_run else ()),
            row.name,
            row.status,
            show.change(_text(row.segments_before), _text(row.segments_after)),
            _sizes(row),
            show.change(_text(row.records_before), _text(row.records_after)),
            _text(row.end_dirty_offset) if row.status == "compacted" else "",
            show.human_seconds(row.start_ms, row.end_ms),
        )
        for row in rows
    ]
    show.print_lines(title, names, lines, start=len(first) + 2)
    show.print_reasons([(row.name, row.status, row.error) for row in rows if row.error])
    show.output_console().print(f"\n{len(rows)} row{'s' if len(rows) != 1 else ''}.")


def print_maintained(rows: Sequence[MaintainRow], path: str, *, execute: bool) -> None:
    title = f"Ledger {path}" if execute else f"Dry run: nothing was changed in {path}"
    lines = [
        (
            row.table,
            row.oldest_day or "all",
            row.status,
            _text(row.rows),
            _text(row.removed_rows),
            show.change(_text(row.files_before), _text(row.files_after)),
            _sizes(row),
        )
        for row in rows
    ]
    show.print_lines(title, ("table", "days kept from", "status", "rows", "to remove", "files", "size"), lines, start=3)
    show.print_reasons([(row.table, row.status, row.error) for row in rows if row.error])


def _sizes(row: RunRow | PartitionRow | MaintainRow) -> str:
    return show.change(show.human_bytes(row.bytes_before), show.human_bytes(row.bytes_after))


def _text(number: int | None) -> str:
    return "" if number is None else f"{number:,}"
