"""The command lines of commands that change partitions as a broker would: `rebuild-index`, `expire`."""

from __future__ import annotations

import typer

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import SUBMITTED, choice_of, configuration_of, refuse_master, reported
from keytail.cli.quarantine import report
from keytail.ledger.of_run import LedgerFlags
from keytail.report.writing import Page, reporting


@reported
def rebuild_index(
    context: typer.Context,
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
    config: o.Config = None,
    topic_config: o.TopicConfig = None,
    topic_configs: o.TopicConfigs = None,
    metadata_is_current: o.MetadataIsCurrent = False,
    execute: o.Execute = False,
    rebuild_all: o.RebuildAll = False,
    truncate: o.Truncate = False,
    master: o.Master = None,
    shared_storage: o.SharedStorage = False,
    ledger: o.LedgerFlag = None,
    delta_jars: o.DeltaJars = None,
    quarantine_report: o.QuarantineReport = None,
    rows_file: o.RowsFile = None,
    report_file: o.ReportFile = None,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Rebuild missing and wrong index files, as a broker does after a crash, but before its start and on all cores.

    Without --execute it lists what is missing or wrong, and the exit status is 1 if anything is.
    """
    from keytail.rebuild_index import command as rebuild  # noqa: PLC0415 (--help stays fast)

    submitted = context.obj == SUBMITTED
    refuse_master(submitted, master)
    configuration = configuration_of(
        config, topic_config, topic_configs=topic_configs, metadata_is_current=metadata_is_current
    )
    request = rebuild.Request(
        choice=choice_of(configuration, log_dirs, topic, topic_list, partitions),
        configuration=configuration,
        execute=execute,
        rebuild_all=rebuild_all,
        truncate=truncate,
        master=master,
        shared_storage=shared_storage,
        ledger=LedgerFlags(ledger, delta_jars),
        submitted=submitted,
    )
    page = Page("rebuild-index", execute=execute, configuration=configuration)
    with reporting(report_file, page, request.choice.log_dirs), report(
        quarantine_report, request.choice.log_dirs, rows_file
    ) as told:
        rows = rebuild.rebuild(request, on_row=page.heard)
        told.extend(rows)
        page.done(rows, rebuild.next_step(rows, execute))
        if output is o.Output.json:
            show.print_json(rows)
        else:
            rebuild.print_table(rows, "Index files" if execute else "Dry run: nothing was changed")
        if page.next_step:
            show.tell(f"\n{page.next_step}")
        raise typer.Exit(rebuild.exit_status(rows))


@reported
def expire(
    context: typer.Context,
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
    config: o.Config = None,
    topic_config: o.TopicConfig = None,
    topic_configs: o.TopicConfigs = None,
    topics_have_no_overrides: o.NoOverrides = False,
    metadata_is_current: o.MetadataIsCurrent = False,
    execute: o.Execute = False,
    now: o.Now = None,
    unsafe_clock: o.UnsafeClock = False,
    high_watermark: o.HighWatermarkFlag = o.HighWatermark.checkpoint,
    shared_storage: o.SharedStorage = False,
    ledger: o.LedgerFlag = None,
    delta_jars: o.DeltaJars = None,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Remove old segments by log start offset, retention.bytes and retention.ms, as a broker does, before its start.

    Without --execute it lists the segments that would be removed, each with the reason.
    """
    from keytail.expire import command as verb  # noqa: PLC0415 (--help stays fast)

    configuration = configuration_of(
        config, topic_config, topics_have_no_overrides, topic_configs, metadata_is_current
    )
    request = verb.Request(
        choice=choice_of(configuration, log_dirs, topic, topic_list, partitions),
        configuration=configuration,
        execute=execute,
        now_ms=now,
        unsafe_clock=unsafe_clock,
        high_watermark="log-end" if high_watermark is o.HighWatermark.log_end else "checkpoint",
        shared_storage=shared_storage,
        ledger=LedgerFlags(ledger, delta_jars),
        submitted=context.obj == SUBMITTED,
    )
    rows = verb.expire(request)
    if output is o.Output.json:
        show.print_json(rows)
    else:
        verb.print_table(rows, "Expired" if execute else "Dry run: nothing was changed")
    if text := verb.next_step(rows, execute):
        show.tell(f"\n{text}")
    raise typer.Exit(verb.exit_status(rows))
