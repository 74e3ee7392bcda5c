"""Restores a partition to its state before a run that kept a backup of it.

Pure functions decide, from the run's manifest and the files on disk, whether the partition may be restored, and what
remains to be done. Restoring may be interrupted at any moment; UNDO.md beside this file describes the order of the
steps, and every state on disk. The caller holds the locks and has resolved leftovers (`recover.recover`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from keytail.errors import WRITTEN_TO, CorruptLog, KeytailError, Refused
from keytail.format import names
from keytail.log.checkpoint import read_offsets, update_offset
from keytail.log.fs import NO_LINKS, FileStat, FileSystem
from keytail.log.lock import refuse_lost
from keytail.log.replacement.directory import Directory
from keytail.log.replacement.recover import recover
from keytail.log.replacement.replace import CleanFile, GroupOutput, OutputSegment, SnapshotFile, commit_group
from keytail.undo.backup import copy_file, digest_file, epochs_below
from keytail.undo.manifest import BackupFile, LeftFile, Manifest, Part, write_manifest

_ATTEMPT = "undo"


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A current file of the partition. The digest is empty if the manifest has no file of this name and size."""

    size_bytes: int
    digest_hex: str
    mtime_ns: int

    def holds(self, file: BackupFile | LeftFile) -> bool:
        return (self.size_bytes, self.digest_hex) == (file.size_bytes, file.digest_hex)


@dataclass(frozen=True)
class PartitionState:
    """The state on disk below the manifest's `end_offset`: files by name, checkpoint entries, leader epochs."""

    files: Mapping[str, LiveFile]
    cleaner_checkpoint: int | None
    log_start_checkpoint: int | None
    leader_epochs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Decision:
    """What to restore in one partition. `parts` are restored in this order, which is the reverse of the run's order.

    If there are `differences` (sentences), nothing may be changed. `cleaner_checkpoint` is the target value of the
    entry (None: it is removed); `moves_checkpoint` is true if the current value is different.
    """

    parts: tuple[Part, ...]
    differences: tuple[str, ...]
    cleaner_checkpoint: int | None
    moves_checkpoint: bool

    @property
    def is_done(self) -> bool:
        return not self.parts and not self.moves_checkpoint and not self.differences


def decide(manifest: Manifest, found: PartitionState) -> Decision:
    """Decide what to restore. Each part must have either the files that the run left or the files from before the run;
    a segment that is in no part must have the files from before the run. Any other state is added to `differences`."""
    differences: list[str] = []
    todo: list[Part] = []
    expected: set[str] = set()
    by_base: dict[int, dict[str, LiveFile]] = {}
    for name, file in found.files.items():
        by_base.setdefault(_base(name), {})[name] = file
    for part in _units(manifest):
        before = _files_before(manifest, part)
        left = _files_left(part, before)
        files = {name: file for base in _bases(part) for name, file in by_base.get(base, {}).items()}
        unchanged = _match(files, before)
        if unchanged and all(file.mtime_ns == before[name].mtime_ns for name, file in files.items()):
            expected |= before.keys()
        elif (removed := _replaced_sources(part, files, before, left)) is not None:
            todo.append(replace(part, source_bases=removed))
            expected |= files.keys()
        elif unchanged:
            expected |= before.keys()
        else:
            differences += _differences(files, left if part.left else before)
            expected |= files.keys()
    differences += [f"{name} was added" for name in sorted(found.files.keys() - expected)]
    target = _checkpoint_before(manifest)
    differences += _of_checkpoints(manifest, found, target)
    return Decision(tuple(reversed(todo)), tuple(differences), target, found.cleaner_checkpoint != target)


def _units(manifest: Manifest) -> list[Part]:
    """Return the parts, and a part without new files for each segment that is in no part, ascending."""
    in_parts = {base for part in manifest.parts for base in part.source_bases}
    rest = {base for kept in manifest.files if (base := _base(kept.name)) not in in_parts and _is_log(kept.name)}
    return sorted([*manifest.parts, *(Part((base,), ()) for base in rest)], key=lambda part: part.source_bases)


def _base(name: str) -> int:
    base = names.parse_file_name(name).base_offset
    assert base is not None
    return base


def _is_log(name: str) -> bool:
    return names.parse_file_name(name).suffix == names.LOG


def _is_snapshot(name: str) -> bool:
    return names.parse_file_name(name).suffix == names.SNAPSHOT


def _bases(part: Part) -> set[int]:
    return {*part.source_bases, *(_base(file.name) for file in part.left)}


def _files_before(manifest: Manifest, part: Part) -> dict[str, BackupFile]:
    return {kept.name: kept for base in part.source_bases for kept in manifest.files_by_base.get(base, ())}


def _files_left(part: Part, before: Mapping[str, BackupFile]) -> dict[str, BackupFile | LeftFile]:
    """Return the files that the run left, including the retained producer snapshots at the new base offsets."""
    bases = {_base(file.name) for file in part.left}
    stay = {name: kept for name, kept in before.items() if _is_snapshot(name) and _base(name) in bases}
    return {**stay, **{file.name: file for file in part.left}}


