"""Prints an audit: a line for each partition, then the differences, what was not compared, what was dropped early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from keytail.audit.command import AuditRow
from keytail.cli import rows as show

WHAT = {
    "control": "a marker in one replica, a record in another",
    "control-type": "markers of another type",
    "key": "records of another key at the same offset",
    "value": "records with another value",
    "headers": "records with other headers",
    "timestamp": "records with another timestamp",
    "leader-epoch": "records of another leader epoch",
    "producer-id": "records of another producer",
    "producer-epoch": "records of another producer epoch",
    "sequence": "records with another sequence number",
    "transactional": "records within a transaction in one replica, without one in another",
    "lost": "records that are missing without a reason",
    "decided-otherwise": "transactions that are aborted in one replica and committed in another",
    "marker-lost": "transactions whose data is there without the marker that others have",
    "epoch-start": "leader epochs that begin elsewhere, with records between",
}
_EARLY = {
    "tombstone": "tombstones are gone from one replica while another still has older records of their keys",
    "marker": "markers are gone from one replica while another still has data of their transactions",
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
    verdict = f"{bad} not alike" if bad else "nothing differs"
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
        texts.append(f"{count:,} {_EARLY[kind]}; no difference as long as that one keeps its own")
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
    lacking = f"; {', '.join(one['lacking'])} has none" if one.get("lacking") else ""
    return f"offset {one['offset']}: {', '.join(texts)}{lacking}"
