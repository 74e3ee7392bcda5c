"""Which message format a broker gives a topic, so that what is left of messages of magic 0 and 1 can be read there.

A broker below 3.0 sends batches of version 2 as they are to clients that cannot read them, where it takes the topic for
one of an older format. Which format that is, by Kafka's LogConfig and KafkaConfig of 2.4 to 3.9:

- with KRaft, and where inter.broker.protocol.version is 3.0 or later, version 2, whatever else is set;
- else the topic's message.format.version, else the broker's log.message.format.version;
- else that of the newest version that the broker knows, which is version 2 from 0.11 on.
"""

from __future__ import annotations

from typing import Literal

from keytail.config.keys import version_numbers
from keytail.config.resolve import DEFAULT_SOURCE, Resolved, Setting

MessageFormat = Literal["v2", "keep", "unknown"]  # of what is left of messages of magic 0 and 1
ClusterMode = Literal["KRaft", "ZooKeeper", "unknown"]

TOPIC_FORMAT = "message.format.version"
PROTOCOL = "inter.broker.protocol.version"
_FIRST_OF_V2 = (0, 11)
_FIRST_THAT_IGNORES = (3, 0)


def message_format(resolved: Resolved, mode: ClusterMode) -> MessageFormat:
    """v2 where the topic's format is version 2, keep where it may be older, unknown where nothing is known."""
    protocol = _version(resolved, PROTOCOL)
    if mode == "KRaft" or (protocol is not None and protocol >= _FIRST_THAT_IGNORES):
        return "v2"
    stated = _version(resolved, TOPIC_FORMAT)
    if not resolved.unknown([TOPIC_FORMAT]):
        # A broker knows the protocol that it is set to, and so version 2 from 0.11 on, which is then its default.
        stated = protocol if stated is None else stated
        if stated is not None:
            return "v2" if stated >= _FIRST_OF_V2 else "keep"
    elif stated is not None and stated < _FIRST_OF_V2:  # the broker's own, which the topic may have raised
        return "keep"
    return "keep" if mode == "ZooKeeper" else "unknown"


def older_format(resolved: Resolved, mode: ClusterMode) -> Setting | None:
    """The setting by which brokers take the topic for one of a format before version 2; None where none says so."""
    if message_format(resolved, mode) != "keep":
        return None
    for name in (TOPIC_FORMAT, PROTOCOL):
        stated = _version(resolved, name)
        if stated is not None:
            return resolved.settings[name] if stated < _FIRST_OF_V2 else None
    return None


def _version(resolved: Resolved, name: str) -> tuple[int, int] | None:
    """Major and minor number of a version that was read or given."""
    setting = resolved.settings[name]
    if setting.source == DEFAULT_SOURCE or not isinstance(setting.value, str):
        return None
    major, minor = version_numbers(setting.value)[:2]
    # The setting is ignored from 3.0-IV1 on.
    return (2, 8) if setting.value == "3.0-IV0" else (major, minor)
