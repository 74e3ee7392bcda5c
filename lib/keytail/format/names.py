"""Builds and parses the names of the files and directories of a log dir.

NAMES.md beside this file describes what each name means to a broker.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

# Suffixes for the content of a file. The number before SNAPSHOT is an end offset; the number before the other suffixes
# is a base offset.
LOG = ".log"
INDEX = ".index"
TIME_INDEX = ".timeindex"
TXN_INDEX = ".txnindex"
SNAPSHOT = ".snapshot"
# The files of a segment, in the order in which they are renamed.
SEGMENT_SUFFIXES = (LOG, INDEX, TIME_INDEX, TXN_INDEX)
INDEX_SUFFIXES = (INDEX, TIME_INDEX, TXN_INDEX)
CONTENT_SUFFIXES = (*SEGMENT_SUFFIXES, SNAPSHOT)

# Stages of a segment file in a replacement: suffixes after the whole name.
SWAP = ".swap"
CLEANED = ".cleaned"
DELETED = ".deleted"
SCRATCH = ".clean"  # keytail's name: brokers ignore it
# State that a cleaning in several passes saves for the next pass; only in scratch files.
SURVIVORS = ".survivors"
PROOF = ".proof"
CELLS = ".cells"  # records that a task of an import has read, for the task that writes them; only in scratch files
PREPARED = ".prepared"  # the record of a prepared compaction (compact/prepared/PREPARED.md); only in scratch files

# Names in a log dir.
LOCK: Final = ".lock"
PREPARE_LOCK: Final = ".keytail-prepare.lock"  # keytail's name: brokers ignore it
CLEAN_SHUTDOWN = ".kafka_cleanshutdown"
META_PROPERTIES = "meta.properties"
CLEANER_CHECKPOINT = "cleaner-offset-checkpoint"
RECOVERY_POINT_CHECKPOINT = "recovery-point-offset-checkpoint"
LOG_START_CHECKPOINT = "log-start-offset-checkpoint"
HIGH_WATERMARK_CHECKPOINT = "replication-offset-checkpoint"
REMOTE_INDEX_CACHE_DIR = "remote-log-index-cache"
CLUSTER_METADATA_TOPIC = "__cluster_metadata"
BOOTSTRAP_SNAPSHOT = "bootstrap.checkpoint"
TEMPORARY = ".tmp"  # appended to the name of a checkpoint that is being written

# Files of a partition directory that belong to no segment.
LEADER_EPOCHS = "leader-epoch-checkpoint"
PARTITION_METADATA = "partition.metadata"
PARTITION_FILES = (LEADER_EPOCHS, PARTITION_METADATA)
IMPORT_RECORD = "keytail-import"  # keytail's name: brokers ignore it (import_/IMPORT.md)
OUTPUT_RECORD = "keytail-output.json"  # keytail's, for output out of place (compact/out_of_place/OUT_OF_PLACE.md)
METADATA_SNAPSHOT = ".checkpoint"  # only in the partition of the metadata log
QUORUM_STATE = "quorum-state"  # only in the partition of the metadata log

MAX_OFFSET = 2**63 - 1
_OFFSET_DIGITS = 20

FileKind = Literal["live", "cleaned", "swap", "deleted", "scratch", "partition", "fatal", "other"]
DirKind = Literal["normal", "delete", "future", "stray"]


@dataclass(frozen=True)
class FileName:
    """A file of a partition directory, classified by its name alone.

    `kind`: "live" (a segment file or snapshot under its final name), "cleaned", "swap", "deleted" (Kafka's
    stages), "scratch" (keytail's own), "partition" (the two files without a number), "fatal" (a name that keeps a
    broker from starting, or makes it open a different file), "other" (ignored by brokers). `base_offset` is the number
    in the name; for a snapshot it is an end offset. `suffix` is one of CONTENT_SUFFIXES, in scratch files also
    SURVIVORS, PROOF, CELLS or PREPARED; "" if there is none. `run_id` and `attempt` are set only for a scratch file.
    """

    name: str
    kind: FileKind
    base_offset: int | None = None
    suffix: str = ""
    run_id: str = ""
    attempt: str = ""


@dataclass(frozen=True)
class PartitionDir:
    """A partition directory, by its name. In a `delete` or `stray` name, a broker may have truncated the topic."""

    topic: str
    partition: int
    kind: DirKind


def segment_file(base_offset: int, suffix: str) -> str:
    """Return a name such as `00000000000000000084.log` for 84 and LOG; a stage follows the suffix, as in LOG + SWAP."""
    if not 0 <= base_offset <= MAX_OFFSET:
        raise ValueError(f"invalid offset: {base_offset}")
    return f"{base_offset:0{_OFFSET_DIGITS}d}{suffix}"


def guard_file(base_offset: int) -> str:
    """Return the name of the guard, the empty file that makes the group's `.swap` files void (log/SWAP.md)."""
    return segment_file(base_offset, LOG + CLEANED)


