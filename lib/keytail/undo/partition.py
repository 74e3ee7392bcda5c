"""Gives a partition back as it was before a run that kept its originals.

Whether that may be done, and what is left to do, is decided from values: what the run's manifest says, and what is on
disk now. Putting the originals back is safe to stop at any moment; UNDO.md beside this file has the order, and every
state on disk. The caller holds the locks and has resolved leftovers (`recover.recover`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from keytail.errors import WRITTEN_TO, CorruptLog, KeytailError, Refused
from keytail.format import names
from keytail.log.checkpoint import read_offsets, update_offset
from keytail.log.directory import Directory
from keytail.log.fs import NO_LINKS, FileStat, FileSystem
from keytail.log.lock import refuse_lost
from keytail.log.recover import recover
from keytail.log.replace import CleanFile, GroupOutput, OutputSegment, SnapshotFile, commit_group
from keytail.undo.manifest import KeptFile, LeftFile, Manifest, Part, write_manifest
from keytail.undo.originals import copy_file, digest_file, epochs_below

_ATTEMPT = "undo"


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A file of the partition as it is now. The digest is empty where the size alone tells it from all others."""

    size_bytes: int
    digest_hex: str
    mtime_ns: int

    def holds(self, file: KeptFile | LeftFile) -> bool:
        return (self.size_bytes, self.digest_hex) == (file.size_bytes, file.digest_hex)


@dataclass(frozen=True)
class Found:
    """What is on disk now: files below our end by name, checkpoint entries, and leader epochs below our end."""

    files: Mapping[str, LiveFile]
    cleaner_checkpoint: int | None
    log_start_checkpoint: int | None
    leader_epochs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Decision:
    """`parts` are to be put back, in this order, which is that of the run backwards.

    With `differences`, sentences, nothing may be done. `cleaner_checkpoint` is what its entry is set to (None: it is
    taken out), and `moves_checkpoint` says whether it stands elsewhere now.
    """

    parts: tuple[Part, ...]
    differences: tuple[str, ...]
    cleaner_checkpoint: int | None
    moves_checkpoint: bool

    @property
    def is_done(self) -> bool:
        return not self.parts and not self.moves_checkpoint and not self.differences


def decide(manifest: Manifest, found: Found) -> Decision:
    """Each part must hold what the run left, or what was there before it; what it did not come to, the latter."""
    differences: list[str] = []
    todo: list[Part] = []
    expected: set[str] = set()
    by_base: dict[int, dict[str, LiveFile]] = {}
    for name, file in found.files.items():
        by_base.setdefault(_base(name), {})[name] = file
    for part in _units(manifest):
        before = _files_before(manifest, part)
        left = _files_left(part, before)
        there = {name: file for base in _bases(part) for name, file in by_base.get(base, {}).items()}
        unchanged = _are(there, before)
        if unchanged and all(file.mtime_ns == before[name].mtime_ns for name, file in there.items()):
            expected |= before.keys()
        elif (gone := _replaced_sources(part, there, before, left)) is not None:
            todo.append(replace(part, source_bases=gone))
            expected |= there.keys()
        elif unchanged:
            expected |= before.keys()
        else:
            differences += _differences(there, left if part.left else before)
            expected |= there.keys()
    differences += [f"{name} is there now" for name in sorted(found.files.keys() - expected)]
    target = _checkpoint_before(manifest)
    differences += _of_checkpoints(manifest, found, target)
    return Decision(tuple(reversed(todo)), tuple(differences), target, found.cleaner_checkpoint != target)


def _units(manifest: Manifest) -> list[Part]:
    """The parts, ascending, and each segment that no part was to replace yet."""
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


def _files_before(manifest: Manifest, part: Part) -> dict[str, KeptFile]:
    return {kept.name: kept for base in part.source_bases for kept in manifest.files_by_base.get(base, ())}


