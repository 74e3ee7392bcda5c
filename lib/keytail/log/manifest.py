"""The manifest of kept originals: what was there, and what was put, or is about to be put, in its place.

JSON, of one version, replaced atomically. What it is good for is originals.py's and maintenance/undo.py's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from keytail.errors import CorruptLog, Refused
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.replace import GroupOutput, parts

MANIFEST = "manifest.json"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class LeftFile:
    """A file that the run put into the partition, under its final name. The digest is XXH3-128."""

    name: str
    size_bytes: int
    digest_hex: str


@dataclass(frozen=True, slots=True)
class KeptFile:
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
    """What is replaced at once: the segments at these bases, by these files. It is noted before it is done."""

    source_bases: tuple[int, ...]
    left: tuple[LeftFile, ...]


@dataclass(frozen=True)
class Manifest:
    """What an entry is of.

    `end_offset` is the base of the first segment that the run left alone. Of the checkpoints there is what stood in
    them before; of the leader epochs those that begin below `end_offset`. `next_checkpoint` is what the run sets the
    cleaner's checkpoint to at its end. `parts` ascend; those of later rounds come later.
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
    files: tuple[KeptFile, ...]
    parts: tuple[Part, ...]
    undone_ms: int | None = None

    @property
    def name(self) -> str:
        return names.partition_dir(self.topic, self.partition)

    @property
    def partition_path(self) -> str:
        return os.path.join(self.log_dir, self.name)


def parts_of(groups: Iterable[GroupOutput]) -> tuple[Part, ...]:
    """What each group is replaced by, in the steps in which that is done."""
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
    """Replaces it atomically; durable at the end."""
    target = os.path.join(path, MANIFEST)
    temporary = target + names.TEMPORARY
    if fs.exists(temporary):  # of a run that was killed here
        fs.unlink(temporary)
    text = json.dumps({"version": _VERSION, **asdict(manifest)}, indent=1) + "\n"
    fs.put_file(target, text.encode(), fs.stat(path), temporary)
    fs.fsync_dir(path)


def read_manifest(fs: FileSystem, path: str) -> Manifest:
    """CorruptLog for one that cannot be read, Refused for one of another version."""
    file = os.path.join(path, MANIFEST)
    data = fs.read_bytes(file, whole=True)
    try:
        fields: dict[str, Any] = json.loads(data)
        version = fields.pop("version")
        if version != _VERSION:
            raise Refused(
                f"the manifest has version {version}, and this keytail knows {_VERSION}",
                path=file,
                remedy="Use the keytail that made it",
            )
        fields["files"] = tuple(KeptFile(**kept) for kept in fields["files"])
        fields["parts"] = tuple(
            Part(tuple(part["source_bases"]), tuple(LeftFile(**left) for left in part["left"]))
            for part in fields["parts"]
        )
        fields["leader_epochs"] = tuple((epoch, start) for epoch, start in fields["leader_epochs"])
        return Manifest(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptLog(
            f"the manifest of kept originals cannot be read: {error}",
            path=file,
            remedy="Nothing was changed; the files beside it are what the run replaced",
        ) from error
