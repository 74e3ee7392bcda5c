"""Layers of settings from a metadata log: precedence, values that may be uncommitted, and messages about them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.config.resolve import broker_options, effective, from_broker, from_command_line, topic_options
from keytail.errors import Refused

NAME = "delete.retention.ms"
BROKER_NAME = "log.cleaner.delete.retention.ms"
LAYERS = ["topic line", "topic", "this broker", "all brokers", "file"]


@given(st.sets(st.sampled_from(LAYERS)))
def test_the_value_of_the_highest_layer_is_used(present: set[str]) -> None:
    value = {layer: str(10 - LAYERS.index(layer)) for layer in LAYERS}
    resolved = effective(
        "t",
        command_line=from_command_line([f"t:{NAME}={value['topic line']}"] if "topic line" in present else []),
        topics={"t": topic_options("t", {NAME: [value["topic"]]} if "topic" in present else {}, "log")},
        dynamic=[
            broker_options({BROKER_NAME: [value[layer]]} if layer in present else {}, layer)
            for layer in ("all brokers", "this broker")
        ],
        broker=from_broker({BROKER_NAME: value["file"]} if "file" in present else {}, "f"),
    )
    expected = next((int(value[layer]) for layer in LAYERS if layer in present), 86_400_000)
    assert resolved.value(NAME) == expected
    assert resolved.overrides_known


def test_the_source_of_a_value_names_the_log_and_the_offset() -> None:
    topics = {"t": topic_options("t", {NAME: ["5"]}, "metadata log at offset 7")}
    dynamic = [broker_options({"log.segment.bytes": ["2000000"]}, "metadata log at offset 7, all brokers")]
    settings = effective("t", topics=topics, dynamic=dynamic).settings
    assert settings[NAME].source == "metadata log at offset 7: delete.retention.ms=5 of topic t"
    assert settings["segment.bytes"].source == "metadata log at offset 7, all brokers: log.segment.bytes=2000000"


@pytest.mark.parametrize(
    ("topic", "all_brokers", "expected"),
    [
        (["3", "2"], [], 3),
        (["2", "3"], [], 3),
        ([None, "2"], [], 86_400_000),
        (["2", None], [], 86_400_000),
        ([None, "2"], ["1"], 2),
        (["2", None], ["9"], 9),
        (["2", None], [None, "9"], 86_400_000),
        (["2", None], ["9", "4"], 9),
        (["2"], ["9", "4"], 2),
        ([None], ["9", "4"], 9),
        (["2", None, "2"] * 400, [None, "9"] * 400, 86_400_000),
    ],
)
def test_the_safest_of_the_possible_values_is_used(topic: list, all_brokers: list, expected: int) -> None:
    resolved = effective(
        "t",
        topics={"t": topic_options("t", {NAME: topic} if topic else {}, "log")},
        dynamic=[broker_options({BROKER_NAME: all_brokers} if all_brokers else {}, "log, all brokers")],
    )
    assert resolved.value(NAME) == expected


def test_a_safer_value_is_reported_with_its_alternatives() -> None:
    topics = {"t": topic_options("t", {NAME: ["3", "2"]}, "log")}
    resolved = effective("t", topics=topics)
    assert resolved.settings[NAME].source == "log: delete.retention.ms=3 of topic t"
    assert resolved.doubts() == [
        "delete.retention.ms may have one of several values (log: delete.retention.ms=3 of topic t or "
        "log: delete.retention.ms=2 of topic t): the safer value is used"
    ]
    again = effective("t", topics={"t": topic_options("t", {NAME: ["2", "3"]}, "log")})
    assert again.settings[NAME].source == "log: delete.retention.ms=3 of topic t"
    assert again.doubts() == []


def test_a_topic_whose_policy_may_be_uncompacted_is_not_compacted() -> None:
    topics = {"t": topic_options("t", {"cleanup.policy": [None, "compact"]}, "log")}
    resolved = effective("t", topics=topics)
    assert resolved.value("cleanup.policy") == ()
    assert "common to all" in resolved.settings["cleanup.policy"].source
    both = {"t": topic_options("t", {"cleanup.policy": ["compact,delete", "compact"]}, "log")}
    assert effective("t", topics=both).value("cleanup.policy") == ("compact",)


def test_the_command_line_overrides_possible_values() -> None:
    topics = {"t": topic_options("t", {NAME: ["3", "2"]}, "log")}
    line = from_command_line([f"t:{NAME}=1"])
    assert effective("t", topics=topics, command_line=line).value(NAME) == 1


def test_the_newest_value_of_a_setting_that_affects_no_removal_is_used() -> None:
    topics = {"t": topic_options("t", {"internal.segment.bytes": [None, "9", "8"]}, "log")}
    assert effective("t", topics=topics).value("internal.segment.bytes") == 8


def test_only_settings_that_a_broker_can_change_dynamically_are_used() -> None:
    values = {
        "log.retention.hours": ["1"],  # Kafka reads only log.retention.ms
        "log.dirs": ["/tmp"],
        "log.cleaner.threads": ["7"],
        "producer.id.expiration.ms": ["4"],
        "log.roll.ms": ["5"],
    }
    found = broker_options({name: tuple(texts) for name, texts in values.items()}, "log")
    assert {name: [option.value for option in options] for name, options in found.items()} == {
        "segment.ms": [5],
        "producer.id.expiration.ms": [4],
    }


def test_values_that_no_broker_accepts_are_refused_with_their_source() -> None:
    with pytest.raises(Refused, match=r"invalid value 'x' for delete\.retention\.ms in log: .*of topic t"):
        topic_options("t", {NAME: ["x", "5"]}, "log")
    with pytest.raises(Refused, match=r"invalid value '-1' for log\.cleaner\.delete\.retention\.ms in log"):
        broker_options({BROKER_NAME: ["-1"]}, "log")
