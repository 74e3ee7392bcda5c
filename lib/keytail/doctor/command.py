"""Declares the command `doctor`: flags, rows, statuses, exit status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated

from keytail.cli import options as o
from keytail.cli.command import BROKER, Command
from keytail.cli.configuration import BrokerSettings, Configuration
from keytail.cli.flags import FromFlags
from keytail.cli.selection import chosen_log_dirs
from keytail.cli.statuses import Status, styled
from keytail.cli.table import STATUS, Column, about, print_paragraph, print_rows

OK, WARN, FAIL = "ok", "warn", "fail"

Warm = Annotated[bool, o.flag(
    "--warm",
    "Compile all kernels now, which takes about a minute. This is needed once for each version of keytail and each "
    "user. Without the flag, the first run of each command compiles its kernels.",
)]


def _log_dirs(configuration: Configuration, log_dirs: o.LogDirs = None, config: o.Config = None) -> tuple[str, ...]:
    return chosen_log_dirs(o.comma_lists(log_dirs), configuration) if log_dirs or config else ()


@dataclass(frozen=True)
class Request:
    """All parameters of `doctor`, with the defaults of its flags."""

    _: KW_ONLY
    warm: Warm = False
    log_dirs: Annotated[tuple[str, ...], FromFlags(_log_dirs)] = ()
    configuration: BrokerSettings = field(default_factory=Configuration)
    master: o.Master = None
    delta_jars: o.DeltaJars = None


@dataclass(frozen=True)
class CheckRow:
    """The result of one check."""

    check: Annotated[str, "name of the check"]
    status: str
    found: Annotated[str, "what was found"]
    remedy: Annotated[str, "what to do about `warn` and `fail`"] = ""
    log_dir: Annotated[str | None, "for a check of a log dir: its path"] = None
    clean_shutdown: Annotated[
        bool | None, "for a log dir: whether the last broker stopped cleanly; `null`: not checked, or unknown"
    ] = None
    held: Annotated[
        bool | None, "for a log dir: whether a broker or another run has its lock; `null`: not checked, or unknown"
    ] = None


def exit_status(rows: Sequence[CheckRow], request: Request | None = None) -> int:
    return 1 if any(row.status == FAIL for row in rows) else 0


_COLUMNS: tuple[Column[CheckRow], ...] = (
    Column("check", lambda row: row.check, is_number=False),
    STATUS,
    Column("found", lambda row: row.found, is_number=False),
)


def show_rows(rows: Sequence[CheckRow], request: Request) -> None:
    print_rows("This machine", _COLUMNS, rows)
    print_paragraph([], [about(row.check, row.remedy, styled(row.status)) for row in rows if row.remedy])


DOCTOR = Command(
    name="doctor",
    also_called=("check", "diagnose", "health", "preflight", "setup", "warm", "info", "environment"),
    help="Check whether this machine is ready for the other commands; with --warm, compile their kernels in advance."
    "\n\n"
    "With --log-dirs or --config, also check the log dirs: owner, storage, free space, lock. With --master, run a "
    "small job that checks whether all executors have the same packages, and the same log dirs at the same paths.",
    request=Request,
    run="keytail.doctor.driver:doctor",
    extras=lambda request: (),  # doctor itself reports what is missing
    examples=(
        f"keytail doctor {BROKER}",
        "keytail doctor --warm",
        "keytail doctor --master spark://host:7077 --log-dirs /var/lib/kafka",
    ),
    rows={"": CheckRow},
    statuses={
        "ok": Status("no problem was found", "done"),
        "warn": Status("runs work, but are slower than necessary, or some are refused", "notable"),
        "fail": Status("runs would fail", "failed"),
    },
    exits={1: "if a check failed"},
    show=show_rows,
    exit_status=exit_status,
)
