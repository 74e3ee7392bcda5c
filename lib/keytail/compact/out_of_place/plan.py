"""Decides what a compaction out of place does with a partition: clean, copy, keep in the target, or leave out.

The source is read in the same way as for any plan. The target is not read: its contents are passed in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from keytail.cli.configuration import Configuration
from keytail.compact.out_of_place.output_record import Entries, OutputRecord, SeenFile, seen_files
from keytail.compact.out_of_place.output_root import entries_of
from keytail.compact.out_of_place.output_tree import TargetEntry
from keytail.compact.out_of_place.partition import as_written
from keytail.compact.out_of_place.placing import Intended
from keytail.compact.out_of_place.target import Target
from keytail.compact.planned_rows import row_of, row_of_plan, with_detail, with_limits
from keytail.compact.planning import Planned, plan_partition_of
from keytail.compact.rules import Rules, TaskSettings
from keytail.compact.steps import cleaning_tasks
from keytail.compact.task import CleaningTask, OutOfPlace
from keytail.config.compaction import CompactionConfig
from keytail.durations import time_text
from keytail.errors import EXPLAINED, ErrorText, KeytailError, Refused, in_words, joined
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.partition import LogDirFacts, PartitionEntry
from keytail.run.rows import ResultRow

Action = Literal["clean", "copy", "keep", "leave"]
Known = Mapping[str, Mapping[str, TargetEntry]]


@dataclass(frozen=True)
class PlannedPartition:
    """The decision for one partition. `row` is the row of a plan, or has the reason why the partition is left out;
    `record` is the target's record of a partition that is kept there. `planned` is None for the metadata log and for a
    partition that is left out before it is planned.
    """

    log_dir: str
    path: str
    topic: str
    partition: int
    action: Action
    row: ResultRow
    source_files: tuple[SeenFile, ...] = ()
    entries: Entries | None = None
    planned: Planned | None = None
    record: OutputRecord | None = None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def size_bytes(self) -> int:
        return self.row.bytes_before or 0

    def planned_row(self, map_memory_bytes: int, *, in_detail: bool = False) -> ResultRow:
        if self.action == "copy":
            row = self.row.with_reason_after("would be copied unchanged: ")
        elif self.action == "clean" and self.planned is not None:
            row = row_of_plan(self.planned, map_memory_bytes)
        else:
            row = self.row
        return self.detailed(row) if in_detail else row

    def detailed(self, row: ResultRow) -> ResultRow:
        return with_detail(row, self.planned) if self.planned is not None else row

    def with_limits(self, row: ResultRow) -> ResultRow:
        return with_limits(row, self.planned) if self.planned is not None else row

    @property
    def is_unhosted(self) -> bool:
        """Whether the partition is to be cleaned and other replicas were named, but none of them hosts it."""
        held = self.planned.removal_limit if self.planned is not None and self.action == "clean" else None
        return held is not None and held.replica is None

    def task(self, settings: TaskSettings, rules: Rules, path: str, run_id: str, *, is_local: bool) -> CleaningTask:
        place = OutOfPlace(path, self.source_files, is_local=is_local, only_copies=self.action == "copy")
        if self.action == "clean" and self.planned is not None:
            [task] = cleaning_tasks([self.planned], rules, settings, run_id)
            return replace(task, out_of_place=place)
        copied: dict[str, Any] = {
            "first_dirty_offset": 0,
            "first_uncleanable_offset": 0,
            "now_ms": rules.now_ms,
            "config": CompactionConfig(),
            "run_id": run_id,
            "throttle_bytes_per_s": settings.throttle_bytes_per_s,
            "out_of_place": place,
        }
        if self.planned is None:
            return CleaningTask(self.topic, self.partition, self.path, (), (), 0, 0, **copied)
        return CleaningTask.of(self.planned.facts, **copied)

    def intended(self, target: Target) -> Intended:
        notes = []
        repaired = None
        if self.planned is not None:
            repaired = self.planned.repaired_checkpoint
            if self.action == "clean" and self.planned.facts.high_watermark is None:
                notes.append(
                    f"{self.name}: its high watermark is unknown, so the log end offset "
                    f"{self.planned.facts.log_end_offset} was used instead: older records may have been removed "
                    "because of records that other replicas never had"
                )
        return Intended(target.tree(self.log_dir), self.row, self.entries or Entries(), repaired, tuple(notes))


def judge(
    fs: FileSystem,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    configuration: Configuration,
    rules: Rules,
    known: Known,
    *,
    execute: bool = False,
) -> PlannedPartition:
    """Return the decision for a chosen partition. If the source has not changed since its copy was written, and no
    round is due, only the listing is read, unless the settings require file times.
    """
    row = ResultRow(entry.topic, entry.partition, entry.log_dir, "refused")
    at = PlannedPartition(log_dir.path, entry.path, entry.topic, entry.partition, "leave", row)
    there = known[log_dir.path].get(at.name)
    try:
        at = replace(
            at, source_files=seen_files(fs, entry.path), entries=entries_of(log_dir, entry.topic, entry.partition)
        )
        if execute:
            fs.refuse_unless_like(fs.stat(entry.path))
    except EXPLAINED as problem:
        return replace(at, row=at.row.unchanged("refused", in_words(problem)))
    if there is not None and (unusable := _unusable(there)) is not None:
        return replace(at, row=replace(at.row.unchanged("refused", in_words(unusable)), problem=unusable))
    if (record := _unchanged(at, there, log_dir.clean_shutdown)) is not None and not entry.problems:
        kept = _keep(fs, log_dir, entry, configuration, rules, at, record)
        if kept is not None:
            return kept
    planned = plan_partition_of(fs, log_dir, entry, configuration, rules)
    row = row_of(planned)
    facts = planned.facts
    is_unread = planned.config is None and planned.problem is None  # a system error prevented the decision
    if planned.corrupt or is_unread or facts.problems or not facts.segments:
        # A plan reports a partition whose policy lacks `compact` as skipped, even if it has errors. Here, a skipped
        # partition would be missing in the target.
        status = "corrupt" if planned.corrupt else "refused"
        return replace(at, row=row.unchanged(status, _why_left_out(planned, log_dir, at.name)), planned=planned)
    if planned.wanted:
        return replace(at, action="clean", row=row, planned=planned)
    return replace(at, action="copy", row=row, planned=planned)


def _why_left_out(planned: Planned, log_dir: LogDirFacts, name: str) -> ErrorText:
    """Return the reason why the partition `name` is not written to the target."""
    waiting = [item for item in planned.facts.leftovers if names.parse_file_name(item).kind == "swap"]
    if not waiting:
        return "not placed: " + (joined(planned.facts.problems) or row_of(planned).error)
    return ErrorText(
        f"not placed: an interrupted replacement of segments is not finished "
        f"({os.path.join(planned.facts.path, waiting[0])}), and --output-dir does not change the source: finish it "
        f"with `keytail compact --log-dirs {log_dir.path} --partitions {name} --execute`, or by starting the broker"
    )


def _unusable(there: TargetEntry) -> KeytailError | None:
    """Return the error that forbids replacing the target's copy of the partition; None if the copy may be replaced."""
    if there.problem is not None:
        return there.problem
    if there.is_done and (differs := there.differences()):
        return Refused(
            f"the target's files of this partition are not those that keytail wrote: {differs}",
            remedy="Give another --output-dir, or remove the partition's directory in the target: a broker that starts "
            "on the target changes its files",
            slug="target-changed",
        )
    return None


