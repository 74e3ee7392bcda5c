"""The kinds of findings of an inspection: what each says, what a broker would do, and what helps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing wrong, and where. `broker` says what a broker that starts on it, or serves it, does."""

    kind: str
    severity: Severity
    what: str
    path: str
    byte_position: int | None
    offset: int | None
    broker: str
    remedy: str


@dataclass(frozen=True)
class Kind:
    severity: Severity
    what: str
    broker: str
    remedy: str


_REPLICA = "Restore the segment from a replica or a backup"
_REBUILD = "`keytail rebuild-index` writes the indexes of the segment anew"
_CLEANER_STOPS = "Serves what comes before it; its cleaner gives the partition up until a restart"
_RECOVER = "A recovery after an unclean shutdown truncates the partition here"
_WRONG_FETCH = "Trusts it: fetches and lookups start at a wrong place"
_WRONG_TIME = "Trusts it: lookups by time and time retention go wrong"
_IGNORED = "Deletes it when it starts"

KINDS = {
    # Batches
    "cut": Kind(
        "error",
        "the file ends inside a batch: {left} bytes are no whole batch",
        _CLEANER_STOPS,
        _REPLICA,
    ),
    "cut-active": Kind(
        "warning",
        "the active segment ends inside a batch: {left} bytes are no whole batch",
        "After an unclean shutdown truncates them; after a clean one appends behind them",
        "Remove .kafka_cleanshutdown so that the broker recovers the log, if it is not running",
    ),
    "size": Kind(
        "error",
        "a batch states the impossible size {size}; {left} bytes from here on cannot be read",
        "Fails fetches that reach it; a recovery after an unclean shutdown truncates the partition here",
        _REPLICA,
    ),
    "zeros": Kind(
        "error",
        "{left} zero bytes where a batch should begin",
        "Fails fetches that reach them; a recovery after an unclean shutdown truncates the partition here",
        _REPLICA,
    ),
    "magic": Kind(
        "error",
        "a batch of the unknown format {magic}; {left} bytes from here on cannot be read",
        _RECOVER,
        _REPLICA,
    ),
    "checksum": Kind(
        "error",
        "a batch's checksum differs from its bytes",
        "Serves it, and consumers fail on it; its cleaner may give it a right checksum; a recovery "
        "after an unclean shutdown truncates the partition here",
        _REPLICA,
    ),
    "offset-order": Kind(
        "error",
        "a batch's offsets do not follow those before it",
        "Serves records twice or out of order",
        _REPLICA,
    ),
    "offset-range": Kind(
        "error",
        "a batch's offsets do not belong to this segment, or are too far from its base",
        "Splits the segment, or does not find the batch",
        _REPLICA,
    ),
    "overlap": Kind(
        "error",
        "a batch's last offset is not below the next segment's base",
        "Serves records twice or out of order",
        "Find out which copy is right: a replacement of segments was cut short, or files were mixed",
    ),
    "codec": Kind("error", "a batch names an unknown compression codec", _CLEANER_STOPS, _REPLICA),
    "decompress": Kind("error", "a batch cannot be decompressed: {reason}", _CLEANER_STOPS, _REPLICA),
    "record-count": Kind(
        "error", "a batch's record count is not the number of its records", _CLEANER_STOPS, _REPLICA
    ),
    "record": Kind("error", "a record cannot be parsed", _CLEANER_STOPS, _REPLICA),
    "record-offset": Kind(
        "error", "a record's offset is out of order or outside its batch", _CLEANER_STOPS, _REPLICA
    ),
    # Offset index
    "index-missing": Kind(
        "warning", "the offset index is missing", "Recovers the segment when it starts", _REBUILD
    ),
    "index-zeros": Kind(
        "warning",
        "the offset index holds {count} entries of zeros and nothing else",
        "Trusts it: every lookup reads the segment from its start",
        _REBUILD,
    ),
    "index-untrimmed": Kind(
        "warning", "{count} entries of zeros end the offset index", _WRONG_FETCH, _REBUILD
    ),
    "index-empty": Kind(
        "warning",
        "the offset index of a segment of {size} bytes is empty",
        "Trusts it: every lookup reads the segment from its start",
        _REBUILD,
    ),
    "index-size": Kind(
        "warning",
        "{size} bytes are no multiple of the entry size {entry}",
        "Ignores the last bytes",
        _REBUILD,
    ),
    "index-order": Kind("error", "entries do not rise from here on", _WRONG_FETCH, _REBUILD),
    "index-position": Kind(
        "error", "an entry points to byte {position}, where no batch begins", _WRONG_FETCH, _REBUILD
    ),
    "index-offset": Kind(
        "error",
        "the batch at byte {position} does not end with the entry's offset",
        _WRONG_FETCH,
        _REBUILD,
    ),
    # Time index
    "time-index-missing": Kind(
        "error",
        "the time index is missing",
        "Creates an empty one: the segment's age becomes that of its file",
        _REBUILD,
    ),
    "time-index-zeros": Kind(
        "error",
        "the time index holds {count} entries of zeros and nothing else",
        "Takes the segment for one of 1970: time retention deletes it at once",
        _REBUILD,
    ),
    "time-index-untrimmed": Kind(
        "error",
        "{count} entries of zeros end the time index",
        "Takes the segment for one of 1970: time retention deletes it at once",
        _REBUILD,
    ),
    "time-order": Kind("error", "entries do not rise from here on", _WRONG_TIME, _REBUILD),
    "time-offset": Kind(
        "error", "no batch ends with the offset of the entry for timestamp {timestamp}", _WRONG_TIME, _REBUILD
    ),
    "time-entry": Kind(
        "error",
        "{timestamp} is not the segment's largest timestamp so far, first reached by this batch",
        _WRONG_TIME,
        _REBUILD,
    ),
    "time-incomplete": Kind(
        "error", "the segment's largest timestamp {timestamp} has no entry", _WRONG_TIME, _REBUILD
    ),
    # Transaction index
    "txn-entry": Kind(
        "error",
        "an entry has an unknown version, or its offsets do not rise",
        "Recovers the segment when it starts, or serves aborted records",
        _REBUILD,
    ),
    # Files
    "orphan": Kind("warning", "an index file without its segment", _IGNORED, "Remove it"),
    "no-segment": Kind(
        "warning",
        "the directory holds no segment",
        "Makes an empty log that begins at offset 0",
        "Restore it",
    ),
    "leftover-cleaned": Kind(
        "warning", "left by a cleaning that was cut short", _IGNORED, "Start the broker, or `keytail compact`"
    ),
    "leftover-swap": Kind(
        "warning",
        "left by a replacement that was cut short",
        "Puts it in the place of the segments it covers, or deletes it if a .cleaned stands at or below it",
        "Start the broker, or `keytail compact`: both finish or undo the replacement",
    ),
    "leftover-deleted": Kind("warning", "waiting to be deleted", _IGNORED, "Nothing needs to be done"),
    "leftover-scratch": Kind(
        "warning",
        "scratch of a keytail run that was cut short",
        "Ignores it",
        "The next `keytail compact` removes it",
    ),
    "leftover-fatal": Kind(
        "error",
        "a name with a suffix that brokers know, but no 20-digit offset before it",
        "Does not start, or makes an empty file beside it",
        "Move it out of the directory",
    ),
    "unreadable": Kind(
        "error", "the file cannot be read: {reason}", "Takes the log dir offline", "Check the disk"
    ),
    "shrunk": Kind(
        "error",
        "the file became shorter while it was read",
        "",
        "Run again when nothing writes to the directory",
    ),
    "more": Kind("error", "{count} more findings in this file", "", ""),
}
