"""Declares the command `salvage`: flags, rows, statuses, next step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import Command
from keytail.cli.configuration import Configuration, WithoutAssertions
from keytail.cli.selection import PartitionFilterFlags
from keytail.cli.statuses import Status, exit_status_of
from keytail.cli.table import PARTITION, STATUS, TOOK, Column, about_each, print_below, print_line, print_rows, total
from keytail.run.rows import RowOfPartition

_MAX_LINES = 40  # maximum number of lines that are printed below the table for one partition

To = Annotated[str, o.flag(
    "--to DIR", "Directory for the new partition directories: empty or new, and outside of every log dir."
)]


@dataclass(frozen=True)
class Request:
    """All parameters of `salvage`, with the defaults of its flags."""

    partition_filter: PartitionFilterFlags
    to: To
    configuration: WithoutAssertions = field(default_factory=Configuration)
    _: KW_ONLY
    execute: o.Execute = False


@dataclass(frozen=True)
class Loss:
    """Data that is or may be missing in the result: bytes `start_byte` to below `end_byte` of `file` (0 and 0 if no
    bytes are known). Its offsets are from `first_offset` to below `end_offset`, but not each of them had a record."""

    kind: Annotated[
        str,
        "`damaged` (bytes that are not an intact batch), `missing-segment` (a segment has index files, but no log), "
        "`tail` "
        "and `head` (according to checkpoints the log had records that are not in the files), `gap` (between two "
        "segments), `repeated` (a batch that is also elsewhere), `zeros` (only zero bytes)",
    ]
    file: Annotated[str, "name of the file"]
    start_byte: Annotated[int, "byte position in the file at which the loss begins"]
    end_byte: Annotated[int, "byte position at which the loss ends, exclusive"]
    first_offset: Annotated[int, "first offset that may be lost"]
    end_offset: Annotated[int | None, "end of the offsets that may be lost, exclusive; `null` if unknown"]
    certain: Annotated[bool, "whether it is certain that data is lost"]
    why: str


@dataclass(frozen=True)
class OpenTransaction:
    """A transaction that is open where a loss begins (`at_offset`), or at the end of the log (None)."""

    producer_id: Annotated[int, "id of the producer"]
    producer_epoch: Annotated[int, "epoch of the producer"]
    first_offset: Annotated[int, "first offset of the transaction"]
    at_offset: Annotated[int | None, "offset of the loss at which the transaction is open; `null` for the end of the "
    "log"]


@dataclass(frozen=True)
class SalvageRow(RowOfPartition):
    """One partition."""

    to: Annotated[str, "the new directory"] = ""
    segments: int = 0
    segments_kept: Annotated[int, "number of segments in the new directory"] = 0
    bytes: Annotated[int, "size of the `.log` files"] = 0
    bytes_kept: Annotated[int, "size of the `.log` files in the new directory"] = 0
    batches: Annotated[int, "number of batches in the new directory"] = 0
    records: Annotated[int, "number of records in the new directory"] = 0
    log_start_offset: int | None = None
    last_batch_end: Annotated[int | None, "the offset after the last intact batch"] = None
    log_end_offset: Annotated[int | None, "log end offset of the new log"] = None
    gaps: Annotated[int, "number of gaps between adjacent intact batches"] = 0
    gap_offsets: Annotated[int, "number of offsets in the gaps"] = 0
    left_out: Annotated[int, "number of batches that were not saved although their checksum is correct"] = 0
    unread_files: Annotated[
        int,
        "number of files that may have readable batches and were not read to their end: a `.log` that is not a regular "
        "file, or bytes that too often look like batches but are not",
    ] = 0
    losses: Annotated[tuple[Loss, ...], "what is not saved"] = ()
    transactions: Annotated[tuple[OpenTransaction, ...], "transactions that are open at a loss or at the log end"] = ()
    notes: tuple[str, ...] = ()
    start_ms: int | None = None
    end_ms: int | None = None

    @property
    def leaves_readable(self) -> bool:
        """Whether batches that are or may be readable are not saved."""
        return self.left_out + self.unread_files > 0

    @property
    def is_whole(self) -> bool:
        return not any(loss.certain for loss in self.losses)


def exit_status(rows: Sequence[SalvageRow], request: Request | None = None) -> int:
    """Return 0 if everything readable was or would be written, and a dry run found no losses; 1 if a dry run found
    losses or batches to leave out, or all partitions failed; 3 if some partitions failed, or batches that are or may be
    readable were left out."""
    if status := exit_status_of(rows):
        return status
    if any(row.status == "would-salvage" and (row.leaves_readable or not row.is_whole) for row in rows):
        return 1
    return 3 if any(row.status == "salvaged" and row.leaves_readable for row in rows) else 0


def _if_known(row: SalvageRow, text: str) -> str:
    return "" if row.log_end_offset is None else text


_COLUMNS: tuple[Column[SalvageRow], ...] = (
    PARTITION,
    STATUS,
    Column("segments", lambda row: _if_known(row, show.change(str(row.segments), str(row.segments_kept)))),
    Column(
        "log size",
        lambda row: _if_known(row, show.change(show.human_bytes(row.bytes), show.human_bytes(row.bytes_kept))),
    ),
    Column("batches", lambda row: _if_known(row, f"{row.batches:,}")),
    Column("records", lambda row: _if_known(row, f"{row.records:,}")),
    Column("offsets", lambda row: _if_known(row, f"{row.log_start_offset}..{row.log_end_offset}")),
    Column("losses", lambda row: _if_known(row, str(sum(loss.certain for loss in row.losses)))),
    TOOK,
)


def show_rows(rows: Sequence[SalvageRow], request: Request) -> None:
    """Print a line for each partition, then the losses of each partition, then totals."""
    print_rows("Salvage" if request.execute else "Dry run: nothing was written", _COLUMNS, rows)
    print_below(rows, about_each((row.name, line) for row in rows for line in _lines(row)))
    print_line(f"\n{total(rows)}")


def _lines(row: SalvageRow) -> list[str]:
    lines = [*map(_loss_line, row.losses), *map(_transaction_line, row.transactions), *row.notes, *_about_end(row)]
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"{len(lines) - _MAX_LINES} more lines; --output json shows all lines"]
    return lines


def _about_end(row: SalvageRow) -> list[str]:
    lines = []
    if row.gaps:
        lines.append(
            f"{row.gap_offsets:,} offsets are missing in {row.gaps:,} gaps between intact batches, as after compaction"
        )
    if row.last_batch_end is not None and row.last_batch_end != row.log_end_offset:
        lines.append(
            f"the last intact batch ends before offset {row.last_batch_end}; an empty segment keeps the log end "
            f"offset at {row.log_end_offset}, so that no offset is assigned twice"
        )
    return lines


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


def next_step(rows: Sequence[SalvageRow], request: Request) -> str:
    """Return what the operator should do next; SALVAGE.md has the reasons."""
    done = [row for row in rows if row.status == "salvaged"]
    if not request.execute:
        return (
            "This was a dry run: nothing was written. If another replica is intact, use that replica. To write the "
            "intact batches of this replica, run the same command with --execute."
        )
    if not done:
        return ""
    lines = [
        "What to do now. If another replica is intact, move this partition's directory out of the log dir: the "
        "broker fetches the partition again when it starts. If no replica is intact, stop the broker, then:"
    ]
    damaged = [os.path.join(row.log_dir, row.name) for row in done]
    if len(done) == 1:
        lines += [
            f"  1. move {damaged[0]} out of its log dir, and keep it",
            f"  2. move {done[0].to} to {damaged[0]}, with owner and mode as before",
        ]
    else:
        lines.append("  1. move these directories out of their log dirs, and keep them:")
        lines += [f"    {old}" for old in damaged]
        lines.append("  2. move the new directories to the old paths, with owner and mode as before:")
        lines += [f"    {row.to} to {old}" for row, old in zip(done, damaged, strict=True)]
    lines += [
        "  3. do not change the checkpoints of the log dir: log start offset and log end offset are as before, unless "
        "a line above reports a change",
        "  4. run keytail verify, then start the broker",
    ]
    if any(item.at_offset is None for row in done for item in row.transactions):
        lines.append(
            "  5. end the transactions that are open at the end of a log and whose producer no longer exists: "
            "kafka-transactions.sh abort --topic T --partition P --start-offset FIRST. read_committed consumers cannot "
            "read beyond an open transaction"
        )
    return "\n".join(lines)


SALVAGE = Command(
    name="salvage",
    also_called=("repair", "rescue", "save", "recover", "recovery", "fix"),
    help="Save the intact batches of damaged partitions to another directory, and list what is lost.\n\n"
    "Use this command if nothing else can repair a partition, and no other replica has the data. The log dirs are "
    "only read. Without --execute the command lists what would be lost, and the exit status is 1 if anything would be "
    "lost.",
    request=Request,
    run="keytail.salvage.driver:salvage",
    examples=(
        "keytail salvage --log-dirs /var/lib/kafka --partitions orders-0 --to /backup/saved",
        "keytail salvage --log-dirs /var/lib/kafka --partitions orders-0 --to /backup/saved --execute",
    ),
    rows={"": SalvageRow},
    statuses={
        "would-salvage": Status("dry run: with --execute, the intact batches would be saved", "notable"),
        "salvaged": Status("the intact batches are in the new directory", "done"),
        "refused": Status("keytail does not act on this state; nothing was written", "not done"),
        "failed": Status("another error occurred; run again", "failed"),
    },
    exits={
        1: "also if a dry run found losses",
        3: "also if something was written and `left_out` or `unread_files` is not 0",
    },
    show=show_rows,
    next_step=next_step,
    exit_status=exit_status,
    reads_records=True,
    reports_rows=True,
)
