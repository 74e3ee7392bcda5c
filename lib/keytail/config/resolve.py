"""Which value of a setting holds for a topic, and where it comes from.

Pure: layers in, values with their sources out. The command line beats the topic's own overrides, those beat
the broker's dynamic settings (its own before those of all brokers), those beat the broker's file, that beats
Kafka's default; `TOPIC:key=value` beats `key=value`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from keytail.config.keys import (
    COMMAND_LINE_BROKER_KEYS,
    KEYS,
    TOPIC_KEYS,
    Key,
    Value,
    parse,
    parse_broker,
    right_name,
)
from keytail.config.safety import safest
from keytail.errors import KeytailError, Refused, UsageProblem

DEFAULT_SOURCE = "Kafka's default"
_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


@dataclass(frozen=True)
class Setting:
    """A value and where it comes from, in words such as `server.properties: log.roll.hours=24`.

    `doubt` says, of a value that is not the newest one, why it holds nevertheless.
    """

    value: Value
    source: str
    doubt: str = ""


# Settings one of which holds, the newest last; None where the layer says nothing, so that a lower one decides.
Options: TypeAlias = tuple[Setting | None, ...]
Layer: TypeAlias = Mapping[str, Setting | Options]


@dataclass(frozen=True)
class CommandLine:
    """The settings of all `--topic-config` arguments: for every topic, and by topic."""

    everywhere: Mapping[str, Setting] = field(default_factory=dict)
    by_topic: Mapping[str, Mapping[str, Setting]] = field(default_factory=dict)


@dataclass(frozen=True)
class Resolved:
    """Every setting of `keys.py` as it holds for one topic.

    `overrides_known`: the topic's own settings were given or read, so an absent one really is absent.
    """

    topic: str
    settings: Mapping[str, Setting]
    overrides_known: bool

    def value(self, name: str) -> Value:
        return self.settings[name].value

    def doubts(self) -> list[str]:
        """Why values hold that are not the newest ones."""
        return [setting.doubt for setting in self.settings.values() if setting.doubt]

    def values(self) -> dict[str, Value]:
        """All values by name."""
        return {name: setting.value for name, setting in self.settings.items()}


def from_command_line(arguments: Iterable[str]) -> CommandLine:
    """The settings of `[TOPIC:]key=value` arguments; UsageProblem names what is wrong with one."""
    everywhere: dict[str, Setting] = {}
    by_topic: dict[str, dict[str, Setting]] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        topic, colon, bare_name = name.rpartition(":")
        if not equals or not bare_name or (colon and not _is_topic_name(topic)):
            raise UsageProblem(
                f"--topic-config {argument} is not [TOPIC:]key=value",
                remedy="Give for example --topic-config orders:cleanup.policy=compact",
            )
        key = _command_line_key(bare_name, topic, argument)
        setting = Setting(_parsed(key, text, f"--topic-config {argument}"), f"command line: {argument}")
        layer = by_topic.setdefault(topic, {}) if colon else everywhere
        if key.name in layer and layer[key.name] != setting:
            raise UsageProblem(
                f"--topic-config {argument} contradicts an earlier one ({layer[key.name].source})",
                remedy="Give each setting once",
            )
        layer[key.name] = setting
    return CommandLine(everywhere, by_topic)


def _is_topic_name(text: str) -> bool:
    return bool(_TOPIC_NAME.fullmatch(text)) and text not in (".", "..")


def _command_line_key(name: str, topic: str, argument: str) -> Key:
    key = KEYS.get(name)
    if key is None:
        meant = right_name(name)
        raise UsageProblem(
            f"--topic-config {argument}: unknown key {name}",
            remedy=f"Did you mean {meant}?" if meant else "The keys are Kafka's topic configs, verbatim",
        )
    if key.scope == "broker" and (topic or name not in COMMAND_LINE_BROKER_KEYS):
        inside = "without a topic" if name in COMMAND_LINE_BROKER_KEYS else "in the file given by --config"
        raise UsageProblem(
            f"--topic-config {argument}: {name} is a setting of the broker, not of a topic",
            remedy=f"Give it {inside}",
        )
    if name == "cleanup.policy" and not topic:
        raise UsageProblem(
            f"--topic-config {argument}: cleanup.policy is accepted for named topics only, "
            "because a wrong one removes records of topics that were never meant to be compacted",
            remedy=f"Give --topic-config TOPIC:{argument}",
        )
    return key


def from_topic(topic: str, texts: Mapping[str, str], origin: str) -> dict[str, Setting]:
    """A topic's own overrides, as found in `origin`; keys that `keys.py` does not have are passed over."""
    settings = {}
    for key in TOPIC_KEYS:
        if key.name in texts:
            source = f"{origin}: {key.name}={texts[key.name]} of topic {topic}"
            settings[key.name] = Setting(_parsed(key, texts[key.name], source, Refused), source)
    return settings


