"""The command lines of commands for repair and recovery: `salvage`, `undo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import choice_of, configuration_of, reported
from keytail.errors import UsageProblem

To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="DIR",
        help="Directory for the new partition directories: empty or new, and outside of every log dir.",
    ),
]
Originals = Annotated[
    str,
    typer.Option("--originals", metavar="DIR", help="Directory that was given with --keep-originals."),
]
Run = Annotated[
    str | None,
    typer.Option("--run", metavar="ID", help="Id of the run, as printed by `compact` and by --list."),
]
ListRuns = Annotated[bool, typer.Option("--list", help="List the runs that have a backup. Default without --run.")]
MovedLogDirs = Annotated[
    list[str] | None,
    typer.Option(
        "--log-dirs",
        metavar="DIR[,DIR]",
        help="Current log dirs of the partitions. Default: the log dirs that they had in the run.",
    ),
]
Forget = Annotated[
    bool,
    typer.Option("--forget", help="Remove the backup of the run, which frees its space. It cannot be undone then."),
]
ExecuteUndo = Annotated[
    bool,
    typer.Option(
        "--execute",
        help="Change files. Without it the command prints what it would do. The broker must be stopped, except for "
        "--forget.",
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


@reported
def undo(
    originals: Originals,
    run: Run = None,
    list_runs: ListRuns = False,
    log_dirs: MovedLogDirs = None,
    partitions: o.Partitions = None,
    forget: Forget = False,
    execute: ExecuteUndo = False,
    shared_storage: o.SharedStorage = False,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Restore partitions to the state before a compaction that kept its originals.

    Only if everything that the run wrote is unchanged; what was appended since is retained. Without --execute it
    prints what it would do, and what prevents it.
    """
    from keytail.undo import command as verb  # noqa: PLC0415 (--help stays fast)
    from keytail.undo import table as report  # noqa: PLC0415 (--help stays fast)

    moved = tuple(str(Path(path).absolute()) for path in o.comma_lists(log_dirs))
    request = verb.Request(originals, run, moved, o.comma_lists(partitions), execute, forget, shared_storage)
    if run is None or list_runs:
        if forget or execute:
            raise UsageProblem(
                "--forget and --execute require --run", remedy="Give a run that --list shows", slug="missing-flag"
            )
        runs = verb.kept_runs(request)
        if output is o.Output.json:
            show.print_json(runs)
        else:
            report.print_runs(runs, originals)
        raise typer.Exit(0)
    rows = verb.undo(request)
    if output is o.Output.json:
        show.print_json(rows)
    else:
        report.print_table(rows, f"Undo of run {run}" if execute else "Dry run: nothing was changed")
    if text := report.next_step(rows, request):
        show.tell(f"\n{text}")
    raise typer.Exit(verb.exit_status(rows))