def _files_left(part: Part, before: Mapping[str, KeptFile]) -> dict[str, KeptFile | LeftFile]:
    """With the producer snapshots that stay: those at the bases of the new segments."""
    bases = {_base(file.name) for file in part.left}
    stay = {name: kept for name, kept in before.items() if _is_snapshot(name) and _base(name) in bases}
    return {**stay, **{file.name: file for file in part.left}}


def _replaced_sources(
    part: Part,
    there: Mapping[str, LiveFile],
    before: Mapping[str, KeptFile],
    left: Mapping[str, KeptFile | LeftFile],
) -> tuple[int, ...] | None:
    """The bases of the segments that are gone, where the new ones are in their place; else None.

    Of a replacement that was interrupted the last sources may still be there, behind the end of what replaced them.
    """
    for count in range(len(part.source_bases), 0, -1):
        rest = part.source_bases[count:]
        stay = {name: kept for name, kept in before.items() if _base(name) in rest}
        if part.left and _are(there, {**left, **stay}):
            return part.source_bases[:count]
    return None


def _are(there: Mapping[str, LiveFile], wanted: Mapping[str, KeptFile] | Mapping[str, KeptFile | LeftFile]) -> bool:
    """But for producer snapshots that are gone: a broker that starts removes those below the log start."""
    missing = wanted.keys() - there.keys()
    return (
        there.keys() <= wanted.keys()
        and all(map(_is_snapshot, missing))
        and all(file.holds(wanted[name]) for name, file in there.items())
    )


def _differences(there: Mapping[str, LiveFile], wanted: Mapping[str, KeptFile | LeftFile]) -> list[str]:
    found = []
    for name in sorted({*there, *wanted}):
        if name not in wanted:
            found.append(f"{name} is there now")
        elif name not in there:
            if not _is_snapshot(name):
                found.append(f"{name} is gone")
        elif there[name].size_bytes != wanted[name].size_bytes:
            found.append(f"{name} has {there[name].size_bytes} bytes now, the run left {wanted[name].size_bytes}")
        elif not there[name].holds(wanted[name]):
            found.append(f"{name} has other contents now than the run left")
    return found


def _checkpoint_before(manifest: Manifest) -> int | None:
    """None where there was none, and where it lay outside of the log: then the cleaner begins at the log start."""
    before = manifest.cleaner_checkpoint
    return before if before is not None and before <= manifest.next_checkpoint else None


def _of_checkpoints(manifest: Manifest, found: Found, target: int | None) -> list[str]:
    differences = []
    if found.cleaner_checkpoint not in (target, manifest.cleaner_checkpoint, manifest.next_checkpoint):
        differences.append(
            f"{names.CLEANER_CHECKPOINT} has {_entry(found.cleaner_checkpoint)} now, "
            f"the run left {manifest.next_checkpoint}"
        )
    first = min((_base(kept.name) for kept in manifest.files), default=0)
    was, now = (max(entry or 0, first) for entry in (manifest.log_start_checkpoint, found.log_start_checkpoint))
    if was != now:
        differences.append(f"the log start offset is {now} now, and was {was} ({names.LOG_START_CHECKPOINT})")
    if found.leader_epochs != manifest.leader_epochs:
        differences.append(
            f"{names.LEADER_EPOCHS} has {_epochs(found.leader_epochs)} below offset {manifest.end_offset} now, and had "
            f"{_epochs(manifest.leader_epochs)}"
        )
    return differences


def _entry(offset: int | None) -> str:
    return "no entry" if offset is None else str(offset)


def _epochs(entries: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"epoch {epoch} from {start}" for epoch, start in entries) or "nothing"


