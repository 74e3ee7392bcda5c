"""Backs up the files that a replacement of segments removes, so that the replacement can be undone.

An entry is a directory `<run id>/<topic>-<partition>` with the files, as hard links or copies, and a manifest that
lists these files and the files that replace them. An entry is durable before the first file is replaced. The directory
of the run has a marker file, by which `forget` recognises directories that it may remove.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from keytail.errors import NO_ERROR, ErrorText, KeytailError, Refused
from keytail.format import names
from keytail.kernels.native import file_digest
from keytail.log.checkpoint import read_epochs, read_offsets
from keytail.log.fs import NO_LINKS, FileStat, FileSystem
from keytail.log.replacement.replace import GroupOutput
from keytail.undo.manifest import MANIFEST, BackupFile, Manifest, parts_of, read_manifest, write_manifest

MARKER = "keytail-backup"  # name of the marker file in the directory of a run

_BUFFER_BYTES = 4 << 20
_NEEDED = (names.LOG, names.INDEX, names.TIME_INDEX)

# Threads of one driver back up partitions of the same run concurrently.
_directories = threading.Lock()


@dataclass(frozen=True)
class Backup:
    """The directory in which a run keeps replaced files, as hard links or `copies`."""

    directory: str
    copies: bool = False


@dataclass(frozen=True)
class Entry:
    """The backup of one partition by one run. If an entry has no manifest, `problem` is why the manifest cannot be used
    or, if empty, the creation or the removal of the entry was interrupted.

    `held_bytes` is the size of the files without another hard link: this space is freed when the entry is removed.
    """

    run_id: str
    name: str
    path: str
    manifest: Manifest | None
    problem: ErrorText
    held_bytes: int


def entry_path(directory: str, run_id: str, topic: str, partition: int) -> str:
    return os.path.join(directory, run_id, names.partition_dir(topic, partition))


def source_files(fs: FileSystem, partition_path: str, source_bases: Collection[int]) -> list[str]:
    """Return the names of the files of these segments, and of the producer snapshots at their base offsets."""
    bases = set(source_bases)
    parsed = [names.parse_file_name(entry.name) for entry in fs.scan(partition_path)]
    return sorted(file.name for file in parsed if file.kind == "live" and file.base_offset in bases)


def keep(
    fs: FileSystem,
    backup: Backup,
    partition_path: str,
    groups: Iterable[GroupOutput],
    *,
    run_id: str,
    source_bases: Sequence[int],
    end_offset: int,
    next_checkpoint: int,
) -> str:
    """Create an entry and return its path. The entry is durable on return; after an error nothing is left.

    Raises Refused if hard links are impossible, if a file changes meanwhile, or if a segment lacks an index, without
    which it cannot be restored.
    """
    log_dir, name = os.path.split(partition_path)
    parsed = names.parse_partition_dir(name)
    assert parsed is not None
    key = (parsed.topic, parsed.partition)
    files = source_files(fs, partition_path, source_bases)
    _refuse_without_indexes(partition_path, source_bases, frozenset(files))
    path = entry_path(backup.directory, run_id, *key)
    _make_directory(fs, backup.directory, path, fs.stat(partition_path))
    try:
        fs.fsync_dir(os.path.dirname(path))
        manifest = Manifest(
            run_id=run_id,
            topic=key[0],
            partition=key[1],
            log_dir=log_dir,
            kept_ms=time.time_ns() // 1_000_000,
            end_offset=end_offset,
            cleaner_checkpoint=read_offsets(fs, os.path.join(log_dir, names.CLEANER_CHECKPOINT)).get(key),
            next_checkpoint=next_checkpoint,
            log_start_checkpoint=read_offsets(fs, os.path.join(log_dir, names.LOG_START_CHECKPOINT)).get(key),
            leader_epochs=epochs_below(fs, partition_path, end_offset),
            files=tuple(_keep_file(fs, backup, partition_path, path, name) for name in files),
            parts=parts_of(groups),
        )
        write_manifest(fs, path, manifest)  # writing the manifest also makes the other names in the directory durable
    except BaseException:
        with contextlib.suppress(OSError, KeytailError):  # only the first error is reported
            forget(fs, path)
        raise
    return path


def add_groups(fs: FileSystem, path: str, groups: Iterable[GroupOutput]) -> None:
    """Add the parts of a further pass to the manifest, durably, before the pass replaces segments."""
    manifest = read_manifest(fs, path)
    write_manifest(fs, path, replace(manifest, parts=(*manifest.parts, *parts_of(groups))))


def epochs_below(fs: FileSystem, partition_path: str, end_offset: int) -> tuple[tuple[int, int], ...]:
    """Return the leader epochs that begin below `end_offset`, with their start offsets."""
    entries = read_epochs(fs, os.path.join(partition_path, names.LEADER_EPOCHS))
    return tuple(entry for entry in entries if entry[1] < end_offset)


def _refuse_without_indexes(partition_path: str, source_bases: Iterable[int], files: Collection[str]) -> None:
    for base in source_bases:
        for suffix in _NEEDED:
            name = names.segment_file(base, suffix)
            if name not in files:
                raise Refused(
                    "this file is missing; a segment without it could not be restored, so its backup is refused",
                    path=os.path.join(partition_path, name),
                    remedy="Rebuild the file with `keytail rebuild-index --execute`, then run again",
                    slug="segment-without-index",
                )


def _make_directory(fs: FileSystem, directory: str, path: str, like: FileStat) -> None:
    """Create an entry's directory and, durably, its missing parents and the marker. Raises FileExistsError if the
    directory exists."""
    run = os.path.dirname(path)
    with _directories:
        for above in (directory, run):
            if not fs.exists(above):
                fs.mkdir(above, like)
                fs.fsync_dir(os.path.dirname(above))
        if not fs.exists(os.path.join(run, MARKER)):
            fs.write_file(os.path.join(run, MARKER), _marker(run), like)
            fs.fsync_dir(run)
        fs.mkdir(path, like)


def _marker(run: str) -> bytes:
    """Return the contents of the marker in the directory of a run."""
    return f"keytail backup of run {os.path.basename(run)}\n".encode()


def _keep_file(fs: FileSystem, backup: Backup, partition_path: str, path: str, name: str) -> BackupFile:
    source, target = os.path.join(partition_path, name), os.path.join(path, name)
    facts = fs.stat(source)
    if backup.copies:
        size_bytes, digest_hex = copy_file(fs, source, target, facts)
    else:
        try:
            fs.link(source, target)
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise other_file_system(backup.directory) from error
            if error.errno in NO_LINKS:
                raise Refused(
                    f"cannot create a hard link to the file in the --keep-originals directory: {error.strerror}",
                    path=source,
                    remedy="Add --copy-originals",
                    slug="no-hard-links",
                ) from error
            raise
        # The file is synced, because its writer may not have made it durable, and the file loses its name in the log.
        size_bytes, digest_hex = digest_file(fs, source, sync=True)
    if size_bytes != facts.size_bytes:
        raise Refused(
            f"the file changed during the run: it had {facts.size_bytes} bytes and now has {size_bytes}",
            path=source,
            remedy="Another process writes to this directory; stop it and run again",
            slug="file-changed",
        )
    return BackupFile(name, size_bytes, digest_hex, facts.mtime_ns, facts.uid, facts.gid, facts.mode)


def other_file_system(directory: str) -> Refused:
    return Refused(
        "the --keep-originals directory is not on the file system of the log dir, so hard links are impossible",
        path=directory,
        remedy="Give --keep-originals a directory on the file system of the log dir, or add --copy-originals",
        slug="backup-on-other-file-system",
    )


def copy_file(fs: FileSystem, source: str, target: str, like: FileStat) -> tuple[int, str]:
    """Copy a file durably, with the owner, mode and mtime of `like`; return size and digest (XXH3-128) of the copy."""
    digest, position, buffer = file_digest(), 0, bytearray(_BUFFER_BYTES)
    from_fd = fs.open_read(source)
    try:
        to_fd = fs.create(target, like)
        try:
            try:
                while count := fs.read_into(from_fd, buffer, position):
                    part = memoryview(buffer)[:count]
                    fs.write(to_fd, part)
                    digest.update(part)
                    position += count
                fs.set_mtime_ns(target, like.mtime_ns)  # fsync makes the time durable together with the contents
                fs.fsync(to_fd)
            finally:
                fs.close(to_fd)
        except BaseException:
            with contextlib.suppress(OSError):
                fs.unlink(target)
            raise
    finally:
        fs.close(from_fd)
    return position, digest.hexdigest()


def digest_file(fs: FileSystem, path: str, *, sync: bool = False) -> tuple[int, str]:
    """Return the size in bytes and the digest (XXH3-128) of a file. With `sync` the file is also made durable."""
    digest, position, buffer = file_digest(), 0, bytearray(_BUFFER_BYTES)
    fd = fs.open_write(path) if sync else fs.open_read(path)
    try:
        while count := fs.read_into(fd, buffer, position):
            digest.update(memoryview(buffer)[:count])
            position += count
        if sync:
            fs.fsync(fd)
    finally:
        fs.close(fd)
    return position, digest.hexdigest()


def entries(fs: FileSystem, directory: str) -> list[Entry]:
    """Return the entries in `directory`, sorted by run and partition."""
    return [_entry(fs, path) for path in entry_directories(fs, directory) if os.path.dirname(path) != directory]


def entry_directories(fs: FileSystem, directory: str) -> list[str]:
    """Return the directories of runs in `directory`, each followed by the directories of its entries, sorted by
    name."""
    found = []
    for run in sorted(fs.scan_names(directory)):
        if not run.is_dir:
            continue
        found.append(os.path.join(directory, run.name))
        for entry in sorted(fs.scan_names(found[-1])):
            parsed = names.parse_partition_dir(entry.name)
            if entry.is_dir and parsed is not None and parsed.kind == "normal":
                found.append(os.path.join(directory, run.name, entry.name))
    return found


def _entry(fs: FileSystem, path: str) -> Entry:
    run, name = os.path.split(path)
    files = [entry.name for entry in fs.scan(path)]
    facts = [fs.stat(os.path.join(path, file)) for file in files if file != MANIFEST]
    manifest, problem = None, NO_ERROR
    if MANIFEST in files:
        try:
            manifest = read_manifest(fs, path)
        except KeytailError as error:
            problem = ErrorText(error)
    held = sum(fact.size_bytes for fact in facts if fact.links == 1)
    return Entry(os.path.basename(run), name, path, manifest, problem, held)


def refuse_foreign(fs: FileSystem, path: str) -> None:
    """Raise Refused unless `keep` has created the entry at `path`. Neither the entry nor any directory above it may be
    a log dir. The directory of its run must have the marker or, if an older keytail created it, the entry must have a
    manifest of this run and partition. The entry may contain only files that `keep` creates.
    """
    _refuse_below_log_dir(fs, path)
    if not _has_marker(fs, os.path.dirname(path)) and not _has_own_manifest(fs, path):
        raise Refused(
            f"the directory is not a backup created by keytail: there is neither the file {MARKER} in the directory of "
            f"the run nor a {MANIFEST} of this run and partition",
            path=path,
            remedy="Nothing was removed. Give the directory that was given to --keep-originals. If this is an "
            "incomplete backup by an older version of keytail, remove it by hand",
            slug="not-a-backup",
        )
    for file in fs.scan(path):
        known = file.name in (MANIFEST, MANIFEST + names.TEMPORARY)
        if not file.is_regular or not (known or names.parse_file_name(file.name).kind == "live"):
            raise Refused(
                "the backup contains a file that keytail does not create",
                path=os.path.join(path, file.name),
                remedy="Move this file away, then run again; nothing was removed",
                slug="unexpected-file-in-backup",
            )


def _refuse_below_log_dir(fs: FileSystem, path: str) -> None:
    above = os.path.realpath(path)
    while above != os.path.dirname(above):
        if fs.exists(os.path.join(above, names.META_PROPERTIES)):
            raise Refused(
                f"{above} is a log dir, since it contains {names.META_PROPERTIES}, and cannot contain a backup",
                path=path,
                remedy="Nothing was removed. Give the directory that was given to --keep-originals",
                slug="backup-in-log-dir",
            )
        above = os.path.dirname(above)


def _has_marker(fs: FileSystem, run: str) -> bool:
    files = [entry for entry in fs.scan(run) if entry.name == MARKER]
    wanted = _marker(run)
    return any(
        file.is_regular and file.size_bytes == len(wanted) and fs.read_bytes(os.path.join(run, MARKER)) == wanted
        for file in files
    )


def _has_own_manifest(fs: FileSystem, path: str) -> bool:
    """Return whether the entry has a manifest of its own run and partition. Older versions wrote no marker."""
    if not any(entry.name == MANIFEST and entry.is_regular for entry in fs.scan(path)):
        return False
    try:
        manifest = read_manifest(fs, path)
    except KeytailError:
        return False
    return os.path.join(manifest.run_id, manifest.name) == os.path.join(*path.split(os.sep)[-2:])


def forget(fs: FileSystem, path: str) -> None:
    """Remove an entry, and with the last entry the directory of its run. After an interruption the function can be
    called again.

    The manifest is removed last, since it lists the files. Raises Refused, with nothing removed, if keytail did not
    create the entry, or if it contains files that `keep` does not create.
    """
    refuse_foreign(fs, path)
    for file in sorted(fs.scan(path), key=lambda entry: (entry.name == MANIFEST, entry.name)):
        fs.unlink(os.path.join(path, file.name))
    run = os.path.dirname(path)
    with _directories:
        fs.rmdir(path)
        fs.fsync_dir(run)
        if [entry.name for entry in fs.scan(run)] in ([], [MARKER]):
            _remove_run(fs, run)


def _remove_run(fs: FileSystem, run: str) -> None:
    if fs.exists(os.path.join(run, MARKER)):
        fs.unlink(os.path.join(run, MARKER))
    fs.rmdir(run)
    fs.fsync_dir(os.path.dirname(run))
