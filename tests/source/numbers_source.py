"""A Python data source that applies pushed filters, for a test of pyspark itself. It imports little, since Spark's
workers import it.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, Filter
from pyspark.sql.types import StructType


class Numbers(DataSource):
    """The numbers 0 to 9."""

    @classmethod
    def name(cls) -> str:
        return "keytail-test-numbers"

    def schema(self) -> str:
        return "n int"

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Reader()


class _Reader(DataSourceReader):
    """Applies filters of the kind `n = 3`, and no others."""

    _numbers: tuple[int, ...] = tuple(range(10))

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        for item in filters:
            if isinstance(item, EqualTo):
                self._numbers = (item.value,)
            else:
                yield item

    def read(self, partition: object) -> Iterator[tuple[int]]:
        return ((number,) for number in self._numbers)
