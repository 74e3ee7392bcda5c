"""The command `describe`: show the size of each partition, whether its compaction is due or why not, and its settings
with the source of each.

Reads listings, checkpoints and index tails, as a plan does, and no log data, unless records are to be counted.
Starts no Spark, takes no lock, changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from keytail.cli import rows as show
from keytail.cli.configuration import Configuration
from keytail.cli.kafka_version import which_kafka
from keytail.cli.metadata import with_metadata
from keytail.cli.selection import Choice, choose
from keytail.compact.plan import Rules, Selection, select
from keytail.compact.planning import Planned, plan_one
from keytail.config.kafka_version import Inferred
from keytail.config.keys import KEYS, TOPIC_KEYS
from keytail.config.message_format import MessageFormat
from keytail.config.resolve import DEFAULT_SOURCE
from keytail.durations import duration_text
from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import is_held
from keytail.log.partition import PartitionFacts
from keytail.run.each_partition import of_each

_ALWAYS = ("cleanup.policy",)
_OF_OLD_MESSAGES = {
    "v2": "Compaction writes messages of formats v0 and v1 as v2",
    "keep": "Compaction writes messages of formats v0 and v1 in their own format, which a broker before 3.0 may need",
    "unknown": "Compaction refuses messages of formats v0 and v1; to compact them, give --message-format v2 or keep",
}


@dataclass(frozen=True)
class DescribeRow:
    """One partition. Sizes are of `.log` files.

    `offsets` is the number of offsets from the log start to the log end; `records` is None unless they were counted
    (including markers). `live`: a broker was running on it, so the numbers may have changed since. `eligible`:
    `compact` would process it now; otherwise `blocker` has the reason. The numbers of the section to clean, which ends
    at `end_dirty_offset`, are None if the partition's state does not determine them. `settings`: value and source of
    the requested settings of `keys.py`, by Kafka's name. `overrides_known`: whether the topic's own settings are among
    the sources. `message_format`: how a compaction writes messages of formats v0 and v1: v2, or keep (in their own
    format); unknown if it refuses them. `kafka`: the `versions` that may have written the log dirs, and the `evidence`:
    observations and their meaning.
    """

    topic: str
    partition: int
    log_dir: str
    segments: int
    bytes: int
    offsets: int
    records: int | None
    log_start_offset: int
    log_end_offset: int
    high_watermark: int | None
    cleaner_checkpoint: int | None
    clean_shutdown: bool
    live: bool
    eligible: bool
    blocker: str
    first_dirty_offset: int | None
    end_dirty_offset: int | None
    clean_bytes: int | None
    cleanable_bytes: int | None
    dirty_ratio: float | None
    overrides_known: bool
    message_format: MessageFormat
    settings: Mapping[str, Mapping[str, Any]]
    kafka: Mapping[str, Any]
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"


def describe(
    choice: Choice,
    configuration: Configuration,
    rules: Rules,
    *,
    every_setting: bool = False,
    count_records: bool = False,
    fs: FileSystem = LOCAL,
) -> list[DescribeRow]:
    """Return a row for each chosen partition."""
    chosen = choose(fs, choice)
    configuration = with_metadata(fs, choice.log_dirs, configuration)
    kafka = _kafka(which_kafka(fs, chosen.log_dirs, configuration.cluster))
    # A broker removes .kafka_cleanshutdown as soon as it has the lock.
    live = {facts.path: not facts.clean_shutdown and is_held(facts.path, fs) for facts in chosen.log_dirs}

    def row(plan: Planned, records: int | KeytailError | None) -> DescribeRow:
        settings = _settings(configuration, plan.facts.topic, every_setting)
        return _row(plan, rules, settings, records, kafka, live=live[plan.facts.log_dir])

    if not count_records:
        return of_each(
            chosen.partitions,
            lambda log_dir, entry: row(plan_one(fs, log_dir, entry, configuration, rules, by_listing=True), None),
            fs,
        )
    planned = [plan_one(fs, facts, entry, configuration, rules) for facts, entry in chosen.partitions]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(lambda plan: row(plan, _count(fs, plan.facts)), planned))


def _kafka(inferred: Inferred) -> dict[str, Any]:
    return {"versions": inferred.sentence, "evidence": {one.seen: one.means for one in inferred.evidence}}


def _count(fs: FileSystem, facts: PartitionFacts) -> int | KeytailError:
    """Return the number of records by the headers of all batches, after checking their checksums; the problem if a
    batch cannot be read."""
    from keytail.log.stride import SegmentReader  # noqa: PLC0415 (brings in the kernels)

    reader = SegmentReader(fs)
    count = 0
    try:
        for segment in facts.segments:
            path = os.path.join(facts.path, names.segment_file(segment.base_offset, names.LOG))
            torn_tail = segment is facts.segments[-1] and not facts.clean_shutdown
            for stride in reader.strides(path, segment.log_bytes, torn_tail=torn_tail):
                count += int(stride.table["record_count"].sum(dtype="i8"))
    except KeytailError as problem:
        return problem
    except OSError as problem:
        what = f"the file cannot be read: {problem.strerror}"
        return KeytailError(what, path=problem.filename, slug="unreadable-file")
    return count


def _settings(
    configuration: Configuration, topic: str, every: bool
) -> tuple[dict[str, dict[str, Any]], bool, MessageFormat]:
    """Return the settings of `topic`, whether its own are known, and the format for old messages. If the settings
    contradict each other: none, False and "unknown"."""
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
        bytes=sum(segment.log_bytes for segment in facts.segments),
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
        error=str(records) if isinstance(records, KeytailError) else "",
    )


def _section(plan: Planned, rules: Rules) -> Selection | None:
    """Return the section that a round would clean, even if it is refused for reasons that do not affect the numbers."""
    if plan.decision.selection is not None or plan.config is None or plan.facts.problems:
        return plan.decision.selection
    return select(plan.facts, plan.config, rules.now_ms, high_watermark=rules.high_watermark)


def exit_status(rows: Sequence[DescribeRow]) -> int:
    """Return 0, unless records could not be counted: 1 if this failed for all partitions, 3 if only for some."""
    bad = sum(bool(row.error) for row in rows)
    return 0 if not bad else 1 if bad == len(rows) else 3


def print_table(rows: Sequence[DescribeRow], *, every_setting: bool) -> None:
    """Print a line for each partition, then why compactions are not due, then each topic's settings."""
    console = show.output_console()
    counted = any(row.records is not None for row in rows)
    table = Table(title="Partitions", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("partition", overflow="fold")
    for name in ("segments", "log size", *(["records"] if counted else []), "offsets", "log start", "log end",
                 "first dirty", "dirty ratio"):  # fmt: skip
        table.add_column(name, justify="right")
    table.add_column("due")
    for row in rows:
        count = ["" if row.records is None else f"{row.records:,}"] if counted else []
        table.add_row(
            escape(row.name) + (" (in use)" if row.live else ""),
            f"{row.segments:,}",
            show.human_bytes(row.bytes),
            *count,
            f"{row.offsets:,}",
            str(row.log_start_offset),
            str(row.log_end_offset),
            "" if row.first_dirty_offset is None else str(row.first_dirty_offset),
            "" if row.dirty_ratio is None else f"{row.dirty_ratio:.3f}",
            "yes" if row.eligible else "no",
        )
    console.print(table)
    if rows:
        console.print(f"\nKafka version that wrote the log dirs: {escape(rows[0].kafka['versions'])}", soft_wrap=True)
        for seen, means in rows[0].kafka["evidence"].items():
            console.print(f"  {escape(seen)}: {escape(means)}", soft_wrap=True)
    for row in rows:
        if row.blocker:
            console.print(f"\n{escape(row.name)} is not due for compaction: {escape(row.blocker)}", soft_wrap=True)
        if row.error:
            text = f"the records of {row.name} could not be counted: {row.error}"
            console.print(f"\n{escape(text)}", soft_wrap=True)
    by_format: dict[str, set[str]] = {}
    for row in rows:
        by_format.setdefault(row.message_format, set()).add(row.topic)
    for message_format, topics_of in sorted(by_format.items()):
        which = "all" if len(by_format) == 1 else ", ".join(sorted(topics_of))
        console.print(escape(f"\n{_OF_OLD_MESSAGES[message_format]}. Topics: {which}"), soft_wrap=True)
    topics = {row.topic: row for row in reversed(rows)}
    for topic in sorted(topics):
        _print_settings(console, topics[topic])
    if not every_setting:
        console.print("\nAll other settings have Kafka's defaults; to list them, give --all.", soft_wrap=True)


def _print_settings(console: Any, row: DescribeRow) -> None:
    doubt = "" if row.overrides_known else " (its own settings are unknown)"
    table = Table(title=f"Settings of {escape(row.topic)}{doubt}", title_justify="left", title_style="bold",
                  box=None, pad_edge=False)  # fmt: skip
    for name in ("setting", "value", "from"):
        table.add_column(name, overflow="fold")
    for name, setting in row.settings.items():
        table.add_row(name, escape(_value_text(name, setting["value"])), escape(setting["source"]))
    console.print()
    console.print(table)


def _value_text(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value) or "(none)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and name.endswith(".ms") and value >= 1000:
        return f"{value} (unlimited)" if value == 2**63 - 1 else f"{value} ({duration_text(value)})"
    return "(none)" if value is None else str(value)
