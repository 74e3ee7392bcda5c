"""Finds an offset or a time in a partition as a broker does, and reports every step with its numbers.

The rules are in format/INDEX.md, "Look-ups". If an index is missing or full of zeros, its segment is read instead, as
if the index had been rebuilt. The result reports if a broker that starts on these files would find something else.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.partition import PartitionFacts
from keytail.lookup.search import FoundRecord, Search, spell_time

Status = Literal["found", "none", "out-of-range"]
_MAX_NAMED = 3  # maximum number of passed segments that a step lists


@dataclass(frozen=True)
class Lookup:
    """The result of a lookup, and how it was found.

    `reason`: why no record, or a record at another offset, was found. `notes`: problems of the files, and what a broker
    that starts on them returns. `steps`: sentences in the order of the search.
    """

    status: Status
    record: FoundRecord | None
    reason: str
    notes: tuple[str, ...]
    steps: tuple[str, ...]


def lookup_offset(fs: FileSystem, facts: PartitionFacts, offset: int) -> Lookup:
    """Find the first record at or after `offset`, as a fetch from that offset does. Raises CorruptLog if damaged bytes
    are read."""
    search = Search(fs, facts)
    start, end = facts.log_start_offset, facts.log_end_offset
    if not start <= offset <= end:
        what = f"below the log start offset {start}" if offset < start else f"above the log end offset {end}"
        return _answer(search, "out-of-range", f"{offset} is {what}: a broker rejects the fetch as out of range")
    if offset == end:
        return _answer(search, "none", f"{offset} is the log end offset, which the next record will have")
    bases = [segment.base_offset for segment in facts.segments]
    first = bisect_right(bases, offset) - 1
    search.add_step(
        f"The segment with the largest base offset not above {offset} is {search.indexes.file(first, names.LOG)} "
        f"(number {first + 1} of {len(bases)})."
    )
    for number in range(first, len(bases)):
        floor = search.offset_floor(number, offset)
        record = search.scan(number, floor, offset, None)
        if record is not None:
            gap = f"no record has offset {offset} (removed by compaction, or never written): this is the next record"
            return _answer(search, "found", "" if record.offset == offset else gap, record)
        if number + 1 < len(bases):
            search.add_step("The segment has no such record; the next segment is read from its start.")
    return _answer(search, "none", f"there is no record from offset {offset} to the log end offset {end}")


def lookup_time(fs: FileSystem, facts: PartitionFacts, timestamp_ms: int) -> Lookup:
    """Find the first record at or after a time (0 or more), or none, as `offsetsForTimes` does.

    The segment is chosen by the largest timestamps in the time indexes. Raises CorruptLog if damaged bytes are read.
    """
    search = Search(fs, facts)
    record, reason = _by_time(search, timestamp_ms)
    if search.indexes.distrusted:
        trusting = Search(fs, facts, trusts_indexes=True)
        other, _ = _by_time(trusting, timestamp_ms)
        same = (record and record.offset) == (other and other.offset)
        answer = f"offset {other.offset}, timestamp {spell_time(other.timestamp_ms)}" if other else "nothing"
        if search.indexes.is_unknown:
            search.indexes.note("The answer of a broker that starts on these files is unknown")
        else:
            search.indexes.note(f"A broker that starts on these files returns {'the same answer' if same else answer}")
    return _answer(search, "found" if record else "none", reason, record)


def _by_time(search: Search, timestamp_ms: int) -> tuple[FoundRecord | None, str]:
    facts = search.facts
    asked = spell_time(timestamp_ms)
    passed = []
    for number in range(len(facts.segments)):
        largest_ms, source = search.largest_timestamp(number)
        reported = f"{search.indexes.file(number, names.LOG)} {spell_time(largest_ms)} ({source})"
        if largest_ms >= timestamp_ms:
            break
        passed.append(reported)
    else:
        search.add_step(f"Largest timestamp of each segment: {_some(passed)}. No segment has a timestamp at or after "
        f"{asked}.")
        return None, f"no segment has a timestamp at or after {asked}"
    search.add_step(
        f"The first segment whose largest timestamp is at or after {asked} is number {number + 1} of "
        f"{len(facts.segments)}: {reported}." + (f" Before it: {_some(passed)}." if passed else "")
    )
    at = search.time_floor(number, timestamp_ms)
    begin = max(at.offset, facts.log_start_offset)
    if begin > at.offset:
        search.add_step(
            f"Records below the log start offset {begin} are not served, so the search continues from there."
        )
    floor = search.offset_floor(number, begin)
    record = search.scan(number, floor, facts.log_start_offset, timestamp_ms)
    if record is not None:
        return record, ""
    base = facts.segments[number].base_offset
    return None, (
        f"the segment with base offset {base} is the first that may contain {asked}, but its remaining records are "
        "older, and later segments are not searched"
    )


def _answer(search: Search, status: Status, reason: str, record: FoundRecord | None = None) -> Lookup:
    if reason:
        search.add_step(f"{reason[0].upper()}{reason[1:]}.")
    return Lookup(status, record, reason, tuple(search.indexes.notes), tuple(search.steps))


def _some(passed: list[str]) -> str:
    """Return the descriptions of the last _MAX_NAMED passed segments, after the number of earlier passed segments."""
    left_out = f"{len(passed) - _MAX_NAMED} more, then " if len(passed) > _MAX_NAMED else ""
    return left_out + "; ".join(passed[-_MAX_NAMED:])
