"""A broker's `server.properties`, read as Java reads it, of which only the keys in `keys.py` are kept.

Everything else, passwords among it, is dropped before anything is returned. Reading the file's bytes is left
to the caller, deciding which value holds to `resolve.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import NamedTuple

from keytail.config.keys import file_names
from keytail.config.resolve import Setting
from keytail.errors import UsageProblem

_NOR_BROKER = "A broker does not start on this log dir either"


def parse_server_properties(data: bytes, path: str) -> dict[str, str]:
    """The kept keys and their texts; UsageProblem if it is no properties file or a value is indirect."""
    properties = _properties(data, path, "Give the server.properties that the broker is started with")
    kept = {name: properties[name] for name in file_names() if name in properties}
    for name, text in kept.items():
        if "${" in text:
            raise UsageProblem(
                f"{name} in {path} refers to a config provider, which keytail does not run",
                path=path,
                remedy=f"Give a copy of the file with the value of {name} written out",
            )
    return kept


def _properties(data: bytes, path: str, remedy: str) -> dict[str, str]:
    import javaproperties  # noqa: PLC0415 (brings in parsers of XML and HTTP; most commands read no such file)

    try:
        properties: dict[str, str] = javaproperties.load(BytesIO(data))  # ISO 8859-1, as Properties.load of a stream
    except ValueError as error:
        # The cause is not chained: its text quotes the file, which may hold secrets.
        raise UsageProblem(
            f"{path} is not a properties file: {type(error).__name__}", path=path, remedy=remedy
        ) from None
    return properties


class MetaProperties(NamedTuple):
    """What a log dir's `meta.properties` says. Version 0 is that of brokers which run with ZooKeeper."""

    version: int | None
    node_id: int | None


def parse_meta_properties(data: bytes, path: str) -> MetaProperties:
    """Version, and the number of the broker; None for what it does not have. UsageProblem if one is no number."""
    properties = _properties(data, path, _NOR_BROKER)
    version = _count("version", properties, path)
    return MetaProperties(version, _count("broker.id" if version == 0 else "node.id", properties, path))


def _count(name: str, properties: Mapping[str, str], path: str) -> int | None:
    text = properties.get(name)
    if text is not None and not text.strip().isdecimal():
        raise UsageProblem(f"{name} {text} in {path} is no number", path=path, remedy=_NOR_BROKER)
    return None if text is None else int(text)


def log_dirs(broker: Mapping[str, Setting]) -> tuple[str, ...]:
    """The data directories that a broker's settings name: `log.dirs`, else `log.dir`, else none."""
    setting = broker.get("log.dirs") or broker.get("log.dir")
    value = setting.value if setting else ()
    return tuple(path for path in value if path) if isinstance(value, tuple) else ()
