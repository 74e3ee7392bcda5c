"""Writes one of the ledger's tables with Spark, in the session of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keytail.run.spark.engine import name_jobs


class SparkTable:
    """The Delta table at `path`. The types of columns are given by their names in Spark."""

    def __init__(self, spark: Any, path: str) -> None:
        self._spark = spark
        self._path = path

    def create(self, columns: Mapping[str, tuple[str, str]], properties: Mapping[str, str]) -> None:
        """Create the table if it does not exist, partitioned by `day`; `columns` has (type, comment) by name."""
        from delta.tables import DeltaTable  # noqa: PLC0415 (brings in pyspark.sql)

        builder = DeltaTable.createIfNotExists(self._spark).location(self._path)
        for name, (kind, comment) in columns.items():
            builder = builder.addColumn(name, kind, comment=comment)
        for name, value in properties.items():
            builder = builder.property(name, value)
        builder.partitionedBy("day").execute()

    def description(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return the properties of the table, and the type of each column."""
        from delta.tables import DeltaTable  # noqa: PLC0415 (as above)

        table = DeltaTable.forPath(self._spark, self._path)
        properties: Mapping[str, str] = table.detail().select("properties").first()["properties"]
        return properties, {field.name: field.dataType.simpleString() for field in table.toDF().schema.fields}

    def add_columns(self, columns: Mapping[str, tuple[str, str]]) -> None:
        added = ", ".join(f"`{name}` {kind}" for name, (kind, _) in columns.items())
        self._spark.sql(f"ALTER TABLE delta.`{self._path}` ADD COLUMNS ({added})")

    def append(self, rows: Any, app_id: str, number: int) -> None:
        """Append an Arrow table, unless the Delta table already has append `number` of `app_id` or a later append."""
        frame = self._spark.createDataFrame(rows).coalesce(1)
        writer = frame.write.format("delta").mode("append")
        writer = writer.option("txnAppId", app_id).option("txnVersion", number)
        name_jobs(self._spark.sparkContext, f"ledger: {self._path.rpartition('/')[2]}")
        writer.save(self._path)
