"""Checks whether this machine is ready for the other commands; with --warm, compiles their kernels.

The command changes only the cache of compiled kernels and takes no lock, so it may run beside a broker.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from keytail.cli.progress import Reporter
from keytail.doctor import machine
from keytail.doctor.command import FAIL, OK, CheckRow, Request
from keytail.doctor.executors import ask_executors, differences, look
from keytail.doctor.log_dirs import clock, log_dirs
from keytail.errors import KeytailError
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.owner import work_as_owner
from keytail.run.kernels import compile_kernels, kernels_of, refuse_without_cache
from keytail.run.spark.session import session_of_run


def doctor(request: Request, fs: FileSystem = LOCAL) -> list[CheckRow]:
    """Return a row for each check. Log dirs are checked if any are given, executors if a master is given."""
    paths, now_ms = request.log_dirs, time.time_ns() // 1_000_000
    if request.warm:
        _warm()
    rows = [machine.python(), machine.java(), machine.spark(), machine.delta(request.delta_jars), *machine.extras()]
    rows += [machine.native(), machine.cache(), machine.descriptors(), machine.memory()]
    work_as_owner(fs, [path for path in paths if fs.exists(path)])
    rows += log_dirs(fs, paths, now_ms, request.configuration) if paths else [clock(now_ms, None)]
    return rows + (_executors(request.master, paths) if request.master else [])


def _warm() -> None:
    refuse_without_cache()
    with Reporter("doctor", []) as reporter:
        reporter.note("compiling the kernels that are not in the cache: a minute, or longer on a busy machine")
        compile_kernels(None, reporter.note)
        reporter.note(f"{len({item.kernel for item in kernels_of(None)})} kernels are compiled")


def _executors(master: str, paths: Sequence[str]) -> list[CheckRow]:
    with contextlib.ExitStack() as run, Reporter("doctor", []) as reporter:
        reporter.note(f"starting Spark on {master}")
        try:
            seen, problems = ask_executors(session_of_run(run, master, submitted=False), paths)
        except KeytailError as problem:
            return [_failed(master, problem)]
    here, rows = look(paths), []
    remedy = "Mount the log dirs at the same path on all hosts, and install the same keytail on them (run/CLUSTER.md)"
    for host, there in sorted(seen.items()):
        different = differences(here, there)
        found = "; ".join(different) or f"Python {there.python}, {', '.join(there.versions)}, the same log dirs"
        rows.append(CheckRow(f"executor on {host}", FAIL if different else OK, found, remedy if different else ""))
    return rows + [_failed(master, problem) for problem in problems]


def _failed(master: str, problem: KeytailError) -> CheckRow:
    place = f" ({problem.path})" if problem.path is not None else ""
    return CheckRow(f"executors of {master}", FAIL, f"{problem.what}{place}", problem.remedy or "")
