"""Determines the message format that a broker uses for a topic, so that retained messages of magic 0 and 1 remain
readable for clients of that broker.

If a broker below 3.0 assumes an older format for the topic, it sends batches of version 2 unconverted to clients that
cannot read such batches. The format is, by Kafka's LogConfig and KafkaConfig of 2.4 to 3.9:

- with KRaft, or if inter.broker.protocol.version is 3.0 or later, version 2, whatever else is set;
- if not, the topic's message.format.version or, if that is not set, the broker's log.message.format.version;
- if none of these is set, the format of the latest version that the broker supports, which is version 2 from 0.11 on.
"""

from __future__ import annotations

from typing import Literal

from keytail.config.keys import version_numbers
from keytail.config.resolve import DEFAULT_SOURCE, Resolved, Setting

MessageFormat = Literal["v2", "keep", "unknown"]  # the format of retained messages of magic 0 and 1
ClusterMode = Literal["KRaft", "ZooKeeper", "unknown"]

TOPIC_FORMAT = "message.format.version"
PROTOCOL = "inter.broker.protocol.version"
_FIRST_OF_V2 = (0, 11)
_FIRST_THAT_IGNORES = (3, 0)


def message_format(resolved: Resolved, mode: ClusterMode) -> MessageFormat:
    """Return "v2" if the topic's format is version 2, "keep" if it may be older, "unknown" if the settings do not
    determine it."""
    protocol = _version(resolved, PROTOCOL)
    if mode == "KRaft" or (protocol is not None and protocol >= _FIRST_THAT_IGNORES):
        return "v2"
    stated = _version(resolved, TOPIC_FORMAT)
    if not resolved.unknown([TOPIC_FORMAT]):
        # A broker supports the protocol version that it is set to; from 0.11 on, its default format is version 2.
        stated = protocol if stated is None else stated
        if stated is not None:
            return "v2" if stated >= _FIRST_OF_V2 else "keep"
    elif stated is not None and stated < _FIRST_OF_V2:  # the broker's setting, which the topic may override
        return "keep"
    return "keep" if mode == "ZooKeeper" else "unknown"


def older_format(resolved: Resolved, mode: ClusterMode) -> Setting | None:
    """Return the setting that makes brokers assume a format before version 2 for the topic; None if there is no such
    setting."""
    if message_format(resolved, mode) != "keep":
        return None
    for name in (TOPIC_FORMAT, PROTOCOL):
        stated = _version(resolved, name)
        if stated is not None:
            return resolved.settings[name] if stated < _FIRST_OF_V2 else None
    return None


def _version(resolved: Resolved, name: str) -> tuple[int, int] | None:
    """Return major and minor number of a version setting that was read or given; None if it has Kafka's default."""
    setting = resolved.settings[name]
    if setting.source == DEFAULT_SOURCE or not isinstance(setting.value, str):
        return None
    major, minor = version_numbers(setting.value)[:2]
    # The setting is ignored from 3.0-IV1 on.
    return (2, 8) if setting.value == "3.0-IV0" else (major, minor)
