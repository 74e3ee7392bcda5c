"""Parses the options of the `kafka-log` data sources. Options that Spark's own Kafka source also has, have the same
names and meaning. No file is read. SOURCE.md has a table of the options for users.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from keytail.errors import UsageProblem
from keytail.format.json_object import parse_object

SLICE_BYTES = 128 << 20  # bytes of log per task, as in Spark's own sources
EARLIEST, LATEST = -2, -1  # as in Spark's JSON of offsets

_OTHER_NAMES = {"subscribe": "topic", "subscribePattern": "topicPattern", "kafka.isolation.level": "isolationLevel"}
NAMES = (
    "logDirs", "topic", "topicPattern", "assign", "startingOffsets", "endingOffsets", "startingTimestamp",
    "endingTimestamp", "startingOffsetsByTimestamp", "endingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy",
    "isolationLevel", "includeHeaders", "columns", "highWatermark", "failOnDataLoss", "sliceBytes", "minPartitions",
    "maxOffsetsPerTrigger",
)  # fmt: skip
_OF_RECORDS = ("isolationLevel", "includeHeaders", "maxOffsetsPerTrigger")
_OF_CLIENT = ("groupIdPrefix", "kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs")
# Options of Spark's Kafka source that these sources do not have, with the remedy for each.
_FOR_CLIENT = "Remove the option: it configures a Kafka client, which is not used"
_REFUSED = {name.lower(): _FOR_CLIENT for name in _OF_CLIENT} | {
    "kafka.bootstrap.servers": 'Give .option("logDirs", ...) instead: files are read, and no broker is asked',
    "minoffsetspertrigger": "Set an interval between batches with .trigger(processingTime=...)",
    "maxtriggerdelay": "Set an interval between batches with .trigger(processingTime=...)",
    "maxrecordsperpartition": "Use minPartitions or sliceBytes, which also divide the log into more tasks",
}

TopicPartition = tuple[str, int]


@dataclass(frozen=True)
class Bound:
    """The start or end of a read: one offset or time for all partitions, or one for each partition in `of`.

    `offset` and the values of `of` are offsets, EARLIEST or LATEST; with `timestamps`, they are times in ms.
    """

    timestamps: bool
    offset: int | None = None
    of: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SourceOptions:
    """The parameters of a read. If `columns` is None, all columns are read."""

    log_dirs: tuple[str, ...]
    topics: tuple[str, ...] = ()
    topic_pattern: str | None = None
    partitions: frozenset[TopicPartition] = frozenset()
    start: Bound = Bound(False, EARLIEST)
    end: Bound = Bound(False, LATEST)
    start_without_match: str = "error"
    refuses_start_above_end: bool = False  # if False, no records of a partition with such a start are read
    committed: bool = False
    include_headers: bool = False
    columns: tuple[str, ...] | None = None
    log_end: bool = False
    fail_on_data_loss: bool = True
    slice_bytes: int = SLICE_BYTES
    min_partitions: int = 1
    max_offsets_per_trigger: int | None = None  # of streams

    def takes(self, topic: str, partition: int) -> bool:
        if self.partitions:
            return (topic, partition) in self.partitions
        return topic in self.topics if self.topics else bool(re.fullmatch(self.topic_pattern or ".*", topic))


def parse_options(
    given: Mapping[str, str], *, records: bool = True, streaming: bool | None = False
) -> SourceOptions:
    """Parse the options of `kafka-log` (`records`) or `kafka-log-batches`; names are case-insensitive. If `streaming`
    is None, it is not known whether the options are for a stream, so offsets and times are not parsed. Raises
    UsageProblem for options that are unknown, missing, invalid or contradictory."""
    options, spelled = _by_name(given, records)
    log_dirs = _list(options.get("logDirs"))
    if not log_dirs:
        raise UsageProblem(
            "option logDirs is missing",
            remedy='Give .option("logDirs", "/data/kafka-logs"), and separate several log dirs by commas',
            slug="missing-option",
        )
    kinds = [spelled[name] for name in ("topic", "topicPattern", "assign") if name in options]
    if len(kinds) != 1:
        what = f"but {len(kinds)} are given: {', '.join(kinds)}" if kinds else "but none is given"
        raise UsageProblem(
            f"exactly one of the options subscribe (or topic), subscribePattern (or topicPattern) and assign is "
            f"required, {what}",
            remedy='Give .option("subscribe", "a,b"), or .option("subscribePattern", ".*") for all topics',
            slug="invalid-topic-selection",
        )
    start, end = Bound(False, EARLIEST), Bound(False, LATEST)
    if streaming is not None:
        _check_use(options, streaming)
        start, end = _bound(options, "starting", EARLIEST), _bound(options, "ending", LATEST)
        _check_order(start, end)
    most = options.get("maxOffsetsPerTrigger")
    return SourceOptions(
        log_dirs=log_dirs,
        topics=_topics(options),
        topic_pattern=_pattern(options.get("topicPattern"), spelled),
        partitions=_assigned(options),
        start=start,
        end=end,
        start_without_match=_one_of(options, "startingOffsetsByTimestampStrategy", ("error", "latest")),
        refuses_start_above_end=not start.timestamps,
        committed=_one_of(options, "isolationLevel", ("read_uncommitted", "read_committed")) == "read_committed",
        include_headers=_one_of(options, "includeHeaders", ("false", "true")) == "true",
        columns=_list(options["columns"]) if "columns" in options else None,
        log_end=_one_of(options, "highWatermark", ("checkpoint", "log-end")) == "log-end",
        fail_on_data_loss=_one_of(options, "failOnDataLoss", ("true", "false")) == "true",
        slice_bytes=_number("sliceBytes", options.get("sliceBytes", str(SLICE_BYTES)), at_least=1),
        min_partitions=_number("minPartitions", options.get("minPartitions", "1"), at_least=1),
        max_offsets_per_trigger=None if most is None else _number("maxOffsetsPerTrigger", most, at_least=1),
    )


_STARTS = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")


def _check_use(options: Mapping[str, str], streaming: bool) -> None:
    """Raise UsageProblem for an option that is not valid in this kind of query, and for a stream whose start could
    change when it restarts."""
    unfit = ["maxOffsetsPerTrigger"] if not streaming else [name for name in NAMES if name.startswith("ending")]
    for name in unfit:
        if name in options:
            raise UsageProblem(
                f"option {name} is not valid in a {'stream' if streaming else 'batch query'}",
                remedy="Remove it",
                slug="unsupported-option",
            )
    if not streaming:
        return
    start = options.get("startingOffsets", "earliest").strip().lower()
    strategy = options.get("startingOffsetsByTimestampStrategy", "error").lower()
    if start == "latest" or strategy == "latest" or not any(options.get(name, "").strip() for name in _STARTS):
        raise UsageProblem(
            "a stream needs a start that is the same when it restarts: Spark asks again for the start if the first "
            "batch was not completed, and latest, the default of Spark's Kafka source, would then skip records",
            remedy='Set startingOffsets to earliest or to JSON such as {"topic": {"0": 23}}, or set startingTimestamp',
            slug="stream-without-start",
        )


def _by_name(given: Mapping[str, str], records: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options by their names in NAMES, and for each of these names the name that was given. Spark passes
    names in lower case. Raises UsageProblem for an unknown name, and for an option that is given twice."""
    spellings = {name.lower(): name for name in (*NAMES, *_OTHER_NAMES)}
    if any(name.lower().startswith("option.") for name in given):
        raise UsageProblem(
            "Spark does not keep the options of a table of its session catalog: pyspark 4.2 passes none of them to a "
            "Python source when the table is queried",
            remedy="Create a temporary view instead: CREATE TEMPORARY VIEW orders USING `kafka-log` OPTIONS "
            "(logDirs '/data/kafka-logs', subscribe 'orders')",
            slug="unsupported-catalog-table",
        )
    options: dict[str, str] = {}
    spelled: dict[str, str] = {}
    for name, value in given.items():
        own = spellings.get(name.lower())
        if own is None:
            raise _unknown(name, spellings)
        known = _OTHER_NAMES.get(own, own)
        if not records and known in _OF_RECORDS:
            raise UsageProblem(
                f"kafka-log-batches has no option {name}: it returns all batches as they are on disk",
                remedy="Remove the option, or use kafka-log",
                slug="unsupported-option",
            )
        if known in options:
            raise UsageProblem(
                f"options {spelled[known]} and {own} are both given, but are two names of one option",
                remedy="Remove one of them",
                slug="duplicate-option",
            )
        options[known], spelled[known] = value, own
    return options, spelled


