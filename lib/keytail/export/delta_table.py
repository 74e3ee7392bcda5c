"""Reads and writes the Delta table of an exported topic, and the export state of each partition.

The state of the partitions is stored in the `userMetadata` of the commit that writes the rows, so a crash cannot
separate state and rows. The state is read from the table's own log, latest commit first: without Spark from a
directory, and by Delta from a URI.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keytail.acting_user import as_caller
from keytail.cli.masking import masked
from keytail.errors import KeytailError, Refused
from keytail.export.formats import Formats
from keytail.export.plan import Exported
from keytail.format.json_object import parse_object
from keytail.run.ended import first_line
from keytail.run.spark.delta import changed_settings

VERSION = 1
_COMMIT = re.compile(r"\d{20}\.json")
_CHANGE_FEED = "delta.enableChangeDataFeed"
_LEFT_BY_A_KILLED_RUN = re.compile(r"_delta_log|partition=\d+")
# Operations whose commits change no rows.
_HARMLESS = ("OPTIMIZE", "VACUUM START", "VACUUM END", "REORG", "SET TBLPROPERTIES", "UNSET TBLPROPERTIES")
# The columns of tables that were exported by a version which did not record columns.
_FIRST_COLUMNS = ["partition", "key", "key_bytes", "value", "headers", "timestamp", "offset", "leader_epoch"]
# Matches an error message of Spark about a value that its parser rejected. Groups: key or value, partition, offset.
UNDECODABLE = re.compile(r"keytail-undecodable (key|value) (\d+) (\d+)")


@dataclass(frozen=True)
class TableState:
    """The export state of a table. `columns` are the names of the columns (`table_columns`) that the version of keytail
    which exported the table writes. `as_of`: the offset or time of the exported log state, empty for the latest state.

    `changed`: how other programs changed the table after the last export (`partitions` is then empty), or "".
    """

    topic: str
    formats: Mapping[str, str]
    columns: Sequence[str]
    as_of: str = ""
    partitions: Mapping[int, Exported] = field(default_factory=dict)
    changed: str = ""

    def with_partitions(self, more: Mapping[int, Exported]) -> TableState:
        return replace(self, partitions={**self.partitions, **more}, changed="")

    def as_metadata(self) -> str:
        partitions = {str(number): known.as_json() for number, known in sorted(self.partitions.items())}
        stored = {"topic": self.topic, "formats": self.formats, "as_of": self.as_of, "partitions": partitions}
        return json.dumps({"keytail_export": VERSION, **stored, "columns": self.columns}, separators=(",", ":"))


@as_caller()
def read_state(path: str, spark: Any = None) -> TableState | None:
    """Return the state of the table at `path`; None if there is no table. For a URI, the session `spark` reads the
    state. Raises Refused if the table was not written by an export, and KeytailError if the table cannot be read."""
    changed, exists = "", False
    for version, info in _commits(Path(path)) if spark is None else _commits_by_spark(spark, path):
        exists = True
        state = _state_of(info.get("userMetadata"))
        if state is not None:
            return replace(state, partitions={}, changed=changed) if changed else state
        operation = str(info.get("operation", "a change"))
        if operation not in _HARMLESS:
            changed = changed or f"the table was changed by {operation}, version {version}"
    if not exists:
        return None
    raise Refused(
        "the Delta table was not written by keytail export", path=path, remedy="Give another --to", slug="not-an-export"
    )


def _commits(folder: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield version and `commitInfo` of each commit of a table, latest first; yield nothing if there is no table.

    `commitInfo` does not depend on checkpoints, column mapping, deletion vectors or the protocol version, which Spark
    checks before it writes. The package deltalake is not used: the extra of export does not install it, it loads the
    whole table instead of usually one file, and it refuses tables with features that only Spark supports.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise Refused(
            "the path of the table is not a directory",
            path=str(folder),
            remedy="Give another --to",
            slug="not-a-directory",
        )
    commits = sorted((folder / "_delta_log").glob("*.json"), reverse=True)
    commits = [file for file in commits if _COMMIT.fullmatch(file.name)]
    if not commits:
        _refuse_others(str(folder), (item.name for item in folder.iterdir()))
    for file in commits:
        yield int(file.stem), _commit_info(file)


def _commits_by_spark(spark: Any, uri: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the same as `_commits` for a table at a URI: the commits that Delta retains."""
    from delta.tables import DeltaTable  # noqa: PLC0415 (only where Spark runs)

    try:
        if not any(_COMMIT.fullmatch(name) for name in _names_in(spark, f"{uri}/_delta_log")):
            _refuse_others(uri, _names_in(spark, uri))
            return
        before = None
        for limit in (10, None):  # the state is nearly always in one of the latest commits
            history = DeltaTable.forPath(spark, uri).history(limit).select("version", "operation", "userMetadata")
            for row in sorted(history.collect(), key=lambda row: -row["version"]):
                if before is None or row["version"] < before:
                    before = row["version"]
                    yield before, row.asDict()
    except KeytailError:
        raise
    except Exception as problem:
        raise KeytailError(
            f"the table cannot be read: {masked(first_line(problem))}",
            path=uri,
            remedy="Check the URI, the store, the network and the credentials, then run again",
            slug="table-not-readable",
        ) from problem


