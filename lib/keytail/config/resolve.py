"""Determines the effective value of each setting for a topic, and its source.

Pure functions take layers of settings and return values with their sources. The command line takes precedence over the
file of `--topic-configs`; then follow the topic's own overrides in the metadata log, the settings with which a broker
creates an internal topic, the broker's dynamic settings (the broker's own before the settings of all brokers), the
broker's file, and Kafka's default. `TOPIC:key=value` takes precedence over `key=value`.

A value alone does not justify removing records: `Resolved.unknown` has the settings that were neither read nor given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from keytail.config.internal import INTERNAL_TOPICS
from keytail.config.keys import (
    COMMAND_LINE_BROKER_KEYS,
    KEYS,
    NOT_USED,
    TOPIC_KEYS,
    Key,
    Safer,
    Value,
    parse_broker,
    right_name,
    version_numbers,
)
from keytail.config.topic_configs import TIERED_STORAGE, TopicConfigs
from keytail.errors import Refused, UsageProblem

DEFAULT_SOURCE = "Kafka's default"
CLEANUP_POLICY = "cleanup.policy"
LOG_DIRS = ("log.dirs", "log.dir")
USED = KEYS.keys() - NOT_USED.keys()  # the settings that have an effect
_OF_TOPICS = frozenset(key.name for key in TOPIC_KEYS)
_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


@dataclass(frozen=True)
class Setting:
    """A value and its source, such as `server.properties: log.roll.hours=24`.

    `doubt` explains why a value applies although it is not the latest value. `invalid` is the error to raise when the
    value is used.
    """

    value: Value
    source: str
    doubt: str = ""
    invalid: UsageProblem | None = None


# Possible settings, the latest last. None: the layer may lack the setting, so that a lower layer decides.
Possibilities: TypeAlias = tuple[Setting | None, ...]
Layer: TypeAlias = Mapping[str, Setting | Possibilities]


@dataclass(frozen=True)
class CommandLine:
    """The settings of all `--topic-config` arguments: for every topic (by key), or for one topic (by topic and key)."""

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
        """Return the settings of `names` that were neither read nor given for this topic. Values of such settings do
        not justify removing anything.
        """
        return tuple(name for name in names if name not in self.known)

    def assumed(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the settings of `names` for which Kafka's default is assumed: the broker's file, which was not read,
        may set other values."""
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
            remedy=f"Give this setting {inside}",
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
    """Parse a topic's own overrides, found in `origin`; keys that are not in `keys.py` are ignored. Raises Refused for
    a value that Kafka does not allow."""
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


def topic_options(topic: str, values: Mapping[str, Sequence[str | None]], origin: str) -> dict[str, Possibilities]:
    """Return the same as `from_topic`, for overrides that may each have one of several values, or be missing (None)."""
    options: dict[str, Possibilities] = {}
    for key in TOPIC_KEYS:
        if key.name in values:
            options[key.name] = tuple(
                None if text is None else from_topic(topic, {key.name: text}, origin)[key.name]
                for text in values[key.name]
            )
    return options


def broker_options(values: Mapping[str, Sequence[str | None]], origin: str) -> dict[str, Possibilities]:
    """Return a broker's dynamic settings, by the names in `keys.py`: defaults of topics have the topic setting's name.

    Of several names with the same meaning, Kafka allows only the name with the highest precedence to be set
    dynamically.
    """
    options: dict[str, Possibilities] = {}
    for key in KEYS.values():
        name = key.broker_names[0] if key.broker_names else ""
        if name in values and (key.scope == "topic" or key.name in COMMAND_LINE_BROKER_KEYS):
            options[key.name] = tuple(
                None if text is None else _setting(key, name, text, origin, f"{origin}: {name}={text}", is_usage=False)
                for text in values[name]
            )
    return options


def from_broker(
    texts: Mapping[str, str],
    path: str,
    needed: Collection[str] = USED,
    on_note: Callable[[str], None] = lambda note: None,
) -> dict[str, Setting]:
    """Return the settings in a broker's file, by the names in `keys.py`: defaults of topics have the topic setting's
    name.

    `needed` are the names (as in `keys.py`) of the settings that the command uses. Raises UsageProblem if such a
    setting is invalid, or refers to a config provider. Other settings with such a fault are ignored, and `on_note` is
    called with the reason. A name that a name of higher precedence overrides is not needed. The log dirs are needed
    only without `--log-dirs`: an error in them is kept in the setting.
    """
    settings: dict[str, Setting] = {}
    for key in KEYS.values():
        for name in key.broker_names:
            if (text := texts.get(name)) is None:
                continue
            try:
                setting = _broker_setting(key, name, text, path)
            except UsageProblem as problem:
                if key.name in LOG_DIRS:
                    settings.setdefault(key.name, Setting((), path, invalid=problem))
                    continue
                if key.name in needed and key.name not in settings:
                    raise
                on_note(f"{name} in {path} is not needed here and is ignored: {problem.what}")
            else:
                settings.setdefault(key.name, setting)
    return settings