def _unknown(name: str, spellings: Mapping[str, str]) -> UsageProblem:
    remedy = _REFUSED.get(name.lower())
    if remedy is None and name.lower().startswith("kafka."):
        remedy = _FOR_CLIENT
    if remedy is not None:
        return UsageProblem(
            f"option {name} of Spark's Kafka source is not supported", remedy=remedy, slug="unsupported-option"
        )
    near = get_close_matches(name.lower(), spellings, n=1)
    return UsageProblem(
        f"unknown option {name}",
        remedy=f"Did you mean {spellings[near[0]]}?" if near else f"The options are: {', '.join(NAMES)}",
        slug="unknown-option",
    )


def _check_order(start: Bound, end: Bound) -> None:
    """Raise UsageProblem if a partition starts above its end; as in Spark, only bounds of one kind are compared."""
    if start.timestamps != end.timestamps:
        return
    for item in sorted(start.of.keys() & end.of.keys()):
        if start.of[item] > end.of[item] >= 0:
            what = "time" if start.timestamps else "offset"
            raise UsageProblem(
                f"the starting {what} {start.of[item]} of {item[0]}-{item[1]} is above its ending {what} "
                f"{end.of[item]}",
                remedy="Exchange the two values, or correct one of them",
                slug="start-above-end",
            )


