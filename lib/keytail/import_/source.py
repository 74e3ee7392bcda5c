"""Opens the source of an import as a DataFrame of records, and determines the roles and types of its columns.

Missing columns and columns of the wrong type are reported before any records are read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from keytail.errors import KeytailError, UsageProblem, visible
from keytail.run.ended import first_line

FORMATS = ("parquet", "delta", "json")
_WHOLE = ("tinyint", "smallint", "int", "bigint")


SourceFileFacts = tuple[str, int, int]
"""URI, size in bytes, and modification time in ms of a file of the source."""


@dataclass(frozen=True)
class Columns:
    """The source's column names by role. If a name is None, a column with the role's name is used if it exists; a named
    column must exist."""

    key: str = "key"
    value: str = "value"
    headers: str | None = None
    timestamp: str | None = None
    partition: str | None = None


@dataclass(frozen=True)
class Source:
    path: str
    format: str
    columns: Columns = Columns()
    sort_by: tuple[str, ...] = ()


def records_of(frame: Any, source: Source) -> Any:
    """Return a DataFrame of records, from the frame that `opened` returned. The columns of the result are key, value
    (binary); timestamp (bigint, ms), headers (array of structs of binaries) and partition (int), if the source has
    them; `sort_0`, `sort_1`, ... with the values of the columns `sort_by`; `number` and `turn` (bigint).

    `number` ascends in the order of the source; records without partition and key are distributed by `turn`. For
    Parquet, `number` and `turn` depend only on the number of the file, in the order of names, and on the number of the
    row in the file; `turn` is the sum of these two. For other sources, `number` and `turn` are Spark's
    `monotonically_increasing_id`.
    """
    from pyspark.sql import functions as F  # noqa: PLC0415, N812 (only where Spark runs)

    types = dict(frame.dtypes)
    kinds = {"key": _binary, "value": _binary, "timestamp": _timestamp, "headers": _headers, "partition": _partition}
    wanted = chosen_columns(types, source.columns)
    check_types(types, wanted, source.sort_by)
    columns = [kinds[role](F, types, name).alias(role) for role, name in wanted.items()]
    for number, name in enumerate(source.sort_by):
        columns.append(F.col(_quoted(name)).alias(f"sort_{number}"))
    if source.format != "parquet":
        number = F.monotonically_increasing_id()
        return frame.select(*columns, number.alias("number"), number.alias("turn"))
    metadata = frame.metadataColumn("_metadata")
    chosen = frame.select(*columns, metadata["file_path"].alias("file"), metadata["row_index"].alias("row"))
    numbered = _with_file_numbers(F, chosen, sorted(frame.inputFiles()))
    return numbered.withColumns(
        {
            "number": F.col("file_number") * F.lit(1 << 40) + F.col("row"),
            "turn": F.col("file_number") + F.col("row"),
        }
    ).drop("file", "row", "file_number")


def _with_file_numbers(F: Any, records: Any, uris: Sequence[str]) -> Any:  # noqa: N803 (its usual name)
    if len(uris) <= 1:
        return records.withColumn("file_number", F.lit(0).cast("bigint"))
    # Spark lists files with file:///, but `_metadata.file_path` of a row may begin with file:/.
    records = records.withColumn("file", F.regexp_replace("file", "^file:/+", "file:/"))
    numbers = records.sparkSession.createDataFrame(
        [(re.sub("^file:/+", "file:/", uri), number) for number, uri in enumerate(uris)],
        "file string, file_number bigint",
    )
    joined = records.join(F.broadcast(numbers), "file", "left")
    added = F.concat(F.lit("a file was added to the source during the import: "), F.col("file"))
    unknown = F.raise_error(added).cast("bigint")
    return joined.withColumn("file_number", F.coalesce(F.col("file_number"), unknown))


def chosen_columns(types: Mapping[str, str], columns: Columns) -> dict[str, str]:
    """Return the names of the columns to read, by role (key, value, timestamp, headers, partition). `types` has the
    columns of the source. Raises UsageProblem if a named column is missing."""
    chosen = {"key": columns.key, "value": columns.value}
    for role in ("key", "value"):
        _require(types, chosen[role], f"--{role}-column")
    for role, given in (
        ("timestamp", columns.timestamp), ("headers", columns.headers), ("partition", columns.partition)
    ):  # fmt: skip
        if given is not None:
            _require(types, given, f"--{role}-column")
            chosen[role] = given
        elif role in types:
            chosen[role] = role
    return chosen


def files_on_spark(spark: Any, frame: Any) -> list[SourceFileFacts]:
    """Return URI, size and modification time of the source's files, from Hadoop's file systems."""
    files = []
    configuration = spark._jsc.hadoopConfiguration()
    for name in sorted(frame.inputFiles()):
        path = spark._jvm.org.apache.hadoop.fs.Path(spark._jvm.java.net.URI(name))
        status = path.getFileSystem(configuration).getFileStatus(path)
        files.append((name, status.getLen(), status.getModificationTime()))
    return files


def import_id_of(files: Sequence[SourceFileFacts], source: Source, topic: str, n_partitions: int) -> str:
    """Return an id for importing this source, with its current files, into this topic: 32 hexadecimal digits."""
    message = [topic, n_partitions, asdict(source), files]
    return hashlib.blake2b(json.dumps(message, sort_keys=True).encode(), digest_size=16).hexdigest()


def opened(spark: Any, source: Source) -> Any:
    """Open the source as a DataFrame, reading only its schema. Raises UsageProblem if the source cannot be opened."""
    if source.format not in FORMATS:
        raise UsageProblem(
            f"unknown --format {source.format}", remedy=f"Use one of {', '.join(FORMATS)}", slug="unknown-source-format"
        )
    reader = spark.read.format(source.format)
    if source.format == "json":
        reader = reader.option("mode", "FAILFAST")
    try:
        frame = reader.load(source.path)
        types = frame.dtypes
    except Exception as problem:
        if source.format == "json" and (malformed := _malformed_line(spark, source.path)) is not None:
            file, line = malformed
            raise UsageProblem(
                f"a line is not a JSON object: {visible(line[:100])}",
                path=file,
                remedy="Each line must be one whole JSON object: correct or remove other lines, then run again",
                slug="malformed-json-line",
            ) from problem
        raise UsageProblem(
            f"the source cannot be read as {source.format}: {first_line(problem)[:500]}",
            path=source.path,
            remedy="Give a path that the driver and all executors can read, and its --format",
            slug="unreadable-source",
        ) from problem
    if not types:
        raise UsageProblem(
            "the source has no columns",
            path=source.path,
            remedy="Check whether the source is empty",
            slug="source-without-columns",
        )
    return frame


def _require(types: Mapping[str, str], name: str, flag: str) -> str:
    if name not in types:
        raise UsageProblem(
            f"the source has no column {name}",
            remedy=f"Its columns are {', '.join(types)}: give the correct name with {flag}",
            slug="unknown-source-column",
        )
    return types[name]


def check_types(types: Mapping[str, str], columns: Mapping[str, str], sort_by: Sequence[str] = ()) -> None:
    """Raise UsageProblem if a column has a wrong type, or one of `sort_by` is missing. `types`: Spark's type of each
    column, "" if it is unknown; `columns`: names by role."""
    for role, name in columns.items():
        allowed, wanted, remedy = _ALLOWED[role]
        if types[name] and types[name] not in allowed:
            what = f"column {name} of the source has the type {types[name]}, but must be {wanted}"
            raise UsageProblem(what, remedy=remedy, slug="invalid-source-column-type")
    for name in sort_by:
        _require(types, name, "--sort-by")


_BYTES = ("binary", "string")
_AS_BYTES = (_BYTES, "binary or string", "Convert the column to the bytes that consumers are to receive")
# The allowed types of each role, their description, and the remedy for a column of another type.
_ALLOWED: dict[str, tuple[Collection[str], str, str]] = {
    "key": _AS_BYTES,
    "value": _AS_BYTES,
    "headers": (
        {f"array<struct<key:{key},value:{value}>>" for key in _BYTES for value in _BYTES},
        "array<struct<key:binary,value:binary>> (or strings)",
        "Leave the column out if there are no headers",
    ),
    "timestamp": (("timestamp", *_WHOLE), "a timestamp, or an integer in ms since 1970", "Convert the column"),
    "partition": (
        _WHOLE,
        "an integer",
        "Convert or remove the column; without it the keys determine the partitions, as in Kafka's producer",
    ),
}


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _binary(F: Any, types: Mapping[str, str], name: str) -> Any:  # noqa: N803 (its usual name)
    return F.col(_quoted(name)).cast("binary")


def _headers(F: Any, types: Mapping[str, str], name: str) -> Any:  # noqa: N803 (its usual name)
    return F.transform(
        F.col(_quoted(name)),
        lambda pair: F.struct(pair["key"].cast("binary").alias("key"), pair["value"].cast("binary").alias("value")),
    )


def _timestamp(F: Any, types: Mapping[str, str], name: str) -> Any:  # noqa: N803 (its usual name)
    column = F.col(_quoted(name))
    return F.unix_millis(column) if types[name] == "timestamp" else column.cast("bigint")


def _partition(F: Any, types: Mapping[str, str], name: str) -> Any:  # noqa: N803 (its usual name)
    # A cast would wrap a number beyond int to the number of an existing partition.
    beyond = F.col(_quoted(name)).cast("bigint").between(-(2**31), 2**31 - 1)
    return F.when(F.col(_quoted(name)).isNull() | beyond, F.col(_quoted(name)).cast("int")).otherwise(F.lit(-1))


def refuse_partitions_out_of_range(loads: Sequence[Any], topic: str, n_partitions: int) -> None:
    wrong = [load for load in loads if not 0 <= load.partition < n_partitions]
    if wrong:
        listed = ", ".join(str(load.partition) for load in wrong[:10])
        raise KeytailError(
            f"{sum(load.records for load in wrong)} records are for partitions that {topic} does not have: {listed}",
            remedy=f"The topic has partitions 0 to {n_partitions - 1}: check the partition column of the source",
            slug="partition-out-of-range",
        )


def _malformed_line(spark: Any, path: str) -> tuple[str, str] | None:
    """Return the file and the text of a line that is not JSON; None if there is no such line, or the text cannot be
    read."""
    try:
        lines = spark.read.text(path).select("_metadata.file_path", "value")
        found = lines.where("trim(value) <> '' and get_json_object(value, '$') is null").first()
    except Exception:  # the caller reports the original error
        return None
    return None if found is None else (str(found[0]), str(found[1]))
