"""Declares the command `erase`: its flags, rows, statuses and next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Literal

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import BROKER, Command
from keytail.cli.configuration import Configuration, ConfigurationByFlags
from keytail.cli.output_options import RowsAndReport
from keytail.cli.selection import PartitionFilterFlags
from keytail.cli.statuses import FAILURES, Status, exit_status_of
from keytail.cli.table import (
    PARTITION,
    STATUS,
    TOOK,
    Column,
    notes_of,
    print_below,
    print_line,
    print_remarkable,
    total,
)
from keytail.ledger.of_run import LedgerByFlags, LedgerFlags
from keytail.run.rows import RowOfPartition

KeyFormat = Literal["utf8", "hex", "base64", "avro"]

KeysFile = Annotated[str, o.flag(
    "--keys-file FILE", "File with the keys to erase, one on each line. No key is printed or stored."
)]
KeyFormatFlag = Annotated[KeyFormat, o.flag(
    "--key-format",
    "Encoding of the keys in the file: as they are (utf8), hexadecimal, base64, or JSON (avro, see --key-schema).",
    KeyFormat,
)]
KeySchemaFlag = Annotated[list[str] | None, o.flag(
    "--key-schema [ID=]FILE",
    "With --key-format avro: file with the schema of the keys, and its id in the registry; without an id, keys have no "
    "prefix. Repeatable: each key is searched for in the encodings of all given schemas.",
)]


@dataclass(frozen=True)
class Request:
    """All parameters of `erase`, with the defaults of its flags."""

    partition_filter: PartitionFilterFlags
    configuration: ConfigurationByFlags = field(default_factory=Configuration)
    _: KW_ONLY
    keys_file: KeysFile
    key_format: KeyFormatFlag = "utf8"
    key_schema: KeySchemaFlag = None
    execute: o.Execute = False
    master: o.Master = None
    shared_storage: o.SharedStorage = False
    ledger: LedgerByFlags = field(default_factory=LedgerFlags)
    submitted: bool = False  # always False: `erase` has no job for spark-submit


@dataclass(frozen=True, slots=True)
class EraseRow(RowOfPartition):
    """The row of one partition. Sizes are those of its `.log` files; unknown values are None."""

    keys_found: Annotated[int | None, "number of keys of the file that the partition has"] = None
    records_erased: Annotated[int | None, "number of records that were erased or, in a dry run, would be"] = None
    records_before: Annotated[int | None, "number of all records of the partition"] = None
    records_after: int | None = None
    segments_rewritten: Annotated[int | None, "number of segments with a record to be erased"] = None
    segments_before: int | None = None
    segments_after: int | None = None
    bytes_before: Annotated[int | None, "size of the `.log` files"] = None
    bytes_after: int | None = None
    active_segment: Annotated[str, "`rolled` or `would-roll` if the active segment has a record to be erased"] = ""
    replicas: Annotated[
        tuple[int, ...] | None, "ids of the other brokers with a replica; `null` if the metadata log is not here"
    ] = None
    in_use: Annotated[bool, "a broker has the log dir open"] = False
    notes: Annotated[tuple[str, ...], "sentences about other changes"] = ()
    start_ms: int | None = None
    end_ms: int | None = None
    # A bit for each key of the set, in its order (packed uint8): 1 if the key was found.
    found_keys: bytes = field(default=b"", compare=False, repr=False)
    recorded: bool = field(default=True, compare=False, repr=False)  # False if the ledger lacks this row


def exit_status(rows: Sequence[EraseRow], request: Request | None = None) -> int:
    if status := exit_status_of(rows):
        return status
    return 0 if all(row.recorded for row in rows) else 3


_COLUMNS: tuple[Column[EraseRow], ...] = (
    PARTITION,
    STATUS,
    Column("keys", lambda row: show.count(row.keys_found)),
    Column("records", lambda row: show.change(show.count(row.records_before), show.count(row.records_after))),
    Column("erased", lambda row: show.count(row.records_erased)),
    Column("segments", lambda row: show.plain(row.segments_rewritten)),
    Column("log size", lambda row: show.change(show.human_bytes(row.bytes_before), show.human_bytes(row.bytes_after))),
    Column("replicas", lambda row: "?" if row.replicas is None else ",".join(map(str, row.replicas))),
    TOOK,
)


def keys_found(rows: Sequence[EraseRow]) -> int:
    """Return the number of keys of the file that were found in at least one of these partitions."""
    union = 0
    for row in rows:  # all rows have the same number of bits, or none
        union |= int.from_bytes(row.found_keys, "big")
    return union.bit_count()


def show_rows(rows: Sequence[EraseRow], request: Request) -> None:
    """Print a line for each partition, then the totals. If many partitions have status `absent`, they are only counted.
    """
    title = "Erased" if request.execute else "Dry run: nothing was changed"
    shown = print_remarkable(title, _COLUMNS, rows, lambda row: row.status == "absent" and not (row.error or row.notes))
    print_below(rows, notes_of(shown))
    done = [row for row in rows if row.status in ("erased", "would-erase")]
    text = total(rows)
    if done:
        verb = "Erased" if request.execute else "To erase"
        text += f" {verb}: {sum(row.records_erased or 0 for row in done):,} records, of {keys_found(done):,} keys."
    print_line(f"\n{text}")


def next_step(rows: Sequence[EraseRow], request: Request) -> str:
    if any(row.status == "would-erase" for row in rows):
        return (
            "This was a dry run. To erase the records, stop the broker, and run the same command with --execute. Do so "
            "on each broker with a replica."
        )
    if any(row.status in FAILURES for row in rows):
        return "Partitions with an error may still have records to be erased; the remedies are given above."
    if any(row.status == "erased" for row in rows):
        return (
            "Next: start the broker, and erase the same keys on the other brokers with a replica. Until all are done, "
            "do not add or rebuild a replica."
        )
    return ""


ERASE = Command(
    name="erase",
    also_called=("forget", "gdpr", "remove-keys", "delete-keys", "redact", "wipe"),
    help="Remove all records with given keys from every segment, whatever the topic's cleanup.policy.\n\n"
    "Without --execute the command only reports how many keys it found, and in how many records. Offsets of other "
    "records do not change. The keys must be erased on the brokers of all replicas.",
    request=Request,
    run="keytail.erase.driver:erase",
    examples=(
        f"keytail erase {BROKER} --topic-list orders --keys-file keys.txt",
        f"keytail erase {BROKER} --topic-list orders --keys-file keys.txt --execute",
        f"keytail erase {BROKER} --topic 'customer-.*' --keys-file keys.hex --key-format hex --execute",
    ),
    rows={"": EraseRow},
    statuses={
        "would-erase": Status("dry run: with --execute, records would be erased", "notable"),
        "erased": Status("all records with these keys were erased", "done"),
        "absent": Status("no record has any of the keys"),
        **FAILURES,
    },
    show=show_rows,
    next_step=next_step,
    exit_status=exit_status,
    output=RowsAndReport,
    reads_records=True,
    reports_rows=True,
)
