"""Implements doctor's checks of log dirs: owner, file system, free space, lock; and of the clock.

Nothing is created, changed or locked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from keytail.cli import rows as show
from keytail.cli.cluster import GIVE_SETTINGS, Cluster
from keytail.cli.configuration import Configuration
from keytail.cli.kafka_version import infer_kafka_version
from keytail.cli.metadata import read_cluster
from keytail.cli.small_segments import REMEDY as SET_MORE
from keytail.cli.small_segments import small_segments
from keytail.compact.prepared.scratch import bytes_of, is_prepared
from keytail.doctor.command import FAIL, OK, WARN, CheckRow
from keytail.durations import duration_text, time_text
from keytail.errors import KeytailError, Refused, in_words
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.lock import can_detect_holder, is_held
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import LogDirFacts, refuse_unreadable
from keytail.run.storage import is_local

_FUTURE_MS = 3_600_000  # the clock is wrong if a segment is newer than the clock by more than this time
_CLOSED = "Give this user permission to read the whole log dir"


def log_dirs(fs: FileSystem, paths: Sequence[str], now_ms: int, configuration: Configuration) -> list[CheckRow]:
    """Return rows for each log dir, the version of Kafka, the settings of topics, and the clock; only one row if the
    log dirs cannot be listed."""
    try:
        surveyed = survey_log_dirs(fs, paths)
    except (KeytailError, OSError) as problem:
        remedy = (problem.remedy or "") if isinstance(problem, KeytailError) else "Let this user read the log dir"
        what = f"{problem.what} ({problem.path})" if isinstance(problem, KeytailError) else in_words(problem)
        return [CheckRow("log dirs", FAIL, what, remedy or "Pass the directories of log.dirs to --log-dirs")]
    rows: list[CheckRow] = []
    newest = None
    for facts in surveyed:
        try:
            sizes = _sizes(fs, facts)
        except OSError as problem:
            rows.append(CheckRow(facts.path, FAIL, in_words(problem), _CLOSED))
            continue
        newest = max(filter(None, (newest, sizes.newest_ms)), default=None)
        state = replace(_state(facts), clean_shutdown=facts.clean_shutdown)
        of_log_dir = [state, _owner(fs, facts), _access(fs, facts), _room(fs, facts, sizes)]
        rows += [replace(row, log_dir=facts.path) for row in (*of_log_dir, _lock(fs, facts))]
    cluster = read_cluster(fs, paths, configuration)
    kafka = infer_kafka_version(fs, surveyed, cluster)
    rows.append(CheckRow("Kafka", OK, f"version {kafka.sentence}"))
    rows += [CheckRow(f"Kafka: {item.seen}", OK, item.means) for item in kafka.evidence]
    rows.append(metadata(cluster, now_ms))
    if small := small_segments(replace(configuration, cluster=cluster)):
        rows.append(CheckRow("segment.bytes", WARN, small, SET_MORE))
    return [*rows, clock(now_ms, newest)]


def metadata(cluster: Cluster, now_ms: int) -> CheckRow:
    """Return the row of the check whether the metadata log has the settings of the topics."""
    check = "metadata log"
    if cluster.metadata is None:
        return CheckRow(check, WARN, cluster.problem, GIVE_SETTINGS)
    if cluster.is_old(now_ms):
        remedy = "If the rest of the cluster kept running, start and stop this broker to update its settings"
        return CheckRow(check, WARN, cluster.sentence(now_ms), remedy)
    if cluster.is_uncertain:
        return CheckRow(check, WARN, cluster.sentence(now_ms), GIVE_SETTINGS)
    return CheckRow(check, OK, cluster.sentence(now_ms))


def _partitions(n: int) -> str:
    return "1 partition" if n == 1 else f"{n:,} partitions"


def _state(facts: LogDirFacts) -> CheckRow:
    check = facts.path
    if facts.problems:
        return CheckRow(check, FAIL, "; ".join(facts.problems), "Run `keytail verify` for the details")
    found = _partitions(len(facts.partitions))
    if facts.skipped:
        found += f" and {len(facts.skipped)} ignored directories"
    against = [entry for entry in facts.partitions if entry.problems]
    if against:
        first = f"{os.path.basename(against[0].path)}: {'; '.join(against[0].problems)}"
        remedy = "Find out whether a reassignment was interrupted. Runs refuse these partitions, and process all others"
        found += f"; runs refuse {_partitions(len(against))}, for example {first}"
        return CheckRow(check, WARN, found, remedy)
    if facts.clean_shutdown:
        return CheckRow(check, OK, f"{found}, stopped cleanly")
    remedy = "Stop the broker cleanly: after a crash, nothing above the recovery point is compacted"
    return CheckRow(check, WARN, f"{found}; a broker is running here, or was not stopped cleanly", remedy)


def _owner(fs: FileSystem, facts: LogDirFacts) -> CheckRow:
    check = f"{facts.path}: owner"
    try:
        fs.refuse_unless_like(fs.stat(facts.path))
    except Refused as problem:
        return CheckRow(check, WARN, f"{problem.what}: this user can only read", problem.remedy or "")
    return CheckRow(check, OK, "this user can write as the owner of the log dir")


def _access(fs: FileSystem, facts: LogDirFacts) -> CheckRow:
    check, partitions, closed, first = f"{facts.path}: access", 0, 0, None
    for entry in facts.partitions:
        try:
            names_of_it = fs.unreadable(entry.path)
        except FileNotFoundError:  # a running broker has removed the partition
            continue
        partitions += bool(names_of_it)
        closed += len(names_of_it)
        first = first or next((entry for _ in names_of_it), None)
    if first is None:
        return CheckRow(check, OK, "this user can read all files of the partitions")
    found, remedy = f"this user cannot read {closed:,} files in {partitions:,} partitions, which runs refuse", _CLOSED
    try:
        refuse_unreadable(fs, first.path)
    except Refused as problem:
        found += f"; the first file: {problem.what} ({problem.path})"
        remedy = problem.remedy or remedy
    return CheckRow(check, FAIL, found, remedy)


def _room(fs: FileSystem, facts: LogDirFacts, sizes: _Sizes) -> CheckRow:
    check, kind = f"{facts.path}: storage", fs.file_system_type(facts.path)
    free = fs.free_bytes(facts.path)
    found = f"{kind or 'unknown file system'}, {show.human_bytes(free)} free; the largest partition has "
    found += show.human_bytes(sizes.largest_bytes)
    if prepared := sizes.prepared_bytes:
        found += f"; prepared compactions of {len(prepared):,} partitions take {show.human_bytes(sum(prepared))} "
        found += "(`keytail prepared`)"
    if fs.is_read_only(facts.path):
        return CheckRow(check, WARN, f"{found}; mounted read-only", "For runs that write, use --output-dir or a copy")
    if not is_local(kind):
        remedy = "Make sure that no broker can reach this file system, then pass --shared-storage"
        found += "; the file system may not be local, so a lock on another host may have no effect here"
        return CheckRow(check, WARN, found, remedy)
    if free < sizes.largest_segment_bytes:
        found += f", and the largest segment has {show.human_bytes(sizes.largest_segment_bytes)}"
        remedy = "Free more space: a partition with a segment above the free space is refused (not-enough-space). "
        return CheckRow(check, FAIL, found, f"{remedy}`keytail plan` reports how much space each partition needs")
    if free < sizes.largest_bytes:
        remedy = "For a shorter run, free more space. With too little space, the largest partition is compacted in "
        remedy += "passes, group by group, or refused if its largest group does not fit; `keytail plan` reports which"
        return CheckRow(check, WARN, found, remedy)
    return CheckRow(check, OK, found)


def _lock(fs: FileSystem, facts: LogDirFacts) -> CheckRow:
    check = f"{facts.path}: lock"
    if not can_detect_holder(facts.path, fs):
        remedy = "Run on the host on which the log dir is a local file system, as a user that may read its files"
        return CheckRow(check, FAIL, "this system does not show whether a broker holds the lock", remedy)
    if is_held(facts.path, fs):
        remedy = "Stop the broker before a run that writes; commands that only read can run beside it"
        return CheckRow(check, WARN, "a broker or another keytail run holds the lock", remedy, held=True)
    return CheckRow(check, OK, "free", held=False)


def clock(now_ms: int, newest_ms: int | None) -> CheckRow:
    """Return the row of the clock's check. `newest_ms`: mtime of the latest segment, in ms; None if there are no
    segments."""
    found = time_text(now_ms)
    if newest_ms is not None and newest_ms > now_ms + _FUTURE_MS:
        ahead = duration_text(newest_ms - now_ms)
        remedy = "Set the clock, which determines the ages of tombstones and segments. Partitions with such segments "
        remedy += "are refused"
        return CheckRow("clock", FAIL, f"{found}; a segment is {ahead} newer than this time", remedy)
    return CheckRow("clock", OK, found)


@dataclass
class _Sizes:
    """The sizes of the largest partition and the largest segment of a log dir, the latest mtime of a segment in ms
    (None: no segments), and the size of each prepared compaction."""

    largest_bytes: int = 0
    largest_segment_bytes: int = 0
    newest_ms: int | None = None
    prepared_bytes: list[int] = field(default_factory=list)


def _sizes(fs: FileSystem, facts: LogDirFacts) -> _Sizes:
    sizes = _Sizes()
    for entry in facts.partitions:
        try:
            found = fs.scan_sizes(entry.path, names.LOG)
        except FileNotFoundError:  # a running broker has removed the partition
            continue
        each = [size for _, size, _ in found.sized]
        sizes.largest_bytes = max(sizes.largest_bytes, sum(each))
        sizes.largest_segment_bytes = max(sizes.largest_segment_bytes, *each, 0)
        for _, _, mtime_ns in found.sized:
            sizes.newest_ms = max(sizes.newest_ms or 0, mtime_ns // 1_000_000)
        if scratch := [name for name in found.regular if is_prepared(name)]:
            sizes.prepared_bytes.append(bytes_of(fs, entry.path, scratch))
    return sizes
