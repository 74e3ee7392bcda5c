"""Creates the report of runs from their ledger. A report from a ledger has no phases and no segments."""

from __future__ import annotations

import time
from collections.abc import Sequence

from keytail.cli.options import parse_time
from keytail.cli.rows import human_seconds
from keytail.cli.whole_file import refuse_file
from keytail.console import print_message
from keytail.durations import time_text
from keytail.errors import UsageProblem
from keytail.ledger import history
from keytail.ledger.command import PartitionRow, RunRow, ledger_at
from keytail.ledger.of_run import LedgerFlags
from keytail.log.fs import LOCAL
from keytail.report.command import Request
from keytail.report.facts import Downtime, Report
from keytail.report.of_rows import partitions
from keytail.report.writing import write_page

_EXIT = {"done": 0, "partly": 3, "failed": 1}


def write_report(request: Request) -> int:
    """Write the page of the requested runs to the file, and return the exit status."""
    if request.run_id is not None and request.since is not None:
        raise UsageProblem(
            "--run and --since cannot be combined", remedy="Give only one of the two flags", slug="conflicting-flags"
        )
    since_ms = None if request.since is None else parse_time(request.since, "--since")
    refuse_file(LOCAL, request.file, (), "FILE.html")
    flags = ledger_at(request.ledger, request.delta_jars)
    write_page(request.file, report_of_ledger(flags, request.run_id, since_ms, master=request.master))
    print_message(f"keytail: the report is {request.file}")
    return 0


def report_of_ledger(
    flags: LedgerFlags, run_id: str | None, since_ms: int | None, *, master: str | None = None
) -> Report:
    """Return the report of all runs since `since_ms` or, if this is None, of one run: the run with the given id, or the
    latest run. Raises UsageProblem if the ledger has no matching run."""
    if since_ms is None:
        return of_run(*history.run(flags, run_id or "", master=master, newest=run_id is None))
    runs, rows = history.runs_since(flags, since_ms, master=master)
    if not runs:
        raise UsageProblem(
            "the ledger has no run that began at or after --since",
            path=flags.path,
            remedy="Give --since with an earlier time",
            slug="no-run-since",
        )
    return of_runs(runs, rows)


def of_run(run: RunRow, rows: Sequence[PartitionRow]) -> Report:
    ended_early = (run.error or run.status) if run.status == history.INTERRUPTED else ""
    return Report(
        title=f"{run.command}, run {run.run_id}",
        command=run.command,
        execute=True,
        partitions=partitions(rows),
        start_ms=run.start_ms or 0,
        end_ms=run.end_ms,
        now_ms=run.now_ms or run.start_ms or 0,
        arguments=("keytail", *run.arguments),
        settings=dict(run.config),
        host=run.host,
        versions=dict(run.versions),
        exit_status=_EXIT.get(run.status),
        ended_early=ended_early,
        notes=(run.error,) if run.error and not ended_early else (),
        downtimes=_downtimes([run]),
    )


def of_runs(runs: Sequence[RunRow], rows: Sequence[PartitionRow]) -> Report:
    """Return the report of several runs, with one row for each partition of each run."""
    first = runs[0].start_ms or 0
    hosts = sorted({run.host for run in runs})
    commands = sorted({run.command for run in runs})
    return Report(
        title=f"{len(runs)} run{'' if len(runs) == 1 else 's'} since {time_text(first)}",
        command=commands[0] if len(commands) == 1 else "history",
        execute=True,
        partitions=partitions(rows),
        start_ms=first,
        end_ms=None,
        now_ms=time.time_ns() // 1_000_000,
        host=", ".join(hosts),
        runs=tuple(_run_facts(run) for run in runs),
        downtimes=_downtimes(runs),
    )


def _downtimes(runs: Sequence[RunRow]) -> tuple[Downtime, ...]:
    return tuple(
        Downtime(run.broker, run.down_at_ms, run.reachable_at_ms, run.in_sync_at_ms)
        for run in runs if run.broker is not None
    )  # fmt: skip


def _run_facts(run: RunRow) -> dict[str, str]:
    return {
        "run": run.run_id,
        "started": "" if run.start_ms is None else time_text(run.start_ms),
        "took": human_seconds(run.start_ms, run.end_ms),
        "host": run.host,
        "command": run.command,
        "status": run.status,
        "downtime": f"{run.downtime or 'unknown'} ({run.broker})" if run.broker is not None else "",
        "reason": run.error,
    }
