"""Prints the rows of `plan` and `compact` as a table, with reasons and totals below, and states the next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keytail.cli import rows as show
from keytail.cli.statuses import styled
from keytail.cli.table import PARTITION, STATUS, TOOK, Column, print_line, print_paragraph, print_rows
from keytail.compact.measure.show import MEASURED_COLUMNS, print_topics, topics_of
from keytail.compact.repack.table import next_step_of_repack, show_repack
from keytail.compact.roll import ROLLED, WOULD_ROLL, is_shown
from keytail.run.memory import cores
from keytail.run.rows import ResultRow

if TYPE_CHECKING:
    from keytail.compact.command import Request

_WITH_OFFSETS = ("would-compact", "prepared", "compacted")


def _dirty(row: ResultRow) -> str:
    return f"{row.first_dirty_offset}..{row.end_dirty_offset}" if row.status in _WITH_OFFSETS else ""


_LOG_DIR: Column[ResultRow] = Column("log dir", lambda row: row.log_dir, is_number=False)
_SIZES: tuple[Column[ResultRow], ...] = (
    Column("segments", lambda row: show.change(show.count(row.segments_before), show.count(row.segments_after))),
    Column("log size", lambda row: show.change(show.human_bytes(row.bytes_before), show.human_bytes(row.bytes_after))),
)
_DIRTY: Column[ResultRow] = Column("offsets to clean", _dirty)
_PLAN_COLUMNS: tuple[Column[ResultRow], ...] = (
    _DIRTY,
    Column("strategy", lambda row: row.strategy or "", is_number=False),
    Column("expected", lambda row: "" if row.expected_s is None else show.human_time(row.expected_s)),
    Column("scratch", lambda row: show.human_bytes(row.expected_scratch_bytes)),
)
_RUN_COLUMNS: tuple[Column[ResultRow], ...] = (
    Column("records", lambda row: show.change(show.count(row.records_before), show.count(row.records_after))),
    _DIRTY,
    TOOK,
)


def _title(request: Request) -> str:
    if request.prepare:
        return "Prepared: nothing was replaced"
    if request.is_out_of_place:
        return "Compacted out of place" if request.execute else "Dry run: nothing was written"
    return "Compacted" if request.execute else "Dry run: nothing was changed"


def show_plan(rows: Sequence[ResultRow], request: Request) -> None:
    print_table("Plan", rows)
    topics = topics_of(rows, cores())
    if topics and len(topics) < len(rows):
        print_topics(topics)


def show_compact(rows: Sequence[ResultRow], request: Request) -> None:
    """Print no table if nothing was done, is due or failed: each of its lines would be `clean` or `skipped`."""
    if request.repack is not None:
        show_repack(rows, execute=request.execute)
    elif any(row.status not in ("clean", "skipped") for row in rows):
        print_table(_title(request), rows)
    else:
        _print_reasons_and_totals(rows, is_below_table=False)


def print_table(title: str, rows: Sequence[ResultRow]) -> None:
    """Print one line per partition, the reasons below, then totals."""
    log_dir = [_LOG_DIR] if len({row.log_dir for row in rows}) > 1 else []
    rest = (*_SIZES, *(_PLAN_COLUMNS if any(row.strategy for row in rows) else _RUN_COLUMNS))
    if any(row.measured is not None for row in rows):
        rest = MEASURED_COLUMNS
    print_rows(title, [PARTITION, *log_dir, STATUS, *rest], rows)
    _print_reasons_and_totals(rows)


def _print_reasons_and_totals(rows: Sequence[ResultRow], is_below_table: bool = True) -> None:
    reasons = [(row.name, row.status, reason) for row in rows if (reason := _reason(row))]
    if is_below_table:
        print_paragraph(reasons)
    else:
        show.print_reasons(reasons)
    print_line(("\n" if reasons or is_below_table else "") + _totals(rows))


def _reason(row: ResultRow) -> str:
    held = ""
    if row.removal_limit_replica is not None:
        held = (
            f"tombstones and markers from offset {row.removal_limit_offset} on are retained: replica "
            f"{row.removal_limit_replica} has not been cleaned further"
        )
    discarded = f"what was prepared is {row.prepared}" if (row.prepared or "").startswith("discarded") else ""
    reason = row.error if row.shown is None else row.shown
    kept = f"the active segment is {row.active_segment}" if is_shown(row.active_segment) else ""
    return "; ".join(text for text in (reason, discarded, held, kept) if text)


def _totals(rows: Sequence[ResultRow]) -> str:
    counts = Counter(row.status for row in rows)
    parts = [f"{number} {styled(status)}" for status, number in counts.most_common()]
    text = "No partitions."
    if rows:
        text = f"{len(rows)} partition{'s' if len(rows) != 1 else ''}: {', '.join(parts)}."
    done = [row for row in rows if row.status == "compacted"]
    if done:
        before = sum(row.bytes_before or 0 for row in done)
        after = sum(row.bytes_after or 0 for row in done)
        saved = f" ({100 * (before - after) / before:.0f} % less)" if before else ""
        text += f" Compacted: {show.human_bytes(before)} -> {show.human_bytes(after)}{saved}"
        records = sum((row.records_before or 0) - (row.records_after or 0) for row in done)
        text += f", {records:,} records removed."
    if rolled := sum(row.active_segment == ROLLED for row in rows):
        text += f" Active segments rolled: {rolled:,}."
    would = [row for row in rows if row.status == "would-compact"]
    if would:
        text += f" To read: up to {show.human_bytes(sum(row.bytes_before or 0 for row in would))}."
    if to_roll := sum(row.active_segment == WOULD_ROLL for row in rows):
        text += f" Active segments to roll: {to_roll:,}."
    return text


def after_plan(rows: Sequence[ResultRow], request: Request) -> str:
    if any(row.status == "would-compact" for row in rows):
        text = "Next: stop the broker, then run `keytail compact` with the same flags and --execute."
        return _with_refused(text, rows)
    return _about_refused(rows)


def _after_dry_run(rows: Sequence[ResultRow]) -> str:
    if any(row.status == "would-compact" for row in rows):
        text = "This was a dry run. To compact, stop the broker and run the same command with --execute."
        return _with_refused(text, rows)
    return _about_refused(rows) or "This was a dry run, and no compaction is due."


def _then(rows: Sequence[ResultRow]) -> str:
    """Return the step after `verify`: a broker that starts may truncate or delete damaged logs."""
    if any(row.status == "corrupt" for row in rows):
        return "and resolve what is corrupt before you start the broker"
    return "then start the broker"


def _after_compact(rows: Sequence[ResultRow]) -> str:
    if any(row.status == "compacted" for row in rows):
        return _with_refused(f"Next: run `keytail verify` on the same partitions, {_then(rows)}.", rows)
    return _about_refused(rows) or "Nothing was due; no segment was changed."


def _after_prepare(rows: Sequence[ResultRow]) -> str:
    if any(row.status == "prepared" for row in rows):
        return "Next: stop the broker, then run the same command with --execute in place of --prepare."
    return _about_refused(rows) or "Nothing was due; nothing was prepared."


def _with_refused(text: str, rows: Sequence[ResultRow]) -> str:
    refused = _about_refused(rows)
    return f"{text} {refused}" if refused else text


def _about_refused(rows: Sequence[ResultRow]) -> str:
    bad = [row for row in rows if row.status in ("refused", "corrupt", "failed")]
    if not bad:
        return ""
    if any(row.status == "failed" for row in bad):
        return f"Partitions not compacted: {len(bad)}. Resolve the reasons above and run again."
    unchanged = "" if any(row.active_segment == ROLLED for row in bad) else " and unchanged"
    return f"Partitions not compacted{unchanged}: {len(bad)}. Reasons and remedies are given above."


_DO_IT = "To compact, run the same command with --execute."


def next_step(rows: Sequence[ResultRow], request: Request) -> str:
    if request.repack is not None:
        return next_step_of_repack(rows, execute=request.execute)
    if request.prepare:
        return _after_prepare(rows)
    if request.is_out_of_place:
        return _about_refused(rows) if request.execute else _with_refused(_DO_IT, rows)
    return _after_compact(rows) if request.execute else _after_dry_run(rows)
