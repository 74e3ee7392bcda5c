"""Restores partitions to their state before a run that kept a backup; lists or removes backups.

Spark is not used. Without `execute` nothing is changed and no lock is taken; with `execute`, the locks of the log dirs
are held from before the survey until after the last operation. Listing and forgetting do not change or lock log dirs,
so a broker may run meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from keytail.cli.progress import Reporter
from keytail.durations import time_text
from keytail.errors import CorruptLog, ErrorText, KeytailError, Refused, UsageProblem, in_words, joined
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.owner import work_as_owner
from keytail.log.partition import LogDirFacts, PartitionEntry, survey_partition
from keytail.log.replacement.recover import recover
from keytail.run.rows import status_of
from keytail.run.storage import hold_local
from keytail.sizes import human_bytes
from keytail.undo.backup import Entry, entries, entry_directories, forget, refuse_foreign
from keytail.undo.command import BackedUpRun, Request, State, UndoRow
from keytail.undo.manifest import Manifest
from keytail.undo.partition import bytes_to_copy, check_backup, decide, read_state, restore

# The existing partitions, by log dir and partition name.
Places: TypeAlias = dict[tuple[str, str], tuple[LogDirFacts, PartitionEntry]]


def run(
    request: Request, on_row: Callable[[UndoRow], None] = lambda row: None
) -> Sequence[UndoRow] | Sequence[BackedUpRun]:
    """List the runs that have a backup, or undo or forget one run, as requested. Return the rows of the result."""
    if not request.is_list:
        return undo(request, on_row=on_row)
    if request.forget or request.execute:
        raise UsageProblem(
            "--list cannot be combined with --forget or --execute"
            if request.run_id
            else "--forget and --execute require --run",
            remedy="Omit --list" if request.run_id else "Give a run that --list shows",
            slug="conflicting-flags" if request.run_id else "missing-flag",
        )
    return backed_up_runs(request)


def backed_up_runs(request: Request, fs: FileSystem = LOCAL) -> list[BackedUpRun]:
    """Return the runs that have a backup, oldest first."""
    by_run: dict[str, list[Entry]] = {}
    for entry in _entries(fs, request):
        by_run.setdefault(entry.run_id, []).append(entry)
    runs = [
        BackedUpRun(
            run_id,
            min((entry.manifest.kept_ms for entry in of_run if entry.manifest), default=None),
            _state(of_run),
            tuple(entry.name for entry in of_run),
            sum(entry.held_bytes for entry in of_run),
        )
        for run_id, of_run in by_run.items()
    ]
    return sorted(runs, key=lambda run: (run.kept_ms or 0, run.run_id))


def _state(of_run: Sequence[Entry]) -> State:
    if any(entry.manifest is None for entry in of_run):
        return "unfinished"
    undone = sum(entry.manifest is not None and entry.manifest.undone_ms is not None for entry in of_run)
    return "undone" if undone == len(of_run) else "partly undone" if undone else "kept"


def undo(
    request: Request, fs: FileSystem = LOCAL, on_row: Callable[[UndoRow], None] = lambda row: None
) -> list[UndoRow]:
    """Undo or forget a run. Returns a row for each requested partition, in the order of their names; `on_row` is called
    with each row when its partition is done."""
    chosen = _chosen(request, _entries(fs, request))
    if request.forget:
        forgotten = []
        for entry in chosen:
            forgotten.append(_forget(fs, entry, request.execute))
            on_row(forgotten[-1])
        return forgotten
    noted = {entry.manifest.log_dir for entry in chosen if entry.manifest is not None}
    with contextlib.ExitStack() as run:
        present = request.log_dirs or tuple(log_dir for log_dir in sorted(noted) if fs.exists(log_dir))
        work_as_owner(fs, present)
        if request.execute and present:
            run.enter_context(hold_local(fs, present, request.shared_storage))
        places = {
            (entry.log_dir, os.path.basename(entry.path)): (listing, entry)
            for listing in survey_log_dirs(fs, present)
            for entry in listing.partitions
        }
        rows = []
        with Reporter("undo", [(entry.name, 0) for entry in chosen]) as reporter:
            for entry in chosen:
                row = _undo(fs, _where_it_is(entry, places, request.log_dirs), places, request.execute)
                rows.append(row)
                on_row(row)
                reporter.done(row.name, row.status, row.bytes_after or 0, row.error)
        return rows


def _entries(fs: FileSystem, request: Request) -> list[Entry]:
    try:
        originals = os.path.realpath(request.originals)
        # The owner of an entry can edit its manifest, so the manifest is used only with the rights of that user.
        work_as_owner(fs, request.log_dirs, (originals, *entry_directories(fs, originals)))
        return entries(fs, originals)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageProblem(
            "--originals is not a directory",
            path=request.originals,
            remedy="Give the directory that was given to --keep-originals",
            slug="not-a-directory",
        ) from error


def _chosen(request: Request, found: Sequence[Entry]) -> list[Entry]:
    of_run = [entry for entry in found if entry.run_id == request.run_id]
    if not of_run:
        runs = ", ".join(dict.fromkeys(entry.run_id for entry in found)) or "none"
        raise UsageProblem(
            f"no backup of run {request.run_id} was found",
            path=request.originals,
            remedy=f"Choose a run that has a backup here ({runs})",
            slug="no-backup-of-run",
        )
    for name in request.partitions:
        if name not in {entry.name for entry in of_run}:
            raise UsageProblem(
                f"--partitions contains {name}, but the backup of run {request.run_id} does not",
                path=request.originals,
                remedy="Choose partitions of this run, which `keytail undo --originals DIR` lists",
                slug="no-backup-of-partition",
            )
    return [entry for entry in of_run if not request.partitions or entry.name in request.partitions]


def _where_it_is(entry: Entry, places: Places, log_dirs: Sequence[str]) -> Entry:
    """Return the entry. If the partition is now in one of `log_dirs`, the manifest of the result has that log dir."""
    of_name = [log_dir for log_dir in log_dirs if (log_dir, entry.name) in places]
    if entry.manifest is None or not of_name:
        return entry
    return replace(entry, manifest=replace(entry.manifest, log_dir=of_name[0]))


def _row(entry: Entry) -> UndoRow:
    topic, _, partition = entry.name.rpartition("-")
    log_dir = entry.manifest.log_dir if entry.manifest is not None else ""
    return UndoRow(entry.run_id, topic, int(partition), log_dir, "clean", held_bytes=entry.held_bytes)


@contextlib.contextmanager
def _explained(rows: list[UndoRow], finish: str) -> Iterator[None]:
    """Convert KeytailError, OSError and MemoryError to the status and error of the last of `rows`."""
    try:
        yield
    except KeytailError as problem:
        rows[-1] = replace(rows[-1], status=status_of(problem), error=in_words(problem))
    except (OSError, MemoryError) as problem:
        rows[-1] = replace(rows[-1], status="failed", error=in_words(problem) + f"; {finish}")


def _forget(fs: FileSystem, entry: Entry, execute: bool) -> UndoRow:
    rows = [replace(_row(entry), status="would-forget")]
    with _explained(rows, "run again to remove the rest of the backup"):
        refuse_foreign(fs, entry.path)
        if execute:
            forget(fs, entry.path)
            rows[-1] = replace(rows[-1], status="forgotten")
    return rows[-1]


def _undo(fs: FileSystem, entry: Entry, places: Places, execute: bool) -> UndoRow:
    rows = [replace(_row(entry), start_ms=time.time_ns() // 1_000_000)]
    with _explained(rows, "the broker can be started safely; run again to continue"):
        rows[-1] = _undone(fs, entry, rows[-1], places, execute, rows.append)
    return replace(rows[-1], end_ms=time.time_ns() // 1_000_000)


def _undone(
    fs: FileSystem,
    entry: Entry,
    row: UndoRow,
    places: Places,
    execute: bool,
    so_far: Callable[[UndoRow], object],
) -> UndoRow:
    manifest = _manifest(entry)
    if manifest.undone_ms is not None:
        when = time_text(manifest.undone_ms)
        return replace(row, error=ErrorText(f"nothing to do: the partition was undone on {when}"))
    notes = _resolve(fs, manifest, places, execute)
    found = read_state(fs, manifest)
    decision = decide(manifest, found)
    row = replace(row, notes=tuple(notes), cleaner_checkpoint_before=found.cleaner_checkpoint)
    so_far(row)
    if decision.differences:
        return replace(
            row,
            status="refused",
            error=f"the partition has changed since run {manifest.run_id}: " + joined(decision.differences),
            differences=decision.differences,
        )
    check_backup(fs, manifest, entry.path, decision.parts)
    logs = {name: file.size_bytes for name, file in found.files.items() if name.endswith(".log")}
    before = {kept.name: kept.size_bytes for kept in manifest.files if kept.name.endswith(".log")}
    # Segments from the end of the run's range on, such as the active segment, which `compact` also counts.
    rest = {name: size for name, size, _ in fs.scan_sizes(manifest.partition_path, ".log").sized if name not in logs}
    row = replace(
        row,
        status="clean" if decision.is_done else "would-undo",
        error=ErrorText("nothing to do: the partition is as before the run" if decision.is_done else ""),
        segments_before=len(logs) + len(rest),
        bytes_before=sum(logs.values()) + sum(rest.values()),
        segments_after=len(before) + len(rest),
        bytes_after=sum(before.values()) + sum(rest.values()),
        cleaner_checkpoint_after=decision.cleaner_checkpoint,
    )
    _check_room(fs, manifest, bytes_to_copy(fs, manifest, entry.path, decision.parts))
    if execute:
        so_far(replace(row, segments_after=None, bytes_after=None))
        fs.refuse_unless_like(fs.stat(manifest.partition_path))
        restore(fs, manifest, entry.path, decision, time.time_ns() // 1_000_000)
        row = row if decision.is_done else replace(row, status="undone")
    return row


def _manifest(entry: Entry) -> Manifest:
    if entry.problem:
        raise CorruptLog(entry.problem, slug="unusable-backup")
    if entry.manifest is None:
        raise Refused(
            "the backup is incomplete: its creation or its removal was interrupted",
            path=entry.path,
            remedy="Remove the rest of the backup with --forget. If its creation was interrupted, nothing was replaced",
            slug="incomplete-backup",
        )
    if entry.manifest.run_id != entry.run_id or entry.manifest.name != entry.name:
        raise CorruptLog(
            f"the backup manifest belongs to run {entry.manifest.run_id}, partition {entry.manifest.name}",
            path=entry.path,
            remedy="Move the manifest back to the backup to which it belongs",
            slug="manifest-of-another-run",
        )
    return entry.manifest


def _resolve(fs: FileSystem, manifest: Manifest, places: Places, execute: bool) -> list[str]:
    """With `execute`, resolve leftovers of an interrupted run. Returns a note for each action. Raises Refused if the
    partition must not be changed."""
    if (manifest.log_dir, manifest.name) not in places:
        raise Refused(
            "the partition no longer exists in the log dir that it had in the run",
            path=manifest.partition_path,
            remedy="If the partition was moved to another log dir, give that log dir with --log-dirs",
            slug="partition-not-in-log-dir",
        )
    listing, place = places[manifest.log_dir, manifest.name]
    if place.problems:
        raise Refused(joined(place.problems), slug="unexpected-partition-state")
    done: list[str] = []
    facts = survey_partition(fs, listing, place)
    if facts.leftovers and execute:
        done = recover(fs, manifest.partition_path)
        facts = survey_partition(fs, listing, place)
    if facts.problems:
        raise Refused(joined(facts.problems), slug="unexpected-partition-state")
    return done


def _check_room(fs: FileSystem, manifest: Manifest, needed: int) -> None:
    if needed and needed > (free := fs.free_bytes(manifest.partition_path)):
        raise Refused(
            f"restoring the backup needs {human_bytes(needed)}, but {human_bytes(free)} are free",
            path=manifest.partition_path,
            remedy=f"Free {human_bytes(needed - free)} more on this file system",
            slug="not-enough-space",
        )
