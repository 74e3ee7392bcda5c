"""Messages of magic 0 and 1 that are read and refused, compared with the reference model and the bytes of the page."""

from __future__ import annotations

import contextlib
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.format import legacy
from keytail.format.batch import BATCH_TABLE, LOG_APPEND_TIME, NOT_COPIED
from keytail.format.codecs.errors import TooLarge
from keytail.kernels import batches as batch_kernels
from keytail.kernels import legacy as kernels
from keytail.kernels import records as record_kernels
from tests.chance import draws
from tests.format.pages import blocks
from tests.kernels.guard import guarded, guarded_front
from tests.reference.batches import Batch, Rec, decode_records, encode_batch
from tests.reference.legacy import (
    decode_any_log,
    decode_message,
    encode_message,
    encode_single,
    encode_wrapper,
    is_uniform,
    wrong_header_checksum,
)

T0 = 1700000000000
GZIP, SNAPPY, LZ4 = 1, 2, 3

content = st.one_of(st.none(), st.binary(max_size=3), st.binary(min_size=60, max_size=70))
timestamps = st.one_of(st.just(-1), st.integers(-(2**63), 2**63 - 1), st.integers(T0, T0 + 1000))


@st.composite
def messages(draw: Any) -> tuple[int, list[Rec], bytes]:
    """Draw magic, records and bytes of a message, plain or compressed; compressed messages have one magic or both."""
    magic = draw(st.integers(0, 1))
    offset = draw(st.one_of(st.integers(0, 9), st.integers(0, 2**62)))
    records = []
    for _ in range(draw(st.integers(1, 5))):
        time = draw(timestamps)
        records.append(Rec(offset, time, draw(content), draw(content)))
        offset += draw(st.sampled_from([1, 1, 2, 70, 2**20]))
    codec = draw(st.integers(0, 3))
    append_time = draw(timestamps) if magic and draw(st.booleans()) else None
    if codec == 0:
        rec = records[0]
        return magic, [seen(rec, magic, None)], encode_single(rec, magic=magic, append_time=append_time is not None)
    magics = draw(st.lists(st.integers(0, 1), min_size=len(records), max_size=len(records)))
    if draw(st.booleans()):
        magics = [magic] * len(records)
    data = encode_wrapper(
        records,
        codec,
        magic=magic,
        inner_magics=magics,
        append_time=append_time,
        timestamp=77 if append_time is None else append_time,
    )
    return magic, [seen(rec, kind, append_time) for rec, kind in zip(records, magics, strict=True)], data


def seen(rec: Rec, magic: int, append_time: int | None) -> Rec:
    """Return the record as a consumer receives it."""
    time = -1 if magic == 0 else rec.timestamp if append_time is None else append_time
    return Rec(rec.offset, time, rec.key, rec.value)


def read(data: bytes, **shifts: int) -> tuple[legacy.LegacyBatch, list[Rec]]:
    """Return summary and records from both functions, read from memory that ends with the message."""
    raw = guarded(b"\xff" + data)
    batch = legacy.summarize(raw, 1, len(data))
    base_offset = batch.base_offset + shifts.get("offset", 0)
    base_timestamp = wrap(batch.base_timestamp_ms + shifts.get("timestamp", 0))
    block = legacy.transcode(raw, 1, len(data), base_offset, base_timestamp)
    decoded = decode_records(block.tobytes(), batch.record_count, base_offset, base_timestamp)
    return batch, [Rec(r.offset, wrap(r.timestamp), r.key, r.value, r.headers) for r in decoded]


