"""The files in the log dirs of a target: checkpoints, and those on which the start of a broker depends.

`meta.properties` is removed before anything is changed. The file is written last, and only if every partition of the
source is in the target: a broker would treat missing partitions as empty (compact/out_of_place/OUT_OF_PLACE.md).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from keytail.compact.out_of_place.output_record import Entries, OutputRecord
from keytail.compact.out_of_place.placing import Tree
from keytail.format import names
from keytail.log.checkpoint import encode_offsets
from keytail.log.fs import FileSystem
from keytail.log.partition import LogDirFacts

_FIELD_OF = {
    names.CLEANER_CHECKPOINT: "cleaner",
    names.RECOVERY_POINT_CHECKPOINT: "recovery_point",
    names.LOG_START_CHECKPOINT: "log_start",
    names.HIGH_WATERMARK_CHECKPOINT: "high_watermark",
}
# A broker requires the first of these files in each log dir; if the second is there, the broker skips the recovery of
# logs.
STARTING = (names.META_PROPERTIES, names.CLEAN_SHUTDOWN)


@dataclass
class Root:
    """One log dir of the target. `records` has the record of each partition whose copy is up to date with the source,
    by name; `lacking` has the reason for each other partition.
    """

    facts: LogDirFacts
    tree: Tree
    records: dict[str, OutputRecord] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)

    @property
    def has_metadata(self) -> bool:
        return names.partition_dir(names.CLUSTER_METADATA_TOPIC, 0) in self.facts.skipped


def entries_of(facts: LogDirFacts, topic: str, partition: int) -> Entries:
    key = (topic, partition)
    return Entries(
        facts.cleaner_checkpoint.get(key),
        facts.recovery_points.get(key),
        facts.log_starts.get(key),
        facts.high_watermarks.get(key),
    )


def contents(fs: FileSystem, root: Root, *, is_complete: bool) -> dict[str, bytes]:
    """Return the required contents of the files in the log dir itself, by name; a file without contents in the result
    must not exist."""
    wanted: dict[str, bytes] = {}
    for name, of in _FIELD_OF.items():
        offsets = {
            (record.topic, record.partition): offset
            for record in root.records.values()
            if (offset := getattr(record.entries, of)) is not None
        }
        if offsets or fs.exists(os.path.join(root.facts.path, name)):
            wanted[name] = encode_offsets(offsets)
    for name in (names.BOOTSTRAP_SNAPSHOT, *(STARTING if is_complete else ())):
        path = os.path.join(root.facts.path, name)
        if fs.exists(path):
            wanted[name] = fs.read_bytes(path, whole=True)
    return wanted


def is_outdated(tree: Tree, wanted: Mapping[str, bytes]) -> bool:
    return any(tree.read(name) != wanted.get(name) for name in (*_FIELD_OF, names.BOOTSTRAP_SNAPSHOT, *STARTING))


def close_to_brokers(roots: Sequence[Root]) -> None:
    """Remove the files STARTING, so that no broker starts on the target, first those beside the metadata log."""
    for root in _metadata_first(roots):
        root.tree.remove(STARTING)


def write(fs: FileSystem, roots: Sequence[Root], *, is_complete: bool) -> None:
    """Write the files of all log dirs. `meta.properties` is written last, and of these files, the one beside the
    metadata log.
    """
    planned = [(root, contents(fs, root, is_complete=is_complete)) for root in reversed(_metadata_first(roots))]
    for root, wanted in planned:
        _put(root.tree, wanted, (*_FIELD_OF, names.BOOTSTRAP_SNAPSHOT))
    for name in reversed(STARTING):
        for root, wanted in planned:
            _put(root.tree, wanted, (name,))


def _put(tree: Tree, wanted: Mapping[str, bytes], files: Collection[str]) -> None:
    for name in files:
        if name not in wanted:
            tree.remove((name,))
        elif tree.read(name) != wanted[name]:
            tree.put(name, wanted[name])


def _metadata_first(roots: Sequence[Root]) -> list[Root]:
    return sorted(roots, key=lambda root: not root.has_metadata)
