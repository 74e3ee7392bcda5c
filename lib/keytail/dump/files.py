"""Prints the contents of files of a log dir, as Kafka's DumpLogSegments does, with extensions (format/DUMP.md).

Files may be in any state, and a broker may be running. The size of a file is read at the beginning; data appended later
is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from keytail.dump import small_files as files
from keytail.dump.batch_lines import BOTH, Decoder, DumpWriter, Shown
from keytail.dump.command import IndexChecks, Range
from keytail.dump.index import dump_offset_index, dump_time_index, dump_txn_index
from keytail.dump.range import start_of
from keytail.dump.report import Report
from keytail.dump.segment import LogReader, Part, Problem
from keytail.errors import UsageProblem, of_system
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.lock import is_held

BOOTSTRAP_SNAPSHOT = "bootstrap.checkpoint"
_LOG_LIKE = (names.LOG, names.METADATA_SNAPSHOT)


@dataclass(frozen=True)
class DumpOptions:
    """The options of a dump: the flags of Kafka's tool, decoders, and the range of each log."""

    print_data_log: bool = False
    deep_iteration: bool = False
    skip_record_metadata: bool = False
    max_bytes: int | None = None
    index_checks: IndexChecks = field(default_factory=IndexChecks)
    decoder: Decoder | None = None
    decoded: frozenset[str] = BOTH  # the parts of a record that the decoder decodes
    wanted: Range = field(default_factory=Range)

    @property
    def contents(self) -> bool:
        return self.print_data_log or self.decoder is not None

    @property
    def deep(self) -> bool:
        return self.deep_iteration or self.contents


def dump(fs: FileSystem, paths: Sequence[str], options: DumpOptions, report: Report) -> int:
    """Dump files and the files of partition directories, in order. Return how many files have a type that can be
    dumped, including files that could not be read. Raises the same errors as `expanded`."""
    reader = LogReader(fs)
    shown = Shown(options.contents, not options.skip_record_metadata, report.as_json, options.decoder, options.decoded)
    writer = DumpWriter(report.out, shown)
    dumped = 0
    remedies: dict[str, None] = {}
    for path in expanded(fs, paths):
        report.line(f"Dumping {path}", type="file", file=path)
        try:
            dumped += _dump_file(fs, path, options, report, reader, writer)
        except FileNotFoundError:
            report.note(f"{path} no longer exists: a broker deleted or renamed it meanwhile")
        except OSError as reason:
            report.problem(f"the file cannot be read: {reason.strerror}", path)
            dumped += 1
            if remedy := of_system(reason).remedy:
                remedies[remedy] = None
    report.end()
    for remedy in remedies:
        report.note(remedy)
    return dumped


def expanded(fs: FileSystem, paths: Sequence[str]) -> list[str]:
    """Return the paths, with each directory replaced by its files that can be dumped, sorted by name. Raises
    UsageProblem if a path does not exist, or a directory has no such file."""
    found = []
    for path in paths:
        if not fs.exists(path):
            remedy = "Pass existing files of a log dir, or a partition directory"
            raise UsageProblem("the file does not exist", path=path, remedy=remedy, slug="no-such-file")
        if not fs.stat(path).is_dir:
            found.append(path)
            continue
        inside = sorted(entry.name for entry in fs.scan(path) if entry.is_regular and _kind(entry.name))
        if not inside:
            remedy = "Pass files of a log dir, or a partition directory (TOPIC-N)"
            what = "the directory contains no file that can be dumped"
            raise UsageProblem(what, path=path, remedy=remedy, slug="no-dumpable-file")
        found += [os.path.join(path, name) for name in inside]
    return found


def _kind(name: str) -> str:
    """Return the kind of a file: a suffix or a file name of `format/names`, or "" if it cannot be dumped."""
    whole = (names.LEADER_EPOCHS, names.PARTITION_METADATA, *files.OFFSET_CHECKPOINTS)
    if name in whole:
        return name
    parsed = names.parse_file_name(name)
    if parsed.kind in ("live", "cleaned", "swap", "deleted", "scratch") and parsed.suffix:
        return parsed.suffix
    return names.METADATA_SNAPSHOT if name == BOOTSTRAP_SNAPSHOT or names.parse_metadata_snapshot(name) else ""


def _dump_file(
    fs: FileSystem, path: str, options: DumpOptions, report: Report, reader: LogReader, writer: DumpWriter
) -> bool:
    name = os.path.basename(path)
    kind = _kind(name)
    base = names.parse_file_name(name).base_offset or 0
    if kind in _LOG_LIKE:
        _dump_log(fs, path, base, options, report, reader, writer)
    elif kind == names.INDEX:
        dump_offset_index(fs, path, base, options.index_checks, report)
    elif kind == names.TIME_INDEX:
        dump_time_index(fs, path, base, options.index_checks, report)
    elif kind == names.TXN_INDEX:
        dump_txn_index(fs, path, base, report)
    elif kind == names.SNAPSHOT:
        files.dump_snapshot(fs, path, report)
    elif kind == names.LEADER_EPOCHS:
        files.dump_epochs(fs, path, report)
    elif kind == names.PARTITION_METADATA:
        files.dump_partition_metadata(fs, path, report)
    elif kind:
        files.dump_offsets(fs, path, report)
    else:
        report.note(f"Ignoring unknown file {path}")
    return bool(kind)


