"""Adds missing outcomes to the ledger: those of runs that were killed, and those that could not be written.

The present run holds the locks of the log dirs, so a run with an intent for these log dirs and without an outcome has
ended. The outcome of such a run is determined from the disk; `repaired_by` in the added row is the id of the present
run.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from keytail.errors import ErrorText
from keytail.format import names
from keytail.ledger.tables import OUTCOME
from keytail.ledger.write import Ledger
from keytail.log.checkpoint import read_offsets
from keytail.log.fs import LOCAL, FileSystem
from keytail.run.rows import RECORDED, ResultRow
from keytail.run.spark.engine import name_jobs

_OF_PARTITION = ["run_id", "log_dir", "topic", "partition"]


@dataclass(frozen=True)
class Unfinished:
    """An intent for a partition, without an outcome. `row` has the planned numbers."""

    run_id: str
    command: str
    bundle: int | None
    row: ResultRow


def repair(ledger: Ledger, log_dirs: Collection[str], *, shared_storage: bool = False, fs: FileSystem = LOCAL) -> int:
    """Write the missing outcomes of intents on the log dirs `log_dirs`; return the number of outcomes. A path
    identifies a log dir only on one host, so intents of other hosts are ignored unless `shared_storage` is set."""
    host = None if shared_storage else ledger.host
    if ledger.engine.session is not None:
        name_jobs(ledger.engine.session.sparkContext, "ledger: missing outcomes of earlier runs")
    open_partitions = _without_outcome(ledger, "partitions", _OF_PARTITION, host)
    unfinished = [_unfinished(row) for row in open_partitions if row["log_dir"] in log_dirs]
    for item in unfinished:
        row, made = as_on_disk(fs, item.row, item.command, ledger.run_id)
        of_run = {"run_id": item.run_id, "command": item.command, "repaired_by": ledger.run_id}
        ledger.conclude(item.bundle, [row], {row.name: made}, **of_run)
    return len(unfinished) + _repair_runs(ledger, set(log_dirs), host)


def as_on_disk(fs: FileSystem, intended: ResultRow, command: str, by_run: str) -> tuple[ResultRow, Sequence[int]]:
    """Return the result row of a partition that a command intended to change, and the base offsets of its cleaned
    segments (none if the compaction was not completed).

    The cleaner's checkpoint moves after the last group of a round is durable: if it is above the offset at which the
    round began, the compaction was completed. For other commands, the files do not show whether they were completed.
    """
    path = os.path.join(intended.log_dir, intended.name)
    try:
        checkpoint = read_offsets(fs, os.path.join(intended.log_dir, names.CLEANER_CHECKPOINT))
        logs = [entry for entry in fs.scan(path) if entry.name.endswith(names.LOG)]
    except FileNotFoundError:
        why = ErrorText(f"run {by_run} found that the partition no longer exists")
        return intended.unchanged("interrupted", why), ()
    bases = {base: entry.size_bytes for entry in logs if (base := names.base_of_live(entry.name)) is not None}
    cleaned_to = checkpoint.get((intended.topic, intended.partition), -1)
    is_done = command == "compact" and cleaned_to > (intended.first_dirty_offset or 0)
    row = ResultRow(
        topic=intended.topic,
        partition=intended.partition,
        log_dir=intended.log_dir,
        status="compacted" if is_done else "interrupted",
        error=ErrorText(f"the outcome was lost; run {by_run} determined it from the disk"),
        first_dirty_offset=intended.first_dirty_offset,
        end_dirty_offset=cleaned_to if is_done else intended.end_dirty_offset,
        segments_before=intended.segments_before,
        segments_after=len(bases),
        bytes_before=intended.bytes_before,
        bytes_after=sum(bases.values()),
    )
    return row, sorted(base for base in bases if is_done and base < cleaned_to)


def _without_outcome(ledger: Ledger, table: str, keys: Sequence[str], host: str | None) -> list[dict[str, Any]]:
    return [row for row in ledger.intents_without_outcome(table, keys) if host in (None, row["host"])]


def _unfinished(row: Any) -> Unfinished:
    planned = ResultRow(**{name: row[name] for name in RECORDED if name != "error"})
    return Unfinished(row["run_id"], row["command"], row["bundle"], planned)


def _repair_runs(ledger: Ledger, log_dirs: set[str], host: str | None) -> int:
    """Add the outcomes of ended runs, and return the number of outcomes. A run on other log dirs than `log_dirs` is
    omitted: it may still be running, since only the locks of `log_dirs` are held."""
    open_runs = _without_outcome(ledger, "runs", ["run_id"], host)
    lost = [row for row in open_runs if row["run_id"] != ledger.run_id and set(row["log_dirs"] or ()) <= log_dirs]
    error = f"run {ledger.run_id} found that the run recorded no outcome"
    message = {"event": OUTCOME, "status": "interrupted", "error": error, "repaired_by": ledger.run_id}
    ledger.append("runs", [{**row, **message} for row in lost])
    return len(lost)
