"""The log dirs of a broker, as Python programs open them."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from keytail.acting_user import working_as
from keytail.api._arguments import Position, Positions, bound_of, chosen_names, names_of, number_of, one_of
from keytail.cli.configuration import Configuration, read_configuration
from keytail.cli.options import HighWatermark
from keytail.cli.selection import PartitionFilter, chosen_log_dirs, select_partitions
from keytail.compact.command import Request as PlanRequest
from keytail.console import OutputStyle, set_output_style
from keytail.describe.command import DescribeRow
from keytail.describe.command import Request as DescribeRequest
from keytail.errors import of_system
from keytail.extras import ARROW, require
from keytail.log.fs import LOCAL
from keytail.log.owner import owner_of
from keytail.lookup.command import LookupRow
from keytail.lookup.command import Request as LookupRequest
from keytail.run.rows import OfPartition, ResultRow
from keytail.source.column_types import OF_RECORDS, chosen_columns
from keytail.source.options import EARLIEST, LATEST, SourceOptions

if TYPE_CHECKING:
    import pyarrow

IsolationLevel = Literal["read_uncommitted", "read_committed"]
T = TypeVar("T")


@dataclass(frozen=True)
class Partition(OfPartition):
    """A partition and its directories. `name` is, for example, `orders-0`."""

    topic: str
    partition: int
    log_dir: str
    path: str


def open_log_dirs(
    log_dirs: str | Iterable[str] = (),
    *,
    config: str | None = None,
    topic_config: Iterable[str] = (),
    topic_configs: str | None = None,
    topics_have_no_overrides: bool = False,
    metadata_is_current: bool = False,
) -> LogDirs:
    """Open the log dirs of one broker. If no log dirs are given, those in `log.dirs` of the file `config` are opened.

    The other arguments are the flags of the same name, and otherwise only affect `describe` and `plan`: `config` is the
    path of the broker's server.properties, `topic_config` has settings such as `"orders:cleanup.policy=compact"`,
    `topic_configs` is the path of a file with the settings of many topics. All other settings of topics are read from
    the metadata log in the log dirs.

    Raises UsageProblem if a directory is not a log dir, or a file or a setting cannot be read.

        >>> logs = open_log_dirs(log_dir, topic_config=["orders:cleanup.policy=compact"])
        >>> open_log_dirs("/nowhere")
        Traceback (most recent call last):
        keytail.errors.UsageProblem: no such log dir (/nowhere). Check whether ... [no-such-log-dir]
    """
    given = [topic_config] if isinstance(topic_config, str) else list(topic_config)

    def opened() -> LogDirs:
        configuration = read_configuration(
            config, given, topics_have_no_overrides, topic_configs, metadata_is_current
        )
        return LogDirs(chosen_log_dirs(names_of("log_dirs", log_dirs), configuration), _configuration=configuration)

    found = _call((), opened)
    found.partitions()  # raises the errors of the log dirs now, and not in the first call
    return found


@dataclass(frozen=True)
class LogDirs:
    """The log dirs of one broker, and a selection of their partitions. Created by `open_log_dirs`.

    `paths` are the absolute paths of the log dirs. Each call lists the files again.
    """

    paths: tuple[str, ...]
    _topics: tuple[str, ...] = ()
    _partitions: tuple[str, ...] = ()
    _configuration: Configuration = field(default_factory=Configuration, repr=False)

    def select(
        self, *, topics: str | Iterable[str] | None = None, partitions: str | Iterable[str] | None = None
    ) -> LogDirs:
        """Return the same log dirs with a new selection, of these topics and partitions; an earlier selection is
        ignored.

        `topics` are names; `partitions` are names such as `orders-0`; None does not restrict. If both are given, only
        partitions in both are selected. Raises UsageProblem for a name that does not exist, and for an empty selection.

            >>> logs = open_log_dirs(log_dir).select(topics="orders")
            >>> [partition.name for partition in logs.partitions()]
            ['orders-0', 'orders-1']
        """
        chosen = chosen_names("topics", topics), chosen_names("partitions", partitions)
        selected = replace(self, _topics=chosen[0], _partitions=chosen[1])
        selected.partitions()
        return selected

    def partitions(self) -> list[Partition]:
        """Return the selected partitions, in the order of the log dirs and, in each, of the directories' names."""

        def listed() -> list[Partition]:
            chosen = select_partitions(LOCAL, self._filter).partitions
            return [Partition(entry.topic, entry.partition, entry.log_dir, entry.path) for _, entry in chosen]

        return self._call(listed)

    def describe(
        self,
        *,
        every_setting: bool = False,
        count_records: bool = False,
        high_watermark: HighWatermark = "checkpoint",
    ) -> list[DescribeRow]:
        """Return the rows of `keytail describe`, one per partition: size and offsets, whether a compaction is due, and
        the settings. With `every_setting`, the settings include Kafka's defaults. With `count_records`, all batches are
        read.

            >>> [row] = open_log_dirs(log_dir).select(partitions="users-0").describe(count_records=True)
            >>> row.segments, row.log_start_offset, row.log_end_offset, row.records
            (4, 0, 40, 40)
        """
        from keytail.describe.driver import describe  # noqa: PLC0415 (an import of keytail.api stays fast)

        request = DescribeRequest(
            self._filter,
            self._configuration,
            every_setting=every_setting,
            count_records=count_records,
            high_watermark=one_of("high_watermark", high_watermark, HighWatermark),
        )
        return self._call(lambda: describe(request))

    def lookup(self, position: Position, *, explain: bool = False) -> list[LookupRow]:
        """Return the rows of `keytail lookup`, one per partition: the first record at or after an offset (an int) or a
        time (a datetime with a time zone), and its position in the file. With `explain`, rows also have the steps of
        the search.

            >>> from datetime import datetime, timezone
            >>> logs = open_log_dirs(log_dir).select(partitions="orders-0")
            >>> [row] = logs.lookup(17)
            >>> row.status, row.offset, row.segment, row.byte_position > 0
            ('found', 17, 0, True)
            >>> [row] = logs.lookup(datetime(2023, 11, 14, 22, 13, 20, 31_000, tzinfo=timezone.utc))
            >>> row.offset, row.timestamp_ms
            (31, 1700000000031)
        """
        from keytail.lookup.driver import lookup  # noqa: PLC0415 (brings in the kernels)

        is_time, number = number_of("position", position)
        at: dict[str, Any] = {"timestamp": str(number)} if is_time else {"offset": number}
        request = LookupRequest(self._filter, explain=explain, **at)
        return self._call(lambda: lookup(request))

    def plan(
        self,
        *,
        force: bool = False,
        from_log_start: bool = False,
        roll_active: bool = False,
        high_watermark: HighWatermark = "checkpoint",
    ) -> list[ResultRow]:
        """Return the rows of `keytail plan`, one per partition: whether a compaction is due (status `would-compact`),
        and the reason if it is not. The arguments are the flags of the same name.

            >>> compacted = ["orders:cleanup.policy=compact"]
            >>> logs = open_log_dirs(log_dir, topic_config=compacted, topics_have_no_overrides=True)
            >>> [(row.name, row.status) for row in logs.select(topics="orders").plan(force=True)]
            [('orders-0', 'would-compact'), ('orders-1', 'would-compact')]
        """
        from keytail.compact.driver import plan  # noqa: PLC0415 (an import of keytail.api stays fast)

        request = PlanRequest(
            self._filter,
            self._configuration,
            force=force,
            from_log_start=from_log_start,
            roll_active=roll_active,
            high_watermark=one_of("high_watermark", high_watermark, HighWatermark),
        )
        return self._call(lambda: plan(request))

    def read(
        self,
        start: Positions | None = None,
        end: Positions | None = None,
        *,
        isolation_level: IsolationLevel = "read_uncommitted",
        include_headers: bool = False,
        columns: Sequence[str] | None = None,
        high_watermark: HighWatermark = "checkpoint",
    ) -> pyarrow.Table:
        """Return the records as one table in memory, with the columns and the order of `read_batches`.

            >>> logs = open_log_dirs(log_dir).select(partitions="orders-0")
            >>> table = logs.read(10, 12, columns=["offset", "key", "value"])
            >>> table.to_pylist()
            [{'offset': 10, 'key': b'key-2', 'value': b'10'}, {'offset': 11, 'key': b'key-3', 'value': b'11'}]
        """
        require("LogDirs.read", ARROW)
        import pyarrow  # noqa: PLC0415 (of an extra)

        asked = self._asked(start, end, isolation_level, include_headers, columns, high_watermark)
        return pyarrow.Table.from_batches(self._read(asked), schema=_schema(asked))

    def read_batches(
        self,
        start: Positions | None = None,
        end: Positions | None = None,
        *,
        isolation_level: IsolationLevel = "read_uncommitted",
        include_headers: bool = False,
        columns: Sequence[str] | None = None,
        high_watermark: HighWatermark = "checkpoint",
    ) -> Iterator[pyarrow.RecordBatch]:
        """Yield the records of the selected partitions as Arrow batches, by topic, partition and offset.

        The columns are those of the Spark source `kafka-log` (source/SOURCE.md): `key` and `value` (binary), `topic`
        (string), `partition` (int32), `offset` (int64), `timestamp` (timestamp[us, UTC]), `timestampType` (int32), and
        with `include_headers` `headers` (list of struct of `key` and `value`). Only `columns` are read, if given.
        Control records, and records at or above the high watermark, are not read.

        `start` is the first position, `end` the first position that is not read. A time stands for the first record at
        or after that time or, if there is no such record, for the end of the partition. With a mapping, each selected
        partition needs a position.

        Raises UsageProblem for arguments that do not fit the log dirs, Refused for a partition that cannot be read as
        it is (for example without a high watermark), CorruptLog for damage, and MissingExtra without pyarrow.

            >>> logs = open_log_dirs(log_dir)
            >>> sum(batch.num_rows for batch in logs.read_batches(columns=["offset"]))
            240
            >>> [batch] = logs.select(topics="users").read_batches(start={"users-0": 38})
            >>> batch.column("offset").to_pylist()
            [38, 39]
        """
        require("LogDirs.read_batches", ARROW)
        return self._read(self._asked(start, end, isolation_level, include_headers, columns, high_watermark))

    def _asked(
        self,
        start: Positions | None,
        end: Positions | None,
        isolation_level: IsolationLevel,
        include_headers: bool,
        columns: Sequence[str] | None,
        high_watermark: HighWatermark,
    ) -> SourceOptions:
        """Return the options of the source for a read. Raises UsageProblem for an invalid argument."""
        wanted = None if columns is None else names_of("columns", columns)
        chosen_columns(OF_RECORDS, wanted, headers=include_headers)
        return SourceOptions(
            log_dirs=self.paths,
            partitions=frozenset((partition.topic, partition.partition) for partition in self.partitions()),
            start=bound_of("start", start, EARLIEST),
            end=bound_of("end", end, LATEST),
            start_without_match="latest",
            committed=one_of("isolation_level", isolation_level, IsolationLevel) == "read_committed",
            include_headers=include_headers,
            columns=wanted,
            log_end=one_of("high_watermark", high_watermark, HighWatermark) == "log-end",
        )

    def _read(self, asked: SourceOptions) -> Iterator[pyarrow.RecordBatch]:
        from keytail.run.kernels import compile_kernels  # noqa: PLC0415 (an import of keytail.api stays fast)
        from keytail.source.columns import record_batches  # noqa: PLC0415 (brings in the kernels)
        from keytail.source.plan import plan_read  # noqa: PLC0415 (brings in the kernels)

        if not asked.partitions:
            return

        def planned() -> Iterator[pyarrow.RecordBatch]:
            compile_kernels(["export"])
            pieces = [piece for share in plan_read(LOCAL, asked) for piece in share]
            return record_batches(LOCAL, pieces, _schema(asked))

        batches = self._call(planned)
        # The caller's code, which runs between two batches, must not run as the owner of the log dirs.
        while (batch := self._call(lambda: next(batches, None))) is not None:
            yield batch

    @property
    def _filter(self) -> PartitionFilter:
        return PartitionFilter(self.paths, (), self._topics, self._partitions)

    def _call(self, function: Callable[[], T]) -> T:
        return _call(self.paths, function)


def _call(paths: Sequence[str], function: Callable[[], T]) -> T:
    """Return the result of `function`, which reads the log dirs `paths`. Call it as the owner of the log dirs, print
    only warnings and errors, and convert errors of the system to KeytailError."""

    def quietly() -> T:
        set_output_style(OutputStyle(quiet=True))
        with working_as(owner_of(LOCAL, paths)):
            return function()

    try:
        return contextvars.copy_context().run(quietly)
    except OSError as problem:
        raise of_system(problem) from problem


def _schema(asked: SourceOptions) -> Any:
    from keytail.source.columns import arrow_schema  # noqa: PLC0415 (brings in the kernels)

    return arrow_schema(chosen_columns(OF_RECORDS, asked.columns, headers=asked.include_headers))
