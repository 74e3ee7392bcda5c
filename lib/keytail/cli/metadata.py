"""Adds the metadata log in the log dirs to the configuration.

The log is read before anything is decided; with --execute, under the locks. If a metadata log cannot be read, or may be
older than the last changes of settings, the settings of topics are unknown, unless they are given by flags; a message
has the reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from keytail.cli.cluster import GIVE_SETTINGS, OLD_MS, Cluster
from keytail.cli.configuration import NO_METADATA, Configuration
from keytail.cli.small_segments import REMEDY as SET_MORE
from keytail.cli.small_segments import small_segments
from keytail.config.files import MetaProperties, parse_meta_properties
from keytail.config.kafka_version import METADATA_VERSION, WITHOUT_ZOOKEEPER
from keytail.config.keys import KEYS, file_names
from keytail.config.message_format import ClusterMode
from keytail.config.resolve import Setting
from keytail.console import listed, print_message
from keytail.durations import duration_text, time_text
from keytail.errors import ErrorText, KeytailError, Refused
from keytail.format import names
from keytail.log.cluster.metadata import ClusterMetadata, find_metadata_dir, read_metadata
from keytail.log.fs import FileSystem

_ASSERT_CURRENT = (
    "Give --metadata-is-current only if the cluster still runs with this metadata log, and no setting was changed "
    "after its newest record"
)


def with_metadata(
    fs: FileSystem,
    log_dirs: Sequence[str],
    configuration: Configuration,
    now_ms: int | None = None,
    *,
    is_reported: bool = False,
) -> Configuration:
    """Return the configuration, extended by the settings in the metadata log of these log dirs.

    A cluster that the configuration already has is not read again. Reports on standard error which metadata is used, or
    why no metadata is used, and topics of `--topic-configs` that the log dirs do not have. `now_ms` is the time from
    which the log's age is computed (None: the clock). `is_reported`: an earlier call has made this report.
    """
    cluster = configuration.cluster or read_cluster(fs, log_dirs, configuration)
    cluster = replace(cluster, mode=_mode(fs, log_dirs, configuration, cluster))
    configuration = replace(configuration, cluster=cluster)
    if not is_reported:
        _report(fs, log_dirs, configuration, cluster, time.time_ns() // 1_000_000 if now_ms is None else now_ms)
    return configuration


def _report(
    fs: FileSystem, log_dirs: Sequence[str], configuration: Configuration, cluster: Cluster, now_ms: int
) -> None:
    is_wrong = (
        bool(cluster.problem and not cluster.is_absent) or cluster.is_old(now_ms) or cluster.is_uncertain
    )
    instead = GIVE_SETTINGS
    if configuration.topic_configs.path:
        instead = f"Settings of topics are read from {configuration.topic_configs.path}"
    elif configuration.topics_have_no_overrides:
        instead = "As --topics-have-no-overrides states, topics have no settings but those given"
    message = cluster.sentence(now_ms, instead)
    print_message("keytail: " + message, "warning" if is_wrong else "info")
    _report_unmatched(fs, log_dirs, configuration)
    if small := small_segments(configuration):
        print_message(f"keytail: Warning: {small}. {SET_MORE}", "warning")


def read_cluster(fs: FileSystem, log_dirs: Sequence[str], configuration: Configuration) -> Cluster:
    """Return the cluster as described by the metadata log of these log dirs; if it is unknown, with the reason
    (`problem`)."""
    own_dir = _value(configuration.broker, "metadata.log.dir")
    try:
        path = find_metadata_dir(fs, [*([str(own_dir)] if own_dir else []), *log_dirs])
        properties = _meta_properties(fs, log_dirs)
        if path is None:
            return Cluster(problem=ErrorText(_why_absent(properties)), is_absent=True)
        broker = _broker(properties, configuration.broker)
        metadata = read_metadata(fs, path, broker, {*KEYS, *file_names()})
        if not configuration.metadata_is_current:
            if not _value(configuration.broker, "process.roles"):
                _refuse_zookeeper(metadata, properties)
            _refuse_stale(fs, log_dirs, metadata)
    except (KeytailError, OSError) as problem:
        return Cluster(problem=ErrorText(problem))
    return Cluster(broker, metadata)


def _mode(fs: FileSystem, log_dirs: Sequence[str], configuration: Configuration, cluster: Cluster) -> ClusterMode:
    """Return the mode of the cluster (KRaft, ZooKeeper or unknown). A trusted metadata log takes precedence over a
    file."""
    if cluster.metadata is not None or _value(configuration.broker, "process.roles"):
        return "KRaft"
    try:
        versions = {found.version for found in _meta_properties(fs, log_dirs).values()}
    except (KeytailError, OSError):
        versions = set()
    if versions == {1}:
        return "KRaft"
    return "ZooKeeper" if 0 in versions or configuration.broker else "unknown"


def _why_absent(properties: Mapping[str, MetaProperties]) -> str:
    for file, found in properties.items():
        if found.version == 0:
            return f"{NO_METADATA}: the broker runs with ZooKeeper, according to version=0 in {file}"
    if properties:
        return f"{NO_METADATA}: with KRaft the log is in metadata.log.dir or, by default, in the first of log.dirs"
    return NO_METADATA


def _refuse_zookeeper(metadata: ClusterMetadata, properties: Mapping[str, MetaProperties]) -> None:
    """Raise Refused for a metadata log that may be left from a migration to KRaft that was reverted (KAFKA-16463).

    A cluster that was not reverted keeps the version of its `meta.properties`, too.
    """
    if metadata.features.get(METADATA_VERSION, 0) >= WITHOUT_ZOOKEEPER:
        return
    for file, found in properties.items():
        if found.version == 0:
            raise Refused(
                f"the metadata log {metadata.path} is not used: according to version=0 in {file}, the broker runs with "
                "ZooKeeper, or did before a migration to KRaft",
                remedy="If the broker runs with KRaft, give its server.properties, which contains process.roles, with "
                "--config. " + _ASSERT_CURRENT,
                slug="reverted-metadata-log",
            )


def _refuse_stale(fs: FileSystem, log_dirs: Sequence[str], metadata: ClusterMetadata) -> None:
    from keytail.log.cluster.appended import appended_after  # noqa: PLC0415 (--help stays fast)

    appended = appended_after(fs, log_dirs, metadata.as_of_ms + OLD_MS)
    if appended is not None:
        age = duration_text(appended.time_ms - metadata.as_of_ms)
        raise Refused(
            f"the metadata log {metadata.path} is not used: its newest record, of {time_text(metadata.as_of_ms)}, is "
            f"{age} older than data that a broker appended to {appended.path} at {time_text(appended.time_ms)}",
            remedy=_ASSERT_CURRENT,
            slug="stale-metadata-log",
        )


def _report_unmatched(fs: FileSystem, log_dirs: Sequence[str], configuration: Configuration) -> None:
    """Report topics of `--topic-configs` without a partition in the log dirs: they may be on other brokers, or
    misspelt."""
    given = configuration.topic_configs.by_topic
    if not given:
        return
    parsed = (names.parse_partition_dir(entry.name) for path in log_dirs for entry in fs.scan_names(path))
    missing = sorted(given.keys() - {found.topic for found in parsed if found is not None})
    if missing:
        print_message(
            f"keytail: --topic-configs has topics without a partition in the log dirs: {listed(missing)}", "warning"
        )


def _value(broker: Mapping[str, Setting], name: str) -> object:
    return broker[name].value if name in broker else None


def _meta_properties(fs: FileSystem, log_dirs: Sequence[str]) -> dict[str, MetaProperties]:
    """Return the parsed `meta.properties` files of the log dirs, by path."""
    paths = [os.path.join(log_dir, names.META_PROPERTIES) for log_dir in log_dirs]
    return {path: parse_meta_properties(fs.read_bytes(path), path) for path in paths if fs.exists(path)}


def _broker(properties: Mapping[str, MetaProperties], broker: Mapping[str, Setting]) -> int:
    """Return the broker's id. Raises Refused unless the log dirs and the properties file have exactly one id."""
    message = {found.node_id: path for path, found in properties.items() if found.node_id is not None}
    in_file = _value(broker, "node.id")
    if isinstance(in_file, int):
        message[in_file] = broker["node.id"].source
    if len(message) != 1:
        ids = ", ".join(f"{number} in {where}" for number, where in sorted(message.items()))
        raise Refused(
            f"the broker ids differ: {ids}" if message else "no meta.properties contains the broker id",
            remedy="Give the log dirs of one broker, and with --config the server.properties of the same broker",
            slug="different-broker-ids" if message else "no-broker-id",
        )
    return next(iter(message))
