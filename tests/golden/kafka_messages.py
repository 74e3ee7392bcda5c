"""Writes `lib/keytail/format/kafka_messages.py` from the message definitions in Kafka's jars.

    python -m tests.golden.kafka_messages          writes the module
    python -m tests.golden.kafka_messages --check  fails if it differs from what would be written

Kafka's jars contain the JSON definitions that its protocol generator reads. Each becomes a line of fields in the
notation of `format/messages.py`.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from keytail.format.messages import NEVER
from tests.interop.kafka import kafka_jars

MODULE = Path(__file__).parents[2] / "lib/keytail/format/kafka_messages.py"
_STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*')
_VERSIONS = re.compile(r"(\d+)(?:-(\d+)|(\+))?")
_CONTROL = ("LeaderChangeMessage", "SnapshotHeaderRecord", "SnapshotFooterRecord", "KRaftVersionRecord", "VotersRecord")
_PROTOCOL = {"subscription": "ConsumerProtocolSubscription", "assignment": "ConsumerProtocolAssignment"}
_HEAD = '''"""The fields of Kafka {version}'s own records, generated from its message definitions. Do not edit.

Written by `python -m tests.golden.kafka_messages`. The notation is that of `format/messages.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from keytail.format.messages import NEVER, Definition

# fmt: off
'''


def definitions(jar_paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return each message definition of the jars by its name."""
    found = {}
    for path in jar_paths:
        with zipfile.ZipFile(path) as jar:
            for name in jar.namelist():
                if re.match(r"(common/)?(message|metadata)/\w+\.json$", name):
                    definition = json.loads(_STRING_OR_COMMENT.sub(r"\1", jar.read(name).decode()))
                    found[definition["name"]] = definition
    return found


def _span(versions: str) -> tuple[int, int]:
    """Return the first and the last version; for `none` the first one is a version that no message has."""
    if versions == "none":
        return NEVER, NEVER
    match = _VERSIONS.fullmatch(versions)
    assert match, versions
    first = int(match[1])
    return first, NEVER if match[3] else int(match[2] or first)


def _field(field: Mapping[str, Any], structs: Mapping[str, Any], parent: tuple[int, int]) -> str:
    kind, is_array = field["type"].removeprefix("[]"), field["type"].startswith("[]")
    span = _span(field.get("versions") or field["taggedVersions"])
    parts = field.get("fields") or structs.get(kind)
    text = f"({_fields(parts, structs, span)})" if parts else kind
    text = f"[{text}]" if is_array else text
    name = field["name"][0].lower() + field["name"][1:]
    nullable = "?" if "nullableVersions" in field else ""
    versions = ""
    if span[0] > parent[0] or span[1] < parent[1]:
        assert span[1] in (span[0], NEVER), "the notation has no other spans"
        versions = f"/{span[0]}" + ("+" if span[1] == NEVER else "")
    tag = f"#{field['tag']}" if "tag" in field else ""
    default = field.get("default")
    number = f"={default}" if tag and re.fullmatch(r"-?\d+", str(default)) else ""
    return f"{name}:{text}{nullable}{versions}{tag}{number}"


def _fields(fields: Iterable[Mapping[str, Any]], structs: Mapping[str, Any], parent: tuple[int, int]) -> str:
    return " ".join(_field(field, structs, parent) for field in fields)


def line(definition: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return the latest version, the first flexible version, and the fields of a definition."""
    structs = {struct["name"]: struct["fields"] for struct in definition.get("commonStructs", ())}
    newest = _span(definition["validVersions"])[1]
    return (
        newest,
        _span(definition["flexibleVersions"])[0],
        _fields(definition["fields"], structs, (0, newest)),
    )


def _table(name: str, comment: str, rows: Iterable[tuple[int | str, Mapping[str, Any]]]) -> Iterator[str]:
    yield f"\n# {comment}"
    rows = sorted(rows)
    yield f"{name}: Mapping[{type(rows[0][0]).__name__}, Definition] = {{"
    for key, definition in rows:
        newest, flexible_from, fields = line(definition)
        flexible = "NEVER" if flexible_from == NEVER else flexible_from
        pieces = textwrap.wrap(fields, 108, break_long_words=False, break_on_hyphens=False, drop_whitespace=False)
        yield f"    # {definition['name']}"
        yield (
            f"    {json.dumps(key)}: Definition({newest}, {flexible}, "
            + "\n        ".join(f'"{piece}"' for piece in ["", *pieces][len(pieces) <= 1 :] or [""])
            + "),"
        )
    yield "}"


def module(found: Mapping[str, Mapping[str, Any]], version: str) -> str:
    """Return the text of the module."""

    def of(kind: str, prefixes: tuple[str, ...]) -> list[tuple[int | str, Mapping[str, Any]]]:
        return [
            (item["apiKey"], item)
            for name, item in found.items()
            if item["type"] == kind and name.startswith(prefixes) and "apiKey" in item
        ]

    remote_log = ("RemoteLog", "RemotePartition")
    metadata = [row for row in of("metadata", ("",)) if not row[1]["name"].startswith(remote_log)]
    groups = ("LegacyOffset", "OffsetCommit", "GroupMetadata", "ConsumerGroup", "ShareGroup", "StreamsGroup")
    control = [(name, found[name]) for name in _CONTROL]
    protocol = [(name, found[message]) for name, message in _PROTOCOL.items()]
    lines = [
        *_table("METADATA", "Records of the cluster metadata log by type.", metadata),
        *_table("GROUP_KEYS", "Keys of `__consumer_offsets` by record type.", of("coordinator-key", groups)),
        *_table("GROUP_VALUES", "Values of `__consumer_offsets` by record type.", of("coordinator-value", groups)),
        *_table("TRANSACTION_KEYS", "Keys of `__transaction_state`.", of("coordinator-key", ("TransactionLog",))),
        *_table("TRANSACTION_VALUES", "Values of `__transaction_state`.", of("coordinator-value", ("TransactionLog",))),
        *_table("CONSUMER_PROTOCOL", "What members of a classic consumer group send.", protocol),
        *_table("CONTROL", "Control records of the cluster metadata log by name.", control),
    ]
    return _HEAD.format(version=version) + "\n" + "\n".join(lines) + "\n"


def current() -> str:
    """Return the module as generated from the present jars of Kafka."""
    paths = sorted(kafka_jars().glob("kafka-*.jar"))
    version = next(path.stem.rpartition("-")[2] for path in paths if path.name.startswith("kafka-metadata-"))
    return module(definitions(paths), version)


def main(arguments: list[str]) -> int:
    text = current()
    if arguments == ["--check"]:
        return int(MODULE.read_text() != text)
    MODULE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
