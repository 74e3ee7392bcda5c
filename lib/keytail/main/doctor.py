"""The command line of `doctor`, which checks this machine."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import configuration_of, reported

Warm = Annotated[
    bool,
    typer.Option(
        "--warm",
        help="Compile all kernels now, as the user that will run the other commands: about a minute, once for each "
        "version. Otherwise the first run of each command compiles them.",
    ),
]


@reported
def doctor(
    warm: Warm = False,
    log_dirs: o.LogDirs = None,
    config: o.Config = None,
    master: o.Master = None,
    delta_jars: o.DeltaJars = None,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Check whether this machine is ready for the other commands; with --warm, compile their kernels in advance.

    With --log-dirs or --config, check the log dirs too: owner, storage, free space, lock. With --master, a small job
    checks whether all executors have the same packages, and the same log dirs at the same paths.
    """
    from keytail.cli.selection import chosen_log_dirs  # noqa: PLC0415 (--help and --version stay fast)
    from keytail.doctor import command as verb  # noqa: PLC0415 (--help and --version stay fast)

    paths: tuple[str, ...] = ()
    configuration = configuration_of(config)
    if log_dirs or config:
        paths = chosen_log_dirs(o.comma_lists(log_dirs), configuration)
    now_ms = time.time_ns() // 1_000_000
    rows = verb.doctor(
        warm=warm, now_ms=now_ms, paths=paths, configuration=configuration, master=master, delta_jars=delta_jars
    )
    if output is o.Output.json:
        show.print_json(rows)
    else:
        verb.print_table(rows)
    raise typer.Exit(verb.exit_status(rows))
