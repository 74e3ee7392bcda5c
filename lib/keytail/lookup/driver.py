"""Finds an offset or a time in the chosen partitions, and shows how a broker finds it.

The command takes no lock, changes nothing and does not use Spark. A broker may be running.
"""

from __future__ import annotations

import base64
from typing import Any

from keytail.cli.options import parse_time
from keytail.cli.selection import select_partitions
from keytail.errors import EXPLAINED, PERMISSION_DENIED, KeytailError, Refused, UsageProblem, in_words, joined
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.listed import retry_beside_broker
from keytail.log.partition import LogDirFacts, PartitionEntry, PartitionFacts, survey_partition
from keytail.lookup.command import LookupRow, Request
from keytail.lookup.steps import Lookup, lookup_offset, lookup_time
from keytail.run.kernels import compile_kernels
from keytail.run.rows import status_of


def lookup(request: Request, fs: FileSystem = LOCAL) -> list[LookupRow]:
    """Look up one offset or one time; return a row for each chosen partition."""
    if request.offset is not None and request.timestamp is not None:
        raise UsageProblem(
            "--offset and --timestamp cannot be combined", remedy="Give one of them", slug="conflicting-flags"
        )
    if request.offset is None and request.timestamp is None:
        raise UsageProblem(
            "no offset or time to look up", remedy="Give one of --offset and --timestamp", slug="missing-flag"
        )
    timestamp_ms = parse_time(request.timestamp) if request.timestamp is not None else None
    chosen = select_partitions(fs, request.partition_filter)
    compile_kernels(["lookup"])
    return [
        _look(fs, log_dir, entry, request.offset, timestamp_ms, request.explain)
        for log_dir, entry in chosen.partitions
    ]


def _look(
    fs: FileSystem,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    offset: int | None,
    timestamp_ms: int | None,
    explain: bool,
) -> LookupRow:
    def look() -> LookupRow:
        facts = survey_partition(fs, log_dir, entry)
        if not facts.segments:
            if any(PERMISSION_DENIED in problem.slugs for problem in facts.problems):
                raise Refused(joined(facts.problems), slug=PERMISSION_DENIED)
            problem = facts.problems[-1] if facts.problems else f"no segments in {entry.path}"
            raise KeytailError(
                problem, remedy="Run `keytail verify`, which lists what is wrong with the partition", slug="no-segments"
            )
        if offset is not None:
            result = lookup_offset(fs, facts, offset)
        else:
            assert timestamp_ms is not None
            result = lookup_time(fs, facts, timestamp_ms)
        return _row(facts, result, explain)

    try:
        return retry_beside_broker(look, clean_shutdown=log_dir.clean_shutdown)
    except EXPLAINED as problem:
        return LookupRow(entry.topic, entry.partition, entry.log_dir, status_of(problem), in_words(problem))


def _row(facts: PartitionFacts, result: Lookup, explain: bool) -> LookupRow:
    record = result.record
    place = (facts.topic, facts.partition, facts.log_dir, result.status)
    values: dict[str, Any] = {"reason": result.reason, "notes": (*facts.problems, *result.notes)}
    values["steps"] = result.steps if explain else ()
    if record is not None:
        values |= {**vars(record), "control": record.control or None}
        del values["batch_records"]
        for name, data in (("key", record.key), ("value", record.value)):
            values[name], values[f"{name}_base64"] = _text_or_base64(data)
    return LookupRow(*place, **values)


def _text_or_base64(data: bytes | None) -> tuple[str | None, str | None]:
    """Return a key or value as (text, None) if it is UTF-8; if not, as (None, base64), as `dump` prints it."""
    if data is None:
        return None, None
    try:
        return data.decode(), None
    except UnicodeDecodeError:
        return None, base64.b64encode(data).decode()
