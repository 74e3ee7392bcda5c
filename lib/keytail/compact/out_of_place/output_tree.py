"""A log dir of the target on a mounted path: lists and commits partitions, reads and writes the files of the log dir
itself.

Every step is durable before the next (compact/out_of_place/OUT_OF_PLACE.md lists the states). The callers hold the
target's lock, and determine partitions and contents.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from keytail.compact.out_of_place.output_record import OutputRecord, PlacedFile, as_listed, decode_record, encode_record
from keytail.errors import CorruptLog, KeytailError, Refused, SymbolicLink
from keytail.format import names
from keytail.log.fs import FileStat, FileSystem
from keytail.log.lock import refuse_lost
from keytail.log.small_file import replace_file

ROOT_FILES = (
    names.META_PROPERTIES,
    names.CLEAN_SHUTDOWN,
    names.BOOTSTRAP_SNAPSHOT,
    names.CLEANER_CHECKPOINT,
    names.RECOVERY_POINT_CHECKPOINT,
    names.LOG_START_CHECKPOINT,
    names.HIGH_WATERMARK_CHECKPOINT,
)


@dataclass(frozen=True)
class TargetEntry:
    """A directory in the target.

    `record` is None if the directory has no usable record; `problem` has the reason if there is an unusable record.
    `is_foreign`: keytail did not create the directory. `listing` has the size of each file and, if the file system
    provides it, its modification time.
    """

    name: str
    record: OutputRecord | None = None
    is_foreign: bool = False
    problem: KeytailError | None = None
    listing: dict[str, tuple[int, int | None]] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return self.record is not None and self.record.is_finished

    def differences(self) -> str:
        """Return the names of at most five files that differ from the record, separated by commas; "" if none
        differ."""
        assert self.record is not None
        wanted = as_listed(self.record)
        here = {name: facts for name, facts in self.listing.items() if not _is_keytail_file(name)}
        differ = sorted(name for name in {*wanted, *here} if wanted.get(name) != here.get(name))
        return ", ".join(differ[:5]) + (" ..." if len(differ) > 5 else "")


def classify(name: str, listing: dict[str, tuple[int, int | None]], data: bytes | None, where: str) -> TargetEntry:
    """Return the entry of the directory `name`, from its listing and the contents of its record file (None if there is
    no such file)."""
    parsed = names.parse_partition_dir(name)
    if parsed is None or parsed.kind != "normal":
        return TargetEntry(name, is_foreign=True)
    if data is None:
        return TargetEntry(name, is_foreign=not all(map(_is_keytail_file, listing)), listing=listing)
    try:
        return TargetEntry(name, decode_record(data, where), listing=listing)
    except (CorruptLog, Refused) as problem:
        return TargetEntry(name, problem=problem, listing=listing)


def _is_keytail_file(name: str) -> bool:
    """Return whether only keytail creates files of this name, which brokers do not read."""
    return name.endswith(names.SCRATCH) or name in (names.OUTPUT_RECORD, names.OUTPUT_RECORD + names.TEMPORARY)


def is_foreign_root_file(name: str) -> bool:
    """Return whether keytail never writes a file of this name in the target's log dir."""
    return name not in (*ROOT_FILES, names.LOCK) and name.removesuffix(names.TEMPORARY) not in ROOT_FILES


