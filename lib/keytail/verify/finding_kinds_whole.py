"""The kinds of findings about a partition or a log dir as a whole: names, owners, producers, epochs, checkpoints."""

from __future__ import annotations

from keytail.verify.finding_kind import REFETCH, Kind

_REBUILD_EPOCHS = "`keytail rebuild-index` adds missing epochs and drops those beyond the log"
_RESOLVE = "`keytail compact --execute` finishes or undoes it; so does a broker that starts"
_MOVE = "Move it out of the directory"
_OWN = "chown and chmod it as the files beside it"
_DELETED = "Deletes it when it starts"
_OFFLINE = "Takes the whole log dir offline when it starts"
_FORGETS = "Deletes it when it starts, and replays the log from the newest snapshot before it"

_FILES = {
    "fatal-name": Kind(
        "error",
        "a name with a suffix that brokers know, but no 20-digit offset before it",
        "Does not start, or makes an empty file beside it or in the place of a segment",
        _MOVE,
        start_loses="yes",
    ),
    "not-regular": Kind(
        "error",
        "not a regular file",
        "Follows a link, and takes anything else for missing; keytail touches neither",
        "Put the file itself in its place",
    ),
    "too-large": Kind(
        "error",
        "a segment of {size} bytes; none may pass 2147483647",
        "Does not load the partition",
        REFETCH,
    ),
    "orphan": Kind(
        "warning", "an index file without its segment", _DELETED, "Remove it, unless its segment is to be restored"
    ),
    "segment-missing": Kind(
        "error",
        "a segment began at the offset in this file's name and is not there: offsets {first} to {last} have no batch",
        "Starts without the segment and deletes this file; consumers skip the offsets, and followers that fetch them "
        "get the gap too",
        f"Look for the segment's files and put them back. {REFETCH}",
    ),
    "offsets-missing": Kind(
        "warning",
        "segments may be missing before this one: offsets {first} to {last} have no batch, and nothing else shows that "
        "the log was ever compacted",
        "Starts without them; consumers skip the offsets, and followers that fetch them get the gap too",
        "If the topic was never compacted, and nothing was salvaged here: look for the segment's files and put them "
        f"back. {REFETCH}",
    ),
    "no-segment": Kind(
        "warning",
        "the directory holds no segment",
        "Makes an empty log that begins at the log start offset of the checkpoint, or 0",
        "Restore it, if it ever held records",
        start_loses="yes",
    ),
    "leftover-cleaned": Kind(
        "warning",
        "left by a cleaning, or by the begin of a replacement, that was cut short",
        _DELETED,
        _RESOLVE,
    ),
    "leftover-swap": Kind(
        "warning",
        "left by a replacement of segments that was cut short",
        "Puts it in the place of the segments that it covers when it starts",
        _RESOLVE,
    ),
    "leftover-swap-void": Kind(
        "warning",
        "left by a replacement of segments that was cut short; a .cleaned of base {guard} makes it void",
        _DELETED,
        _RESOLVE,
    ),
    "leftover-swap-gone": Kind(
        "error",
        "the segments that this would replace are gone, and a .cleaned of base {guard} makes it void",
        "Deletes it when it starts: the records in it are lost",
        "Do not start the broker: keep a copy of the directory, remove the .cleaned, then run "
        "`keytail compact --execute`",
        start_loses="yes",
    ),
    "leftover-deleted": Kind("warning", "waits to be deleted", _DELETED, "Nothing needs to be done"),
    "leftover-scratch": Kind(
        "warning",
        "scratch of a keytail run that was cut short",
        "Ignores it",
        "The next `keytail compact --execute` removes it",
    ),
    "unreadable": Kind(
        "error", "the file cannot be read: {reason}", _OFFLINE, "Check the disk, and the file's owner and mode"
    ),
    "access": Kind(
        "error",
        "{owner}, mode {mode}: the directory's owner, {user}, cannot read and write it",
        "Takes the log dir offline, if it runs as that user",
        _OWN,
    ),
    "owner": Kind(
        "warning",
        "it belongs to {owner}, the directory to {user}",
        "Cannot change its owner or mode; fails on it where the group's rights do not reach",
        _OWN,
    ),
    "shrunk": Kind(
        "error",
        "the file became shorter while it was read",
        "",
        "Run again when nothing writes to the directory",
    ),
    "more": Kind("error", "{count} more findings in this file", "", ""),
}