def scratch_file(base_offset: int, run_id: str, attempt: str, suffix: str) -> str:
    """Return the name of a scratch file, such as `00000000000000000084.log.r3f2a91c0.a7.clean`."""
    return scratch_of(segment_file(base_offset, suffix), run_id, attempt)


def scratch_of(name: str, run_id: str, attempt: str) -> str:
    """Return the name of the scratch file that will get the final name `name`; no other attempt uses it."""
    if not (_PART.fullmatch(run_id) and _PART.fullmatch(attempt)):
        raise ValueError(f"run and attempt must be letters, digits, '_' or '-': {run_id!r}, {attempt!r}")
    return f"{name}.r{run_id}.a{attempt}{SCRATCH}"


_PART = re.compile(r"[0-9A-Za-z_-]+")
_OFFSET = rf"(?P<offset>[0-9]{{{_OFFSET_DIGITS}}})"
_CONTENT = "(?P<suffix>" + "|".join(re.escape(suffix) for suffix in CONTENT_SUFFIXES) + ")"
_STAGE = "(?P<stage>" + "|".join(re.escape(stage) for stage in (CLEANED, SWAP, DELETED)) + ")"
_SEGMENT_FILE = re.compile(f"{_OFFSET}{_CONTENT}{_STAGE}?")
_SCRATCH_CONTENT = (
    "(?P<suffix>" + "|".join(map(re.escape, (*CONTENT_SUFFIXES, SURVIVORS, PROOF, CELLS, PREPARED))) + ")"
)
_SCRATCH_FILE = re.compile(
    rf"{_OFFSET}{_SCRATCH_CONTENT}\.r(?P<run_id>{_PART.pattern})\.a(?P<attempt>{_PART.pattern}){re.escape(SCRATCH)}"
)
_SCRATCH_OF_OTHERS = re.compile(
    rf"(?![0-9]{{{_OFFSET_DIGITS}}}\.)\S+\.r(?P<run_id>{_PART.pattern})\.a(?P<attempt>{_PART.pattern}){re.escape(SCRATCH)}"
)
_LIVE_SUFFIXES = frozenset(CONTENT_SUFFIXES)
_UNFINISHED = ("cleaned", "swap", "deleted", "scratch")
_STAGE_KINDS: dict[str | None, FileKind] = {
    None: "live",
    CLEANED: "cleaned",
    SWAP: "swap",
    DELETED: "deleted",
}


def base_of_live(name: str) -> int | None:
    """Return the offset in the final name of a segment file or snapshot; None for any other name."""
    number = name[:_OFFSET_DIGITS]
    if name[_OFFSET_DIGITS:] in _LIVE_SUFFIXES and number.isascii() and number.isdigit():
        offset = int(number)
        return offset if offset <= MAX_OFFSET else None
    return None


