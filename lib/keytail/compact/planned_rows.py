"""Creates the rows of planned partitions, for a plan and for a run with --execute, which compacts only some of them."""

from __future__ import annotations

from dataclasses import replace

from keytail.compact.detail import Detail, detail_of_plan
from keytail.compact.expectation import Expected
from keytail.compact.planning import Planned
from keytail.compact.prepared.scratch import is_prepared
from keytail.compact.roll import NOT_COMPACTED, NOT_ROLLED, WOULD_ROLL
from keytail.errors import KeytailError, in_words, joined
from keytail.run.rows import ResultRow, status_of

# The value of the field `prepared` in a plan: a run with --execute commits or discards what was prepared.
FOR_EXECUTE = "for --execute"


def row_of(planned: Planned, *, executed: bool = False, expected: Expected | None = None) -> ResultRow:
    """Return the row of a planned partition, with the estimate `expected`, if given. `executed`: whether a checkpoint
    outside the log has been corrected; if False, the row states that --execute would correct the checkpoint."""
    decision = planned.decision
    selection = decision.selection
    segments, size_bytes = planned.segments_and_bytes
    row = ResultRow(
        topic=planned.facts.topic,
        partition=planned.facts.partition,
        log_dir=planned.facts.log_dir,
        status=decision.status,
        error=decision.error,
        first_dirty_offset=selection.first_dirty_offset if selection else None,
        end_dirty_offset=selection.first_uncleanable_offset if selection else None,
        segments_before=segments,
        bytes_before=size_bytes,
        strategy=expected.strategy if expected else None,
        expected_s=round(expected.seconds, 2) if expected else None,
        expected_scratch_bytes=expected.scratch_bytes if expected else None,
        problem=planned.problem,
    )
    if planned.wanted:
        return with_limits(row, planned)
    about_checkpoint = _about_checkpoint(planned, executed)
    row = row.unchanged(
        "corrupt" if planned.corrupt else decision.status, joined([decision.error, about_checkpoint])
    )
    if decision.status == "clean":
        return replace(row, shown=about_checkpoint)
    return replace(row, shown=f"{row.error}. {decision.remedy}") if decision.remedy else row


def row_of_plan(planned: Planned, map_memory_bytes: int, *, in_detail: bool = False) -> ResultRow:
    """Return the row of a partition in a plan; `in_detail`: with the details for a report."""
    row = with_active_segment(row_of(planned, expected=planned.expected(map_memory_bytes)), planned)
    if any(map(is_prepared, planned.facts.leftovers)):
        row = replace(row, prepared=FOR_EXECUTE)
    return with_detail(row, planned) if in_detail else row


def refused_row(row: ResultRow, problem: KeytailError) -> ResultRow:
    """Return the row of a partition that was due, but is refused because of `problem`."""
    refused = row.unchanged(status_of(problem), in_words(problem))
    if row.active_segment == WOULD_ROLL:
        refused = replace(refused, active_segment=NOT_ROLLED + NOT_COMPACTED)
    return replace(refused, strategy=None, expected_s=None, expected_scratch_bytes=None, problem=problem)


def with_detail(row: ResultRow, planned: Planned) -> ResultRow:
    """Return `row` with all details for a report: the details of the decision, and of a finished round if the row has
    them."""
    of_plan = detail_of_plan(planned.facts.segments, planned.decision.selection, planned.config)
    done = row.detail
    if not isinstance(done, Detail):
        return replace(row, detail=of_plan)
    decided = {name: getattr(of_plan, name) for name in ("clean_bytes", "dirty_bytes", "minimum_dirty_ratio")}
    return replace(row, detail=replace(done, **decided))


def with_limits(row: ResultRow, planned: Planned) -> ResultRow:
    """Return the `row` of a due partition with the removal limit of the other replicas and, unless it has an error, the
    rule that ends the section to clean.
    """
    selection, limit = planned.decision.selection, planned.removal_limit
    if selection is not None and not row.error:
        row = replace(row, shown=selection.held_back)
    if limit is None:
        return row
    return replace(row, removal_limit_offset=limit.offset, removal_limit_replica=limit.replica)


def with_preparation(row: ResultRow, planned: Planned) -> ResultRow:
    """Return `row` with the state of an earlier run's preparation of the partition."""
    if planned.discarded:
        return replace(row, prepared="discarded: " + planned.discarded)
    if planned.prepared is None:
        return row
    return replace(row, prepared="committed" if row.status == "compacted" else "not committed")


def with_active_segment(row: ResultRow, planned: Planned) -> ResultRow:
    """Return `row` with the field `active_segment`, if --roll-active was given; after a roll, the row already has this
    field."""
    if planned.roll is None or row.active_segment is not None:
        return row
    return replace(row, active_segment=planned.roll.text(row.status))


def _about_checkpoint(planned: Planned, executed: bool) -> str:
    if planned.repaired_checkpoint is None:
        return ""
    facts = planned.facts
    is_now, becomes = ("was", "it was set") if executed else ("is", "--execute sets it")
    return (
        f"the cleaner's checkpoint {facts.cleaner_checkpoint} {is_now} outside the log, which has offsets from "
        f"{facts.log_start_offset} to {facts.log_end_offset}: {becomes} to {planned.repaired_checkpoint}"
    )
