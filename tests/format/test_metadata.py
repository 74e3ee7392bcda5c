"""Metadata records: Kafka's own bytes, those of the reference encoder, and arbitrary other bytes."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.format import metadata as m
from keytail.format.names import parse_file_name, parse_metadata_snapshot
from tests.format.pages import blocks
from tests.reference import metadata as model

ORDERS = "xJzPFbPLR5CO-O_4yYN9wQ"
PAGE = blocks("METADATA.md")
EXPECTED: dict[str, m.MetadataRecord] = {
    "topic": m.TopicRecord("orders", ORDERS),
    "topic-unknown-tag": m.TopicRecord("orders", ORDERS),
    "partition-v0": m.PartitionRecord(ORDERS, 3, (1, 2), (2,), 5),
    "partition-v1": m.PartitionRecord(ORDERS, 3, (1, 2), (2,), 5),
    "partition-v2": m.PartitionRecord(ORDERS, 3, (1, 2), (2,), 5, (1,)),
    "partition-change": m.PartitionChangeRecord(ORDERS, 3, (2, 7), (2, 7), has_leader=True),
    "partition-change-of-nothing": m.PartitionChangeRecord(ORDERS, 3, None, None),
    "topic-config": m.ConfigRecord(2, "orders", "cleanup.policy", "compact"),
    "topic-config-removed": m.ConfigRecord(2, "orders", "cleanup.policy", None),
    "cluster-config": m.ConfigRecord(4, "", "log.retention.ms", "-1"),
    "broker-config": m.ConfigRecord(4, "1", "producer.id.expiration.ms", "1000"),
    "remove-topic": m.RemoveTopicRecord(ORDERS),
    "feature-level": m.FeatureLevelRecord("metadata.version", 29),
    "begin": m.BeginTransaction(),
    "end": m.EndTransaction(),
    "abort": m.AbortTransaction(),
    "no-op": m.OtherRecord(20),
    "register-broker": m.RegisterBrokerRecord(0, 1, 11),
}
TAKEN_APART = sorted(name for name, record in EXPECTED.items() if not isinstance(record, m.OtherRecord))


def test_every_block_of_the_page_is_used() -> None:
    assert sorted(PAGE) == sorted([*EXPECTED, "snapshot-header-value"])


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_bytes_of_kafkas_classes_are_parsed(name: str) -> None:
    assert m.parse_record(PAGE[name]) == EXPECTED[name]


@pytest.mark.parametrize("name", TAKEN_APART)
def test_truncation_at_any_byte_and_any_extra_byte_are_errors(name: str) -> None:
    for end in range(len(PAGE[name])):
        with pytest.raises(ValueError, match="are left"):
            m.parse_record(PAGE[name][:end])
    with pytest.raises(ValueError, match="1 bytes follow the last field"):
        m.parse_record(PAGE[name] + b"\0")


def test_a_registration_that_cannot_be_read_is_skipped() -> None:
    for end in range(3, len(PAGE["register-broker"])):
        found = m.parse_record(PAGE["register-broker"][:end])
        assert found in (m.OtherRecord(0), m.RegisterBrokerRecord(0, 1, 11))
    assert m.parse_record(PAGE["register-broker"][:20]) == m.OtherRecord(0)


def as_newer(data: bytes, version: int, extra: bytes) -> bytes:
    """Return the record with a later version number and additional fields at its end."""
    assert data[0] == 1
    assert data[2] < 0x80, "type and version must be one byte each"
    return bytes([data[0], data[1], version]) + data[3:] + extra


@pytest.mark.parametrize("name", sorted({*TAKEN_APART} - {"partition-v0", "partition-v1"}))
def test_the_leading_fields_of_a_newer_version_are_read(name: str) -> None:
    known = EXPECTED[name]
    assert not isinstance(known, m.NewerRecord | m.OtherRecord)
    newer = m.parse_record(as_newer(PAGE[name], 7, b"\x01\x02\x03"))
    # its changes are in tagged fields, which may begin elsewhere in a newer version
    if isinstance(known, m.PartitionChangeRecord):
        known = m.PartitionChangeRecord(known.topic_id, known.partition, None, None)
    if isinstance(known, m.PartitionRecord):
        known = replace(known, eligible=())
    assert newer == m.NewerRecord(PAGE[name][1], 7, known)


@pytest.mark.parametrize(
    "data",
    [
        model.frame(2, 1, struct.pack(">i", 77) + model.text("orders") + model.topic_uuid(1)),
        model.frame(4, 1, b"\x63" + model.text("orders") + model.text("retention.ms") + model.text("1")),
        model.frame(4, 1, b"\x02" + model.text("not a topic") + model.text("retention.ms") + model.text("1")),
        model.frame(4, 1, b"\x02" + model.text("orders") + model.text("\x01") + model.text("1")),
    ],
)
def test_a_newer_version_with_invalid_known_fields_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"has unsupported version 1|is null"):
        m.parse_record(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "has no value"),
        (b"\x00\x02\x00", "unsupported frame version 0, expected 1"),
        (b"\x02\x02\x00", "unsupported frame version 2, expected 1"),
        (b"\x01\x80\x80\x02\x00", "type 32768 is above 32767"),
        (b"\x01\x80\x80\x80\x80\x80\x00", "varint is longer than 5 bytes"),
        (model.frame(2, 0, model.text(None) + bytes(16)), "name is null"),
        (model.frame(3, 0, bytes(20) + b"\0"), "replicas is null"),
        (model.frame(9, 0, bytes(16), b"\x00\x00"), "1 bytes follow the last field"),
    ],
)
def test_invalid_records_are_errors(data: bytes | None, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        m.parse_record(data)


names = st.text(st.characters(codec="utf-8"), max_size=300)
numbers = st.integers(-(2**31), 2**31 - 1)
lists = st.lists(numbers, min_size=1, max_size=200).map(tuple)


@settings(deadline=None)
@given(names, st.integers(0, 255), numbers, lists, names, st.none() | names)
def test_records_of_the_reference_encoder_are_read(
    name: str, number: int, partition: int, replicas: tuple[int, ...], key: str, value: str | None
) -> None:
    created = m.parse_record(model.topic(name, number))
    assert isinstance(created, m.TopicRecord)
    assert created.name == name
    topic_id = created.topic_id
    assert m.parse_record(model.remove(number)) == m.RemoveTopicRecord(topic_id)
    made = m.parse_record(model.partition(number, partition, replicas))
    assert made == m.PartitionRecord(topic_id, partition, replicas, replicas, 0)
    changed = m.parse_record(model.change(number, partition, replicas))
    assert changed == m.PartitionChangeRecord(topic_id, partition, replicas, None)
    changed = m.parse_record(model.change(number, partition, in_sync=replicas))
    assert changed == m.PartitionChangeRecord(topic_id, partition, None, replicas)
    configured = m.parse_record(model.config(4, name, key, value))
    assert configured == m.ConfigRecord(4, name, key, value)


@settings(deadline=None)
@given(st.sampled_from(TAKEN_APART), st.data())
def test_changed_bytes_give_a_record_or_an_error(name: str, data: st.DataObject) -> None:
    changed = bytearray(PAGE[name])
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        m.parse_record(bytes(changed))
    except ValueError as error:
        assert str(error)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_record_or_an_error(data: bytes) -> None:
    try:
        m.parse_record(b"\x01" + data)
    except ValueError as error:
        assert str(error)


def test_the_header_of_a_snapshot_is_read() -> None:
    value = PAGE["snapshot-header-value"]
    assert m.parse_snapshot_header(value) == model.T0
    for bad in (None, b"", value[:9], b"\xff" + value[1:]):
        with pytest.raises(ValueError, match="snapshot header has"):
            m.parse_snapshot_header(bad)


def test_the_topic_id_in_partition_metadata_is_read() -> None:
    assert m.parse_topic_id(blocks("NAMES.md")["partition-metadata"]) == "A" * 21 + "Q"
    assert m.parse_topic_id(f"version: 0\ntopic_id: {ORDERS}\n".encode()) == ORDERS
    for bad in (b"", b"version: 0\n", b"version: 0\ntopic_id: short", b"topic_id: x\nversion: 0", b"\xff\xfe"):
        with pytest.raises(ValueError, match=r"."):
            m.parse_topic_id(bad)


def test_names_of_snapshots_are_parsed() -> None:
    name = "00000000000000000120-0000000003.checkpoint"
    assert parse_metadata_snapshot(name) == (120, 3)
    assert parse_file_name(name).kind == "other"
    for other in (f"{name}.deleted", f"{name}.part", "120-3.checkpoint", f"9{name[1:]}", "bootstrap.checkpoint"):
        assert parse_metadata_snapshot(other) is None
