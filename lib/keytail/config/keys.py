"""Lists the configuration keys of Kafka that keytail reads: names, synonyms, types, defaults and ranges, as in 4.3.

`message.format.version` and `inter.broker.protocol.version` are settings of versions before 4.0. If an older version
allows more values, the range of that version is used: before Kafka 4.1, `segment.bytes` may be as low as 14.

A key that is not in this table is never kept, shown or stored, so secrets are not exposed. `resolve.py` decides which
value applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from sys import float_info
from typing import Any, Literal

from keytail.format.codecs.table import CODECS, TABLE, Codec

Value = int | float | bool | str | tuple[str, ...] | None
Kind = Literal["int", "long", "double", "boolean", "list", "string", "version"]
Scope = Literal["topic", "broker"]
# How to choose, of several possible values, the value with which the fewest records are removed; `resolve.py` has the
# rules. latest: the setting does not affect removal.
Safer = Literal["common", "larger", "longer", "older", "true", "latest"]

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1
_LIMITS: dict[str, tuple[int, int]] = {"int": (-(2**31), INT_MAX), "long": (-(2**63), LONG_MAX)}
_UNIT_MS = {"minutes": 60_000, "hours": 3_600_000}


@dataclass(frozen=True)
class Key:
    """One setting. A bound of None means the bound of the type.

    `broker_names` are the names that set the key in a broker's file, highest precedence first; a name that ends in
    `.hours` or `.minutes` has that unit.
    """

    name: str
    kind: Kind
    default: Value
    meaning: str
    broker_names: tuple[str, ...]
    scope: Scope
    safer: Safer
    minimum: int | float | None = None
    maximum: int | float | None = None
    choices: tuple[str, ...] = ()
    also: tuple[int, ...] = ()  # values that are allowed although they are below the minimum

    @property
    def allowed(self) -> str:
        """A description of the allowed values."""
        if self.choices:
            listed = ", ".join(self.choices)
            return f"any of {listed}, each once" if self.kind == "list" else f"one of {listed}"
        if self.kind == "boolean":
            return "true or false"
        if self.kind in ("list", "string"):
            return "any text"
        if self.kind == "version":
            return "a version such as 2.8 or 0.10.2-IV0"
        type_low, type_high = _LIMITS.get(self.kind, (None, None))
        low = type_low if self.minimum is None else self.minimum
        high = type_high if self.maximum is None else self.maximum
        span = "a number" if self.kind == "double" else "a whole number"
        if low is not None and high is not None:
            span += f" from {low} to {high}"
        return span + "".join(f", or {value}" for value in self.also)


# `options` of the next two functions are minimum, maximum, choices and also.
def _topic(name: str, kind: Kind, default: Value, meaning: str, *names: str, safer: Safer, **options: Any) -> Key:
    return Key(name, kind, default, meaning, names, "topic", safer, **options)


def _broker(name: str, kind: Kind, default: Value, meaning: str, *, safer: Safer = "latest", **options: Any) -> Key:
    return Key(name, kind, default, meaning, (name,), "broker", safer, **options)


_ROLL = ("log.roll.ms", "log.roll.hours")
_JITTER = ("log.roll.jitter.ms", "log.roll.jitter.hours")
_RETENTION = ("log.retention.ms", "log.retention.minutes", "log.retention.hours")
_FLUSH = ("log.flush.interval.ms", "log.flush.scheduler.interval.ms")


def _level(codec: Codec) -> Key:
    return _topic(
        codec.level_key, "int", codec.default_level, "level on append; cleaning uses the codec's default",
        codec.level_key, safer="latest", minimum=codec.levels[0], maximum=codec.levels[-1],
        also=() if codec.default_level in codec.levels else (codec.default_level,),
    )  # fmt: skip


# fmt: off
TOPIC_KEYS = (
    _topic("cleanup.policy", "list", ("delete",), "how old data is removed: by compaction, by deletion, or both",
           "log.cleanup.policy", choices=("compact", "delete"), safer="common"),
    _topic("segment.bytes", "int", 1_073_741_824, "maximum size of a segment, and of all segments merged into one",
           "log.segment.bytes", minimum=14, safer="latest"),
    _topic("internal.segment.bytes", "int", None, "segment.bytes below its minimum in Kafka 4.1 and later, for tests",
           safer="latest"),
    _topic("segment.ms", "long", 604_800_000, "age at which a segment is rolled", *_ROLL, minimum=1, safer="latest"),
    _topic("segment.jitter.ms", "long", 0, "random reduction of segment.ms", *_JITTER, minimum=0, safer="latest"),
    _topic("segment.index.bytes", "int", 10_485_760, "maximum size of an index, and of all indexes merged into one",
           "log.index.size.max.bytes", minimum=4, safer="latest"),
    _topic("index.interval.bytes", "int", 4096, "bytes between two index entries",
           "log.index.interval.bytes", minimum=0, safer="latest"),
    _topic("max.message.bytes", "int", 1_048_588, "maximum size of a batch", "message.max.bytes", minimum=0,
           safer="latest"),
    _topic("retention.ms", "long", 604_800_000, "age at which segments are deleted", *_RETENTION,
           minimum=-1, safer="longer"),
    _topic("retention.bytes", "long", -1, "size of a partition above which segments are deleted",
           "log.retention.bytes", safer="longer"),
    _topic("delete.retention.ms", "long", 86_400_000, "how long tombstones and transaction markers are retained",
           "log.cleaner.delete.retention.ms", minimum=0, safer="larger"),
    _topic("min.compaction.lag.ms", "long", 0, "age below which data is not compacted",
           "log.cleaner.min.compaction.lag.ms", minimum=0, safer="larger"),
    _topic("max.compaction.lag.ms", "long", LONG_MAX, "age above which dirty data is compacted at any dirty ratio",
           "log.cleaner.max.compaction.lag.ms", minimum=1, safer="larger"),
    _topic("min.cleanable.dirty.ratio", "double", 0.5, "dirty ratio above which a partition is compacted",
           "log.cleaner.min.cleanable.ratio", minimum=0, maximum=1, safer="larger"),
    _topic("file.delete.delay.ms", "long", 60_000, "time after which a broker deletes .deleted files",
           "log.segment.delete.delay.ms", minimum=0, safer="latest"),
    _topic("preallocate", "boolean", False, "whether a broker allocates new .log files at their full size",
           "log.preallocate", safer="latest"),
    _topic("compression.type", "string", "producer", "codec on append; cleaning retains the codec of each batch",
           "compression.type", choices=("uncompressed", *CODECS[:0:-1], "producer"), safer="latest"),
    *map(_level, filter(lambda codec: codec.levels, TABLE)),
    _topic("message.timestamp.type", "string", "CreateTime", "type on append; cleaning retains the type of each batch",
           "log.message.timestamp.type", choices=("CreateTime", "LogAppendTime"), safer="latest"),
    _topic("message.format.version", "version", None, "format in which a broker before 3.0 stores and sends messages",
           "log.message.format.version", safer="older"),
    _topic("flush.messages", "long", LONG_MAX, "number of messages after which a broker flushes",
           "log.flush.interval.messages", minimum=1, safer="latest"),
    _topic("flush.ms", "long", LONG_MAX, "time after which a broker flushes", *_FLUSH, minimum=0, safer="latest"),
    _topic("local.retention.ms", "long", -2, "age up to which segments of a tiered topic are retained locally",
           "log.local.retention.ms", minimum=-2, safer="latest"),
    _topic("local.retention.bytes", "long", -2, "bytes of a partition of a tiered topic that are retained locally",
           "log.local.retention.bytes", minimum=-2, safer="latest"),
    _topic("remote.storage.enable", "boolean", False, "whether the topic is tiered", safer="true"),
    _topic("unclean.leader.election.enable", "boolean", False, "whether a replica that is not in sync may lead",
           "unclean.leader.election.enable", safer="true"),
)

BROKER_KEYS = (
    _broker("process.roles", "list", None, "roles of a node with KRaft; absent with ZooKeeper"),
    _broker("inter.broker.protocol.version", "version", None, "below 3.0, message.format.version has an effect"),
    _broker("log.cleaner.enable", "boolean", True, "whether the broker compacts"),
    _broker("log.cleaner.threads", "int", 1, "number of the broker's cleaner threads", minimum=0),
    _broker("log.cleaner.dedupe.buffer.size", "long", 134_217_728, "bytes of the broker's offset maps"),
    _broker("log.cleaner.io.buffer.size", "int", 524_288, "bytes of the broker's I/O buffers", minimum=0),
    _broker("log.cleaner.io.buffer.load.factor", "double", 0.9, "maximum load factor of the broker's offset maps"),
    _broker("log.cleaner.io.max.bytes.per.second", "double", float_info.max, "maximum I/O rate of the cleaner"),
    _broker("log.cleaner.backoff.ms", "long", 15_000, "pause when no log is to be cleaned", minimum=0),
    _broker("log.dirs", "list", None, "data directories"),
    _broker("log.dir", "list", ("/tmp/kafka-logs",), "data directories if log.dirs is not set"),
    Key("node.id", "int", None, "id of the broker", ("node.id", "broker.id"), "broker", "latest", minimum=0),
    _broker("metadata.log.dir", "string", None, "directory of the metadata log, if not the first of log.dirs"),
    _broker("log.retention.check.interval.ms", "long", 300_000, "interval of retention checks", minimum=1),
    _broker("log.flush.offset.checkpoint.interval.ms", "int", 60_000, "interval of recovery point checkpoints",
            minimum=0),
    _broker("log.flush.start.offset.checkpoint.interval.ms", "int", 60_000, "interval of log start checkpoints",
            minimum=0),
    _broker("replica.high.watermark.checkpoint.interval.ms", "long", 5000, "interval of high watermark checkpoints"),
    _broker("num.recovery.threads.per.data.dir", "int", 2, "threads that load and close logs", minimum=1),
    _broker("producer.id.expiration.ms", "int", 86_400_000, "idle time after which a producer id expires",
            minimum=1, safer="larger"),
    _broker("transactional.id.expiration.ms", "int", 604_800_000,
            "idle time after which a producer id expires, before Kafka 3.4", minimum=1, safer="larger"),
    _broker("producer.id.expiration.check.interval.ms", "int", 600_000, "interval of checks for expired producer ids",
            minimum=1),
    _broker("log.initial.task.delay.ms", "long", 30_000, "delay of background tasks", minimum=0),
)
# fmt: on

# Settings that keytail does not use, each with the flag that has a similar effect; empty if there is no such flag.
NOT_USED = {
    "file.delete.delay.ms": "--keep-originals",
    "log.cleaner.threads": "--master",
    "log.cleaner.dedupe.buffer.size": "--map-memory",
    "log.cleaner.io.buffer.load.factor": "--map-memory",
    "log.cleaner.io.max.bytes.per.second": "--throttle",
} | dict.fromkeys(
    (
        "segment.jitter.ms", "preallocate", "flush.messages", "flush.ms", "local.retention.ms", "local.retention.bytes",
        "log.cleaner.enable", "log.cleaner.io.buffer.size", "log.cleaner.backoff.ms",
        "log.retention.check.interval.ms", "log.flush.offset.checkpoint.interval.ms",
        "log.flush.start.offset.checkpoint.interval.ms", "replica.high.watermark.checkpoint.interval.ms",
        "num.recovery.threads.per.data.dir", "producer.id.expiration.check.interval.ms", "log.initial.task.delay.ms",
    ),
    "",
)  # fmt: skip


def not_used(name: str) -> str:
    """Return "not used", with the flag that has a similar effect, for a setting that keytail does not use; "" for
    others."""
    if name not in NOT_USED:
        return ""
    return f"not used, see {NOT_USED[name]}" if NOT_USED[name] else "not used"


# The smallest segment.bytes or log.segment.bytes with which Kafka 4.1 and later start without an error.
SEGMENT_BYTES_OF_4_1 = 1_048_576

KEYS = {key.name: key for key in TOPIC_KEYS + BROKER_KEYS}
# Broker settings that affect what cleaning retains: the command line may set them, too.
COMMAND_LINE_BROKER_KEYS = frozenset(key.name for key in BROKER_KEYS if key.safer != "latest")


def file_names() -> Iterator[str]:
    """Yield every name whose value is kept from a broker's file."""
    for key in KEYS.values():
        yield from key.broker_names


