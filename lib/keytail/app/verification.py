"""The verb `verify`: look at every byte of the chosen partitions and list what a broker would stumble over.

Takes no lock and changes nothing. Needs no configuration: what is checked holds for every topic.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

from keytail.app import rows as show
from keytail.app.progress import Reporter
from keytail.app.selection import Choice, choose
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.partition import PartitionFacts, survey_partition
from keytail.spark.rows import status_of

# Below this the session would take longer to start than the reading.
SPARK_FROM_BYTES = 1 << 30


@dataclass(frozen=True)
class VerifyRow:
    """One partition.

    `status`: `sound`, `suspect` (warnings only), `damaged`, or `failed` where it could not be read to the end.
    """

    topic: str
    partition: int
    log_dir: str
    status: str
    error: str = ""
    segments: int = 0
    bytes: int = 0
    batches: int | None = None
    records: int | None = None
    findings: tuple[dict[str, Any], ...] = ()
    start_ms: int | None = None
    end_ms: int | None = None

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass
class _Run:
    facts: dict[str, PartitionFacts]
    reporter: Reporter
    rows: dict[str, VerifyRow] = field(default_factory=dict)

    def heard(self, task: Any, outcome: Any) -> None:
        row = _row(self.facts[task.path], outcome)
        if outcome.trace:
            print(outcome.trace, file=sys.stderr)
        self.rows[task.path] = row
        self.reporter.done(row.name, row.status, row.bytes, row.error)


def verify(
    choice: Choice, *, master: str | None = None, submitted: bool = False, fs: FileSystem = LOCAL
) -> list[VerifyRow]:
    """A row for each chosen partition. Starts Spark only where there is much to read, or it has been started."""
    from keytail.spark.session import end_jvm, local_session, submitted_session  # noqa: PLC0415 (--help and --version stay fast)
    from keytail.spark.verify import VerifyTask, verify_here, verify_on_spark  # noqa: PLC0415 (--help and --version stay fast)

    chosen = choose(fs, choice)
    facts = {entry.path: survey_partition(fs, log_dir, entry) for log_dir, entry in chosen.partitions}
    tasks = [
        VerifyTask(path, sum(s.log_bytes for s in fact.segments), live=not fact.clean_shutdown)
        for path, fact in facts.items()
    ]
    size = sum(task.size_bytes for task in tasks)
    with contextlib.ExitStack() as run, Reporter("verify", len(tasks), size) as reporter:
        state = _Run(facts, reporter)
        if submitted or (size >= SPARK_FROM_BYTES and len(tasks) > 1):
            reporter.note("starting Spark")
            spark = submitted_session() if submitted else local_session(master or "local[*]")
            if not submitted:
                run.callback(end_jvm)
            run.callback(spark.stop)
            verify_on_spark(spark, tasks, state.heard)
        else:
            verify_here(tasks, state.heard)
    return [state.rows[path] for path in facts]


def _row(facts: PartitionFacts, outcome: Any) -> VerifyRow:
    """Findings of the listing (names, checkpoints) first, then those of the bytes."""
    found = [{"severity": "error", "what": problem, "path": facts.path} for problem in facts.problems]
    error = ""
    status = "sound"
    if outcome.problem is not None:
        status, error = status_of(outcome.problem), str(outcome.problem)
        if status == "corrupt":
            status = "damaged"
    else:
        found += [asdict(finding) for finding in outcome.value]
    if status == "sound" and found:
        status = "damaged" if any(finding["severity"] == "error" for finding in found) else "suspect"
        error = f"{len(found)} finding{'s' if len(found) != 1 else ''}"
    return VerifyRow(
        topic=facts.topic,
        partition=facts.partition,
        log_dir=facts.log_dir,
        status=status,
        error=error,
        segments=len(facts.segments),
        bytes=sum(segment.log_bytes for segment in facts.segments),
        batches=outcome.value.counts.batches if outcome.value is not None else None,
        records=outcome.value.counts.records if outcome.value is not None else None,
        findings=tuple(found),
        start_ms=outcome.start_ms or None,
        end_ms=outcome.end_ms or None,
    )


def exit_status(rows: Sequence[VerifyRow]) -> int:
    return 0 if all(row.status == "sound" for row in rows) else 1


def print_table(rows: Sequence[VerifyRow]) -> None:
    """A line for each partition, then every finding with where it is and what to do."""
    console = show.output_console()
    table = Table(title="Verified", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("partition", overflow="fold")
    table.add_column("status")
    for name in ("segments", "log size", "records", "findings", "took"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            escape(row.name),
            show.styled(row.status),
            f"{row.segments:,}",
            show.human_bytes(row.bytes),
            "" if row.records is None else f"{row.records:,}",
            str(len(row.findings)) if row.findings else "",
            show.human_seconds(row.start_ms, row.end_ms),
        )
    console.print(table)
    for row in rows:
        if row.error and not row.findings:
            console.print(f"\n{escape(row.name)} {show.styled(row.status)}: {escape(row.error)}", soft_wrap=True)
        for finding in row.findings:
            console.print(f"\n{escape(row.name)} {finding_text(finding)}", soft_wrap=True)
    bad = sum(row.status != "sound" for row in rows)
    size = show.human_bytes(sum(row.bytes for row in rows))
    verdict = f"{bad} with findings" if bad else "nothing wrong found"
    console.print(f"\n{len(rows)} partition{'s' if len(rows) != 1 else ''}, {size}: {verdict}.")


def finding_text(finding: dict[str, Any]) -> str:
    """As `error: what (path, byte position n, offset m). A broker: what it does. Remedy`."""
    where = [str(finding["path"])] if finding.get("path") else []
    where += [f"{name} {finding[key]}" for name, key in (("byte position", "byte_position"), ("offset", "offset"))
              if finding.get(key) is not None]  # fmt: skip
    text = f"{finding['severity']}: {finding['what']}" + (f" ({', '.join(where)})" if where else "")
    if finding.get("broker"):
        text += f". A broker: {finding['broker']}"
    return escape(text + (f". {finding['remedy']}" if finding.get("remedy") else ""))
