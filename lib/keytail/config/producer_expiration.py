"""Determines after which idle time a broker forgets a producer, if that is certain. Pure functions.

Brokers before Kafka 3.4 have no `producer.id.expiration.ms` (KIP-854, seen in the classes of 3.3.2 and 3.4.0): there,
producers expire by `transactional.id.expiration.ms`, whose default is seven days instead of one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from keytail.config.broker_version import BrokerVersion
from keytail.config.kafka_version import WITH_PRODUCER_EXPIRATION
from keytail.config.message_format import ClusterMode
from keytail.config.resolve import Resolved

PRODUCER, TRANSACTION = "producer.id.expiration.ms", "transactional.id.expiration.ms"
NEVER_MS = 2**63 - 1


class Uncertain(NamedTuple):
    """A setting of brokers whose value is uncertain, the reason, and the start of a remedy that a flag completes."""

    name: str
    why: str
    remedy: str


class Expiration(NamedTuple):
    """The idle time after which brokers forget producers; NEVER_MS if it is uncertain, for the reason `uncertain`."""

    ms: int
    uncertain: Uncertain | None = None


def uncertain(
    resolved: Resolved, names: Sequence[str], dynamic: Collection[str], unread: ClusterMode | None
) -> Uncertain | None:
    """Return one of these settings whose value is uncertain; None if all values are certain.

    `unread` is the kind of cluster whose dynamic settings were not read; None if they were read. These override the
    broker's file for the settings that `dynamic` contains.
    """
    if assumed := resolved.assumed(names):
        return Uncertain(
            assumed[0], "is the broker's, whose file was not given", "Give the broker's file with --config, or"
        )
    for name in names:
        if unread is not None and name in dynamic and name not in resolved.given:
            if unread == "ZooKeeper":
                return Uncertain(name, "may be set for all brokers in ZooKeeper, which is not read", "Give")
            why = "may be set for all brokers in the metadata log, which was not read"
            return Uncertain(name, why, "Add the log dir with the metadata log to --log-dirs, or")
    return None


def producer_expiration(
    resolved: Resolved, version: BrokerVersion | None, mode: ClusterMode, metadata_version: int | None
) -> Expiration:
    """Return when brokers forget producers; `resolved` are the settings of any topic.

    `version` is that of `--broker-version`. `metadata_version` is the level in the metadata log (0: none); None if no
    metadata log was read, so that dynamic settings are unknown.
    """
    names = _settings(resolved, version, mode, metadata_version)
    unread = mode if metadata_version is None else None
    if found := uncertain(resolved, names, (PRODUCER,), unread):
        return Expiration(NEVER_MS, found)
    return Expiration(max(int(str(resolved.value(name))) for name in names))


def _settings(
    resolved: Resolved, version: BrokerVersion | None, mode: ClusterMode, metadata_version: int | None
) -> tuple[str, ...]:
    """Return the settings by which producers expire: both, of which the longer counts, if the version is uncertain."""
    is_given = PRODUCER in resolved.given
    if version is not None:
        is_old = version.expires_producers_with_transactional_ids
        return (TRANSACTION,) if is_old and not is_given else (PRODUCER,)
    # Of the versions with KRaft, only 3.3 and earlier lack the setting: a flag then states when producers expire.
    if mode == "KRaft" and (is_given or (metadata_version or 0) >= WITH_PRODUCER_EXPIRATION):
        return (PRODUCER,)
    return PRODUCER, TRANSACTION
