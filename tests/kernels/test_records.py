"""Record spans from decompressed batches: compared with the reference model, at page ends, and with every kind of
damage.
"""

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.format.batch import BATCH_TABLE
from keytail.kernels import batches, records
from tests.chance import draws
from tests.kernels.guard import guarded
from tests.reference.batches import Rec, decode_log, encode_batch
from tests.reference.varints import encode_varint, encode_varlong

small_bytes = st.one_of(st.none(), st.binary(max_size=3), st.binary(min_size=60, max_size=70))
rec_strategy = st.tuples(
    st.integers(-(2**40), 2**40),
    small_bytes,
    small_bytes,
    st.lists(st.tuples(st.binary(max_size=4), small_bytes), max_size=3),
)


def scan(data, capacity=1000, where=records.IN_RAW):
    raw = guarded(data)
    table, out = np.zeros(100, BATCH_TABLE), np.zeros(4, np.int64)
    batches.index_batches(raw, len(raw), 0, -1, table, out)
    assert out[batches.CODE] == batches.OK, out
    table = table[: out[0]]
    return scan_rows(raw, table, capacity, where)


def scan_rows(raw, table, capacity, where=records.IN_RAW):
    n = len(table)
    found = np.zeros(capacity, records.RECORD_TABLE)
    out = np.zeros(4, np.int64)
    empty = guarded(b"")
    raw, arena = (raw, empty) if where == records.IN_RAW else (empty, raw)
    records.scan_records(
        raw, arena, table, np.full(n, where, np.int8), table["position"] + 61,
        table["size_bytes"].astype(np.int64) - 61, 0, n, guarded(b"\0"), np.full(n, -1), found, out,
    )  # fmt: skip
    return found[: out[1]], out


