"""Declares the command `expire`: flags, rows, statuses, next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from typing import Annotated, Literal

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import BROKER, Command
from keytail.cli.configuration import Configuration, ConfigurationByFlags
from keytail.cli.selection import PartitionFilterFlags
from keytail.cli.statuses import FAILURES, Status, exit_status_of
from keytail.cli.table import (
    PARTITION,
    TOOK,
    Column,
    about,
    about_each,
    notes_of,
    print_below,
    print_line,
    print_remarkable,
    total,
)
from keytail.console import output_style
from keytail.ledger.of_run import LedgerByFlags, LedgerFlags
from keytail.run.rows import RowOfPartition

Reason = Literal["log-start", "size", "time"]


@dataclass(frozen=True)
class Request:
    """All parameters of `expire`, with the defaults of its flags."""

    partition_filter: PartitionFilterFlags
    configuration: ConfigurationByFlags = field(default_factory=Configuration)
    _: KW_ONLY
    execute: o.Execute = False
    now_ms: o.Now = None
    unsafe_clock: o.UnsafeClock = False
    high_watermark: o.HighWatermarkFlag = "checkpoint"
    shared_storage: o.SharedStorage = False
    ledger: LedgerByFlags = field(default_factory=LedgerFlags)
    submitted: bool = False  # the run is a job of spark-submit, which has the master


@dataclass(frozen=True, slots=True)
class ExpiredSegment:
    """A segment that is to be removed, or was removed, and the reason."""

    base_offset: int
    end_offset: Annotated[int, "exclusive"]
    log_bytes: int
    reason: Annotated[Reason, "the rule that applies"]
    why: Annotated[str, "the reason in words"]
    timestamp_ms: Annotated[int | None, "time from which the segment's age is counted; `null` if its age was not "
    "needed"] = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A segment for which a broker's own retention decides differently, because of a wrong index."""

    base_offset: int
    broker_deletes: Annotated[
        bool,
        "`true`: a broker that starts would delete the segment, which must be retained; `false`: the broker would "
        "retain the segment, which is to be removed",
    ]
    what: str
    remedy: str


@dataclass(frozen=True)
class ExpireRow(RowOfPartition):
    """One partition. Sizes are of `.log` files; unknown values are None."""

    kept: Annotated[str, "why the first remaining segment is retained"] = ""
    segments_before: int | None = None
    segments_after: int | None = None
    bytes_before: Annotated[int | None, "size of the `.log` files"] = None
    bytes_after: int | None = None
    log_start_before: Annotated[int | None, "log start offset"] = None
    log_start_after: int | None = None
    log_end_offset: int | None = None
    in_use: Annotated[bool, "a broker has the log dir open"] = False
    expired: Annotated[tuple[ExpiredSegment, ...], "the segments to remove, ascending"] = ()
    findings: Annotated[tuple[Finding, ...], "segments that a broker treats differently, because of wrong indexes"] = ()
    notes: Annotated[tuple[str, ...], "other changes, a sentence each"] = ()
    start_ms: int | None = None
    end_ms: int | None = None
    recorded: bool = field(default=True, compare=False, repr=False)  # False: the ledger lacks the row


def exit_status(rows: Sequence[ExpireRow], request: Request | None = None) -> int:
    if status := exit_status_of(rows):
        return status
    if any(finding.broker_deletes for row in rows for finding in row.findings):
        return 1
    return 0 if all(row.recorded for row in rows) else 3


_COLUMNS: tuple[Column[ExpireRow], ...] = (
    PARTITION,
    Column("status", lambda row: row.status + (" (in use)" if row.in_use else ""), is_number=False),
    Column("segments", lambda row: show.change(show.count(row.segments_before), show.count(row.segments_after))),
    Column("log size", lambda row: show.change(show.human_bytes(row.bytes_before), show.human_bytes(row.bytes_after))),
    Column("log start", lambda row: show.change(show.plain(row.log_start_before), show.plain(row.log_start_after))),
    Column("reason", lambda row: ", ".join(f"{why} {n}" for why, n in Counter(s.reason for s in row.expired).items())),
    TOOK,
)