def _unchanged(at: PlannedPartition, there: TargetEntry | None, clean_shutdown: bool) -> OutputRecord | None:
    """Return the target's record if the source has not changed since that record was written, else None."""
    if there is None or there.record is None or not there.is_done:
        return None
    record = there.record
    same = (record.source_files, record.source_entries, record.clean_shutdown) == (
        at.source_files, at.entries, clean_shutdown,
    )  # fmt: skip
    return record if same else None


def _keep(
    fs: FileSystem,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    configuration: Configuration,
    rules: Rules,
    at: PlannedPartition,
    record: OutputRecord,
) -> PlannedPartition | None:
    """If no round is due for the target's copy now, return the decision to keep it, with a row that has the copy's
    sizes and the time when it was written; else None.
    """
    planned = plan_partition_of(
        fs, log_dir, entry, configuration, rules, by_listing=True, as_if=lambda facts: as_written(facts, record)
    )
    if planned.wanted or planned.corrupt or planned.facts.problems:
        return None
    row = row_of(planned)
    logs = [file.size_bytes for file in record.files if file.name.endswith(names.LOG)]
    text = ErrorText(f"unchanged since {time_text(record.written_ms)}, when it was written to the target")
    status = row.status
    if status in ("clean", "skipped"):
        status = "clean"
        text += ", copied unchanged: " + record.copied_for if record.copied_for else ""
    else:
        text += "; " + row.error
    row = row.unchanged(status, text)
    row = replace(row, segments_after=len(logs), bytes_after=sum(logs), records_after=None)
    return replace(at, action="keep", row=row, record=record, planned=planned)


def metadata_partition(fs: FileSystem, facts: LogDirFacts, known: Mapping[str, TargetEntry]) -> list[PlannedPartition]:
    """Return a list with the decision for the metadata log, to copy or to keep it; empty if the log dir has none."""
    name = names.partition_dir(names.CLUSTER_METADATA_TOPIC, 0)
    if name not in facts.skipped:
        return []
    path = os.path.join(facts.path, name)
    why = ErrorText("the metadata log is never compacted")
    row = ResultRow(names.CLUSTER_METADATA_TOPIC, 0, facts.path, "clean", why)
    at = PlannedPartition(
        facts.path, path, names.CLUSTER_METADATA_TOPIC, 0, "copy", row, seen_files(fs, path), Entries()
    )
    size_bytes = sum(file.size_bytes for file in at.source_files)
    at = replace(at, row=replace(row, bytes_before=size_bytes, bytes_after=size_bytes))
    there = known.get(name)
    if there is not None and (problem := _unusable(there)) is not None:
        raise problem
    record = _unchanged(at, there, True)
    return [at if record is None else replace(at, action="keep", record=record)]


def not_chosen(
    fs: FileSystem, facts: LogDirFacts, path: str, there: TargetEntry | None
) -> tuple[OutputRecord | None, str]:
    """Return the record of a partition that this run does not select, if its copy in the target corresponds to the
    present source; else None and the reason."""
    parsed = names.parse_partition_dir(os.path.basename(path))
    assert parsed is not None
    if there is None or not there.is_done:
        return None, "not chosen"
    if _unusable(there) is not None:
        return None, "not chosen, and changed in the target"
    try:
        row = ResultRow(parsed.topic, parsed.partition, facts.path, "skipped")
        files = seen_files(fs, path)
        at = PlannedPartition(facts.path, path, parsed.topic, parsed.partition, "leave", row, files,
                    entries_of(facts, parsed.topic, parsed.partition))  # fmt: skip
        record = _unchanged(at, there, facts.clean_shutdown)
    except OSError as problem:
        return None, str(problem)
    return (record, "") if record is not None else (None, "not chosen, and changed since it was written to the target")
