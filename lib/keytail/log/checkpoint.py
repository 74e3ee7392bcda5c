"""Reads the text checkpoints of log dirs and partitions as strictly as a broker does, and replaces them atomically.

A broker takes a whole log dir offline for a syntax error in one of these files. Therefore a file that a broker could
not read raises CorruptLog with the line number, and new contents are durable before they replace a file. The callers
decide which offsets are correct. If the lock of the log dir is lost, LockLost is raised and nothing is written.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from keytail.errors import CorruptLog
from keytail.log.fs import FileStat, FileSystem
from keytail.log.small_file import replace_file

Offsets: TypeAlias = dict[tuple[str, int], int]

_VERSION = 0
# Matches nearly every line of a file with offsets; other lines are parsed field by field.
_PLAIN_ENTRY = re.compile(r"([a-zA-Z0-9._-]+) ([0-9]{1,9}) ([0-9]{1,18})")
# Matches nearly every file with leader epochs: the count, then lines of an epoch and its start offset.
_PLAIN_EPOCHS = re.compile(rb"0\n([0-9]{1,9})\n((?:[0-9]{1,9} [0-9]{1,18}\n)*)")
_LINE_END = re.compile(r"\r\n|\n|\r")
_SPACE = re.compile(r"[ \t\n\x0b\f\r]+")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_MAX_DIGITS = 19  # digits of 2^63, without leading zeros


@dataclass(eq=False)
class _Change:
    """A change of a file, as requested by one thread."""

    entries: Mapping[tuple[str, int], int | None]
    hosted: Collection[tuple[str, int]] | None
    is_done: bool = False


@dataclass
class _Changing:
    """The lock for writing one checkpoint file, and the changes of this file that are not yet written."""

    writing: threading.Lock = field(default_factory=threading.Lock)
    waiting: list[_Change] = field(default_factory=list)


# The pending changes of files, by path: threads of one driver finish partitions of the same log dir concurrently.
_changing: dict[str, _Changing] = {}


def read_offsets(fs: FileSystem, path: str) -> Offsets:
    """Return the offsets in a file by (topic, partition); {} if the file is missing or empty. Of duplicate entries, the
    last is returned."""
    offsets: Offsets = {}
    for number, line in _lines(_read(fs, path), path):
        if plain := _PLAIN_ENTRY.fullmatch(line):
            topic, partition, offset = plain.groups()
            offsets[sys.intern(topic), int(partition)] = int(offset)
            continue
        fields = _fields(line, path, number, fields_wanted=3)
        of_partition = _integer(fields[1], path, number, 2**31, "partition")
        offsets[fields[0], of_partition] = _integer(fields[2], path, number, 2**63, "offset")
    return offsets


def read_epochs(fs: FileSystem, path: str) -> list[tuple[int, int]]:
    """Return the leader epochs and their start offsets, in the file's order; [] if the file is missing or empty."""
    data = _read(fs, path)
    if plain := _PLAIN_EPOCHS.fullmatch(data):
        numbers = list(map(int, plain[2].split()))
        if len(numbers) == 2 * int(plain[1]):
            return list(zip(numbers[::2], numbers[1::2], strict=True))
    epochs = []
    for number, line in _lines(data, path):
        fields = _fields(line, path, number, fields_wanted=2)
        epoch = _integer(fields[0], path, number, 2**31, "epoch")
        epochs.append((epoch, _integer(fields[1], path, number, 2**63, "start offset")))
    return epochs


def write_offsets(
    fs: FileSystem, path: str, entries: Mapping[tuple[str, int], int], like: FileStat | None = None
) -> None:
    """Replace the file durably (temporary file, fsync, rename, fsync of the directory) by a file with `entries`.

    Owner and mode are taken from `like`; by default from the file that is replaced, or from its directory if no file
    exists.
    """
    _write(fs, path, encode_offsets(entries), like)


def encode_offsets(entries: Mapping[tuple[str, int], int]) -> bytes:
    """Return the contents of a checkpoint file with `entries`."""
    return _encode([f"{topic} {partition} {offset}" for (topic, partition), offset in sorted(entries.items())])


def write_epochs(
    fs: FileSystem, path: str, entries: Iterable[tuple[int, int]], like: FileStat | None = None
) -> None:
    """Replace the file as `write_offsets` does, by leader epochs and their start offsets, in the given order."""
    _write(fs, path, _encode([f"{epoch} {start}" for epoch, start in entries]), like)


