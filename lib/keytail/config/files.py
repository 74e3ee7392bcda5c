"""Parses a broker's `server.properties` and `meta.properties` as Java does. Only the keys in `keys.py` are kept of the
former, and only the version and the ids of the latter.

Everything else, including passwords, is dropped before anything is returned. The caller reads the file; `resolve.py`
decides which value applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import NamedTuple

from keytail.config.keys import file_names
from keytail.config.resolve import LOG_DIRS, Setting
from keytail.errors import UsageProblem

_NOR_BROKER = "Restore the file: a broker does not start on this log dir either"


def parse_server_properties(data: bytes, path: str) -> dict[str, str]:
    """Return the keys that are kept, with their values, unparsed. Raises UsageProblem if the data is not a properties
    file."""
    properties = _properties(data, path, "Give the server.properties that the broker is started with")
    return {name: properties[name] for name in file_names() if name in properties}


def _properties(data: bytes, path: str, remedy: str) -> dict[str, str]:
    import javaproperties  # noqa: PLC0415 (brings in parsers of XML and HTTP; most commands read no such file)

    try:
        # The data is decoded as ISO 8859-1, as by Properties.load(InputStream).
        properties: dict[str, str] = javaproperties.load(BytesIO(data))
    except ValueError as error:
        # The cause is not chained: its message quotes the file, which may contain secrets.
        raise UsageProblem(
            f"invalid properties file: {type(error).__name__}",
            path=path,
            remedy=remedy,
            slug="invalid-properties-file",
        ) from None
    return properties


class MetaProperties(NamedTuple):
    """The contents of a log dir's `meta.properties`. Brokers with ZooKeeper write version 0."""

    version: int | None
    node_id: int | None
    cluster_id: str | None = None


def parse_meta_properties(data: bytes, path: str) -> MetaProperties:
    """Return the version, the broker's node id and the cluster's id, each None if it is missing. Raises UsageProblem if
    the data is not a properties file, or the version or the node id is not a number.
    """
    properties = _properties(data, path, _NOR_BROKER)
    version = _count("version", properties, path)
    node_id = _count("broker.id" if version == 0 else "node.id", properties, path)
    return MetaProperties(version, node_id, properties.get("cluster.id"))


def _count(name: str, properties: Mapping[str, str], path: str) -> int | None:
    text = properties.get(name)
    if text is not None and not text.strip().isdecimal():
        what = f"invalid {name} {text!r}: it must be a number"
        raise UsageProblem(what, path=path, remedy=_NOR_BROKER, slug="invalid-meta-properties")
    return None if text is None else int(text)


def log_dirs(broker: Mapping[str, Setting]) -> tuple[str, ...]:
    """Return the log dirs in a broker's settings, from `log.dirs` or else `log.dir`; empty if neither is set. Raises
    UsageProblem if the setting is invalid."""
    setting = next((broker[name] for name in LOG_DIRS if name in broker), None)
    if setting and setting.invalid:
        raise setting.invalid
    value = setting.value if setting else ()
    return tuple(path for path in value if path) if isinstance(value, tuple) else ()
