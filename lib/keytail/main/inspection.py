"""The command lines of the commands that only read: `verify`, `describe`, `lookup`, `dump`, `audit`."""

from __future__ import annotations

import typer

from keytail.cli import inspection_options as i
from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import SUBMITTED, choice_of, configuration_of, refuse_master, reported
from keytail.cli.quarantine import report
from keytail.dump import options as d
from keytail.report.writing import Page, reporting


@reported
def verify(
    context: typer.Context,
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
    config: o.Config = None,
    master: o.Master = None,
    quarantine_report: o.QuarantineReport = None,
    rows_file: o.RowsFile = None,
    report_file: o.ReportFile = None,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Check every batch, offset, index entry and file name. Reads only; the exit status is 1 if anything is wrong."""
    from keytail.verify import command as verification  # noqa: PLC0415 (--help and --version stay fast)

    configuration = configuration_of(config)
    choice = choice_of(configuration, log_dirs, topic, topic_list, partitions)
    with reporting(report_file, Page("verify"), choice.log_dirs) as page, report(
        quarantine_report, choice.log_dirs, rows_file
    ) as told:
        rows = verification.verify(
            choice, master=master, submitted=context.obj == SUBMITTED, on_row=page.heard
        )
        told.extend(rows)
        page.done(rows, verification.next_step(rows))
        if output is o.Output.json:
            show.print_json(rows)
        else:
            verification.print_table(rows)
        raise typer.Exit(verification.exit_status(rows))


@reported
def describe(
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
    config: o.Config = None,
    topic_config: o.TopicConfig = None,
    topic_configs: o.TopicConfigs = None,
    topics_have_no_overrides: o.NoOverrides = False,
    metadata_is_current: o.MetadataIsCurrent = False,
    every: i.AllSettings = False,
    records: i.CountRecords = False,
    now: o.Now = None,
    high_watermark: o.HighWatermarkFlag = o.HighWatermark.checkpoint,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Show what partitions contain, whether a compaction is due, what prevents it, and the effective settings."""
    from keytail.compact.plan import Rules  # noqa: PLC0415
    from keytail.compact.planning import check_clock  # noqa: PLC0415 (--help and --version stay fast)
    from keytail.describe import command as verb  # noqa: PLC0415 (--help and --version stay fast)

    configuration = configuration_of(
        config, topic_config, topics_have_no_overrides, topic_configs, metadata_is_current
    )
    rows = verb.describe(
        choice_of(configuration, log_dirs, topic, topic_list, partitions),
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


@reported
def lookup(
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
    config: o.Config = None,
    offset: i.Offset = None,
    timestamp: i.Timestamp = None,
    explain: i.Explain = False,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Find the record at an offset or a time, and its position in the file, as a broker finds it. Reads only."""
    from keytail.lookup import command as story  # noqa: PLC0415 (--help and --version stay fast)

    configuration = configuration_of(config)
    choice = choice_of(configuration, log_dirs, topic, topic_list, partitions)
    rows = story.lookup(choice, offset=offset, timestamp=timestamp, explain=explain)
    if output is o.Output.json:
        show.print_json(rows)
    else:
        story.print_table(rows)
    raise typer.Exit(story.exit_status(rows))


@reported
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
    escape: d.Escape = None,
    output: d.OutputFlag = o.Output.table,
) -> None:
    """Print the contents of segments, indexes, snapshots and checkpoints, as kafka-dump-log.sh does. Reads only.

    With --output json, one object per line. The exit status is 1 if a checksum, an index entry or a record is wrong.
    """
    from keytail.dump import command as story  # noqa: PLC0415 (--help and --version stay fast)
    from keytail.log.fs import LOCAL  # noqa: PLC0415 (the same)
    from keytail.log.owner import work_as_owner_of_files  # noqa: PLC0415 (the same)

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
    work_as_owner_of_files(LOCAL, paths)
    raise typer.Exit(story.run(paths, options, as_json=output is o.Output.json, escape=escape))


@reported
def audit(
    context: typer.Context,
    replica: i.Replicas = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
    examples: i.Examples = 5,
    master: o.Master = None,
    report_file: o.ReportFile = None,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Compare the replicas of partitions, record by record. Reads only, also beside running brokers."""
    from keytail.audit import command as verb  # noqa: PLC0415 (--help and --version stay fast)
    from keytail.audit.table import print_table  # noqa: PLC0415 (the same)
    from keytail.cli.replicas import directories_of  # noqa: PLC0415 (the same)
    from keytail.cli.selection import Choice  # noqa: PLC0415 (the same)
    from keytail.log.fs import LOCAL  # noqa: PLC0415 (the same)
    from keytail.log.owner import work_as_owner  # noqa: PLC0415 (the same)

    submitted = context.obj == SUBMITTED
    refuse_master(submitted, master)
    choice = Choice((), tuple(topic or ()), o.comma_lists(topic_list), o.comma_lists(partitions))
    directories = directories_of(replica or ())
    work_as_owner(LOCAL, (), directories)
    with reporting(report_file, Page("audit"), directories) as page:
        rows = verb.audit(
            replica or (), choice, examples=examples, master=master, submitted=submitted, on_row=page.heard
        )
        page.done(rows)
        if output is o.Output.json:
            show.print_json(rows)
        else:
            print_table(rows)
        raise typer.Exit(verb.exit_status(rows, frozenset(choice.partitions)))
