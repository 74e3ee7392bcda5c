"""Decides for each chosen partition whether records may be erased in it. Nothing is read but listings and settings."""

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
from keytail.errors import NO_ERROR, ErrorText, KeytailError, Refused, in_words, joined, refusal
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

# A topic is refused if this setting is neither read nor given: erased records would be left in remote storage.
NEEDED_SETTINGS = ("remote.storage.enable",)
_FOREVER_MS = 2**63 - 1


@dataclass(frozen=True)
class Examined:
    """A surveyed partition. `config` is None if it is not processed, for the reason in `error`."""

    log_dir: LogDirFacts
    entry: PartitionEntry
    facts: PartitionFacts
    config: CompactionConfig | None = None
    status: str = "refused"
    error: ErrorText = NO_ERROR
    notes: tuple[str, ...] = ()
    replicas: tuple[int, ...] | None = None
    in_use: bool = False

    @property
    def log_bytes(self) -> int:
        return sum(segment.log_bytes for segment in self.facts.segments)

    def row(self) -> EraseRow:
        """Return the row of an unchanged partition."""
        facts, size, count = self.facts, self.log_bytes, len(self.facts.segments)
        return EraseRow(
            facts.topic, facts.partition, facts.log_dir, self.status, self.error, segments_before=count,
            segments_after=count, bytes_before=size, bytes_after=size, replicas=self.replicas, in_use=self.in_use,
            notes=self.notes,
        )  # fmt: skip

    def again(self, fs: FileSystem) -> Examined:
        """Return the partition with the facts that a survey finds now."""
        facts = survey_partition(fs, self.log_dir, self.entry)
        if facts.problems:
            raise Refused(joined(facts.problems), path=facts.path, remedy="Run again", slug="partition-changed")
        return replace(self, facts=facts)


def examine(
    fs: FileSystem, log_dir: LogDirFacts, entry: PartitionEntry, configuration: Configuration, *, execute: bool,
    others: OtherDirectories = NO_OTHERS,
) -> Examined:  # fmt: skip
    """Survey one partition; `others` are those of the broker.

    An executing run first resolves leftovers of an interrupted run in the partition.
    """
    facts = survey_partition(fs, log_dir, entry)
    notes: list[str] = []
    try:
        resolved = configuration.of(entry.topic)
        # All producers of the snapshot keep their state, whatever producer.id.expiration.ms is: it may be unknown.
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
    except (KeytailError, OSError) as problem:
        return Examined(log_dir, entry, facts, None, status_of(problem), in_words(problem), tuple(notes))
    in_use = not execute and not facts.clean_shutdown and is_held(log_dir.path, fs)
    replicas = _other_replicas(configuration, entry)
    return Examined(log_dir, entry, facts, config, "absent", NO_ERROR, tuple(notes), replicas, in_use)


def _refusals(
    others: OtherDirectories, entry: PartitionEntry, facts: PartitionFacts, unknown: ErrorText
) -> list[ErrorText]:
    """Return reasons that hold whatever an interrupted run has left."""
    reasons = [unknown] if unknown else []
    if entry.topic in INTERNAL_TOPICS:
        text = f"{entry.topic} is an internal topic of Kafka, and nothing is erased in it: brokers need its records"
        remedy = "--topic '(?!__).*' selects all topics except Kafka's internal ones"
        reasons.append(refusal(text, slug="internal-topic", remedy=remedy))
    prepared = [name for name in facts.leftovers if is_prepared(name)]
    if prepared:
        reasons.append(
            refusal(
                "an earlier run has prepared a compaction, whose files may have records to be erased: "
                + os.path.join(facts.path, prepared[0]),
                slug="prepared-compaction",
                remedy="Remove it with `keytail prepared --discard --execute`",
            )
        )
    if found := others.of(entry.topic, entry.partition):
        reasons.append(
            refusal(
                f"another directory has records of the partition: {', '.join(found)}",
                slug="other-directory-of-partition",
                remedy=REMEDY,
            )
        )
    return reasons


def _about_other_files(fs: FileSystem, facts: PartitionFacts) -> list[ErrorText]:
    """Return why the partition is refused if its directory has files that neither brokers nor keytail use."""
    found = [
        entry.name
        for entry in fs.scan(facts.path)
        if names.parse_file_name(entry.name).kind == "other" and may_have_records(entry.name)
    ]
    if not found:
        return []
    text = "files that are not part of the log may have records to be erased: " + ", ".join(sorted(found))
    remedy = "Remove them, or move them out of the log dir; then run again"
    return [refusal(text, slug="other-files-of-partition", remedy=remedy)]


def _other_replicas(configuration: Configuration, entry: PartitionEntry) -> tuple[int, ...] | None:
    cluster = configuration.cluster
    if cluster is None or cluster.metadata is None or entry.topic not in cluster.metadata.topics:
        return None
    replicas = cluster.metadata.topics[entry.topic].replicas.get(entry.partition, ())
    return tuple(broker for broker in replicas if broker != cluster.broker)


def is_in_active(facts: PartitionFacts, bases: Sequence[int]) -> bool:
    """Return whether one of the segments is the active segment."""
    return bool(bases) and bases[-1] == facts.segments[-1].base_offset


def refuse_roll(fs: FileSystem, facts: PartitionFacts) -> None:
    """Raise Refused if the active segment must not be rolled."""
    if why := reason_against(facts) or why_not_closed(fs, facts):
        raise Refused(
            "the active segment has records to be erased, and must be rolled first",
            path=facts.path,
            remedy=why[0].upper() + why[1:],
            slug="active-segment-not-rolled",
        )


def refuse_linked(fs: FileSystem, facts: PartitionFacts, bases: Sequence[int]) -> None:
    """Raise Refused if a file with records to be erased has another name, under which they would be left."""
    for base in bases:
        path = os.path.join(facts.path, names.segment_file(base, names.LOG))
        links = fs.stat(path).links
        if links > 1:
            raise Refused(
                f"the file has {links} names (hard links): records to be erased would be left under the others",
                path=path,
                remedy="Remove the others (`find DIR -samefile FILE` finds them), or replace them by copies that you "
                "erase as well; then run again",
                slug="hard-linked-segment",
            )
