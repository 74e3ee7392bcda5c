"""Looks in each replica for records with erased keys (`audit --erased`), in place of comparing the replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keytail.audit.command import AuditRow, Request
from keytail.cli.progress import Reporter
from keytail.cli.replicas import Replica
from keytail.console import print_message
from keytail.erase.finding import Left, find_remaining
from keytail.erase.keys import ErasedKeys, read_keys_file
from keytail.erase.other_directories import other_directories
from keytail.errors import ErrorText, KeytailError, Refused, in_words, joined
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.partition import LogDirFacts, PartitionEntry, PartitionFacts, survey_partition
from keytail.run.rates import INDEXED_BYTES_PER_S
from keytail.run.rows import status_of
from keytail.run.tasks import Outcome
from keytail.run.watching import sending_progress
from keytail.run.workers import workers_of_run

# The status of a partition is the first of these that one of its replicas has.
_STATUSES = ("left", "corrupt", "failed", "refused", "unread", "absent")

Hosting = Mapping[tuple[str, int], Sequence[tuple[Replica, LogDirFacts, PartitionEntry]]]


@dataclass(frozen=True)
class _InReplica:
    """What was found in one replica. `facts` is None if the replica has only other directories of the partition."""

    name: str
    facts: PartitionFacts | None
    left: Left | None
    problem: KeytailError | None
    not_read: tuple[str, ...]

    @property
    def status(self) -> str:
        if self.left is not None and self.left.records:
            return "left"
        if self.problem is not None:
            return status_of(self.problem)
        return "unread" if self.not_read else "absent"

    def reported(self) -> dict[str, Any]:
        left, facts = self.left, self.facts
        return {
            "name": self.name,
            "path": facts and facts.path,
            "segments": len(facts.segments) if facts else 0,
            "bytes": facts.log_bytes if facts else 0,
            "records_left": left and left.records,
            "first_left": left.first_offset if left and left.records else None,
            "not_read": list(self.not_read),
        }

    def notes(self) -> list[str]:
        found = []
        if self.left is not None and (n := self.left.records):
            has = f"{n:,} record{'' if n == 1 else 's'} with these keys"
            found.append(f"{self.name} has {has}, the first at offset {self.left.first_offset}")
        if self.not_read:
            found.append(f"{self.name} may have more such records in what was not read: {', '.join(self.not_read)}")
        return found


def find_left(
    fs: FileSystem, request: Request, replicas: Sequence[Replica], hosting: Hosting, on_row: Callable[[AuditRow], None]
) -> list[AuditRow]:
    """Return a row for each partition, sorted by topic and partition; `on_row` is called with each of them."""
    assert request.erased is not None
    keys = read_keys_file("--erased", request.erased, request.key_format, request.key_schema)
    others = {replica.name: other_directories(fs, replica.log_dirs) for replica in replicas}
    for found in others.values():
        found.refuse_without_partition(hosting, request.partition_filter)
    surveyed = [
        {replica.name: survey_partition(fs, log_dir, entry) for replica, log_dir, entry in hosting[key]}
        for key in sorted(hosting)
    ]
    payloads = [(facts, keys) for of_one in surveyed for facts in of_one.values()]
    sizes = [sum(facts.log_bytes for facts in of_one.values()) for of_one in surveyed]
    names = [f"{topic}-{partition}" for topic, partition in sorted(hosting)]
    rows: list[AuditRow] = []
    with contextlib.ExitStack() as run, Reporter("audit", list(zip(names, sizes, strict=True))) as reporter:
        seconds = [facts.log_bytes / INDEXED_BYTES_PER_S for facts, _ in payloads]
        engine = workers_of_run(run, reporter, request.master, seconds, kernels="erase", submitted=request.submitted)
        outcomes = iter(engine.run_bundle(payloads, count_task, name="audit: find keys"))
        for (topic, partition), of_one, size in zip(sorted(hosting), surveyed, sizes, strict=True):
            of_replicas = []
            for replica, found in others.items():
                facts, paths = of_one.get(replica), found.of(topic, partition)
                if facts is not None or paths:
                    outcome = next(outcomes) if facts is not None else None
                    of_replicas.append(_in_replica(replica, facts, outcome, paths))
            row = _row(topic, partition, of_replicas)
            rows.append(row)
            on_row(row)
            reporter.done(row.name, row.status, size, row.error)
    return rows


def count_task(payload: tuple[PartitionFacts, ErasedKeys], attempt: str) -> Left:
    """Count the records in one directory. Raises the errors of `find_remaining`, and Refused for a state that is not
    read."""
    facts, keys = payload
    if facts.problems:
        raise Refused(
            joined(facts.problems), path=facts.path, remedy="If a broker is running there, run the audit again",
            slug="unexpected-partition-state",
        )  # fmt: skip
    with sending_progress(facts.path, attempt, "find"):
        return find_remaining(LOCAL, facts, keys)


def _in_replica(
    name: str, facts: PartitionFacts | None, outcome: Outcome[Left] | None, paths: Sequence[str]
) -> _InReplica:
    if outcome is None:
        return _InReplica(name, None, None, None, tuple(paths))
    if outcome.trace:
        print_message(outcome.trace, "error")
    not_read = outcome.value.not_read if outcome.value is not None else ()
    return _InReplica(name, facts, outcome.value, outcome.problem, (*not_read, *paths))


def _row(topic: str, partition: int, found: Sequence[_InReplica]) -> AuditRow:
    statuses = {item.status for item in found}
    errors = [ErrorText(in_words(item.problem)) for item in found if item.problem is not None]
    return AuditRow(
        topic, partition, next(status for status in _STATUSES if status in statuses), joined(errors),
        replicas=tuple(item.reported() for item in found),
        notes=tuple(note for item in found for note in item.notes()),
    )  # fmt: skip
