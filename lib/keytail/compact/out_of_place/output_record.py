"""The record beside the files of a partition that was written out of place: it describes the files to the next run.

The record is JSON with a version, and is written atomically: as unfinished before any file is changed, and as finished
at the end (compact/out_of_place/OUT_OF_PLACE.md). Other modules store and evaluate output records.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from keytail.errors import NO_ERROR, CorruptLog, ErrorText, Refused, of_stored, stored
from keytail.format import names
from keytail.format.json_object import parse_object
from keytail.log.fs import FileSystem

_VERSION = 1


class SeenFile(NamedTuple):
    """A file of the source, as listed."""

    name: str
    size_bytes: int
    mtime_ns: int


class PlacedFile(NamedTuple):
    """A file of the target: its final name, its scratch name ("" once it has its final name), its size, its XXH3-128
    digest and, once it is in place and if the file system provides it, its modification time.
    """

    name: str
    scratch_name: str
    size_bytes: int
    digest_hex: str
    mtime_ns: int | None = None


class Entries(NamedTuple):
    """The entries of a partition in the checkpoints of a log dir; None: no entry."""

    cleaner: int | None = None
    recovery_point: int | None = None
    log_start: int | None = None
    high_watermark: int | None = None


@dataclass(frozen=True)
class OutputRecord:
    """A partition in the target. `source_files` and `source_entries` are the files and checkpoint entries that the run
    found in the source; `entries` and `files` are what the target must have.

    Unless `is_finished`, the partition's files are being replaced, and may be in any state. `copied_for`: the reason
    why the partition was copied unchanged. `clean_to`: the offset below which it was compacted, None for a copy.
    """

    run_id: str
    topic: str
    partition: int
    source: str
    written_ms: int
    is_finished: bool
    clean_shutdown: bool
    source_files: tuple[SeenFile, ...]
    source_entries: Entries
    entries: Entries
    files: tuple[PlacedFile, ...]
    copied_for: ErrorText = NO_ERROR
    clean_to: int | None = None

    @property
    def name(self) -> str:
        return names.partition_dir(self.topic, self.partition)


def encode_record(record: OutputRecord) -> bytes:
    fields: dict[str, Any] = {"version": _VERSION, **asdict(record), "copied_for": stored(record.copied_for)}
    fields["files"] = [
        [file.name, file.size_bytes, file.digest_hex, file.mtime_ns] for file in record.files
    ]  # a list for each file, not an object: a partition may have thousands
    return (json.dumps(fields) + "\n").encode()


def decode_record(data: bytes, where: str) -> OutputRecord:
    """Parse a record. Raises CorruptLog if it cannot be read, Refused if it has another version."""
    try:
        fields = parse_object(data)
        version = fields.pop("version")
        if version != _VERSION:
            raise Refused(
                f"the record of this output has version {version}, but this keytail supports only {_VERSION}",
                path=where,
                remedy="Use the keytail version that wrote the record, or another --output-dir",
                slug="unsupported-output-version",
            )
        fields["copied_for"] = of_stored(fields.get("copied_for", ""))
        fields["source_files"] = tuple(SeenFile(*file) for file in fields["source_files"])
        fields["source_entries"] = Entries(*fields["source_entries"])
        fields["entries"] = Entries(*fields["entries"])
        fields["files"] = tuple(
            PlacedFile(name, "", size_bytes, digest, mtime_ns) for name, size_bytes, digest, mtime_ns in fields["files"]
        )
        seen: tuple[SeenFile | PlacedFile, ...] = (*fields["source_files"], *fields["files"])
        if any(os.path.basename(file.name) != file.name for file in seen):
            raise ValueError("it names a file in another directory")
        return OutputRecord(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptLog(
            f"the record of this output cannot be read: {error}",
            path=where,
            remedy="Remove the partition's directory in the target, and run again: the run writes the partition again",
            slug="invalid-output-record",
        ) from error


def seen_files(fs: FileSystem, partition_path: str) -> tuple[SeenFile, ...]:
    """Return the files that a copy of the partition contains, sorted by name: all regular files except output records,
    scratch files, leftovers of replacements, and files that prevent a broker from starting."""
    return tuple(
        sorted(
            SeenFile(entry.name, entry.size_bytes, entry.mtime_ns)
            for entry in fs.scan(partition_path)
            if entry.is_regular and _is_copied(entry.name)
        )
    )


def _is_copied(name: str) -> bool:
    if name == names.OUTPUT_RECORD or name.endswith((names.TEMPORARY, names.SCRATCH)):
        return False
    return names.parse_file_name(name).kind in ("live", "partition", "other")


def as_listed(record: OutputRecord) -> Mapping[str, tuple[int, int | None]]:
    """Return the sizes and times of the record's files by name, as a listing of the target must show them."""
    return {file.name: (file.size_bytes, file.mtime_ns) for file in record.files}
