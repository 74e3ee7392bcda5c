"""Finds the format, the columns and the Parquet files of a source on this host, before Spark starts.

Faults of the source are reported here if they are certain. If only Spark can read the source (a URI, a pattern, a path
on another file system, a file that pyarrow cannot read), Spark reports its faults.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow
import pyarrow.parquet

from keytail.acting_user import as_caller
from keytail.errors import UsageProblem
from keytail.format.json_object import parse_object
from keytail.import_.source import Source, SourceFileFacts, check_types, chosen_columns

# Environment variables. If one of them is set, a plain path may be on another file system than this host's.
_OTHER_FILE_SYSTEM = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR", "SPARK_HOME")
# Paths whose characters Spark neither encodes (except for spaces) nor treats as a pattern.
_PLAIN_PATH = re.compile(r"[\w/.,=+@~ -]*", re.ASCII)
_MAX_FILES = 100
_MAX_JSON_BYTES = 16 << 20
_PARQUET_STARTS = (b"PAR1", b"PARE")  # the first bytes of a Parquet file, and of an encrypted one
_TITLES = {"parquet": "Parquet", "delta": "a Delta table", "json": "JSON lines"}
_KINDS = {
    "string": "string", "large_string": "string", "binary": "binary", "large_binary": "binary", "bool": "boolean",
    "int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "uint8": "smallint", "uint16": "int",
    "uint32": "bigint", "float": "float", "double": "double", "date32[day]": "date",
}  # fmt: skip


@dataclass(frozen=True)
class LocalSource:
    """What is known of a source without Spark. `types`: Spark's type of each column by its name, "" if unknown. `uris`:
    the Parquet files with the URIs and in the order of Spark's list; empty if only Spark can list the files, and for
    other formats."""

    types: Mapping[str, str]
    uris: tuple[str, ...] = ()


@as_caller()
def look(source: Source) -> LocalSource | None:
    """Return the facts about the source, or None if they are unknown without Spark. Raises UsageProblem if the path
    does not exist, or the source has another format, lacks a column, or has a column of a wrong type."""
    path = source.path
    if _PLAIN_PATH.fullmatch(path) is None or any(os.environ.get(name) for name in _OTHER_FILE_SYSTEM):
        return None
    if not os.path.exists(path):
        raise _unreadable(source, "there is no such file or directory", _near(path))
    _check_format(source)
    types = _TYPES_OF[source.format](path)
    if types is None:
        return None
    check_types(types, chosen_columns(types, source.columns), source.sort_by)
    return LocalSource(types, tuple(_uris(path)) if source.format == "parquet" else ())


def _unreadable(source: Source, why: str, remedy: str) -> UsageProblem:
    what = f"the source cannot be read as {source.format}: {why}"
    return UsageProblem(what, path=source.path, remedy=remedy, slug="unreadable-source")


def _near(path: str) -> str:
    folder, name = os.path.split(os.path.abspath(path))
    near = get_close_matches(name, os.listdir(folder), n=1) if os.access(folder, os.R_OK) else []
    if near:
        return f"Did you mean {os.path.join(folder, near[0])}?"
    return "Give a path that the driver and all executors can read, or a URI"


def _check_format(source: Source) -> None:
    """Raise UsageProblem if the source certainly has another format."""
    found = None
    if os.path.isdir(os.path.join(source.path, "_delta_log")):
        found = "delta"
    elif first := next(_files(source.path), None):
        with open(first, "rb") as file:
            begin = file.read(64)
        if begin.startswith(_PARQUET_STARTS):
            found = "parquet"
        elif begin.lstrip().startswith(b"{"):
            found = "json"
        elif source.format == "parquet":
            raise _unreadable(
                source,
                f"{os.path.basename(first)} is not a Parquet file",
                "Give the --format of the source: parquet, delta or json. Convert other formats, such as CSV",
            )
    elif source.format == "delta":
        raise _unreadable(source, "it is not a Delta table", "Give the directory that contains _delta_log")
    if found is not None and found != source.format:
        remedy = f"Give --format {found}"
        if source.format == "delta" and os.path.basename(source.path.rstrip("/")) == "_delta_log":
            remedy = "Give the directory that contains _delta_log"
        raise _unreadable(source, f"it is {_TITLES[found]}", remedy)


def _files(path: str) -> Iterator[str]:
    """Yield the data files of the source, except empty files and files that Spark ignores because of their names."""
    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith(("_", ".")))
        for name in sorted(names):
            file = os.path.join(folder, name)
            if not name.startswith(("_", ".")) and os.path.getsize(file):
                yield file


def _types_of_parquet(path: str) -> dict[str, str] | None:
    """Return the types of the columns of all files by name; None if a file cannot be read, or there are too many files.
    A directory name such as `partition=3` is also a column, of unknown type."""
    types: dict[str, str] = {}
    for number, file in enumerate(_files(path)):
        if number == _MAX_FILES:
            return None
        try:
            schema = pyarrow.parquet.read_schema(file)
        except (OSError, pyarrow.ArrowException):
            return None
        for field in schema:
            kind = _spark_type(field.type)
            types[field.name] = kind if types.get(field.name, kind) == kind else ""
        inside = os.path.relpath(os.path.dirname(os.path.abspath(file)), os.path.abspath(path)).split(os.sep)
        types |= {name: "" for name, is_one, _ in (part.partition("=") for part in inside) if is_one}
    return types


def _spark_type(kind: Any) -> str:
    """Return the name of Spark's type for an Arrow type that was read from Parquet; "" for an unknown type."""
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if pyarrow.types.is_timestamp(kind) and kind.unit in ("ms", "us"):
        return "timestamp" if kind.tz else "timestamp_ntz"
    return _KINDS.get(str(kind), "")


