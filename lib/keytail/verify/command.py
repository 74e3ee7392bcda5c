"""Declares the command `verify`: flags, rows, statuses, next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated

from rich.markup import escape

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import BROKER, Command
from keytail.cli.output_options import RowsAndFiles
from keytail.cli.selection import PartitionFilterWithoutConfig
from keytail.cli.statuses import Status
from keytail.cli.table import PARTITION, TOOK, Column, print_line, print_paragraph, print_rows
from keytail.console import listed
from keytail.errors import NO_ERROR, ErrorText, KeytailError
from keytail.verify.findings import Finding

OnlyEnds = Annotated[bool, o.run_flag(
    "--only-ends",
    "Read index files and the end of each segment, not every batch: what a broker reads when it starts, and a little "
    "more.",
)]
_NAMED = 5  # maximum number of partitions in the last line


@dataclass(frozen=True)
class Request:
    """All parameters of `verify`, with the defaults of its flags."""

    partition_filter: PartitionFilterWithoutConfig
    _: KW_ONLY
    only_ends: OnlyEnds = False
    master: o.Master = None
    submitted: bool = False  # spark-submit runs this process and sets the master


@dataclass(frozen=True)
class VerifyRow:
    """The result for one partition, or, without topic and partition, for a log dir with findings of its own."""

    topic: str | None
    partition: int | None
    log_dir: str
    status: str
    error: ErrorText = NO_ERROR
    live: Annotated[bool, "a broker runs there: the end of the active segment was not checked"] = False
    only_ends: Annotated[bool, "index files and the ends of segments were read (`--only-ends`)"] = False
    segments: int = 0
    bytes: Annotated[int, "size of the `.log` files"] = 0
    batches: int | None = None
    records: int | None = None
    findings: Annotated[tuple[Finding, ...], "everything that is wrong"] = ()
    start_ms: int | None = None
    end_ms: int | None = None
    problem: KeytailError | None = field(default=None, compare=False, repr=False)  # the error whose text is in `error`

    @property
    def name(self) -> str:
        return self.log_dir if self.topic is None else f"{self.topic}-{self.partition}"


def exit_status(rows: Sequence[VerifyRow], request: Request | None = None) -> int:
    return 0 if all(row.status == "sound" for row in rows) else 1


_COLUMNS: tuple[Column[VerifyRow], ...] = (
    PARTITION,
    Column("status", lambda row: row.status + (" (in use)" if row.live else ""), is_number=False),
    Column("segments", lambda row: show.count(row.segments)),
    Column("log size", lambda row: show.human_bytes(row.bytes)),
    Column("records", lambda row: show.count(row.records)),
    Column("findings", lambda row: str(len(row.findings) or "")),
    TOOK,
)


def show_rows(rows: Sequence[VerifyRow], request: Request) -> None:
    """Print a line for each partition, then every finding with its place, grouped by remedy."""
    print_rows("Verified", _COLUMNS, rows)
    unread = [row for row in rows if row.error and (not row.findings or row.status == "refused")]
    print_paragraph([(row.name, row.status, row.error) for row in unread])
    by_remedy: dict[str, list[str]] = {}
    for row in rows:
        for finding in row.findings:
            by_remedy.setdefault(finding.remedy, []).append(f"{escape(row.name)} {finding_text(finding)}")
    for remedy, found in by_remedy.items():
        print_paragraph([], [*found, *([f"  Remedy: {escape(remedy)}"] if remedy else [])])
    if any(row.live for row in rows):
        print_line("\nIn use: a broker runs there. The end of an active segment was not checked.")
    bad = sum(row.status != "sound" for row in rows)
    size = show.human_bytes(sum(row.bytes for row in rows))
    verdict = f"{bad} with findings" if bad else "no problems found"
    verdict += " at the ends of segments (--only-ends)" if request.only_ends else ""
    count = sum(row.topic is not None for row in rows)
    print_line(f"\n{count} partition{'s' if count != 1 else ''}, {size}: {verdict}.")
    if text := next_step(rows, request):
        print_line(escape(text))


def next_step(rows: Sequence[VerifyRow], request: Request | None = None) -> str:
    losing = [row.name for row in rows if not row.live and any(finding.start_loses for finding in row.findings)]
    if not losing:
        return ""
    return f"Do not start the broker: it would lose or hide acknowledged records of {listed(losing, _NAMED)}."


def finding_text(finding: Finding) -> str:
    """Return `error: what (path, byte position n, offset m). A broker: what it does`, escaped for rich."""
    text = f"{finding.severity}: {finding.what} ({finding.place})"
    if finding.broker:
        text += f". A broker: {finding.broker}"
    if finding.start_loses:
        text += ". Starting the broker loses records"
    return escape(text)


VERIFY = Command(
    name="verify",
    also_called=("check", "fsck", "validate", "scan", "scrub", "test", "crc", "integrity"),
    help="Check every batch, offset, index entry and file name. Reads only; the exit status is 1 if anything is wrong.",
    request=Request,
    run="keytail.verify.driver:verify",
    examples=(
        f"keytail verify {BROKER}",
        "keytail verify --log-dirs /var/lib/kafka --topic 'orders|users'",
        f"keytail verify {BROKER} --only-ends",
    ),
    rows={
        "A row for each partition, and a row without topic and partition for each log dir with findings of its own": (
            VerifyRow
        )
    },
    statuses={
        "sound": Status("nothing is wrong", "done"),
        "suspect": Status("warnings only", "notable"),
        "damaged": Status("errors, which `findings` lists", "failed"),
        "failed": Status("the partition could not be read to the end", "failed"),
        "refused": Status("a file may not be read, or the files are not those that were listed", "not done"),
    },
    exits={1: "if anything is wrong"},
    show=show_rows,
    next_step=next_step,
    shows_next_step=True,
    exit_status=exit_status,
    output=RowsAndFiles,
    reads_records=True,
    reports_rows=True,
)
