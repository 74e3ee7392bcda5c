"""The settings of many topics from a file: both formats, ignored lines, and errors with their line."""

from __future__ import annotations

import pytest

from keytail.config.topic_configs import GivenText, parse_topic_configs
from keytail.errors import UsageProblem


def texts(data: str) -> dict[str, dict[str, str]]:
    configs = parse_topic_configs(data.encode(), "f")
    return {topic: {key: given.text for key, given in keys.items()} for topic, keys in configs.by_topic.items()}


def test_lines_of_settings_are_parsed() -> None:
    data = "\ufeff# ours\n\norders:cleanup.policy=compact,delete\n  orders:segment.ms = 5 \r\nusers:preallocate=true\n"
    with pytest.raises(UsageProblem, match="line 4: neither"):
        texts(data)
    data = data.replace(" = ", "=")
    assert texts(data) == {
        "orders": {"cleanup.policy": "compact,delete", "segment.ms": "5"}, "users": {"preallocate": "true"}
    }  # fmt: skip
    configs = parse_topic_configs(data.encode(), "f")
    assert configs.overrides == frozenset()
    assert configs.by_topic["orders"]["segment.ms"] == GivenText("5", 4)


# Output of kafka-configs.sh of these versions; synonyms are shortened to two.
PRINTED = {
    "2.5 to 4.x": """\
Dynamic configs for topic orders are:
  cleanup.policy=compact,delete sensitive=false synonyms={DYNAMIC_TOPIC_CONFIG:cleanup.policy=compact,delete, \
DEFAULT_CONFIG:log.cleanup.policy=delete}
  min.insync.replicas=2 sensitive=false synonyms={DYNAMIC_TOPIC_CONFIG:min.insync.replicas=2}
  retention.ms=60000 sensitive=false synonyms={DYNAMIC_TOPIC_CONFIG:retention.ms=60000}
Dynamic configs for topic no-overrides are:
""",
    "without the word Dynamic": """\
Configs for topic orders are:
  cleanup.policy=compact,delete sensitive=false synonyms={}
  retention.ms=60000 sensitive=false synonyms={}
Configs for topic no-overrides are:
""",
    "by ZooKeeper": """\
Warning: --zookeeper is deprecated and will be removed in a future version of Kafka.
Use --bootstrap-server instead to specify a broker to connect to.
Configs for topic 'orders' are cleanup.policy=compact,delete,message.format.version=2.8,retention.ms=60000
Configs for topic 'no-overrides' are \n""",
}


@pytest.mark.parametrize("version", PRINTED)
def test_the_output_of_kafka_is_parsed(version: str) -> None:
    orders = {"cleanup.policy": "compact,delete", "retention.ms": "60000"}
    if version == "by ZooKeeper":
        orders["message.format.version"] = "2.8"
    expected = {"orders": orders, "no-overrides": {}}
    assert texts(PRINTED[version]) == expected
    assert parse_topic_configs(PRINTED[version].encode(), "f").overrides == expected.keys()


def test_all_values_that_the_broker_reports_are_used() -> None:
    data = """\
All configs for topic orders are:
  compression.type=producer sensitive=false synonyms={DEFAULT_CONFIG:compression.type=producer}
  follower.replication.throttled.replicas= sensitive=false synonyms={}
  retention.ms=3600000 sensitive=false synonyms={STATIC_BROKER_CONFIG:log.retention.hours=1}
  min.insync.replicas=1 sensitive=false synonyms={}
  preallocate=null sensitive=true synonyms={}
"""
    assert texts(data) == {"orders": {"compression.type": "producer", "retention.ms": "3600000"}}
    configs = parse_topic_configs(data.encode(), "f")
    assert (configs.overrides, configs.all_values) == (frozenset(), {"orders"})
    assert configs.withheld == {"orders": {"preallocate"}}


# Names in the order in which kafka-configs.sh --all of Kafka 2.8.2 prints them.
ALL_OF_2_8 = """\
compression.type leader.replication.throttled.replicas message.downconversion.enable min.insync.replicas
segment.jitter.ms cleanup.policy flush.ms follower.replication.throttled.replicas segment.bytes retention.ms
flush.messages message.format.version max.compaction.lag.ms file.delete.delay.ms max.message.bytes
min.compaction.lag.ms message.timestamp.type preallocate min.cleanable.dirty.ratio index.interval.bytes
unclean.leader.election.enable retention.bytes delete.retention.ms segment.ms message.timestamp.difference.max.ms
segment.index.bytes""".split()


def printed_all(names: list[str]) -> bytes:
    """Return the output of `--all` for topic `orders`, with the value 1 for each setting."""
    lines = "".join(f"  {name}=1 sensitive=false synonyms={{}}\n" for name in names)
    return f"All configs for topic orders are:\n{lines}".encode()


def test_a_complete_listing_of_kafka_2_x_shows_that_no_topic_is_tiered() -> None:
    assert parse_topic_configs(printed_all(ALL_OF_2_8), "f").not_tiered == {"orders"}
    for number in range(len(ALL_OF_2_8)):
        cut_off = ALL_OF_2_8[:number] + ALL_OF_2_8[number + 1 :]
        assert not parse_topic_configs(printed_all(cut_off), "f").not_tiered
    newer = [*ALL_OF_2_8, "message.timestamp.before.max.ms"]
    assert not parse_topic_configs(printed_all(newer), "f").not_tiered, "unknown versions must not count as complete"
    assert not parse_topic_configs(printed_all([*ALL_OF_2_8, "remote.storage.enable"]), "f").not_tiered


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("orders:cleanup.polcy=compact\n", "line 1: unknown topic config cleanup.polcy"),
        ("orders:retention.ms=1\norders:log.retention.ms=1\n", "line 2: unknown topic config log.retention.ms"),
        ("orders:log.dirs=/x\n", "line 1: unknown topic config log.dirs"),
        ("Configs for topic 'orders' are cleanup.policy\n", "line 1: 'cleanup.policy' is not key=value"),
        ("All configs for topic o are:\n  x.y=1 sensitive=false synonyms={}\n", "line 2: unknown topic config x.y"),
        ("  retention.ms=1 sensitive=false synonyms={}\n", "line 1: neither"),
        ("cleanup.policy=compact\n", "line 1: neither"),
        ("#\norders:retention.ms=1\norders:retention.ms=2\n", "line 3: retention.ms=2 contradicts line 2"),
        ("Default configs for topics in the cluster are:\n", "line 1: neither"),
        ("# nothing\n", "contains no topic"),
    ],
)
def test_errors_are_reported_with_their_line(data: str, message: str) -> None:
    with pytest.raises(UsageProblem) as problem:
        parse_topic_configs(data.encode(), "f")
    assert message in str(problem.value)


def test_bytes_that_are_not_text_are_refused() -> None:
    with pytest.raises(UsageProblem, match="is not UTF-8 text"):
        parse_topic_configs(b"\xff\xfe", "f")
