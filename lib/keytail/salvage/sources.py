"""Selects the files of a damaged partition directory that contain its log, as a starting broker would.

Reads listings, and the headers of outputs of an interrupted replacement. Nothing is changed; contradictions in the
directory become notes. The rules are in log/SWAP.md ("How a broker from 3.0 on treats file names").
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass

from keytail.format import names
from keytail.log.fs import DirEntry, FileSystem
from keytail.log.log_end import log_end


@dataclass(frozen=True)
class LogFile:
    """A file with the record batches of one segment."""

    base_offset: int
    name: str
    size_bytes: int


@dataclass(frozen=True)
class Sources:
    """The log files of a partition, ascending (`logs`); the base offsets of segments without a usable log
    (`lost_bases`); the offsets of snapshots; `notes` on files that are not used; and the base offsets of segments whose
    `.log` is not a regular file, such as a link, and may lead to readable data (`not_taken`)."""

    logs: tuple[LogFile, ...]
    lost_bases: tuple[int, ...]
    snapshots: tuple[int, ...]
    notes: tuple[str, ...]
    not_taken: tuple[int, ...] = ()


def find_sources(fs: FileSystem, path: str) -> Sources:
    """Select the files in the directory `path`. Raises OSError if the directory cannot be listed."""
    notes: list[str] = []
    not_taken: set[int] = set()
    found: dict[tuple[str, str], dict[int, DirEntry]] = defaultdict(dict)
    for entry in sorted(fs.scan(path), key=lambda entry: entry.name):
        name = names.parse_file_name(entry.name)
        if name.kind == "fatal":
            notes.append(f"{entry.name} is not used: no broker writes files of this name")
        elif name.base_offset is None:
            continue
        elif name.suffix == names.LOG and not entry.is_regular:
            notes.append(f"{entry.name} is not used: it is not a regular file")
            if name.kind == "live":
                not_taken.add(name.base_offset)
        else:
            found[name.kind, name.suffix][name.base_offset] = entry
    swaps = _swaps_that_count(found, notes)
    logs = {base: entry for base, entry in found["live", names.LOG].items() if base not in swaps}
    for low, high in _replaced(fs, path, swaps, {*found["live", names.LOG], *found["deleted", names.LOG]}):
        for base in [base for base in logs if low <= base < high]:
            notes.append(f"{logs.pop(base).name} is not used: a .swap file replaces it, as when a broker starts")
    logs |= swaps
    for base, entry in sorted(found["deleted", names.LOG].items()):
        if base not in logs:
            notes.append(f"{entry.name} is not used: a broker removes it")
    known = {base for kind in ("live", "swap", "deleted") for base in found[kind, names.LOG]}
    indexed = {base for suffix in (names.INDEX, names.TIME_INDEX) for base in found["live", suffix]}
    return Sources(
        tuple(LogFile(base, logs[base].name, logs[base].size_bytes) for base in sorted(logs)),
        tuple(sorted((indexed | not_taken) - known)),
        tuple(sorted(found["live", names.SNAPSHOT])),
        tuple(notes),
        tuple(sorted(not_taken - known)),
    )


def _swaps_that_count(found: dict[tuple[str, str], dict[int, DirEntry]], notes: list[str]) -> dict[int, DirEntry]:
    """Return the valid `.swap` logs: a `.swap` with a `.cleaned` at or below its base offset is not used."""
    cleaned = [base for (kind, _), entries in found.items() if kind == "cleaned" for base in entries]
    voids_from = min(cleaned, default=names.MAX_OFFSET)
    swaps = {base: entry for base, entry in found["swap", names.LOG].items() if base < voids_from}
    for base, entry in found["swap", names.LOG].items():
        if base not in swaps:
            notes.append(f"{entry.name} is not used: it belongs to an unfinished replacement")
    return swaps


def _replaced(
    fs: FileSystem, path: str, swaps: dict[int, DirEntry], sources: set[int]
) -> list[tuple[int, int]]:
    """Return the ranges of base offsets that each interrupted replacement replaces. An output with neither a live nor a
    `.deleted` log of its base offset belongs to the replacement of the output before it."""
    ranges: list[tuple[int, int]] = []
    for base, entry in sorted(swaps.items()):
        end = log_end(fs, os.path.join(path, entry.name), base, index_path="").next_offset
        if ranges and base not in sources:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], end))
        else:
            ranges.append((base, end))
    return ranges
