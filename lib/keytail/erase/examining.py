"""Decides for each chosen partition whether records may be erased in it, from its survey and settings, without reading
records."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from keytail.cli.configuration import Configuration
from keytail.compact.prepared.scratch import is_prepared
from keytail.compact.roll import reason_against
from keytail.config.compaction import CompactionConfig
from keytail.config.internal import INTERNAL_TOPICS
from keytail.erase.command import EraseRow
from keytail.erase.other_directories import NO_OTHERS, REMEDY, OtherDirectories, may_have_records
from keytail.errors import EXPLAINED, NO_ERROR, ErrorText, Refused, in_words, joined, refusal
from keytail.format import names
from keytail.log.append.roll_closed import why_not_closed
from keytail.log.fs import FileSystem
from keytail.log.lock import is_held
from keytail.log.missing_segments import refuse_missing_segments
from keytail.log.partition import (
    LogDirFacts,
    PartitionEntry,
    PartitionFacts,
    reasons_against_change,
    refuse_damaged_end,
    survey_partition,
)
from keytail.log.replacement.recover import recover
from keytail.run.rows import status_of

# A topic is refused if one of these settings is unknown: remote storage may keep the erased records.
NEEDED_SETTINGS = ("remote.storage.enable",)
_FOREVER_MS = 2**63 - 1


@dataclass(frozen=True)
class Examined:
    """A surveyed partition. If `config` is None, the partition is not processed, for the reason in `error`."""

    log_dir: LogDirFacts
    entry: PartitionEntry
    facts: PartitionFacts
    config: CompactionConfig | None = None
    status: str = "refused"
    error: ErrorText = NO_ERROR
    notes: tuple[str, ...] = ()
    replicas: tuple[int, ...] | None = None
    in_use: bool = False

    def row(self) -> EraseRow:
        """Return the row of the partition in its present state, before anything is changed."""
        facts, size, count = self.facts, self.facts.log_bytes, len(self.facts.segments)
        return EraseRow(
            facts.topic, facts.partition, facts.log_dir, self.status, self.error, segments_before=count,
            segments_after=count, bytes_before=size, bytes_after=size, replicas=self.replicas, in_use=self.in_use,
            notes=self.notes,
        )  # fmt: skip

    def again(self, fs: FileSystem) -> Examined:
        """Survey the partition again, and return it with the new facts. Raises Refused for a partition with problems.
        """
        facts = survey_partition(fs, self.log_dir, self.entry)
        if facts.problems:
            raise Refused(joined(facts.problems), path=facts.path, remedy="Run again", slug="partition-changed")
        return replace(self, facts=facts)


def examine(
    fs: FileSystem, log_dir: LogDirFacts, entry: PartitionEntry, configuration: Configuration, *, execute: bool,
    others: OtherDirectories = NO_OTHERS,
) -> Examined:  # fmt: skip
    """Survey one partition, and return it with the reason if it must not be processed. `others` are the other
    directories of the broker, which may belong to the same partition.

    With `execute`, leftovers of an interrupted run in the partition are resolved first, unless it is refused anyway.
    """
    facts = survey_partition(fs, log_dir, entry)
    notes: list[str] = []
    try:
        resolved = configuration.of(entry.topic)
        # All producers of the snapshot keep their state, because producer.id.expiration.ms may be unknown.
        config = replace(CompactionConfig.from_values(resolved.values()), producer_id_expiration_ms=_FOREVER_MS)
        if configuration.cluster is not None:
            configuration.cluster.refuse_stray(fs, entry)
        reasons = _refusals(others, entry, facts, configuration.unknown(entry.topic, NEEDED_SETTINGS))
        reasons += _about_other_files(fs, facts)
        if execute and facts.leftovers and not reasons and not entry.problems:
            notes = recover(fs, facts.path)
            facts = survey_partition(fs, log_dir, entry)
        reasons += [*facts.problems, *reasons_against_change(facts, config.remote_storage_enable)]
        if execute and not facts.clean_shutdown:
            reasons.append(
                refusal(
                    "the broker was not stopped cleanly, so it may truncate the log when it starts",
                    slug="unclean-shutdown",
                    remedy="Start the broker and stop it cleanly",
                )
            )
        if reasons:
            return Examined(
                log_dir, entry, facts, error=joined([*reasons, *resolved.doubts()]), notes=tuple(notes)
            )
        if facts.clean_shutdown:
            refuse_missing_segments(fs, facts)
            refuse_damaged_end(facts)
        if execute:
            fs.refuse_unless_like(fs.stat(facts.path))
    except EXPLAINED as problem:
        return Examined(log_dir, entry, facts, None, status_of(problem), in_words(problem), tuple(notes))
    in_use = not execute and not facts.clean_shutdown and is_held(log_dir.path, fs)
    replicas = _other_replicas(configuration, entry)
    return Examined(log_dir, entry, facts, config, "absent", NO_ERROR, tuple(notes), replicas, in_use)


def _refusals(
    others: OtherDirectories, entry: PartitionEntry, facts: PartitionFacts, unknown: ErrorText
) -> list[ErrorText]:
    """Return the reasons to refuse a partition that do not depend on leftovers of an interrupted run."""
    reasons = [unknown] if unknown else []
    if entry.topic in INTERNAL_TOPICS:
        text = f"{entry.topic} is an internal topic of Kafka; its records are never erased, because brokers need them"
        remedy = "--topic '(?!__).*' selects all topics except Kafka's internal ones"
        reasons.append(refusal(text, slug="internal-topic", remedy=remedy))
    prepared = [name for name in facts.leftovers if is_prepared(name)]
    if prepared:
        reasons.append(
            refusal(
                "an earlier run prepared a compaction, and its prepared files may have records to be erased: "
                + os.path.join(facts.path, prepared[0]),
                slug="prepared-compaction",
                remedy="Remove the prepared files with `keytail prepared --discard --execute`",
            )
        )
    if found := others.of(entry.topic, entry.partition):
        reasons.append(
            refusal(
                f"other directories may have records of the partition: {', '.join(found)}",
                slug="other-directory-of-partition",
                remedy=REMEDY,
            )
        )
    return reasons


def _about_other_files(fs: FileSystem, facts: PartitionFacts) -> list[ErrorText]:
    """Return the reason, in a list, if the partition's directory has files that neither brokers nor keytail use; an
    empty list if it has none."""
    found = [
        entry.name
        for entry in fs.scan(facts.path)
        if names.parse_file_name(entry.name).kind == "other" and may_have_records(entry.name)
    ]
    if not found:
        return []
    text = "files that are not part of the log may have records to be erased: " + ", ".join(sorted(found))
    remedy = "Remove these files, or move them out of the log dir; then run again"
    return [refusal(text, slug="other-files-of-partition", remedy=remedy)]


def _other_replicas(configuration: Configuration, entry: PartitionEntry) -> tuple[int, ...] | None:
    cluster = configuration.cluster
    if cluster is None or cluster.metadata is None or entry.topic not in cluster.metadata.topics:
        return None
    replicas = cluster.metadata.topics[entry.topic].replicas.get(entry.partition, ())
    return tuple(broker for broker in replicas if broker != cluster.broker)


def is_in_active(facts: PartitionFacts, bases: Sequence[int]) -> bool:
    """Return whether one of the segments with these base offsets, ascending, is the active segment."""
    return bool(bases) and bases[-1] == facts.segments[-1].base_offset


def refuse_roll(fs: FileSystem, facts: PartitionFacts) -> None:
    """Raise Refused, with the reason as the remedy, if the active segment must not be rolled."""
    if why := reason_against(facts) or why_not_closed(fs, facts):
        raise Refused(
            "the active segment has records to be erased and must be rolled first, but cannot be rolled",
            path=facts.path,
            remedy=why[0].upper() + why[1:],
            slug="active-segment-not-rolled",
        )


def refuse_linked(fs: FileSystem, facts: PartitionFacts, bases: Sequence[int]) -> None:
    """Raise Refused if a segment file with records to be erased has another name (a hard link), under which these
    records would be left. `bases` are the base offsets of the segments."""
    for base in bases:
        path = os.path.join(facts.path, names.segment_file(base, names.LOG))
        links = fs.stat(path).links
        if links > 1:
            raise Refused(
                f"the file has {links} names (hard links): records to be erased would be left under the other names",
                path=path,
                remedy="Remove the other names (`find DIR -samefile FILE` finds them), or replace them by copies in "
                "which you also erase the keys; then run again",
                slug="hard-linked-segment",
            )
