"""Declares the command `dump`: flags with the names of Kafka's DumpLogSegments, and flags for ranges."""

from __future__ import annotations

from dataclasses import KW_ONLY, astuple, dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from keytail.cli import options as o
from keytail.cli.command import Command
from keytail.cli.flags import FromFlags
from keytail.cli.options import LONG_MAX, within
from keytail.dump.decoder_classes import ClassDecoder, decoder_of_class
from keytail.errors import UsageProblem
from keytail.format.decoders import DECODERS, Decoder
from keytail.log.fs import LOCAL
from keytail.log.owner import work_as_owner_of_files

if TYPE_CHECKING:
    import numpy as np

_what_flag = o.panel("Content of logs to print")
_indexes_flag = o.panel("Indexes")
_range_flag = o.panel("Range of each log to print")

Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE...", help="Files of a log dir, or partition directories.", show_default=False),
]
FileList = Annotated[list[str] | None, o.flag(
    "--files A,B", "Comma-separated list of files or directories to dump, as for Kafka's tool."
)]
PrintDataLog = Annotated[bool, _what_flag("--print-data-log", "Print records with their keys and payloads.")]
DeepIteration = Annotated[bool, _what_flag("--deep-iteration", "Print records without keys and payloads.")]
SkipRecordMetadata = Annotated[bool, _what_flag(
    "--skip-record-metadata", "Print only the record fields that --print-data-log adds, and no fields of control "
    "records."
)]
_DecoderFlags = make_dataclass("_DecoderFlags", [
    (decoder.flag.removeprefix("--").replace("-", "_"), Annotated[bool, _what_flag(
        decoder.flag, f"Decode keys and payloads of {decoder.topic}; implies --print-data-log."
    )], False)
    for decoder in DECODERS
])
KeyDecoderClass = Annotated[str | None, _what_flag(
    "--key-decoder-class CLASS",
    "Decode keys as this class does, given with its package, org.apache.kafka.tools.api: StringDecoder, DefaultDecoder "
    "(bytes, as base64), IntegerDecoder or LongDecoder; implies --print-data-log. Default: StringDecoder.",
)]
ValueDecoderClass = Annotated[str | None, _what_flag(
    "--value-decoder-class CLASS", "Decode payloads, with the same classes as --key-decoder-class."
)]
VerifyIndexOnly = Annotated[bool, _indexes_flag(
    "--verify-index-only", "Check index entries against the log without printing them."
)]
IndexSanityCheck = Annotated[bool, _indexes_flag(
    "--index-sanity-check", "Check only the index itself: its size and its last entry."
)]
MaxMessageSize = Annotated[int | None, _indexes_flag(
    "--max-message-size BYTES",
    "Report an offset index entry whose batch is larger than BYTES. Kafka's tool ends with an exception instead, by "
    "default above 5242880 bytes. Default: no limit.",
    parser=within(1, 2**31 - 1),
)]
MaxBytes = Annotated[int | None, _range_flag(
    "--max-bytes BYTES",
    "Print only complete batches within the first BYTES bytes of each log. Default: all batches.",
    parser=within(0, LONG_MAX),
)]
FromOffset = Annotated[int | None, _range_flag(
    "--from-offset N", "Print only records from this offset on.", parser=within(0, LONG_MAX)
)]
ToOffset = Annotated[int | None, _range_flag(
    "--to-offset N", "Print only records below this offset.", parser=within(0, LONG_MAX)
)]
FromPosition = Annotated[int | None, _range_flag(
    "--from-position BYTE", "Print only batches that begin at or after this byte position.", parser=within(0, LONG_MAX)
)]
ToPosition = Annotated[int | None, _range_flag(
    "--to-position BYTE", "Print only batches that begin before this byte position.", parser=within(0, LONG_MAX)
)]
Format = Literal["table", "json"]
OutputFlag = Annotated[Format, o.flag(
    "--output",
    "Output format. table: the lines of Kafka's tool. json: one object per line, including findings.",
    Format,
)]
Escape = Annotated[bool | None, o.flag(
    "--escape/--no-escape",
    "Write control characters of the data as text such as \\x1b. Default: only on a terminal, which would interpret "
    "such characters; in files and pipes the bytes are those of Kafka's tool.",
    show_default=False,
)]


@dataclass(frozen=True)
class IndexChecks:
    """The requested checks of an index. By default all checks are made, and the entries are printed."""

    verify_only: VerifyIndexOnly = False
    sanity_only: IndexSanityCheck = False
    max_message_size_bytes: MaxMessageSize = None