def _list(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.strip() for item in (text or "").split(",") if item.strip()))


def _topics(options: Mapping[str, str]) -> tuple[str, ...]:
    topics = _list(options.get("topic"))
    if "topic" in options and not topics:
        raise UsageProblem(
            "option topic contains no topic name", remedy="Give names, separated by commas", slug="empty-option"
        )
    return topics


def _pattern(text: str | None, spelled: Mapping[str, str]) -> str | None:
    if text is not None:
        if not text:
            raise UsageProblem(
                f"option {spelled['topicPattern']} is empty", remedy="Give .* for all topics", slug="empty-option"
            )
        try:
            re.compile(text)
        except re.error as error:
            raise UsageProblem(
                f"option {spelled['topicPattern']}: invalid regular expression '{text}': {error}",
                slug="invalid-topic-pattern",
            ) from error
    return text


def _one_of(options: Mapping[str, str], name: str, values: tuple[str, ...]) -> str:
    """Return the value of an option, which must be one of `values`; the first of these is the default."""
    value = options.get(name, values[0]).lower()
    if value not in values:
        raise UsageProblem(
            f"invalid value '{options[name]}' of option {name}",
            remedy=f"Give {' or '.join(values)}",
            slug="invalid-option-value",
        )
    return value


def _number(name: str, text: Any, *, at_least: int) -> int:
    try:
        number = int(str(text))
    except ValueError:
        raise UsageProblem(
            f"invalid value '{text}' of option {name}: expected a whole number", slug="invalid-option-value"
        ) from None
    if number < at_least:
        raise UsageProblem(
            f"invalid value {number} of option {name}: the minimum is {at_least}", slug="invalid-option-value"
        )
    return number


def _assigned(options: Mapping[str, str]) -> frozenset[TopicPartition]:
    if "assign" not in options:
        return frozenset()
    found = _json("assign", options["assign"])
    lists = all(isinstance(numbers, list) for numbers in found.values())
    if not lists or not any(found.values()):
        raise UsageProblem(
            "option assign must list the partitions of each topic, in total at least one partition",
            remedy='Give JSON such as {"a": [0, 1], "b": [2]}',
            slug="invalid-option-value",
        )
    return frozenset((topic, _number("assign", item, at_least=0)) for topic, ones in found.items() for item in ones)


def _json(name: str, text: str) -> dict[str, Any]:
    try:
        return parse_object(text)
    except ValueError as error:
        raise UsageProblem(f"option {name} is not a JSON object: {error}", slug="invalid-option-value") from error


def _bound(options: Mapping[str, str], which: str, default: int) -> Bound:
    """Return the start or the end of the read. As in Spark, a time takes precedence over times by partition, and both
    take precedence over offsets."""
    name = f"{which}Timestamp"
    if name in options:
        return Bound(True, _number(name, options[name], at_least=0))
    name = f"{which}OffsetsByTimestamp"
    if name in options:
        return Bound(True, of=_of_partitions(name, options[name], at_least=0))
    name = f"{which}Offsets"
    text = options.get(name, "").strip()
    words = {"earliest": EARLIEST} if which == "starting" else {"latest": LATEST}
    if text.lower() in ("earliest", "latest"):
        if text.lower() not in words:
            raise UsageProblem(
                f"option {name} cannot be {text}: nothing would be read",
                remedy=f"Give {', '.join(words)}, or offsets as JSON",
                slug="invalid-option-value",
            )
        return Bound(False, words[text.lower()])
    if not text:
        return Bound(False, default)
    if not text.startswith("{"):
        raise UsageProblem(
            f"invalid value '{text}' of option {name}: expected {', '.join(words)} or JSON",
            remedy='Give JSON such as {"topic": {"0": 23, "1": 42}}, where -2 is the earliest and -1 the latest offset',
            slug="invalid-option-value",
        )
    of = _of_partitions(name, text, at_least=EARLIEST)
    beyond = next((item for item, offset in of.items() if offset < 0 and offset != default), None)
    if beyond is not None:
        raise UsageProblem(
            f"option {name} cannot have {of[beyond]} for {beyond[0]}-{beyond[1]}",
            remedy=f"Use {default} for the {next(iter(words))} offset",
            slug="invalid-option-value",
        )
    return Bound(False, of=of)


def _of_partitions(name: str, text: str, *, at_least: int) -> dict[TopicPartition, int]:
    of: dict[TopicPartition, int] = {}
    for topic, values in _json(name, text).items():
        if not isinstance(values, dict):
            raise UsageProblem(
                f"option {name}: the value of topic {topic} is not an object of partitions", slug="invalid-option-value"
            )
        for partition, value in values.items():
            of[topic, _number(name, partition, at_least=0)] = _number(name, value, at_least=at_least)
    if not of:
        raise UsageProblem(f"option {name} contains no partition", slug="empty-option")
    return of