def parse_file_name(name: str) -> FileName:
    """Return the FileName of the file `name` of a partition directory, classified as a broker and keytail treat the
    file."""
    if name in PARTITION_FILES:
        return FileName(name, "partition")
    if (base := base_of_live(name)) is not None:
        return FileName(name, "live", base, name[_OFFSET_DIGITS:])
    if match := _SCRATCH_FILE.fullmatch(name):
        offset = int(match["offset"])
        if offset <= MAX_OFFSET:
            return FileName(name, "scratch", offset, match["suffix"], match["run_id"], match["attempt"])
    if match := _SCRATCH_OF_OTHERS.fullmatch(name):
        return FileName(name, "scratch", None, "", match["run_id"], match["attempt"])
    if match := _SEGMENT_FILE.fullmatch(name):
        offset = int(match["offset"])
        kind = _STAGE_KINDS[match["stage"]]
        if offset <= MAX_OFFSET:
            return FileName(name, kind, offset, match["suffix"])
    if name.endswith(METADATA_SNAPSHOT + DELETED):
        return FileName(name, "other")
    if name.endswith(DELETED):  # a broker deletes the file at startup, whatever precedes the suffix
        return FileName(name, "deleted")
    if name.endswith((*CONTENT_SUFFIXES, SWAP, CLEANED)):
        return FileName(name, "fatal")
    return FileName(name, "other")


def left_by_missing_segments(found: Iterable[str]) -> dict[int, str]:
    """Return the names of indexes and snapshots without a `.log` in a partition directory, one name per base offset.

    Each name shows that a segment began at its offset, unless the segment before contains that offset, or a broker was
    killed while it removed a segment. If a replacement is unfinished, the result is empty.

    A snapshot is evidence only with brokers from 2.8 on, which write partition.metadata: they remove a snapshot with
    the segment that begins at its offset, and indexes without a segment when they start.
    """
    live, shows_by_snapshot = [], False
    for name in found:
        parsed = parse_file_name(name)
        if parsed.kind in _UNFINISHED:
            return {}
        shows_by_snapshot = shows_by_snapshot or name == PARTITION_METADATA
        if parsed.kind == "live" and parsed.base_offset is not None:
            live.append((parsed.base_offset, parsed.suffix, name))
    logs = {base for base, suffix, _ in live if suffix == LOG}
    shown = [part for part in live if part[0] not in logs and (part[1] != SNAPSHOT or shows_by_snapshot)]
    return {base: name for base, _, name in sorted(shown, reverse=True)}


_METADATA_SNAPSHOT = re.compile(rf"{_OFFSET}-(?P<epoch>[0-9]{{10}}){re.escape(METADATA_SNAPSHOT)}")


def parse_metadata_snapshot(name: str) -> tuple[int, int] | None:
    """Return the end offset and epoch in the name of a finished metadata snapshot; None for any other file name."""
    match = _METADATA_SNAPSHOT.fullmatch(name)
    if match is None or int(match["offset"]) > MAX_OFFSET:
        return None
    return int(match["offset"]), int(match["epoch"])


_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_PARTITION = re.compile(r"0|[1-9][0-9]{0,9}")
_MARKED_DIR = re.compile(r"(?P<partition_dir>\S+-\S+)\.(?P<id>[^\s.]+)-(?P<kind>delete|future|stray)")


def partition_dir(topic: str, partition: int) -> str:
    return f"{topic}-{partition}"


def parse_partition_dir(name: str) -> PartitionDir | None:
    """Return the partition of the directory `name` of a log dir; None if `name` is not the name of a partition
    directory.

    If a log dir contains a directory for which this returns None, except REMOTE_INDEX_CACHE_DIR, a broker usually does
    not start. The check is stricter than a broker's, so that no other directory is taken for a partition: the topic
    name must be legal, and the number must have neither a sign nor a leading zero.
    """
    kind: DirKind = "normal"
    if name.endswith(("-delete", "-future", "-stray")):
        match = _MARKED_DIR.fullmatch(name)
        if match is None:
            return None
        name = match["partition_dir"]
        kind = match["kind"]  # type: ignore[assignment]  # one of the three words of the expression
    topic, dash, number = name.rpartition("-")
    if not dash or not _TOPIC.fullmatch(topic) or topic in (".", ".."):
        return None
    if not _PARTITION.fullmatch(number) or int(number) > 2**31 - 1:
        return None
    return PartitionDir(sys.intern(topic), int(number), kind)
