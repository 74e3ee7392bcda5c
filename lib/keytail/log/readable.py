"""Up to which offset a partition's log may be read, as a consumer would be served it: from files alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from keytail.errors import Refused
from keytail.log.fs import FileSystem
from keytail.log.partition import PartitionFacts
from keytail.log.producers import first_unstable

_NEVER_IDLE_MS = 2**62  # producers without a transaction hold nothing back


@dataclass(frozen=True)
class Readable:
    """Offsets below `end_offset` may be read; `notes` are sentences that say what that rests on, or what ends it."""

    end_offset: int
    notes: tuple[str, ...] = ()


def readable(fs: FileSystem, facts: PartitionFacts, *, committed: bool, log_end: bool, now_ms: int) -> Readable:
    """Up to the high watermark that the broker has checkpointed, or to the log end where that is said; with `committed`
    to the last stable offset at most, which is where the earliest open transaction begins (`now_ms` tells its age).

    Raises Refused where there is no high watermark and the log end is not said to do.
    """
    notes = []
    if facts.high_watermark is None and not log_end:
        raise Refused(
            "no high watermark: replication-offset-checkpoint has none for this partition, so it is not known which "
            "records all replicas have",
            path=facts.path,
            remedy="Give --high-watermark log-end, or option highWatermark of the Spark source, if this copy is all "
            "there is, or has all there is",
        )
    if log_end:
        facts = replace(facts, high_watermark=None)
        notes.append("up to the log end, not the high watermark, as was asked for")
    limit = facts.log_end_offset
    if facts.high_watermark is not None:
        limit = max(min(limit, facts.high_watermark), facts.log_start_offset)
    if not committed:
        return Readable(limit, tuple(notes))
    # Without a snapshot a broker that stopped cleanly takes no transaction for open; the log may know better.
    believed = replace(facts, clean_shutdown=facts.clean_shutdown and bool(facts.snapshots))
    unstable = first_unstable(fs, believed, expiration_ms=_NEVER_IDLE_MS, now_ms=now_ms)
    if unstable is not None and unstable.offset < limit:
        limit = unstable.offset
        notes.append(f"up to offset {limit}: {unstable.why}")
    return Readable(max(limit, facts.log_start_offset), tuple(notes))
