"""The record of a prepared compaction: its sources, the facts on which its decisions depend, and its outputs.

A record is JSON with a version number, in a scratch file that is written to the partition's directory after the outputs
are durable and proven (PREPARED.md in this directory). The owner of the directory can change the record, so it is
checked when it is read, and committing.py compares it with the present files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from keytail.compact.task import CleaningResult
from keytail.config.compaction import CompactionConfig
from keytail.config.message_format import MessageFormat
from keytail.errors import CorruptLog
from keytail.format import names
from keytail.format.batch import HEADER_BYTES
from keytail.format.json_object import parse_object
from keytail.kernels.native import file_digest
from keytail.log.fs import FileSystem
from keytail.log.partition import SegmentFacts
from keytail.log.replacement.replace import CleanFile, GroupOutput, OutputSegment, SnapshotFile

_VERSION = 1
_ATTEMPT = "0"


class Source(NamedTuple):
    """A segment that the outputs replace: the identity of its `.log`, and the digest of its first batch header."""

    base_offset: int
    log_bytes: int
    mtime_ns: int
    inode: int
    header_digest: str


class Output(NamedTuple):
    """A prepared file: its scratch name, size, modification time and inode."""

    name: str
    size_bytes: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class Basis:
    """The facts on which the decisions of a preparation depend, besides the bytes of the sources.

    `log_end_offset` is the log end offset at the time of the survey, `leader_epochs` are pairs of epoch and start
    offset, and `removal_limit_offset` is as in `CleaningTask`.
    """

    cleaner_checkpoint: int | None
    log_start_offset: int
    log_end_offset: int
    leader_epochs: tuple[tuple[int, int], ...]
    config: CompactionConfig
    message_format: MessageFormat
    by_file_time: bool
    drop_keyless: bool
    removal_limit_offset: int


@dataclass(frozen=True)
class Record:
    """A prepared compaction of one partition, whose round covers the offsets from `first_dirty_offset` to before
    `result.end_offset`."""

    run_id: str
    topic: str
    partition: int
    prepared_ms: int
    first_dirty_offset: int
    basis: Basis
    sources: tuple[Source, ...]
    outputs: tuple[Output, ...]
    result: CleaningResult

    @property
    def file_name(self) -> str:
        return record_name(self.sources[0].base_offset, self.run_id)

    @property
    def files(self) -> frozenset[str]:
        """The names of all scratch files of the preparation, including its record."""
        return frozenset((self.file_name, *(output.name for output in self.outputs)))


def record_name(base_offset: int, run_id: str) -> str:
    return names.scratch_file(base_offset, run_id, _ATTEMPT, names.PREPARED)


def see_sources(fs: FileSystem, path: str, segments: Sequence[SegmentFacts]) -> tuple[Source, ...]:
    """Return the present identity of each segment's `.log` file. Raises FileNotFoundError if a file does not exist."""
    entries = {entry.name: entry for entry in fs.scan(path)}
    found = []
    for segment in segments:
        name = names.segment_file(segment.base_offset, names.LOG)
        entry = entries.get(name)
        if entry is None:
            raise FileNotFoundError(2, os.strerror(2), os.path.join(path, name))
        digest = file_digest()
        digest.update(fs.read_at(os.path.join(path, name), 0, HEADER_BYTES))
        found.append(Source(segment.base_offset, entry.size_bytes, entry.mtime_ns, entry.inode, digest.hexdigest()))
    return tuple(found)


def see_outputs(fs: FileSystem, path: str, files: frozenset[str]) -> tuple[Output, ...]:
    """Return the regular files in `path` whose names are in `files`, sorted by name."""
    return tuple(
        sorted(
            Output(entry.name, entry.size_bytes, entry.mtime_ns, entry.inode)
            for entry in fs.scan(path)
            if entry.name in files and entry.is_regular
        )
    )


def encode_record(record: Record) -> bytes:
    result = replace(record.result, rest=None, placed=None, phases_s={}, sources=(), key_counts=None)
    stored = {"version": _VERSION, **asdict(replace(record, result=result))}
    stored["basis"]["config"]["cleanup_policy"] = sorted(record.basis.config.cleanup_policy)
    for name in ("rest", "placed", "refusal", "phases_s", "sources", "key_counts"):
        del stored["result"][name]
    return (json.dumps(stored) + "\n").encode()


