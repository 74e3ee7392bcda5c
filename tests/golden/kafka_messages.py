"""Writes `lib/keytail/format/kafka_messages.json` from the message definitions in Kafka's jars.

    python -m tests.golden.kafka_messages          writes the file
    python -m tests.golden.kafka_messages --check  fails if it differs from what would be written

Kafka's jars contain the JSON definitions that its protocol generator reads. Each becomes a line: its name, its latest
version, its first flexible version, and its fields in the notation of `format/messages.py`.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from keytail.format.messages import NEVER
from tests.interop.kafka import kafka_jars

PATH = Path(__file__).parents[2] / "lib/keytail/format/kafka_messages.json"
_STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*')
_VERSIONS = re.compile(r"(\d+)(?:-(\d+)|(\+))?")
_CONTROL = ("LeaderChangeMessage", "SnapshotHeaderRecord", "SnapshotFooterRecord", "KRaftVersionRecord", "VotersRecord")
_PROTOCOL = {"subscription": "ConsumerProtocolSubscription", "assignment": "ConsumerProtocolAssignment"}


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
    number = f"={default}" if tag and re.fullmatch(r"-?\d+|null", str(default)) else ""
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


def _table(name: str, rows: Iterable[tuple[int | str, Mapping[str, Any]]]) -> str:
    lines = [f"{json.dumps(str(key))}: {json.dumps([item['name'], *line(item)])}" for key, item in sorted(rows)]
    return f'"{name}": {{\n' + ",\n".join(lines) + "\n}"


def tables(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of the file."""

    def of(kind: str, prefixes: tuple[str, ...]) -> list[tuple[int | str, Mapping[str, Any]]]:
        return [
            (item["apiKey"], item)
            for name, item in found.items()
            if item["type"] == kind and name.startswith(prefixes) and "apiKey" in item
        ]

    remote_log = ("RemoteLog", "RemotePartition")
    metadata = [row for row in of("metadata", ("",)) if not row[1]["name"].startswith(remote_log)]
    groups = ("LegacyOffset", "OffsetCommit", "GroupMetadata", "ConsumerGroup", "ShareGroup", "StreamsGroup")
    parts = [
        _table("METADATA", metadata),
        _table("GROUP_KEYS", of("coordinator-key", groups)),
        _table("GROUP_VALUES", of("coordinator-value", groups)),
        _table("TRANSACTION_KEYS", of("coordinator-key", ("TransactionLog",))),
        _table("TRANSACTION_VALUES", of("coordinator-value", ("TransactionLog",))),
        _table("SHARE_KEYS", of("coordinator-key", ("ShareSnapshot", "ShareUpdate"))),
        _table("SHARE_VALUES", of("coordinator-value", ("ShareSnapshot", "ShareUpdate"))),
        _table("REMOTE_LOG", of("metadata", remote_log)),
        _table("CONSUMER_PROTOCOL", [(name, found[message]) for name, message in _PROTOCOL.items()]),
        _table("CONTROL", [(name, found[name]) for name in _CONTROL]),
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def current() -> str:
    """Return the file as generated from the present jars of Kafka."""
    return tables(definitions(sorted(kafka_jars().glob("kafka-*.jar"))))


def main(arguments: list[str]) -> int:
    text = current()
    if arguments == ["--check"]:
        return int(PATH.read_text() != text)
    PATH.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
