"""Implements the strategy of an import through Spark's rows, for any source that Spark reads, sorted by any columns.

Spark reads the source, finds the partition of each record, shuffles and sorts; every record passes through the JVM as a
row. With the strategy of slices.py, no record passes through the JVM, but that strategy requires Parquet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow

from keytail.format.encode import RecordColumns
from keytail.import_.cells import Scratch
from keytail.import_.partition_tasks import WritePartition, write_on_spark
from keytail.import_.records import Load, Unpack, bytes_column, columns_of
from keytail.import_.segments import Written
from keytail.import_.source import Source
from keytail.kernels.murmur2 import partition_of_keys
from keytail.run.tasks import Outcome

# Maximum number of rows of an Arrow batch. To keep a batch below maxBytesPerBatch, Spark computes the batch's size at
# each row. For columns with lists, the time of this grows with the number of rows: with batches of 10,000 rows it was
# 20 s per million rows.
_BATCH_ROWS = "1000"


@dataclass
class Rows:
    """A source that is read as Spark's rows. `why` is the reason why only this strategy can read the source."""

    spark: Any
    records: Any  # the DataFrame of `records_of`, with the partition of each record
    source: Source
    n_partitions: int
    why: str

    @property
    def description(self) -> str:
        return f"through Spark's rows, because {self.why}"

    @property
    def is_on_one_host(self) -> bool:
        return str(self.spark.sparkContext.master).startswith("local")

    def measure(self) -> list[Load]:
        """Return the counts of each partition, in ascending order. Reads the whole source once."""
        from pyspark.sql import functions as F  # noqa: PLC0415, N812 (only where Spark runs)

        rows = (
            self.records.groupBy("partition")
            .agg(
                F.count("*").alias("records"),
                F.sum(F.coalesce(F.octet_length("key"), F.lit(0))).alias("key_bytes"),
                F.sum(F.coalesce(F.octet_length("value"), F.lit(0))).alias("value_bytes"),
                F.count_if(F.col("key").isNull()).alias("keyless"),
            )
            .collect()
        )
        return sorted((Load(**row.asDict()) for row in rows), key=lambda load: load.partition)

    def write(self, write: WritePartition, skipped: Collection[int], scratch: Scratch) -> dict[int, Outcome[Written]]:
        """Call `write` for each partition that has records and is not in `skipped`; return its outcome by partition."""
        return write_on_spark(self.spark, self.by_partition, write, skipped, scratch)

    def by_partition(self, skipped: Collection[int], scratch: object = None) -> tuple[Any, Unpack]:
        """Return a DataFrame with one task per partition, each with that partition's records in order, and the function
        that unpacks Arrow batches of the DataFrame.

        Records of partitions in `skipped` are left out. `scratch` is unused: Spark stores shuffled records elsewhere.
        """
        from pyspark.sql import functions as F  # noqa: PLC0415, N812 (only where Spark runs)

        self.spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", _BATCH_ROWS)
        records = self.records.where(~F.col("partition").isin(list(skipped))) if skipped else self.records
        names = [name for name in ("key", "value", "timestamp", "headers") if name in records.columns]
        ordered = records.repartitionById(self.n_partitions, F.col("partition")).sortWithinPartitions(
            *(f"sort_{number}" for number in range(len(self.source.sort_by))), "number"
        )
        return ordered.select(*names, "partition"), unpack


def unpack(batch: Any) -> Iterator[tuple[int, RecordColumns]]:
    """Yield the partition number and the records of each group of consecutive rows of an Arrow batch that have the same
    partition."""
    partitions = batch.column("partition").to_numpy()
    starts = [0, *(np.flatnonzero(np.diff(partitions)) + 1).tolist(), len(partitions)]
    for start, end in pairwise(starts):
        if end > start:
            yield int(partitions[start]), columns_of(batch.slice(start, end - start))


def with_partitions(records: Any, n_partitions: int) -> Any:
    """Return `records` with a column `partition` without nulls: a null is replaced by the partition of the key; for a
    record without a key, by its column `turn` modulo `n_partitions`."""
    from pyspark.sql import functions as F  # noqa: PLC0415, N812 (only where Spark runs)

    def partitions(keys: Any) -> Any:
        return _partitions_of(keys, n_partitions)

    # Spark infers the kind of UDF from the annotations.
    partitions.__annotations__ = {"keys": pyarrow.Array, "return": pyarrow.Array}
    by_key = F.arrow_udf(partitions, "int")(F.col("key"))
    in_turn = F.pmod(F.col("turn"), F.lit(n_partitions)).cast("int")
    own = [F.col("partition")] if "partition" in records.columns else []
    return records.withColumn("partition", F.coalesce(*own, by_key, in_turn))


def _partitions_of(keys: Any, n_partitions: int) -> Any:
    column = bytes_column(keys)
    found = partition_of_keys(column.data, column.offsets, ~column.valid, n_partitions)
    return pyarrow.array(found, pyarrow.int32(), mask=~column.valid)
