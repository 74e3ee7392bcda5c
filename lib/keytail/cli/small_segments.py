"""Finds topics whose `segment.bytes` is too small for Kafka 4.1 and later, which do not start with such a setting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from keytail.cli.configuration import Configuration
from keytail.config.keys import SEGMENT_BYTES_OF_4_1
from keytail.console import listed
from keytail.errors import KeytailError

_SETTING = "segment.bytes"
REMEDY = f"Before an upgrade to Kafka 4.1 or later, set segment.bytes to {SEGMENT_BYTES_OF_4_1} or more"


def small_segments(configuration: Configuration) -> str:
    """Return a message with the topics whose value is too small, and with the broker's default if it is too small; ""
    if no value is too small."""
    found = list(_found(configuration))
    if not found:
        return ""
    return (
        f"segment.bytes is below {SEGMENT_BYTES_OF_4_1} for {listed(found)}; Kafka 4.1 and later do not start with "
        "such a value"
    )


def _found(configuration: Configuration) -> Iterator[str]:
    for topic in ("", *sorted(_candidates(configuration))):
        with contextlib.suppress(KeytailError):  # another setting has a wrong value, which the topic's rows report
            setting = configuration.of(topic).settings[_SETTING]
            if isinstance(setting.value, int) and setting.value < SEGMENT_BYTES_OF_4_1:
                default = f"topics without a value of their own ({setting.source})"
                yield f"{topic} ({setting.value})" if topic else default


def _candidates(configuration: Configuration) -> set[str]:
    """Return topics with a small value in the metadata log or a file, or with any value on the command line. Usually
    there are no such topics, so that few topics are resolved."""
    cluster = configuration.cluster.metadata if configuration.cluster is not None else None
    topics: set[str] = set()
    if cluster is not None:
        topics |= {topic for topic, own in cluster.topic_configs.items() if _is_small(own.get(_SETTING, ()))}
    given = configuration.topic_configs.by_topic
    topics |= {topic for topic, own in given.items() if _SETTING in own and _is_small([own[_SETTING].text])}
    return topics | {topic for topic, own in configuration.command_line.by_topic.items() if _SETTING in own}


def _is_small(texts: Iterable[str | None]) -> bool:
    return any(text is not None and text.strip().isdecimal() and int(text) < SEGMENT_BYTES_OF_4_1 for text in texts)
