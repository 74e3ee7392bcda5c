"""The command lines of commands that move records in or out: `import`, `export`."""

from __future__ import annotations

import typer

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import SUBMITTED, choice_of, configuration_of, refuse_master, reported
from keytail.export import options as e
from keytail.import_ import options as i


@reported
def import_logs(
    context: typer.Context,
    source: i.SourcePath,
    topic: i.OneTopic,
    format_: i.FormatFlag = i.Format.parquet,
    key_column: i.KeyColumn = "key",
    value_column: i.ValueColumn = "value",
    headers_column: i.HeadersColumn = None,
    timestamp_column: i.TimestampColumn = None,
    partition_column: i.PartitionColumn = None,
    sort_by: i.SortBy = None,
    log_dirs: o.LogDirs = None,
    replica_log_dirs: i.ReplicaLogDirs = None,
    append: i.Append = False,
    topic_id: i.TopicId = None,
    partition_count: i.PartitionCount = None,
    codec: i.CodecFlag = None,
    batch_bytes: i.BatchBytes = None,
    segment_bytes: i.SegmentBytes = None,
    config: o.Config = None,
    topic_config: o.TopicConfig = None,
    topic_configs: o.TopicConfigs = None,
    topics_have_no_overrides: o.NoOverrides = False,
    metadata_is_current: o.MetadataIsCurrent = False,
    single_replica: i.SingleReplica = False,
    shared_storage: o.SharedStorage = False,
    import_id: i.ImportId = None,
    execute: o.Execute = False,
    master: o.Master = None,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Write a table of records into partition directories, at the speed of the disk, for a broker to serve afterwards.

    Bypasses the leader, quotas, ACLs and schema checks. Without --execute it counts the records for each partition.
    """
    from keytail.cli.selection import chosen_log_dirs  # noqa: PLC0415 (--help stays fast)
    from keytail.import_ import command as import_  # noqa: PLC0415 (--help stays fast)
    from keytail.import_ import table as import_table  # noqa: PLC0415 (--help stays fast)
    from keytail.import_.request import BATCH_BYTES, Request  # noqa: PLC0415 (the same)
    from keytail.import_.source import Columns, Source  # noqa: PLC0415 (--help stays fast)
    from keytail.log.fs import LOCAL  # noqa: PLC0415 (--help stays fast)
    from keytail.log.owner import work_as_owner  # noqa: PLC0415 (--help stays fast)

    submitted = context.obj == SUBMITTED
    refuse_master(submitted, master)
    configuration = configuration_of(
        config, topic_config, topics_have_no_overrides, topic_configs, metadata_is_current
    )
    columns = Columns(key_column, value_column, headers_column, timestamp_column, partition_column)
    request = Request(
        source=Source(source, format_.value, columns, o.comma_lists(sort_by)),
        topic=topic,
        log_dirs=chosen_log_dirs(o.comma_lists(log_dirs), configuration),
        replica_log_dirs=tuple(
            chosen_log_dirs(o.comma_lists([one]), configuration) for one in replica_log_dirs or ()
        ),
        configuration=configuration,
        codec=codec.value if codec else None,
        batch_bytes=BATCH_BYTES if batch_bytes is None else batch_bytes,
        segment_bytes=segment_bytes,
        append=append,
        single_replica=single_replica,
        topic_id=topic_id,
        partition_count=partition_count,
        import_id=import_id,
        execute=execute,
        master=master,
        shared_storage=shared_storage,
        submitted=submitted,
    )
    work_as_owner(LOCAL, request.all_log_dirs)
    rows = import_.import_records(request)
    if output is o.Output.json:
        show.print_json(rows)
    else:
        import_table.print_table(rows, "Import" if execute else "Dry run: nothing was changed")
    if text := import_table.next_step(rows, execute):
        show.tell(f"\n{text}")
    raise typer.Exit(import_.exit_status(rows))
