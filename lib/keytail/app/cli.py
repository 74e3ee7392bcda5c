"""The command line: `keytail VERB`, and the same verbs for jobs under spark-submit.

Turns flags into requests and results into output and an exit status; the verbs themselves are in the modules
beside this one. Exit statuses: 0 done, 3 partly, 1 nothing or a finding, 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from keytail import __version__
from keytail.app import dump_options as d
from keytail.app import options as o
from keytail.app import rows as show
from keytail.app.selection import Choice, Configuration, chosen_log_dirs, read_configuration
from keytail.errors import KeytailError, UsageProblem
from keytail.spark.rows import ResultRow, exit_status

app = typer.Typer(
    name="keytail",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_SUBMITTED = "under spark-submit"
_MISSING: Any = object()


def main(arguments: Sequence[str] | None = None, *, submitted: bool = False) -> NoReturn:
    """Run a command line and exit with its status. `submitted`: spark-submit has made the driver."""
    program = "spark-submit jobs/" if submitted else "keytail"
    app(args=arguments, prog_name=program, obj=_SUBMITTED if submitted else None)
    sys.exit(0)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"keytail {__version__}")
        raise typer.Exit


@app.callback()
def keytail(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Offline compaction, indexing and audit of Kafka partition logs, on Spark.

    Stop the broker, look with [bold]plan[/], do it with [bold]compact --execute[/], check with
    [bold]verify[/], start the broker.
    """


def _reported(verb: Callable[..., None]) -> Callable[..., None]:
    """Turn an error that ends the whole run into a message on standard error and an exit status."""

    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            verb(*args, **kwargs)
        except (KeytailError, OSError) as problem:
            show.error_console().print(f"[bold red]keytail:[/] {escape(str(problem))}", soft_wrap=True)
            usage = isinstance(problem, UsageProblem)
            if not usage and kwargs.get("output") == o.Output.json:
                show.print_json([])
            raise typer.Exit(2 if usage else 1) from problem
        except KeyboardInterrupt:
            text = "interrupted. Partitions already reported are done; what was begun is as it was, or is "
            text += "finished or undone by the next run with --execute, and by a broker that starts"
            show.error_console().print(f"\n[bold red]keytail:[/] {text}", soft_wrap=True)
            raise typer.Exit(130) from None

    return run


def _choice(
    configuration: Configuration,
    log_dirs: list[str] | None,
    topic: list[str] | None,
    topic_list: list[str] | None,
    partitions: list[str] | None,
) -> Choice:
    return Choice(
        log_dirs=chosen_log_dirs(o.comma_lists(log_dirs), configuration),
        topic_patterns=tuple(topic or ()),
        topics=o.comma_lists(topic_list),
        partitions=o.comma_lists(partitions),
    )


def _finish(rows: list[ResultRow], output: o.Output, title: str, next_step: str, named: Sequence[str]) -> None:
    if output is o.Output.json:
        show.print_json(rows)
    else:
        show.print_table(rows, title)
    if next_step:
        show.error_console().print(f"\n{next_step}", soft_wrap=True)
    raise typer.Exit(exit_status(rows, frozenset(named)))


