"""Erases the records with given keys in the chosen partitions.

Tasks read logs and write scratch files; the driver rolls active segments and replaces segments. Without `execute`
nothing is changed and no lock is taken. With `execute`, locks are held from before partitions are surveyed to the end
of all checks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from keytail.acting_user import caller_name
from keytail.cli.metadata import with_metadata
from keytail.cli.progress import Reporter
from keytail.cli.selection import select_partitions
from keytail.config.files import log_dirs as log_dirs_of
from keytail.console import print_message
from keytail.erase.backups import Backups, backups_of_ledger
from keytail.erase.command import EraseRow, Request, exit_status
from keytail.erase.erasure import Erasure
from keytail.erase.examining import Examined, examine
from keytail.erase.keys import read_keys_file
from keytail.erase.other_directories import other_directories
from keytail.errors import UsageProblem, joined
from keytail.ledger.of_run import Recording, Run, recording, run_id_at
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import hold_off_preparations
from keytail.run.engine import Engine, ThisProcess
from keytail.run.kernels import compile_kernels
from keytail.run.rates import HERE_BYTES, INDEXED_BYTES_PER_S
from keytail.run.storage import hold_local
from keytail.run.workers import workers_of_run

_READS = 3.0  # estimate of how often each byte is read: to find keys, to rewrite and prove, and for the last check


def erase(
    request: Request, fs: FileSystem = LOCAL, on_row: Callable[[EraseRow], None] = lambda row: None
) -> list[EraseRow]:
    """Erase the records; without `execute` only count them. Returns a row for each chosen partition, in the order of
    log dirs. `on_row` is called with the row of each partition when the partition has ended."""
    log_dirs = request.partition_filter.log_dirs
    with contextlib.ExitStack() as run:
        _refuse_all_topics(request)
        select_partitions(fs, request.partition_filter)  # invalid flags are reported before any lock is taken
        flags = request.ledger.checked(fs, log_dirs)
        keys = read_keys_file("--keys-file", request.keys_file, request.key_format, request.key_schema)
        if request.execute:
            run.enter_context(hold_local(fs, log_dirs, request.shared_storage))
            run.enter_context(hold_off_preparations(log_dirs, fs))
        chosen = select_partitions(fs, request.partition_filter)
        configuration = with_metadata(fs, log_dirs, request.configuration)
        others = other_directories(fs, chosen.log_dirs, log_dirs_of(configuration.broker))
        known = [(entry.topic, entry.partition) for _, entry in chosen.partitions]
        others.refuse_without_partition(known, request.partition_filter)
        items = [
            examine(fs, log_dir, entry, configuration, execute=request.execute, others=others)
            for log_dir, entry in chosen.partitions
        ]
        sizes = [(os.path.basename(item.facts.path), item.facts.log_bytes) for item in items]
        with Reporter("erase", sizes, _READS if request.execute else 1.0) as reporter:
            to_read = [item.facts.log_bytes for item in items if item.config is not None]
            engine = _engine(run, request, reporter, to_read, fs)
            reporter.note(f"keys in {request.keys_file}: {keys.count:,}")
            if flags.path is not None:
                backups = backups_of_ledger(flags.path, log_dirs, engine.session)
                items = [_without_backups(fs, item, backups) for item in items]
            now_ms = time.time_ns() // 1_000_000
            run_id = secrets.token_hex(4)
            erasure = Erasure(
                engine, items, keys, run_id, now_ms, request.execute,
                on_row=lambda row: _report(reporter, on_row, row),
                on_trace=lambda trace: print_message(trace, "error"), on_note=reporter.note, fs=fs,
                shared_storage=request.shared_storage,
            )  # fmt: skip
            if not request.execute:
                return erasure.run()
            about = Run(
                "erase", run_id_at(now_ms, run_id), now_ms, log_dirs, configuration, request.shared_storage,
                {"keys": str(keys.count), "SHA-256 of --keys-file": keys.file_digest, "user": caller_name()},
            )  # fmt: skip
            with recording(flags, engine, about, on_note=reporter.note, fs=fs) as record:
                rows = _recorded(erasure, record)
        return record.recorded(rows)


def _recorded(erasure: Erasure, record: Recording) -> list[EraseRow]:
    record.intend([replace(item.row(), status="begun") for item in erasure.items if item.config is not None])
    try:
        rows = erasure.run()
    except BaseException:  # ended partitions are recorded; all others appear as interrupted
        record.end(erasure.done, 1, erasure.made)
        raise
    record.end(rows, exit_status(rows), erasure.made)
    return rows


def _report(reporter: Reporter, on_row: Callable[[EraseRow], None], row: EraseRow) -> None:
    on_row(row)
    reporter.done(row.name, row.status, row.bytes_before or 0, row.error)


def _refuse_all_topics(request: Request) -> None:
    chosen = request.partition_filter
    if not (chosen.topic_patterns or chosen.topics or chosen.partitions):
        raise UsageProblem(
            "no topics are given",
            remedy="Give --topic, --topic-list or --partitions; --topic '.*' means all topics",
            slug="missing-flag",
        )


def _without_backups(fs: FileSystem, item: Examined, backups: Backups) -> Examined:
    """Return the partition, with status `refused` if `backups` has a backup of it that exists."""
    reasons = backups.reasons(fs, os.path.basename(item.facts.path)) if item.config is not None else []
    return replace(item, config=None, status="refused", error=joined(reasons)) if reasons else item


def _engine(
    run: contextlib.ExitStack, request: Request, reporter: Reporter, sizes: list[int], fs: FileSystem
) -> Engine:
    """Return the engine of the run: this process if few bytes are read, otherwise local workers or Spark."""
    flags, here = request.ledger, ThisProcess()
    why_spark = flags.why_spark()
    if fs is not LOCAL or (request.master is None and sum(sizes) <= HERE_BYTES and not why_spark):
        if sizes:
            compile_kernels(["erase"], reporter.note)
        reporter.watch(here.driver_address)
        return here
    if why_spark and request.master is None:
        reporter.note(why_spark)
    seconds = [size / INDEXED_BYTES_PER_S for size in sizes]
    return workers_of_run(
        run, reporter, request.master, seconds, kernels="erase", needs_spark=bool(why_spark),
        extra=flags.session_settings,
    )  # fmt: skip
