"""From decisions to cleaning tasks: what an executing run does before its tasks, holding the locks."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import replace

from keytail.cli.configuration import Configuration
from keytail.compact.plan import Decision
from keytail.compact.planning import Planned, Rules, TaskSettings, plan_one
from keytail.compact.task import NO_REMOVAL_LIMIT, CleaningTask
from keytail.errors import KeytailError, Refused, in_words
from keytail.log.fs import FileSystem
from keytail.log.partition import LogDirFacts, PartitionEntry
from keytail.log.recover import recover


def resolve_leftovers(
    fs: FileSystem,
    planned: Planned,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    configuration: Configuration,
    rules: Rules,
) -> tuple[Planned, list[str]]:
    """Finish or undo what an interrupted run or broker left, then plan again.

    A refused partition, or one whose topic is not known to be compacted, is left unchanged. A partition that would be
    changed by a user who cannot create files like its own is refused here, before anything is written.
    """
    facts = planned.facts
    if planned.is_compacted_topic and (planned.wanted or facts.leftovers or planned.mended_checkpoint is not None):
        try:
            fs.refuse_unless_like(fs.stat(facts.path))
        except (Refused, OSError) as problem:
            return replace(planned, decision=Decision("refused", in_words(problem), None)), []
    if not facts.leftovers or entry.problems or not planned.is_compacted_topic:
        return planned, []
    try:
        done = recover(fs, facts.path)
    except (KeytailError, OSError) as problem:
        text = f"an interrupted replacement of segments cannot be finished or undone: {in_words(problem)}"
        return replace(planned, decision=Decision("refused", text, None)), []
    return plan_one(fs, log_dir, entry, configuration, rules), done


def cleaning_tasks(
    planned: Iterable[Planned], rules: Rules, settings: TaskSettings, run_id: str
) -> list[CleaningTask]:
    """Return the tasks of the partitions to be compacted, all with the same run id and hash seed."""
    hash_seed = secrets.randbits(63)
    tasks = []
    for plan in planned:
        selection = plan.decision.selection
        if not plan.wanted or selection is None or plan.config is None:
            continue
        facts = plan.facts
        limit = plan.gate.offset if plan.gate else None
        task = CleaningTask.of(
            facts,
            first_dirty_offset=selection.first_dirty_offset,
            first_uncleanable_offset=selection.first_uncleanable_offset,
            now_ms=rules.now_ms,
            config=plan.config,
            run_id=run_id,
            drop_keyless=settings.drop_keyless,
            grouping=settings.grouping,
            fan_out=settings.fan_out,
            map_memory_bytes=settings.map_memory_bytes,
            throttle_bytes_per_s=settings.throttle_bytes_per_s,
            hottest_keys=settings.hottest_keys,
            show_keys=settings.show_keys,
            hash_seed=hash_seed,
            removal_limit_offset=NO_REMOVAL_LIMIT if limit is None else limit,
            message_format=plan.message_format,
            by_file_time=settings.by_file_time,
        )
        tasks.append(task)
    return tasks
