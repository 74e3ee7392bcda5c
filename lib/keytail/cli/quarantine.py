"""Writes `--quarantine-report FILE`: the refused, corrupt, damaged and failed partitions, for programs.

The file has a JSON array with one object per partition: what is wrong, the place in machine-readable form, and possible
remedies. The file is written whole or not at all, outside of every log dir. guide/undo-and-salvage.md describes its use
("A partition is damaged"). `--rows-file FILE`, with all rows, is written in the same way.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import typer

from keytail.cli import rows as show
from keytail.cli.statuses import is_failure
from keytail.cli.stopping import Stopped
from keytail.cli.whole_file import refuse_file, write_whole
from keytail.errors import CORRUPT_HELP, ErrorText, KeytailError
from keytail.format import names
from keytail.log.checkpoint import read_offsets
from keytail.log.fs import LOCAL, FileSystem
from keytail.run.ended import SparkEnded

_PLACE_FIELDS = ("byte_position", "byte_end", "offset", "offset_end", "what", "remedy")


@dataclass(frozen=True)
class Place:
    """One problem: the bytes of a file and the offsets that are wrong; None where unknown.

    `byte_end` and `offset_end` are exclusive.
    """

    what: str
    path: str | None
    byte_position: int | None = None
    byte_end: int | None = None
    offset: int | None = None
    offset_end: int | None = None
    remedy: str | None = None


def place_of(problem: KeytailError) -> Place:
    return Place(problem.what, problem.path, problem.byte_position, None, problem.offset, None, problem.remedy)


@contextlib.contextmanager
def writing_row_files(
    path: str | None, log_dirs: Sequence[str], rows_file: str | None = None, fs: FileSystem = LOCAL
) -> Iterator[list[Any]]:
    """Yield a list for rows, and write the quarantine report (`path`) and the rows file when the command exits.

    Each file is written even if the other cannot be written. A failure is printed, and the exit status is then 1 if the
    run itself has status 0. If a run was stopped, or Spark ended, the rows of the exception are written to `rows_file`
    only. Raises UsageProblem, before anything is done, for a path in a log dir, or if the file cannot be created.
    """
    rows: list[Any] = []
    for flag, file in (("--quarantine-report", path), ("--rows-file", rows_file)):
        if file is not None:
            refuse_file(fs, file, log_dirs, flag)

    def write_rows(reported: Sequence[Any]) -> bool:
        return rows_file is None or _write("the rows file", rows_file, lambda file: show.write_json(reported, file))

    try:
        yield rows
    except typer.Exit as ended:
        is_complete = write_rows(rows)
        if path is not None:
            entries = json.dumps([entry(fs, row) for row in rows if is_failure(row.status)], indent=2)
            is_complete &= _write("the quarantine report", path, lambda file: file.write(f"{entries}\n"))
        if not is_complete and not ended.exit_code:  # the exit status of the run takes precedence
            raise typer.Exit(1) from ended
        raise
    except (SparkEnded, Stopped) as ended:
        if ended.rows is not None:
            write_rows(ended.rows)
        raise


def _write(what: str, path: str, write: Callable[[TextIO], object]) -> bool:
    """Write a file, and return True. If writing fails, report the error, and return False."""
    try:
        write_whole(path, write)
    except (KeytailError, OSError) as problem:
        show.print_error(f"{what} could not be written: " + ErrorText(problem))
        return False
    return True


def entry(fs: FileSystem, row: Any) -> dict[str, Any]:
    """Return the object of the quarantine report for one row."""
    places = _places(row)
    problems = [{"file": place.path, **{name: getattr(place, name) for name in _PLACE_FIELDS}} for place in places]
    helps = []
    if row.status in ("corrupt", "damaged") and row.topic is not None:
        helps = [{"how": how, "text": CORRUPT_HELP[how]} for how in remedies_of(fs, row, places)]
    return {
        **{name: getattr(row, name) for name in ("topic", "partition", "log_dir", "status", "error")},
        "problems": problems,
        "helps": helps,
    }


def _places(row: Any) -> list[Place]:
    """Return a Place for each error that an inspection found, for each place of the row, and for the error of the run;
    if there are none, return one Place with the row's error."""
    findings = getattr(row, "findings", ())
    found = [
        Place(f.what, f.path, f.byte_position, None, f.offset, None, f.remedy)
        for f in findings
        if f.severity == "error"
    ]
    found += getattr(row, "places", ())
    if row.problem is not None:
        found.append(place_of(row.problem))
    return found or [Place(row.error, None)]


def remedies_of(fs: FileSystem, row: Any, places: Sequence[Place]) -> list[str]:
    """Return the keys of CORRUPT_HELP that apply to a damaged partition. `truncate` applies only to an incomplete tail
    after a crash; `salvage` is always last."""
    return ["re-fetch", *(["truncate"] if _is_torn_tail(fs, row, places) else []), "salvage"]


def _is_torn_tail(fs: FileSystem, row: Any, places: Sequence[Place]) -> bool:
    """Return whether all damage is in the last segment, at or above the recovery point, of a broker that crashed.

    Damage whose offset is unknown may be anywhere in the segment.
    """
    partition = os.path.join(row.log_dir, names.partition_dir(row.topic, row.partition))
    try:
        listed = [names.parse_file_name(file.name) for file in fs.scan(partition)]
        recovery_points = read_offsets(fs, os.path.join(row.log_dir, names.RECOVERY_POINT_CHECKPOINT))
        clean = fs.exists(os.path.join(row.log_dir, names.CLEAN_SHUTDOWN))
    except (KeytailError, OSError):
        return False
    bases = [file.base_offset for file in listed if file.suffix == names.LOG and file.kind == "live"]
    if clean or not bases:
        return False
    base = max(base for base in bases if base is not None)
    last = os.path.join(partition, names.segment_file(base, names.LOG))
    point = recovery_points.get((row.topic, row.partition), 0)
    return all(
        place.path == last and (base if place.offset is None else place.offset) >= point for place in places
    )
