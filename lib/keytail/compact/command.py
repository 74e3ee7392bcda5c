"""Declares the commands `plan` and `compact`: flags, rows, statuses, next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Annotated

from keytail.cli import options as o
from keytail.cli.command import BROKER, Below, Command, extras_of_flags
from keytail.cli.configuration import Configuration, ConfigurationByFlags
from keytail.cli.flags import FromFlags
from keytail.cli.output_options import ReportFile, RowsAndFiles, RowsAndReport
from keytail.cli.replicas import directories_of, replicas_of
from keytail.cli.selection import PartitionFilter, filter_from_flags
from keytail.cli.statuses import FAILURES, Status
from keytail.compact import options as c
from keytail.compact.map_phase.key_counts import HOTTEST
from keytail.compact.repack.options import RepackFlags, repack_flags
from keytail.compact.rules import Rules, TaskSettings
from keytail.compact.table import after_plan, next_step, show_compact, show_plan
from keytail.errors import UsageProblem
from keytail.extras import OBJECT_STORE, SPARK, Needs
from keytail.ledger.of_run import LedgerByFlags, LedgerFlags
from keytail.log.fs import FileSystem
from keytail.run.memory import cores, map_memory_bytes
from keytail.run.rows import NOT_BEGUN, ResultRow, exit_status
from keytail.run.spark.stores import is_uri


def _configuration(
    configuration: ConfigurationByFlags,
    message_format: c.MessageFormatFlag = None,
    broker_version: c.BrokerVersionFlag = None,
) -> Configuration:
    return replace(configuration, message_format=message_format or "unknown", broker_version=broker_version)


def _prepared_only(
    execute: bool,
    prepare: bool,
    output_dirs: tuple[str, ...],
    keep_originals: str | None,
    ledger: LedgerFlags,
    roll_active: bool,
    prepared_only: c.PreparedOnly = False,
) -> bool:
    """Return the value of --prepared-only. Raises UsageProblem if flags cannot be combined."""
    c.check_roll_active(roll_active, prepare, prepared_only, output_dirs)
    if prepared_only and not execute:
        raise UsageProblem(
            "--prepared-only requires --execute", remedy="Add --execute, or omit --prepared-only", slug="missing-flag"
        )
    excluded = {
        "--execute": execute,
        "--output-dir": bool(output_dirs),
        "--keep-originals": keep_originals is not None,
        "--ledger": ledger.path is not None,
    }
    if prepare and any(excluded.values()):
        given = next(flag for flag, is_given in excluded.items() if is_given)
        raise UsageProblem(
            f"--prepare cannot be combined with {given}: a preparation commits nothing",
            remedy=f"Run with --prepare and without {given} first, then with {given} and without --prepare",
            slug="conflicting-flags",
        )
    return prepared_only


def _replicas(replica: c.Replica = None) -> tuple[str, ...]:
    return tuple(replica or ())


def _partition_filter(
    configuration: Configuration,
    replicas: tuple[str, ...],
    log_dirs: o.LogDirs = None,
    topic: o.Topic = None,
    topic_list: o.TopicList = None,
    partitions: o.Partitions = None,
) -> PartitionFilter:
    also_read = directories_of(replicas)
    return filter_from_flags(configuration, log_dirs, topic, topic_list, partitions, also_read=also_read)


def _output_dirs(output_dir: c.OutputDir = None) -> tuple[str, ...]:
    return o.comma_items(output_dir)


def _in_detail(report_file: ReportFile = None) -> bool:
    return report_file is not None


def _show_keys(in_detail: bool, show_keys: c.ShowKeys = False) -> bool:
    if show_keys and not in_detail:
        raise UsageProblem(
            "--show-keys requires --report", remedy="Give --report FILE.html, or omit --show-keys", slug="missing-flag"
        )
    return show_keys


def _measure(
    roll_active: bool, measure: c.MeasureFlag = False, estimate: c.EstimateFlag = False
) -> c.Measure:
    if measure and estimate:
        raise UsageProblem(
            "--measure and --estimate cannot be combined", remedy="Give only one of them", slug="conflicting-flags"
        )
    if roll_active and (measure or estimate):
        raise UsageProblem(
            "--roll-active cannot be combined with --measure or --estimate: only existing segments can be read",
            remedy="Omit --roll-active, or run without --measure and --estimate",
            slug="conflicting-flags",
        )
    return "exactly" if measure else "from a sample" if estimate else "not"


@dataclass(frozen=True)
class Request:
    """All parameters of `plan` and `compact`, with the defaults of their flags."""

    partition_filter: Annotated[PartitionFilter, FromFlags(_partition_filter)]
    configuration: Annotated[Configuration, FromFlags(_configuration)] = field(default_factory=Configuration)
    _: KW_ONLY
    measure: Annotated[c.Measure, FromFlags(_measure)] = "not"
    execute: o.Execute = False
    prepare: c.PrepareFlag = False
    prepared_only: Annotated[bool, FromFlags(_prepared_only)] = False
    now_ms: o.Now = None
    unsafe_clock: o.UnsafeClock = False
    force: c.Force = False
    from_log_start: c.FromLogStart = False
    roll_active: c.RollActive = False
    high_watermark: o.HighWatermarkFlag = "checkpoint"
    deadline_minutes: c.Deadline = None
    master: o.Master = None
    grouping: c.GroupingFlag = "measured"
    map_memory_bytes: o.MapMemory = None
    fan_out: c.FanOutFlag = "auto"
    max_scratch_bytes: c.MaxScratch = None
    throttle_bytes_per_s: c.Throttle = None
    drop_keyless: o.DropKeyless = False
    shared_storage: o.SharedStorage = False
    keep_originals: c.KeepBackup = None
    copy_originals: c.CopyBackup = False
    replicas: Annotated[tuple[str, ...], FromFlags(_replicas)] = ()
    ledger: LedgerByFlags = field(default_factory=LedgerFlags)
    output_dirs: Annotated[tuple[str, ...], FromFlags(_output_dirs)] = ()
    scratch_dir: c.ScratchDir = None
    submitted: bool = False  # the run is a job of spark-submit, which has the master
    in_detail: Annotated[bool, FromFlags(_in_detail)] = False  # the rows have the details for a report
    show_keys: Annotated[bool, FromFlags(_show_keys)] = False  # the report shows the hottest keys, not only hashes
    repack: Annotated[RepackFlags | None, FromFlags(repack_flags)] = None  # None: the run is a compaction

    @property
    def is_out_of_place(self) -> bool:
        return bool(self.output_dirs) or self.scratch_dir is not None

    def rules(self, fs: FileSystem) -> Rules:
        from keytail.compact.planning import check_clock  # noqa: PLC0415 (--help needs no log code)

        return Rules(
            now_ms=check_clock(self.now_ms, self.execute or self.prepare, self.unsafe_clock),
            force=self.force,
            from_log_start=self.from_log_start,
            high_watermark=self.high_watermark,
            unsafe_clock=self.unsafe_clock,
            roll_active=self.roll_active,
            replicas=replicas_of(fs, self.replicas, self.partition_filter.log_dirs),
            drop_keyless=self.drop_keyless,
            by_file_time=self.configuration.by_file_time,
        )

    def task_settings(self) -> TaskSettings:
        return TaskSettings(
            map_memory_bytes=self.map_memory_bytes or 0,
            drop_keyless=self.drop_keyless,
            grouping=self.grouping,
            throttle_bytes_per_s=self.throttle_bytes_per_s or None,
            fan_out=self.fan_out,
            hottest_keys=HOTTEST if self.in_detail else 0,
            show_keys=self.show_keys,
            by_file_time=self.configuration.by_file_time,
        )

    def map_memory(self) -> int:
        """Return the map memory of one task in bytes. The default is computed for this host, since no Spark session
        exists yet."""
        return self.map_memory_bytes or map_memory_bytes(cores())


# The fields of the request that are flags of `plan`; `compact` has all flags except --measure and --estimate.
_PLAN_FIELDS = (
    "partition_filter",
    "configuration",
    "measure",
    "now_ms",
    "unsafe_clock",
    "force",
    "from_log_start",
    "roll_active",
    "high_watermark",
    "master",
    "grouping",
    "map_memory_bytes",
    "throttle_bytes_per_s",
    "drop_keyless",
    "replicas",
    "in_detail",
)
_COMPACT_FIELDS = tuple(item.name for item in fields(Request) if item.name != "measure")


def exit_status_of_rows(rows: Sequence[ResultRow], request: Request) -> int:
    return exit_status(rows, frozenset(request.partition_filter.partitions))


def _below(rows: Sequence[ResultRow], request: Request) -> Below:
    if not any(row.status == "would-compact" for row in rows):
        return Below()
    from keytail.compact.totals import below_plan  # noqa: PLC0415 (--help needs no code that reads logs)

    return below_plan(rows, request)


def _protected_directories(request: Request) -> tuple[str, ...]:
    """Return the log dirs and local output directories: the run must not write its report or rows there."""
    return (*request.partition_filter.log_dirs, *(path for path in request.output_dirs if not is_uri(path)))


def _variant(request: Request) -> str:
    if request.repack is not None:
        return "compact --repack"
    if request.prepare:
        return "compact --prepare"
    return "compact --output-dir" if request.is_out_of_place else "compact"


def _extras(request: Request) -> Needs:
    from keytail.compact.out_of_place.object_store import is_store  # noqa: PLC0415 (--help needs no log code)

    yield from extras_of_flags(request)
    if request.fan_out == "always":
        yield "--fan-out always", SPARK
    for target in request.output_dirs:
        if is_store(target):
            yield f"--output-dir {target}", OBJECT_STORE


_STATUSES = {
    "would-compact": Status("in a plan: `--execute` would compact it", "done"),
    "compacted": Status("done", "done"),
    "would-repack": Status("with `--repack`, in a dry run: `--execute` would read it, to find what changes", "done"),
    "repacked": Status("with `--repack`: batches were merged or compressed again", "done"),
    "prepared": Status("with `--prepare`: written and proven, for `--execute` on the stopped broker to commit", "done"),
    "clean": Status(
        "nothing to clean: everything is below the checkpoint, or only the active segment has records; with "
        "`--repack`: no batch changes"
    ),
    "skipped": Status("not due, not of a compacted topic, or the run was stopped; `error` has the reason", "skipped"),
    NOT_BEGUN: Status(
        "`--deadline` had passed, or the run was interrupted, before any of its segments was replaced", "skipped"
    ),
    **FAILURES,
}

_OF_COMPACT = ("compacted", "prepared", "would-repack", "repacked", NOT_BEGUN)  # statuses that `plan` does not have

PLAN = Command(
    name="plan",
    also_called=("preview", "estimate", "list", "ls", "due"),
    help="Show for each partition whether a compaction is due, and if not, why. Changes nothing."
    "\n\n"
    "With --measure or --estimate, also show what a compaction would leave, which takes as long as reading the "
    "partitions that are due. Without these two flags, Spark is not started.",
    request=Request,
    only=_PLAN_FIELDS,
    run="keytail.compact.driver:plan",
    examples=(
        f"keytail plan {BROKER}",
        "keytail plan --log-dirs /var/lib/kafka --topic-config orders:cleanup.policy=compact --topic-list orders",
        f"keytail plan {BROKER} --measure --throttle 50m",
    ),
    rows={"": ResultRow},
    statuses={name: item for name, item in _STATUSES.items() if name not in _OF_COMPACT},
    show=show_plan,
    below=_below,
    next_step=after_plan,
    exit_status=exit_status_of_rows,
    output=RowsAndReport,
    reads_records=True,
)

COMPACT = Command(
    name="compact",
    also_called=("clean", "cleanup", "cleaner", "compaction", "compress", "dedupe", "deduplicate", "gc", "run"),
    help="Retain only the latest record of each key, as the broker's log cleaner would. The broker must be stopped."
    "\n\n"
    "Without --execute this is a dry run, like `plan`. With --repack, no record is removed: batches are merged or "
    "compressed again.",
    request=Request,
    only=_COMPACT_FIELDS,
    run="keytail.compact.driver:run",
    extras=_extras,
    examples=(
        f"keytail compact {BROKER}",
        f"keytail compact {BROKER} --execute",
        f"keytail compact {BROKER} --topic 'orders|users' --force --execute --report /tmp/run.html",
        "keytail compact --log-dirs /var/lib/kafka --output-dir /backup/kafka --execute",
        f"keytail compact {BROKER} --repack --compression zstd --execute",
    ),
    rows={"": ResultRow},
    statuses=_STATUSES,
    show=show_compact,
    below=_below,
    next_step=next_step,
    exit_status=exit_status_of_rows,
    output=RowsAndFiles,
    reads_records=True,
    variant=_variant,
    log_dirs=_protected_directories,
)
