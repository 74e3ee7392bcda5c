"""Decides with pure functions which offsets of a partition have to be exported, given the state of the table.

If the resulting table is certain to equal the table of a full export, only records after the last exported offset are
read. If this is not certain, the whole log is read (export/EXPORT.md, "Full or incremental").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Exported:
    """The state of a partition in the table. The table has the partition's committed records below `end_offset`.

    `leader_epoch` is the leader epoch of the offset before `end_offset` (None if unknown), and `log_start_offset` is
    the log start offset at the time of the export.
    """

    end_offset: int
    log_start_offset: int
    leader_epoch: int | None = None
    topic_id: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LogNow:
    """The current state of the log. Records below `stable_offset` are to be exported."""

    log_start_offset: int
    log_end_offset: int
    stable_offset: int
    cleaner_checkpoint: int | None = None
    topic_id: str | None = None
    epochs: tuple[tuple[int, int], ...] = ()  # (epoch, start offset), ascending

    def exported(self) -> Exported:
        """Return the state that the table has after an export of this log up to `stable_offset`."""
        return Exported(
            self.stable_offset,
            self.log_start_offset,
            epoch_at(self.epochs, self.stable_offset - 1),
            self.topic_id,
        )


@dataclass(frozen=True)
class ExportPlan:
    """How to export a partition from `from_offset` on. `why` is the reason for the strategy."""

    strategy: Literal["full", "incremental", "none"]
    why: str
    from_offset: int


def epoch_at(epochs: Sequence[tuple[int, int]], offset: int) -> int | None:
    """Return the leader epoch in which an offset was written, or None if no entry covers it."""
    found = [epoch for epoch, start in epochs if start <= offset]
    return max(found) if found else None


NO_TABLE = "there is no table yet"
NO_PARTITION = "the partition is not in the table yet"
_DONE = {NO_TABLE: "there was no table before", NO_PARTITION: "the partition was not in the table before"}


def why_exported(why: str) -> str:
    """Return the reason of a plan in words that are correct after the export."""
    return _DONE.get(why, why)


def plan_export(before: Exported | None, log: LogNow, *, no_state: str = NO_PARTITION) -> ExportPlan:
    why = no_state if before is None else reason_for_all(before, log)
    if before is None or why is not None:
        return ExportPlan("full", why or "", log.log_start_offset)
    if log.stable_offset == before.end_offset:
        return ExportPlan("none", f"no new records from offset {before.end_offset} on", before.end_offset)
    if log.stable_offset < before.end_offset:
        why = (
            f"the table has the records below offset {before.end_offset}, but the log is known to be stable only below "
            f"offset {log.stable_offset}"
        )
        return ExportPlan("none", why, before.end_offset)
    return ExportPlan("incremental", f"from offset {before.end_offset} on", before.end_offset)


def reason_for_all(before: Exported, log: LogNow) -> str | None:
    """Return the reason why the whole log has to be read, or None if records after the last exported offset are
    sufficient."""
    if None not in (before.topic_id, log.topic_id) and before.topic_id != log.topic_id:
        was, now = before.topic_id, log.topic_id
        return f"the topic was replaced by another topic of the same name: its id was {was}, now {now}"
    if log.log_end_offset < before.end_offset:
        return f"the log ends at offset {log.log_end_offset}, but was exported up to offset {before.end_offset}"
    epoch = epoch_at(log.epochs, before.end_offset - 1)
    if None not in (before.leader_epoch, epoch) and before.leader_epoch != epoch:
        return (
            f"another leader has written offset {before.end_offset - 1} since then: its leader epoch was "
            f"{before.leader_epoch} and is now {epoch}"
        )
    if log.log_start_offset != before.log_start_offset:
        return f"the log start offset has moved from {before.log_start_offset} to {log.log_start_offset}"
    if log.cleaner_checkpoint is not None and log.cleaner_checkpoint > before.end_offset:
        return (
            f"the log was compacted up to offset {log.cleaner_checkpoint}, beyond offset {before.end_offset}, where "
            "the last export ended: tombstones may have been removed"
        )
    return None
