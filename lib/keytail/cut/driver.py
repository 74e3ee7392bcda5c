"""Reads the log dirs of a whole cluster, decides the cut, and with `execute` writes new log dirs (CUT.md).

The source is only read. No lock is taken, since a lock would create a file in the log dir. If a process holds the
lock of a log dir, the run is refused.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from keytail.acting_user import as_caller
from keytail.cli.outside import refuse_unless_empty
from keytail.cli.progress import Reporter
from keytail.cli.replicas import directories_of, replicas_of
from keytail.console import print_message
from keytail.cut.cluster import Cluster, Hosted, find_cluster
from keytail.cut.command import CutRow, GroupOffset, Request
from keytail.cut.fixed_point import PartitionKey
from keytail.cut.partition import Examined, examine
from keytail.cut.plan import Plan, decide
from keytail.cut.write import Written, finish, make_directories, output_paths, write_partition, write_rest
from keytail.errors import EXPLAINED, ErrorText, Refused, UsageProblem, in_words
from keytail.format import names
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import is_held
from keytail.log.records.chunk import SegmentReader
from keytail.run.kernels import compile_kernels
from keytail.run.memory import cores
from keytail.run.rows import status_of
from keytail.threads import Threads

_NOT_WRITTEN = "not-written"
_WRITERS_PER_CORE = 4


def cut(
    request: Request, fs: FileSystem = LOCAL, on_row: Callable[[CutRow], None] = lambda row: None
) -> list[CutRow]:
    """Cut the cluster; without `execute` only compute the cut. Returns a row for each partition, in the order of names.

    If a partition cannot be cut, nothing is written, and the other rows have the status `not-written`. Raises Refused
    if the log dirs are not those of one cluster, or if the logs allow two different cuts.
    """
    log_dirs = directories_of(request.replicas)
    with as_caller():
        output = os.path.realpath(request.output_dir)
    _check(fs, log_dirs, output)
    cluster = find_cluster(fs, replicas_of(fs, request.replicas))
    for note in cluster.notes:
        print_message(f"keytail: {note}", "warning")
    sizes = [(_name(hosted.key), _log_bytes(fs, hosted)) for hosted in cluster.partitions]
    with Reporter("cut", sizes) as reporter:
        compile_kernels(["cut"], reporter.note)
        reporter.watch()

        def examined_in_thread(hosted: Hosted, size: tuple[str, int]) -> Examined | CutRow:
            one = _examined(fs, SegmentReader(fs), hosted)
            name, size_bytes = size
            error = one.error if isinstance(one, CutRow) else ""
            reporter.done(name, one.status if isinstance(one, CutRow) else "read", size_bytes, error)
            return one

        with Threads(cores()) as threads:  # kernels release the GIL
            found = list(threads.map(examined_in_thread, cluster.partitions, sizes))
        examined = [one for one in found if isinstance(one, Examined)]
        if len(examined) < len(found):
            rows = [one if isinstance(one, CutRow) else _row(one, _NOT_WRITTEN) for one in found]
        else:
            plan = decide(examined, request.complete_before_ms)
            rows = [_planned(one, plan, request) for one in examined]
            if request.execute:
                reporter.note("writing the log dirs")
                rows = _write(fs, cluster, examined, rows, output)
    for row in rows:
        on_row(row)
    return rows


def _name(key: PartitionKey) -> str:
    return names.partition_dir(*key)


def _check(fs: FileSystem, log_dirs: Sequence[str], output: str) -> None:
    if not log_dirs:
        raise UsageProblem(
            "no --replica is given",
            remedy="Give --replica once for each broker and controller, with all of its log dirs",
            slug="no-replicas-given",
        )
    refuse_unless_empty(fs, output, log_dirs, "--output-dir")
    for log_dir in log_dirs:
        if fs.exists(log_dir) and is_held(log_dir, fs):
            raise Refused(
                "the log dir is in use, or its lock cannot be checked",
                path=log_dir,
                remedy="Give snapshots or copies of the log dirs, not the log dirs of running brokers",
                slug="log-dir-in-use",
            )


def _log_bytes(fs: FileSystem, hosted: Hosted) -> int:
    try:
        return sum(size for host in hosted.hosts for _, size, _ in fs.scan_sizes(host.entry.path, names.LOG).sized)
    except OSError:  # the row of the partition has the reason
        return 0


def _examined(fs: FileSystem, reader: SegmentReader, hosted: Hosted) -> Examined | CutRow:
    if hosted.refused:
        return CutRow(*hosted.key, "refused", hosted.refused)
    try:
        return examine(fs, reader, hosted)
    except EXPLAINED as problem:
        return CutRow(*hosted.key, status_of(problem), in_words(problem))


def _row(one: Examined, status: str) -> CutRow:
    replicas = tuple(
        {
            "name": log.host.node.replica.name,
            "path": log.facts.path,
            "in_sync": log.host.is_in_sync,
            "log_start_offset": log.facts.log_start_offset,
            "log_end_offset": log.end_offset,
            "new_log_end_offset": None,
            "torn": log.torn,
        }
        for log in one.logs
    )
    ends = [log.end_offset for log in one.logs if log.host.is_in_sync]
    return CutRow(*one.hosted.key, status, replicas=replicas, log_end_offset=max(ends))


def _planned(one: Examined, plan: Plan, request: Request) -> CutRow:
    key = one.hosted.key
    cut_offset = plan.solution.cuts[key]
    before, after = plan.before.get(key, {}), plan.after.get(key, {})
    row = replace(
        _row(one, "whole"),
        cut_offset=cut_offset,
        records_cut=one.records_above(cut_offset),
        transactions_cut=plan.transactions_cut.get(key, 0),
        reason=_reason(one, plan),
        groups=tuple(GroupOffset(group, offset, after.get(group)) for group, offset in sorted(before.items())),
        notes=one.notes(cut_offset),
    )
    return replace(row, status="would-cut") if row.is_cut else row


def _reason(one: Examined, plan: Plan) -> str:
    reason = plan.solution.reasons[one.hosted.key]
    if reason.kind == "transaction":
        return f"the transaction of {reason.subject} is not complete in all partitions"
    if reason.kind == "committed-offset":
        return f"group {reason.subject} committed an offset above the cut of the partition that the offset is for"
    return one.limited_by


def _write(
    fs: FileSystem, cluster: Cluster, examined: Sequence[Examined], rows: Sequence[CutRow], output: str
) -> list[CutRow]:
    """Write the output and return the rows. After a failure no further partition is begun, and `meta.properties` is not
    written, so no broker starts on the output."""
    paths = output_paths(output, cluster.nodes)
    make_directories(fs, output, paths)
    run_id = secrets.token_hex(4)
    written: dict[str, dict[PartitionKey, Written]] = {log_dir: {} for log_dir in paths}
    has_failed = threading.Event()

    def write_in_thread(one: Examined, row: CutRow) -> CutRow:
        if has_failed.is_set():
            why = ErrorText("the output is not complete: another partition failed")
            return replace(row, status=_NOT_WRITTEN, error=why)
        try:
            return _written(fs, SegmentReader(fs), one, row, paths, run_id, written)
        except EXPLAINED as problem:
            has_failed.set()
            return replace(row, status="failed", error=in_words(problem))

    with Threads(_WRITERS_PER_CORE * cores()) as threads:  # writers mostly wait for the disk
        done = list(threads.map(write_in_thread, examined, rows))
    if has_failed.is_set():
        return done
    for node in cluster.nodes:
        write_rest(fs, node, cluster.metadata, paths, written)
    finish(fs, cluster.nodes, paths)
    return done


def _written(
    fs: FileSystem,
    reader: SegmentReader,
    one: Examined,
    row: CutRow,
    paths: Mapping[str, str],
    run_id: str,
    written: dict[str, dict[PartitionKey, Written]],
) -> CutRow:
    """Write all replicas of a partition, add them to `written`, and return the row of the partition."""
    assert row.cut_offset is not None
    replicas, notes = [], list(row.notes)
    for log, facts in zip(one.logs, row.replicas, strict=True):
        source = log.host.log_dir.path
        new = write_partition(
            fs, reader, one.common_source(row.cut_offset) or log, one.hosted, row.cut_offset, paths[source], run_id
        )
        written[source][one.hosted.key] = new
        replicas.append(facts | {"new_log_end_offset": new.end_offset})
        notes += [f"replica {log.host.node.replica.name}: {note}" for note in new.notes]
    status = "cut" if row.status == "would-cut" else row.status
    return replace(row, status=status, replicas=tuple(replicas), notes=tuple(notes))
