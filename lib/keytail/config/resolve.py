"""Determines the effective value of each setting for a topic, and its source.

Pure functions take layers of settings and return values with their sources. The command line takes precedence over the
file of `--topic-configs`; then follow the topic's own overrides in the metadata log, the settings with which a broker
creates an internal topic, the broker's dynamic settings (its own before those of all brokers), the broker's file, and
Kafka's default. `TOPIC:key=value` takes precedence over `key=value`.

A value alone does not justify removing records: `Resolved.unknown` returns the settings that were neither read nor
given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from keytail.config.internal import INTERNAL_TOPICS
from keytail.config.keys import (
    COMMAND_LINE_BROKER_KEYS,
    KEYS,
    TOPIC_KEYS,
    Key,
    Value,
    parse_broker,
    right_name,
    version_numbers,
)
from keytail.config.topic_configs import TIERED_STORAGE, TopicConfigs
from keytail.errors import Refused, UsageProblem

DEFAULT_SOURCE = "Kafka's default"
CLEANUP_POLICY = "cleanup.policy"
# The larger the value of these settings, the longer data is retained, or the later it is compacted.
LARGER_IS_SAFER = frozenset(
    {
        "delete.retention.ms",
        "min.compaction.lag.ms",
        "max.compaction.lag.ms",
        "min.cleanable.dirty.ratio",
        "producer.id.expiration.ms",
        "transactional.id.expiration.ms",
    }
)
# The same, but a negative number means "without limit".
RETENTION = frozenset({"retention.ms", "retention.bytes"})
_OF_TOPICS = frozenset(key.name for key in TOPIC_KEYS)
_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


@dataclass(frozen=True)
class Setting:
    """A value and its source, such as `server.properties: log.roll.hours=24`.

    `doubt` explains why a value applies although it is not the latest value.
    """

    value: Value
    source: str
    doubt: str = ""


# Possible settings, the latest last. None: the layer may have no setting; then a lower layer decides.
Options: TypeAlias = tuple[Setting | None, ...]
Layer: TypeAlias = Mapping[str, Setting | Options]


@dataclass(frozen=True)
class CommandLine:
    """The settings of all `--topic-config` arguments: those for every topic, and those by topic."""

    everywhere: Mapping[str, Setting] = field(default_factory=dict)
    by_topic: Mapping[str, Mapping[str, Setting]] = field(default_factory=dict)


@dataclass(frozen=True)
class Resolved:
    """The effective value of every setting in `keys.py` for one topic.

    `known`: the settings for which it is known whether, and how, the topic overrides them. `given`: the settings from
    the command line or the file of `--topic-configs`. `in_metadata`: the metadata log contains the topic and is used.
    `broker_known`: a broker's file was read, so that a setting that is missing there certainly has Kafka's default.
    """

    topic: str
    settings: Mapping[str, Setting]
    known: frozenset[str]
    given: frozenset[str] = frozenset()
    in_metadata: bool = False
    broker_known: bool = False

    @property
    def overrides_known(self) -> bool:
        """Whether all of the topic's own settings are known, so that a missing setting is certainly not set."""
        return self.known >= _OF_TOPICS

    def unknown(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of `names` that were neither read nor given for this topic. Their values do not justify removing
        anything.
        """
        return tuple(name for name in names if name not in self.known)

    def assumed(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of `names` for which Kafka's default is assumed: the broker's file, which was not read, may set
        them."""
        if self.broker_known:
            return ()
        return tuple(name for name in names if self.settings[name].source == DEFAULT_SOURCE)

    def value(self, name: str) -> Value:
        return self.settings[name].value

    def doubts(self) -> list[str]:
        """Return the reasons why values apply that are not the latest values."""
        return [setting.doubt for setting in self.settings.values() if setting.doubt]

    def values(self) -> dict[str, Value]:
        """Return all values by name."""
        return {name: setting.value for name, setting in self.settings.items()}


def from_command_line(arguments: Iterable[str]) -> CommandLine:
    """Parse the settings of `[TOPIC:]key=value` arguments. Raises UsageProblem for an invalid argument."""
    everywhere: dict[str, Setting] = {}
    by_topic: dict[str, dict[str, Setting]] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        topic, colon, bare_name = name.rpartition(":")
        if not equals or not bare_name or (colon and (not _TOPIC_NAME.fullmatch(topic) or topic in (".", ".."))):
            raise UsageProblem(
                f"invalid --topic-config {argument}: use [TOPIC:]key=value",
                remedy="Give for example --topic-config orders:cleanup.policy=compact",
                slug="invalid-topic-config-syntax",
            )
        key = _command_line_key(bare_name, topic, argument)
        setting = _setting(key, key.name, text, f"--topic-config {argument}", f"command line: {argument}")
        layer = by_topic.setdefault(topic, {}) if colon else everywhere
        if key.name in layer and layer[key.name] != setting:
            raise UsageProblem(
                f"--topic-config {argument} contradicts an earlier argument ({layer[key.name].source})",
                remedy="Give each setting once",
                slug="contradictory-topic-configs",
            )
        layer[key.name] = setting
    return CommandLine(everywhere, by_topic)


def _command_line_key(name: str, topic: str, argument: str) -> Key:
    key = KEYS.get(name)
    if key is None:
        meant = right_name(name)
        raise UsageProblem(
            f"--topic-config {argument}: unknown topic config {name}",
            remedy=f"Did you mean {meant}?" if meant else "Give the name of a topic config as Kafka spells it",
            slug="unknown-topic-config",
        )
    if key.scope == "broker" and (topic or name not in COMMAND_LINE_BROKER_KEYS):
        inside = "without a topic" if name in COMMAND_LINE_BROKER_KEYS else "in the file given by --config"
        raise UsageProblem(
            f"--topic-config {argument}: {name} is a broker config, not a topic config",
            remedy=f"Give it {inside}",
            slug="broker-config-for-topic",
        )
    if name == "cleanup.policy" and not topic:
        raise UsageProblem(
            f"--topic-config {argument}: cleanup.policy requires a topic, because a wrong policy removes records of "
            "topics that are not meant to be compacted",
            remedy=f"Give --topic-config TOPIC:{argument}",
            slug="cleanup-policy-without-topic",
        )
    return key


def from_topic(topic: str, texts: Mapping[str, str], origin: str) -> dict[str, Setting]:
    """Parse a topic's own overrides, found in `origin`; keys that are not in `keys.py` are ignored."""
    settings = {}
    for key in TOPIC_KEYS:
        if key.name in texts:
            source = f"{origin}: {key.name}={texts[key.name]} of topic {topic}"
            settings[key.name] = _setting(key, key.name, texts[key.name], source, source, is_usage=False)
    return settings


def from_topic_configs(topic: str, configs: TopicConfigs) -> dict[str, Setting]:
    """Return the settings of `topic` in the file of `--topic-configs`. Raises Refused for a value that Kafka does not
    allow."""
    settings = {}
    for name, (text, line) in configs.by_topic.get(topic, {}).items():
        source = f"{configs.path} line {line}: {name}={text}"
        settings[name] = _setting(KEYS[name], name, text, source, source, is_usage=False)
    return settings


def topic_options(topic: str, values: Mapping[str, Sequence[str | None]], origin: str) -> dict[str, Options]:
    """Do the same as `from_topic` for overrides that may each have one of several values."""
    options: dict[str, Options] = {}
    for key in TOPIC_KEYS:
        if key.name in values:
            options[key.name] = tuple(
                None if text is None else from_topic(topic, {key.name: text}, origin)[key.name]
                for text in values[key.name]
            )
    return options


def broker_options(values: Mapping[str, Sequence[str | None]], origin: str) -> dict[str, Options]:
    """Return a broker's dynamic settings, by the names of the topic settings whose defaults they are.

    Of several names with the same meaning, Kafka allows only the name with the highest precedence to be set
    dynamically.
    """
    options: dict[str, Options] = {}
    for key in KEYS.values():
        name = key.broker_names[0] if key.broker_names else ""
        if name in values and (key.scope == "topic" or key.name in COMMAND_LINE_BROKER_KEYS):
            options[key.name] = tuple(
                None if text is None else _setting(key, name, text, origin, f"{origin}: {name}={text}", is_usage=False)
                for text in values[name]
            )
    return options


def from_broker(texts: Mapping[str, str], path: str) -> dict[str, Setting]:
    """Return the settings in a broker's file, by the names of the topic settings whose defaults they are.

    As in a broker, every name is checked, including names that a name of higher precedence overrides.
    """
    settings: dict[str, Setting] = {}
    for key in KEYS.values():
        for name in key.broker_names:
            if (text := texts.get(name)) is not None:
                setting = _setting(key, name, text, path, f"{path}: {name}={text}")
                settings.setdefault(key.name, setting)
    return settings


def _setting(
    key: Key, name: str, text: str, where: str, source: str, *, is_usage: bool = True
) -> Setting:
    """Parse the text of `name`, which was found in `where`. Raises UsageProblem for a value that `key` does not allow,
    or Refused without `is_usage`: the value was not given for this run.
    """
    try:
        return Setting(parse_broker(key, name, text), source)
    except ValueError as error:
        in_unit = f" (as {key.name})" if name != key.name else ""
        what = f"invalid value {text!r} for {name} in {where}"
        remedy = f"Use {key.allowed}{in_unit}"
        if is_usage:
            raise UsageProblem(what, remedy=remedy, slug="invalid-config-value") from error
        raise Refused(what, remedy=remedy, slug="invalid-config-value") from error


_DEFAULTS = {name: (Setting(key.default, DEFAULT_SOURCE),) for name, key in KEYS.items()}


def effective(
    topic: str,
    *,
    command_line: CommandLine | None = None,
    topic_configs: TopicConfigs | None = None,
    topics: Mapping[str, Layer] | None = None,
    dynamic: Sequence[Layer] = (),
    broker: Layer | None = None,
    topics_have_no_overrides: bool = False,
) -> Resolved:
    """Return the effective value of every setting for `topic`, with its source.

    `topics` has an entry, possibly empty, for each topic whose overrides were read from the metadata log. `dynamic`:
    dynamic settings of brokers, lowest precedence first. `broker`: None if no broker's file was read. If several
    values are possible, the safest is used. Raises Refused for an invalid value of the topic, and if the minimum
    compaction lag exceeds the maximum, which no broker accepts.
    """
    command_line = command_line or CommandLine()
    topic_configs = topic_configs or TopicConfigs()
    topics = topics or {}
    created: Layer = from_topic(topic, INTERNAL_TOPICS.get(topic, {}), "as a broker creates it")
    read = topics.get(topic, {})
    if topic in topics:
        created = _or_below(created)
    if topic in topic_configs.overrides | topic_configs.all_values:  # the metadata log may be newer, or incomplete
        read = _or_below(read)
    in_file = from_topic_configs(topic, topic_configs)
    own = command_line.by_topic.get(topic, {})
    possible: dict[str, tuple[Setting, ...]] = dict(_DEFAULTS)
    layers = (broker or {}, *dynamic, created, read, in_file, command_line.everywhere, own)
    for layer in layers:
        for name, message in layer.items():
            options = message if isinstance(message, tuple) else (message,)
            possible[name] = _over(possible[name], options)
    settings = {
        name: options[0] if len(options) == 1 else _safest(name, options) for name, options in possible.items()
    }
    _check_lags(topic, settings)
    known = set(created)
    if topic in topics or topic in topic_configs.overrides:
        known |= _OF_TOPICS
    elif topics_have_no_overrides or topic in topic_configs.by_topic.keys() - topic_configs.all_values:
        known |= _OF_TOPICS - {CLEANUP_POLICY}
    if topic in topic_configs.not_tiered:
        known |= TIERED_STORAGE
    known -= topic_configs.withheld.get(topic, frozenset())
    known |= {*in_file, *command_line.everywhere, *own}
    return Resolved(
        topic,
        settings,
        frozenset(known),
        given=frozenset({*in_file, *command_line.everywhere, *own}),
        in_metadata=topic in topics,
        broker_known=broker is not None,
    )


def _or_below(layer: Layer) -> Layer:
    """Return the settings as options: the safer of each setting and the same setting of a lower layer applies."""
    return {name: (None, *(message if isinstance(message, tuple) else (message,))) for name, message in layer.items()}


def _over(below: tuple[Setting, ...], options: Options) -> tuple[Setting, ...]:
    different = reversed(dict.fromkeys(reversed(options)))
    return tuple(setting for option in different for setting in (below if option is None else (option,)))


def _safest(name: str, options: tuple[Setting, ...]) -> Setting:
    newest = options[-1]
    value = safest(name, [option.value for option in options])
    if value == newest.value:
        return newest
    source = next((option.source for option in options if option.value == value), "common to all possible values")
    others = " or ".join(dict.fromkeys(option.source for option in options))
    return Setting(value, source, f"{name} may have one of several values ({others}): the safer value is used")


def safest(name: str, values: Sequence[Value]) -> Value:
    """Return, of several possible `values` (the latest is last), the value with which the fewest records are removed;
    the latest if the setting does not affect removal.

    The last records of a metadata log may not be committed, so a setting that they changed has more than one possible
    value; `log/cluster/metadata.py` finds these values.
    """
    newest = values[-1]
    if name == "cleanup.policy":
        # Only policies that all of the values contain are certainly intended.
        allowed = set.intersection(*({*policy} for policy in values if isinstance(policy, tuple)))
        return tuple(item for item in newest if item in allowed) if isinstance(newest, tuple) else newest
    if name == "remote.storage.enable":  # tiered topics are not processed
        return any(values)
    if name == "message.format.version":  # newer clients can read the formats of older clients
        return min((value for value in values if isinstance(value, str)), key=version_numbers, default=None)
    numbers = [value for value in values if isinstance(value, int | float)]
    if name in RETENTION:
        return min(numbers) if min(numbers) < 0 else max(numbers)
    return max(numbers) if name in LARGER_IS_SAFER else newest


def _check_lags(topic: str, settings: Mapping[str, Setting]) -> None:
    low, high = settings["min.compaction.lag.ms"], settings["max.compaction.lag.ms"]
    assert isinstance(low.value, int)
    assert isinstance(high.value, int)
    if low.value > high.value:
        raise Refused(
            f"topic {topic}: min.compaction.lag.ms {low.value} ({low.source}) is above "
            f"max.compaction.lag.ms {high.value} ({high.source})",
            remedy="Set the minimum to at most the maximum",
            slug="min-lag-above-max-lag",
        )
