"""Limits the removal of tombstones and markers by how far other replicas have been cleaned (CLEANING.md 14)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keytail.cli.replicas import Replica, refuse_other_topic
from keytail.console import listed, print_message
from keytail.errors import ErrorText, KeytailError, Refused, in_words, joined
from keytail.log.cluster.metadata import read_topic_id
from keytail.log.fs import FileSystem
from keytail.log.partition import PartitionFacts, list_partition, survey_partition


@dataclass(frozen=True)
class RemovalLimit:
    """Tombstones and markers are retained from `offset` on, because `replica` has been cleaned only below that offset.
    Both fields are None if no replica hosts the partition.
    """

    offset: int | None
    replica: str | None


def cleaned_to(facts: PartitionFacts) -> int:
    """Return the offset below which a replica has been cleaned: below this offset, the replica has only the latest
    record of each key.

    The offset to which a replica has been cleaned is the entry in `cleaner-offset-checkpoint`. Without an entry, or
    with an entry outside the log, as after a truncation, only the offsets below the first segment count as cleaned.
    """
    first = facts.segments[0].base_offset
    checkpoint = facts.cleaner_checkpoint
    if checkpoint is None or not first <= checkpoint <= facts.log_end_offset:
        return first
    return checkpoint


def lowest_limit(cleaned: Mapping[str, int]) -> RemovalLimit:
    """Return the limit that follows from `cleaned`: by name of the replica, the offset to which it was cleaned."""
    if not cleaned:
        return RemovalLimit(None, None)
    replica = min(cleaned, key=lambda name: cleaned[name])
    return RemovalLimit(cleaned[replica], replica)


def removal_limit(fs: FileSystem, replicas: Sequence[Replica], facts: PartitionFacts) -> RemovalLimit:
    """Return the limit that follows from the replicas that host the partition. Raises Refused if it is unknown how far
    one of these replicas has been cleaned, or if one of them has another topic of the same name.
    """
    own = read_topic_id(fs, facts.path)
    cleaned: dict[str, int] = {}
    for replica in replicas:
        found = replica.find(facts.topic, facts.partition)
        if found is None:
            continue
        log_dir, entry = found
        try:
            refuse_other_topic(fs, replica.name, entry.path, own)
            theirs = list_partition(fs, log_dir, entry) or survey_partition(fs, log_dir, entry)
        except Refused:
            raise
        except (KeytailError, OSError) as problem:
            raise _unknown(replica.name, entry.path, in_words(problem)) from problem
        if theirs.problems:
            raise _unknown(replica.name, entry.path, joined(theirs.problems))
        cleaned[replica.name] = cleaned_to(theirs)
    return lowest_limit(cleaned)


def report_unhosted(names: Sequence[str]) -> None:
    """Report on standard error the due partitions that none of the given replicas hosts."""
    if names:
        text = f"no --replica hosts {listed(names)}: tombstones and markers are removed after delete.retention.ms"
        print_message(f"keytail: {text}", "warning")


def _unknown(name: str, path: str, why: ErrorText) -> Refused:
    return Refused(
        f"the offset to which replica {name} has been cleaned is unknown: " + why,
        path=path,
        remedy="Repair this replica, because the offset determines which tombstones may be removed; or omit its "
        "--replica",
        slug="unknown-cleaned-offset",
    )
