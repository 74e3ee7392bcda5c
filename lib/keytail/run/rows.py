"""Defines the result row of plans and of commands that change partitions: how a partition is changed, or why it is not.

Rows are plain values; the modules in cli/ print them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Annotated

from keytail.errors import NO_ERROR, CorruptLog, ErrorText, KeytailError, Refused

# The status of a partition that a run did not begin, because of its deadline or a signal. The statuses "not-begun" and
# "skipped" are failures only for partitions that the user named.
NOT_BEGUN = "not-begun"
DONE = frozenset(
    {"compacted", "prepared", "repacked", "clean", "skipped", NOT_BEGUN, "would-compact", "would-repack"}
)
_LEFT = ("skipped", NOT_BEGUN)


class OfPartition:
    """A base class of rows that describe one partition."""

    __slots__ = ()
    topic: str
    partition: int

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True)
class RowOfPartition(OfPartition):
    """A row of a partition in a log dir, with the partition's status and the reason for this status."""

    topic: str
    partition: int
    log_dir: str
    status: str
    error: ErrorText = NO_ERROR


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of `plan --measure` or `--estimate` for a partition that is due. After an estimate, a true number is
    within its bounds (`..._low`, `..._high`) for at least 95 of 100 partitions, and the estimated number is, too. After
    a measurement, both bounds are equal to the number."""

    method: Annotated[str, "`measured`, or `estimated` from a sample"]
    reclaimed_bytes: Annotated[int, "`bytes_before` minus `bytes_after`"]
    tombstones_after: Annotated[int, "number of tombstones in the cleaned segments after the compaction"]
    prepare_s: Annotated[float, "seconds that `compact --prepare` is expected to take"]
    commit_s: Annotated[float, "seconds that the commit is expected to take"]
    bytes_after_low: Annotated[int, "lower bound of `bytes_after`"]
    bytes_after_high: Annotated[int, "upper bound of `bytes_after`"]
    records_after_low: Annotated[int, "lower bound of `records_after`"]
    records_after_high: Annotated[int, "upper bound of `records_after`"]
    tombstones_after_low: Annotated[int, "lower bound of `tombstones_after`"]
    tombstones_after_high: Annotated[int, "upper bound of `tombstones_after`"]


@dataclass(frozen=True, slots=True)
class Recorded(RowOfPartition):
    """The fields of a result that a ledger records. Each is a column of the ledger's table of partitions. The fields
    declared here are numbers; a number that was not counted is None, not 0. Sizes are those of `.log` files."""

    first_dirty_offset: Annotated[int | None, "offset at which the section to clean begins"] = None
    end_dirty_offset: Annotated[int | None, "offset before which the section to clean ends"] = None
    segments_before: int | None = None
    segments_after: int | None = None
    bytes_before: Annotated[int | None, "size of the `.log` files"] = None
    bytes_after: int | None = None
    records_before: Annotated[int | None, "number of records in the segments that were read"] = None
    records_after: int | None = None
    tombstones_removed: int | None = None
    markers_removed: int | None = None
    start_ms: int | None = None
    end_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ResultRow(Recorded):
    """The result of a command for one partition."""

    strategy: Annotated[str | None, "in a plan, if a round is due: the strategy of the compaction"] = None
    expected_s: Annotated[float | None, "in a plan, if a round is due: expected seconds of the compaction"] = None
    expected_scratch_bytes: Annotated[int | None, "in a plan, if a round is due: expected bytes of new files"] = None
    removal_limit_offset: Annotated[
        int | None, "with `--replica`: the offset from which tombstones and markers are retained"
    ] = None
    removal_limit_replica: Annotated[
        str | None, "with `--replica`: the replica that was cleaned only up to this offset"
    ] = None
    prepared: Annotated[
        str | None,
        "state of the preparation: `committed`, `not committed` or `discarded` (with the reason); in a plan "
        "`for --execute`",
    ] = None
    active_segment: Annotated[
        str | None, "with `--roll-active`: `rolled`, `would-roll` in a plan, `empty`, or `not rolled` with the reason"
    ] = None
    batches_before: Annotated[int | None, "with `--repack`: number of batches in the segments that were read"] = None
    batches_after: int | None = None
    measured: Annotated[Measured | None, "the result of `plan --measure` or `--estimate`"] = None
    problem: KeytailError | None = field(default=None, compare=False, repr=False)  # the error whose text is in `error`
    # False if the ledger lacks this row, which affects the exit status.
    recorded: bool = field(default=True, compare=False, repr=False)
    detail: object = field(default=None, compare=False, repr=False)  # facts that a command adds for its report
    shown: str | None = field(default=None, compare=False, repr=False)  # the text that tables show instead of `error`

    def __reduce__(self) -> tuple:
        """Return the class and the values of the fields for pickling: the default method of dataclasses takes twice as
        long, and hundreds of thousands of rows may come from other processes."""
        return ResultRow, _values_of(self)

    def unchanged(self, status: str, error: ErrorText) -> ResultRow:
        """Return this row with the given status and error, and with the segments, bytes and records from before the
        run as those after it."""
        return replace(
            self,
            status=status,
            error=error,
            segments_after=self.segments_before,
            bytes_after=self.bytes_before,
            records_after=self.records_before,
            shown=None,
        )

    def with_reason_after(self, begin: str) -> ResultRow:
        """Return this row with the text `begin` before its error."""
        return replace(self, error=begin + self.error, shown=begin + (self.shown or self.error))


RECORDED = tuple(field.name for field in fields(Recorded))
_values_of = attrgetter(*(field.name for field in fields(ResultRow)))


def status_of(problem: BaseException) -> str:
    if isinstance(problem, CorruptLog):
        return "corrupt"
    return "refused" if isinstance(problem, Refused) else "failed"


def exit_status(rows: Iterable[ResultRow], named: frozenset[str] = frozenset()) -> int:
    """Return 0 if every row is done, 3 if only some rows are done or the ledger lacks a row, 1 if no row is done.

    `named` are the names of partitions that the user gave. A named partition counts as not done if it was skipped or
    not begun.
    """
    rows = list(rows)
    done = [row.status in DONE and not (row.status in _LEFT and row.name in named) for row in rows]
    if all(done):
        return 0 if all(row.recorded for row in rows) else 3
    return 3 if any(done) else 1