def topic_options(topic: str, values: Mapping[str, Sequence[str | None]], origin: str) -> dict[str, Options]:
    """Like `from_topic`, of overrides each of which may have one of several values."""
    options: dict[str, Options] = {}
    for key in TOPIC_KEYS:
        if key.name in values:
            options[key.name] = tuple(
                None if text is None else from_topic(topic, {key.name: text}, origin)[key.name]
                for text in values[key.name]
            )
    return options


def broker_options(values: Mapping[str, Sequence[str | None]], origin: str) -> dict[str, Options]:
    """The settings that a broker takes over while it runs, under the names of what they are the defaults of.

    Of names that mean the same, Kafka lets only the one of highest precedence be set in this way.
    """
    options: dict[str, Options] = {}
    for key in KEYS.values():
        name = key.broker_names[0] if key.broker_names else ""
        if name in values and (key.scope == "topic" or key.name in COMMAND_LINE_BROKER_KEYS):
            options[key.name] = tuple(
                None if text is None else _dynamic(key, name, text, origin) for text in values[name]
            )
    return options


def _dynamic(key: Key, name: str, text: str, origin: str) -> Setting:
    try:
        return Setting(parse_broker(key, name, text), f"{origin}: {name}={text}")
    except ValueError as error:
        raise _invalid(key, name, text, origin, Refused) from error


def from_broker(texts: Mapping[str, str], path: str) -> dict[str, Setting]:
    """A broker's settings, under the names of the topic settings that they are the defaults of.

    Every name present is checked, also those that one of higher precedence hides, as a broker does.
    """
    settings: dict[str, Setting] = {}
    for key in KEYS.values():
        for name in key.broker_names:
            text = texts.get(name)
            if text is None:
                continue
            source = f"{path}: {name}={text}"
            try:
                value = parse_broker(key, name, text)
            except ValueError as error:
                raise _invalid(key, name, text, path, UsageProblem) from error
            settings.setdefault(key.name, Setting(value, source))
    return settings


def _parsed(key: Key, text: str, source: str, kind: type[KeytailError] = UsageProblem) -> Value:
    try:
        return parse(key, text)
    except ValueError as error:
        raise _invalid(key, key.name, text, source, kind) from error


def _invalid(key: Key, name: str, text: str, source: str, kind: type[KeytailError]) -> KeytailError:
    in_unit = f" (as {key.name})" if name != key.name else ""
    return kind(f"{name} cannot be {text!r} in {source}", remedy=f"Allowed is {key.allowed}{in_unit}")


_DEFAULTS = {name: (Setting(key.default, DEFAULT_SOURCE),) for name, key in KEYS.items()}


def effective(
    topic: str,
    *,
    command_line: CommandLine | None = None,
    topics: Mapping[str, Layer] | None = None,
    dynamic: Sequence[Layer] = (),
    broker: Layer | None = None,
    topics_have_no_overrides: bool = False,
) -> Resolved:
    """Every setting as it holds for `topic`, with its source.

    `topics` has an entry, maybe an empty one, for each topic whose overrides were read. `dynamic`: what brokers
    take over while they run, lowest first. Where one of several values holds, the safest is taken. Raises Refused
    if the minimum compaction lag passes the maximum one, which no broker accepts.
    """
    command_line = command_line or CommandLine()
    topics = topics or {}
    possible: dict[str, tuple[Setting, ...]] = dict(_DEFAULTS)
    own = command_line.by_topic.get(topic, {})
    for layer in (broker or {}, *dynamic, topics.get(topic, {}), command_line.everywhere, own):
        for name, said in layer.items():
            options = said if isinstance(said, tuple) else (said,)
            possible[name] = _over(possible[name], options)
    settings = {
        name: options[0] if len(options) == 1 else _safest(name, options) for name, options in possible.items()
    }
    _check_lags(topic, settings)
    known = topics_have_no_overrides or topic in topics or bool(own)
    return Resolved(topic, settings, known)


def _over(below: tuple[Setting, ...], options: Options) -> tuple[Setting, ...]:
    different = reversed(dict.fromkeys(reversed(options)))
    return tuple(setting for option in different for setting in (below if option is None else (option,)))


def _safest(name: str, options: tuple[Setting, ...]) -> Setting:
    newest = options[-1]
    value = safest(name, [option.value for option in options])
    if value == newest.value:
        return newest
    source = next((option.source for option in options if option.value == value), "what all of them have in common")
    others = " or ".join(dict.fromkeys(option.source for option in options))
    return Setting(value, source, f"{name} may not be committed yet ({others}): the safer one counts")


def _check_lags(topic: str, settings: Mapping[str, Setting]) -> None:
    low, high = settings["min.compaction.lag.ms"], settings["max.compaction.lag.ms"]
    assert isinstance(low.value, int)
    assert isinstance(high.value, int)
    if low.value > high.value:
        raise Refused(
            f"topic {topic}: min.compaction.lag.ms {low.value} ({low.source}) is above "
            f"max.compaction.lag.ms {high.value} ({high.source})",
            remedy="Set the minimum at or below the maximum",
        )