def wrap(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def table_of(data: bytes, position: int = 0) -> tuple[np.ndarray, np.ndarray]:
    raw = guarded(data)
    table, out = np.zeros(50, BATCH_TABLE), np.zeros(4, np.int64)
    batch_kernels.index_batches(raw, len(raw), position, -1, table, out)
    assert out[batch_kernels.CODE] == batch_kernels.OK
    return raw, table[: out[batch_kernels.ROWS]]


@pytest.mark.long
@settings(deadline=None, max_examples=draws(300))
@given(messages())
def test_summaries_and_records_equal_those_of_the_model(case: tuple[int, list[Rec], bytes]) -> None:
    magic, expected, data = case
    model = decode_message(data)
    assert list(model.records) == expected
    batch, records = read(data)
    assert records == expected
    assert (batch.base_offset, batch.last_offset) == (model.base_offset, model.last_offset)
    assert (batch.attributes, batch.record_count) == (model.attributes, model.record_count)
    assert (batch.base_timestamp_ms, batch.max_timestamp_ms) == (model.base_timestamp, model.max_timestamp)
    assert magic == model.magic


@settings(deadline=None, max_examples=draws(100))
@given(messages(), st.integers(-5, 5), st.integers(-(2**40), 2**40))
def test_deltas_are_relative_to_the_requested_offset_and_time(
    case: tuple[int, list[Rec], bytes], offset: int, time: int
) -> None:
    assert read(case[2], offset=offset, timestamp=time)[1] == case[1]


def sequence(cases: list[tuple[int, list[Rec], bytes]]) -> tuple[bytes, list[Batch]]:
    """Join the messages, except those whose offsets would decrease, and put v2 batches between them."""
    data, last = b"", -1
    for number, (_, records, item) in enumerate(cases):
        if records[0].offset > last:
            data, last = data + item, records[-1].offset
        if number % 2 and last < 2**60:
            data += encode_batch([Rec(last + 1, T0, b"k", b"v"), Rec(last + 2, T0, b"k", None)])
            last += 2
    return data, decode_any_log(data)


@settings(deadline=None, max_examples=draws(150))
@given(st.lists(messages(), min_size=1, max_size=8), st.booleans())
def test_rows_of_a_chunk_equal_the_batches_of_the_model(cases: list[Any], small_arena: bool) -> None:
    data, models = sequence(cases)
    raw, table = table_of(data, position=1000)
    before = table.copy()
    legacy.summarize_rows(raw, 1000, table)
    assert np.array_equal(table[table["magic"] == 2], before[table["magic"] == 2])
    for row, expected in zip(table, models, strict=True):
        assert row["base_offset"] == expected.base_offset and row["last_offset"] == expected.last_offset
        assert row["attributes"] & ~NOT_COPIED == expected.attributes and row["record_count"] == expected.record_count
        if row["magic"] < 2:
            at = int(row["position"]) - 1000
            message = data[at : at + int(row["size_bytes"])]
            assert bool(row["attributes"] & NOT_COPIED) == (not is_uniform(expected, message))
        assert row["base_timestamp_ms"] == expected.base_timestamp and row["max_timestamp_ms"] == expected.max_timestamp
    plain = (table["magic"] < 2) & (table["attributes"] & 7 == 0)
    where = np.where(np.arange(len(table)) % 3 == 2, record_kernels.CLOSED, record_kernels.IN_RAW).astype(np.int8)
    wanted = plain & (where != record_kernels.CLOSED)
    start, size = np.zeros(len(table), np.int64), np.zeros(len(table), np.int64)
    sizes = table["size_bytes"][wanted]
    arena = guarded(bytes(int(sizes.max(initial=0) if small_arena else sizes.sum())))
    done = 0
    for _ in range(len(table) + 1):
        first = done
        done, used = kernels.transcode_plain(raw, 1000, table, first, len(table), where, start, size, arena, 0)
        for row in range(first, done):
            if wanted[row]:
                assert where[row] == record_kernels.IN_ARENA
                block = arena[start[row] : start[row] + size[row]].tobytes()
                time = int(table["base_timestamp_ms"][row])
                assert decode_records(block, 1, int(table["base_offset"][row]), time) == list(models[row].records)
        assert used == size[first:done][wanted[first:done]].sum()
        if done == len(table):
            return
    raise AssertionError("with room for each single message, not all messages were transcoded")


K = Rec(50, 1000, b"a", b"1")
K3 = [Rec(50, 1000, b"a", b"1"), Rec(52, 1001, b"b", None), Rec(57, 1002, None, b"")]


def test_absolute_and_relative_offsets_are_read() -> None:
    for magic in (0, 1):
        batch, records = read(encode_wrapper(K3, GZIP, magic=magic))
        assert (batch.base_offset, batch.last_offset) == (50, 57)
        assert [rec.offset for rec in records] == [50, 52, 57]
    # Only the distances matter: offsets sent by a producer, or left by an old cleaner, do not begin at 0.
    for first in (-3, 2, 900):
        _, records = read(encode_wrapper(K3, GZIP, inner_offsets=[first, first + 2, first + 7], offset=1000))
        assert [rec.offset for rec in records] == [993, 995, 1000]


def test_relative_offsets_inside_a_message_at_offset_zero_begin_at_zero() -> None:
    batch, records = read(encode_wrapper(K3, GZIP, offset=0, inner_offsets=[0, 1, 2]))
    assert (batch.base_offset, batch.last_offset) == (0, 2)
    assert [rec.offset for rec in records] == [0, 1, 2]


def test_a_magic_0_message_may_end_after_its_last_inner_message() -> None:
    batch, _ = read(encode_wrapper(K3, SNAPPY, magic=0, offset=60))
    assert (batch.base_offset, batch.last_offset, batch.record_count) == (50, 60, 3)


def test_timestamps_of_inner_messages_with_another_magic_are_read() -> None:
    times = {}
    for magic, append_time in ((0, None), (1, None), (1, 5000)):
        data = encode_wrapper(K3, GZIP, magic=magic, inner_magics=[0, 1, 1], append_time=append_time)
        times[magic, append_time] = [rec.timestamp for rec in read(data)[1]]
    assert times == {(0, None): [-1, 1001, 1002], (1, None): [-1, 1001, 1002], (1, 5000): [-1, 5000, 5000]}


def test_attribute_bits_without_a_meaning_are_not_copied() -> None:
    assert read(encode_message(5, b"k", b"v", magic=0, attributes=0xF8))[0].attributes == 0
    assert read(encode_message(5, b"k", b"v", magic=1, attributes=0xF8))[0].attributes == LOG_APPEND_TIME
    raw, table = table_of(encode_message(5, b"k", b"v", magic=0, attributes=0xF8))
    legacy.summarize_rows(raw, 0, table)
    assert table["attributes"].tolist() == [0]


def test_a_truncated_last_inner_message_and_bytes_after_a_value_are_ignored() -> None:
    inner = encode_message(0, b"a", b"1", tail=b"more")
    for cut in (1, 11, 12, 20):
        batch, records = read(encode_wrapper([K], GZIP, inner=inner + inner[:cut]))
        assert batch.record_count == 1
        assert records == [Rec(50, -1, b"a", b"1")]


def test_only_magic_0_may_have_a_wrong_lz4_header_checksum() -> None:
    right = encode_wrapper(K3, LZ4, magic=0, wrong_lz4_checksum=False)
    wrong = encode_wrapper(K3, LZ4, magic=0)
    assert wrong_header_checksum(bytes.fromhex("04224d186040")) == b"\x1a"
    assert right != wrong
    assert read(right)[1] == read(wrong)[1] == [Rec(r.offset, -1, r.key, r.value) for r in K3]
    with pytest.raises(ValueError, match="lz4"):
        read(encode_wrapper(K3, LZ4, magic=1, wrong_lz4_checksum=True))


INNER = encode_message(0, b"a", b"1")
WRONG = {
    "checksum": encode_message(50, b"a", b"1", crc=1),
    "checksum inside": encode_wrapper([K], GZIP, inner=INNER + encode_message(1, b"a", b"1", crc=1)),
    "no messages inside": encode_wrapper([K], GZIP, inner=b""),
    "only a truncated inner message": encode_wrapper([K], GZIP, inner=INNER[:-1]),
    "without a value": encode_message(50, None, None, attributes=GZIP),
    "zstd": encode_wrapper([K], 4),
    "codec 5": encode_message(50, None, b"x", attributes=5),
    "not gzip": encode_message(50, None, b"xxxx", attributes=GZIP),
    "compressed inside": encode_wrapper([K], GZIP, inner=INNER + encode_message(1, None, b"x", attributes=GZIP)),
    "magic inside": encode_wrapper([K], GZIP, inner=encode_message(0, b"a", b"1", magic=2)),
    "negative magic inside": encode_wrapper([K], GZIP, inner=encode_message(0, b"a", b"1", magic=-1)),
    "descending offsets": encode_wrapper(K3, GZIP, inner_offsets=[0, 0, 1]),
    "offset below the inner ones": encode_wrapper(K3, GZIP, offset=6),
    "offset below the absolute ones": encode_wrapper(K3, GZIP, magic=0, offset=56),
    "negative offset": encode_message(-1, b"a", b"1"),
    "negative offset inside": encode_wrapper(K3, GZIP, offset=5, inner_offsets=[-2, 0, 5]),
    "long span": encode_wrapper(K3, GZIP, offset=2**40, inner_offsets=[0, 1, 2**31]),
    "long span, absolute": encode_wrapper(K3, GZIP, magic=0, offset=2**40),
    "extreme offsets": encode_wrapper(K3[:2], GZIP, offset=2**62, inner_offsets=[-(2**63), 2**62]),
    "inner size": encode_wrapper([K], GZIP, inner=INNER + INNER[:8] + bytes(30)),
    "negative inner size": encode_wrapper([K], GZIP, inner=INNER + INNER[:8] + b"\xff" * 30),
    "short v1": encode_message(50, None, None, magic=0)[:12]
    + zlib.crc32(b"\1\0" + bytes(8)).to_bytes(4, "big")
    + b"\1\0"
    + bytes(8),
    "ends before the value": encode_message(50, b"abcd", None)[:12]
    + zlib.crc32(encode_message(50, b"abcdefgh", None)[16:34]).to_bytes(4, "big")
    + encode_message(50, b"abcdefgh", None)[16:34],
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_messages_are_refused_with_a_reason(name: str) -> None:
    data = WRONG[name]
    raw = guarded(data)
    with pytest.raises(ValueError, match=r"\w{4}"):
        legacy.summarize(raw, 0, len(data))
    with pytest.raises(ValueError, match=r"\w{4}"):
        legacy.transcode(raw, 0, len(data), 0, 0)
    with pytest.raises(ValueError):
        decode_message(data)
    good = encode_single(Rec(1, 5, b"k", b"v"))
    if name == "short v1" or name == "ends before the value":
        data = data[:8] + (len(data) - 12).to_bytes(4, "big") + data[12:]
    if name != "negative offset":
        raw, table = table_of(good + data + encode_single(Rec(2**62 + 1, 5, b"k", b"v")))
        with pytest.raises(legacy.LegacyProblem) as raised:
            legacy.summarize_rows(raw, 0, table)
        assert raised.value.row == 1


def test_the_first_invalid_row_is_reported() -> None:
    good = [encode_single(Rec(i, 5, b"k", b"v")) for i in range(4)]
    bad_plain, bad_packed = encode_message(2, b"a", b"1", crc=1), encode_wrapper([Rec(2, 1, b"", b"")], GZIP, inner=b"")
    for bad in (bad_plain, bad_packed):
        for other in (encode_message(3, b"a", b"1", crc=1), encode_wrapper([Rec(3, 1, b"", b"")], GZIP, inner=b"")):
            raw, table = table_of(good[0] + good[1] + bad + other)
            with pytest.raises(legacy.LegacyProblem) as raised:
                legacy.summarize_rows(raw, 0, table)
            assert raised.value.row == 2


def test_a_compressed_message_whose_offsets_begin_in_the_previous_batch_is_refused() -> None:
    raw, table = table_of(encode_single(Rec(52, 5, b"k", b"v")) + encode_wrapper(K3, GZIP))
    with pytest.raises(legacy.LegacyProblem, match="begins at or below") as raised:
        legacy.summarize_rows(raw, 0, table)
    assert raised.value.row == 1
    raw, table = table_of(encode_wrapper(K3, GZIP))
    legacy.summarize_rows(raw, 0, table.copy(), previous_last_offset=49)
    with pytest.raises(legacy.LegacyProblem, match="begins at or below"):
        legacy.summarize_rows(raw, 0, table, previous_last_offset=50)


@pytest.mark.long
def test_a_bomb_is_refused_before_it_is_decompressed() -> None:
    big = [Rec(0, 1, b"k", bytes(1 << 20))]
    for codec in (GZIP, SNAPPY, LZ4):
        data = encode_wrapper(big, codec)
        raw = guarded(data)
        assert legacy.summarize(raw, 0, len(data), (1 << 20) + 35).record_count == 1
        with pytest.raises(TooLarge, match="more than 1048576 bytes"):
            legacy.summarize(raw, 0, len(data), 1 << 20)


@pytest.mark.parametrize("size", range(26))
def test_no_message_is_shorter_than_its_fixed_fields(size: int) -> None:
    message = encode_message(5, None, None, magic=0, size=size - 12)[:size]
    if size > 16:
        message = message[:12] + zlib.crc32(message[16:]).to_bytes(4, "big") + message[16:]
    for memory in (guarded, guarded_front):
        with pytest.raises(ValueError, match=r"shorter|not within"):
            legacy.summarize(memory(message), 0, size)
    inner = encode_message(0, b"a", b"1") + message
    with pytest.raises(ValueError, match="shorter") if size > 11 else contextlib.nullcontext():
        read(encode_wrapper([K], GZIP, inner=inner))


@settings(deadline=None, max_examples=draws(400))
@given(messages(), st.data())
def test_any_bytes_are_read_or_refused_without_access_outside_them(case: Any, data: Any) -> None:
    message = bytearray(case[2])
    for _ in range(data.draw(st.integers(0, 3))):
        message[data.draw(st.integers(8, len(message) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 1, 5, 20, 40]))
    message = message[: max(len(message) - cut, 0)]
    if len(message) > 16 and data.draw(st.booleans()):  # a valid size and checksum, to reach later checks
        message[8:12] = (len(message) - 12).to_bytes(4, "big")
        message[12:16] = zlib.crc32(message[16:]).to_bytes(4, "big")
    # damaged streams, which the libraries of the reference model may accept or refuse differently
    packed = len(message) > 17 and message[17] & 7
    try:
        expected: list[Rec] | None = list(decode_message(bytes(message)).records)
    except (ValueError, struct.error):
        expected = None
    for memory in (guarded, guarded_front):
        raw = memory(bytes(message))
        try:
            batch = legacy.summarize(raw, 0, len(raw), 1 << 20)
        except (ValueError, TooLarge):  # a damaged stream may contain any length
            assert expected is None or packed
            continue
        records = read(bytes(message))[1]
        assert batch.record_count == len(records)
        assert records == expected or packed


@settings(deadline=None, max_examples=draws(200))
@given(st.binary(max_size=120), st.data())
def test_any_inner_bytes_are_read_or_refused_without_access_past_the_end(block: bytes, data: Any) -> None:
    good = encode_message(0, b"a", b"1") + encode_message(1, None, None, magic=0)
    chosen = bytearray(data.draw(st.sampled_from([block, good, good + good])))
    if chosen:
        chosen[data.draw(st.integers(0, len(chosen) - 1))] = data.draw(st.integers(0, 255))
    raw, out = guarded(bytes(chosen)), np.zeros(kernels.OUT_SIZE, np.int64)
    kernels.walk_messages(raw, len(raw), False, 0, out)
    if out[kernels.CODE] == kernels.OK:
        count = int(out[kernels.COUNT])
        target = guarded(bytes(len(raw) + kernels.MAX_GROWTH_BYTES * count))
        kernels.transcode_messages(raw, len(raw), False, 0, 0, 2**62, target)


@given(st.binary(max_size=100), st.integers(0, 9))
@settings(deadline=None)
def test_crc32_equals_that_of_zlib(data: bytes, start: int) -> None:
    start = min(start, len(data))
    assert kernels.crc32(guarded(data), start, len(data) - start) == zlib.crc32(data[start:])


def test_every_block_of_the_page_is_used() -> None:
    assert sorted(blocks("LEGACY.md")) == ["absolute", "lz4-v0", "relative", "v0", "v1"]


def test_the_bytes_of_the_page_are_read() -> None:
    page = blocks("LEGACY.md")
    header = np.frombuffer(page["v1"][:26], legacy.MESSAGE_V1)[0]
    assert header.tolist() == (50, 24, 0xADC0D6E9, 1, 0, 1000)
    assert np.frombuffer(page["v0"][:18], legacy.MESSAGE_V0)[0].tolist()[:2] == (51, 15)
    assert read(page["v1"])[1] == [Rec(50, 1000, b"a", b"1")]
    assert read(page["v0"])[1] == [Rec(51, -1, b"a", None)]
    relative = read(page["relative"])
    assert relative[1] == [Rec(60, 1000, b"a", b"1"), Rec(61, 1002, b"b", b"2")]
    assert relative[0] == legacy.LegacyBatch(60, 61, 2, GZIP, 1000, 1002)
    absolute = read(page["absolute"])
    assert absolute[1] == [Rec(60, -1, b"a", b"1"), Rec(61, -1, b"b", b"2")]
    assert read(page["lz4-v0"])[1] == absolute[1]
