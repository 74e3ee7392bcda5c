"""Lists the kinds of findings about a segment: its batches and its indexes. A kind has a message, a severity, the
reaction of a broker, and the remedy.
"""

from __future__ import annotations

from keytail.verify.finding_kinds_whole import REFETCH, WHOLE_KINDS, Kind, Recovery, Severity, StartLoses

_REBUILD = "Stop the broker and run `keytail rebuild-index --execute`, which rebuilds the indexes of the segment"
_CLEANER_STOPS = "Serves the data before the batch; its cleaner marks the partition as uncleanable until a restart"
_SERVED_TWICE = "Serves records twice or out of order"
_WRONG_FETCH = "Uses the index: fetches and lookups start at a wrong position"
_WRONG_TIME = "Uses the index: lookups by time and retention by time give wrong results"
_OF_1970 = "Treats the segment as written in 1970: retention by time deletes the segment at once"
_FROM_START = "Uses the index: every lookup reads the segment from its start"
_TRUNCATED_HERE = Recovery(
    "error",
    "Recovers the segment when it starts: truncates the log here and removes the segments after it",
    start_loses=True,
)
_REINDEXED = Recovery("warning", "Recovers the segment when it starts, which rebuilds its indexes")


def _log(what: str, broker: str, start_loses: StartLoses = "no") -> Kind:
    """Return a kind of damage to batches, at which a broker's recovery truncates the log."""
    return Kind("error", what, broker, REFETCH, _TRUNCATED_HERE, start_loses)


def _index(severity: Severity, what: str, broker: str, start_loses: StartLoses = "no") -> Kind:
    return Kind(severity, what, broker, _REBUILD, _REINDEXED, start_loses)


_BATCHES = {
    "cut": _log("the file ends inside a batch: its last {left} bytes are not a complete batch", _CLEANER_STOPS),
    "cut-active": Kind(
        "warning",
        "the active segment ends inside a batch: its last {left} bytes are not a complete batch",
        "Appends after these bytes: the appended data cannot be read",
        "Remove .kafka_cleanshutdown: then the broker, or `keytail rebuild-index --truncate`, removes the batch",
        Recovery("warning", "Removes the incomplete batch when it starts"),
        start_loses="yes",
    ),
    "size": _log(
        "a batch has the invalid size {size}; {left} bytes from here on cannot be read",
        "Fails fetches that reach the batch",
        "at-end",
    ),
    "zeros": _log("there are {left} zero bytes where a batch should begin", "Fails fetches that reach the zeros"),
    "magic": _log(
        "a batch has the unknown magic {magic}; {left} bytes from here on cannot be read",
        "Treats the magic as version 2, or as an old format, and fails fetches that reach the batch",
    ),
    "checksum": _log(
        "a batch has an invalid CRC",
        "Serves the batch, on which consumers fail; its cleaner may write the batch with a valid CRC",
    ),
    "offset-order": Kind(
        "error",
        "a batch's offsets are invalid, or are not above the offsets of earlier batches",
        _SERVED_TWICE,
        REFETCH,
        start_loses="at-end",
    ),
    "offset-range": Kind(
        "error",
        "a batch's offsets are outside this segment, or too far from its base offset",
        "Splits the segment, or does not find the batch",
        REFETCH,
        Recovery("error", "Splits the segment when it starts, or empties it", start_loses=True),
        start_loses="at-end",
    ),
    "overlap": Kind(
        "error",
        "a batch's last offset is not below the next segment's base offset",
        _SERVED_TWICE,
        "Find out which copy is correct: a replacement of segments was interrupted, or files were mixed",
    ),
    "codec": Kind("error", "a batch has an unknown compression codec", _CLEANER_STOPS, REFETCH),
    "decompress": Kind("error", "a batch cannot be decompressed: {reason}", _CLEANER_STOPS, REFETCH),
    "not-opened": Kind(
        "warning",
        "the records of a batch were not checked, because that needs too much memory: {reason}",
        "Serves the batch; its cleaner reads one record of the batch at a time",
        "Run again with a larger --max-record-bytes",
    ),
    "legacy": Kind("error", "a message of an old format has invalid content: {reason}", _CLEANER_STOPS, REFETCH),
    "record-count": Kind("error", "a batch has more or fewer records than its record count", _CLEANER_STOPS, REFETCH),
    "record": Kind("error", "a record cannot be parsed", _CLEANER_STOPS, REFETCH),
    "record-offset": Kind("error", "a record's offset is out of order or outside its batch", _CLEANER_STOPS, REFETCH),
    "record-timestamp": Kind(
        "warning",
        "a record has the timestamp {timestamp}, below -1",
        "Serves the record; its cleaner marks the partition as uncleanable if it has to rewrite the batch",
        "Leave the record, or produce a new record with its key",
    ),
    "max-timestamp": Kind(
        "error",
        "the header's max timestamp is {stated}, but the largest timestamp of its records is {timestamp}",
        "Uses the header: lookups by time miss records, and retention by time deletes too early or too late",
        "If the topic is compacted, rewrite the batch by `keytail compact --execute` or by the broker's cleaner",
    ),
    "producer": Kind(
        "error",
        "a batch's producer id, epoch and sequence contradict its attributes",
        "Serves the batch; its cleaner marks the partition as uncleanable if it has to rewrite the batch",
        REFETCH,
    ),
    "control": Kind(
        "error",
        "a control batch of a producer is neither a COMMIT nor an ABORT marker",
        "Fails to load the partition when it has to replay the batch",
        REFETCH,
    ),
    "transaction": Kind(
        "error",
        "a batch is not transactional, but its producer {producer} has had an open transaction since offset {first}",
        "Fails to load the partition when it has to replay the batch",
        REFETCH,
    ),
}

