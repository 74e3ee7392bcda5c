"""The command lines of the verbs for what cannot be mended in place: `salvage`."""

from __future__ import annotations

from typing import Annotated

import typer

from keytail.app import options as o
from keytail.app import rows as show
from keytail.app.command import choice_of, reported
from keytail.app.selection import read_configuration

To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="DIR",
        help="Where the new partition directories are made: an empty directory or a new one, outside of every log dir.",
    ),
]


@reported
def salvage(
    to: To,
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
    config: o.Config = None,
    topic_config: o.TopicConfig = None,
    execute: o.Execute = False,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Save the good batches of damaged partitions to another directory, and list what is lost.

    For a partition that nothing else can mend and no replica has. The log dirs are only read. Without --execute it
    lists what would be lost, and the exit status is 1 if anything is.

    keytail salvage --log-dirs /var/kafka --partitions orders-0 --to /backup/salvaged --execute
    """
    from keytail.app import salvage as verb  # noqa: PLC0415 (--help stays fast)

    configuration = read_configuration(config, topic_config or (), False)
    choice = choice_of(configuration, log_dirs, topic, topic_list, partitions)
    rows = verb.salvage(verb.Request(choice=choice, to=to, configuration=configuration, execute=execute))
    if output is o.Output.json:
        show.print_json(rows)
    else:
        verb.print_table(rows, "Salvage" if execute else "Dry run: nothing was written")
    if text := verb.next_steps(rows, execute):
        show.error_console().print(f"\n{text}", soft_wrap=True)
    raise typer.Exit(verb.exit_status(rows))
