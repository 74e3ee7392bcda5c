"""Decides for every chosen partition whether it is to be compacted; a dry run ends here.

`keytail compact` and jobs/compact.py under spark-submit run the same code. Imports no kernels: a plan needs none.
"""

from __future__ import annotations

import contextlib
import pkgutil

from keytail.cli.metadata import with_metadata
from keytail.cli.selection import choose
from keytail.compact.command import Request
from keytail.compact.planned_rows import row_of_plan
from keytail.compact.planning import plan_partition_of, report_assumptions, report_version_rules
from keytail.compact.removal_limit import report_unhosted
from keytail.log.fs import LOCAL, FileSystem
from keytail.run.each_partition import of_each
from keytail.run.kernels import is_on_this_host, report_uncompiled
from keytail.run.rows import ResultRow
from keytail.run.session import session_of_run
from keytail.undo.options import announce_backup, backup_of


def run(request: Request) -> list[ResultRow]:
    """Plan or compact, in place or to another directory, as the request says; return a row for each partition."""
    if request.prepare:
        return pkgutil.resolve_name("keytail.compact.prepared.driver:prepare")(request)
    where = "out_of_place.driver" if request.is_out_of_place else "execution" if request.execute else "driver"
    step = pkgutil.resolve_name(f"keytail.compact.{where}:{'compact' if request.execute else 'plan'}")
    return step(request)


def plan(request: Request, fs: FileSystem = LOCAL) -> list[ResultRow]:
    """Return a row for each chosen partition: what `compact --execute` would do. Changes and locks nothing."""
    rules = request.rules(fs)
    chosen = choose(fs, request.choice)
    backup = backup_of(fs, request.keep_originals, request.copy_originals, request.choice.log_dirs)
    if backup is not None:
        announce_backup(backup)
    with contextlib.ExitStack() as run:
        if request.submitted:
            session_of_run(run, request.master, submitted=request.submitted)
        configuration = with_metadata(fs, request.choice.log_dirs, request.configuration, rules.now_ms)
        map_memory = request.map_memory()
        rows = of_each(
            chosen.partitions,
            lambda log_dir, entry: row_of_plan(
                plan_partition_of(fs, log_dir, entry, configuration, rules, by_listing=not request.in_detail),
                map_memory,
                in_detail=request.in_detail,
            ),
            fs,
        )
        due = [row for row in rows if row.status == "would-compact"]
        report_assumptions(configuration, (row.topic for row in due))
        report_version_rules(configuration, [row.topic for row in due])
        if due and not request.submitted and is_on_this_host(request.master):
            report_uncompiled("compact")
        if rules.replicas:
            report_unhosted([row.name for row in due if row.removal_limit_replica is None])
        return rows
