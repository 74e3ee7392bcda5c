"""The kinds of findings: what each says, how bad it is, what a broker does with it, and which command helps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Recovery:
    """What becomes of it where a broker recovers the segment as it starts, as after an unclean shutdown."""

    severity: Severity
    broker: str


@dataclass(frozen=True)
class Kind:
    """`what` and `broker` may name facts in braces."""

    severity: Severity
    what: str
    broker: str
    remedy: str
    recovered: Recovery | None = None


_REFETCH = (
    "Restore the segment from a replica or a backup; or, where other replicas are in sync, remove the partition's "
    "directory, so that the broker fetches it anew"
)
_REBUILD = "`keytail rebuild-index` writes the indexes of the segment anew"
_REBUILD_EPOCHS = "`keytail rebuild-index` adds missing epochs and drops those beyond the log"
_RESOLVE = "`keytail compact --execute` finishes or undoes it; so does a broker that starts"
_MOVE = "Move it out of the directory"
_OWN = "chown and chmod it as the files beside it"

_CLEANER_STOPS = "Serves what comes before it; its cleaner gives the partition up until a restart"
_SERVED_TWICE = "Serves records twice or out of order"
_WRONG_FETCH = "Trusts it: fetches and lookups start at a wrong place"
_WRONG_TIME = "Trusts it: lookups by time and time retention go wrong"
_OF_1970 = "Takes the segment for one of 1970: time retention deletes it at once"
_FROM_START = "Trusts it: every lookup reads the segment from its start"
_DELETED = "Deletes it when it starts"
_OFFLINE = "Takes the whole log dir offline when it starts"
_FORGETS = "Deletes it when it starts, and replays the log from the newest snapshot before it"

_CUT_HERE = Recovery(
    "error", "Recovers the segment when it starts: cuts the log here and removes the segments behind it"
)
_REINDEXED = Recovery("warning", "Recovers the segment when it starts, which writes its indexes anew")


def _log(what: str, broker: str, remedy: str = _REFETCH) -> Kind:
    """Damage to batches that a recovery cuts off."""
    return Kind("error", what, broker, remedy, _CUT_HERE)


def _index(severity: Severity, what: str, broker: str) -> Kind:
    return Kind(severity, what, broker, _REBUILD, _REINDEXED)


_BATCHES = {
    "cut": _log("the file ends inside a batch: {left} bytes are no whole batch", _CLEANER_STOPS),
    "cut-active": Kind(
        "warning",
        "the active segment ends inside a batch: {left} bytes are no whole batch",
        "Appends behind them: what it writes from then on cannot be read",
        "`keytail rebuild-index --truncate` cuts them off, or remove .kafka_cleanshutdown so that the broker does",
        Recovery("warning", "Cuts them off when it starts"),
    ),
    "size": _log(
        "a batch states the impossible size {size}; {left} bytes from here on cannot be read",
        "Fails fetches that reach it",
    ),
    "zeros": _log("{left} zero bytes where a batch should begin", "Fails fetches that reach them"),
    "magic": _log(
        "a batch of the unknown format {magic}; {left} bytes from here on cannot be read",
        "Takes it for a batch of version 2, or of an old format, and fails fetches that reach it",
    ),
    "checksum": _log(
        "a batch's checksum differs from its bytes",
        "Serves it, and consumers fail on it; its cleaner may give it a right checksum",
    ),
    "offset-order": Kind("error", "a batch's offsets do not follow those before it", _SERVED_TWICE, _REFETCH),
    "offset-range": Kind(
        "error",
        "a batch's offsets do not belong to this segment, or are too far from its base",
        "Splits the segment, or does not find the batch",
        _REFETCH,
        Recovery("error", "Splits the segment when it starts, or empties it"),
    ),
    "overlap": Kind(
        "error",
        "a batch's last offset is not below the next segment's base",
        _SERVED_TWICE,
        "Find out which copy is right: a replacement of segments was cut short, or files were mixed",
    ),
    "codec": Kind("error", "a batch names an unknown compression codec", _CLEANER_STOPS, _REFETCH),
    "decompress": Kind("error", "a batch cannot be decompressed: {reason}", _CLEANER_STOPS, _REFETCH),
    "legacy": Kind("error", "a message of an old format is wrong inside: {reason}", _CLEANER_STOPS, _REFETCH),
    "record-count": Kind("error", "a batch's record count is not the number of its records", _CLEANER_STOPS, _REFETCH),
    "record": Kind("error", "a record cannot be parsed", _CLEANER_STOPS, _REFETCH),
    "record-offset": Kind("error", "a record's offset is out of order or outside its batch", _CLEANER_STOPS, _REFETCH),
    "record-timestamp": Kind(
        "warning",
        "a record has the timestamp {timestamp}, below -1",
        "Serves it; its cleaner gives the partition up if it has to rewrite the batch",
        "Let it be, or overwrite its key",
    ),
    "max-timestamp": Kind(
        "error",
        "the header's max timestamp is {stated}, but the latest record's is {timestamp}",
        "Believes the header: lookups by time miss records, and time retention comes early or late",
        "Let `keytail compact --execute` or the broker's cleaner rewrite the batch, if the topic is compacted",
    ),
    "producer": Kind(
        "error",
        "producer id, epoch and sequence of a batch contradict its attributes",
        "Serves it; its cleaner gives the partition up if it has to rewrite the batch",
        _REFETCH,
    ),
    "control": Kind(
        "error",
        "a marker of a producer that neither commits nor aborts a transaction",
        "Fails to load the partition when it has to replay it",
        _REFETCH,
    ),
    "transaction": Kind(
        "error",
        "a batch outside a transaction, while one of its producer {producer} is open since offset {first}",
        "Fails to load the partition when it has to replay it",
        _REFETCH,
    ),
}

_OFFSET_INDEX = {
    "index-missing": _index(
        "warning", "the offset index is missing", "Recovers the segment when it starts, which takes a while"
    ),
    "index-zeros": _index("warning", "the offset index holds {count} entries of zeros and nothing else", _FROM_START),
    "index-untrimmed": _index("warning", "{count} entries of zeros end the offset index", _FROM_START),
    "index-empty": _index("warning", "the offset index of a segment of {size} bytes is empty", _FROM_START),
    "index-size": _index("warning", "{size} bytes are no multiple of the entry size {entry}", "Ignores the last bytes"),
    "index-order": _index("error", "entries do not rise from here on", _WRONG_FETCH),
    "index-position": _index("error", "an entry points to byte {position}, where no batch begins", _WRONG_FETCH),
    "index-offset": _index("error", "the batch at byte {position} does not end with the entry's offset", _WRONG_FETCH),
}

_TIME_INDEX = {
    "time-index-missing": _index(
        "error",
        "the time index is missing",
        "Creates an empty one: the segment's age becomes that of its file, and lookups by time miss it",
    ),
    "time-index-zeros": _index("error", "the time index holds {count} entries of zeros and nothing else", _OF_1970),
    "time-index-untrimmed": _index("error", "{count} entries of zeros end the time index", _OF_1970),
    "time-order": _index("error", "entries do not rise from here on", _WRONG_TIME),
    "time-offset": _index("error", "no batch ends with the offset of the entry for timestamp {timestamp}", _WRONG_TIME),
    "time-entry": _index(
        "error",
        "{timestamp} is not the segment's largest timestamp so far, first reached by this batch",
        _WRONG_TIME,
    ),
    "time-incomplete": _index("error", "the segment's largest timestamp {timestamp} has no entry", _WRONG_TIME),
}

_TXN_INDEX = {
    "txn-entry": _index(
        "error",
        "an entry has an unknown version, or its offsets do not rise",
        "Recovers the segment when it starts, or serves aborted records",
    ),
    "txn-no-marker": _index(
        "error",
        "producer {producer} has no ABORT marker at the entry's last offset",
        "Trusts it: tells read_committed consumers to drop records that were not aborted",
    ),
    "txn-no-entry": _index(
        "error",
        "no entry for the transaction that producer {producer} aborted, with data from offset {first} on",
        "Serves its records to read_committed consumers; its cleaner takes them for committed",
    ),
    "txn-first-offset": _index(
        "error",
        "the entry begins at offset {stated}, but the transaction has data from offset {first} on",
        "Serves the records before it to read_committed consumers",
    ),
    "txn-stable-offset": _index(
        "error",
        "the last stable offset {stated} is above offset {most}, where a later aborted transaction has data, "
        "or where its own marker ends",
        "Stops searching there: serves records of aborted transactions to read_committed consumers",
    ),
}

_FILES = {
    "fatal-name": Kind(
        "error",
        "a name with a suffix that brokers know, but no 20-digit offset before it",
        "Does not start, or makes an empty file beside it",
        _MOVE,
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
        _REFETCH,
    ),
    "orphan": Kind("warning", "an index file without its segment", _DELETED, "Remove it"),
    "no-segment": Kind(
        "warning",
        "the directory holds no segment",
        "Makes an empty log that begins at the log start offset of the checkpoint, or 0",
        "Restore it, if it ever held records",
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
    ),
    "snapshots-missing": Kind(
        "warning",
        "the log has batches of producers, but there is no producer snapshot",
        "Starts with no producers: repeated sends are accepted, open transactions count as none",
        "Restore the snapshots, or remove .kafka_cleanshutdown so that the broker replays the log",
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
        _REFETCH,
    ),
}  # fmt: skip

_CLAIMS = {
    "log-start": Kind(
        "error",
        "{checkpoint} has {value}, above the log end offset {end}",
        "Deletes all segments when it starts",
        "Find out whether segments are missing; else correct the entry before the broker starts",
    ),
    "recovery-point": Kind(
        "warning",
        "{checkpoint} has {value}, above the log end offset {end}: records that were on disk are gone",
        "Goes on from the log end; recovers nothing",
        "Restore the log's end from a replica or a backup, if it must not be lost",
    ),
    "high-watermark": Kind(
        "warning",
        "{checkpoint} has {value}, above the log end offset {end}: records that consumers saw are gone",
        "Goes on from the log end",
        "Restore the log's end from a replica or a backup, if it must not be lost",
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

KINDS: dict[str, Kind] = {
    **_BATCHES, **_OFFSET_INDEX, **_TIME_INDEX, **_TXN_INDEX, **_FILES, **_PRODUCERS, **_EPOCHS, **_CLAIMS, **_LOG_DIR
}  # fmt: skip