@dataclass(frozen=True)
class Range:
    """The batches with offsets in [from_offset, to_offset) that begin at a byte in [from_position, to_position). A
    bound of None has no effect. Raises UsageProblem for an empty range or a negative bound."""

    from_offset: FromOffset = None
    to_offset: ToOffset = None
    from_position: FromPosition = None
    to_position: ToPosition = None

    def __post_init__(self) -> None:
        for name, first, last in (
            ("offset", self.from_offset, self.to_offset),
            ("position", self.from_position, self.to_position),
        ):
            if min(first or 0, last or 0) < 0:
                raise UsageProblem(
                    f"--from-{name} and --to-{name} must not be negative",
                    remedy=f"Give the first {name} of the range, and the first {name} after the range, from 0 on",
                    slug="negative-range-bound",
                )
            if first is not None and last is not None and last <= first:
                raise UsageProblem(
                    f"--to-{name} {last} is not above --from-{name} {first}",
                    remedy=f"Set --to-{name} to the first {name} after the range",
                    slug="empty-range",
                )

    @property
    def is_all(self) -> bool:
        return self == Range()

    def rows(self, batches: np.ndarray) -> slice:
        """Return the slice of rows (BATCH_TABLE, in the order of the file) that are in the range. The slice ends before
        the end of `batches` only if the range ends there."""
        import numpy as np  # noqa: PLC0415 (--help needs no log code)

        first, stop = 0, len(batches)
        last_offsets = np.maximum.accumulate(batches["last_offset"])
        if self.from_offset is not None:
            first = int(np.searchsorted(last_offsets, self.from_offset))
        if self.from_position is not None:
            first = max(first, int(np.searchsorted(batches["position"], self.from_position)))
        if self.to_position is not None:
            stop = int(np.searchsorted(batches["position"], self.to_position))
        if self.to_offset is not None:
            beyond = np.flatnonzero(batches["base_offset"] >= self.to_offset)
            # An old message has the offset of its last record; its other records may be below the limit.
            beyond = beyond[batches["magic"][beyond] >= 2]
            stop = min(stop, int(beyond[0]) if len(beyond) else stop)
        return slice(min(first, stop), stop)

    def records(self, offsets: np.ndarray) -> np.ndarray | None:
        """Return for each offset whether it is in the range (bool array); None if the range has no offset bounds."""
        if self.from_offset is None and self.to_offset is None:
            return None
        import numpy as np  # noqa: PLC0415 (--help needs no log code)

        low = self.from_offset if self.from_offset is not None else -(2**63)
        high = self.to_offset if self.to_offset is not None else 2**63 - 1
        return np.asarray((offsets >= low) & (offsets < high))


def _paths(files: Files = None, file_list: FileList = None) -> tuple[str, ...]:
    """Return the files to dump. If the process was started as root, it works as their owner from then on."""
    paths = (*(files or ()), *o.comma_lists(file_list))
    work_as_owner_of_files(LOCAL, paths)
    return paths


def _decoder(
    flags: Annotated[Any, FromFlags(_DecoderFlags)],
    key_decoder_class: KeyDecoderClass = None,
    value_decoder_class: ValueDecoderClass = None,
) -> Decoder | ClassDecoder | None:
    classes = {"--key-decoder-class": key_decoder_class, "--value-decoder-class": value_decoder_class}
    of_topics = [decoder for decoder, is_given in zip(DECODERS, astuple(flags), strict=True) if is_given]
    of_classes = [flag for flag, name in classes.items() if name is not None]
    given = [*(decoder.flag for decoder in of_topics), *of_classes]
    if len(given) > max(1, len(of_classes)):
        raise UsageProblem(
            f"{given[0]} and {given[1]} cannot be combined",
            remedy="Dump the two topics separately" if len(of_topics) > 1 else "Give one of them",
            slug="conflicting-flags",
        )
    if of_topics:
        return of_topics[0]
    if not of_classes:
        return None
    key, payload = (None if name is None else decoder_of_class(flag, name) for flag, name in classes.items())
    return ClassDecoder(key, payload)


@dataclass(frozen=True)
class Request:
    """All parameters of `dump`, with the defaults of its flags."""

    paths: Annotated[tuple[str, ...], FromFlags(_paths)]
    _: KW_ONLY
    print_data_log: PrintDataLog = False
    deep_iteration: DeepIteration = False
    skip_record_metadata: SkipRecordMetadata = False
    decoder: Annotated[Decoder | ClassDecoder | None, FromFlags(_decoder)] = None
    checks: Annotated[IndexChecks, FromFlags(IndexChecks)] = field(default_factory=IndexChecks)
    max_bytes: MaxBytes = None
    wanted: Annotated[Range, FromFlags(Range)] = field(default_factory=Range)
    escape: Escape = None
    output: OutputFlag = "table"


DUMP = Command(
    name="dump",
    also_called=("cat", "print", "read", "decode", "view", "dump-log", "kafka-dump-log", "records"),
    help="Print the contents of segments, indexes, snapshots and checkpoints, as kafka-dump-log.sh does. Reads only."
    "\n\n"
    "--output json prints an object per line. The exit status is 1 if a checksum, an index entry or a record is wrong.",
    request=Request,
    run="keytail.dump.driver:run",
    examples=(
        "keytail dump --print-data-log --from-offset 7 --to-offset 9 /var/lib/kafka/orders-0/00000000000000000000.log",
        "keytail dump --output json --offsets-decoder /var/lib/kafka/__consumer_offsets-0",
    ),
    output=None,
    reads_records=True,
)
