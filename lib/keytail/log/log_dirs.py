"""Lists log dirs, reads their checkpoints, and checks them together as the log dirs of one broker.

For states that keytail does not process, the facts have `problems`: sentences for a report. Nothing is changed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from keytail.errors import CorruptLog, UsageProblem, in_words, refusal
from keytail.format import names
from keytail.format.names import PartitionDir
from keytail.log.checkpoint import Offsets, read_offsets
from keytail.log.fs import DirEntry, DirName, FileSystem
from keytail.log.owner import no_such_log_dir
from keytail.log.partition import LogDirFacts, PartitionEntry

CHECKPOINTS = (
    names.CLEANER_CHECKPOINT,
    names.RECOVERY_POINT_CHECKPOINT,
    names.LOG_START_CHECKPOINT,
    names.HIGH_WATERMARK_CHECKPOINT,
)
_LOG_DIR_FILES = {names.META_PROPERTIES, *CHECKPOINTS}

# A name in a log dir, and the partition of that name.
_Named: TypeAlias = tuple[DirName, PartitionDir | None]


def survey_log_dirs(fs: FileSystem, log_dirs: Sequence[str]) -> list[LogDirFacts]:
    """Return the facts of log dirs: list them, read their checkpoints, and check them together as the log dirs of one
    broker.

    Raises UsageProblem for a path that is not a log dir.
    """
    listings = [(path, _list_log_dir(fs, path)) for path in log_dirs]
    homes: Counter[tuple[str, int]] = Counter()
    moving: dict[tuple[str, int], str] = {}
    for path, entries in listings:
        for entry, parsed in entries:
            if parsed is None:
                continue
            if parsed.kind == "normal":
                homes[parsed.topic, parsed.partition] += 1
            elif parsed.kind == "future":
                moving[parsed.topic, parsed.partition] = os.path.join(path, entry.name)
    return [_log_dir_facts(fs, path, entries, homes, moving) for path, entries in listings]


def hosted(log_dirs: Sequence[LogDirFacts]) -> set[tuple[str, int]]:
    """Return the (topic, partition) of each partition in these log dirs, for `checkpoint.update_offset`."""
    return {(entry.topic, entry.partition) for facts in log_dirs for entry in facts.partitions}


def _list_log_dir(fs: FileSystem, path: str) -> list[_Named]:
    try:
        entries = [(entry, names.parse_partition_dir(entry.name)) for entry in fs.scan_names(path)]
    except FileNotFoundError as error:
        raise no_such_log_dir(path) from error
    except NotADirectoryError as error:
        raise UsageProblem(
            "a log dir must be a directory",
            path=path,
            remedy="Give the directories of the broker's log.dirs",
            slug="log-dir-not-a-directory",
        ) from error
    if not entries:
        raise UsageProblem(
            "not a log dir: the directory is empty",
            path=path,
            remedy="Check whether its disk is mounted. Omit a log dir that no broker has used yet",
            slug="empty-log-dir",
        )
    if not any(e.name in _LOG_DIR_FILES for e, _ in entries) and not any(_is_partition(fs, path, *e) for e in entries):
        raise UsageProblem(
            f"not a log dir: it contains neither {names.META_PROPERTIES} nor a <topic>-<partition> directory",
            path=path,
            remedy="Give the directories of the broker's log.dirs, not a partition directory or a parent directory",
            slug="not-a-log-dir",
        )
    return entries


def _is_partition(fs: FileSystem, path: str, entry: DirName, parsed: PartitionDir | None) -> bool:
    """Return whether an entry is a partition directory, by its name and its contents: other directories may have such
    names, for example `gtk-2`."""
    if not entry.is_dir or parsed is None or parsed.kind != "normal":
        return False
    return any(names.parse_file_name(file.name).kind != "other" for file in fs.scan(os.path.join(path, entry.name)))


def _log_dir_facts(
    fs: FileSystem,
    path: str,
    entries: list[_Named],
    homes: Mapping[tuple[str, int], int],
    moving: Mapping[tuple[str, int], str],
) -> LogDirFacts:
    foreign = "a broker does not start on {}: its directory {} is not a partition directory; move that directory away"
    problems = [refusal(foreign.format(path, name), slug="foreign-directory")
                for name in sorted(e.name for e, parsed in entries if parsed is None and _is_foreign(e))]  # fmt: skip
    checkpoints, unread = [], []
    for name in CHECKPOINTS:
        offsets: Offsets = {}
        try:
            offsets = read_offsets(fs, os.path.join(path, name))
        except (CorruptLog, OSError) as error:
            problems.append(in_words(error))
            unread.append(name)
        checkpoints.append(offsets)
    partitions, skipped = [], []
    inside = os.path.join(path, "")
    for entry, parsed in sorted(entries, key=lambda e: e[0].name):
        if parsed is None or not (entry.is_dir or entry.is_symlink):
            continue
        if parsed.kind != "normal" or parsed.topic == names.CLUSTER_METADATA_TOPIC:
            skipped.append(entry.name)
            continue
        key = (parsed.topic, parsed.partition)
        against = list(problems)
        if entry.is_symlink:
            against.append(refusal("the partition directory is a symbolic link", slug="symbolic-link"))
        if homes[key] > 1:
            text = "the partition is in several log dirs; a broker does not start in this state"
            against.append(refusal(text, slug="partition-in-several-log-dirs"))
        if key in moving:
            text = f"the partition is moving to another log dir: {moving[key]}"
            against.append(refusal(text, slug="partition-moving"))
        partitions.append(PartitionEntry(*key, path, inside + entry.name, tuple(against)))
    return LogDirFacts(
        path=path,
        partitions=tuple(partitions),
        skipped=tuple(skipped),
        clean_shutdown=any(e.name == names.CLEAN_SHUTDOWN for e, _ in entries),
        cleaner_checkpoint=checkpoints[0],
        recovery_points=checkpoints[1],
        log_starts=checkpoints[2],
        high_watermarks=checkpoints[3],
        problems=tuple(problems),
        unread=tuple(unread),
    )


def foreign_dirs(entries: Sequence[DirEntry]) -> list[str]:
    """Return the names of the directories in a log dir's listing that prevent a broker from starting."""
    return sorted(e.name for e in entries if _is_foreign(e) and names.parse_partition_dir(e.name) is None)


def _is_foreign(entry: DirEntry | DirName) -> bool:
    """Return whether an entry whose name is not a partition name prevents a broker from starting."""
    return entry.is_dir and entry.name != names.REMOTE_INDEX_CACHE_DIR