def _names_in(spark: Any, uri: str) -> list[str]:
    """Return the names in a folder of a store; an empty list if the folder does not exist."""
    path = spark.sparkContext._jvm.org.apache.hadoop.fs.Path(uri)
    store = path.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
    return [item.getPath().getName() for item in store.listStatus(path)] if store.exists(path) else []


def _refuse_others(path: str, found: Iterable[str]) -> None:
    """Raise Refused if a folder without a commit contains anything but what a killed run may have left."""
    others = [name for name in found if not _LEFT_BY_A_KILLED_RUN.fullmatch(name)]
    if others:
        raise Refused(
            f"the directory contains {others[0]}, but no Delta table",
            path=path,
            remedy="Give another --to",
            slug="not-a-delta-table",
        )


def _commit_info(file: Path) -> Mapping[str, Any]:
    try:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                info = parse_object(line).get("commitInfo")
                if info is not None:
                    return dict(info)
    except FileNotFoundError:
        pass  # Delta has just removed the file, because its retention time has passed
    except ValueError as bad:
        raise Refused(
            f"a commit of the Delta table cannot be read: {bad}",
            path=str(file),
            remedy="Check the table, or give another --to",
            slug="unreadable-delta-commit",
        ) from bad
    return {}


def _state_of(metadata: str | None) -> TableState | None:
    try:
        stored = parse_object(metadata or "")
    except ValueError:
        return None
    if "keytail_export" not in stored:
        return None
    if stored["keytail_export"] != VERSION:
        raise Refused(
            f"the export state of the table has version {stored['keytail_export']}, but this keytail supports only "
            f"version {VERSION}",
            remedy="Use the version of keytail that exported the table, or give another --to",
            slug="unsupported-export-version",
        )
    known = {int(number): Exported(**item) for number, item in stored["partitions"].items()}
    return TableState(stored["topic"], stored["formats"], stored.get("columns", _FIRST_COLUMNS), stored["as_of"], known)


def decoded(raw: Any, formats: Formats) -> Any:
    """Return the frame `raw`; if keys or values have the format `json`, Spark's parser checks them when the frame is
    written. Invalid JSON fails the job with a message that UNDECODABLE matches."""
    from pyspark.sql import functions as F  # noqa: PLC0415, N812 (only where Spark runs)

    for name, wanted in (("key", formats.key), ("value", formats.value)):
        if wanted.name == "json":
            place = F.concat_ws(" ", F.lit(f"keytail-undecodable {name}"), F.col("partition"), F.col("offset"))
            is_bad = F.col(name).isNotNull() & F.try_parse_json(F.col(name)).isNull()
            raw = raw.withColumn(name, F.when(is_bad, F.raise_error(place).cast("string")).otherwise(F.col(name)))
    return raw


def write(
    frame: Any, path: str, state: TableState, partitions: Sequence[int] | None, *, change_feed: bool = False
) -> None:
    """Replace the table's rows of `partitions` by the rows of `frame`, or create the table (`partitions` is None), in
    one commit with `state`. A table created with `change_feed` records the changes of its rows."""
    rows = _columns(frame.where("NOT deleted"), state)
    writer = rows.write.format("delta").option("userMetadata", state.as_metadata())
    if partitions is not None:
        numbers = ", ".join(map(str, sorted(partitions)))
        writer.mode("overwrite").option("replaceWhere", f"partition IN ({numbers})").save(path)
        return
    properties = {"delta.isolationLevel": "Serializable", "delta.dataSkippingStatsColumns": "offset,timestamp"}
    if change_feed:
        properties[_CHANGE_FEED] = "true"
    writer.mode("errorifexists").partitionBy("partition").options(**properties).save(path)


def enable_change_feed(spark: Any, path: str) -> None:
    """Make Delta record the changes of the table's rows from the next commit on, unless they are recorded already."""
    from delta.tables import DeltaTable  # noqa: PLC0415 (only where Spark runs)

    properties = DeltaTable.forPath(spark, path).detail().select("properties").first()["properties"]
    if properties.get(_CHANGE_FEED) != "true":
        quoted = path.replace("`", "``")
        spark.sql(f"ALTER TABLE delta.`{quoted}` SET TBLPROPERTIES ('{_CHANGE_FEED}' = 'true')")


def merge(frame: Any, path: str, state: TableState, partitions: Sequence[int]) -> None:
    """Merge the frame into the table's rows of `partitions`, in one commit with `state`: a record replaces the row of
    its key or becomes a new row, a tombstone removes the row of its key."""
    from delta.tables import DeltaTable  # noqa: PLC0415 (only where Spark runs)

    spark = frame.sparkSession
    names = _columns(frame, state).columns
    key = "key_bytes" if "key_bytes" in names else "key"
    numbers = ", ".join(map(str, sorted(partitions)))
    same = f"t.partition IN ({numbers}) AND t.partition = s.partition AND t.{key} = s.{key}"
    values = {f"`{name}`": f"s.`{name}`" for name in names}
    with changed_settings(spark, {"spark.databricks.delta.commitInfo.userMetadata": state.as_metadata()}):
        merging = DeltaTable.forPath(spark, path).alias("t").merge(frame.alias("s"), same)
        merging = merging.whenMatchedDelete("s.deleted").whenMatchedUpdate(set=values)
        merging.whenNotMatchedInsert("NOT s.deleted", values).execute()


def _columns(frame: Any, state: TableState) -> Any:
    return frame.select(*(name for name in state.columns if name in frame.columns))