def _replaced_sources(
    part: Part,
    files: Mapping[str, LiveFile],
    before: Mapping[str, BackupFile],
    left: Mapping[str, BackupFile | LeftFile],
) -> tuple[int, ...] | None:
    """Return the base offsets of the replaced segments of `part`; None if its new segments are not in place.

    After an interrupted replacement the last sources may still exist, above the end of the new segments.
    """
    for count in range(len(part.source_bases), 0, -1):
        rest = part.source_bases[count:]
        stay = {name: kept for name, kept in before.items() if _base(name) in rest}
        if part.left and _match(files, {**left, **stay}):
            return part.source_bases[:count]
    return None


def _match(
    files: Mapping[str, LiveFile], wanted: Mapping[str, BackupFile] | Mapping[str, BackupFile | LeftFile]
) -> bool:
    """Return whether the files equal `wanted`. Producer snapshots may be missing: a broker that starts removes
    snapshots below the log start."""
    missing = wanted.keys() - files.keys()
    return (
        files.keys() <= wanted.keys()
        and all(map(_is_snapshot, missing))
        and all(file.holds(wanted[name]) for name, file in files.items())
    )


def _differences(files: Mapping[str, LiveFile], wanted: Mapping[str, BackupFile | LeftFile]) -> list[str]:
    found = []
    for name in sorted({*files, *wanted}):
        if name not in wanted:
            found.append(f"{name} was added")
        elif name not in files:
            if not _is_snapshot(name):
                found.append(f"{name} is missing")
        elif files[name].size_bytes != wanted[name].size_bytes:
            found.append(f"{name} has {files[name].size_bytes} bytes; after the run it had {wanted[name].size_bytes}")
        elif not files[name].holds(wanted[name]):
            found.append(f"the contents of {name} differ from those after the run")
    return found


def _checkpoint_before(manifest: Manifest) -> int | None:
    """Return the cleaner checkpoint from before the run; None if there was no entry, or if the entry was above
    `next_checkpoint`: the cleaner then begins at the log start."""
    before = manifest.cleaner_checkpoint
    return before if before is not None and before <= manifest.next_checkpoint else None


def _of_checkpoints(manifest: Manifest, found: PartitionState, target: int | None) -> list[str]:
    differences = []
    if found.cleaner_checkpoint not in (target, manifest.cleaner_checkpoint, manifest.next_checkpoint):
        differences.append(
            f"{names.CLEANER_CHECKPOINT} has {_entry(found.cleaner_checkpoint)}; "
            f"after the run it had offset {manifest.next_checkpoint}"
        )
    first = min((_base(kept.name) for kept in manifest.files), default=0)
    was, now = (max(entry or 0, first) for entry in (manifest.log_start_checkpoint, found.log_start_checkpoint))
    if was != now:
        text = f"the log start offset is {now}; before the run it was {was} ({names.LOG_START_CHECKPOINT})"
        differences.append(text)
    if found.leader_epochs != manifest.leader_epochs:
        differences.append(
            f"{names.LEADER_EPOCHS} has {_epochs(found.leader_epochs)} below offset {manifest.end_offset}; before the "
            f"run it had {_epochs(manifest.leader_epochs)}"
        )
    return differences


def _entry(offset: int | None) -> str:
    return "no entry" if offset is None else f"offset {offset}"


def _epochs(entries: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"epoch {epoch} from offset {start}" for epoch, start in entries) or "no epochs"


def read_state(fs: FileSystem, manifest: Manifest) -> PartitionState:
    """Read the state on disk, and compute digests of files with known names and sizes. Raises Refused for a file that
    is not regular."""
    path, log_dir, key = manifest.partition_path, manifest.log_dir, (manifest.topic, manifest.partition)
    known: dict[str, set[int]] = {}
    files_known: list[BackupFile | LeftFile] = [
        *manifest.files,
        *(left for part in manifest.parts for left in part.left),
    ]
    for file in files_known:
        known.setdefault(file.name, set()).add(file.size_bytes)
    files = {}
    for entry in fs.scan(path):
        parsed = names.parse_file_name(entry.name)
        if parsed.kind != "live" or parsed.base_offset is None or parsed.base_offset >= manifest.end_offset:
            continue
        if parsed.suffix == names.SNAPSHOT and entry.name not in known:
            continue  # a snapshot where no segment begins may be created or removed by a broker
        where = os.path.join(path, entry.name)
        if not entry.is_regular:
            raise Refused(
                "this is not a regular file",
                path=where,
                remedy="Nothing was changed. Move this file away, then run again",
                slug="not-a-regular-file",
            )
        digest_hex = digest_file(fs, where)[1] if entry.size_bytes in known.get(entry.name, ()) else ""
        files[entry.name] = LiveFile(entry.size_bytes, digest_hex, entry.mtime_ns)
    return PartitionState(
        files,
        read_offsets(fs, os.path.join(log_dir, names.CLEANER_CHECKPOINT)).get(key),
        read_offsets(fs, os.path.join(log_dir, names.LOG_START_CHECKPOINT)).get(key),
        epochs_below(fs, path, manifest.end_offset),
    )


