"""All record types of Kafka's internal topics, of each version, decoded by Kafka and by keytail.

The bytes are encoded with keytail's tables of fields: if a table is wrong, Kafka decodes the bytes differently.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from keytail.dump.decoder_classes import ClassDecoder, decoder_of_class
from keytail.format.decoders import CLUSTER_METADATA, DECODERS, REMOTE_LOG_METADATA, FramedDecoder
from keytail.format.kafka_messages import CONSUMER_PROTOCOL, GROUP_VALUES
from keytail.format.messages import Field, Message
from tests.chance import SEED
from tests.format.pages import blocks
from tests.interop.kafka import Kafka
from tests.interop.test_dump import Ours, assert_same, kafkas
from tests.reference.batches import Rec, encode_batch

pytestmark = pytest.mark.interop

EACH = 12
NUMBERS = {"int8": "b", "int16": "h", "uint16": "H", "int32": "i", "int64": "q", "bool": "?"}
# Fields of which Kafka refuses most values.
VALID: dict[str, Callable[[random.Random], bytes]] = {
    "startOffset": lambda rng: struct.pack(">q", rng.randrange(5)),
    "endOffset": lambda rng: struct.pack(">q", rng.randrange(5, 2**40)),
    "segmentLeaderEpochs": lambda rng: b"\x03" + struct.pack(">iqbiqb", 7, 5, 0, rng.randrange(7), 2, 0),
    "remoteLogSegmentState": lambda rng: bytes([rng.randrange(4)]),
    "remotePartitionDeleteState": lambda rng: bytes([rng.randrange(3)]),
}
TEXTS = ["", "group-1", "größe", 'a "quoted"\\ name', "\x01\n\x1f\x7f", "鍵🔑"]


def uvarint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def structure(
    rng: random.Random, fields: tuple[Field, ...], version: int, flexible: bool, later: float = 0.0
) -> bytes:
    """Encode a structure; `later` is the probability of a tagged field of a later version. With it, Kafka also prints
    structures that are otherwise empty.
    """
    present = [field for field in fields if field.is_in(version)]
    out = b"".join(encoded(rng, field, version, flexible) for field in present if field.tag is None)
    if not flexible:
        return out
    tagged = {f.tag: encoded(rng, f, version, True) for f in present if f.tag is not None and rng.random() < 0.6}
    if rng.random() < later:
        tagged[9] = b"of a later version"
    content = b"".join(uvarint(tag) + uvarint(len(tagged[tag])) + tagged[tag] for tag in sorted(tagged))
    return out + uvarint(len(tagged)) + content


def encoded(rng: random.Random, field: Field, version: int, flexible: bool) -> bytes:
    kind = field.kind
    if field.name in VALID:
        return VALID[field.name](rng)
    if kind == "float64":
        return struct.pack(">d", rng.choice([0.0, 1.0, -0.25, 1048576.0, 12345678.5, 1e-5, 3e10]))
    if kind in NUMBERS:
        size = struct.calcsize(NUMBERS[kind])
        value = rng.choice([field.default or 0, 1, rng.getrandbits(8 * size - 1)])
        return struct.pack(">" + NUMBERS[kind], value)
    if kind == "uuid":
        return rng.choice([bytes(16), rng.randbytes(16)])
    # tagged fields that are null are not written
    is_null = field.nullable and field.tag is None and rng.random() < 0.4
    if kind == "struct":
        mark = struct.pack(">b", -1 if is_null else 1) if field.nullable else b""
        return mark if is_null else mark + structure(rng, field.parts, version, flexible)
    if kind == "array":
        items = [encoded(rng, field.parts[0], version, flexible) for _ in range(rng.randrange(3))]
        count, content = len(items), b"".join(items)
    else:
        content = rng.choice(TEXTS).encode() if kind == "string" else rng.randbytes(rng.randrange(5))
        count = len(content)
    if is_null:
        count, content = -1, b""
    return (uvarint(count + 1) if flexible else struct.pack(">h" if kind == "string" else ">i", count)) + content


def message(rng: random.Random, layout: Message, version: int) -> bytes:
    return structure(rng, layout.fields, version, version >= layout.flexible_from, later=0.2)


def subscription(rng: random.Random, data: bytes) -> bytes:
    """Return a group whose members use the consumer protocol, some with invalid bytes."""
    layout = GROUP_VALUES[2].message()
    version = rng.randrange(4)  # in flexible versions, lengths would be harder to write
    head = struct.pack(">h8siHH", 8, b"consumer", 3, 0, 0)
    if version >= 2:
        head += struct.pack(">q", 1_700_000_000_000)
    members = b""
    for _ in range(2):
        fields = layout.fields[-1].parts[0].parts
        for field in fields:
            if not field.is_in(version):
                continue
            if field.kind != "bytes":
                members += encoded(rng, field, version, False)
                continue
            protocol = CONSUMER_PROTOCOL[field.name].message()
            format_number = rng.randrange(4)
            content = struct.pack(">h", format_number) + message(rng, protocol, format_number)
            content = rng.choice([content, content, content[:3], b""])
            members += struct.pack(">i", len(content)) + content
    return struct.pack(">h", version) + head + struct.pack(">i", 2) + members


def records(rng: random.Random, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    [decoder] = [decoder for decoder in DECODERS if decoder.topic == topic]
    last_version = {"__consumer_offsets": {1: 4, 2: 4}, "__transaction_state": {0: 1}}.get(topic, {})
    found: list[tuple[bytes | None, bytes | None]] = [(b"\x00\x63", b"x"), (b"\x00", b"x"), (b"", None)]
    page = blocks("COORDINATOR.md")
    if topic == "__consumer_offsets":
        found += [(page["offset-key"], page[f"offset-value-{version}"]) for version in (3, 4)]
    elif topic == "__transaction_state":
        found += [(page["transaction-key"], page["transaction-value"])]
    for record_type in decoder.keys:
        for version in range(last_version.get(record_type, 0) + 1):
            for _ in range(EACH):
                key = struct.pack(">h", record_type) + message(rng, decoder.keys[record_type].message(), 0)
                value = struct.pack(">h", version) + message(rng, decoder.values[record_type].message(), version)
                found.append((key, value if rng.random() < 0.9 else None))
                if topic == "__consumer_offsets" and record_type == 2:
                    found.append((key, subscription(rng, value)))
    return found


@pytest.mark.parametrize(
    ("topic", "flag"),
    [
        ("__consumer_offsets", "--offsets-decoder"),
        ("__transaction_state", "--transaction-log-decoder"),
        ("__share_group_state", "--share-group-state-decoder"),
    ],
)
def test_every_type_of_every_version_is_decoded_as_by_kafka(
    kafka: Kafka, tmp_path: Path, topic: str, flag: str
) -> None:
    rng = random.Random(f"{SEED}-{topic}")
    found = records(rng, topic)
    log = tmp_path / f"{0:020d}.log"
    log.write_bytes(encode_batch([Rec(i, 0, key, value) for i, (key, value) in enumerate(found)]))
    theirs, ours = kafkas(kafka, [log], (flag,)), Ours([log], (flag,))
    try:
        assert theirs.status == 0
        opened = [line for line in ours.out.splitlines() if "payload: {" in line or "<DELETE>" in line]
        assert len(opened) == len(found) - 3
        # The text of errors in a key is keytail's own.
        assert_same(*(text.replace("skipping. ", "skipping.\n") for text in (theirs.out, ours.out)))
    except AssertionError as difference:
        difference.add_note(f"KEYTAIL_SEED={SEED}")
        raise


@pytest.mark.parametrize("decoder", [CLUSTER_METADATA, REMOTE_LOG_METADATA], ids=lambda decoder: decoder.topic)
def test_framed_records_are_decoded_as_by_kafka(kafka: Kafka, tmp_path: Path, decoder: FramedDecoder) -> None:
    rng = random.Random(f"{SEED}-{decoder.topic}")
    values = [
        b"".join(map(uvarint, (1, record_type, version))) + message(rng, definition.message(), version)
        for record_type, definition in decoder.values.items()
        for version in range(definition.newest_version + 1)
        for _ in range(EACH)
    ]
    wrong = [b"\x00\x02\x00", b"\x01\x7f\x00", values[0] + b"\x00", values[0][:-1], b"", None]
    log = tmp_path / f"{0:020d}.log"
    log.write_bytes(encode_batch([Rec(i, 0, None, value) for i, value in enumerate([*values, *wrong])]))
    theirs, ours = kafkas(kafka, [log], (decoder.flag,)), Ours([log], (decoder.flag,))
    try:
        assert theirs.status == 0
        assert ours.out.count(", skipping. ") == len(wrong)
        # The text of errors is keytail's own.
        assert_same(*(re.sub("skipping[.] .*", "skipping.", text) for text in (theirs.out, ours.out)))
    except AssertionError as difference:
        difference.add_note(f"KEYTAIL_SEED={SEED}")
        raise


@pytest.mark.parametrize(("key", "payload"), [("Integer", "Long"), ("String", "Integer"), ("Long", None)])
def test_classes_decode_as_in_kafka(kafka: Kafka, tmp_path: Path, key: str, payload: str | None) -> None:
    rng = random.Random(SEED)
    log = tmp_path / f"{0:020d}.log"
    found = [Rec(i, 0, rng.choice([rng.randbytes(8), None]), rng.choice([rng.randbytes(9), None])) for i in range(40)]
    log.write_bytes(encode_batch(found))
    package = "org.apache.kafka.tools.api."
    given = {"--key-decoder-class": f"{package}{key}Decoder"}
    if payload is not None:
        given["--value-decoder-class"] = f"{package}{payload}Decoder"
    functions = [decoder_of_class(flag, name) for flag, name in given.items()]
    decoder = ClassDecoder(functions[0], functions[1] if payload else None)
    flags = [word for flag in given.items() for word in flag]
    assert_same(kafkas(kafka, [log], flags).out, Ours([log], (), decoder).out)
