"""The verb `doctor`: is this machine ready for the other verbs; with --warm, the kernels compiled ahead.

Each check is a function without arguments that gives a row; CHECKS lists them. Nothing is changed but the cache of
compiled kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from keytail.app import rows as show
from keytail.app.progress import Reporter
from keytail.app.workers import cores
from keytail.errors import UsageProblem
from keytail.spark.memory import map_memory_bytes, physical_bytes
from keytail.spark.session import java_version, require_java


@dataclass(frozen=True)
class CheckRow:
    """One check. `status`: `good`, `slow` (all works, but not as fast as it could), or `missing`."""

    check: str
    status: str
    found: str
    remedy: str = ""


def _java() -> CheckRow:
    try:
        java = require_java()
    except UsageProblem as problem:
        return CheckRow("Java", "missing", problem.what, problem.remedy or "")
    return CheckRow("Java", "good", f"{java}, version {java_version(java)}")


def _native() -> CheckRow:
    from keytail.kernels import native  # noqa: PLC0415 (brings in the compiler)

    found = f"{native.CHOICE} ({native.CRC_FUNCTION or 'no C function'}, {native.HASH_NAME})"
    if native.NATIVE:
        return CheckRow("checksum and hash", "good", found)
    return CheckRow("checksum and hash", "slow", found, "Install the wheels of crc32c and xxhash for this machine")


def _cache() -> CheckRow:
    from keytail.kernels import jit  # noqa: PLC0415 (brings in the compiler)

    if jit.CACHE_FOLDER is None:
        remedy = "Set KEYTAIL_CACHE_DIR to a folder that this user may write to"
        return CheckRow("compiled kernels", "slow", "no folder to keep them in: each process compiles anew", remedy)
    kept = sum(name.endswith(".nbi") for _, _, names in os.walk(jit.CACHE_FOLDER) for name in names)
    found = f"{kept} in {jit.CACHE_FOLDER}"
    if kept:
        return CheckRow("compiled kernels", "good", found)
    return CheckRow("compiled kernels", "slow", found, "keytail doctor --warm compiles them ahead, in about a minute")


def _memory() -> CheckRow:
    share = show.human_bytes(map_memory_bytes(cores()))
    found = f"{show.human_bytes(physical_bytes())}, {cores()} cores: {share} for the map of one task (--map-memory)"
    return CheckRow("memory", "good", found)


CHECKS: tuple[Callable[[], CheckRow], ...] = (_java, _native, _cache, _memory)


def doctor(*, warm: bool) -> list[CheckRow]:
    """A row for each check, those of the cache after what `warm` has put into it."""
    if warm:
        _warm()
    return [check() for check in CHECKS]


def _warm() -> None:
    with Reporter("doctor", 0, 0) as reporter:
        reporter.note("compiling what is not in the cache yet; about a minute the first time")
        from keytail.app.warm import warm as compile_all  # noqa: PLC0415 (brings in the compiler)

        compiled, left = compile_all(reporter.note)
        rest = f"; {left} of rare cases when they are needed" if left else ""
        reporter.note(f"{compiled} kernels are compiled{rest}")


def exit_status(rows: Sequence[CheckRow]) -> int:
    return 1 if any(row.status == "missing" for row in rows) else 0


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
