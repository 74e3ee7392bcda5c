"""Writes the intact batches of damaged partitions to another directory, and lists the losses.

The source is only read, and no lock is taken, since that would create a file in the log dir. If a process holds the
lock, or this is unknown, the partition is refused. Without `execute` nothing is written anywhere.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import Any

from keytail.acting_user import as_caller
from keytail.cli.configuration import Configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.outside import refuse_unless_empty
from keytail.cli.progress import Reporter
from keytail.cli.selection import select_partitions
from keytail.errors import EXPLAINED, Refused, in_words
from keytail.format import names
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import is_held
from keytail.log.partition import LogDirFacts, PartitionEntry
from keytail.rebuild_index.partition import RebuildSettings
from keytail.run.kernels import compile_kernels
from keytail.run.rows import status_of
from keytail.run.watching import sending_progress
from keytail.salvage.command import Request, SalvageRow
from keytail.salvage.partition import Salvage, salvage_partition
from keytail.salvage.write import NewPartition


def salvage(
    request: Request, fs: FileSystem = LOCAL, on_row: Callable[[SalvageRow], None] = lambda row: None
) -> list[SalvageRow]:
    """Salvage the chosen partitions; without `execute` only scan them. Returns a row for each partition, by log dir;
    `on_row` is called with each row when its partition is done."""
    chosen = select_partitions(fs, request.partition_filter)
    with as_caller():
        target = os.path.realpath(request.to)
    refuse_unless_empty(fs, target, request.partition_filter.log_dirs, "--to")
    configuration = with_metadata(fs, request.partition_filter.log_dirs, request.configuration)
    if request.execute and chosen.partitions and not fs.exists(target):
        fs.mkdir(target, fs.stat(os.path.dirname(target)))
        fs.fsync_dir(os.path.dirname(target))
    run_id = secrets.token_hex(4)
    rows = []
    sizes = [(os.path.basename(entry.path), _log_bytes(fs, entry.path)) for _, entry in chosen.partitions]
    with Reporter("salvage", sizes) as reporter:
        compile_kernels(["salvage"], reporter.note)
        reporter.watch()
        for log_dir, entry in chosen.partitions:
            start_ms = time.time_ns() // 1_000_000
            try:
                with sending_progress(entry.path, "here", "salvage"):
                    row = _one(fs, log_dir, entry, configuration, request, target, run_id, start_ms)
            except EXPLAINED as problem:
                place = (entry.topic, entry.partition, entry.log_dir)
                row = SalvageRow(*place, status_of(problem), in_words(problem), start_ms=start_ms)
            rows.append(row)
            on_row(row)
            reporter.done(row.name, row.status, row.bytes, row.error)
    return rows


def _log_bytes(fs: FileSystem, path: str) -> int:
    try:
        return sum(size for _, size, _ in fs.scan_sizes(path, names.LOG).sized)
    except OSError:  # the row of the partition has the reason
        return 0


def _one(
    fs: FileSystem,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    configuration: Configuration,
    request: Request,
    target: str,
    run_id: str,
    start_ms: int,
) -> SalvageRow:
    if is_held(log_dir.path, fs):
        raise Refused(
            "the log dir is in use, or its lock cannot be checked",
            path=log_dir.path,
            remedy="Stop the broker, or salvage from a copy of the log dir that was made while it was stopped",
            slug="log-dir-in-use",
        )
    values = configuration.of(entry.topic).values()
    settings = RebuildSettings(
        index_interval_bytes=int(values["index.interval.bytes"]),  # type: ignore[arg-type]  # an int
        segment_index_bytes=int(values["segment.index.bytes"]),  # type: ignore[arg-type]  # the same
        execute=True,
        run_id=run_id,
    )
    topic_id = _topic_id(configuration, entry.topic)
    new = NewPartition(fs, target, entry, settings, topic_id) if request.execute else None
    found = salvage_partition(fs, log_dir, entry, new)
    return _row(entry, found, start_ms)


def _topic_id(configuration: Configuration, topic: str) -> str | None:
    cluster = configuration.cluster
    if cluster is None or cluster.metadata is None or topic not in cluster.metadata.topics:
        return None
    return cluster.metadata.topics[topic].topic_id


def _row(entry: PartitionEntry, found: Salvage, start_ms: int) -> SalvageRow:
    values: dict[str, Any] = {name: tuple(it) if isinstance(it, list) else it for name, it in vars(found).items()}
    status = "salvaged" if found.to else "would-salvage"
    end_ms = time.time_ns() // 1_000_000
    return SalvageRow(entry.topic, entry.partition, entry.log_dir, status, **values, start_ms=start_ms, end_ms=end_ms)