def decode_record(data: bytes, where: str) -> Record:
    """Return the record that `data`, read from the file `where`, contains. Raises CorruptLog if the record is invalid
    or has another version."""
    try:
        stored = parse_object(data)
        if (version := stored.pop("version")) != _VERSION:
            raise ValueError(f"the record has version {version}, but this release supports only version {_VERSION}")
        basis, result = stored["basis"], stored["result"]
        config = basis["config"]
        config["cleanup_policy"] = frozenset(config["cleanup_policy"])
        basis["config"] = CompactionConfig(**config)
        basis["leader_epochs"] = tuple((epoch, start) for epoch, start in basis["leader_epochs"])
        stored["basis"] = Basis(**basis)
        stored["sources"] = tuple(Source(*source) for source in stored["sources"])
        stored["outputs"] = tuple(Output(*output) for output in stored["outputs"])
        result["groups"] = tuple(map(_group, result["groups"]))
        stored["result"] = CleaningResult(**result)
        record = Record(**stored)
        _check_numbers(record)
        _check_groups(record)
        foreign = [name for name in record.files if names.parse_file_name(name).run_id != record.run_id]
        if foreign:
            raise ValueError("the record lists files of other runs")
        if os.path.basename(where) != record.file_name:
            raise ValueError("the preparation was stopped before the record had its final name")
        return record
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CorruptLog(
            f"the record of a prepared compaction cannot be read: {error}",
            path=where,
            remedy="The preparation is discarded, and the partition is compacted as usual",
            slug="invalid-prepared-record",
        ) from error


def _check_numbers(record: Record) -> None:
    """Raise ValueError unless all numbers that are used as offsets, sizes or times are from 0 to the largest offset."""
    basis, result = record.basis, record.result
    outputs = [out for group in result.groups for out in group.segments]
    numbers = [
        *(getattr(result, field.name) for field in fields(CleaningResult) if field.type == "int"),
        *(record.partition, record.prepared_ms, record.first_dirty_offset),
        *(basis.log_start_offset, basis.log_end_offset, basis.removal_limit_offset, basis.cleaner_checkpoint or 0),
        basis.config.delete_retention_ms,
        *(number for pair in basis.leader_epochs for number in pair),
        *(number for source in record.sources for number in (source.base_offset, source.log_bytes)),
        *(output.size_bytes for output in record.outputs),
        *(base for group in result.groups for base in group.source_bases),
        *(out.base_offset for out in outputs),
        *(file.size_bytes for out in outputs for file in out.files),
    ]
    if not all(isinstance(number, int) and 0 <= number <= names.MAX_OFFSET for number in numbers):
        raise ValueError("an offset or size in the record is not a number from 0 to 2^63 - 1")


def _check_groups(record: Record) -> None:
    """Raise ValueError unless the groups replace exactly the sources, with files that are listed among the outputs and
    have their segment's base offset, and without producer snapshots."""
    groups = record.result.groups
    replaced = [base for group in groups for base in group.source_bases]
    if not replaced or replaced != [source.base_offset for source in record.sources]:
        raise ValueError("the listed sources are not the segments that the groups replace")
    if any(group.snapshots for group in groups):  # a compaction writes no producer snapshots
        raise ValueError("the record lists producer snapshots")
    outputs = {output.name for output in record.outputs}
    for out in (out for group in groups for out in group.segments):
        for file in out.files:
            named = names.parse_file_name(file.name)
            if file.name not in outputs or (named.base_offset, named.suffix) != (out.base_offset, file.suffix):
                raise ValueError("the listed outputs are not the files of the new segments")


def _group(stored: dict[str, Any]) -> GroupOutput:
    return GroupOutput(
        tuple(stored["source_bases"]),
        tuple(
            OutputSegment(out["base_offset"], tuple(CleanFile(**file) for file in out["files"]))
            for out in stored["segments"]
        ),
        tuple(SnapshotFile(**snapshot) for snapshot in stored["snapshots"]),
    )
