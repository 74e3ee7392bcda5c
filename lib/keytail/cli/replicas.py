"""Lists the log dirs of other replicas, as given by `--replica [NAME=]DIR[,DIR]`, and the partitions in them.

These log dirs are only read: nothing in them is created, changed or locked. The brokers of replicas may be running.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from keytail.errors import Refused, UsageProblem
from keytail.log.fs import FileSystem
from keytail.log.owner import no_such_log_dir

if TYPE_CHECKING:
    from keytail.log.partition import LogDirFacts, PartitionEntry

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.*)")


@dataclass(frozen=True)
class Replica:
    """The log dirs of one broker that has replicas of the partitions."""

    name: str
    log_dirs: tuple[LogDirFacts, ...]
    by_partition: dict[tuple[str, int], tuple[LogDirFacts, PartitionEntry]] = field(repr=False)

    def find(self, topic: str, partition: int) -> tuple[LogDirFacts, PartitionEntry] | None:
        """Return log dir and directory of the partition, or None if this broker does not host the partition."""
        return self.by_partition.get((topic, partition))


def replicas_of(fs: FileSystem, given: Sequence[str], log_dirs: Sequence[str] = ()) -> tuple[Replica, ...]:
    """Return the replicas that the values of `--replica` name, one broker per value. Raises UsageProblem if a value has
    no directory, a path is not a log dir or is given twice (also in `log_dirs`), or two replicas share a name.

    `log_dirs` are the log dirs of the broker that the command works on.
    """
    from keytail.log.log_dirs import survey_log_dirs  # noqa: PLC0415 (--help needs no log code)

    replicas: list[Replica] = []
    taken = {_identity(fs, path): path for path in log_dirs}
    for value in given:
        named, paths = _parsed(value)
        if not paths:
            raise UsageProblem(
                f"--replica {value!r} contains no directory",
                remedy="Give [NAME=]DIR[,DIR]",
                slug="replica-without-directory",
            )
        for path in dict.fromkeys(paths):
            identity = _identity(fs, path)
            if identity in taken:
                raise UsageProblem(
                    f"--replica contains a log dir that was already given, as {taken[identity]}",
                    path=path,
                    remedy="Give all log dirs of one broker with one --replica, and repeat it for each other broker",
                    slug="log-dir-given-twice",
                )
            taken[identity] = path
        name = named or ",".join(paths)
        if any(name == other.name for other in replicas):
            raise UsageProblem(
                f"two replicas are named {name}",
                remedy="Give each --replica a different name",
                slug="duplicate-replica-name",
            )
        surveyed = tuple(survey_log_dirs(fs, list(dict.fromkeys(paths))))
        entries = {(e.topic, e.partition): (facts, e) for facts in surveyed for e in facts.partitions}
        replicas.append(Replica(name, surveyed, entries))
    return tuple(replicas)


def directories_of(given: Sequence[str]) -> list[str]:
    """Return all log dirs that the flag names, as absolute paths, whether they exist or not."""
    return [path for value in given for path in _parsed(value)[1]]


def _parsed(value: str) -> tuple[str | None, list[str]]:
    match = _NAMED.fullmatch(value)
    texts = [text.strip() for text in (match[2] if match else value).split(",")]
    return match[1] if match else None, [str(Path(text).absolute()) for text in texts if text]


def _identity(fs: FileSystem, path: str) -> tuple[int, int]:
    try:
        found = fs.stat(path)
    except FileNotFoundError as error:
        raise no_such_log_dir(path) from error
    return found.device, found.inode


def refuse_other_topic(fs: FileSystem, name: str, path: str, topic_id: str | None) -> None:
    """Raise Refused if the directory at `path` of replica `name` belongs to another topic of the same name."""
    from keytail.log.cluster.metadata import read_topic_id  # noqa: PLC0415 (--help needs no log code)

    theirs = read_topic_id(fs, path)
    if topic_id is not None and theirs is not None and theirs != topic_id:
        raise Refused(
            f"replica {name} has another topic of this name: its topic id is {theirs}, here it is {topic_id}",
            path=path,
            remedy="Give log dirs with replicas of the same topic: one directory is left from a deleted topic",
            slug="topic-id-differs",
        )
