"""The command `salvage`: writes the good batches of damaged partitions to another directory, and lists the losses.

The source is only read, and no lock is taken, since that would create a file in the log dir. If a broker holds the
lock, the partition is refused. Without `execute` nothing is written anywhere.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from keytail.acting_user import as_caller
from keytail.cli import rows as show
from keytail.cli.configuration import Configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.outside import refuse_unwritable
from keytail.cli.progress import Reporter
from keytail.cli.selection import Choice, choose
from keytail.errors import KeytailError, Refused, UsageProblem, in_words
from keytail.format import names
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import is_held
from keytail.log.partition import LogDirFacts, PartitionEntry
from keytail.run.rows import status_of
from keytail.run.watching import telling

if TYPE_CHECKING:
    from keytail.salvage.partition import Loss, OpenTransaction, Salvage

_BAD = ("refused", "corrupt", "failed")
_MOST_LINES = 40


@dataclass(frozen=True)
class Request:
    """All parameters of `salvage`."""

    choice: Choice
    to: str
    configuration: Configuration = field(default_factory=Configuration)
    execute: bool = False


@dataclass(frozen=True)
class SalvageRow:
    """One partition. `status`: `would-salvage`, `salvaged`, `refused`, `failed`.

    `losses` and `transactions` are those of salvage/partition.py; `to` is the directory that was created.
    `last_batch_end` is the offset after the last good batch, `log_end_offset` the end of the new log.
    """

    topic: str
    partition: int
    log_dir: str
    status: str
    error: str = ""
    to: str = ""
    segments: int = 0
    segments_kept: int = 0
    bytes: int = 0
    bytes_kept: int = 0
    batches: int = 0
    records: int = 0
    log_start_offset: int | None = None
    last_batch_end: int | None = None
    log_end_offset: int | None = None
    gaps: int = 0
    gap_offsets: int = 0
    left_out: int = 0
    losses: tuple[Loss, ...] = ()
    transactions: tuple[OpenTransaction, ...] = ()
    notes: tuple[str, ...] = ()
    start_ms: int | None = None
    end_ms: int | None = None

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"

    @property
    def is_whole(self) -> bool:
        return not any(loss.certain for loss in self.losses)


def salvage(request: Request, fs: FileSystem = LOCAL) -> list[SalvageRow]:
    """Salvage, or only scan without `execute`. Returns a row for each chosen partition, by log dir."""
    chosen = choose(fs, request.choice)
    with as_caller():
        target = os.path.realpath(request.to)
    _check_target(fs, target, request.choice.log_dirs)
    configuration = with_metadata(fs, request.choice.log_dirs, request.configuration)
    if request.execute and chosen.partitions and not fs.exists(target):
        fs.mkdir(target, fs.stat(os.path.dirname(target)))
        fs.fsync_dir(os.path.dirname(target))
    run_id = secrets.token_hex(4)
    rows = []
    sizes = [(os.path.basename(entry.path), _log_bytes(fs, entry.path)) for _, entry in chosen.partitions]
    with Reporter("salvage", sizes) as reporter:
        reporter.watch()
        for log_dir, entry in chosen.partitions:
            start_ms = time.time_ns() // 1_000_000
            try:
                with telling(entry.path, "here", "salvage"):
                    row = _one(fs, log_dir, entry, configuration, request, target, run_id, start_ms)
            except (KeytailError, OSError, MemoryError) as problem:
                status = status_of(problem) if isinstance(problem, KeytailError) else "failed"
                row = SalvageRow(
                    entry.topic, entry.partition, entry.log_dir, status, in_words(problem), start_ms=start_ms
                )
            rows.append(row)
            reporter.done(row.name, row.status, row.bytes, row.error)
    return rows


def _log_bytes(fs: FileSystem, path: str) -> int:
    try:
        return sum(size for _, size, _ in fs.scan_sizes(path, names.LOG).sized)
    except OSError:  # its row has the reason
        return 0


def _check_target(fs: FileSystem, target: str, log_dirs: Sequence[str]) -> None:
    for log_dir in map(os.path.realpath, log_dirs):
        if os.path.commonpath([target, log_dir]) in (target, log_dir):
            raise UsageProblem(
                "--to is inside a log dir or contains one",
                path=target,
                remedy="Give a directory elsewhere: a broker does not start on a log dir that contains other "
                "directories",
                slug="overlaps-log-dir",
            )
    refuse_unwritable(target, "--to")
    if fs.exists(target):
        if not fs.stat(target).is_dir:
            raise UsageProblem(
                "--to is not a directory", path=target, remedy="Give another --to", slug="not-a-directory"
            )
        if fs.scan(target):
            raise UsageProblem(
                "--to is not empty",
                path=target,
                remedy="Give an empty directory, or a new name",
                slug="directory-not-empty",
            )
    elif not fs.exists(os.path.dirname(target)):
        raise UsageProblem(
            "the parent directory of --to does not exist",
            path=os.path.dirname(target),
            remedy="Create it, or give another --to",
            slug="no-parent-directory",
        )


def _one(
    fs: FileSystem,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    configuration: Configuration,
    request: Request,
    target: str,
    run_id: str,
    start_ms: int,
) -> SalvageRow:
    from keytail.salvage.partition import Settings, salvage_partition  # noqa: PLC0415 (brings in the kernels)
    from keytail.salvage.write import NewPartition  # noqa: PLC0415 (brings in the kernels)

    if is_held(log_dir.path, fs):
        raise Refused(
            "the log dir is in use, or its lock cannot be checked",
            path=log_dir.path,
            remedy="Stop the broker, or salvage from a copy of the log dir that was made while it was stopped",
            slug="log-dir-in-use",
        )
    values = configuration.of(entry.topic).values()
    settings = Settings(
        index_interval_bytes=int(values["index.interval.bytes"]),  # type: ignore[arg-type]
        segment_index_bytes=int(values["segment.index.bytes"]),  # type: ignore[arg-type]
    )
    new = None
    if request.execute:
        new = NewPartition(fs, target, entry, run_id=run_id, topic_id=_topic_id(configuration, entry.topic))
    found = salvage_partition(fs, log_dir, entry, settings, new)
    return _row(entry, found, start_ms)


def _topic_id(configuration: Configuration, topic: str) -> str | None:
    cluster = configuration.cluster
    if cluster is None or cluster.metadata is None or topic not in cluster.metadata.topics:
        return None
    return cluster.metadata.topics[topic].topic_id


def _row(entry: PartitionEntry, found: Salvage, start_ms: int) -> SalvageRow:
    known: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in vars(found).items()
    }
    status = "salvaged" if found.to else "would-salvage"
    times: dict[str, Any] = {"start_ms": start_ms, "end_ms": time.time_ns() // 1_000_000}
    return SalvageRow(entry.topic, entry.partition, entry.log_dir, status, **known, **times)


def exit_status(rows: Sequence[SalvageRow]) -> int:
    """Return 0 if everything readable was or would be written, and a dry run found no losses; 1 if a dry run found
    losses or batches to leave out, or all partitions failed; 3 if some failed, or readable batches were left out."""
    bad = [row for row in rows if row.status in _BAD]
    if bad:
        return 3 if len(bad) < len(rows) else 1
    if any(row.status == "would-salvage" and (row.left_out or not row.is_whole) for row in rows):
        return 1
    return 3 if any(row.status == "salvaged" and row.left_out for row in rows) else 0


def print_table(rows: Sequence[SalvageRow], title: str) -> None:
    """Print a line for each partition, then the losses of each, then totals."""
    console = show.output_console()
    names = ("partition", "status", "segments", "log size", "batches", "records", "offsets", "losses", "took")
    show.print_lines(title, names, [_cells(row) for row in rows], start=2)
    show.print_reasons([(row.name, row.status, row.error) for row in rows if row.error])
    for row in rows:
        lines = [*map(_loss_line, row.losses), *map(_transaction_line, row.transactions), *row.notes]
        if row.gaps:
            lines.append(
                f"{row.gap_offsets:,} offsets missing in {row.gaps:,} gaps between good batches, as after compaction"
            )
        if row.last_batch_end is not None and row.last_batch_end != row.log_end_offset:
            lines.append(
                f"the last good batch ends before offset {row.last_batch_end}; an empty segment keeps the log end "
                f"offset at {row.log_end_offset}, so that no offset is assigned twice"
            )
        for line in lines[:_MOST_LINES]:
            console.print(f"{escape(row.name)}: {escape(line)}", soft_wrap=True)
        if len(lines) > _MOST_LINES:
            console.print(f"{escape(row.name)}: {len(lines) - _MOST_LINES} more lines; --output json shows all")
    counts = Counter(row.status for row in rows)
    found = ", ".join(f"{number} {show.styled(status)}" for status, number in counts.most_common())
    console.print(f"\n{len(rows)} partition{'s' if len(rows) != 1 else ''}: {found or 'none'}.", soft_wrap=True)


def _cells(row: SalvageRow) -> tuple[str, ...]:
    known: tuple[str, ...] = ("",) * 6
    if row.log_end_offset is not None:
        known = (
            show.change(str(row.segments), str(row.segments_kept)),
            show.change(show.human_bytes(row.bytes), show.human_bytes(row.bytes_kept)),
            f"{row.batches:,}",
            f"{row.records:,}",
            f"{row.log_start_offset}..{row.log_end_offset}",
            str(sum(loss.certain for loss in row.losses)),
        )
    return row.name, row.status, *known, show.human_seconds(row.start_ms, row.end_ms)


def _loss_line(loss: Loss) -> str:
    where = f", {loss.file} bytes {loss.start_byte} to {loss.end_byte - 1}" if loss.end_byte else ""
    if not where and loss.file:
        where = f", {loss.file}"
    offsets = "no offset"
    if loss.end_offset is None:
        offsets = f"offsets from {loss.first_offset} on"
    elif loss.end_offset > loss.first_offset:
        offsets = f"offsets {loss.first_offset} to {loss.end_offset - 1}"
    word = "lost" if loss.certain else "not known to be lost"
    return f"{word}: {offsets} ({loss.kind}{where}: {loss.why})"


def _transaction_line(open_one: OpenTransaction) -> str:
    where = "at the end of the log" if open_one.at_offset is None else f"where offset {open_one.at_offset} is lost"
    return (
        f"transaction of producer {open_one.producer_id}, epoch {open_one.producer_epoch}, from offset "
        f"{open_one.first_offset} on, is open {where}"
    )


def next_steps(rows: Sequence[SalvageRow], execute: bool) -> str:
    """Return what the operator should do next; SALVAGE.md has the reasons."""
    done = [row for row in rows if row.status == "salvaged"]
    if not execute:
        return "This was a dry run: nothing was written. If another replica is intact, use that one. To write the "\
            "good batches of this one, run the same command with --execute."
    if not done:
        return ""
    lines = [
        "What to do now. If another replica is intact, use that one: delete this partition's directory and let the "
        "broker fetch it again. Otherwise, with the broker stopped:"
    ]
    for row in done:
        lines.append(f"  1. move {os.path.join(row.log_dir, row.name)} out of its log dir, and keep it")
        lines.append(f"  2. move {row.to} to {os.path.join(row.log_dir, row.name)}, with owner and mode as before")
    lines += [
        "  3. do not change the checkpoints of the log dir: log start and log end are as before, unless a line above "
        "reports a change",
        "  4. run keytail verify, then start the broker",
    ]
    if any(one.at_offset is None for row in done for one in row.transactions):
        lines.append(
            "  5. end the transactions that are open at the end of a log and whose producer no longer exists; "
            "otherwise no read_committed consumer gets past them: kafka-transactions.sh abort --topic T --partition P "
            "--start-offset FIRST"
        )
    return "\n".join(lines)
