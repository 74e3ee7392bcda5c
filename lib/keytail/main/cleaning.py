"""The command lines of `plan` and `compact`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import typer

from keytail.cli import options as o
from keytail.cli.command import SUBMITTED, choice_of, configuration_of, finish, refuse_master, reported
from keytail.cli.quarantine import report
from keytail.compact import options as c
from keytail.errors import UsageProblem
from keytail.ledger.of_run import LedgerFlags, is_uri
from keytail.report.writing import Page, reporting
from keytail.run.rows import ResultRow

if TYPE_CHECKING:
    from keytail.compact.command import Request


@reported
def plan(
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
    config: o.Config = None,
    topic_config: o.TopicConfig = None,
    topic_configs: o.TopicConfigs = None,
    topics_have_no_overrides: o.NoOverrides = False,
    metadata_is_current: o.MetadataIsCurrent = False,
    now: o.Now = None,
    unsafe_clock: o.UnsafeClock = False,
    force: c.Force = False,
    from_log_start: c.FromLogStart = False,
    message_format: c.MessageFormatFlag = None,
    broker_version: c.BrokerVersionFlag = None,
    high_watermark: o.HighWatermarkFlag = o.HighWatermark.checkpoint,
    replica: c.Replica = None,
    report_file: o.ReportFile = None,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Show for each partition whether a compaction is due, and if not, why. Changes nothing and starts no Spark."""
    from keytail.cli.replicas import directories_of  # noqa: PLC0415 (--help stays fast)
    from keytail.compact import command as compaction  # noqa: PLC0415 (--help stays fast)

    configuration = configuration_of(
        config, topic_config, topics_have_no_overrides, topic_configs, metadata_is_current
    )
    if message_format is not None:
        configuration = replace(configuration, message_format=message_format.value)
    configuration = replace(configuration, broker_version=broker_version)
    request = compaction.Request(
        choice=choice_of(configuration, log_dirs, topic, topic_list, partitions, directories_of(replica or ())),
        configuration=configuration,
        now_ms=now,
        unsafe_clock=unsafe_clock,
        force=force,
        from_log_start=from_log_start,
        high_watermark=high_watermark.value,
        replicas=tuple(replica or ()),
        in_detail=report_file is not None,
    )
    with reporting(report_file, Page("plan", now_ms=now, configuration=configuration), request.choice.log_dirs) as page:
        rows = compaction.plan(request)
        page.done(rows, _after_plan(rows))
        finish(rows, output, "Plan", page.next_step, o.comma_lists(partitions))


@reported
def compact(
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
    force: c.Force = False,
    from_log_start: c.FromLogStart = False,
    deadline: c.Deadline = None,
    master: o.Master = None,
    grouping: c.GroupingFlag = c.Grouping.measured,
    map_memory: o.MapMemory = None,
    fan_out: c.FanOutFlag = c.FanOut.auto,
    message_format: c.MessageFormatFlag = None,
    broker_version: c.BrokerVersionFlag = None,
    max_scratch_bytes: c.MaxScratch = None,
    throttle: c.Throttle = None,
    drop_keyless: o.DropKeyless = False,
    high_watermark: o.HighWatermarkFlag = o.HighWatermark.checkpoint,
    replica: c.Replica = None,
    keep_originals: c.KeepOriginals = None,
    copy_originals: c.CopyOriginals = False,
    shared_storage: o.SharedStorage = False,
    output_dir: c.OutputDir = None,
    scratch_dir: c.ScratchDir = None,
    ledger: o.LedgerFlag = None,
    delta_jars: o.DeltaJars = None,
    quarantine_report: o.QuarantineReport = None,
    rows_file: o.RowsFile = None,
    report_file: o.ReportFile = None,
    show_keys: c.ShowKeys = False,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Retain only the latest record of each key, as the broker's log cleaner would. The broker must be stopped.

    Without --execute this is a dry run, like `plan`.
    """
    from keytail.cli.replicas import directories_of  # noqa: PLC0415 (--help and --version stay fast)
    from keytail.compact import command as compaction  # noqa: PLC0415 (--help and --version stay fast)

    submitted = context.obj == SUBMITTED
    refuse_master(submitted, master)
    if show_keys and report_file is None:
        raise UsageProblem(
            "--show-keys requires --report", remedy="Give --report FILE.html, or omit --show-keys", slug="missing-flag"
        )
    configuration = configuration_of(
        config, topic_config, topics_have_no_overrides, topic_configs, metadata_is_current
    )
    if message_format is not None:
        configuration = replace(configuration, message_format=message_format.value)
    configuration = replace(configuration, broker_version=broker_version)
    request = compaction.Request(
        choice=choice_of(configuration, log_dirs, topic, topic_list, partitions, directories_of(replica or ())),
        configuration=configuration,
        execute=execute,
        now_ms=now,
        unsafe_clock=unsafe_clock,
        force=force,
        from_log_start=from_log_start,
        high_watermark=high_watermark.value,
        replicas=tuple(replica or ()),
        deadline_minutes=deadline,
        master=master,
        grouping=grouping.value,
        map_memory_bytes=map_memory,
        fan_out=fan_out.value,
        max_scratch_bytes=max_scratch_bytes,
        throttle_bytes_per_s=throttle,
        drop_keyless=drop_keyless,
        shared_storage=shared_storage,
        keep_originals=keep_originals,
        copy_originals=copy_originals,
        ledger=LedgerFlags(ledger, delta_jars),
        output_dirs=o.comma_items(output_dir),
        scratch_dir=scratch_dir,
        submitted=submitted,
        in_detail=report_file is not None,
        show_keys=show_keys,
    )
    named = o.comma_lists(partitions)
    page = Page("compact", execute=execute, now_ms=now, configuration=configuration)
    nowhere_in = (*request.choice.log_dirs, *(path for path in request.output_dirs if not is_uri(path)))
    with reporting(report_file, page, nowhere_in), report(quarantine_report, nowhere_in, rows_file) as told:
        if request.output_dirs or scratch_dir is not None:
            _compact_out_of_place(request, output, named, told, page)
        if not execute:
            told.extend(rows := compaction.plan(request))
            page.done(rows, _after_dry_run(rows))
            finish(rows, output, "Dry run: nothing was changed", page.next_step, named)
        told.extend(rows := compaction.compact(request))
        page.done(rows, _after_compact(rows))
        finish(rows, output, "Compacted", page.next_step, named)


def _compact_out_of_place(
    request: Request, output: o.Output, named: Sequence[str], told: list[ResultRow], page: Page
) -> NoReturn:
    from keytail.compact.out_of_place import command as out_of_place  # noqa: PLC0415 (--help and --version stay fast)

    page.title = "compact --output-dir"
    if not request.execute:
        told.extend(rows := out_of_place.plan(request))
        page.done(rows, "To do it: run the same command with --execute.")
        finish(rows, output, "Dry run: nothing was written", page.next_step, named)
    told.extend(rows := out_of_place.compact(request))
    page.done(rows, _about_refused(rows))
    finish(rows, output, "Compacted out of place", page.next_step, named)


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
    if any(row.status == "failed" for row in bad):
        return f"{len(bad)} not done, for the reasons given above; resolve them, and run again."
    return f"{len(bad)} not done and unchanged; the reasons, and what to do, are given above."
