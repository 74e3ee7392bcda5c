"""Selects the partitions for a command, by flags and listings.

The code reads listings and checkpoints of the log dirs, and only decides whether a partition is selected. A selection
that matches nothing is an error, since it is usually a typing mistake.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from keytail.cli import options as o
from keytail.cli.configuration import BrokerSettings, Configuration
from keytail.cli.flags import FromFlags
from keytail.config.files import log_dirs as log_dirs_of
from keytail.errors import UsageProblem
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.owner import work_as_owner

if TYPE_CHECKING:
    from keytail.format.names import PartitionDir
    from keytail.log.partition import LogDirFacts, PartitionEntry

_MAX_NAMES = 20  # maximum number of topics that an error lists


@dataclass(frozen=True)
class PartitionFilter:
    """The user's selection of partitions: empty fields restrict nothing."""

    log_dirs: tuple[str, ...] = ()
    topic_patterns: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()

    def takes(self, entry: PartitionEntry | PartitionDir) -> bool:
        by_pattern = any(re.fullmatch(pattern, entry.topic) for pattern in self.topic_patterns)
        if (self.topic_patterns or self.topics) and not (by_pattern or entry.topic in self.topics):
            return False
        return not self.partitions or f"{entry.topic}-{entry.partition}" in self.partitions


def chosen_log_dirs(given: Sequence[str], configuration: Configuration) -> tuple[str, ...]:
    """Return the log dirs in `--log-dirs` or, without that flag, in the broker's file, as absolute paths. Raises
    UsageProblem if there are none."""
    paths = tuple(given) or log_dirs_of(configuration.broker)
    if not paths:
        raise UsageProblem(
            "no log dirs were given",
            remedy="Give --log-dirs DIR[,DIR], or --config FILE with a server.properties that contains log.dirs",
            slug="no-log-dirs",
        )
    return tuple(dict.fromkeys(str(Path(path).absolute()) for path in paths))


def filter_from_flags(
    configuration: Configuration,
    log_dirs: list[str] | None,
    topic: list[str] | None,
    topic_list: list[str] | None,
    partitions: list[str] | None,
    also_read: Sequence[str] = (),
) -> PartitionFilter:
    """Return the selection given by flags. If this process was started as root, it works as the owner of the log dirs
    from then on. `also_read` are log dirs of other brokers that this owner must be able to read.
    """
    paths = chosen_log_dirs(o.comma_lists(log_dirs), configuration)
    work_as_owner(LOCAL, paths, also_read)
    return PartitionFilter(paths, tuple(topic or ()), o.comma_lists(topic_list), o.comma_lists(partitions))


def _partition_filter(
    configuration: Configuration,
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
) -> PartitionFilter:
    return filter_from_flags(configuration, log_dirs, topic, topic_list, partitions)


def _partition_filter_without_config(
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
    *,
    configuration: BrokerSettings,
) -> PartitionFilter:
    return filter_from_flags(configuration, log_dirs, topic, topic_list, partitions)


PartitionFilterFlags = Annotated[PartitionFilter, FromFlags(_partition_filter)]
# The flags of requests without a configuration.
PartitionFilterWithoutConfig = Annotated[PartitionFilter, FromFlags(_partition_filter_without_config)]


@dataclass(frozen=True)
class SelectedPartitions:
    """The surveyed log dirs, and the selected partitions in them, each with its log dir."""

    log_dirs: tuple[LogDirFacts, ...]
    partitions: tuple[tuple[LogDirFacts, PartitionEntry], ...]


def select_partitions(fs: FileSystem, partition_filter: PartitionFilter) -> SelectedPartitions:
    """List the log dirs and select partitions. Raises UsageProblem if a path is not a log dir, a named topic or
    partition does not exist, a pattern is invalid or matches no topic, or no partition matches all flags together."""
    _check_patterns(partition_filter)
    from keytail.log.log_dirs import survey_log_dirs  # noqa: PLC0415 (--help needs no log code)
    from keytail.run.each_partition import uncollected  # noqa: PLC0415 (--help needs no log code)

    with uncollected():
        surveyed = tuple(survey_log_dirs(fs, partition_filter.log_dirs))
        return SelectedPartitions(surveyed, matching_partitions(partition_filter, surveyed))


def _check_patterns(partition_filter: PartitionFilter) -> None:
    for pattern in partition_filter.topic_patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageProblem(
                f"--topic {pattern} is not a valid regular expression: {error}", slug="invalid-topic-pattern"
            ) from error


def matching_partitions(
    partition_filter: PartitionFilter, surveyed: Sequence[LogDirFacts]
) -> tuple[tuple[LogDirFacts, PartitionEntry], ...]:
    """Return the selected partitions in `surveyed`, each with its log dir. Raises the errors of `select_partitions`."""
    _check_patterns(partition_filter)
    entries = [(facts, entry) for facts in surveyed for entry in facts.partitions]
    topics = {entry.topic for _, entry in entries}
    _check_named("--partitions", partition_filter.partitions, (f"{e.topic}-{e.partition}" for _, e in entries))
    _check_named("--topic-list", partition_filter.topics, topics)
    _check_matched(partition_filter.topic_patterns, topics)
    taken = tuple((facts, entry) for facts, entry in entries if partition_filter.takes(entry))
    if entries and not taken:
        raise UsageProblem(
            "no partition matches --topic, --topic-list and --partitions together",
            remedy=_select_from(topics),
            slug="no-partition-matches",
        )
    return taken


def did_you_mean(wrong: Iterable[str], existing: Iterable[str]) -> str:
    """Return a question with the existing names that are most similar to the wrong names; empty if there are none. The
    question ends with a space, so that the rest of a remedy can follow."""
    names = sorted(existing)
    near = dict.fromkeys(match for name in wrong for match in get_close_matches(name, names, n=1))
    return f"Did you mean {', '.join(near)}? " if near else ""


def _select_from(topics: Iterable[str]) -> str:
    names = sorted(topics)
    if not names:
        return "The log dirs contain no partition: check --log-dirs"
    return f"Select from these topics: {', '.join(names[:_MAX_NAMES])}{' ...' if len(names) > _MAX_NAMES else ''}"


def _check_named(flag: str, named: Sequence[str], of_entries: Iterable[str]) -> None:
    existing = set(of_entries) if named else set()
    unknown = [name for name in named if name not in existing]
    if unknown:
        which = "which is" if len(unknown) == 1 else "which are"
        raise UsageProblem(
            f"{flag} contains {', '.join(unknown)}, {which} not in any of the log dirs",
            remedy=did_you_mean(unknown, existing).rstrip() or None,
            slug="unknown-topic-or-partition",
        )


def _check_matched(patterns: Sequence[str], topics: Collection[str]) -> None:
    """Raise UsageProblem for a pattern that no topic matches, even if other patterns have matches."""
    for pattern in patterns:
        if any(re.fullmatch(pattern, topic) for topic in topics):
            continue
        partly = sorted(topic for topic in topics if re.search(pattern, topic))[:1]
        question = f"Did you mean {partly[0]}? " if partly else did_you_mean((pattern,), topics)
        raise UsageProblem(
            f"--topic {pattern} matches the whole name of no topic in the log dirs",
            remedy=f"{question}Give a regular expression for the whole name. {_select_from(topics)}",
            slug="unknown-topic-or-partition",
        )