def update_offset(
    fs: FileSystem,
    path: str,
    key: tuple[str, int],
    offset: int | None,
    *,
    hosted: Collection[tuple[str, int]] | None,
    like: FileStat | None = None,
) -> None:
    """Set one entry, or remove it if `offset` is None, as `update_offsets` does."""
    update_offsets(fs, path, {key: offset}, hosted=hosted, like=like)


def update_offsets(
    fs: FileSystem,
    path: str,
    entries: Mapping[tuple[str, int], int | None],
    *,
    hosted: Collection[tuple[str, int]] | None,
    like: FileStat | None = None,
) -> None:
    """Set `entries`, by (topic, partition), and remove the entries whose offset is None, in one durable replacement of
    the file.

    An entry in the file that `entries` does not contain is removed if its partition is not in `hosted` (None: all such
    entries are kept).

    Several threads may call this function at a time; the log dir's lock excludes other processes. Writing a file with
    many entries takes long, so changes that other threads request during a write are collected, and the first of these
    threads writes all of them in one step. If a write fails, the error is raised in the thread that wrote, and the next
    thread retries.
    """
    change = _Change(entries, hosted)
    file = _changing.setdefault(path, _Changing())
    file.waiting.append(change)
    with file.writing:
        if change.is_done:
            return
        together = list(file.waiting)
        try:
            write_offsets(fs, path, _changed(read_offsets(fs, path), together), like)
        except BaseException:  # even after a signal: another thread must not write an abandoned change
            file.waiting.remove(change)
            raise
        del file.waiting[: len(together)]
        for item in together:
            item.is_done = True


def _changed(offsets: Offsets, changes: Iterable[_Change]) -> Offsets:
    """Return the offsets after all changes, applied in order."""
    swept_by = None
    for change in changes:
        if change.hosted is not None and change.hosted is not swept_by:
            offsets = {key: offset for key, offset in offsets.items() if key in change.hosted}
            swept_by = change.hosted
        for key, offset in change.entries.items():
            if offset is None:
                offsets.pop(key, None)
            else:
                offsets[key] = offset
    return offsets


def _encode(entries: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in (str(_VERSION), str(len(entries)), *entries)).encode()


def _write(fs: FileSystem, path: str, data: bytes, like: FileStat | None) -> None:
    replace_file(fs, path, data, like or fs.stat(path if fs.exists(path) else os.path.dirname(path)))


def _read(fs: FileSystem, path: str) -> bytes:
    try:
        return fs.read_bytes(path, whole=True)  # a truncated read may look like an empty file
    except FileNotFoundError:
        return b""


def _lines(data: bytes, path: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of every entry. Kafka's checks are made in Kafka's order; the count is checked
    last."""
    try:
        lines = _LINE_END.split(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _corrupt(path, data.count(b"\n", 0, error.start) + 1, "is not UTF-8") from error
    if lines[-1] == "":
        lines.pop()  # every line is terminated; a missing last line end is tolerated
    if not lines:
        return
    if _integer(lines[0], path, 1, 2**31, "version") != _VERSION:
        raise _corrupt(path, 1, f"has version {lines[0]}, expected {_VERSION}")
    if len(lines) == 1:
        return
    count = _integer(lines[1], path, 2, 2**31, "entry count")
    yield from enumerate(lines[2:], start=3)
    if len(lines) - 2 != count:
        raise _corrupt(path, 2, f"declares {count} entries, but {len(lines) - 2} follow")


def _fields(line: str, path: str, number: int, fields_wanted: int) -> list[str]:
    fields = _SPACE.split(line)
    while fields and fields[-1] == "":  # like Java's split, which drops only trailing empty fields
        fields.pop()
    if len(fields) != fields_wanted:
        raise _corrupt(path, number, f"has {len(fields)} fields, expected {fields_wanted}: {line!r}")
    return fields


def _integer(text: str, path: str, line_number: int, limit: int, what: str) -> int:
    digits = text.lstrip("+-").lstrip("0")
    is_number = _INTEGER.fullmatch(text) is not None and len(digits) <= _MAX_DIGITS
    value = int(f"{'-' if text[0] == '-' else ''}{digits or 0}") if is_number else None
    if value is None or not -limit <= value < limit:
        raise _corrupt(path, line_number, f"has an invalid {what}: {text!r}")
    return value


def _corrupt(path: str, line_number: int, complaint: str) -> CorruptLog:
    return CorruptLog(
        f"invalid line {line_number} of the checkpoint: it {complaint}",
        path=path,
        remedy="Repair the file first: a broker takes the log dir offline for this error",
        slug="invalid-checkpoint",
    )