def check_backup(fs: FileSystem, manifest: Manifest, entry: str, parts: Iterable[Part]) -> None:
    """Raise CorruptLog if a file of the backup that is needed for the parts is missing or has changed."""
    for part in parts:
        for kept in _files_before(manifest, part).values():
            path = os.path.join(entry, kept.name)
            wrong = ""
            if not fs.exists(path):
                wrong = "a file of the backup is missing"
            elif digest_file(fs, path) != (kept.size_bytes, kept.digest_hex):
                wrong = "a file of the backup differs from the file that was replaced"
            if wrong:
                raise CorruptLog(
                    wrong,
                    path=path,
                    remedy="Nothing was changed; the run cannot be undone unless you restore this file",
                    slug="damaged-backup",
                )


def bytes_to_copy(fs: FileSystem, manifest: Manifest, entry: str, parts: Iterable[Part]) -> int:
    """Return how many bytes must be copied to restore the parts; files that can be linked are not copied."""
    partition = fs.stat(manifest.partition_path)
    kept = [file for part in parts for file in _files_before(manifest, part).values()]
    facts = [(file, fs.stat(os.path.join(entry, file.name))) for file in kept]
    return sum(file.size_bytes for file, fact in facts if not _may_link(file, fact, partition))


def restore(fs: FileSystem, manifest: Manifest, entry: str, decision: Decision, now_ms: int) -> None:
    """Carry out the decision, and record the time `now_ms` in the manifest. After an interruption at any moment,
    `decide` returns what remains to be done.

    The cleaner checkpoint is moved first: a broker's cleaner treats records below it as clean, but the restored records
    are not clean. Parts are restored from the latest to the oldest, so that a tombstone or marker is restored before
    the records that it deletes.
    """
    if decision.moves_checkpoint:
        checkpoint = os.path.join(manifest.log_dir, names.CLEANER_CHECKPOINT)
        key = (manifest.topic, manifest.partition)
        update_offset(fs, checkpoint, key, decision.cleaner_checkpoint, hosted=None)
    directory = Directory(fs, manifest.partition_path)
    try:
        for part in decision.parts:
            _put_back(directory, manifest, entry, part)
    except (KeytailError, OSError):
        with contextlib.suppress(KeytailError, OSError):  # only the first error is reported
            recover(fs, manifest.partition_path)
        raise
    write_manifest(fs, entry, replace(manifest, undone_ms=now_ms))


def _put_back(directory: Directory, manifest: Manifest, entry: str, part: Part) -> None:
    fs, path = directory.fs, directory.path
    refuse_lost(fs, path)
    directory.refresh()
    before = _files_before(manifest, part)
    partition = fs.stat(path)
    segments: dict[int, list[CleanFile]] = {base: [] for base in part.source_bases}
    snapshots = []
    for kept in before.values():
        parsed = names.parse_file_name(kept.name)
        assert parsed.base_offset is not None
        if parsed.suffix == names.SNAPSHOT and fs.exists(os.path.join(path, kept.name)):
            continue
        scratch = names.scratch_file(parsed.base_offset, manifest.run_id, _ATTEMPT, parsed.suffix)
        _make_scratch(fs, os.path.join(entry, kept.name), os.path.join(path, scratch), kept, partition)
        if parsed.suffix == names.SNAPSHOT:
            snapshots.append(SnapshotFile(parsed.base_offset, scratch))
        else:
            segments[parsed.base_offset].append(CleanFile(parsed.suffix, scratch, kept.size_bytes, kept.digest_hex))
    left_bases = tuple(sorted({_base(file.name) for file in part.left}))
    outputs = tuple(OutputSegment(base, tuple(files)) for base, files in segments.items())
    directory.keep()  # scratch files do not belong to the log
    commit_group(fs, path, GroupOutput(left_bases, outputs, tuple(snapshots)), directory=directory)


def _make_scratch(fs: FileSystem, source: str, target: str, kept: BackupFile, partition: FileStat) -> None:
    """Link or copy a file of the backup to a scratch file. The owner in the manifest is not used: with it, anyone who
    can write the manifest could choose the owner of a file."""
    facts = fs.stat(source)
    if _may_link(kept, facts, partition):
        try:
            fs.link(source, target)
            return
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
    like = replace(facts, path=source, mtime_ns=kept.mtime_ns, mode=kept.mode)
    if copy_file(fs, source, target, like) != (kept.size_bytes, kept.digest_hex):
        fs.unlink(target)
        raise CorruptLog(
            "a file of the backup changed while it was copied", path=source, remedy=WRITTEN_TO, slug="backup-changed"
        )


def _may_link(kept: BackupFile, facts: FileStat, partition: FileStat) -> bool:
    """Return whether a file of the backup can be linked into the log: the file is on the file system of the log, its
    owner, mode and mtime are unchanged, and a copy would get the same owner and mode."""
    if partition.uid not in (0, facts.uid) or facts.mode & ~0o666:
        return False
    same = (facts.uid, facts.gid, facts.mode, facts.mtime_ns) == (kept.uid, kept.gid, kept.mode, kept.mtime_ns)
    return same and facts.device == partition.device