class MountedTree:
    """One log dir of the target, with the compacted partitions of the log dir `source`, and with its owner and mode."""

    def __init__(self, fs: FileSystem, path: str, source: str) -> None:
        self.fs, self.path, self.source = fs, path, source

    def __str__(self) -> str:
        return self.path

    def partition_path(self, name: str) -> str:
        """Return the path of a partition, also for display."""
        return os.path.join(self.path, name)

    def entries(self) -> dict[str, TargetEntry]:
        """Return the entries of the directories in the log dir, by name; directories that are no partitions are
        foreign. Empty if the log dir does not exist yet.
        """
        if not self.fs.exists(self.path):
            return {}
        entries = self.fs.scan_names(self.path)
        return {entry.name: self._entry(entry.name) for entry in entries if entry.is_dir or entry.is_symlink}

    def _entry(self, name: str) -> TargetEntry:
        path = self.partition_path(name)
        try:
            entries = self.fs.scan(path)
        except (NotADirectoryError, SymbolicLink):
            return TargetEntry(name, is_foreign=True)
        listing: dict[str, tuple[int, int | None]] = {
            entry.name: (entry.size_bytes, entry.mtime_ns) for entry in entries
        }
        record = os.path.join(path, names.OUTPUT_RECORD)
        data = self.fs.read_bytes(record, whole=True) if names.OUTPUT_RECORD in listing else None
        return classify(name, listing, data, record)

    def other_files(self) -> list[str]:
        """Return the names of the files in the log dir itself that keytail does not write."""
        if not self.fs.exists(self.path):
            return []
        entries = self.fs.scan_names(self.path)
        files = (entry.name for entry in entries if not (entry.is_dir or entry.is_symlink))
        return sorted(filter(is_foreign_root_file, files))

    def make(self) -> None:
        """Create the log dir, if it does not exist."""
        if not self.fs.exists(self.path):
            self.fs.mkdir(self.path, writable(self.fs.stat(self.source)))
            self.fs.fsync_dir(os.path.dirname(self.path))

    def make_partition(self, name: str, source: str) -> None:
        """Create the partition's directory, or remove the scratch files of an existing one."""
        path = self.partition_path(name)
        if not self.fs.exists(path):
            self.fs.mkdir(path, writable(self.fs.stat(source)))
            self.fs.fsync_dir(self.path)
            return
        for entry in self.fs.scan(path):
            if entry.name.endswith(names.SCRATCH):
                self.fs.unlink(os.path.join(path, entry.name))

    def commit(self, record: OutputRecord, placed: Sequence[PlacedFile]) -> OutputRecord:
        """Replace the contents of the partition with the output of a task; return the final record.

        While files are replaced, the record on disk is marked unfinished, so a killed run leaves the partition
        unchanged, marked unfinished, or complete.
        """
        path = self.partition_path(record.name)
        self._check_sizes(path, placed)
        refuse_lost(self.fs, path)
        self._put_record(path, replace(record, is_finished=False, source_files=(), files=()))
        kept = {file.name for file in placed} | {file.scratch_name for file in placed} | {names.OUTPUT_RECORD}
        for entry in sorted(self.fs.scan(path), key=lambda entry: entry.name):
            if entry.name not in kept:
                self.fs.unlink(os.path.join(path, entry.name))
        for file in placed:
            self.fs.rename(os.path.join(path, file.scratch_name), os.path.join(path, file.name))
        self.fs.fsync_dir(path)
        times = {entry.name: entry.mtime_ns for entry in self.fs.scan(path)}
        files = tuple(file._replace(scratch_name="", mtime_ns=times[file.name]) for file in placed)
        done = replace(record, is_finished=True, files=files)
        self._put_record(path, done)
        return done

    def _check_sizes(self, path: str, placed: Sequence[PlacedFile]) -> None:
        """Raise an error unless each output file has the size that its task wrote. Called before any existing file is
        changed."""
        sizes = {entry.name: entry.size_bytes for entry in self.fs.scan(path)}
        for file in placed:
            if sizes.get(file.scratch_name) != file.size_bytes:
                raise KeytailError(
                    f"the output has {sizes.get(file.scratch_name, 'no')} bytes on the driver, but its task "
                    f"wrote {file.size_bytes}",
                    path=os.path.join(path, file.scratch_name),
                    remedy="Mount the target at the same path on the driver and all executors. The existing "
                    "files are unchanged",
                    slug="output-size-differs",
                )

    def _put_record(self, path: str, record: OutputRecord) -> None:
        replace_file(self.fs, os.path.join(path, names.OUTPUT_RECORD), encode_record(record), self.fs.stat(path))

    def read(self, name: str) -> bytes | None:
        """Return the contents of a file of the log dir, or None if it does not exist."""
        try:
            return self.fs.read_bytes(os.path.join(self.path, name), whole=True)
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        """Write a file of the log dir durably, with owner and mode of the source's file (of the source log dir, if it
        has no such file), but writable."""
        source = os.path.join(self.source, name)
        like = self.fs.stat(source if self.fs.exists(source) else self.source)
        replace_file(self.fs, os.path.join(self.path, name), data, writable(like))

    def remove(self, root_files: Iterable[str]) -> None:
        """Remove the given files if they exist in the log dir; each removal is durable before the next."""
        for name in root_files:
            path = os.path.join(self.path, name)
            if self.fs.exists(path):
                refuse_lost(self.fs, self.path)
                self.fs.unlink(path)
                self.fs.fsync_dir(self.path)


def writable(like: FileStat) -> FileStat:
    """Return the attributes `like` with write permission for the owner: a broker could not run on read-only files."""
    return replace(like, mode=like.mode | (0o700 if like.is_dir else 0o600))