_PRODUCERS = {
    "snapshot": Kind(
        "error", "the producer snapshot cannot be believed: {reason}", _FORGETS,
        "Remove it; `keytail rebuild-index` makes it anew where the log still tells",
    ),
    "snapshot-beyond": Kind(
        "error",
        "the producer snapshot is above the log end offset {end}",
        "Deletes it when it starts, and before it the snapshot at the log end",
        "Remove it, if the log has its right end",
    ),
    "snapshot-entry": Kind(
        "error",
        "producer {producer}: {reason}",
        "Believes it: refuses good batches of the producer, accepts repeated ones, or shows what is not committed",
        "Remove the snapshot; `keytail rebuild-index` makes it anew where the log still tells",
        start_loses="yes",
    ),
    "snapshots-missing": Kind(
        "warning",
        "the log has batches of producers, but there is no producer snapshot",
        "Starts with no producers: repeated sends are accepted, open transactions count as none",
        "Restore the snapshots, or remove .kafka_cleanshutdown so that the broker replays the log",
        start_loses="yes",
    ),
}  # fmt: skip

_EPOCHS = {
    "epochs-unreadable": Kind("error", "{reason}", _OFFLINE, "Repair the line; or remove the file, then "
                              "`keytail rebuild-index` makes it anew"),
    "epochs-order": Kind(
        "error",
        "line {line}: epochs and start offsets must rise, epoch {epoch} at offset {start} does not",
        "Drops entries when it loads them: followers truncate at wrong offsets",
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
        "there is no entry, but the log has batches of leader epochs up to {epoch} from offset {first} on",
        "Tells followers that it knows no epoch: they truncate to the high watermark",
        _REBUILD_EPOCHS,
    ),
    "epochs-wrong": Kind(
        "error",
        "by this file offset {first} is of leader epoch {stated}, but its batch is of epoch {epoch}",
        "Believes the file: followers truncate at wrong offsets",
        _REBUILD_EPOCHS,
    ),
    "leader-epoch": Kind(
        "error",
        "a batch of leader epoch {epoch} among those of epoch {stated} (no checksum covers this field)",
        "Serves it; after a recovery followers truncate at wrong offsets",
        REFETCH,
    ),
}  # fmt: skip

_CLAIMS = {
    "log-start": Kind(
        "error",
        "{checkpoint} has {value}, above the log end offset {end}",
        "Deletes all segments when it starts",
        "Find out whether segments are missing; else correct the entry before the broker starts",
        start_loses="yes",
    ),
    "recovery-point": Kind(
        "warning",
        "{checkpoint} has {value}, above the log end offset {end}: records that were on disk are gone",
        "Goes on from the log end; recovers nothing",
        "Restore the log's end from a replica or a backup, if it must not be lost",
        start_loses="yes",
    ),
    "high-watermark": Kind(
        "warning",
        "{checkpoint} has {value}, above the log end offset {end}: records that consumers saw are gone",
        "Goes on from the log end",
        "Restore the log's end from a replica or a backup, if it must not be lost",
        start_loses="yes",
    ),
    "cleaner-checkpoint": Kind(
        "warning",
        "{checkpoint} has {value}, above the log end offset {end}",
        "Cleans from the log start again",
        "Nothing needs to be done; `keytail compact --execute` sets it right",
    ),
}

_LOG_DIR = {
    "checkpoint-unreadable": Kind("error", "{reason}", _OFFLINE, "Repair the line that is named"),
    "foreign-directory": Kind(
        "error", "a directory whose name is no partition's", "Does not start", "Move it out of the log dir"
    ),
    "two-homes": Kind(
        "error",
        "the partition is in two log dirs",
        "Does not start",
        "Find out which one is in use, and move the other out of the log dir",
    ),
}

WHOLE_KINDS: dict[str, Kind] = {**_FILES, **_PRODUCERS, **_EPOCHS, **_CLAIMS, **_LOG_DIR}