def _dump_log(
    fs: FileSystem, path: str, base: int, options: DumpOptions, report: Report, reader: LogReader, writer: DumpWriter
) -> None:
    _head(path, base, report)
    size = fs.stat(path).size_bytes
    end = size if options.max_bytes is None else min(size, options.max_bytes)
    start, why = start_of(fs, path, base, size, options.wanted)
    if why:
        report.note(why)
    rows = None if options.wanted.is_all else options.wanted.rows
    gaps = _Gaps(-1 if options.wanted.is_all else None)
    for part in reader.parts(path, start, end, deep=options.deep, wanted=rows):
        chosen = None
        if part.records is not None:
            chosen = options.wanted.records(part.records.records["offset"])
            offsets = part.records.records["offset"]
            gaps.take(offsets if chosen is None else offsets[chosen], path, report)
        writer.write(part, chosen)
        for problem in _problems(part):
            report.problem(problem.what, path, problem.position, problem.offset)
    _end(fs, path, size, end, options, report, reader)


def _head(path: str, base: int, report: Report) -> None:
    name = os.path.basename(path)
    snapshot = names.parse_metadata_snapshot(name)
    if name == BOOTSTRAP_SNAPSHOT:
        report.line("KRaft bootstrap snapshot")
    elif snapshot is not None:
        report.line(f"Snapshot end offset: {snapshot[0]}, epoch: {snapshot[1]}")
    else:
        report.line(f"Log starting offset: {base}")


def _problems(part: Part) -> list[Problem]:
    """Return the problems that make the exit status 1. Kafka's tool reports wrong checksums only as `isvalid: false`.
    """
    if part.continues:
        return part.problems
    wrong = [
        Problem(
            "the batch has an invalid CRC",
            int(part.batches["position"][row]),
            int(part.batches["base_offset"][row]),
        )
        for row in np.flatnonzero(~part.valid)
    ]
    wrong += [
        Problem(
            f"the batch has the unknown magic {part.batches['magic'][row]}",
            int(part.batches["position"][row]),
            int(part.batches["base_offset"][row]),
        )
        for row in np.flatnonzero((part.batches["magic"] < 0) | (part.batches["magic"] > 2))
    ]
    return wrong + _wrong_inside(part) + part.problems


def _wrong_inside(part: Part) -> list[Problem]:
    """Return the problems of messages inside compressed messages, which have their own checksums."""
    if part.legacy is None:
        return []
    spans = part.legacy.spans
    return [
        Problem(
            "a message inside this compressed message has an invalid CRC",
            int(part.batches["position"][spans["row"][n]]),
            int(spans["offset"][n]),
        )
        for n in np.flatnonzero(~part.legacy.valid)
        if part.valid[spans["row"][n]]
    ]


def _end(
    fs: FileSystem, path: str, size: int, end: int, options: DumpOptions, report: Report, reader: LogReader
) -> None:
    """Report bytes after the last batch, if the requested range includes the end, and why reading ended early."""
    extent, left = reader.extent, size - reader.extent.position
    bounded = end < size or options.wanted.to_offset is not None or options.wanted.to_position is not None
    if not left or (bounded and extent.problem is None):
        return
    if may_grow(fs, path):
        # A broker may have preallocated the file, and may write to it now.
        report.note(f"the last {left} bytes of {path}, the active segment, are not a complete batch (yet)")
    elif extent.problem is not None:
        report.problem(extent.problem.what, path, extent.problem.position)
    else:
        report.line(f"Found {left} invalid bytes at the end of {os.path.basename(path)}")
        report.problem(f"the last {left} bytes are not a complete batch", path, extent.position)


def may_grow(fs: FileSystem, path: str) -> bool:
    """Return whether `path` is an active segment in a log dir whose lock is held, usually by a broker."""
    directory, name = os.path.split(os.path.abspath(path))
    log_dir = os.path.dirname(directory)
    if names.parse_file_name(name).kind != "live" or names.parse_partition_dir(os.path.basename(directory)) is None:
        return False
    if not is_held(log_dir, fs):
        return False
    return name == max(entry.name for entry in fs.scan(directory) if entry.name.endswith(names.LOG))


class _Gaps:
    """Finds record offsets that do not directly follow the previous record's offset. `last` is the offset before the
    first record: -1 as in Kafka's tool. If `last` is None, there is no gap before the first record."""

    def __init__(self, last: int | None) -> None:
        self._last = last

    def take(self, offsets: np.ndarray, path: str, report: Report) -> None:
        if not len(offsets):
            return
        if self._last is None:
            self._last = int(offsets[0]) - 1
        before = np.concatenate(([self._last], offsets[:-1]))
        self._last = int(offsets[-1])
        apart = np.flatnonzero(offsets != before + 1)
        if len(apart):
            report.gaps(path, before[apart], offsets[apart])
