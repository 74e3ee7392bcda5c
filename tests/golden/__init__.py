"""A log dir that a real Kafka 4.3.1 broker wrote and closed cleanly, with its topics and all records that it served.

`unpack` writes a copy for a test or a demo. The bytes are committed, and their digests are checked when they are
unpacked. generate.py creates them, and README.md describes their contents.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ARCHIVE = HERE / "log-dir.tar.xz"
MANIFEST = HERE / "manifest.json"
RECORDS = HERE / "records.jsonl.xz"
PROPERTIES = HERE / "server.properties"
LOG_DIR = "kafka-logs"
# Overrides that do not concern a topic's files, and that keytail does not read.
NOT_ABOUT_FILES = frozenset({"min.insync.replicas"})


@dataclass(frozen=True)
class GoldenTopic:
    """A topic as its broker reported it. `configs` are its overrides; `offsets` has (start, end) by partition."""

    name: str
    what: str
    partitions: int
    configs: Mapping[str, str]
    offsets: tuple[tuple[int, int], ...]
    transactional: bool

    @property
    def compacted(self) -> bool:
        return "compact" in self.configs.get("cleanup.policy", "").split(",")


def _topics(manifest: Mapping[str, Any]) -> dict[str, GoldenTopic]:
    return {
        name: GoldenTopic(
            name,
            topic["what"],
            topic["partitions"],
            topic["configs"],
            tuple((start, end) for start, end in topic["offsets"]),
            topic["transactional"],
        )
        for name, topic in manifest["topics"].items()
    }


_MANIFEST: dict[str, Any] = json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {"topics": {}}
TOPICS: dict[str, GoldenTopic] = _topics(_MANIFEST)


def manifest() -> dict[str, Any]:
    """Return the manifest: `kafka`, `seed`, `cluster_id`, `node_id`, `generated_ms`, `topics`, `files`."""
    return _MANIFEST


def partitions() -> list[tuple[str, int]]:
    """Return all partitions except those of the metadata log, which no consumer reads."""
    return [(topic.name, number) for topic in TOPICS.values() for number in range(topic.partitions)]


def topic_config_arguments() -> list[str]:
    """Return the command-line flags for every override that keytail supports, and for the policy of each topic."""
    return ["--topics-have-no-overrides"] + [
        word
        for topic in TOPICS.values()
        for key, value in sorted({"cleanup.policy": "delete", **topic.configs}.items())
        if key not in NOT_ABOUT_FILES
        for word in ("--topic-config", f"{topic.name}:{key}={value}")
    ]


def unpack(dest: str | os.PathLike[str]) -> Path:
    """Write the log dir to `dest`/kafka-logs, with its modification times, and return that path.

    Also writes `dest`/server.properties, whose log.dirs has that path. Raises ValueError if a byte differs from the
    committed one.
    """
    log_dir = Path(dest).absolute() / LOG_DIR
    log_dir.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(ARCHIVE.read_bytes()))) as archive:
        for entry in _MANIFEST["files"]:
            member = archive.extractfile(entry["path"])
            data = b"" if member is None else member.read()
            if hashlib.sha256(data).hexdigest() != entry["sha256"]:
                raise ValueError(f"{ARCHIVE}: {entry['path']} differs from the committed file")
            path = log_dir / entry["path"]
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            os.utime(path, ns=(entry["mtime_ns"], entry["mtime_ns"]))
    text = PROPERTIES.read_text()
    (log_dir.parent / PROPERTIES.name).write_text(f"{text}log.dirs={log_dir}\n")
    return log_dir


def record_rows() -> Iterator[list[Any]]:
    """Yield every record that a consumer received before the broker stopped, by topic, partition and offset, as a JSON
    array each.

    The fields are topic, partition, offset, timestamp, timestamp type, key, value and headers, with bytes in base64.
    """
    with lzma.open(RECORDS, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)
