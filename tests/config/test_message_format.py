"""The format that settings imply for messages of magic 0 and 1 (LEGACY.md 6)."""

from __future__ import annotations

from typing import Any

import pytest

from keytail.config.message_format import ClusterMode, MessageFormat, message_format, older_format
from keytail.config.resolve import effective, from_broker, from_command_line
from keytail.errors import UsageProblem

OLD, NEW = "message.format.version=0.10.2", "message.format.version=0.11.0-IV2"
FORMAT, PROTOCOL = "log.message.format.version", "inter.broker.protocol.version"


def decided(
    mode: ClusterMode, topic: str = "", broker: dict[str, str] | None = None, *, no_overrides: bool = False
) -> MessageFormat:
    options: dict[str, Any] = {"topics_have_no_overrides": no_overrides}
    if broker is not None:
        options["broker"] = from_broker(broker, "server.properties")
    resolved = effective("t", command_line=from_command_line([f"t:{topic}"] if topic else []), **options)
    return message_format(resolved, mode)


@pytest.mark.parametrize("mode", ["ZooKeeper", "unknown"])
@pytest.mark.parametrize(
    ("topic", "broker", "expected"),
    [
        (OLD, None, "keep"),
        (NEW, None, "v2"),
        ("message.format.version=2.8", {PROTOCOL: "2.8"}, "v2"),
        # the topic's setting takes precedence
        ("message.format.version=0.8.2", {FORMAT: "2.8", PROTOCOL: "2.8"}, "keep"),
        (NEW, {FORMAT: "0.10.0-IV1"}, "v2"),
        (OLD, {PROTOCOL: "3.0"}, "v2"),  # Kafka ignores the setting from 3.0 on
        (OLD, {PROTOCOL: "3.0-IV1"}, "v2"),
        (OLD, {PROTOCOL: "3.0-IV0"}, "keep"),
        (OLD, {PROTOCOL: "3.9"}, "v2"),
        (OLD, {PROTOCOL: "2.8-IV1"}, "keep"),
    ],
)
def test_the_format_of_a_topic_is_used(mode: Any, topic: str, broker: dict[str, str] | None, expected: str) -> None:
    assert decided(mode, topic, broker) == expected


@pytest.mark.parametrize("mode", ["ZooKeeper", "unknown"])
@pytest.mark.parametrize(
    ("broker", "expected"),
    [
        ({FORMAT: "0.10.2", PROTOCOL: "2.8"}, "keep"),
        ({FORMAT: "0.11.0", PROTOCOL: "2.8"}, "v2"),
        ({PROTOCOL: "2.8"}, "v2"),
        ({PROTOCOL: "0.10.2"}, "keep"),
        ({FORMAT: "0.10.2", PROTOCOL: "3.6"}, "v2"),
    ],
)
def test_a_topic_without_overrides_has_the_setting_of_the_broker(
    mode: Any, broker: dict[str, str], expected: str
) -> None:
    assert decided(mode, broker=broker, no_overrides=True) == expected


def test_a_setting_that_was_not_given_is_unknown() -> None:
    assert decided("unknown") == decided("unknown", no_overrides=True) == "unknown"
    assert decided("ZooKeeper") == decided("ZooKeeper", no_overrides=True) == "keep"
    # A topic may have an older format than its broker.
    assert decided("ZooKeeper", broker={FORMAT: "2.8", PROTOCOL: "2.8"}) == "keep"
    assert decided("unknown", broker={FORMAT: "2.8", PROTOCOL: "2.8"}) == "unknown"
    assert decided("unknown", broker={FORMAT: "0.10.2", PROTOCOL: "2.8"}) == "keep"


def test_kraft_implies_version_2() -> None:
    assert decided("KRaft") == decided("KRaft", OLD) == decided("KRaft", broker={FORMAT: "0.10.2"}) == "v2"


@pytest.mark.parametrize("text", ["", "new", "2", "2.8.", "2.8-IV", "-1.0"])
def test_texts_that_are_not_versions_are_refused(text: str) -> None:
    with pytest.raises(UsageProblem, match=r"a version such as 2\.8"):
        from_command_line([f"t:message.format.version={text}"])


@pytest.mark.parametrize(
    ("mode", "topic", "broker", "source"),
    [
        ("ZooKeeper", OLD, {}, f"command line: t:{OLD}"),
        ("unknown", OLD, {}, f"command line: t:{OLD}"),
        ("ZooKeeper", "", {FORMAT: "0.9.0"}, f"f: {FORMAT}=0.9.0"),
        ("ZooKeeper", "", {PROTOCOL: "0.10.2"}, f"f: {PROTOCOL}=0.10.2"),
        ("ZooKeeper", NEW, {FORMAT: "0.9.0"}, None),
        ("ZooKeeper", "", {}, None),
        ("unknown", "", {}, None),
        ("KRaft", OLD, {}, None),
        ("ZooKeeper", OLD, {PROTOCOL: "3.6"}, None),
    ],
)
def test_the_setting_for_older_formats_is_reported_with_its_source(
    mode: ClusterMode, topic: str, broker: dict[str, str], source: str | None
) -> None:
    command_line = from_command_line([f"t:{topic}"] if topic else [])
    resolved = effective("t", command_line=command_line, broker=from_broker(broker, "f"), topics_have_no_overrides=True)
    found = older_format(resolved, mode)
    assert (found.source if found else None) == source
