"""Defines the fields of a kind of finding, and lists the kinds about a partition or a log dir as a whole: names,
owners, producers, epochs, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]
# "at-end": only in the last segment, at whose end a starting broker searches for the log end.
StartLoses = Literal["no", "at-end", "yes"]


@dataclass(frozen=True)
class Recovery:
    """The severity and the effect if a broker recovers the segment when it starts, as after an unclean shutdown."""

    severity: Severity
    broker: str
    start_loses: bool = False


@dataclass(frozen=True)
class Kind:
    """One kind of finding. `what` and `broker` may contain names of facts in braces. `recovered` applies instead of
    `severity` and `broker` if a starting broker recovers the segment.

    `start_loses`: whether a broker that starts with this problem loses, hides or makes unreadable records that were
    acknowledged or that it acknowledges afterwards; VERIFY.md gives the reason for each kind.
    """

    severity: Severity
    what: str
    broker: str
    remedy: str
    recovered: Recovery | None = None
    start_loses: StartLoses = "no"


REFETCH = (
    "Restore the segment from a replica or a backup. Or, if other replicas are in sync: stop the broker, and move the "
    "partition's directory out of the log dir; the broker fetches the partition again when it starts. If no other "
    "replica has the data, save the intact batches by `keytail salvage --to DIR`"
)
_REBUILD_EPOCHS = (
    "Stop the broker and run `keytail rebuild-index --execute`, which adds missing epochs and removes epochs above the "
    "log end"
)
_RESOLVE = "Run `keytail compact --execute`, which completes or undoes the replacement, as a starting broker does"
_MOVE = "Move the file out of the directory"
_OWN = "Give the file the owner and mode of the files beside it (chown, chmod)"
_DELETED = "Deletes the file when it starts"
_OFFLINE = "Takes the whole log dir offline when it starts"
_FORGETS = "Deletes the snapshot when it starts, and replays the log from the latest snapshot before it"

_FILES = {
    "fatal-name": Kind(
        "error",
        "the file name has a suffix that brokers use, but no 20-digit offset before it",
        "Does not start, or creates an empty file beside the file or in place of a segment",
        _MOVE,
        start_loses="yes",
    ),
    "not-regular": Kind(
        "error",
        "this is not a regular file",
        "Follows a link, and treats anything else as missing; keytail uses neither",
        "Replace a link with the file that it points to; move anything else out of the directory",
    ),
    "too-large": Kind(
        "error",
        "the segment has {size} bytes, more than the maximum of 2147483647",
        "Does not load the partition",
        REFETCH,
    ),
    "orphan": Kind(
        "warning", "the index file has no segment", _DELETED, "Remove the file, unless its segment is to be restored"
    ),
    "segment-missing": Kind(
        "error",
        "the segment at the offset in this file's name is missing: offsets {first} to {last} have no batch",
        "Starts without the segment and deletes this file; consumers skip the offsets, and followers that fetch them "
        "get the gap too",
        f"Look for the segment's files and put them back. {REFETCH}",
    ),
    "segment-perhaps-missing": Kind(
        "warning",
        "a segment may be missing at the offset in this file's name: offsets {first} to {last} have no batch. A "
        "follower that was stopped at that offset, and whose leader removed the following offsets by compaction, has "
        "the same files",
        "Starts and deletes this file",
        "Compare the partition with another replica by `keytail audit`. If records are missing here, look for the "
        f"segment's files and put them back. {REFETCH}",
    ),
    "offsets-missing": Kind(
        "warning",
        "segments may be missing before this one: offsets {first} to {last} have no batch, and nothing else shows that "
        "the log was ever compacted",
        "Starts without these segments; consumers skip the offsets, and followers that fetch them get the gap too",
        "If the topic was never compacted and the partition never salvaged, look for the segment's files and put them "
        f"back. {REFETCH}",
    ),
    "no-segment": Kind(
        "warning",
        "the directory contains no segment",
        "Creates an empty log that begins at the log start offset of the checkpoint, or at 0",
        "Restore the segments, if the partition ever contained records",
        start_loses="yes",
    ),
    "leftover-cleaned": Kind(
        "warning",
        "the file is from an interrupted cleaning, or from an interrupted replacement of segments",
        _DELETED,
        _RESOLVE,
    ),
    "leftover-swap": Kind(
        "warning",
        "the file is from an interrupted replacement of segments",
        "Replaces the segments that the file covers with the file when it starts",
        _RESOLVE,
    ),
    "leftover-swap-void": Kind(
        "warning",
        "the file is from an interrupted replacement of segments, and is invalid because of the .cleaned file of base "
        "offset {guard}",
        _DELETED,
        _RESOLVE,
    ),
    "leftover-swap-gone": Kind(
        "error",
        "the segments that this file would replace are missing, and the .cleaned file of base offset {guard} makes "
        "this file invalid",
        "Deletes this file when it starts: the records in the file are lost",
        "Do not start the broker: keep a copy of the directory, remove the .cleaned file, then run "
        "`keytail compact --execute`",
        start_loses="yes",
    ),
    "leftover-deleted": Kind("warning", "the file is marked for deletion", _DELETED, "No action is needed"),
    "leftover-scratch": Kind(
        "warning",
        "the file is a scratch file of an interrupted keytail run",
        "Ignores the file",
        "No action is needed: the next `keytail compact --execute` removes the file",
    ),
    "unreadable": Kind(
        "error", "the file cannot be read: {reason}", _OFFLINE, "Check the disk, and the file's owner and mode"
    ),
    "access": Kind(
        "error",
        "the file belongs to {owner} and has mode {mode}: the directory's owner, {user}, cannot read and write it",
        "Takes the log dir offline, if the broker runs as that user",
        _OWN,
    ),
    "owner": Kind(
        "warning",
        "the file belongs to {owner}, but its directory to {user}",
        "Cannot change the file's owner or mode; fails if the group's permissions on it are not sufficient",
        _OWN,
    ),
    "shrunk": Kind(
        "error",
        "the file became shorter while it was read",
        "",
        "Run again when nothing writes to the directory",
    ),
    "more": Kind("error", "this file has {count} more findings", "", ""),
}

_PRODUCERS = {
    "snapshot": Kind(
        "error", "the producer snapshot is invalid: {reason}", _FORGETS,
        "Remove the snapshot; then `keytail rebuild-index --execute` rebuilds the snapshot if the log still has the "
        "necessary batches",
    ),
    "snapshot-beyond": Kind(
        "error",
        "the producer snapshot is above the log end offset {end}",
        "Deletes the snapshot at the log end offset when it starts, and then this snapshot",
        "Remove this snapshot, if the log end offset is correct",
    ),
    "snapshot-entry": Kind(
        "error",
        "producer {producer}: {reason}",
        "Uses the entry: rejects valid batches of the producer, accepts duplicate ones, or serves uncommitted records",
        "Remove the snapshot; then `keytail rebuild-index --execute` rebuilds the snapshot if the log still has the "
        "necessary batches",
        start_loses="yes",
    ),
    "snapshots-missing": Kind(
        "warning",
        "the log has batches of producers, but there is no producer snapshot",
        "Starts without producer state: duplicate batches are accepted, and open transactions count as ended",
        "Restore the snapshots, or remove .kafka_cleanshutdown so that the broker replays the log",
        start_loses="yes",
    ),
}  # fmt: skip

_EPOCHS = {
    "epochs-unreadable": Kind("error", "{reason}", _OFFLINE, "Repair the line; or remove the file and "
                              "run `keytail rebuild-index --execute`, which rebuilds the file"),
    "epochs-order": Kind(
        "error",
        "line {line}: epochs and start offsets must be ascending; epoch {epoch} at offset {start} is not",
        "Drops entries when it loads the file: followers truncate at wrong offsets",
        _REBUILD_EPOCHS,
    ),
    "epochs-beyond": Kind(
        "warning",
        "line {line}: epoch {epoch} begins at offset {start}, above the log end offset {end}",
        "Drops the entry when it starts",
        _REBUILD_EPOCHS,
    ),
    "epochs-missing": Kind(
        "warning",
        "the file has no entry, but the log has batches of leader epochs up to {epoch} from offset {first} on",
        "Reports no epoch to followers, which then truncate to the high watermark",
        _REBUILD_EPOCHS,
    ),
    "epochs-wrong": Kind(
        "error",
        "the file has leader epoch {stated} for offset {first}, but the batch there has epoch {epoch}",
        "Uses the file: followers truncate at wrong offsets",
        _REBUILD_EPOCHS,
    ),
    "leader-epoch": Kind(
        "error",
        "a batch has leader epoch {epoch} where epoch {stated} is expected (the CRC does not cover this field)",
        "Serves the batch; after a recovery followers truncate at wrong offsets",
        REFETCH,
    ),
}  # fmt: skip

_CLAIMS = {
    "log-start": Kind(
        "error",
        "the offset in {checkpoint}, {value}, is above the log end offset {end}",
        "Deletes all segments when it starts",
        "Find out whether segments are missing; if none are, correct the entry before the broker starts",
        start_loses="yes",
    ),
    "recovery-point": Kind(
        "warning",
        "the offset in {checkpoint}, {value}, is above the log end offset {end}: records that were on disk are missing",
        "Continues from the log end offset; recovers nothing",
        "If the missing records must not be lost, restore the end of the log from a replica or a backup",
        start_loses="yes",
    ),
    "high-watermark": Kind(
        "warning",
        "the offset in {checkpoint}, {value}, is above the log end offset {end}: records that consumers could read are "
        "missing",
        "Continues from the log end offset",
        "If the missing records must not be lost, restore the end of the log from a replica or a backup",
        start_loses="yes",
    ),
    "cleaner-checkpoint": Kind(
        "warning",
        "the offset in {checkpoint}, {value}, is above the log end offset {end}",
        "Cleans from the log start offset again",
        "No action is needed; `keytail compact --execute` corrects the entry",
    ),
}

_LOG_DIR = {
    "checkpoint-unreadable": Kind("error", "{reason}", _OFFLINE, "Repair the line that the message names"),
    "foreign-directory": Kind(
        "error", "the directory's name is not a partition name", "Does not start", "Move the directory elsewhere"
    ),
    "two-homes": Kind(
        "error",
        "the partition is in two log dirs",
        "Does not start",
        "Find out which copy is in use, and move the other copy out of its log dir",
    ),
}

WHOLE_KINDS: dict[str, Kind] = {**_FILES, **_PRODUCERS, **_EPOCHS, **_CLAIMS, **_LOG_DIR}