def _broker_setting(key: Key, name: str, text: str, path: str) -> Setting:
    if "${" in text:
        raise UsageProblem(
            f"{name} refers to a config provider, which keytail does not support",
            path=path,
            remedy=f"Give a copy of the file that contains the value of {name} itself",
            slug="unsupported-config-provider",
        )
    return _setting(key, name, text, path, f"{path}: {name}={text}")


def _setting(
    key: Key, name: str, text: str, where: str, source: str, *, is_usage: bool = True
) -> Setting:
    """Parse the text of `name`, which was found in `where`. Raises UsageProblem for a value that `key` does not allow,
    or, if `is_usage` is False (the value was not given for this run), Refused.
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
    as_created: Layer = from_topic(topic, INTERNAL_TOPICS.get(topic, {}), "as a broker creates it")
    overrides = topics.get(topic, {})
    if topic in topics:
        as_created = _or_absent(as_created)
    if topic in topic_configs.overrides | topic_configs.all_values:  # the metadata log or the file may be outdated
        overrides = _or_absent(overrides)
    in_file = from_topic_configs(topic, topic_configs)
    given = (in_file, command_line.everywhere, command_line.by_topic.get(topic, {}))
    possible: dict[str, tuple[Setting, ...]] = dict(_DEFAULTS)
    for layer in (broker or {}, *dynamic, as_created, overrides, *given):  # lowest precedence first
        for name, setting in layer.items():
            possible[name] = _over(possible[name], setting if isinstance(setting, tuple) else (setting,))
    settings = {name: _safest_setting(name, values) for name, values in possible.items()}
    _check_lags(topic, settings)
    given_names = frozenset[str]().union(*given)
    known = frozenset(as_created)
    if topic in topics or topic in topic_configs.overrides:
        known |= _OF_TOPICS
    elif topics_have_no_overrides or topic in topic_configs.by_topic.keys() - topic_configs.all_values:
        known |= _OF_TOPICS - {CLEANUP_POLICY}  # a wrong policy would remove the most records, so it must be given
    if topic in topic_configs.not_tiered:
        known |= TIERED_STORAGE  # the topic's version of Kafka does not have these settings
    known -= topic_configs.withheld.get(topic, frozenset())  # settings that were printed without their values
    return Resolved(
        topic,
        settings,
        known=known | given_names,
        given=given_names,
        in_metadata=topic in topics,
        broker_known=broker is not None,
    )


def _or_absent(layer: Layer) -> Layer:
    """Return the layer with None as a further possibility for each setting: the layer may lack the setting."""
    return {name: (None, *(item if isinstance(item, tuple) else (item,))) for name, item in layer.items()}


def _over(below: tuple[Setting, ...], layer: Possibilities) -> tuple[Setting, ...]:
    """Return the possible settings of a layer, with None replaced by all possible settings of the layers `below`."""
    different = reversed(dict.fromkeys(reversed(layer)))
    return tuple(setting for item in different for setting in (below if item is None else (item,)))


def _safest_setting(name: str, possible: tuple[Setting, ...]) -> Setting:
    value = safest_value(name, [setting.value for setting in possible])
    if value == possible[-1].value:
        return possible[-1]
    source = next((setting.source for setting in possible if setting.value == value), "common to all possible values")
    others = " or ".join(dict.fromkeys(setting.source for setting in possible))
    return Setting(value, source, f"{name} may have one of several values ({others}): the safer value is used")


def _common(policies: Sequence[tuple[str, ...]]) -> Value:
    """Return the policies that all possible values contain, possibly none: only these are certainly intended."""
    return tuple(item for item in policies[-1] if all(item in policy for policy in policies))


def _longer(limits: Sequence[int]) -> Value:
    """Return the longest limit; a negative number means that there is no limit."""
    return min(limits) if min(limits) < 0 else max(limits)


def _older(versions: Sequence[str | None]) -> Value:
    """Return the oldest version: newer clients can read the message formats of older versions."""
    return min(filter(None, versions), key=version_numbers, default=None)


_SAFEST: Mapping[Safer, Callable[[Sequence[Any]], Value]] = {
    "common": _common,
    "larger": max,  # records are retained longer, or compacted later
    "longer": _longer,
    "older": _older,
    "true": any,  # tiered topics are not processed
    "latest": lambda values: values[-1],
}


def safest_value(name: str, values: Sequence[Value]) -> Value:
    """Return the value with which no more is removed than with any of `values`, by the rule of the setting's key. The
    latest of `values` is last. The result is one of them or, for cleanup.policy, the list of policies that all of them
    contain.

    The last records of a metadata log may not be committed, so a setting that they changed has more than one possible
    value; `log/cluster/metadata.py` finds these values.
    """
    return _SAFEST[KEYS[name].safer](values)


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