def parse(key: Key, text: str) -> Value:
    """Parse `text` as Kafka's ConfigDef does. Raises ValueError for a value that `key` does not allow."""
    text = text.strip()
    if key.kind == "list":
        items = tuple(re.split(r"\s*,\s*", text)) if text else ()
        repeated = len(set(items)) != len(items)
        if key.choices and (repeated or not set(items) <= set(key.choices)):
            raise ValueError(text)
        return items
    if key.kind == "string":
        if key.choices and text not in key.choices:
            raise ValueError(text)
        return text
    if key.kind == "version":
        if not re.fullmatch(r"\d{1,4}(\.\d{1,4}){1,3}(-IV\d{1,4})?", text, re.ASCII):
            raise ValueError(text)
        return text
    if key.kind == "boolean":
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    return _number(key, text)


def _number(key: Key, text: str) -> int | float:
    value: int | float
    if key.kind == "double":
        if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII):
            raise ValueError(text)
        value = float(text)
    else:
        value = _whole_number(text, key.kind)
    too_low = key.minimum is not None and value < key.minimum and value not in key.also
    if too_low or (key.maximum is not None and value > key.maximum):
        raise ValueError(text)
    return value


def _whole_number(text: str, kind: str) -> int:
    # Python's int also accepts blanks, underscores and digits of other alphabets.
    if not re.fullmatch(r"[+-]?\d+", text, re.ASCII):
        raise ValueError(text)
    low, high = _LIMITS[kind]
    if not low <= int(text) <= high:
        raise ValueError(text)
    return int(text)


def version_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in a version, with the number of an interim version (`-IV0`) last."""
    return tuple(map(int, re.findall(r"\d+", text)))


def parse_broker(key: Key, name: str, text: str) -> Value:
    """Parse the text of `name` in a broker's file; return the value in the unit of `key`. Raises ValueError for a value
    that is not allowed.

    A negative number of hours or minutes means "without limit", as in the broker.
    """
    unit_ms = _UNIT_MS.get(name.rpartition(".")[2])
    if unit_ms is None:
        return parse(key, text)
    count = _whole_number(text.strip(), "int")
    return parse(key, str(count * unit_ms if count >= 0 else -1))


def right_name(name: str) -> str | None:
    """Return the key that `name` most likely means: the topic setting that a broker's name sets, or the nearest
    spelling.
    """
    meant = {broker_name: key.name for key in TOPIC_KEYS for broker_name in key.broker_names}
    meant |= {key_name: key_name for key_name in KEYS}
    meant |= {key_name.replace(".", "_"): key_name for key_name in KEYS}
    near = get_close_matches(name.lower(), list(meant), n=1)
    return meant.get(name.lower()) or (meant[near[0]] if near else None)