def _is_plain(row: ExpireRow) -> bool:
    return row.status == "kept" and not (row.error or row.findings or row.notes)


def _about_segments(name: str, segments: Sequence[ExpiredSegment]) -> str:
    """Return a sentence, as markup, about removed segments of a partition with the same kind of reason. The reason in
    words is the reason of the last segment."""
    first, last = segments[0], segments[-1]
    facts = f"offsets to {last.end_offset - 1}, {show.human_bytes(sum(segment.log_bytes for segment in segments))}"
    if len(segments) == 1:
        return about(f"{name} segment {first.base_offset} ({facts})", first.why, first.reason)
    which = f"{name} segments {first.base_offset} to {last.base_offset} ({len(segments):,} segments, {facts})"
    return about(which, f"segment {last.base_offset}: {last.why}", last.reason)


def show_rows(rows: Sequence[ExpireRow], request: Request) -> None:
    """Print a line for each partition, then a line for the removed segments of each partition and reason (with
    --verbose, for each segment), then totals. Many partitions with status `kept` are only counted."""
    title = "Expired" if request.execute else "Dry run: nothing was changed"
    shown = print_remarkable(title, _COLUMNS, rows, _is_plain)
    verbose = output_style().verbose
    groups = [
        (row.name, list(segments)) for row in shown
        for _, segments in groupby(row.expired, key=lambda item: item.base_offset if verbose else item.reason)
    ]  # fmt: skip
    segments = [_about_segments(*group) for group in groups]
    if any(len(expired) > 1 for _, expired in groups):
        segments.append("--verbose lists each segment.")
    kept = about_each((row.name, row.kept) for row in shown if row.kept and row.status not in FAILURES)
    findings = [
        about(
            row.name,
            f"{finding.what}. {finding.remedy}",
            "[bold red]error[/]" if finding.broker_deletes else "[yellow]warning[/]",
        )
        for row in shown for finding in row.findings
    ]  # fmt: skip
    print_below(rows, [*segments, *kept, *notes_of(shown), *findings])
    text = total(rows)
    for status, begin in (("would-expire", "To remove"), ("expired", "Removed")):
        sizes = [segment.log_bytes for row in rows if row.status == status for segment in row.expired]
        if sizes:
            text += f" {begin}: {show.human_bytes(sum(sizes))}."
    print_line(f"\n{text}")


def next_step(rows: Sequence[ExpireRow], request: Request) -> str:
    if any(finding.broker_deletes for row in rows for finding in row.findings):
        return (
            "Run `keytail rebuild-index --execute` before you start the broker. A broker that starts on the wrong "
            "indexes deletes segments that must be retained."
        )
    if any(row.status == "would-expire" for row in rows):
        return "This was a dry run. To remove the segments, stop the broker, and run the same command with --execute."
    if any(row.status in FAILURES for row in rows):
        return "The reasons why partitions were not processed, and the remedies, are given above."
    return "Next: start the broker." if any(row.status == "expired" for row in rows) else ""


EXPIRE = Command(
    name="expire",
    also_called=("retention", "delete", "purge", "prune", "trim", "retain", "remove"),
    help="Remove old segments by log start offset, retention.bytes and retention.ms, as a broker does, before its "
    "start.\n\n"
    "Without --execute the command lists the segments that would be removed, and the reasons; --verbose lists each "
    "segment.",
    request=Request,
    run="keytail.expire.driver:expire",
    examples=(f"keytail expire {BROKER}", f"keytail expire {BROKER} --execute"),
    rows={"": ExpireRow},
    statuses={
        "would-expire": Status("in a dry run: segments would be removed", "done"),
        "expired": Status("segments were removed", "done"),
        "kept": Status("nothing is to be removed"),
        **FAILURES,
    },
    exits={1: "also if a broker that starts would delete something that is to be retained"},
    show=show_rows,
    next_step=next_step,
    exit_status=exit_status,
    reads_records=True,
    reports_rows=True,
)
