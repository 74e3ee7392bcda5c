"""Finds directories with records to be erased beside those of the chosen partitions: `-future`, `-delete`, `-stray`.

Also decides which files in a partition's directory may have records to be erased although they are not segments.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from keytail.cli.selection import PartitionFilter
from keytail.errors import UsageProblem
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.partition import LogDirFacts

_MAX_NAME_BYTES = 255  # maximum length of a `-delete` or `-stray` directory name: a broker truncates the topic to fit
_WITHOUT_RECORDS = (*names.INDEX_SUFFIXES, names.SNAPSHOT, names.PREPARED)
REMEDY = "Start the broker, which removes a directory that ends in -delete; move or remove any other directory"


@dataclass(frozen=True)
class OtherDirectories:
    """The paths of `-future`, `-delete` and `-stray` directories in all log dirs of a broker, with their parsed names.
    """

    found: tuple[tuple[str, names.PartitionDir], ...] = ()

    def of(self, topic: str, partition: int) -> list[str]:
        """Return the paths of the other directories that may belong to the partition."""
        return [path for path, parsed in self.found if _may_be_of(path, parsed, topic, partition)]

    def refuse_without_partition(
        self, known: Collection[tuple[str, int]], partition_filter: PartitionFilter
    ) -> None:
        """Raise UsageProblem for directories that `partition_filter` chooses, but that belong to no partition in
        `known`, which are the partitions with a row."""
        left = [
            path
            for path, parsed in self.found
            if partition_filter.takes(parsed) and not any(_may_be_of(path, parsed, *one) for one in known)
        ]
        if left:
            raise UsageProblem(
                f"directories of partitions that are not in the log dirs may have records to be erased: "
                f"{', '.join(left)}",
                remedy=REMEDY,
                slug="other-directory-of-partition",
            )


NO_OTHERS = OtherDirectories()


def may_have_records(name: str) -> bool:
    """Return whether a file in a partition's directory may have records, but is not the `.log` file of a segment."""
    parsed = names.parse_file_name(name)
    if parsed.kind in ("live", "partition") or name.startswith(names.PARTITION_FILES):
        return False
    return parsed.suffix not in _WITHOUT_RECORDS and name not in (names.IMPORT_RECORD, names.OUTPUT_RECORD)


def other_directories(
    fs: FileSystem, log_dirs: Sequence[LogDirFacts], broker_log_dirs: Sequence[str] = ()
) -> OtherDirectories:
    """Return the other directories in the surveyed log dirs, and in `broker_log_dirs` (from the broker's configuration
    file) that exist on this host."""
    listed = {facts.path: facts.skipped for facts in log_dirs}
    for path in map(os.path.abspath, broker_log_dirs):
        if path not in listed and fs.exists(path):
            listed[path] = tuple(entry.name for entry in fs.scan(path))
    found = []
    for path, entries in listed.items():
        for name in entries:
            parsed = names.parse_partition_dir(name)
            if parsed is not None and parsed.kind != "normal":
                found.append((os.path.join(path, name), parsed))
    return OtherDirectories(tuple(found))


def _may_be_of(path: str, parsed: names.PartitionDir, topic: str, partition: int) -> bool:
    is_truncated = len(os.path.basename(path)) >= _MAX_NAME_BYTES
    is_topic = topic.startswith(parsed.topic) if is_truncated else parsed.topic == topic
    return is_topic and parsed.partition == partition
