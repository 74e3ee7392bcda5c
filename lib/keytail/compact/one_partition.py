"""Cleans one partition in one call, in this process: for scripts and for examining what a round does.

The command line does the same for many partitions, and handles locks, settings and the cleaner checkpoint
(`compact/planning.py`). The function `compact` leaves locks, settings and the checkpoint to its caller.
"""

from __future__ import annotations

from keytail.compact.cleaner import clean_partition, install
from keytail.compact.plan import refusals, select
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.config.compaction import CompactionConfig
from keytail.config.message_format import MessageFormat
from keytail.errors import NO_ERROR, Refused
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.partition import PartitionFacts
from keytail.log.producers import first_unstable

COMPACTED = CompactionConfig(cleanup_policy=frozenset({"compact"}))


def compact(
    facts: PartitionFacts,
    config: CompactionConfig = COMPACTED,
    *,
    now_ms: int,
    run_id: str = "by-hand",
    message_format: MessageFormat = "unknown",
    fs: FileSystem = LOCAL,
) -> CleaningResult | None:
    """Clean a surveyed partition and replace its segments; return the result, or None if no round is due.

    `config` must be the topic's configuration. Raises Refused for the reasons in `refusals` (plan.py), and for messages
    of magic 0 and 1 if the caller does not give their `message_format`. The caller must set the cleaner checkpoint to
    the result's `end_offset`.
    """
    reasons = refusals(facts, config, NO_ERROR, now_ms)
    if reasons:
        raise Refused(reasons[0], path=facts.path, remedy="Nothing was changed", slug="unsafe-to-compact")
    unstable = first_unstable(fs, facts, now_ms=now_ms)
    selection = select(facts, config, now_ms, unstable=unstable)
    if not selection.eligible:
        return None
    task = CleaningTask.of(
        facts,
        first_dirty_offset=selection.first_dirty_offset,
        first_uncleanable_offset=selection.first_uncleanable_offset,
        now_ms=now_ms,
        config=config,
        run_id=run_id,
        message_format=message_format,
        map_memory_bytes=16 << 20,
    )
    result = clean_partition(fs, task)
    install(fs, task, result)
    return result
