"""The command line of `salvage`."""

from __future__ import annotations

from typing import Annotated

import typer

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import choice_of, configuration_of, reported

To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="DIR",
        help="Directory for the new partition directories: empty or new, and outside of every log dir.",
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
    topic_configs: o.TopicConfigs = None,
    metadata_is_current: o.MetadataIsCurrent = False,
    execute: o.Execute = False,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Save the intact batches of damaged partitions to another directory, and list what is lost.

    For a partition that nothing else can repair and no replica has. The log dirs are only read. Without --execute it
    lists what would be lost, and the exit status is 1 if anything would be.
    """
    from keytail.salvage import command as verb  # noqa: PLC0415 (--help stays fast)

    configuration = configuration_of(
        config, topic_config, topic_configs=topic_configs, metadata_is_current=metadata_is_current
    )
    choice = choice_of(configuration, log_dirs, topic, topic_list, partitions)
    rows = verb.salvage(verb.Request(choice=choice, to=to, configuration=configuration, execute=execute))
    if output is o.Output.json:
        show.print_json(rows)
    else:
        verb.print_table(rows, "Salvage" if execute else "Dry run: nothing was written")
    if text := verb.next_steps(rows, execute):
        show.tell(f"\n{text}")
    raise typer.Exit(verb.exit_status(rows))
