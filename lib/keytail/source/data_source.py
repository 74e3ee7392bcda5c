"""Defines the Spark data sources `kafka-log` (one row per record) and `kafka-log-batches` (one row per batch).

    spark.read.format("kafka-log").option("logDirs", "/data/kafka-logs").option("topic", "orders").load()

The tasks of the query read the files of stopped or running brokers, or copies, and never change them. Spark finds both
formats through the modules `pyspark_kafka_log` and `pyspark_kafka_log_batches`; `register` is for a session that does
not search for them. SOURCE.md describes the options, and what is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DataType, StructType

from keytail.acting_user import User, working_as
from keytail.log.fs import LOCAL
from keytail.log.owner import owner_of
from keytail.source.options import SourceOptions, parse_options
from keytail.source.schema import BATCH_COLUMNS, RECORD_COLUMNS, check_asked, schema_of

if TYPE_CHECKING:
    from keytail.source.plan import Piece


@dataclass
class _Share(InputPartition):
    """The slices that one task reads."""

    pieces: tuple[Piece, ...]
    user: User  # a task that runs as root becomes this user

    def __init__(self, pieces: tuple[Piece, ...], user: User) -> None:
        super().__init__(None)
        self.pieces, self.user = pieces, user


class _LogSource(DataSource):
    """The base class of both sources. Its readers have no pushFilters, because with that method pyspark 4.2 gives wrong
    results in the second query on a DataFrame. Options limit the range that is read."""

    columns: Mapping[str, DataType]
    of_records: bool

    def schema(self) -> StructType:
        options = parse_options(self.options, records=self.of_records)
        return schema_of(self.columns, options.columns, headers=options.include_headers or not self.of_records)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = parse_options(self.options, records=self.of_records)
        check_asked(self.columns, schema)
        return _LogReader(options, schema, self.of_records)


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


class _LogReader(DataSourceReader):
    def __init__(self, options: SourceOptions, schema: StructType, of_records: bool) -> None:
        self._options, self._schema, self._of_records = options, schema, of_records

    # Imports of modules that load the kernels are local: every session on a machine with keytail imports this module.

    def partitions(self) -> list[InputPartition]:
        from keytail.source.plan import plan_read  # noqa: PLC0415 (imports the kernels)

        user = owner_of(LOCAL, self._options.log_dirs)
        with working_as(user):
            # If the list were empty, Spark would create a partition of its own.
            return [_Share(pieces, user) for pieces in plan_read(LOCAL, self._options)] or [_Share((), user)]

    def read(self, partition: Any) -> Iterator[Any]:
        from keytail.source.columns import batch_tables, record_batches  # noqa: PLC0415 (imports the kernels)

        schema = to_arrow_schema(self._schema, timezone="UTC")
        read = record_batches if self._of_records else batch_tables
        with working_as(partition.user):
            yield from read(LOCAL, partition.pieces, schema)


def register(spark: Any) -> None:
    """Register both formats in a session. If keytail is installed in Spark's Python, this is not necessary."""
    for source in (KafkaLogSource, KafkaLogBatchesSource):
        spark.dataSource.register(source)
