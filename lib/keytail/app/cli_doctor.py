"""The command line of the verb about this machine: `doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from keytail.app import options as o
from keytail.app import rows as show
from keytail.app.command import reported

Warm = Annotated[
    bool,
    typer.Option(
        "--warm",
        help="Compile all kernels now, as the user that will run the other verbs: about a minute, once for each "
        "version. Else the first run of each verb does.",
    ),
]


@reported
def doctor(warm: Warm = False, output: o.OutputFlag = o.Output.table) -> None:
    """Say whether this machine is ready for the other verbs; with --warm compile what they need ahead.

    keytail doctor --warm
    """
    from keytail.app import doctor as verb  # noqa: PLC0415 (--help and --version stay fast)

    rows = verb.doctor(warm=warm)
    if output is o.Output.json:
        show.print_json(rows)
    else:
        verb.print_table(rows)
    raise typer.Exit(verb.exit_status(rows))
