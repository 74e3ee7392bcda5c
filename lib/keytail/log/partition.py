"""Collects the facts of a partition directory that planning needs: listing, sizes, last index entries. Only a few
headers of the logs are read. `log_dirs.py` lists the log dirs and reads their checkpoints.

For states that keytail does not process, the facts have `problems`: sentences for a report. Nothing is changed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from keytail.errors import CORRUPT_REMEDY, CorruptLog, ErrorText, Refused, in_words, of_system, refusal
from keytail.format import names
from keytail.format.batch import BATCH_HEADER, HEADER_BYTES
from keytail.format.index import TIME_ENTRY
from keytail.log.checkpoint import Offsets, read_epochs
from keytail.log.fs import DirEntry, FileSystem
from keytail.log.log_end import LogEnd, log_end

MAX_LOG_BYTES = 2**31 - 1

_MAGIC_AT, _MAX_TIMESTAMP_AT, _TIMESTAMP_V1_AT = 16, 35, 18
assert BATCH_HEADER.fields is not None
assert BATCH_HEADER.fields["magic"][1] == _MAGIC_AT
assert BATCH_HEADER.fields["max_timestamp"][1] == _MAX_TIMESTAMP_AT
_INT64 = struct.Struct(">q")
_TIME_INDEX_ENTRY = struct.Struct(">qi")
assert _TIME_INDEX_ENTRY.size == TIME_ENTRY.itemsize


class SegmentFacts(NamedTuple):
    """One segment as listed. The size of an index that does not exist, or was not listed, is None. The class is a
    NamedTuple because plans create millions of objects, and creating a dataclass takes three times as long."""

    base_offset: int
    log_bytes: int
    log_mtime_ns: int
    index_bytes: int | None
    time_index_bytes: int | None
    txn_index_bytes: int | None
    # Last timestamp in the time index; the log's mtime if that timestamp is missing or negative
    largest_timestamp_ms: int
    first_batch_timestamp_ms: int  # max timestamp of the first batch; -1 if there is none


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """The facts of a partition for planning. If there are `problems`, the partition must not be processed, and numbers
    may be 0."""

    topic: str
    partition: int
    log_dir: str
    path: str
    segments: tuple[SegmentFacts, ...]  # ascending; the last one is the active segment
    snapshots: tuple[int, ...]
    log_start_offset: int
    log_end_offset: int
    high_watermark: int | None  # None: no checkpoint file, or no entry in it
    recovery_point: int
    clean_shutdown: bool
    cleaner_checkpoint: int | None
    problems: tuple[ErrorText, ...]
    leftovers: tuple[str, ...] = ()  # names that `recover.recover` resolves; a `.swap` among them is a problem, too
    tail_bytes: int = 0  # bytes of the active segment after its last whole batch: an incomplete write
    # Only after a clean shutdown: the result of `names.left_by_missing_segments`.
    without_log: tuple[tuple[int, str], ...] = ()
    unread: tuple[str, ...] = ()  # the checkpoint files of the log dir that cannot be read; each is a problem, too

    @property
    def log_bytes(self) -> int:
        """The size of all logs in bytes."""
        return sum(segment.log_bytes for segment in self.segments)


@dataclass(frozen=True, slots=True)
class PartitionEntry:
    """A partition directory of a log dir, with the problems found in the listings of all log dirs."""

    topic: str
    partition: int
    log_dir: str
    path: str
    problems: tuple[ErrorText, ...] = ()


@dataclass(frozen=True, slots=True)
class LogDirFacts:
    """One log dir: its partitions, its checkpoints, and anything that prevents a broker from starting on it."""

    path: str
    partitions: tuple[PartitionEntry, ...]
    skipped: tuple[str, ...]  # names of directories that keytail does not process
    clean_shutdown: bool
    cleaner_checkpoint: Offsets
    recovery_points: Offsets
    log_starts: Offsets
    high_watermarks: Offsets
    problems: tuple[ErrorText, ...] = ()  # problems of the log dir itself; every partition in it has them, too
    unread: tuple[str, ...] = ()  # checkpoint files that cannot be read; each is a problem, too


@dataclass
class _Listing:
    """The files of one partition directory, classified by their names."""

    files: dict[int, dict[str, DirEntry]] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    problems: list[ErrorText] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    without_log: dict[int, str] = field(default_factory=dict)


def survey_partition(fs: FileSystem, log_dir: LogDirFacts, entry: PartitionEntry) -> PartitionFacts:
    """Return the facts of one partition. Reasons against processing the partition are returned in `problems`."""
    listing = _Listing()
    segments: tuple[SegmentFacts, ...] = ()
    end = LogEnd(0, 0, 0)
    try:
        listing = _list_partition(fs, entry.path)
        refuse_unreadable(fs, entry.path)
        read_epochs(fs, os.path.join(entry.path, names.LEADER_EPOCHS))
        segments = tuple(_segment_facts(fs, entry.path, base, files, listing.problems)
                         for base, files in sorted(listing.files.items()) if names.LOG in files)  # fmt: skip
        if segments:
            last = segments[-1].base_offset
            end = log_end(fs, os.path.join(entry.path, names.segment_file(last, names.LOG)), last)
        else:
            listing.problems.append(refusal(f"no segments in {entry.path}", slug="no-segments"))
    except (CorruptLog, Refused, OSError) as error:
        listing.problems.append(in_words(error))
    problems = (*entry.problems, *listing.problems)
    return _facts(log_dir, entry, segments, listing.snapshots, end, problems, listing.leftovers, listing.without_log)


def refuse_unreadable(fs: FileSystem, path: str) -> None:
    """Raise Refused if this process is not allowed to read a file of the partition directory `path`: unreadable
    contents are unknown, not damaged or lost."""
    closed = [name for name in fs.unreadable(path) if names.parse_file_name(name).kind != "other"]
    if not closed:
        return
    try:
        fs.read_bytes(os.path.join(path, closed[0]))
    except OSError as error:
        problem = of_system(error)
        more = f"; {len(closed)} files of the partition cannot be read" if len(closed) > 1 else ""
        raise Refused(
            problem.what + more, path=problem.path, remedy=problem.remedy, slug="permission-denied"
        ) from error


def refuse_damaged_end(facts: PartitionFacts) -> None:
    """Raise CorruptLog if the log ends before the high watermark, or with an incomplete batch after a clean shutdown:
    data after the damage would be left out silently."""
    ends_early = facts.high_watermark is not None and facts.high_watermark > facts.log_end_offset
    if not ends_early and not (facts.clean_shutdown and facts.tail_bytes):
        return
    what = f"complete batches end at offset {facts.log_end_offset}"
    if ends_early:
        what += f", before the high watermark {facts.high_watermark}"
    if facts.tail_bytes:
        what += f", and the {facts.tail_bytes} bytes after them are not a batch"
    active = facts.segments[-1]
    raise CorruptLog(
        what,
        path=os.path.join(facts.path, names.segment_file(active.base_offset, names.LOG)),
        byte_position=active.log_bytes - facts.tail_bytes,
        offset=facts.log_end_offset,
        remedy=CORRUPT_REMEDY,
        slug="damaged-log-end",
    )


def list_partition(fs: FileSystem, log_dir: LogDirFacts, entry: PartitionEntry) -> PartitionFacts | None:
    """Return the facts of one partition from a listing and the end of the log: all index sizes are None, all timestamps
    of first batches -1, and the modification time of a log is used as its largest timestamp.

    This takes a tenth of the operations. Returns None if the partition must not be processed or has leftovers to
    resolve; `survey_partition` returns the details of such a partition.
    """
    if entry.problems:
        return None
    segments, snapshots = [], []
    try:
        listed = fs.scan_sizes(entry.path, names.LOG)
        if any(names.parse_file_name(name).kind != "other" for name in listed.others):
            return None
        for name, log_bytes, mtime_ns in listed.sized:
            base = names.base_of_live(name)
            if base is None or log_bytes > MAX_LOG_BYTES:
                return None
            segments.append(SegmentFacts(base, log_bytes, mtime_ns, None, None, None, mtime_ns // 1_000_000, -1))
        if not segments:
            return None
        segments.sort()
        stems = [name[: -len(names.LOG)] for name, _, _ in listed.sized]
        expected = {stem + suffix for stem in stems for suffix in names.INDEX_SUFFIXES}
        expected.update(names.PARTITION_FILES)
        unexpected = [name for name in listed.regular if name not in expected]
        for name in unexpected:
            base = names.base_of_live(name)
            if base is None:
                if names.parse_file_name(name).kind != "other":
                    return None
            elif name.endswith(names.SNAPSHOT):
                snapshots.append(base)
        read_epochs(fs, os.path.join(entry.path, names.LEADER_EPOCHS))
        last = segments[-1].base_offset
        end = log_end(fs, os.path.join(entry.path, names.segment_file(last, names.LOG)), last)
    except (CorruptLog, OSError):
        return None
    has_metadata = [names.PARTITION_METADATA] if names.PARTITION_METADATA in listed.regular else []
    logs = [name for name, _, _ in listed.sized] if unexpected else []
    left = names.left_by_missing_segments([*logs, *unexpected, *has_metadata])
    return _facts(log_dir, entry, tuple(segments), snapshots, end, without_log=left)


def _facts(
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    segments: tuple[SegmentFacts, ...],
    snapshots: Sequence[int],
    end: LogEnd,
    problems: tuple[ErrorText, ...] = (),
    leftovers: Sequence[str] = (),
    without_log: Mapping[int, str] = MappingProxyType({}),
) -> PartitionFacts:
    key = (entry.topic, entry.partition)
    first = segments[0].base_offset if segments else 0
    return PartitionFacts(
        topic=entry.topic,
        partition=entry.partition,
        log_dir=entry.log_dir,
        path=entry.path,
        segments=segments,
        snapshots=tuple(sorted(snapshots)),
        log_start_offset=max(log_dir.log_starts.get(key, 0), first),
        log_end_offset=end.next_offset,
        high_watermark=log_dir.high_watermarks.get(key),
        recovery_point=log_dir.recovery_points.get(key, 0),
        clean_shutdown=log_dir.clean_shutdown,
        cleaner_checkpoint=log_dir.cleaner_checkpoint.get(key),
        problems=problems,
        leftovers=tuple(sorted(leftovers)),
        tail_bytes=end.tail_bytes,
        without_log=tuple(sorted(without_log.items())) if log_dir.clean_shutdown else (),
        unread=log_dir.unread,
    )


def _list_partition(fs: FileSystem, path: str) -> _Listing:
    entries = sorted(fs.scan(path), key=lambda e: e.name)
    listing = _Listing(without_log=names.left_by_missing_segments([entry.name for entry in entries]))
    for entry in entries:
        parsed = names.parse_file_name(entry.name)
        if parsed.kind == "other":
            continue
        where = os.path.join(path, entry.name)
        if parsed.kind == "fatal":
            text = f"no broker writes a file with this name, and a broker does not start correctly with it: {where}"
            listing.problems.append(refusal(text, slug="invalid-file-name"))
        elif not entry.is_regular:
            listing.problems.append(refusal(f"this is not a regular file: {where}", slug="not-a-regular-file"))
        elif parsed.kind == "live" and parsed.base_offset is not None:
            if parsed.suffix == names.SNAPSHOT:
                listing.snapshots.append(parsed.base_offset)
            else:
                listing.files.setdefault(parsed.base_offset, {})[parsed.suffix] = entry
            if parsed.suffix == names.LOG and entry.size_bytes > MAX_LOG_BYTES:
                text = f"a segment is larger than {MAX_LOG_BYTES} bytes: {where}"
                listing.problems.append(refusal(text, slug="segment-too-large"))
        elif parsed.kind != "partition":
            listing.leftovers.append(entry.name)
    waiting = [name for name in listing.leftovers if names.parse_file_name(name).kind == "swap"]
    if waiting:
        listing.problems.append(
            refusal(
                f"a replacement of segments was interrupted: {os.path.join(path, waiting[0])}; "
                "a run with --execute finishes it first",
                slug="unfinished-replacement",
            )
        )
    return listing


def _segment_facts(
    fs: FileSystem, path: str, base_offset: int, files: dict[str, DirEntry], problems: list[ErrorText]
) -> SegmentFacts:
    log = files[names.LOG]
    log_path = os.path.join(path, log.name)
    sizes = {suffix: entry.size_bytes for suffix, entry in files.items()}
    time_index_path = os.path.join(path, names.segment_file(base_offset, names.TIME_INDEX))
    last = last_time_entry(fs, time_index_path, sizes.get(names.TIME_INDEX, 0))
    largest_ms = last[0] if last is not None and last[0] >= 0 else log.mtime_ns // 1_000_000
    header = fs.read_at(log_path, 0, HEADER_BYTES) if log.size_bytes else b""
    if len(header) >= _MAGIC_AT + 1 and _INT64.unpack_from(header)[0] < base_offset:
        text = f"the first batch begins below the base offset {base_offset} of its segment: {log_path}"
        problems.append(refusal(text, slug="batch-below-segment"))
    return SegmentFacts(
        base_offset=base_offset,
        log_bytes=log.size_bytes,
        log_mtime_ns=log.mtime_ns,
        index_bytes=sizes.get(names.INDEX),
        time_index_bytes=sizes.get(names.TIME_INDEX),
        txn_index_bytes=sizes.get(names.TXN_INDEX),
        largest_timestamp_ms=largest_ms,
        first_batch_timestamp_ms=max_timestamp_ms(header),
    )


def last_time_entry(fs: FileSystem, path: str, size_bytes: int) -> tuple[int, int] | None:
    """Return the timestamp in ms and the relative offset of the last whole entry of a time index, or None."""
    count = size_bytes // _TIME_INDEX_ENTRY.size
    if count == 0:
        return None
    data = fs.read_at(path, (count - 1) * _TIME_INDEX_ENTRY.size, _TIME_INDEX_ENTRY.size)
    return _TIME_INDEX_ENTRY.unpack(data) if len(data) == _TIME_INDEX_ENTRY.size else None


def max_timestamp_ms(header: bytes) -> int:
    """Return the largest timestamp in the header of a batch of any magic; -1 if there is none (magic 0, or an
    incomplete header)."""
    if len(header) <= _MAGIC_AT:
        return -1
    at = {1: _TIMESTAMP_V1_AT, 2: _MAX_TIMESTAMP_AT}.get(header[_MAGIC_AT])
    if at is None or len(header) < at + _INT64.size:
        return -1
    return max(_INT64.unpack_from(header, at)[0], -1)


def refuse_changed(fs: FileSystem, log_path: str, log_bytes: int, log_mtime_ns: int) -> None:
    """Raise Refused if size or mtime of a segment differs from the plan: in that case this host sees other files, or
    another process writes to the segment."""
    facts = fs.stat(log_path) if fs.exists(log_path) else None
    if facts is None or (facts.size_bytes, facts.mtime_ns) != (log_bytes, log_mtime_ns):
        seen = f"{facts.size_bytes} bytes, mtime {facts.mtime_ns} ns" if facts else "no such file"
        raise Refused(
            f"segment changed since it was planned: {seen} on host {os.uname().nodename}, planned with "
            f"{log_bytes} bytes, mtime {log_mtime_ns} ns",
            path=log_path,
            remedy="Make sure that nothing writes to the directory and that every host has the same files, then run "
            "again",
            slug="segment-changed",
        )


def reasons_against_change(facts: PartitionFacts, remote_storage_enable: bool) -> list[ErrorText]:
    """Return the reasons, as rows report them, why records of the partition must be neither added nor removed, except
    the reasons that the survey found (`facts.problems`)."""
    reasons = []
    if remote_storage_enable:
        text = "tiered topic: remote.storage.enable is true, and keytail does not read remote storage"
        reasons.append(refusal(text, slug="tiered-topic"))
    if facts.log_end_offset < facts.log_start_offset:
        reasons.append(
            refusal(
                f"log end offset {facts.log_end_offset} is below the log start offset {facts.log_start_offset}: "
                "a broker that starts here deletes the whole log",
                slug="log-end-below-log-start",
            )
        )
    return reasons
