"""Converts the rows of any command to the facts of a report, by the field names that all rows have in common."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from keytail.audit.command import WHAT
from keytail.cli.rows import fields_of
from keytail.compact.detail import Detail
from keytail.report.facts import Finding, Partition
from keytail.verify.command import VerifyRow

# Names of fields that `facts.Partition` takes unchanged from rows that have them. Rows of some commands have other
# names for bytes.
_SAME = {field.name for field in fields(Partition) if field.default is None} - {"bytes_before", "bytes_after"}
_MAX_EXAMPLES = 20


def partitions(rows: Iterable[Any]) -> tuple[Partition, ...]:
    return tuple(map(partition, rows))


def partition(row: Any) -> Partition:
    """Return the facts of a row of any command. The row must have a name, a topic, a status and an error."""
    known: dict[str, Any] = {name: getattr(row, name, None) for name in _SAME}
    before, after = _bytes(row)
    problem = getattr(row, "problem", None)
    remedy = (problem.remedy if problem is not None else None) or ""
    why = getattr(row, "shown", None) or row.error
    if remedy and remedy in why:
        why = why.replace(f". {remedy}", "").replace(remedy, "").rstrip()
    detail = getattr(row, "detail", None)
    return Partition(
        name=row.name,
        topic=row.topic or "",
        log_dir=getattr(row, "log_dir", ""),
        status=row.status,
        why=why,
        remedy=remedy,
        bytes_before=before,
        bytes_after=after,
        held_by=_held_by(row),
        findings=tuple(_findings(row)),
        detail=detail if isinstance(detail, Detail) else Detail(),
        row=fields_of(row),
        **known,
    )


def _bytes(row: Any) -> tuple[int | None, int | None]:
    if hasattr(row, "bytes_before"):
        return row.bytes_before, row.bytes_after
    if hasattr(row, "bytes"):
        return row.bytes, None
    replicas = getattr(row, "replicas", ())
    return sum(replica["bytes"] or 0 for replica in replicas) if replicas else None, None


def _held_by(row: Any) -> str:
    replica = getattr(row, "removal_limit_replica", None)
    if replica is None:
        return ""
    return f"replica {replica} was cleaned only up to offset {row.removal_limit_offset}"


def _findings(row: Any) -> Iterator[Finding]:
    if isinstance(row, VerifyRow):
        for item in row.findings:
            yield Finding(item.severity, item.what, item.place, item.broker, item.remedy, item.start_loses)
    for segment in _segments(row):  # a row of rebuild-index
        if segment.status != "sound":
            severity = "error" if segment.status == "damaged" else "warning"
            where = os.path.join(row.name, f"{segment.base_offset:020d}.log")
            yield Finding(severity, f"index files {segment.status}: {segment.error}", where)
    for text in getattr(row, "notes", ()):
        yield Finding("note", text)
    for name, count in (getattr(row, "divergences", None) or {}).items():  # a row of audit
        offsets = ", ".join([str(item["offset"]) for item in row.examples if item["kind"] == name][:_MAX_EXAMPLES])
        where = f"{count:,}, for example at offset {offsets}" if offsets else f"{count:,}"
        yield Finding("error", f"{name}: {WHAT[name]}", where)
    for gap in getattr(row, "not_compared", ()):
        where = f"{gap['path']}, byte position {gap['byte_position']}"
        yield Finding("error", f"offsets could not be compared: {gap['what']}", where)


def _segments(row: Any) -> tuple[Any, ...]:
    segments = getattr(row, "segments", ())
    return segments if isinstance(segments, tuple) else ()