@app.command()
@_reported
def plan(
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
    config: o.Config = None,
    topic_config: o.TopicConfig = None,
    topics_have_no_overrides: o.NoOverrides = False,
    now: o.Now = None,
    unsafe_clock: o.UnsafeClock = False,
    force: o.Force = False,
    from_log_start: o.FromLogStart = False,
    high_watermark: o.HighWatermarkFlag = o.HighWatermark.checkpoint,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Say for each partition whether a compaction is due, and if not, why. Changes nothing, starts no Spark.

    keytail plan --log-dirs /var/kafka --config server.properties --topic-config orders:cleanup.policy=compact
    """
    from keytail.app import compaction  # noqa: PLC0415 (--help stays fast)

    configuration = read_configuration(config, topic_config or (), topics_have_no_overrides)
    request = compaction.Request(
        choice=_choice(configuration, log_dirs, topic, topic_list, partitions),
        configuration=configuration,
        now_ms=now,
        unsafe_clock=unsafe_clock,
        force=force,
        from_log_start=from_log_start,
        high_watermark=high_watermark.value,
    )
    rows = compaction.plan(request)
    _finish(rows, output, "Plan", _after_plan(rows), o.comma_lists(partitions))


@app.command()
@_reported
def compact(
    context: typer.Context,
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
    config: o.Config = None,
    topic_config: o.TopicConfig = None,
    topics_have_no_overrides: o.NoOverrides = False,
    execute: o.Execute = False,
    now: o.Now = None,
    unsafe_clock: o.UnsafeClock = False,
    force: o.Force = False,
    from_log_start: o.FromLogStart = False,
    deadline: o.Deadline = None,
    master: o.Master = None,
    grouping: o.GroupingFlag = o.Grouping.measured,
    map_memory: o.MapMemory = None,
    max_scratch_bytes: o.MaxScratch = None,
    drop_keyless: o.DropKeyless = False,
    high_watermark: o.HighWatermarkFlag = o.HighWatermark.checkpoint,
    shared_storage: o.SharedStorage = False,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Keep only the newest record of each key, as the broker's own cleaner would. The broker must be stopped.

    Without --execute this is a dry run, as `plan`.

    keytail compact --log-dirs /var/kafka --config server.properties
    --topic-config orders:cleanup.policy=compact --execute
    """
    from keytail.app import compaction  # noqa: PLC0415 (--help and --version stay fast)

    submitted = context.obj == _SUBMITTED
    _refuse_master(submitted, master)
    configuration = read_configuration(config, topic_config or (), topics_have_no_overrides)
    request = compaction.Request(
        choice=_choice(configuration, log_dirs, topic, topic_list, partitions),
        configuration=configuration,
        execute=execute,
        now_ms=now,
        unsafe_clock=unsafe_clock,
        force=force,
        from_log_start=from_log_start,
        high_watermark=high_watermark.value,
        deadline_minutes=deadline,
        master=master,
        grouping=grouping.value,
        map_memory_bytes=map_memory,
        max_scratch_bytes=max_scratch_bytes,
        drop_keyless=drop_keyless,
        shared_storage=shared_storage,
        submitted=submitted,
    )
    named = o.comma_lists(partitions)
    if not execute:
        rows = compaction.plan(request)
        _finish(rows, output, "Dry run: nothing was changed", _after_dry_run(rows), named)
    rows = compaction.compact(request)
    _finish(rows, output, "Compacted", _after_compact(rows), named)


@app.command()
@_reported
def verify(
    context: typer.Context,
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
    config: o.Config = None,
    master: o.Master = None,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Check every batch, offset, index entry and file name. Reads only; exit status 1 when anything is wrong.

    keytail verify --log-dirs /var/kafka --topic 'orders|users'
    """
    from keytail.app import verification  # noqa: PLC0415 (--help and --version stay fast)

    configuration = read_configuration(config, (), False)
    choice = _choice(configuration, log_dirs, topic, topic_list, partitions)
    rows = verification.verify(choice, master=master, submitted=context.obj == _SUBMITTED)
    if output is o.Output.json:
        show.print_json(rows)
    else:
        verification.print_table(rows)
    raise typer.Exit(verification.exit_status(rows))


@app.command()
@_reported
def describe(
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
    config: o.Config = None,
    topic_config: o.TopicConfig = None,
    topics_have_no_overrides: o.NoOverrides = False,
    every: o.AllSettings = False,
    records: o.CountRecords = False,
    now: o.Now = None,
    high_watermark: o.HighWatermarkFlag = o.HighWatermark.checkpoint,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Say what partitions hold, whether a compaction is due, what is in its way, and which settings hold.

    keytail describe --log-dirs /var/kafka --config server.properties --topic orders --all
    """
    from keytail.app import describe as verb  # noqa: PLC0415 (--help and --version stay fast)
    from keytail.app.planning import Rules, check_clock  # noqa: PLC0415 (--help and --version stay fast)

    configuration = read_configuration(config, topic_config or (), topics_have_no_overrides)
    rows = verb.describe(
        _choice(configuration, log_dirs, topic, topic_list, partitions),
        configuration,
        Rules(
            now_ms=check_clock(now, execute=False, unsafe_clock=False),
            high_watermark="log-end" if high_watermark is o.HighWatermark.log_end else "checkpoint",
        ),
        every_setting=every,
        count_records=records,
    )
    if output is o.Output.json:
        show.print_json(rows)
    else:
        verb.print_table(rows, every_setting=every)
    raise typer.Exit(verb.exit_status(rows))


@app.command("rebuild-index")
@_reported
def rebuild_index(
    context: typer.Context,
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
    config: o.Config = None,
    topic_config: o.TopicConfig = None,
    execute: o.Execute = False,
    rebuild_all: o.RebuildAll = False,
    truncate: o.Truncate = False,
    master: o.Master = None,
    shared_storage: o.SharedStorage = False,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Make index files anew that are missing or wrong, as a broker does after a crash, ahead and by all cores.

    Without --execute it says what is missing or wrong, and the exit status is 1 if anything is.

    keytail rebuild-index --log-dirs /var/kafka --config server.properties --execute
    """
    from keytail.app import rebuild  # noqa: PLC0415 (--help stays fast)

    submitted = context.obj == _SUBMITTED
    _refuse_master(submitted, master)
    configuration = read_configuration(config, topic_config or (), False)
    request = rebuild.Request(
        choice=_choice(configuration, log_dirs, topic, topic_list, partitions),
        configuration=configuration,
        execute=execute,
        rebuild_all=rebuild_all,
        truncate=truncate,
        master=master,
        shared_storage=shared_storage,
        submitted=submitted,
    )
    rows = rebuild.rebuild(request)
    if output is o.Output.json:
        show.print_json(rows)
    else:
        rebuild.print_table(rows, "Index files" if execute else "Dry run: nothing was changed")
    if text := rebuild.next_step(rows, execute):
        show.error_console().print(f"\n{text}", soft_wrap=True)
    raise typer.Exit(rebuild.exit_status(rows))


def _refuse_master(submitted: bool, master: str | None) -> None:
    if submitted and master is not None:
        raise UsageProblem(
            "--master after the job's name has no effect under spark-submit",
            remedy="Give it to spark-submit, before the job's name",
        )


@app.command()
@_reported
def lookup(
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
    config: o.Config = None,
    offset: o.Offset = None,
    timestamp: o.Timestamp = None,
    explain: o.Explain = False,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Find the record at an offset or a time, and the bytes it lies in, as a broker finds it. Reads only.

    keytail lookup --log-dirs /var/kafka --partitions orders-0 --timestamp 2023-11-14T22:13:20Z --explain
    """
    from keytail.app import lookup as story  # noqa: PLC0415 (--help and --version stay fast)

    configuration = read_configuration(config, (), False)
    choice = _choice(configuration, log_dirs, topic, topic_list, partitions)
    rows = story.lookup(choice, offset=offset, timestamp=timestamp, explain=explain)
    if output is o.Output.json:
        show.print_json(rows)
    else:
        story.print_table(rows)
    raise typer.Exit(story.exit_status(rows))


@app.command()
@_reported
def dump(
    files: d.Files = None,
    file_list: d.FileList = None,
    print_data_log: d.PrintDataLog = False,
    deep_iteration: d.DeepIteration = False,
    skip_record_metadata: d.SkipRecordMetadata = False,
    offsets_decoder: d.OffsetsDecoder = False,
    transaction_log_decoder: d.TransactionLogDecoder = False,
    verify_index_only: d.VerifyIndexOnly = False,
    index_sanity_check: d.IndexSanityCheck = False,
    max_bytes: d.MaxBytes = None,
    from_offset: d.FromOffset = None,
    to_offset: d.ToOffset = None,
    from_position: d.FromPosition = None,
    to_position: d.ToPosition = None,
    output: d.OutputFlag = o.Output.table,
) -> None:
    """Print what is in segments, indexes, snapshots and checkpoints, as kafka-dump-log.sh does. Reads only.

    With --output json an object a line. Exit status 1 when a checksum, an index entry or a record is wrong.

    keytail dump --print-data-log --from-offset 1000 --to-offset 1010 /var/kafka/orders-0/00000000000000000000.log
    """
    from keytail.app import dump as story  # noqa: PLC0415 (--help and --version stay fast)

    options = story.options_of(
        print_data_log=print_data_log,
        deep_iteration=deep_iteration,
        skip_record_metadata=skip_record_metadata,
        offsets_decoder=offsets_decoder,
        transaction_log_decoder=transaction_log_decoder,
        checks=story.IndexChecks(verify_index_only, index_sanity_check),
        max_bytes=max_bytes,
        wanted=story.Range(from_offset, to_offset, from_position, to_position),
    )
    paths = [*(files or ()), *o.comma_lists(file_list)]
    raise typer.Exit(story.run(paths, options, as_json=output is o.Output.json))


def _after_plan(rows: Sequence[ResultRow]) -> str:
    if any(row.status == "would-compact" for row in rows):
        return "Next: stop the broker, then run `keytail compact` with the same flags and --execute."
    return _about_refused(rows)


def _after_dry_run(rows: Sequence[ResultRow]) -> str:
    if any(row.status == "would-compact" for row in rows):
        return "This was a dry run. To do it: stop the broker, and run the same command with --execute."
    return _about_refused(rows) or "This was a dry run, and no compaction is due."


def _after_compact(rows: Sequence[ResultRow]) -> str:
    if any(row.status == "compacted" for row in rows):
        text = "Next: `keytail verify` with the same --log-dirs, then start the broker."
        refused = _about_refused(rows)
        return f"{text} {refused}" if refused else text
    return _about_refused(rows) or "Nothing was due; no segment was changed."


def _about_refused(rows: Sequence[ResultRow]) -> str:
    bad = [row for row in rows if row.status in ("refused", "corrupt", "failed")]
    if not bad:
        return ""
    kept = "is as it was" if len(bad) == 1 else "are as they were"
    if any(row.status == "failed" for row in bad):
        return f"{len(bad)} not done, for the reasons given; run again once they are mended."
    return f"{len(bad)} not done and {kept}; the reasons, and what to do, are given above."


def _separate_standard_error() -> None:
    """spark-submit sends both streams of its Python driver to standard output; rows must be alone there.

    Its own standard error is that of the parent process. Where that cannot be opened, all stays together.
    """
    with contextlib.suppress(OSError):
        fd = os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_APPEND)
        os.dup2(fd, 2)
        os.close(fd)


def run_as_job(verb: str) -> NoReturn:
    """The `verb` with the flags of this process, in a Spark session of spark-submit's making."""
    _separate_standard_error()
    main([verb, *sys.argv[1:]], submitted=True)


if __name__ == "__main__":
    main()