_OFFSET_INDEX = {
    "index-missing": _index(
        "warning", "the offset index is missing", "Recovers the segment when it starts, which takes time"
    ),
    "index-zeros": _index("warning", "the offset index consists of {count} entries of zeros", _FROM_START),
    "index-untrimmed": _index("warning", "the offset index ends with {count} entries of zeros", _FROM_START),
    "index-empty": _index("warning", "the offset index of a segment of {size} bytes is empty", _FROM_START),
    "index-size": _index(
        "warning",
        "the size of the file, {size} bytes, is not a multiple of the entry size {entry}",
        "Ignores the last bytes",
    ),
    "index-order": _index("error", "entries are not in ascending order from here on", _WRONG_FETCH, "at-end"),
    "index-position": _index(
        "error", "an entry points to byte position {position}, where no batch begins", _WRONG_FETCH, "at-end"
    ),
    "index-offset": _index(
        "error",
        "no batch between byte position {position} and the next entry's position ends with the entry's offset",
        _WRONG_FETCH,
        "at-end",
    ),
}

_TIME_INDEX = {
    "time-index-missing": _index(
        "error",
        "the time index is missing",
        "Creates an empty time index: the segment then has the age of its file, and lookups by time miss its records",
    ),
    "time-index-zeros": _index("error", "the time index consists of {count} entries of zeros", _OF_1970, "yes"),
    "time-index-untrimmed": _index("error", "the time index ends with {count} entries of zeros", _OF_1970, "yes"),
    "time-order": _index("error", "entries are not in ascending order from here on", _WRONG_TIME, "yes"),
    "time-offset": _index(
        "error",
        "no batch ends with the entry's offset, and no record at that offset has the entry's timestamp {timestamp}",
        _WRONG_TIME,
    ),
    "time-entry": _index(
        "error",
        "{timestamp} is not the segment's largest timestamp up to this batch, or an earlier batch also has this "
        "timestamp",
        _WRONG_TIME,
    ),
    "time-incomplete": _index(
        "error", "the time index has no entry for the segment's largest timestamp {timestamp}", _WRONG_TIME, "yes"
    ),
}

_TXN_INDEX = {
    "txn-entry": _index(
        "error",
        "an entry has an unknown version, or its offsets are not in ascending order",
        "Recovers the segment when it starts, or serves aborted records",
        "yes",
    ),
    "txn-no-marker": _index(
        "error",
        "producer {producer} has no ABORT marker at the entry's last offset",
        "Uses the entry: read_committed consumers skip records that were not aborted",
        "yes",
    ),
    "txn-no-entry": _index(
        "error",
        "there is no entry for the transaction that producer {producer} aborted, with data from offset {first} on",
        "Serves the transaction's records to read_committed consumers; its cleaner treats these records as committed",
        "yes",
    ),
    "txn-first-offset": _index(
        "error",
        "the entry begins at offset {stated}, but the transaction has data from offset {first} on",
        "Serves the data before the entry's offset to read_committed consumers; its cleaner treats this data as "
        "committed",
        "yes",
    ),
    "txn-stable-offset": _index(
        "error",
        "the last stable offset {stated} is above offset {most}: a later aborted transaction has data there, "
        "or the entry's own marker ends there",
        "Stops searching at this entry, and serves records of aborted transactions to read_committed consumers",
        "yes",
    ),
}

KINDS: dict[str, Kind] = {**_BATCHES, **_OFFSET_INDEX, **_TIME_INDEX, **_TXN_INDEX, **WHOLE_KINDS}
