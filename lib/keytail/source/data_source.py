"""Defines the Spark data sources `kafka-log` (one row per record) and `kafka-log-batches` (one row per record batch).

    spark.read.format("kafka-log").option("logDirs", "/data/kafka-logs").option("topic", "orders").load()

Both formats can also be read as streams. The tasks of a query read the files of stopped or running brokers, or copies
of such files, and never change them. Spark finds both formats through the modules `pyspark_kafka_log` and
`pyspark_kafka_log_batches`; `register` is for a session that does not search for these modules. SOURCE.md describes the
options, and what is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import DataType, StructType

from keytail.acting_user import User, working_as
from keytail.log.fs import LOCAL
from keytail.log.owner import owner_of
from keytail.source.options import SourceOptions, parse_options
from keytail.source.schema import BATCH_COLUMNS, RECORD_COLUMNS, check_asked, schema_of

if TYPE_CHECKING:
    from keytail.source.plan import Piece
    from keytail.source.stream import Offsets


@dataclass
class _Share(InputPartition):
    """The slices that one task reads."""

    pieces: tuple[Piece, ...]
    user: User  # a task that runs as root becomes this user

    def __init__(self, pieces: tuple[Piece, ...], user: User) -> None:
        super().__init__(None)
        self.pieces, self.user = pieces, user


class _LogSource(DataSource):
    """The base class of both sources. The readers of a source have no pushFilters, because with that method pyspark 4.2
    gives wrong results in the second query on a DataFrame. The range that is read is limited by options instead."""

    columns: Mapping[str, DataType]
    of_records: bool

    def schema(self) -> StructType:
        options = parse_options(self.options, records=self.of_records, streaming=None)
        return schema_of(self.columns, options.columns, headers=options.include_headers or not self.of_records)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = parse_options(self.options, records=self.of_records)
        check_asked(self.columns, schema)
        return _LogReader(options, schema, self.of_records)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (named by Spark)
        options = parse_options(self.options, records=self.of_records, streaming=True)
        check_asked(self.columns, schema)
        return _LogStreamReader(options, schema, self.of_records)


class KafkaLogSource(_LogSource):
    columns = RECORD_COLUMNS
    of_records = True

    @classmethod
    def name(cls) -> str:
        return "kafka-log"


class KafkaLogBatchesSource(_LogSource):
    columns = BATCH_COLUMNS
    of_records = False

    @classmethod
    def name(cls) -> str:
        return "kafka-log-batches"


class _Reads:
    """What the readers of batch queries and of streams have in common: how a task reads its share.

    Imports of modules that load the kernels are local: every session on a machine with keytail imports this module.
    """

    _streaming = False

    def __init__(self, options: SourceOptions, schema: StructType, of_records: bool) -> None:
        self._options, self._schema, self._of_records = options, schema, of_records

    def read(self, partition: Any) -> Iterator[Any]:
        from keytail.source.columns import batch_tables, record_batches  # noqa: PLC0415 (imports the kernels)

        schema = to_arrow_schema(self._schema, timezone="UTC")
        read = record_batches if self._of_records else partial(batch_tables, ended=self._streaming)
        with working_as(partition.user):
            yield from read(LOCAL, partition.pieces, schema)


class _LogReader(_Reads, DataSourceReader):
    def partitions(self) -> list[InputPartition]:
        from keytail.source.plan import plan_read  # noqa: PLC0415 (imports the kernels)

        user = owner_of(LOCAL, self._options.log_dirs)
        with working_as(user):
            # If the list were empty, Spark would create a partition of its own.
            return [_Share(pieces, user) for pieces in plan_read(LOCAL, self._options)] or [_Share((), user)]


class _LogStreamReader(_Reads, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the micro-batches of a stream in a process that lives as long as its query."""

    _streaming = True
    _latest: Mapping[str, Any] | None = None
    _is_bounded = False  # set by Trigger.AvailableNow: the stream ends at the latest offsets of its first batch
    _bounds: tuple[Offsets, Offsets] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (named by Spark)
        from keytail.source.stream import initial_offsets, to_json  # noqa: PLC0415 (imports the kernels)

        with working_as(owner_of(LOCAL, self._options.log_dirs)):
            return to_json(initial_offsets(LOCAL, self._options))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (named by Spark)
        most = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (named by Spark)
        self._is_bounded = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 (named by Spark)
        from keytail.source.stream import from_json, latest_offsets, limited, to_json  # noqa: PLC0415 (the kernels)

        known = from_json(start)
        if self._bounds is None:
            with working_as(owner_of(LOCAL, self._options.log_dirs)):
                begins, ends = latest_offsets(LOCAL, self._options, known)
        else:
            begins, ends = self._bounds
        if self._is_bounded:
            self._bounds = begins, ends
        self._latest = to_json(ends)
        if isinstance(limit, ReadMaxRows):
            ends = limited({**begins, **known}, ends, limit.max_rows)
        # Spark compares offsets as text, so equal offsets must have the order of the checkpoint.
        return start if ends == known else to_json(ends)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 (named by Spark)
        return None if self._latest is None else dict(self._latest)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        from keytail.source.stream import from_json, plan_batch  # noqa: PLC0415 (imports the kernels)

        user = owner_of(LOCAL, self._options.log_dirs)
        with working_as(user):
            tasks = plan_batch(LOCAL, self._options, from_json(start), from_json(end))
        return [_Share(pieces, user) for pieces in tasks]


def register(spark: Any) -> None:
    """Register both formats in a session. This call is not necessary if keytail is installed in Spark's Python."""
    for source in (KafkaLogSource, KafkaLogBatchesSource):
        spark.dataSource.register(source)