def look(fs: FileSystem, manifest: Manifest) -> Found:
    """Reads the files below our end that have a size that the run knows; Refused for what is no regular file."""
    path, log_dir, key = manifest.partition_path, manifest.log_dir, (manifest.topic, manifest.partition)
    known: dict[str, set[int]] = {}
    files_known: list[KeptFile | LeftFile] = [*manifest.files, *(left for part in manifest.parts for left in part.left)]
    for file in files_known:
        known.setdefault(file.name, set()).add(file.size_bytes)
    files = {}
    for entry in fs.scan(path):
        parsed = names.parse_file_name(entry.name)
        if parsed.kind != "live" or parsed.base_offset is None or parsed.base_offset >= manifest.end_offset:
            continue
        if parsed.suffix == names.SNAPSHOT and entry.name not in known:
            continue  # a broker takes and removes those where no segment begins
        where = os.path.join(path, entry.name)
        if not entry.is_regular:
            raise Refused("not a regular file", path=where, remedy="Move it away, then run again; nothing was changed")
        digest_hex = digest_file(fs, where)[1] if entry.size_bytes in known.get(entry.name, ()) else ""
        files[entry.name] = LiveFile(entry.size_bytes, digest_hex, entry.mtime_ns)
    return Found(
        files,
        read_offsets(fs, os.path.join(log_dir, names.CLEANER_CHECKPOINT)).get(key),
        read_offsets(fs, os.path.join(log_dir, names.LOG_START_CHECKPOINT)).get(key),
        epochs_below(fs, path, manifest.end_offset),
    )


def check_originals(fs: FileSystem, manifest: Manifest, entry: str, parts: Iterable[Part]) -> None:
    """CorruptLog where a kept file that is needed is not what it was any more."""
    for part in parts:
        for kept in _files_before(manifest, part).values():
            path = os.path.join(entry, kept.name)
            wrong = ""
            if not fs.exists(path):
                wrong = "a kept original is gone"
            elif digest_file(fs, path) != (kept.size_bytes, kept.digest_hex):
                wrong = "a kept original has other contents than the file that was replaced"
            if wrong:
                raise CorruptLog(wrong, path=path, remedy="Nothing was changed; the run cannot be undone")


def bytes_to_copy(fs: FileSystem, manifest: Manifest, entry: str, parts: Iterable[Part]) -> int:
    """What putting the parts back writes; hard links write nothing."""
    partition = fs.stat(manifest.partition_path)
    kept = [file for part in parts for file in _files_before(manifest, part).values()]
    facts = [(file, fs.stat(os.path.join(entry, file.name))) for file in kept]
    return sum(file.size_bytes for file, fact in facts if not _may_link(file, fact, partition))


def restore(fs: FileSystem, manifest: Manifest, entry: str, decision: Decision, now_ms: int) -> None:
    """Puts back what was decided. Stopped at any moment, deciding again finds what is left to do.

    The cleaner's checkpoint comes first: above it a broker's cleaner takes records for clean that are about to come
    back. Parts follow from the newest to the oldest, so that what one deletes never comes back before what deletes it.
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
        with contextlib.suppress(KeytailError, OSError):  # the first error is the one to be told
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
    directory.keep()  # scratch files are no names of the log
    commit_group(fs, path, GroupOutput(left_bases, outputs, tuple(snapshots)), directory=directory)


def _make_scratch(fs: FileSystem, source: str, target: str, kept: KeptFile, partition: FileStat) -> None:
    """The owner in the manifest is not used: whoever can write there would choose whom a file is given to."""
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
        raise CorruptLog("a kept original has changed while it was copied", path=source, remedy=WRITTEN_TO)


def _may_link(kept: KeptFile, facts: FileStat, partition: FileStat) -> bool:
    """Whether the kept file can be the file of the log itself: same file system, owner, mode and time, and an owner and
    a mode that a copy would get, too."""
    if partition.uid not in (0, facts.uid) or facts.mode & ~0o666:
        return False
    same = (facts.uid, facts.gid, facts.mode, facts.mtime_ns) == (kept.uid, kept.gid, kept.mode, kept.mtime_ns)
    return same and facts.device == partition.device
