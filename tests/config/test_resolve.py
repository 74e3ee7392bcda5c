"""The effective value of a setting, its source, and the errors for invalid values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.cli.flags import flags_of
from keytail.config.keys import BROKER_KEYS, KEYS, NOT_USED, TOPIC_KEYS, not_used
from keytail.config.resolve import (
    DEFAULT_SOURCE,
    CommandLine,
    Setting,
    effective,
    from_broker,
    from_command_line,
    from_topic,
)
from keytail.config.topic_configs import parse_topic_configs
from keytail.errors import Refused, UsageProblem
from keytail.main.main import COMMANDS
from tests.config.test_topic_configs import ALL_OF_2_8, printed_all

NAME = "delete.retention.ms"


def test_the_default_is_used_if_no_value_is_given() -> None:
    resolved = effective("orders")
    assert set(resolved.settings) == set(KEYS)
    assert resolved.settings[NAME] == Setting(86_400_000, DEFAULT_SOURCE)
    assert resolved.values()["cleanup.policy"] == ("delete",)
    assert not resolved.overrides_known


@given(st.sets(st.sampled_from(["topic line", "line", "topic", "broker"])))
def test_the_value_of_the_highest_layer_is_used(present) -> None:
    arguments = []
    if "topic line" in present:
        arguments.append("orders:delete.retention.ms=1")
    if "line" in present:
        arguments.append("delete.retention.ms=2")
    topics = {"orders": from_topic("orders", {NAME: "3"}, "metadata")} if "topic" in present else {}
    broker = {}
    if "broker" in present:
        broker = from_broker({"log.cleaner.delete.retention.ms": "4"}, "server.properties")
    resolved = effective("orders", command_line=from_command_line(arguments), topics=topics, broker=broker)
    order = [("topic line", 1), ("line", 2), ("topic", 3), ("broker", 4)]
    expected = next((value for layer, value in order if layer in present), 86_400_000)
    assert resolved.value(NAME) == expected
    assert resolved.overrides_known == ("topic" in present)
    assert resolved.unknown([NAME]) == (() if present & {"topic line", "line", "topic"} else (NAME,))


def test_sources_name_the_origin_of_a_value() -> None:
    broker = from_broker({"log.roll.hours": "24", "log.segment.bytes": "2000000"}, "/etc/server.properties")
    topics = {"orders": from_topic("orders", {"segment.bytes": "3000000"}, "metadata log")}
    line = from_command_line(["orders:cleanup.policy=compact"])
    settings = effective("orders", command_line=line, topics=topics, broker=broker).settings
    assert settings["segment.ms"] == Setting(86_400_000, "/etc/server.properties: log.roll.hours=24")
    assert settings["segment.bytes"].source == "metadata log: segment.bytes=3000000 of topic orders"
    assert settings["cleanup.policy"].source == "command line: orders:cleanup.policy=compact"


def test_settings_of_another_topic_are_ignored() -> None:
    line = from_command_line(["orders:delete.retention.ms=1"])
    topics = {"clicks": from_topic("clicks", {NAME: "3"}, "metadata")}
    resolved = effective("payments", command_line=line, topics=topics)
    assert resolved.value(NAME) == 86_400_000
    assert not resolved.overrides_known


def test_topics_have_no_overrides_makes_all_settings_known_but_the_policy() -> None:
    assert effective("orders", topics={"orders": {}}).overrides_known
    stated = effective("orders", topics_have_no_overrides=True)
    assert stated.unknown(KEYS) == ("cleanup.policy", *(key.name for key in BROKER_KEYS))
    assert not stated.overrides_known
    line = from_command_line(["orders:cleanup.policy=compact"])
    assert effective("orders", command_line=line, topics_have_no_overrides=True).overrides_known


@given(st.sets(st.sampled_from([key.name for key in TOPIC_KEYS if key.kind == "long"])), st.booleans())
def test_only_the_given_settings_are_known(names, everywhere) -> None:
    line = from_command_line([f"{name}=5" if everywhere else f"orders:{name}=5" for name in sorted(names)])
    resolved = effective("orders", command_line=line)
    assert (resolved.known, resolved.given) == (names, names)
    broker = from_broker({"log.cleanup.policy": "delete"}, "f")
    assert effective("orders", command_line=line, broker=broker).known == names


def test_a_topic_configs_file_overrides_the_metadata_log_but_not_the_command_line() -> None:
    text = b"orders:delete.retention.ms=3\nclicks:segment.bytes=2000000\n"
    configs = parse_topic_configs(text, "topics")
    topics = {"orders": from_topic("orders", {NAME: "4", "cleanup.policy": "compact"}, "metadata")}
    resolved = effective("orders", topic_configs=configs, topics=topics)
    assert resolved.settings[NAME] == Setting(3, "topics line 1: delete.retention.ms=3")
    assert resolved.value("cleanup.policy") == ("compact",), (
        "a setting that is not in the file must come from the metadata log"
    )
    line = from_command_line(["delete.retention.ms=2"])
    assert effective("orders", topic_configs=configs, topics=topics, command_line=line).value(NAME) == 2
    assert effective("clicks", topic_configs=configs).unknown([NAME, "cleanup.policy"]) == ("cleanup.policy",)
    printed = parse_topic_configs(b"Dynamic configs for topic clicks are:\n", "topics")
    assert effective("clicks", topic_configs=printed).overrides_known


def test_an_invalid_value_in_the_file_is_refused_with_its_line() -> None:
    configs = parse_topic_configs(b"\norders:segment.ms=0\n", "topics")
    with pytest.raises(Refused, match=r"invalid value '0' for segment\.ms in topics line 2: segment\.ms=0"):
        effective("orders", topic_configs=configs)
    assert effective("clicks", topic_configs=configs).topic == "clicks"


@pytest.mark.parametrize(
    ("topic", "policy", "retention_ms"),
    [
        ("__consumer_offsets", ("compact",), 604_800_000),
        ("__transaction_state", ("compact",), 604_800_000),
        ("__share_group_state", ("delete",), -1),
        ("__remote_log_metadata", ("delete",), -1),
    ],
)
def test_internal_topics_have_the_settings_with_which_kafka_creates_them(topic, policy, retention_ms) -> None:
    broker = from_broker({"log.cleanup.policy": "delete", "log.segment.bytes": "2000000"}, "f")
    resolved = effective(topic, broker=broker)
    assert (resolved.value("cleanup.policy"), resolved.value("retention.ms")) == (policy, retention_ms)
    assert "cleanup.policy" in resolved.known
    assert NAME not in resolved.known, "other settings must not be known, because they may have been changed"
    read = effective(topic, topics={topic: from_topic(topic, {"cleanup.policy": "compact,delete"}, "metadata")})
    assert read.value("cleanup.policy") == ("compact", "delete")
    assert (resolved.in_metadata, read.in_metadata) == (False, True)


def test_defaults_are_assumed_only_if_no_file_of_the_broker_was_read() -> None:
    names = ["retention.ms", "retention.bytes"]
    assert effective("orders").assumed(names) == tuple(names)
    assert effective("orders", broker={}).assumed(names) == ()
    line = from_command_line(["orders:retention.ms=5"])
    assert effective("orders", command_line=line).assumed(names) == ("retention.bytes",)


@pytest.mark.parametrize(
    ("texts", "value"),
    [
        ({"log.retention.hours": "1"}, 3_600_000),
        ({"log.retention.hours": "1", "log.retention.minutes": "2"}, 120_000),
        ({"log.retention.hours": "1", "log.retention.minutes": "2", "log.retention.ms": "3"}, 3),
        ({"log.retention.minutes": "-1"}, -1),
    ],
)
def test_the_name_with_the_highest_precedence_is_used(texts, value) -> None:
    assert from_broker(texts, "f")["retention.ms"].value == value


def test_topic_settings_in_a_brokers_file_are_ignored() -> None:
    assert from_broker({"segment.bytes": "2000000", "log.segment.delete.delay.ms": "7"}, "f") == {
        "file.delete.delay.ms": Setting(7, "f: log.segment.delete.delay.ms=7")
    }


def test_an_invalid_value_is_reported_with_key_source_and_range() -> None:
    with pytest.raises(UsageProblem) as problem:
        from_broker({"log.segment.bytes": "13"}, "/etc/server.properties")
    assert str(problem.value) == (
        "invalid value '13' for log.segment.bytes in /etc/server.properties. "
        "Use a whole number from 14 to 2147483647 (as segment.bytes) [invalid-config-value]"
    )
    with pytest.raises(UsageProblem) as problem:
        from_command_line(["orders:min.cleanable.dirty.ratio=1.5"])
    assert str(problem.value) == (
        "invalid value '1.5' for min.cleanable.dirty.ratio in --topic-config orders:min.cleanable.dirty.ratio=1.5. "
        "Use a number from 0 to 1 [invalid-config-value]"
    )
    with pytest.raises(
        Refused, match=r"invalid value '0' for segment\.ms in metadata: segment\.ms=0 of topic orders"
    ):
        from_topic("orders", {"segment.ms": "0"}, "metadata")


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ({"log.retention.ms": "5", "log.retention.hours": "x"}, {"retention.ms": 5}),
        ({"log.cleaner.threads": "many", "log.dirs": "/a"}, {"log.dirs": ("/a",)}),
        ({"log.cleaner.io.max.bytes.per.second": "${env:X}"}, {}),
        ({"log.segment.delete.delay.ms": "-1"}, {}),
    ],
)
def test_an_invalid_value_that_is_not_needed_is_a_note(texts: dict[str, str], found: dict[str, object]) -> None:
    notes: list[str] = []
    settings = from_broker(texts, "f", on_note=notes.append)
    assert {name: setting.value for name, setting in settings.items()} == found
    [note] = notes
    assert "in f is not needed here and is ignored: " in note


@pytest.mark.parametrize("wrong", ["x", "${file:/x:y}"])
def test_an_invalid_value_that_is_needed_is_an_error(wrong: str) -> None:
    texts = {"log.retention.ms": wrong, "log.retention.hours": "5"}
    with pytest.raises(UsageProblem):
        from_broker(texts, "f")
    assert from_broker(texts, "f", needed=())["retention.ms"].value == 5 * 3_600_000


def test_every_setting_without_effect_has_an_existing_flag() -> None:
    flags = {
        name
        for command in COMMANDS.values()
        for flag in flags_of(command.request).values()
        for mark in flag.annotation.__metadata__
        for name in (getattr(mark, "default", ""), *(getattr(mark, "param_decls", None) or ()))
    }
    assert set(filter(None, NOT_USED.values())) <= flags
    assert NOT_USED.keys() < KEYS.keys()
    assert not_used("log.cleaner.io.max.bytes.per.second") == "not used, see --throttle"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("delete.retention.m=5", "Did you mean delete.retention.ms?"),
        ("orders:log.cleaner.delete.retention.ms=5", "Did you mean delete.retention.ms?"),
        ("xyzzy=5", "unknown topic config xyzzy"),
        ("cleanup.policy=compact", "--topic-config TOPIC:cleanup.policy=compact"),
        ("orders:producer.id.expiration.ms=5", "Give this setting without a topic"),
        ("log.dirs=/data", "Give this setting in the file given by --config"),
        ("delete.retention.ms", "use [TOPIC:]key=value"),
        ("orders:=5", "use [TOPIC:]key=value"),
        (":delete.retention.ms=5", "use [TOPIC:]key=value"),
        ("a b:delete.retention.ms=5", "use [TOPIC:]key=value"),
        ("..:delete.retention.ms=5", "use [TOPIC:]key=value"),
        ("orders:delete.retention.ms=five", "invalid value 'five'"),
    ],
)
def test_an_invalid_argument_is_explained(argument, message) -> None:
    with pytest.raises(UsageProblem) as problem:
        from_command_line([argument])
    assert message in str(problem.value)
    assert argument in str(problem.value)


def test_a_setting_given_twice_must_agree() -> None:
    same = "orders:delete.retention.ms=5"
    assert from_command_line([same, same]).by_topic["orders"][NAME].value == 5
    with pytest.raises(UsageProblem, match="contradicts an earlier argument"):
        from_command_line([same, "orders:delete.retention.ms=6"])


def test_values_may_contain_characters_of_the_syntax() -> None:
    with pytest.raises(UsageProblem, match=r"invalid value 'a:b=c' for compression\.type"):
        from_command_line(["orders:compression.type=a:b=c"])


def test_the_command_line_accepts_producer_id_expiration_ms() -> None:
    line = from_command_line(["producer.id.expiration.ms=9"])
    assert effective("t", command_line=line).value("producer.id.expiration.ms") == 9


def test_minimum_lag_above_maximum_lag_is_refused_with_both_sources() -> None:
    line = from_command_line(["orders:min.compaction.lag.ms=10"])
    broker = from_broker({"log.cleaner.max.compaction.lag.ms": "9"}, "f")
    with pytest.raises(Refused) as problem:
        effective("orders", command_line=line, broker=broker)
    assert "min.compaction.lag.ms 10 (command line: orders:min.compaction.lag.ms=10)" in str(problem.value)
    assert "max.compaction.lag.ms 9 (f: log.cleaner.max.compaction.lag.ms=9)" in str(problem.value)
    equal = from_command_line(["min.compaction.lag.ms=9"])
    assert effective("orders", command_line=equal, broker=broker).value("min.compaction.lag.ms") == 9


def test_unknown_overrides_of_newer_versions_are_ignored() -> None:
    assert from_topic("orders", {"key.of.kafka.9": "x"}, "metadata") == {}
    assert effective("orders", command_line=CommandLine()).topic == "orders"


ALL = "All configs for topic orders are:\n  retention.ms=5 sensitive=false synonyms={}\n"
WITHHELD = "Dynamic configs for topic orders are:\n  cleanup.policy=null sensitive=true synonyms={}\n"
NONE = "Dynamic configs for topic orders are:\n"


def test_a_setting_that_is_missing_from_a_listing_is_not_known() -> None:
    """The output of the tool was truncated or filtered."""
    resolved = effective("orders", topic_configs=parse_topic_configs(ALL.encode(), "f"))
    assert resolved.unknown(["retention.ms", "cleanup.policy", "retention.bytes"]) == (
        "cleanup.policy", "retention.bytes"
    )  # fmt: skip


def test_a_complete_listing_shows_that_settings_missing_in_kafka_2_x_are_not_set() -> None:
    configs = parse_topic_configs(printed_all(ALL_OF_2_8), "f")
    assert effective("users", topic_configs=configs).unknown(["remote.storage.enable"])
    text = configs.by_topic["orders"]["cleanup.policy"]
    configs = replace(configs, by_topic={"orders": {"cleanup.policy": text._replace(text="compact")}})
    resolved = effective("orders", topic_configs=configs)
    assert resolved.unknown(["remote.storage.enable"]) == ()
    assert resolved.value("remote.storage.enable") is False


def test_a_setting_without_its_value_is_not_known() -> None:
    resolved = effective("orders", topic_configs=parse_topic_configs(WITHHELD.encode(), "f"))
    assert resolved.unknown(["cleanup.policy", "retention.ms"]) == ("cleanup.policy",)


def test_if_a_listing_and_the_metadata_log_differ_the_safer_value_is_used() -> None:
    topics = {"orders": from_topic("orders", {"retention.ms": "1000", "cleanup.policy": "compact"}, "metadata")}
    broker = {"retention.ms": Setting(-1, "broker")}
    configs = parse_topic_configs(NONE.encode(), "f")
    resolved = effective("orders", topics=topics, broker=broker, topic_configs=configs)
    assert resolved.value("retention.ms") == -1
    assert resolved.value("cleanup.policy") == ()


def test_an_internal_topic_without_overrides_in_the_metadata_log_is_not_compacted() -> None:
    """The topic was created with the policy compact, but the log has no overrides."""
    resolved = effective("__consumer_offsets", topics={"__consumer_offsets": {}})
    assert resolved.value("cleanup.policy") == ()
