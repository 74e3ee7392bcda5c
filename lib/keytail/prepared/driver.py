"""Lists and discards the preparations of `compact --prepare`.

Only discarding takes a lock, the one for preparations. The broker may be running.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from keytail.cli.configuration import Configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.selection import select_partitions
from keytail.compact.planning import check_clock, plan_partition_of
from keytail.compact.prepared.committing import discard, read_record, reason_against_commit
from keytail.compact.prepared.record import Record
from keytail.compact.prepared.scratch import is_prepared, is_record
from keytail.compact.rules import Rules
from keytail.errors import EXPLAINED, ErrorText, in_words
from keytail.format import names
from keytail.log.fs import LOCAL, DirEntry, FileSystem
from keytail.log.lock import hold
from keytail.log.partition import LogDirFacts, PartitionEntry
from keytail.prepared.command import PreparedRow, Request
from keytail.run.each_partition import of_each
from keytail.run.rows import status_of


def prepared(request: Request, fs: FileSystem = LOCAL) -> list[PreparedRow]:
    """Return a row for each chosen partition with a preparation. With `discard` and `execute`, also discard the
    preparations."""
    rules = Rules(check_clock(request.now_ms, False, True), force=True, high_watermark=request.high_watermark)
    with contextlib.ExitStack() as run:
        chosen = select_partitions(fs, request.partition_filter)
        discards = request.discard and request.execute
        if discards:
            run.enter_context(hold(request.partition_filter.log_dirs, fs, names.PREPARE_LOCK))
        configuration = with_metadata(fs, request.partition_filter.log_dirs, request.configuration, rules.now_ms)
        if discards:
            rows = [_discarded(fs, entry) for _, entry in chosen.partitions]
        else:
            rows = of_each(
                chosen.partitions, lambda log_dir, entry: _row(fs, log_dir, entry, configuration, rules), fs
            )
        return [row for row in rows if row is not None]


def _discarded(fs: FileSystem, entry: PartitionEntry) -> PreparedRow | None:
    return _guarded(entry, lambda row: _discard(fs, entry, row))


def _row(
    fs: FileSystem, log_dir: LogDirFacts, entry: PartitionEntry, configuration: Configuration, rules: Rules
) -> PreparedRow | None:
    return _guarded(entry, lambda row: _judge(fs, log_dir, entry, configuration, rules, row))


def _guarded(entry: PartitionEntry, make: Callable[[PreparedRow], PreparedRow | None]) -> PreparedRow | None:
    """Return the row that `make` returns, or a row with the error that it raises."""
    row = PreparedRow(entry.topic, entry.partition, entry.log_dir, "stale")
    try:
        return make(row)
    except EXPLAINED as error:
        return replace(row, status=status_of(error), error=in_words(error))


def _found(fs: FileSystem, path: str) -> list[DirEntry]:
    return [file for file in fs.scan(path) if is_prepared(file.name)]


def _discard(fs: FileSystem, entry: PartitionEntry, row: PreparedRow) -> PreparedRow | None:
    found = _found(fs, entry.path)
    if not found:
        return None
    record, _ = read_record(fs, entry.path, [file.name for file in found])
    disk_bytes = discard(fs, entry.path)
    return replace(_of_record(row, record), status="discarded", disk_bytes=disk_bytes)


def _judge(
    fs: FileSystem,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    configuration: Configuration,
    rules: Rules,
    row: PreparedRow,
) -> PreparedRow | None:
    found = _found(fs, entry.path)
    if not found:
        return None
    record, reason = read_record(fs, entry.path, [file.name for file in found])
    if record is not None:
        planned = plan_partition_of(fs, log_dir, entry, configuration, rules)
        # The message format of the committing run is unknown here.
        planned = replace(planned, message_format=record.basis.message_format)
        basis = record.basis
        rules = replace(rules, by_file_time=basis.by_file_time, drop_keyless=basis.drop_keyless)
        reason = reason_against_commit(fs, record, planned, rules)
    elif not reason:
        reason = ErrorText("the preparation has no record: its run was stopped, or has not ended")
    return replace(
        _of_record(row, record),
        status="stale" if reason else "ready",
        error=reason,
        disk_bytes=sum(file.size_bytes for file in found if not is_record(file.name)),
    )


def _of_record(row: PreparedRow, record: Record | None) -> PreparedRow:
    if record is None:
        return row
    return replace(
        row,
        run_id=record.run_id,
        prepared_ms=record.prepared_ms,
        end_dirty_offset=record.result.end_offset,
        bytes_before=record.result.bytes_before,
        bytes_after=record.result.bytes_after,
    )
