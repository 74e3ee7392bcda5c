"""Shows the size of each partition, whether its compaction is due, the reason if it is not due, and its settings with
their sources.

The command reads what a plan reads: listings, checkpoints, index tails, and the end of each log. It reads whole logs
only if records are to be counted. It does not use Spark, takes no lock and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from keytail.cli.configuration import Configuration
from keytail.cli.kafka_version import infer_kafka_version
from keytail.cli.metadata import with_metadata
from keytail.cli.selection import select_partitions
from keytail.compact.plan import Selection, select
from keytail.compact.planning import Planned, check_clock, plan_partition_of
from keytail.compact.rules import Rules
from keytail.config.kafka_version import Inferred
from keytail.config.keys import KEYS, TOPIC_KEYS, not_used
from keytail.config.message_format import MessageFormat
from keytail.config.resolve import DEFAULT_SOURCE
from keytail.describe.command import DescribeRow, Request
from keytail.errors import NO_ERROR, OF_SYSTEM, ErrorText, KeytailError, explained, in_words, joined, slugs_of
from keytail.format import names
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import is_held
from keytail.log.partition import PartitionFacts
from keytail.run.each_partition import of_each
from keytail.threads import Threads

_ALWAYS = ("cleanup.policy",)
# Slugs of errors of the operating system.
_UNREADABLE = {slug for slug, _ in OF_SYSTEM.values()} | {"file-system-error"}


def describe(request: Request, fs: FileSystem = LOCAL) -> list[DescribeRow]:
    """Return a row for each chosen partition."""
    now_ms = check_clock(request.now_ms, execute=False, unsafe_clock=False)
    rules = Rules(now_ms=now_ms, high_watermark=request.high_watermark)
    chosen = select_partitions(fs, request.partition_filter)
    configuration = with_metadata(fs, request.partition_filter.log_dirs, request.configuration)
    kafka = _kafka(infer_kafka_version(fs, chosen.log_dirs, configuration.cluster))
    # A broker removes .kafka_cleanshutdown as soon as it has the lock.
    live = {facts.path: not facts.clean_shutdown and is_held(facts.path, fs) for facts in chosen.log_dirs}

    def row(plan: Planned, records: int | KeytailError | None) -> DescribeRow:
        settings = _settings(configuration, plan.facts.topic, request.every_setting)
        return _row(plan, rules, settings, records, kafka, live=live[plan.facts.log_dir])

    if not request.count_records:
        return of_each(
            chosen.partitions,
            lambda log_dir, entry: row(
                plan_partition_of(fs, log_dir, entry, configuration, rules, by_listing=True), None
            ),
            fs,
        )
    planned = [plan_partition_of(fs, facts, entry, configuration, rules) for facts, entry in chosen.partitions]
    with Threads(max_workers=os.cpu_count()) as pool:
        return list(pool.map(lambda plan: row(plan, _count(fs, plan.facts)), planned))


def _kafka(inferred: Inferred) -> dict[str, Any]:
    return {"versions": inferred.sentence, "evidence": {item.seen: item.means for item in inferred.evidence}}


def _count(fs: FileSystem, facts: PartitionFacts) -> int | KeytailError:
    """Return the number of records according to the headers of all batches, whose checksums are checked; if a batch
    cannot be read, return the problem."""
    from keytail.log.records.chunk import SegmentReader  # noqa: PLC0415 (imports the kernels)

    reader = SegmentReader(fs)
    count = 0
    try:
        for segment in facts.segments:
            path = os.path.join(facts.path, names.segment_file(segment.base_offset, names.LOG))
            torn_tail = segment is facts.segments[-1] and not facts.clean_shutdown
            for chunk in reader.chunks(path, segment.log_bytes, torn_tail=torn_tail):
                count += int(chunk.table["record_count"].sum(dtype="i8"))
    except (KeytailError, MemoryError) as problem:
        return explained(problem)
    except OSError as problem:
        what = f"the file cannot be read: {problem.strerror}"
        return KeytailError(
            what, path=problem.filename, remedy="Check the disk, and the file's owner and mode", slug="unreadable-file"
        )
    return count


def _settings(
    configuration: Configuration, topic: str, every: bool
) -> tuple[dict[str, dict[str, Any]], bool, MessageFormat]:
    """Return the settings of `topic`, whether its own settings are known, and the format for old messages; no settings,
    False and "unknown" if settings are invalid or contradict each other."""
    try:
        resolved = configuration.of(topic)
        message_format = configuration.message_format_of(topic)
    except KeytailError:
        return {}, False, "unknown"
    wanted = KEYS if every else [key.name for key in TOPIC_KEYS]
    found = {}
    for name in wanted:
        setting = resolved.settings[name]
        if every or name in _ALWAYS or setting.source != DEFAULT_SOURCE:
            value = list(setting.value) if isinstance(setting.value, tuple) else setting.value
            found[name] = {"value": value, "source": setting.source}
            if note := not_used(name):
                found[name]["note"] = note
    return found, resolved.overrides_known, message_format


def _row(
    plan: Planned,
    rules: Rules,
    settings: tuple[dict[str, dict[str, Any]], bool, MessageFormat],
    records: int | KeytailError | None,
    kafka: Mapping[str, Any],
    *,
    live: bool,
) -> DescribeRow:
    facts, section = plan.facts, _section(plan, rules)
    return DescribeRow(
        topic=facts.topic,
        partition=facts.partition,
        log_dir=facts.log_dir,
        segments=len(facts.segments),
        bytes=facts.log_bytes,
        offsets=max(facts.log_end_offset - facts.log_start_offset, 0),
        records=records if isinstance(records, int) else None,
        log_start_offset=facts.log_start_offset,
        log_end_offset=facts.log_end_offset,
        high_watermark=facts.high_watermark,
        cleaner_checkpoint=facts.cleaner_checkpoint,
        clean_shutdown=facts.clean_shutdown,
        live=live,
        eligible=plan.wanted,
        blocker=plan.decision.error,
        first_dirty_offset=section.first_dirty_offset if section else None,
        end_dirty_offset=section.first_uncleanable_offset if section else None,
        clean_bytes=section.clean_bytes if section else None,
        cleanable_bytes=section.cleanable_bytes if section else None,
        dirty_ratio=section.dirty_ratio if section else None,
        overrides_known=settings[1],
        message_format=settings[2],
        settings=settings[0],
        kafka=kafka,
        error=_unreadable(facts) or (in_words(records) if isinstance(records, KeytailError) else NO_ERROR),
    )


def _unreadable(facts: PartitionFacts) -> ErrorText:
    """Return the reason why the partition could not be read, so that its numbers are unknown; empty if it was read."""
    if facts.segments:
        return NO_ERROR
    return joined(problem for problem in facts.problems if set(slugs_of(problem)) & _UNREADABLE)


def _section(plan: Planned, rules: Rules) -> Selection | None:
    """Return the section that a round would clean, even if the partition is refused for a reason that does not affect
    the section."""
    if plan.decision.selection is not None or plan.config is None or plan.facts.problems:
        return plan.decision.selection
    return select(plan.facts, plan.config, rules.now_ms, high_watermark=rules.high_watermark)
