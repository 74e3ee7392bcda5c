"""Searches log dirs for signs of the Kafka version that wrote them (config/kafka_version.py)."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence

from keytail.cli.cluster import Cluster
from keytail.config.files import parse_meta_properties
from keytail.config.kafka_version import Inferred, Signs, infer
from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.partition import LogDirFacts

# Maximum number of partitions that are examined: a sample, so that the search is fast even for 100,000 partitions.
_MAX_PARTITIONS = 200
_MAGIC_AT = 16


def infer_kafka_version(fs: FileSystem, log_dirs: Sequence[LogDirFacts], cluster: Cluster | None) -> Inferred:
    """Return the Kafka versions that may have written these log dirs, with the evidence. Ignores unreadable files."""
    meta_versions: set[int] = set()
    has_directory_id = False
    clean_shutdown_has_json: set[bool] = set()
    magics: dict[int, str] = {}
    snapshots: set[int] = set()
    partitions = [entry for facts in log_dirs for entry in facts.partitions]
    with_topic_id = examined_count = 0
    for facts in log_dirs:
        with contextlib.suppress(OSError, KeytailError):
            path = os.path.join(facts.path, names.META_PROPERTIES)
            data = fs.read_bytes(path)
            version = parse_meta_properties(data, path).version
            meta_versions |= {version} if version is not None else set()
            has_directory_id |= any(line.strip().startswith(b"directory.id") for line in data.splitlines())
        with contextlib.suppress(OSError, KeytailError):
            clean_shutdown_has_json.add(bool(fs.read_bytes(os.path.join(facts.path, names.CLEAN_SHUTDOWN)).strip()))
    for entry in partitions[:_MAX_PARTITIONS]:
        with contextlib.suppress(OSError, KeytailError):
            found = [item.name for item in fs.scan(entry.path)]
            examined_count += 1
            with_topic_id += names.PARTITION_METADATA in found
            for name in found:
                path = os.path.join(entry.path, name)
                if name.endswith(names.LOG) and (head := fs.read_at(path, 0, _MAGIC_AT + 1)[_MAGIC_AT:]):
                    magics.setdefault(head[0], f"{entry.topic}-{entry.partition}")
                elif name.endswith(names.SNAPSHOT) and len(head := fs.read_at(path, 0, 2)) == 2:
                    snapshots.add(struct.unpack(">h", head)[0])
    return infer(
        Signs(
            meta_versions=frozenset(meta_versions),
            has_directory_id=has_directory_id,
            has_metadata_log=cluster is not None and not cluster.is_absent,
            features=cluster.metadata.features if cluster is not None and cluster.metadata is not None else {},
            clean_shutdown_has_json=clean_shutdown_has_json.pop() if len(clean_shutdown_has_json) == 1 else None,
            partitions=examined_count,
            with_topic_id=with_topic_id,
            magics=magics,
            snapshots=frozenset(snapshots),
        )
    )