@settings(deadline=None, max_examples=draws(150))
@given(
    st.lists(st.lists(rec_strategy, min_size=1, max_size=8), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_spans_equal_the_records_of_the_model(logs, append_time, in_arena):
    offset, parts = 5, []
    for batch in logs:
        recs = [Rec(offset + i * 70, t, k, v, tuple(h)) for i, (t, k, v, h) in enumerate(batch)]
        parts.append(
            encode_batch(recs, timestamp_type=int(append_time), max_timestamp=77 if append_time else None)
        )
        offset = recs[-1].offset + 1
    data = b"".join(parts)
    found, out = scan(data, where=records.IN_ARENA if in_arena else records.IN_RAW)
    assert out[records.CODE] == records.OK and out[records.NEXT_ROW] == len(logs)
    expected = [(row, rec) for row, batch in enumerate(decode_log(data)) for rec in batch.records]
    assert len(found) == len(expected)
    for span, (row, rec) in zip(found, expected, strict=True):
        assert (span["row"], span["offset"], span["timestamp_ms"]) == (row, rec.offset, rec.timestamp)
        assert span["key_bytes"] == (-1 if rec.key is None else len(rec.key))
        assert span["value_bytes"] == (-1 if rec.value is None else len(rec.value))
        assert span["canonical"] == 1
        if rec.key is not None:
            assert data[span["key_start"] : span["key_start"] + span["key_bytes"]] == rec.key


def test_hashes_are_those_of_xxh3_over_the_key():
    recs = [Rec(i, 0, bytes(j % 256 for j in range(i)) if i % 4 else None, b"v") for i in range(300)]
    data = encode_batch(recs)
    raw = guarded(data)
    found, _ = scan(data)
    low, high = np.zeros(300, np.uint64), np.zeros(300, np.uint64)
    from keytail.kernels.native import NATIVE

    records.hash_keys(raw, guarded(b""), np.zeros(1, np.int8), found, len(found), np.uint64(9), low, high)
    if not NATIVE:
        pytest.skip("this process hashes with the fallback, which has its own reference model")
    for rec, a, b in zip(recs, low.tolist(), high.tolist(), strict=True):
        assert (b << 64 | a) == (0 if rec.key is None else xxhash.xxh3_128_intdigest(rec.key, 9))


def test_scanning_stops_before_a_batch_that_does_not_fit():
    data = b"".join(encode_batch([Rec(o + i, 0, b"k", b"v") for i in range(3)]) for o in (0, 3, 6))
    found, out = scan(data, capacity=7)
    assert len(found) == 6 and out[records.NEXT_ROW] == 2 and out[records.CODE] == records.OK


def raw_record(body):
    return encode_varint(len(body)) + body


def one_batch(block, count=1, last_offset=0):
    """Return a batch around the given bytes of records, with a valid checksum."""
    from tests.reference.varints import crc32c

    header = bytearray(encode_batch([], base_offset=0, last_offset=last_offset, record_count=count))
    data = header + block
    data[8:12] = (len(data) - 12).to_bytes(4, "big")
    data[17:21] = crc32c(bytes(data[21:])).to_bytes(4, "big")
    return bytes(data)


def body(time=0, offset=0, key=b"k", value=b"v", headers=b"\0"):
    return b"\0" + encode_varlong(time) + encode_varint(offset) + sized(key) + sized(value) + headers


def sized(data):
    return encode_varint(-1) if data is None else encode_varint(len(data)) + data


GOOD = raw_record(body())


@pytest.mark.parametrize(
    "block, count, code",
    [
        (GOOD, 2**31 - 1, records.RECORD_COUNT_IMPOSSIBLE),
        (GOOD + b"", 2, records.RECORD_COUNT_IMPOSSIBLE),
        (GOOD + GOOD, 1, records.BYTES_LEFT_OVER),
        (GOOD + GOOD, 2, records.OFFSETS_NOT_INCREASING),
        (GOOD + raw_record(body(offset=1)), 2, records.OFFSET_BEYOND_BATCH),
        (raw_record(body() + b"x"), 1, records.RECORD_SIZE_INVALID),
        (raw_record(body(value=b"a" * 20)), 3, records.PREMATURE_END),
        (encode_varint(-5) + body(), 1, records.RECORD_SIZE_INVALID),
        (encode_varint(2**31 - 1) + body(), 1, records.RECORD_SIZE_INVALID),
        (raw_record(body(headers=encode_varint(-1))), 1, records.HEADER_COUNT_INVALID),
        (raw_record(body(headers=encode_varint(2**31 - 1))), 1, records.HEADER_COUNT_INVALID),
        (
            raw_record(body(headers=encode_varint(1) + sized(None) + sized(None))),
            1,
            records.HEADER_KEY_NEGATIVE,
        ),
        (raw_record(body(headers=encode_varint(2) + sized(b"") + sized(b""))), 1, records.VARINT_INVALID),
        (raw_record(b"\0\0\0" + encode_varint(2**31 - 1) + b"abcdef"), 1, records.RECORD_SIZE_INVALID),
        (raw_record(b"\0\0\0" + b"\x80" * 5 + b"\1\1\0"), 1, records.VARINT_INVALID),
        (raw_record(b"\0" + b"\x80" * 10 + b"\0\1\1\0"), 1, records.VARINT_INVALID),
        (raw_record(b"\0\0\0\1\1"), 1, records.RECORD_COUNT_IMPOSSIBLE),
        (raw_record(b"\0" * 6 + b"\x80"), 1, records.RECORD_SIZE_INVALID),
    ],
)
def test_each_damage_has_its_code(block, count, code):
    found, out = scan(one_batch(block, count))
    assert len(found) == 0 and out[records.CODE] == code, out


@settings(deadline=None, max_examples=draws(300))
@given(st.integers(0, 40), st.data())
def test_any_bytes_of_records_are_parsed_or_refused_without_a_read_past_the_end(count, data):
    good = GOOD + raw_record(
        body(offset=1, key=None, value=None, headers=encode_varint(1) + sized(b"h") + sized(b"x"))
    )
    block = bytearray(data.draw(st.one_of(st.binary(max_size=60), st.just(good))))
    for _ in range(data.draw(st.integers(0, 3))):
        if block:
            block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    scan(one_batch(bytes(block), count, last_offset=100), where=data.draw(st.sampled_from([0, 1])))


@pytest.mark.parametrize(
    "value", [0, 1, 63, 64, -64, -65, 8191, 8192, 2**20, 2**27, -(2**27) - 1, 2**31 - 1, -(2**31)]
)
def test_varints_are_read_and_measured_as_the_model_writes_them(value):
    data = encode_varint(value)
    assert records.read_varint(guarded(data), 0, len(data)) == (value, len(data))
    assert records.read_varlong(guarded(data), 0, len(data)) == (value, len(data))
    assert records.varint_bytes(value) == len(data)
    assert records.read_varint(guarded(data[:-1]), 0, len(data) - 1)[1] == -1


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40, 2**62, 2**63 - 1, -(2**63)])
def test_varlongs_are_read_and_measured_as_the_model_writes_them(value):
    data = encode_varlong(value)
    assert records.read_varlong(guarded(data), 0, len(data)) == (value, len(data))
    assert records.varint_bytes(value) == len(data)


@pytest.mark.parametrize("overlong", [b"\x82\0", b"\x82\x80\0", b"\x82\x80\x80\x80\0"])
def test_overlong_varints_are_read_but_the_body_must_not_be_copied(overlong):
    assert records.read_varint(guarded(overlong), 0, len(overlong)) == (1, len(overlong))
    found, out = scan(one_batch(raw_record(b"\0\0\0" + overlong + b"k" + sized(b"v") + b"\0")))
    assert out[records.CODE] == records.OK
    assert found["key_bytes"].tolist() == [1] and found["canonical"].tolist() == [0]


def test_any_negative_length_means_null_but_only_minus_one_may_be_copied():
    found, out = scan(one_batch(raw_record(b"\0\0\0" + encode_varint(-3) + encode_varint(-7) + b"\0")))
    assert out[records.CODE] == records.OK
    assert (found[0]["key_bytes"], found[0]["value_bytes"], found[0]["canonical"]) == (-1, -1, 0)
