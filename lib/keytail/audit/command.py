"""Declares the command `audit`: flags, rows, statuses, exit status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import Command
from keytail.cli.flags import FromFlags
from keytail.cli.output_options import RowsAndReport
from keytail.cli.replicas import directories_of
from keytail.cli.selection import PartitionFilter
from keytail.cli.statuses import Status
from keytail.cli.table import PARTITION, STATUS, TOOK, Column, about, print_line, print_paragraph, print_rows, total
from keytail.erase.command import KeyFormatFlag, KeySchemaFlag
from keytail.errors import NO_ERROR, ErrorText, KeytailError
from keytail.log.fs import LOCAL
from keytail.log.owner import work_as_owner
from keytail.run.rows import OfPartition

_GOOD = frozenset({"alike", "skipped", "absent"})

Replicas = Annotated[list[str] | None, o.select_flag(
    "--replica [NAME=]DIR[,DIR]",
    "All log dirs of one broker. Give the flag once for each broker; without --erased at least twice.",
)]
Examples = Annotated[int, o.run_flag(
    "--examples N", "Maximum number of examples for each kind of difference.", parser=o.within(1, 10_000)
)]

Erased = Annotated[str | None, o.flag(
    "--erased FILE",
    "File with keys, one on each line, as for `erase`. Report which replicas have records with these keys, instead of "
    "comparing the replicas. No key is printed.",
)]


def _replicas(replica: Replicas = None) -> tuple[str, ...]:
    """Return the replicas. A process that was started as root works as the owner of these log dirs from now on."""
    work_as_owner(LOCAL, (), directories_of(replica or ()))
    return tuple(replica or ())


def _partition_filter(
    topic: o.Topic = None, topic_list: o.TopicList = None, partitions: o.Partitions = None
) -> PartitionFilter:
    return PartitionFilter((), tuple(topic or ()), o.comma_lists(topic_list), o.comma_lists(partitions))


@dataclass(frozen=True)
class Request:
    """All parameters of `audit`, with the defaults of its flags."""

    replicas: Annotated[tuple[str, ...], FromFlags(_replicas)]
    partition_filter: Annotated[PartitionFilter, FromFlags(_partition_filter)] = field(default_factory=PartitionFilter)
    _: KW_ONLY
    examples: Examples = 5
    erased: Erased = None
    key_format: KeyFormatFlag = "utf8"
    key_schema: KeySchemaFlag = None
    master: o.Master = None
    submitted: bool = False  # spark-submit runs this process and sets the master


@dataclass(frozen=True)
class AuditRow(OfPartition):
    """One partition. Counts are numbers of records, except the counts of transactions and leader epochs."""

    topic: str
    partition: int
    status: str
    error: ErrorText = NO_ERROR
    replicas: Annotated[
        tuple[dict[str, Any], ...],
        "each with `name`, `path`, `segments`, `bytes`, `records`, `log_start_offset`, `log_end_offset`, "
        "`high_watermark`, `cleaned_to`; with `--erased`, the first four, `records_left`, `first_left` (offset), and "
        "`not_read` (files and directories that may have such records)",
    ] = ()
    first_offset: Annotated[int | None, "start of the compared range"] = None
    end_offset: Annotated[int | None, "end of the compared range, exclusive"] = None
    records_compared: Annotated[int | None, "number of records that at least two replicas have"] = None
    divergences: Annotated[dict[str, int] | None, "counts by kind"] = None
    first_divergence: Annotated[int | None, "the smallest offset of the examples"] = None
    examples: Annotated[
        tuple[dict[str, Any], ...],
        "each with `kind`, `offset`, and the replicas' data at the offset; up to `--examples N` of a kind",
    ] = ()
    explained: Annotated[
        dict[str, int] | None,
        "number of records that only some replicas have, by reason; records with the reason `cleaning-unknown` or "
        "`unknown` may be lost",
    ] = None
    dropped_early: Annotated[
        dict[str, int] | None,
        "tombstones and markers that one replica removed while another has the records that they delete",
    ] = None
    not_compared: Annotated[
        tuple[dict[str, Any], ...],
        "damage: `replica`, `first_offset`, `end_offset`, `path`, `byte_position`, `what`",
    ] = ()
    notes: tuple[str, ...] = ()
    start_ms: int | None = None
    end_ms: int | None = None
    problem: KeytailError | None = None  # the error whose text is in `error`


def exit_status(rows: Sequence[AuditRow], request: Request) -> int:
    """Return 0 if all partitions are alike, absent or skipped, 3 if some are, 1 if none is. A skipped partition that
    was named with --partitions does not count as one of these."""
    named = request.partition_filter.partitions
    good = [row.status in _GOOD and not (row.status == "skipped" and row.name in named) for row in rows]
    if all(good):
        return 0
    return 3 if any(good) else 1


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


_COLUMNS: tuple[Column[AuditRow], ...] = (
    PARTITION,
    STATUS,
    Column("replicas", lambda row: str(len(row.replicas) or "")),
    Column("offsets", lambda row: show.offsets(row.first_offset, row.end_offset)),
    Column("records", lambda row: show.count(row.records_compared)),
    Column("log size", lambda row: show.human_bytes(sum(r["bytes"] for r in row.replicas) if row.replicas else None)),
    TOOK,
)


def show_rows(rows: Sequence[AuditRow], request: Request) -> None:
    """Print a line for each partition, then the differences, what was not compared, and what was removed early."""
    print_rows("Audit", _COLUMNS, rows)
    print_paragraph(
        [(row.name, row.status, row.error) for row in rows if row.error and row.divergences is None],
        [about(row.name, text) for row in rows for text in _texts(row)],
    )
    text = total(rows)
    if rows and all(row.status == "absent" for row in rows):
        text += " No record with these keys is left."
    elif all(row.status in _GOOD for row in rows):
        was_compared = any(row.status == "alike" for row in rows)
        text += " No differences found." if was_compared else " Nothing was compared."
    print_line(f"\n{text}")


def _texts(row: AuditRow) -> list[str]:
    texts = []
    for kind, count in (row.divergences or {}).items():
        examples = [_example(item) for item in row.examples if item["kind"] == kind]
        texts.append(f"{kind}: {count:,} {WHAT[kind]}" + "".join(f"\n  {text}" for text in examples))
    for gap in row.not_compared:
        texts.append(
            f"not compared: offsets {gap['first_offset']} to {gap['end_offset'] - 1} of {gap['replica']}: {gap['what']}"
            f" ({gap['path']}, byte position {gap['byte_position']})"
        )
    for kind, count in (row.dropped_early or {}).items():
        texts.append(
            f"{count:,} {_EARLY[kind]}; this is not a difference as long as the other replica retains its {kind}s"
        )
    return texts + list(row.notes)


def _example(item: dict[str, Any]) -> str:
    """Return `offset 5: a has ..., b has ...`, with the fields that differ, or, if none do, timestamp and epoch."""
    if "records" not in item:
        other = {key: value for key, value in item.items() if key not in ("kind", "offset")}
        rest = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in other.items())
        return f"offset {item['offset']}: {rest}"
    held = item["records"]
    fields = {key for record in held.values() for key in record}
    differing = sorted(key for key in fields if len({repr(record.get(key)) for record in held.values()}) > 1)
    shown = differing or ["timestamp_ms", "leader_epoch"]
    texts = [f"{name} has {', '.join(f'{key} {record.get(key)}' for key in shown)}" for name, record in held.items()]
    lacking = f"; missing in {', '.join(item['lacking'])}" if item.get("lacking") else ""
    return f"offset {item['offset']}: {', '.join(texts)}{lacking}"


AUDIT = Command(
    name="audit",
    also_called=("compare", "diff", "replicas", "divergence"),
    help="Compare the replicas of partitions, record by record. Reads only; brokers may run.\n\n"
    "With --erased, the command looks for records with given keys in each replica instead: after `erase`, no such "
    "record may be left.",
    request=Request,
    run="keytail.audit.driver:audit",
    examples=(
        "keytail audit --replica a=/mnt/broker-1 --replica b=/mnt/broker-2 --topic orders",
        "keytail audit --erased keys.txt --replica a=/mnt/broker-1 --replica b=/mnt/broker-2 --topic orders",
    ),
    rows={"": AuditRow},
    statuses={
        "alike": Status("no differences", "done"),
        "differs": Status("`divergences` counts the differences", "failed"),
        "corrupt": Status("no differences in the part that could be read", "failed"),
        "absent": Status("with `--erased`: no record has one of the keys"),
        "left": Status("with `--erased`: a replica has records with these keys", "failed"),
        "unread": Status("with `--erased`: files that may have such records were not read", "not done"),
        "skipped": Status("nothing to compare, as stated in `error`", "skipped"),
        "refused": Status("keytail does not act on this state", "not done"),
        "failed": Status("another error occurred; run again", "failed"),
    },
    show=show_rows,
    exit_status=exit_status,
    output=RowsAndReport,
    log_dirs=lambda request: directories_of(request.replicas),
    reads_records=True,
    reports_rows=True,
)
