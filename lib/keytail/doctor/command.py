"""The command `doctor`: check whether this machine is ready for the other commands; with --warm, compile the kernels.

Changes only the cache of compiled kernels and takes no lock, so it may run beside a broker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from keytail.cli import rows as show
from keytail.cli.configuration import Configuration
from keytail.cli.progress import Reporter
from keytail.doctor import machine
from keytail.doctor.log_dirs import clock, log_dirs
from keytail.doctor.row import FAIL, OK, CheckRow
from keytail.errors import KeytailError
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.owner import work_as_owner


def doctor(
    *,
    warm: bool,
    now_ms: int,
    paths: Sequence[str] = (),
    configuration: Configuration | None = None,
    master: str | None = None,
    delta_jars: str | None = None,
    fs: FileSystem = LOCAL,
) -> list[CheckRow]:
    """Return a row for each check. `warm` fills the cache of kernels before it is checked. The log dirs are checked if
    `paths` are given, and the executors if `master` is given."""
    if warm:
        _warm()
    rows = [machine.python(), machine.java(), machine.spark(), machine.delta(delta_jars), machine.native()]
    rows += [machine.cache(), machine.descriptors(), machine.memory()]
    work_as_owner(fs, [path for path in paths if fs.exists(path)])
    rows += log_dirs(fs, paths, now_ms, configuration or Configuration()) if paths else [clock(now_ms, None)]
    return rows + (_executors(master, paths) if master else [])


def _warm() -> None:
    with Reporter("doctor", []) as reporter:
        reporter.note("compiling the kernels that are not in the cache; about a minute the first time")
        from keytail.doctor.warm import warm as compile_all  # noqa: PLC0415 (brings in the compiler)

        compiled, left = compile_all(reporter.note)
        rest = f"; {left} for rare cases are compiled when they are needed" if left else ""
        reporter.note(f"{compiled} kernels are compiled{rest}")


def _executors(master: str, paths: Sequence[str]) -> list[CheckRow]:
    from keytail.doctor.executors import ask_executors, differences, look  # noqa: PLC0415 (brings in Spark)
    from keytail.run.session import session_of_run  # noqa: PLC0415 (as the line above)

    with contextlib.ExitStack() as run, Reporter("doctor", []) as reporter:
        reporter.note(f"starting Spark on {master}")
        try:
            seen, problems = ask_executors(session_of_run(run, master, submitted=False), paths)
        except KeytailError as problem:
            return [CheckRow(f"executors of {master}", FAIL, problem.what, problem.remedy or "")]
    here, rows = look(paths), []
    remedy = "Mount the log dirs at the same path on all hosts, and install the same keytail on them (run/CLUSTER.md)"
    for host, there in sorted(seen.items()):
        different = differences(here, there)
        found = "; ".join(different) or f"Python {there.python}, {', '.join(there.versions)}, the same log dirs"
        rows.append(CheckRow(f"executor on {host}", FAIL if different else OK, found, remedy if different else ""))
    rows += [CheckRow(f"executors of {master}", FAIL, problem, remedy) for problem in problems]
    return rows


def exit_status(rows: Sequence[CheckRow]) -> int:
    return 1 if any(row.status == FAIL for row in rows) else 0


def print_table(rows: Sequence[CheckRow]) -> None:
    console = show.output_console()
    table = Table(title="This machine", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("check", "status", "found"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(escape(row.check), show.styled(row.status), escape(row.found))
    console.print(table)
    for row in rows:
        if row.remedy:
            console.print(f"\n{escape(row.check)} {show.styled(row.status)}: {escape(row.remedy)}", soft_wrap=True)
