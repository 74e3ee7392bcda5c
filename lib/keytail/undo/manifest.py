"""Reads and writes the manifest of a backup: the files before the run, and the files that replace them.

The manifest is a JSON file and is replaced atomically. Only one version of the manifest's format is supported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property

from keytail.errors import CorruptLog, Refused
from keytail.format import names
from keytail.format.json_object import parse_object
from keytail.log.fs import FileSystem
from keytail.log.replacement.replace import GroupOutput, parts
from keytail.log.small_file import replace_file

_LATEST_MS = 253_402_300_799_999  # the end of the year 9999, the latest time that can be printed

MANIFEST = "manifest.json"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class LeftFile:
    """A file that the run added to the partition, under its final name. The digest is XXH3-128."""

    name: str
    size_bytes: int
    digest_hex: str


@dataclass(frozen=True, slots=True)
class BackupFile:
    """A file as it was before the run."""

    name: str
    size_bytes: int
    digest_hex: str
    mtime_ns: int
    uid: int
    gid: int
    mode: int


@dataclass(frozen=True, slots=True)
class Part:
    """One commit, recorded before it is made: the files `left` replace the segments at `source_bases`."""

    source_bases: tuple[int, ...]
    left: tuple[LeftFile, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of an entry.

    `end_offset` is the base offset of the first segment that the run does not replace. The checkpoint entries are from
    before the run (None: no entry); the leader epochs are those that begin below `end_offset`. `next_checkpoint` is the
    value to which a compaction sets the cleaner checkpoint at its end; a repack sets none. `parts` are ascending within
    each pass, in the order of the passes. `kept_ms` and `undone_ms` are the times of the backup and of its restoration.
    """

    run_id: str
    topic: str
    partition: int
    log_dir: str
    kept_ms: int
    end_offset: int
    cleaner_checkpoint: int | None
    next_checkpoint: int
    log_start_checkpoint: int | None
    leader_epochs: tuple[tuple[int, int], ...]
    files: tuple[BackupFile, ...]
    parts: tuple[Part, ...]
    undone_ms: int | None = None

    @property
    def name(self) -> str:
        return names.partition_dir(self.topic, self.partition)

    @property
    def partition_path(self) -> str:
        return os.path.join(self.log_dir, self.name)

    @cached_property
    def files_by_base(self) -> dict[int, list[BackupFile]]:
        """The `files` by the base offset in their names, in order."""
        found: dict[int, list[BackupFile]] = {}
        for kept in self.files:
            base = names.parse_file_name(kept.name).base_offset
            assert base is not None
            found.setdefault(base, []).append(kept)
        return found


def parts_of(groups: Iterable[GroupOutput]) -> tuple[Part, ...]:
    """Return a part for each commit by which the groups are replaced."""
    return tuple(
        Part(
            part.source_bases,
            tuple(
                LeftFile(names.segment_file(out.base_offset, file.suffix), file.size_bytes, file.digest_hex)
                for out in part.segments
                for file in out.files
            ),
        )
        for group in groups
        for part in parts(group)
    )


def write_manifest(fs: FileSystem, path: str, manifest: Manifest) -> None:
    """Replace the manifest in the directory `path` atomically and durably."""
    target = os.path.join(path, MANIFEST)
    text = json.dumps({"version": _VERSION, **asdict(manifest)}, indent=1) + "\n"
    replace_file(fs, target, text.encode(), fs.stat(path))


def read_manifest(fs: FileSystem, path: str) -> Manifest:
    """Read the manifest in the directory `path`. Raises CorruptLog if it cannot be parsed or has values that keytail
    never writes; Refused if it has another version."""
    file = os.path.join(path, MANIFEST)
    data = fs.read_bytes(file, whole=True)
    try:
        fields = parse_object(data)
        version = fields.pop("version")
        if version != _VERSION:
            raise Refused(
                f"the backup manifest has version {version}, but this keytail supports only version {_VERSION}",
                path=file,
                remedy="Use the version of keytail that created the backup",
                slug="unsupported-manifest-version",
            )
        fields["files"] = tuple(BackupFile(**kept) for kept in fields["files"])
        fields["parts"] = tuple(
            Part(tuple(part["source_bases"]), tuple(LeftFile(**left) for left in part["left"]))
            for part in fields["parts"]
        )
        fields["leader_epochs"] = tuple((epoch, start) for epoch, start in fields["leader_epochs"])
        manifest = Manifest(**fields)
        _check(manifest, path)
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptLog(
            f"invalid backup manifest: {error}",
            path=file,
            remedy="Nothing was changed. To restore the partition by hand, use the files beside the manifest: the run "
            "replaced these files",
            slug="invalid-manifest",
        ) from error


def _check(manifest: Manifest, path: str) -> None:
    """Raise ValueError for values that keytail never writes.

    The owner of the entry can edit the manifest: no name in it may lead out of the entry or its partition.
    """
    run, name = os.path.split(path)
    if (manifest.name, manifest.run_id) != (name, os.path.basename(run)):
        raise ValueError("its run or partition differs from the names of its directories")
    if not isinstance(manifest.topic, str) or not os.path.isabs(manifest.log_dir) or "\0" in manifest.log_dir:
        raise ValueError("it has no valid topic or log dir")
    files: list[BackupFile | LeftFile] = [*manifest.files, *(left for part in manifest.parts for left in part.left)]
    for file in files:
        parsed = names.parse_file_name(file.name)
        if parsed.kind != "live" or parsed.base_offset is None:
            raise ValueError("it lists a file that does not belong to a segment")
    os.fsencode(manifest.log_dir)  # raises ValueError for characters that no path can have
    optional = (manifest.cleaner_checkpoint, manifest.log_start_checkpoint, manifest.undone_ms)
    numbers = [manifest.partition, manifest.kept_ms, manifest.end_offset, manifest.next_checkpoint]
    numbers += [number for number in optional if number is not None]
    numbers += [base for part in manifest.parts for base in part.source_bases]
    numbers += [number for entry in manifest.leader_epochs for number in entry]
    sizes = [file.size_bytes for file in files]
    numbers += [*sizes, *(number for kept in manifest.files for number in (kept.mtime_ns, kept.mode))]
    known = all(isinstance(number, int) and abs(number) <= names.MAX_OFFSET for number in numbers)
    if not known or min(sizes, default=0) < 0:
        raise ValueError("it has an impossible size, offset or other number")
    if any(not 0 <= time_ms <= _LATEST_MS for time_ms in (manifest.kept_ms, manifest.undone_ms or 0)):
        raise ValueError("it has an impossible time")
    for part in manifest.parts:
        if part.left and not any(left.name.endswith(names.LOG) for left in part.left):
            raise ValueError("one of its parts has new files, but no new segment")
        if any(base >= manifest.end_offset for base in part.source_bases):
            raise ValueError("one of its parts is above the offsets that the run replaced")