def _types_of_delta(path: str) -> dict[str, str] | None:
    """Return the types of the columns by name, as read by the package deltalake without a JVM; None if deltalake is not
    installed or cannot read the table."""
    if importlib.util.find_spec("deltalake") is None:
        return None
    import deltalake  # noqa: PLC0415 (only for Delta)

    try:
        fields = deltalake.DeltaTable(path).schema().fields
    except Exception:  # an error of any type: Spark may be able to read the table, or reports the fault
        return None
    names = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint"}
    kinds = {field.name: getattr(field.type, "type", "") for field in fields}
    known = {*_KINDS.values(), *names, "timestamp", "timestamp_ntz"}
    return {name: names.get(kind, kind) if kind in known else "" for name, kind in kinds.items()}


def _types_of_json(path: str) -> dict[str, str] | None:
    """Return the names of all objects' columns with the type "" (unknown); None if Spark has to parse the source."""
    files = list(_files(path))
    if sum(map(os.path.getsize, files)) > _MAX_JSON_BYTES:
        return None
    names: dict[str, str] = {}
    for file in files:
        try:
            with open(file, encoding="utf-8") as lines:
                objects = [parse_object(line) for line in lines if line.strip()]
        except ValueError:  # the file is compressed or has another encoding, or a line is no JSON object for Python
            return None
        names |= {name: "" for item in objects for name in item}
    return names or None


_TYPES_OF = {"parquet": _types_of_parquet, "delta": _types_of_delta, "json": _types_of_json}


def _uris(path: str) -> Sequence[str]:
    """Return the URIs of the files, sorted; an empty list if there are directories, empty files, or names that Spark
    interprets."""
    path = os.path.abspath(path)
    names = [""] if os.path.isfile(path) else os.listdir(path)
    is_flat = not any(name and os.path.isdir(os.path.join(path, name)) for name in names)
    if not is_flat or {"_metadata", "_common_metadata"} & {*names}:
        return ()
    listed = [os.path.join(path, name) if name else path for name in names if not name.startswith(("_", "."))]
    if any(_PLAIN_PATH.fullmatch(name) is None or not os.path.getsize(name) for name in listed):
        return ()
    return sorted("file://" + name.replace(" ", "%20") for name in listed)


@as_caller()
def files_here(local: LocalSource) -> list[SourceFileFacts]:
    """Return the same facts about the files of the source as `source.files_on_spark`."""
    files = []
    for uri in local.uris:
        status = os.stat(unquote(urlsplit(uri).path))
        files.append((uri, status.st_size, status.st_mtime_ns // 1_000_000))
    return files
