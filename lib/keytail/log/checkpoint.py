"""Text checkpoints of log dirs and partitions: read as strictly as a broker, written atomically.

A broker takes a whole log dir offline for a syntax error in one of these, so what it would not read is
`CorruptLog` with the line's number, and what is written is durable before it takes the file's place. Which
offset is right is left to the callers.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from keytail.errors import CorruptLog
from keytail.format import names
from keytail.log.fs import FileStat, FileSystem

Offsets: TypeAlias = dict[tuple[str, int], int]

_VERSION = 0
_LINE_END = re.compile(r"\r\n|\n|\r")
_SPACE = re.compile(r"[ \t\n\x0b\f\r]+")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_MOST_DIGITS = 19  # of 2^63, zeros in front not counted

# Threads of one driver finish partitions of the same log dir at the same time.
_updating = threading.Lock()


def read_offsets(fs: FileSystem, path: str) -> Offsets:
    """Offset by (topic, partition). A missing or empty file holds none; of duplicates the last one counts."""
    offsets: Offsets = {}
    for number, fields in _read_lines(fs, path, fields_wanted=3):
        partition = _integer(fields[1], path, number, 2**31, "partition")
        offsets[fields[0], partition] = _integer(fields[2], path, number, 2**63, "offset")
    return offsets


def read_epochs(fs: FileSystem, path: str) -> list[tuple[int, int]]:
    """Leader epochs and their start offsets, in the file's order. A missing or empty file holds none."""
    return [
        (
            _integer(fields[0], path, number, 2**31, "epoch"),
            _integer(fields[1], path, number, 2**63, "start offset"),
        )
        for number, fields in _read_lines(fs, path, fields_wanted=2)
    ]


def write_offsets(
    fs: FileSystem, path: str, entries: Mapping[tuple[str, int], int], like: FileStat | None = None
) -> None:
    """Replaces the file by these entries: temporary file, fsync, rename, fsync of the directory.

    Owner and mode are those of `like`, by default of the file that is replaced, or else of its directory.
    """
    _write_lines(
        fs, path, [f"{topic} {partition} {offset}" for (topic, partition), offset in sorted(entries.items())], like
    )


def write_epochs(
    fs: FileSystem, path: str, entries: Iterable[tuple[int, int]], like: FileStat | None = None
) -> None:
    """As `write_offsets`, of leader epochs and their start offsets, in the order given."""
    _write_lines(fs, path, [f"{epoch} {start}" for epoch, start in entries], like)


def update_offset(
    fs: FileSystem,
    path: str,
    key: tuple[str, int],
    offset: int | None,
    *,
    hosted: Collection[tuple[str, int]] | None,
    like: FileStat | None = None,
) -> None:
    """Sets the entry of `key` (topic, partition), or takes it out (None).

    Of the others, only partitions not `hosted` any more go (None: none goes).

    Safe among threads of this process; other processes are kept out by the log dir's lock.
    """
    with _updating:
        entries = {key: value for key, value in read_offsets(fs, path).items() if hosted is None or key in hosted}
        if offset is None:
            entries.pop(key, None)
        else:
            entries[key] = offset
        write_offsets(fs, path, entries, like)


def _write_lines(fs: FileSystem, path: str, entries: Sequence[str], like: FileStat | None) -> None:
    directory = os.path.dirname(path)
    if like is None:
        like = fs.stat(path if fs.exists(path) else directory)
    temporary = path + names.TEMPORARY
    if fs.exists(temporary):  # of a run that was killed here
        fs.unlink(temporary)
    lines = [str(_VERSION), str(len(entries)), *entries]
    fs.put_file(path, "".join(f"{line}\n" for line in lines).encode(), like, temporary)
    fs.fsync_dir(directory)


def _read_lines(fs: FileSystem, path: str, fields_wanted: int) -> list[tuple[int, list[str]]]:
    """Line number and fields of every entry, after the checks that Kafka makes, in Kafka's order."""
    try:
        data = fs.read_bytes(path, whole=True)  # to be cut off may look like an empty file
    except FileNotFoundError:
        return []
    try:
        lines = _LINE_END.split(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _corrupt(path, data.count(b"\n", 0, error.start) + 1, "is not UTF-8") from error
    if lines[-1] == "":
        lines.pop()  # every line is terminated; a missing last line end is tolerated
    if not lines:
        return []
    if _integer(lines[0], path, 1, 2**31, "version") != _VERSION:
        raise _corrupt(path, 1, f"has version {lines[0]}, not {_VERSION}")
    if len(lines) == 1:
        return []
    count = _integer(lines[1], path, 2, 2**31, "entry count")
    entries = []
    for number, line in enumerate(lines[2:], start=3):
        fields = _SPACE.split(line)
        while fields and fields[-1] == "":  # as Java's split, which drops empty fields at the end only
            fields.pop()
        if len(fields) != fields_wanted:
            raise _corrupt(path, number, f"has {len(fields)} fields, not {fields_wanted}: {line!r}")
        entries.append((number, fields))
    if len(entries) != count:
        raise _corrupt(path, 2, f"says {count} entries, but {len(entries)} follow")
    return entries


def _integer(text: str, path: str, line_number: int, limit: int, what: str) -> int:
    digits = text.lstrip("+-").lstrip("0")
    is_number = _INTEGER.fullmatch(text) is not None and len(digits) <= _MOST_DIGITS
    value = int(f"{'-' if text[0] == '-' else ''}{digits or 0}") if is_number else None
    if value is None or not -limit <= value < limit:
        raise _corrupt(path, line_number, f"has no number for the {what}: {text!r}")
    return value


def _corrupt(path: str, line_number: int, complaint: str) -> CorruptLog:
    return CorruptLog(
        f"line {line_number} of the checkpoint {complaint}",
        path=path,
        remedy="A broker takes the log dir offline for this; repair the file first",
    )
