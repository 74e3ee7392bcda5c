"""Infers from signs in a log dir which versions of Kafka may have written it, and the consequences. Pure functions.

Sources: MetadataVersion of Kafka 4.3.1, KIP-858 (directory.id), the clean-shutdown files and directories of 2.8.2,
3.6.2 and 3.9.1, and the classes of 3.7.0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Version = tuple[int, int]

METADATA_VERSION = "metadata.version"
# The first feature level of each version.
_FIRST_LEVELS: tuple[tuple[int, Version], ...] = (
    (1, (3, 0)), (2, (3, 1)), (3, (3, 2)), (4, (3, 3)), (8, (3, 4)), (9, (3, 5)), (12, (3, 6)), (15, (3, 7)),
    (20, (3, 8)), (21, (3, 9)), (22, (4, 0)), (26, (4, 1)), (28, (4, 2)), (30, (4, 3)), (31, (4, 4)),
)  # fmt: skip
# The level from which on a cluster cannot be reverted to ZooKeeper.
WITHOUT_ZOOKEEPER = next(level for level, version in _FIRST_LEVELS if version == (4, 0))
# From this level on all brokers have producer.id.expiration.ms.
WITH_PRODUCER_EXPIRATION = next(level for level, version in _FIRST_LEVELS if version == (3, 4))
SNAPSHOT_VERSION = 1


@dataclass(frozen=True)
class Signs:
    """The signs found in log dirs; a value of None or an empty value means that there is no information.

    `meta_versions`: the versions of `meta.properties` files. `has_directory_id`: whether these files have a directory
    id. `has_metadata_log`: whether there is a metadata log, used or not. `features`: the feature levels in the metadata
    log by name, if it is used. `clean_shutdown_has_json`: whether the clean-shutdown file contains JSON. `partitions`:
    the number of examined partitions, of which `with_topic_id` have a `partition.metadata`. `magics`: the magics of the
    first batches of the partitions' segments, with an example of each. `snapshots`: the versions of the partitions'
    producer snapshots.
    """

    meta_versions: frozenset[int] = frozenset()
    has_directory_id: bool = False
    has_metadata_log: bool = False
    features: Mapping[str, int] = field(default_factory=dict)
    clean_shutdown_has_json: bool | None = None
    partitions: int = 0
    with_topic_id: int = 0
    magics: Mapping[int, str] = field(default_factory=dict)
    snapshots: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Evidence:
    """A sign that was `seen`, what it `means` for keytail, and the possible versions: from `first` on, before `end`."""

    seen: str
    means: str
    first: Version | None = None
    end: Version | None = None


@dataclass(frozen=True)
class Inferred:
    """All evidence, and the versions that all of it allows. A broker may be newer than the feature level of its
    cluster."""

    evidence: tuple[Evidence, ...] = ()

    @property
    def first(self) -> Version | None:
        return max((item.first for item in self.evidence if item.first is not None), default=None)

    @property
    def end(self) -> Version | None:
        return min((item.end for item in self.evidence if item.end is not None), default=None)

    @property
    def sentence(self) -> str:
        """The range of versions as text, such as `3.7 or later, before 4.0`."""
        first, end = self.first, self.end
        if first is not None and end is not None and first >= end:
            return f"several versions: {_text(first)} or later, and one before {_text(end)}"
        since = f"{_text(first)} or later" if first is not None else ""
        before = f"before {_text(end)}" if end is not None else ""
        return ", ".join(part for part in (since, before) if part) or "unknown"


def infer(signs: Signs) -> Inferred:
    """Return the evidence from the signs, the most conclusive first."""
    return Inferred(tuple(_evidence(signs)))


def _evidence(signs: Signs) -> Iterator[Evidence]:
    level = signs.features.get(METADATA_VERSION)
    at = -1 if level is None else bisect_right([first for first, _ in _FIRST_LEVELS], level) - 1
    if at >= 0:
        version = _FIRST_LEVELS[at][1]
        means = f"the brokers of the cluster run Kafka {_text(version)} or later"
        if at == len(_FIRST_LEVELS) - 1:
            means += ", which is newer than the versions that this keytail was tested with"
        yield Evidence(f"{METADATA_VERSION} {level} in the metadata log", means, first=version)
    if 0 in signs.meta_versions:
        yield _version_0(signs)
    if 1 in signs.meta_versions:
        means = "the broker runs with KRaft: the metadata log contains the settings of topics"
        yield Evidence("version=1 in meta.properties", means, first=(3, 0))
    if signs.has_directory_id:
        yield Evidence("directory.id in meta.properties", "Kafka writes this id from 3.7 on", first=(3, 7))
    if signs.clean_shutdown_has_json:
        yield Evidence("a clean-shutdown file with JSON", "Kafka writes JSON into this file from 3.7 on", first=(3, 7))
    elif signs.clean_shutdown_has_json is not None:
        means = "Kafka before 3.7 wrote the file; an index may have one entry for several batches, which verify accepts"
        yield Evidence("an empty clean-shutdown file", means, end=(3, 7))
    if signs.with_topic_id:
        seen = f"partition.metadata in {signs.with_topic_id} of {signs.partitions} partitions"
        yield Evidence(seen, "topics have ids: Kafka 2.8 or later", first=(2, 8))
    elif signs.partitions:
        means = (
            "topics have no ids, as with inter.broker.protocol.version below 2.8: a directory left by an earlier topic "
            "of the same name cannot be distinguished from one of this topic"
        )
        yield Evidence(f"no partition.metadata in {signs.partitions} partitions", means)
    if old := sorted(magic for magic in signs.magics if magic < 2):
        named = " and ".join(f"v{magic} ({signs.magics[magic]})" for magic in old)
        means = (
            "the messages were written with message.format.version below 0.11, or by Kafka before 0.11; 4.0 and later "
            "can "
            "still read them. A compaction keeps their format if a broker before 3.0 may need it: see --message-format"
        )
        yield Evidence(f"messages of format {named}", means)
    if signs.snapshots:
        means = "every Kafka version since 0.11 reads and writes such snapshots"
        if not signs.snapshots <= {SNAPSHOT_VERSION}:
            means = "this keytail supports version 1 only, and verify reports other versions: update keytail"
        yield Evidence(f"producer snapshots of version {', '.join(map(str, sorted(signs.snapshots)))}", means)


def _version_0(signs: Signs) -> Evidence:
    """Return the evidence of version 0 in `meta.properties`. A migration from ZooKeeper to KRaft, which is possible
    from Kafka 3.4 on, does not change that version."""
    seen = "version=0 in meta.properties"
    if signs.features:
        means = "the broker ran with ZooKeeper before a migration to KRaft, which keeps this version"
        return Evidence(seen, means, first=(3, 4))
    if signs.has_metadata_log:
        means = "the broker runs with ZooKeeper, or ran with it before a migration to KRaft: give the broker's "
        means += "properties file with --config"
        return Evidence(seen, means, first=(3, 4))
    means = "the broker runs with ZooKeeper: the log dirs do not contain the settings of topics; give --topic-configs"
    return Evidence(seen, means, end=(4, 0))


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
