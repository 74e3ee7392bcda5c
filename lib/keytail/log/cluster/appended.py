"""Finds a batch that a broker appended after a given time, as evidence that the brokers ran after that time.

A batch was appended no later than its segment was modified, and usually at about the largest timestamp of the segment.
Either time alone misleads: a copied file has a new modification time, and a client may set arbitrary timestamps. So the
earlier of the two is used: the segment's modification time or its largest timestamp. Imported batches, whose offsets
are in the partition's import record, are no evidence. The outputs of a compaction have the modification time of their
sources. Nothing is changed, so a broker may be running.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keytail.format import names
from keytail.format.batch import HEADER_BYTES
from keytail.log.fs import FileSystem
from keytail.log.import_record import parse_record
from keytail.log.log_end import LogEnd, log_end
from keytail.log.partition import last_time_entry, max_timestamp_ms


@dataclass(frozen=True)
class Appended:
    """The path of a segment, and a time in ms: a broker appended the segment's last batch at that time or later."""

    path: str
    time_ms: int


def appended_after(fs: FileSystem, log_dirs: Sequence[str], time_ms: int) -> Appended | None:
    """Return the first segment found whose last batch a broker appended after `time_ms`, or None if there is none.

    The metadata log is skipped. For a partition that was not modified after `time_ms`, only the names of its files and
    one modification time are read. A partition that cannot be read is skipped: the code that processes it reports the
    error.
    """
    for path in _partitions(fs, log_dirs):
        try:
            appended = _last_appended(fs, path, time_ms)
        except OSError:
            continue
        if appended is not None:
            return appended
    return None


def _partitions(fs: FileSystem, log_dirs: Sequence[str]) -> Iterator[str]:
    for log_dir in log_dirs:
        for entry in fs.scan_names(log_dir):
            parsed = names.parse_partition_dir(entry.name) if entry.is_dir else None
            if parsed is not None and parsed.kind == "normal" and parsed.topic != names.CLUSTER_METADATA_TOPIC:
                yield os.path.join(log_dir, entry.name)


def _last_appended(fs: FileSystem, partition_path: str, time_ms: int) -> Appended | None:
    listed = [entry.name for entry in fs.scan_names(partition_path)]
    for name in sorted((name for name in listed if name.endswith(names.LOG)), reverse=True):
        base_offset = names.base_of_live(name)
        if base_offset is None:
            continue
        log_path = os.path.join(partition_path, name)
        facts = fs.stat(log_path)
        modified_ms = facts.mtime_ns // 1_000_000
        if modified_ms <= time_ms:
            return None  # earlier segments were modified earlier
        end = log_end(fs, log_path, base_offset) if facts.size_bytes else None
        if end is not None and end.last_position >= 0:  # a segment without a whole batch may have been truncated
            return _evidence(fs, log_path, end, modified_ms, time_ms, names.IMPORT_RECORD in listed)
    return None


def _evidence(
    fs: FileSystem, log_path: str, end: LogEnd, modified_ms: int, time_ms: int, has_import: bool
) -> Appended | None:
    header = fs.read_at(log_path, end.last_position, HEADER_BYTES)
    appended_ms = min(modified_ms, max(max_timestamp_ms(header), _last_indexed_ms(fs, log_path)))
    if appended_ms <= time_ms or (has_import and _is_imported(fs, os.path.dirname(log_path), end.next_offset - 1)):
        return None
    return Appended(log_path, appended_ms)


def _last_indexed_ms(fs: FileSystem, log_path: str) -> int:
    """Return the largest timestamp in the segment's time index; -1 if there is none."""
    path = log_path.removesuffix(names.LOG) + names.TIME_INDEX
    last = last_time_entry(fs, path, fs.size(path)) if fs.exists(path) else None
    return -1 if last is None else last[0]


def _is_imported(fs: FileSystem, partition_path: str, offset: int) -> bool:
    """Return whether the last import wrote the record at `offset`; False if the import record cannot be parsed."""
    try:
        record = parse_record(fs.read_bytes(os.path.join(partition_path, names.IMPORT_RECORD)))
    except ValueError:
        return False
    return record.base_offset <= offset < record.end_offset
