"""The code reads and writes the bytes printed in the format pages, and the rules that sources cite exist."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import keytail
from keytail.format import batch, index
from keytail.format.batch import BATCH_HEADER, CRC_START, DELETE_HORIZON, HEADER_BYTES, LENGTH_PREFIX_BYTES
from keytail.format.codecs.table import CODECS
from keytail.format.compression import compress, decompress
from keytail.format.control import ControlRecord, ControlType, parse_control_record
from keytail.format.coordinator import OFFSETS, TRANSACTIONS
from keytail.format.names import parse_file_name, parse_partition_dir
from keytail.format.producers import ProducerEntry, encode_snapshot, parse_snapshot
from keytail.format.record import Record, decode_records, decode_varint
from keytail.kernels import batch_header
from keytail.kernels.native import crc32c
from tests.format.pages import blocks
from tests.format.records import encode_record
from tests.reference.batches import decode_log
from tests.reference.varints import encode_varint

BATCHES = ["two-records", "append-time", "commit-marker", "emptied", "tombstone-with-horizon"]
T0 = 1700000000000


def _parts(data: bytes) -> tuple[np.void, bytes]:
    return np.frombuffer(data[:HEADER_BYTES], BATCH_HEADER)[0], data[HEADER_BYTES:]


def test_every_block_of_the_batch_page_is_used() -> None:
    assert sorted(blocks("BATCH.md")) == sorted([*BATCHES, "varints"])


@pytest.mark.parametrize("name", BATCHES)
def test_headers_of_the_batch_page_are_parsed(name: str) -> None:
    data = blocks("BATCH.md")[name]
    header, _ = _parts(data)
    assert header["batch_length"] + LENGTH_PREFIX_BYTES == len(data)
    assert header["magic"] == 2
    assert header["crc"] == crc32c(np.frombuffer(data, np.uint8), CRC_START, len(data) - CRC_START)
    (expected,) = decode_log(data)
    assert (expected.base_offset, expected.base_timestamp) == (header["base_offset"], header["base_timestamp"])
    assert (expected.producer_id, expected.base_sequence) == (header["producer_id"], header["base_sequence"])


@pytest.mark.parametrize("name", BATCHES)
def test_records_of_the_batch_page_are_written_back_unchanged(name: str) -> None:
    header, block = _parts(blocks("BATCH.md")[name])
    records = decode_records(block, int(header["record_count"]))
    assert b"".join(map(encode_record, records)) == block


def test_the_batch_of_two_records_is_parsed() -> None:
    header, block = _parts(blocks("BATCH.md")["two-records"])
    assert header.tolist()[:5] == (100, 76, 5, 2, 0x291AD797)
    assert header.tolist()[5:] == (0, 1, T0, T0 + 5, 4001, 3, 7, 2)
    assert decode_records(block, 2) == [
        Record(0, 0, b"k1", b"v1", ((b"h", b"x"),)),
        Record(5, 1, b"k2", None, ((b"n", None),)),
    ]


def test_records_of_the_append_time_batch_have_its_timestamp() -> None:
    (batch,) = decode_log(blocks("BATCH.md")["append-time"])
    assert (batch.base_offset, batch.last_offset) == (10, 15)
    assert [(r.offset, r.timestamp, r.key, r.value) for r in batch.records] == [
        (10, T0 + 50, b"", b"x"),
        (14, T0 + 50, None, b""),
    ]


def test_the_commit_marker_is_parsed() -> None:
    _, block = _parts(blocks("BATCH.md")["commit-marker"])
    (record,) = decode_records(block, 1)
    assert parse_control_record(record.key, record.value) == ControlRecord(ControlType.COMMIT, 9)


def test_the_tombstone_has_a_delete_horizon() -> None:
    header, block = _parts(blocks("BATCH.md")["tombstone-with-horizon"])
    assert header["attributes"] == DELETE_HORIZON
    (record,) = decode_records(block, 1)
    assert header["base_timestamp"] == 1700086500000
    assert (record.timestamp_delta, record.value) == (-86499995, None)


def test_varints_of_the_page_are_encoded_and_decoded() -> None:
    data, values = blocks("BATCH.md")["varints"], [0, -1, 1, 63, -64, 64, -65, 300, 2**31 - 1, -(2**31)]
    assert b"".join(map(encode_varint, values)) == data
    at = 0
    for value in values:
        found, at = decode_varint(data, at)
        assert found == value


def test_index_entries_of_the_page_round_trip() -> None:
    page = blocks("INDEX.md")
    offsets = index.parse_offset_index(page["offset-index"])
    assert offsets.tolist() == [(1, 0), (50, 4200)]
    assert offsets.astype(index.OFFSET_ENTRY).tobytes() == page["offset-index"]
    times = index.parse_time_index(page["time-index"])
    assert times.tolist() == [(T0 + 5, 1), (T0 + 50, 50)]
    assert times.astype(index.TIME_ENTRY).tobytes() == page["time-index"]
    aborted = index.parse_txn_index(page["txn-index"])
    assert aborted.tolist() == [(0, 4001, 100, 102, 103)]
    assert index.encode_txn_index(aborted) == page["txn-index"]


def test_snapshots_of_the_page_round_trip() -> None:
    page = blocks("SNAPSHOT.md")
    entries = [
        ProducerEntry(4001, 3, 8, 101, 1, T0 + 5, -1, 100),
        ProducerEntry(7, 2, -1, -1, 0, T0 + 10, 9, -1),
    ]
    assert parse_snapshot(page["two-producers"]) == entries
    assert encode_snapshot(entries) == page["two-producers"]
    assert parse_snapshot(page["no-producers"]) == []
    assert encode_snapshot([]) == page["no-producers"]


@pytest.mark.parametrize("codec", range(5))
def test_compressed_blocks_of_the_page_are_decompressed(codec: int) -> None:
    packed = blocks("COMPRESSION.md")[CODECS[codec]]
    _, block = _parts(blocks("BATCH.md")["two-records"])
    assert bytes(decompress(codec, packed)) == block
    if CODECS[codec] in ("none", "snappy", "lz4", "zstd"):  # the block is one literal for all encoders
        assert compress(codec, block) == packed


def test_text_files_of_the_page_have_the_printed_bytes() -> None:
    page = blocks("NAMES.md")
    assert page["cleaner-offset-checkpoint"] == page["cleaner-offset-checkpoint-bytes"]
    assert page["partition-metadata"] == b"version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ"
    assert page["leader-epoch-checkpoint"].splitlines() == [b"0", b"2", b"0 0", b"5 100"]


def test_names_in_examples_are_parsed() -> None:
    text = _page("NAMES.md")
    names = re.findall(r"`(0{10}[^` ]+)`", text)
    assert len(names) == 5
    assert {parse_file_name(name).kind for name in names} == {"live", "swap", "deleted", "scratch", "cleaned"}
    assert parse_partition_dir("orders-12.0a1b2c3d4e5f60718293a4b5c6d7e8f9-delete") is not None
    assert "orders-12.0a1b2c3d4e5f60718293a4b5c6d7e8f9-delete" in text


def test_coordinator_records_of_the_page_are_decoded() -> None:
    page = blocks("COORDINATOR.md")
    key = '{"type":"1","data":{"group":"shop","topic":"orders","partition":2}}'
    commit = '"offset":150,"leaderEpoch":7,"metadata":"","commitTimestamp":1700000000000'
    third = f'{{"version":"3","data":{{{commit}}}}}'
    assert OFFSETS.text(page["offset-key"], page["offset-value-3"], 0) == (key, third)
    with_id = f'{{"version":"4","data":{{{commit},"topicId":"AAECAwQFBgcICQoLDA0ODw"}}}}'
    assert OFFSETS.text(page["offset-key"], page["offset-value-4"], 0) == (key, with_id)
    assert OFFSETS.text(page["offset-key"], None, 0) == (key, "<DELETE>")
    assert TRANSACTIONS.text(page["transaction-key"], page["transaction-value"], 0) == (
        '{"type":"0","data":{"transactionalId":"billing-1"}}',
        '{"version":"1","data":{"producerId":4001,"producerEpoch":3,"transactionTimeoutMs":60000,'
        '"transactionStatus":1,"transactionPartitions":[{"topic":"orders","partitionIds":[2]}],'
        '"transactionLastUpdateTimestampMs":1700000000005,"transactionStartTimestampMs":1700000000000,'
        '"clientTransactionVersion":2}}',
    )


def _page(name: str) -> str:
    [path] = Path(keytail.__file__).parent.rglob(name)
    return path.read_text("utf-8")


PAGES = sorted({path.name for path in Path(keytail.__file__).parent.rglob("*.md")})


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_wrapped_at_120_columns(page: str) -> None:
    long = [line for line in _page(page).splitlines() if len(line) > 120 and not line.startswith("|")]
    assert not long


def test_rules_cited_in_sources_exist() -> None:
    """Each reference such as `CLEANING.md 5.5` or `INDEX.md, "When an entry is written"` in a source names an existing
    rule or heading.
    """
    numbers, headings = {}, {}
    for page in PAGES:
        text = _page(page)
        titles = re.findall(r"^##+ (?:([0-9.]+?)\.? )?(.+?)(?: \(Kafka .*\))?$", text, re.MULTILINE)
        rows = re.findall(r"^\| ([0-9]+\.[0-9a-z]+) \|", text, re.MULTILINE)
        items = _numbered_items(text)
        numbers[page] = {number for number, _ in titles} | set(rows) | items | {row.rstrip("ab") for row in rows}
        headings[page] = {title for _, title in titles}
    sources = [*Path(keytail.__file__).parent.rglob("*.py"), *Path(keytail.__file__).parent.rglob("*.md")]
    cited = 0
    for source in sources:
        text = source.read_text("utf-8")
        for page, number in re.findall(r"([A-Z]+\.md)`? ([0-9]+(?:\.[0-9]+)*[ab]?)", text):
            cited += 1
            assert number in numbers[page], f"{source.name} cites {page} {number}"
        for page, title in re.findall(r"([A-Z]+\.md)`?, \"([^\"]+)\"", text):
            cited += 1
            assert title in headings[page], f"{source.name} cites {page}, {title!r}"
    assert cited > 10


def _numbered_items(text: str) -> set[str]:
    found, section = set(), ""
    for line in text.splitlines():
        if heading := re.match(r"##+ ([0-9.]+?)\.? ", line):
            section = heading[1]
        elif item := re.match(r"([0-9]+)\. ", line):
            found.add(f"{section}.{item[1]}")
    return found


def test_kernels_have_the_positions_of_the_header() -> None:
    names = {"batch_length": "BATCH_LENGTH", "partition_leader_epoch": "LEADER_EPOCH"}
    assert BATCH_HEADER.fields is not None
    for name, (_, position, *_) in BATCH_HEADER.fields.items():
        if name != "base_offset":
            assert getattr(batch_header, names.get(name, name.upper())) == position, name
    assert (batch_header.HEADER_BYTES, batch_header.LENGTH_PREFIX_BYTES) == (HEADER_BYTES, LENGTH_PREFIX_BYTES)


@pytest.mark.parametrize("name", ["CODEC_MASK", "LOG_APPEND_TIME", "TRANSACTIONAL", "CONTROL", "DELETE_HORIZON"])
def test_kernels_have_the_bits_of_the_attributes(name: str) -> None:
    assert getattr(batch_header, name) == getattr(batch, name)
    assert getattr(batch_header, name) & batch_header.KNOWN_ATTRIBUTES == getattr(batch_header, name)


def test_kernels_have_the_numbers_of_the_codecs() -> None:
    assert [getattr(batch_header, name.upper()) for name in CODECS] == [*range(len(CODECS))]
    assert len(CODECS) - 1 == batch_header.MAX_CODEC
