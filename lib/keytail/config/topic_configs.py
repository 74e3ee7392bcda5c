"""Parses the settings of many topics from one text: lines `TOPIC:key=value`, or the output of `kafka-configs.sh`.

The output of `kafka-configs.sh --describe --entity-type topics` is supported with `--all` and without, from brokers and
from ZooKeeper. With `--all` a broker also prints values of its own configuration. These values apply to the topic, too;
a setting that is missing in such an output is unknown. The caller reads the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from keytail.config.keys import TOPIC_KEYS, right_name
from keytail.errors import UsageProblem

_READ = {key.name: key for key in TOPIC_KEYS}
# Topic settings, of any version of Kafka, that do not affect the files of a log dir.
_PASSED_OVER = frozenset(
    {
        "errors.deadletterqueue.group.enable",
        "follower.replication.throttled.replicas",
        "leader.replication.throttled.replicas",
        "message.downconversion.enable",
        "message.timestamp.after.max.ms",
        "message.timestamp.before.max.ms",
        "message.timestamp.difference.max.ms",
        "min.insync.replicas",
        "remote.copy.lag.bytes",
        "remote.copy.lag.ms",
        "remote.log.copy.disable",
        "remote.log.delete.on.disable",
    }
)
# Kafka up to 2.8 does not have these three settings; with `--all`, its tool prints the settings below for a topic.
TIERED_STORAGE = frozenset({"remote.storage.enable", "local.retention.ms", "local.retention.bytes"})
_ALL_OF_2_X = frozenset(
    {
        "cleanup.policy", "compression.type", "delete.retention.ms", "file.delete.delay.ms", "flush.messages",
        "flush.ms", "follower.replication.throttled.replicas", "index.interval.bytes",
        "leader.replication.throttled.replicas",
        "max.compaction.lag.ms", "max.message.bytes", "message.downconversion.enable", "message.format.version",
        "message.timestamp.difference.max.ms", "message.timestamp.type", "min.cleanable.dirty.ratio",
        "min.compaction.lag.ms", "min.insync.replicas", "preallocate", "retention.bytes", "retention.ms",
        "segment.bytes", "segment.index.bytes", "segment.jitter.ms", "segment.ms", "unclean.leader.election.enable",
    }
)  # fmt: skip
_NAME = r"[a-zA-Z0-9._-]+"
# "Dynamic configs for topic T are:", "All configs for topic T are:", "Configs for topic 'T' are k=v,k=v" (ZooKeeper)
_HEADER = re.compile(rf"(Dynamic c|All c|C)onfigs for topic '?({_NAME})'? are(?::|\s(.*)|$)")
_OF_ALL = "All c"
# The lines that the tool prints first when it reads from ZooKeeper.
_DEPRECATED = re.compile(r"Warning: --zookeeper is deprecated.*|Use --bootstrap-server instead.*")
_PRINTED = re.compile(r"\s+([^\s=:]+)=(.*) sensitive=(?:true|false) synonyms=\{.*\}")
_LINE = re.compile(rf"\s*({_NAME}):([^\s=:]+)=(.*)")
_NEXT_PAIR = re.compile(r",(?=[a-z][a-z0-9.]*=)")  # not every comma separates pairs: cleanup.policy=compact,delete
_NO_VALUE = "null"  # Kafka prints this for a secret value


class GivenText(NamedTuple):
    """The text of one setting, and its line number, from 1 on."""

    text: str
    line: int


@dataclass(frozen=True)
class TopicConfigs:
    """The settings of each topic in a file.

    `overrides`: topics for which Kafka's tool printed all overrides, possibly none. `all_values`: topics for which the
    tool printed all values, so that a missing setting is unknown. `withheld`: by topic, settings printed without a
    value. `not_tiered`: topics for which the tool printed exactly the settings of Kafka 2.x, none of which is about
    tiered storage.
    """

    path: str = ""
    by_topic: Mapping[str, Mapping[str, GivenText]] = field(default_factory=dict)
    overrides: frozenset[str] = frozenset()
    all_values: frozenset[str] = frozenset()
    withheld: Mapping[str, frozenset[str]] = field(default_factory=dict)
    not_tiered: frozenset[str] = frozenset()


def parse_topic_configs(data: bytes, path: str) -> TopicConfigs:
    """Parse the file. Raises UsageProblem, with the line number, for a line in neither form, a setting that is not one
    of Kafka's topic configs or contradicts an earlier line; also if the file is not UTF-8 or has no topic."""
    by_topic: dict[str, dict[str, GivenText]] = {}
    overrides, all_values = set[str](), set[str]()
    withheld: dict[str, set[str]] = {}
    printed: dict[str, set[str]] = {}
    topic = None
    for number, line in enumerate(_text(data, path).splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#") or _DEPRECATED.match(line):
            continue
        if (header := _HEADER.fullmatch(line.rstrip())) is not None:
            topic = header[2]
            (all_values if header[1] == _OF_ALL else overrides).add(topic)
            by_topic.setdefault(topic, {})
            pairs = [(topic, *pair) for pair in _pairs(header[3] or "", path, number)]
        elif topic is not None and (entry := _PRINTED.fullmatch(line.rstrip())) is not None:
            pairs = [(topic, entry[1], entry[2])]
        elif (entry := _LINE.fullmatch(line.rstrip())) is not None:
            pairs = [(entry[1], entry[2], entry[3].strip())]
        else:
            raise _invalid_line("neither TOPIC:key=value nor a line of kafka-configs.sh", path, number)
        for of_topic, key, text in pairs:
            if text == _NO_VALUE:
                withheld.setdefault(of_topic, set()).add(key)
            printed.setdefault(of_topic, set()).add(key)
            _add_setting(by_topic.setdefault(of_topic, {}), key, GivenText(text, number), path)
    if not by_topic:
        what = "the file of --topic-configs contains no topic"
        raise UsageProblem(what, path=path, remedy=_REMEDY, slug="topic-configs-without-topic")
    secret = {name: frozenset(keys) for name, keys in withheld.items()}
    not_tiered = frozenset(name for name in all_values if printed.get(name) == _ALL_OF_2_X)
    return TopicConfigs(path, by_topic, frozenset(overrides), frozenset(all_values), secret, not_tiered)


_REMEDY = (
    "Give a file with lines TOPIC:key=value, or with the output of `kafka-configs.sh --bootstrap-server HOST:PORT "
    "--describe --entity-type topics --all`"
)


def _invalid_line(what: str, path: str, line: int) -> UsageProblem:
    what = f"--topic-configs, line {line}: {what}"
    return UsageProblem(what, path=path, remedy=_REMEDY, slug="invalid-topic-configs-line")


def _text(data: bytes, path: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        what = "the file of --topic-configs is not UTF-8 text"
        raise UsageProblem(what, path=path, remedy=_REMEDY, slug="topic-configs-not-text") from None


def _pairs(text: str, path: str, line: int) -> Iterator[tuple[str, str]]:
    """Yield the pairs of `k=v,k=v`, which follows the topic in ZooKeeper's form."""
    for pair in _NEXT_PAIR.split(text.strip()) if text.strip() else ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise _invalid_line(f"{pair!r} is not key=value", path, line)
        yield key.strip(), value.strip()


def _add_setting(settings: dict[str, GivenText], key: str, given: GivenText, path: str) -> None:
    if key not in _READ and key not in _PASSED_OVER:
        meant = right_name(key)
        remedy = f"Did you mean {meant}?" if meant else "If this setting does not affect log files, remove the line"
        what = f"--topic-configs, line {given.line}: unknown topic config {key}"
        raise UsageProblem(what, path=path, remedy=remedy, slug="unknown-topic-config")
    if key not in _READ or given.text == _NO_VALUE:
        return
    before = settings.setdefault(key, given)
    if before.text != given.text:
        raise UsageProblem(
            f"--topic-configs, line {given.line}: {key}={given.text} contradicts line {before.line}, which has "
            f"{before.text}",
            path=path,
            remedy="Give each setting of a topic once",
            slug="contradictory-topic-configs",
        )
