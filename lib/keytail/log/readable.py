"""Determines from the files alone up to which offset a consumer may read a partition's log."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from keytail.errors import Refused
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.partition import PartitionFacts, refuse_damaged_end
from keytail.log.producers import first_unstable


@dataclass(frozen=True)
class Readable:
    """Offsets below `end_offset` may be read. `notes` describe assumptions, and why the range ends at `end_offset`."""

    end_offset: int
    notes: tuple[str, ...] = ()


def readable(fs: FileSystem, facts: PartitionFacts, *, committed: bool, log_end: bool, now_ms: int) -> Readable:
    """Return the end of the readable range: the high watermark in the broker's checkpoint or, with `log_end`, the log
    end. With `committed`, the range does not extend beyond the last stable offset, where the earliest open transaction
    begins; the age of that transaction at `now_ms` is reported.

    Raises Refused if there is no high watermark and `log_end` is not set, or if segments are being replaced or a
    replacement was interrupted: in these states the listed segments may not be the whole log. Raises CorruptLog if the
    log ends before its high watermark, or if it ends with bytes that are not a batch although the broker stopped
    cleanly.
    """
    _refuse_half_replaced(facts)
    notes = []
    if facts.high_watermark is None and not log_end:
        raise Refused(
            "no high watermark: replication-offset-checkpoint has no entry for this partition, so it is unknown which "
            "records all replicas have",
            path=facts.path,
            remedy="Give --high-watermark log-end (Spark source: the option highWatermark=log-end) if this copy is the "
            "only one or has all records",
            slug="no-high-watermark",
        )
    if log_end:
        facts = replace(facts, high_watermark=None)
        notes.append("up to the log end instead of the high watermark, as requested")
    refuse_damaged_end(facts)
    limit = facts.log_end_offset
    if facts.high_watermark is not None:
        limit = max(min(limit, facts.high_watermark), facts.log_start_offset)
    if not committed:
        return Readable(limit, tuple(notes))
    # After a clean shutdown without a snapshot, a starting broker assumes that no transaction is open. The log may
    # contain one, so it is read as after an unclean shutdown.
    as_to_read = replace(facts, clean_shutdown=facts.clean_shutdown and bool(facts.snapshots))
    unstable = first_unstable(fs, as_to_read, now_ms=now_ms)
    if unstable is not None and unstable.offset < limit:
        limit = unstable.offset
        notes.append(f"up to offset {limit}: {unstable.why}")
    return Readable(max(limit, facts.log_start_offset), tuple(notes))


def _refuse_half_replaced(facts: PartitionFacts) -> None:
    swaps = [name for name in facts.leftovers if names.parse_file_name(name).kind == "swap"]
    if swaps:
        raise Refused(
            "a replacement of segments is in progress or was interrupted: segments may be missing",
            path=os.path.join(facts.path, swaps[0]),
            remedy="If a broker is running, try again. If not, start a broker or run `keytail compact --execute` "
            "on this partition: both finish the replacement",
            slug="unfinished-replacement",
        )
