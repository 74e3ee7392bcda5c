"""The kinds of findings: text, severity, what a broker does with it, and the remedy.

This module has those about a segment: its batches and its indexes.
"""

from __future__ import annotations

from keytail.verify.finding_kind import REFETCH, Kind, Recovery, Severity, StartLoses
from keytail.verify.finding_kinds_whole import WHOLE_KINDS

_REBUILD = "`keytail rebuild-index` writes the indexes of the segment anew"
_CLEANER_STOPS = "Serves what comes before it; its cleaner gives the partition up until a restart"
_SERVED_TWICE = "Serves records twice or out of order"
_WRONG_FETCH = "Trusts it: fetches and lookups start at a wrong place"
_WRONG_TIME = "Trusts it: lookups by time and time retention go wrong"
_OF_1970 = "Takes the segment for one of 1970: time retention deletes it at once"
_FROM_START = "Trusts it: every lookup reads the segment from its start"
_CUT_HERE = Recovery(
    "error",
    "Recovers the segment when it starts: cuts the log here and removes the segments behind it",
    start_loses=True,
)
_REINDEXED = Recovery("warning", "Recovers the segment when it starts, which writes its indexes anew")


def _log(what: str, broker: str, start_loses: StartLoses = "no") -> Kind:
    """Return a kind of damage to batches that a recovery truncates."""
    return Kind("error", what, broker, REFETCH, _CUT_HERE, start_loses)


def _index(severity: Severity, what: str, broker: str, start_loses: StartLoses = "no") -> Kind:
    return Kind(severity, what, broker, _REBUILD, _REINDEXED, start_loses)


_BATCHES = {
    "cut": _log("the file ends inside a batch: {left} bytes are no whole batch", _CLEANER_STOPS),
    "cut-active": Kind(
        "warning",
        "the active segment ends inside a batch: {left} bytes are no whole batch",
        "Appends behind them: what it writes from then on cannot be read",
        "Remove .kafka_cleanshutdown: then the broker, or `keytail rebuild-index --truncate`, cuts them off",
        Recovery("warning", "Cuts them off when it starts"),
        start_loses="yes",
    ),
    "size": _log(
        "a batch states the impossible size {size}; {left} bytes from here on cannot be read",
        "Fails fetches that reach it",
        "at-end",
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
    "offset-order": Kind(
        "error", "a batch's offsets do not follow those before it", _SERVED_TWICE, REFETCH, start_loses="at-end"
    ),
    "offset-range": Kind(
        "error",
        "a batch's offsets do not belong to this segment, or are too far from its base",
        "Splits the segment, or does not find the batch",
        REFETCH,
        Recovery("error", "Splits the segment when it starts, or empties it", start_loses=True),
        start_loses="at-end",
    ),
    "overlap": Kind(
        "error",
        "a batch's last offset is not below the next segment's base",
        _SERVED_TWICE,
        "Find out which copy is right: a replacement of segments was cut short, or files were mixed",
    ),
    "codec": Kind("error", "a batch names an unknown compression codec", _CLEANER_STOPS, REFETCH),
    "decompress": Kind("error", "a batch cannot be decompressed: {reason}", _CLEANER_STOPS, REFETCH),
    "not-opened": Kind(
        "warning",
        "the records of a batch were not looked at, for want of memory: {reason}",
        "Serves it; its cleaner holds a record of it at a time",
        "Run again with a larger --max-record-bytes",
    ),
    "legacy": Kind("error", "a message of an old format is wrong inside: {reason}", _CLEANER_STOPS, REFETCH),
    "record-count": Kind("error", "a batch's record count is not the number of its records", _CLEANER_STOPS, REFETCH),
    "record": Kind("error", "a record cannot be parsed", _CLEANER_STOPS, REFETCH),
    "record-offset": Kind("error", "a record's offset is out of order or outside its batch", _CLEANER_STOPS, REFETCH),
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
        REFETCH,
    ),
    "control": Kind(
        "error",
        "a marker of a producer that neither commits nor aborts a transaction",
        "Fails to load the partition when it has to replay it",
        REFETCH,
    ),
    "transaction": Kind(
        "error",
        "a batch outside a transaction, while one of its producer {producer} is open since offset {first}",
        "Fails to load the partition when it has to replay it",
        REFETCH,
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
    "index-order": _index("error", "entries do not rise from here on", _WRONG_FETCH, "at-end"),
    "index-position": _index(
        "error", "an entry points to byte {position}, where no batch begins", _WRONG_FETCH, "at-end"
    ),
    "index-offset": _index(
        "error",
        "no batch from byte {position} to the next entry ends with the entry's offset",
        _WRONG_FETCH,
        "at-end",
    ),
}

_TIME_INDEX = {
    "time-index-missing": _index(
        "error",
        "the time index is missing",
        "Creates an empty one: the segment's age becomes that of its file, and lookups by time miss it",
    ),
    "time-index-zeros": _index(
        "error", "the time index holds {count} entries of zeros and nothing else", _OF_1970, "yes"
    ),
    "time-index-untrimmed": _index("error", "{count} entries of zeros end the time index", _OF_1970, "yes"),
    "time-order": _index("error", "entries do not rise from here on", _WRONG_TIME, "yes"),
    "time-offset": _index(
        "error",
        "no batch ends with the offset of the entry for timestamp {timestamp}, nor has a record there that timestamp",
        _WRONG_TIME,
    ),
    "time-entry": _index(
        "error",
        "{timestamp} is not the segment's largest timestamp so far, first reached by this batch",
        _WRONG_TIME,
    ),
    "time-incomplete": _index(
        "error", "the segment's largest timestamp {timestamp} has no entry", _WRONG_TIME, "yes"
    ),
}

_TXN_INDEX = {
    "txn-entry": _index(
        "error",
        "an entry has an unknown version, or its offsets do not rise",
        "Recovers the segment when it starts, or serves aborted records",
        "yes",
    ),
    "txn-no-marker": _index(
        "error",
        "producer {producer} has no ABORT marker at the entry's last offset",
        "Trusts it: tells read_committed consumers to drop records that were not aborted",
        "yes",
    ),
    "txn-no-entry": _index(
        "error",
        "no entry for the transaction that producer {producer} aborted, with data from offset {first} on",
        "Serves its records to read_committed consumers; its cleaner takes them for committed",
        "yes",
    ),
    "txn-first-offset": _index(
        "error",
        "the entry begins at offset {stated}, but the transaction has data from offset {first} on",
        "Serves the records before it to read_committed consumers; its cleaner takes them for committed",
        "yes",
    ),
    "txn-stable-offset": _index(
        "error",
        "the last stable offset {stated} is above offset {most}, where a later aborted transaction has data, "
        "or where its own marker ends",
        "Stops searching there: serves records of aborted transactions to read_committed consumers",
        "yes",
    ),
}

KINDS: dict[str, Kind] = {**_BATCHES, **_OFFSET_INDEX, **_TIME_INDEX, **_TXN_INDEX, **WHOLE_KINDS}
