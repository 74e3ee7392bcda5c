"""Prints an audit: a line for each partition, then the differences, what was not compared, what was dropped early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from keytail.audit.command import AuditRow
from keytail.cli import rows as show

WHAT = {
    "control": "offsets with a marker in one replica and a record in another",
    "control-type": "markers with different types",
    "key": "offsets with records of different keys",
    "value": "records with different values",
    "headers": "records with different headers",
    "timestamp": "records with different timestamps",
    "leader-epoch": "records with different leader epochs",
    "producer-id": "records with different producer ids",
    "producer-epoch": "records with different producer epochs",
    "sequence": "records with different sequence numbers",
    "transactional": "records that are transactional in one replica and not in another",
    "lost": "records that are missing without a reason",
    "decided-otherwise": "transactions that are aborted in one replica and committed in another",
    "marker-lost": "transactions with data in a replica that lacks the marker that other replicas have",
    "epoch-start": "leader epochs with different start offsets, and records between these",
}
_EARLY = {
    "tombstone": "tombstones were removed from one replica while another still has older records of their keys",
    "marker": "markers were removed from one replica while another still has data of their transactions",
}


def print_table(rows: Sequence[AuditRow]) -> None:
    names = ("partition", "status", "replicas", "offsets", "records", "log size", "took")
    lines = []
    for row in rows:
        compared = "" if row.first_offset is None else f"{row.first_offset}..{row.end_offset}"
        count = "" if row.records_compared is None else f"{row.records_compared:,}"
        size = show.human_bytes(sum(one["bytes"] for one in row.replicas) if row.replicas else None)
        took = show.human_seconds(row.start_ms, row.end_ms)
        lines.append([row.name, row.status, str(len(row.replicas) or ""), compared, count, size, took])
    show.print_lines("Audit", names, lines, start=2)
    console = show.output_console()
    for row in rows:
        for text in _texts(row):
            console.print(f"\n{escape(row.name)}: {escape(text)}", soft_wrap=True)
    show.print_reasons([(row.name, row.status, row.error) for row in rows if row.error and row.divergences is None])
    bad = sum(row.status not in ("alike", "skipped") for row in rows)
    verdict = f"{bad} not alike" if bad else "no differences found"
    console.print(f"\n{len(rows)} partition{'s' if len(rows) != 1 else ''}: {verdict}.")


def _texts(row: AuditRow) -> list[str]:
    texts = []
    for kind, count in (row.divergences or {}).items():
        examples = [_example(one) for one in row.examples if one["kind"] == kind]
        texts.append(f"{kind}: {count:,} {WHAT[kind]}" + "".join(f"\n  {text}" for text in examples))
    for gap in row.not_compared:
        texts.append(
            f"not compared: offsets {gap['first_offset']} to {gap['end_offset'] - 1} of {gap['replica']}: {gap['what']}"
            f" ({gap['path']}, byte position {gap['byte_position']})"
        )
    for kind, count in (row.dropped_early or {}).items():
        texts.append(f"{count:,} {_EARLY[kind]}; this is no difference as long as the other one retains its {kind}s")
    return texts + list(row.notes)


def _example(one: dict[str, Any]) -> str:
    """Return `offset 5: a has ..., b has ...`, with only the fields that differ."""
    if "records" not in one:
        told = {key: value for key, value in one.items() if key not in ("kind", "offset")}
        rest = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in told.items())
        return f"offset {one['offset']}: {rest}"
    held = one["records"]
    fields = {key for record in held.values() for key in record}
    differing = sorted(key for key in fields if len({repr(record.get(key)) for record in held.values()}) > 1)
    shown = differing or ["timestamp_ms", "leader_epoch"]
    texts = [f"{name} has {', '.join(f'{key} {record.get(key)}' for key in shown)}" for name, record in held.items()]
    lacking = f"; missing in {', '.join(one['lacking'])}" if one.get("lacking") else ""
    return f"offset {one['offset']}: {', '.join(texts)}{lacking}"
