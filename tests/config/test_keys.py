"""The table of Kafka's keys: its consistency, and the parsing of values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.compact.plan import settings_of_compaction
from keytail.config.compaction import CompactionConfig
from keytail.config.files import parse_server_properties
from keytail.config.keys import (
    BROKER_KEYS,
    COMMAND_LINE_BROKER_KEYS,
    KEYS,
    TOPIC_KEYS,
    Safer,
    file_names,
    parse,
    parse_broker,
    right_name,
)
from keytail.config.resolve import _SAFEST
from keytail.expire.partition import settings_of_retention

ROOT = Path(__file__).parents[2]


def test_no_name_belongs_to_two_keys() -> None:
    names = list(file_names())
    assert len(names) == len(set(names))
    assert len(KEYS) == len(TOPIC_KEYS) + len(BROKER_KEYS)


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.name)
def test_every_default_is_allowed(key) -> None:
    if key.default is None:
        return
    text = ",".join(key.default) if key.kind == "list" else str(key.default)
    assert parse(key, text) == key.default


def test_every_key_states_which_of_its_values_is_safer() -> None:
    assert {key.safer for key in KEYS.values()} == set(get_args(Safer)) == set(_SAFEST)
    removing = {*settings_of_compaction(), *settings_of_retention(None), *COMMAND_LINE_BROKER_KEYS}
    of_others = {key.name for key in KEYS.values() if key.safer != "latest"} - removing
    assert of_others == {"message.format.version", "unclean.leader.election.enable"}
    assert not [name for name in removing if KEYS[name].safer == "latest"]


def test_compaction_config_has_the_defaults_of_the_table() -> None:
    config = CompactionConfig()
    assert CompactionConfig.from_values({name: key.default for name, key in KEYS.items()}) == config
    for field in dataclasses.fields(config):
        default = KEYS[field.name.replace("_", ".")].default
        assert getattr(config, field.name) == (frozenset(default) if type(default) is tuple else default)


def test_compaction_config_reads_every_field_from_its_key() -> None:
    values = {
        "cleanup.policy": ("compact", "delete"),
        "segment.bytes": 2_000_000,
        "segment.index.bytes": 80,
        "segment.ms": 5,
        "index.interval.bytes": 6,
        "max.message.bytes": 7,
        "delete.retention.ms": 8,
        "min.compaction.lag.ms": 9,
        "max.compaction.lag.ms": 10,
        "min.cleanable.dirty.ratio": 0.25,
        "producer.id.expiration.ms": 11,
        "remote.storage.enable": True,
        "internal.segment.bytes": None,
    }
    config = CompactionConfig.from_values(values)
    assert config.cleanup_policy == {"compact", "delete"}
    for field in dataclasses.fields(config):
        if field.name != "cleanup_policy":
            assert getattr(config, field.name) == values[field.name.replace("_", ".")]


def test_internal_segment_bytes_overrides_segment_bytes() -> None:
    values = {"segment.bytes": 2_000_000, "internal.segment.bytes": 500}
    assert CompactionConfig.from_values(values).segment_bytes == 500


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("cleanup.policy", "compact , delete", ("compact", "delete")),
        ("cleanup.policy", "", ()),
        ("cleanup.policy", " compact ", ("compact",)),
        ("segment.bytes", " 1048576 ", 1_048_576),
        ("segment.bytes", "14", 14),
        ("segment.bytes", "+2097152", 2_097_152),
        ("retention.ms", "-1", -1),
        ("max.compaction.lag.ms", "9223372036854775807", 2**63 - 1),
        ("min.cleanable.dirty.ratio", ".5", 0.5),
        ("min.cleanable.dirty.ratio", "1e-3", 0.001),
        ("preallocate", "TRUE", True),
        ("compression.gzip.level", "-1", -1),
        ("internal.segment.bytes", "300", 300),
    ],
)
def test_values_that_kafka_reads_are_read(name, text, value) -> None:
    assert parse(KEYS[name], text) == value
    assert type(parse(KEYS[name], text)) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cleanup.policy", "compact,compact"),
        ("cleanup.policy", "compacted"),
        ("cleanup.policy", "compact,"),
        ("segment.bytes", "13"),
        ("segment.bytes", "2147483648"),
        ("segment.bytes", "1_048_576"),
        ("segment.bytes", "٣٠٠٠٠٠٠"),
        ("segment.bytes", "1e7"),
        ("segment.bytes", ""),
        ("retention.ms", "-2"),
        ("max.compaction.lag.ms", "9223372036854775808"),
        ("max.compaction.lag.ms", "0"),
        ("min.cleanable.dirty.ratio", "1.01"),
        ("min.cleanable.dirty.ratio", "-0.1"),
        ("min.cleanable.dirty.ratio", "nan"),
        ("preallocate", "yes"),
        ("compression.gzip.level", "0"),
        ("compression.type", "GZIP"),
        ("message.timestamp.type", "createtime"),
    ],
)
def test_values_that_kafka_refuses_are_refused(name, text) -> None:
    with pytest.raises(ValueError):
        parse(KEYS[name], text)


@given(st.sampled_from([k for k in KEYS.values() if k.kind in ("int", "long")]), st.integers(-(2**64), 2**64))
def test_integers_outside_their_range_are_refused(key, number) -> None:
    low, high = (-(2**31), 2**31 - 1) if key.kind == "int" else (-(2**63), 2**63 - 1)
    low = low if key.minimum is None else key.minimum
    high = high if key.maximum is None else key.maximum
    try:
        assert parse(key, str(number)) == number
        accepted = True
    except ValueError:
        accepted = False
    assert accepted == (low <= number <= high or number in key.also)


@pytest.mark.parametrize(
    ("key", "name", "text", "value"),
    [
        ("retention.ms", "log.retention.ms", "5", 5),
        ("retention.ms", "log.retention.minutes", "5", 300_000),
        ("retention.ms", "log.retention.hours", "5", 18_000_000),
        ("retention.ms", "log.retention.hours", "-1", -1),
        ("retention.ms", "log.retention.hours", "2147483647", 2_147_483_647 * 3_600_000),
        ("segment.ms", "log.roll.hours", "24", 86_400_000),
        ("segment.jitter.ms", "log.roll.jitter.hours", "1", 3_600_000),
    ],
)
def test_hours_and_minutes_become_milliseconds(key, name, text, value) -> None:
    assert parse_broker(KEYS[key], name, text) == value


@pytest.mark.parametrize("text", ["1.5", "2147483648", ""])
def test_hours_beyond_a_32_bit_integer_are_refused(text) -> None:
    with pytest.raises(ValueError):
        parse_broker(KEYS["retention.ms"], "log.retention.hours", text)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("delete.retention.m", "delete.retention.ms"),
        ("log.cleaner.delete.retention.ms", "delete.retention.ms"),
        ("log.retention.hours", "retention.ms"),
        ("cleanup_policy", "cleanup.policy"),
        ("Segment.Bytes", "segment.bytes"),
        ("xyzzy", None),
    ],
)
def test_the_right_name_is_suggested(wrong, right) -> None:
    assert right_name(wrong) == right


def test_allowed_describes_the_range() -> None:
    assert KEYS["segment.bytes"].allowed == "a whole number from 14 to 2147483647"
    assert KEYS["compression.gzip.level"].allowed == "a whole number from 1 to 9, or -1"
    assert KEYS["cleanup.policy"].allowed == "any of compact, delete, each once"
    assert KEYS["min.cleanable.dirty.ratio"].allowed == "a number from 0 to 1"


def test_shipped_properties_have_the_defaults_of_kafka() -> None:
    lines = (ROOT / "conf" / "keytail.properties").read_text().splitlines()
    settings = [line[1:] for line in lines if line.startswith("#") and line[1:2].islower()]
    assert len(settings) >= 10
    texts = parse_server_properties("\n".join(settings).encode(), "conf/keytail.properties")
    assert len(texts) == len(settings)
    by_name = {name: key for key in KEYS.values() for name in key.broker_names}
    for name, text in texts.items():
        default = ("/tmp/kafka-logs",) if name == "log.dirs" else by_name[name].default
        assert parse_broker(by_name[name], name, text) == default, name
    assert parse_server_properties("\n".join(lines).encode(), "as shipped") == {}
