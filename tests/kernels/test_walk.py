"""The proof's own reader of records, compared with the reference models and at guard pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.kernels import walk
from keytail.kernels.jit import kernel
from keytail.kernels.opening.decoders import TOOLS
from keytail.kernels.proof.codes import WOULD_LOSE_KEYLESS
from keytail.kernels.proof.key_hash import SECRET_BYTES, coefficients_of
from keytail.kernels.proof.state import IndexFiles, Notes, Windows, new_state
from keytail.kernels.proof.step import step
from keytail.kernels.verify import batches as verify
from keytail.kernels.verify import codes, columns
from tests.chance import draws
from tests.kernels.guard import guarded, guarded_front
from tests.reference.batches import Rec, encode_batch, encode_record
from tests.reference.varints import encode_varint, encode_varlong


@kernel
def _varint(a, p, end):
    return walk.read_varint(a, p, end)


@kernel
def _varlong(a, p, end):
    return walk.read_varlong(a, p, end)


@kernel
def _record(a, p, end):
    return walk.read_record(a, p, end)


@kernel
def _same_headers(a, a_end, b, b_end):
    return walk.same_headers(a, 0, a_end, b, 0, b_end)


@kernel
def _header_block(a, end):
    return walk.read_headers(a, 0, end)


@kernel
def _control_type(a, size):
    return walk.control_type(a, 0, size)


@kernel
def _numbers(a):
    return walk.be_64(a, 0), walk.be_32(a, 0), walk.be_u32(a, 0), walk.be_16(a, 0)


_int32 = st.integers(-(2**31), 2**31 - 1)
_int64 = st.integers(-(2**63), 2**63 - 1)
_bytes = st.one_of(st.none(), st.binary(max_size=150))
_headers = st.lists(st.tuples(st.binary(max_size=5), st.one_of(st.none(), st.binary(max_size=5))), max_size=3)


@settings(deadline=None, max_examples=draws(300))
@given(_int32, _int64)
def test_numbers_of_every_length_are_read(small, large):
    for read, data, value in (
        (_varint, encode_varint(small), small),
        (_varlong, encode_varlong(large), large),
    ):
        array = guarded(data)
        assert read(array, 0, len(array)) == (value, len(data))
        for end in range(len(data)):
            assert read(guarded(data[:end]), 0, end)[1] == -1
    fixed = large.to_bytes(8, "big", signed=True)
    expected = tuple(int.from_bytes(fixed[:n], "big", signed=s) for n, s in ((8, 1), (4, 1), (4, 0), (2, 1)))
    assert tuple(map(int, _numbers(guarded(fixed)))) == expected


def test_numbers_that_are_too_long_are_refused():
    assert _varint(guarded(b"\xff" * 5 + b"\x00"), 0, 6)[1] == -1
    assert _varlong(guarded(b"\xff" * 10 + b"\x00"), 0, 11)[1] == -1
    assert _varint(guarded(b"\x80\x80\x00"), 0, 3) == (0, 3)  # longer than needed, but valid
    assert _varint(guarded(b"\xff\xff\xff\xff\x0f"), 0, 5) == (-(2**31), 5)
    assert _varint(guarded(b"\xff\xff\xff\xff\x7f"), 0, 5) == (-(2**31), 5)  # four bits of the fifth byte are used


@pytest.mark.long
@settings(deadline=None, max_examples=draws(300))
@given(_int64, st.integers(0, 2**31 - 1), _bytes, _bytes, _headers)
def test_records_are_read_like_the_model(delta, offset_delta, key, value, headers):
    record = Rec(offset_delta, delta, key, value, tuple(headers))
    data = encode_record(record, 0, 0)
    array = guarded(data)
    found = [int(x) for x in _record(array, 0, len(array))]
    assert found[:2] == [delta, offset_delta]
    assert found[7] == len(data)
    for start, length, expected in ((found[2], found[3], key), (found[4], found[5], value)):
        assert (None if length < 0 else data[start : start + length]) == expected
    for end in range(len(data)):
        assert _record(guarded(data[:end]), 0, end)[7] == -1
    h = data[found[6] :]
    assert _same_headers(guarded(h), len(h), guarded(h), len(h))


def test_malformed_header_blocks_are_refused():
    key, value = encode_varint(1) + b"k", encode_varint(1) + b"v"
    whole = encode_varint(1) + key + value
    assert _header_block(guarded(whole), len(whole)) == len(whole)
    null_key, null_value = (encode_varint(1) + k + v for k, v in ((encode_varint(-1), value), (key, encode_varint(-1))))
    assert _header_block(guarded(null_value), len(null_value)) == len(null_value)
    for wrong in (b"", b"\x80", encode_varint(-1), encode_varint(9) + key + value, whole[:-1], whole + b"\0", null_key):
        assert _header_block(guarded(wrong), len(wrong)) == -1, wrong


def test_the_type_of_a_control_record_is_read():
    marker = b"\0\0\0\1"
    for key, fields, expected in (
        (marker, {}, 1),
        (marker[:3] + b"\0", {}, 0),
        (b"\0\1\1\2\3", {}, 258),
        (marker[:3], {}, -1),
        (b"", {}, -1),
        (None, {}, -1),
        (marker, {"codec": 1}, -1),
        (marker, {"record_count": 0}, -1),
    ):
        data = encode_batch([Rec(0, 0, key, b"\0\0\0\0\0\0")], control=True, **fields)
        assert _control_type(guarded(data), len(data)) == expected, (key, fields)


def test_different_headers_are_detected():
    def block(*headers: tuple[bytes, bytes | None]) -> np.ndarray:
        data = encode_varint(len(headers))
        for name, value in headers:
            data += encode_varint(len(name)) + name
            data += encode_varint(-1) if value is None else encode_varint(len(value)) + value
        return guarded(data)

    blocks = [
        block(),
        block((b"a", b"b")),
        block((b"a", None)),
        block((b"a", b"")),
        block((b"a", b"c")),
        block((b"b", b"b")),
        block((b"a", b"b"), (b"a", b"b")),
    ]
    for i, item in enumerate(blocks):
        for j, other in enumerate(blocks):
            assert _same_headers(item, len(item), other, len(other)) == (i == j)
    overlong = guarded(b"\x82\x00\x82\x00a\x02b")  # ("a", "b") with counts of two bytes
    assert _same_headers(overlong, len(overlong), blocks[1], len(blocks[1]))


@settings(deadline=None, max_examples=draws(400))
@given(st.binary(max_size=60), st.sampled_from([guarded, guarded_front]))
def test_any_bytes_are_read_within_their_bounds(data, place):
    array = place(data)
    end = int(_record(array, 0, len(array))[7])
    assert end == -1 or 0 < end <= len(data)


def test_a_batch_size_below_the_minimum_of_its_magic_is_found():
    """The magic, at byte 16, determines the minimum size of a batch."""
    prefix = np.frombuffer(bytes(16) + b"\2", np.uint8)
    for is_all, without_magic in ((True, -1), (False, 0)):
        assert walk.batch_size(prefix, 0, 17, is_all) == -2
        assert walk.batch_size(prefix, 0, 16, is_all) == without_magic


def _damaged_batches() -> list[bytes]:
    records = [Rec(5 + i, 100 + i, b"key%d" % i, b"v" * i, ((b"h", None),)) for i in range(4)]
    data = encode_batch(records)
    batches = [data[:n] for n in range(0, len(data), 7)]
    for at in range(8, len(data)):
        for byte in (0, 0x7F, 0xFF):
            batches.append(data[:at] + bytes([byte]) + data[at + 1 :])
    return batches


@pytest.mark.long
@pytest.mark.parametrize("is_all", [0, 1])
def test_a_step_of_the_proof_reads_only_its_windows(is_all):
    source = encode_batch([Rec(5 + i, 100 + i, b"key%d" % i, b"v") for i in range(4)])
    none, nothing = np.empty((0, 0), dtype=np.int64), guarded(b"")
    coefficients = coefficients_of(bytes(SECRET_BYTES))
    notes = Notes(
        np.empty((2, 64), np.uint64), np.empty((2, 64), np.int64), coefficients, np.empty((2, 0), np.uint64)
    )
    for bad in _damaged_batches():
        for first, second in ((bad, source), (source, bad), (bad, bad)):
            state = new_state()
            state.source.to, state.output.to = len(first), len(second)
            state.source.is_all = state.output.is_all = is_all
            state.source.block_bytes = state.output.block_bytes = -1
            state.rules.end_offset, state.output.next_base = 100, 1 << 40
            state.source.last_offset = state.output.last_offset = -1
            windows = Windows(guarded(first), guarded(second), nothing, nothing)
            indexes, tools = IndexFiles(nothing, nothing), np.zeros(TOOLS, np.int64)
            code = step(windows, indexes, notes, none, none, tools, state)
            assert 0 < code <= WOULD_LOSE_KEYLESS


@pytest.mark.parametrize("is_all", [0, 1])
def test_the_inspection_reads_only_its_window(is_all):
    none = np.zeros(0, dtype=np.int64)
    rows = np.zeros((16, columns.ROW_COLUMNS), dtype=np.int64)
    runs = np.zeros((16, columns.RUN_COLUMNS), dtype=np.int64)
    scratch = np.zeros(6, dtype=np.int64)
    for bad in _damaged_batches():
        state = np.zeros(columns.STATE_SIZE, dtype=np.int64)
        state[columns.TO], state[columns.IS_ALL] = len(bad), is_all
        state[columns.LAST_OFFSET], state[columns.NEXT_BASE] = -1, 1 << 62
        window = guarded(bad)
        for _ in range(10):
            code = verify.inspect(window, none, none, none, none, rows, runs, scratch, state)
            if code in (
                codes.DONE,
                codes.NEED_MORE,
                codes.NEED_BLOCK,
                codes.NEED_WRAPPER,
                codes.NEED_ROOM,
                *codes.ENDS_THE_WALK,
            ):
                break
        else:
            raise AssertionError("no end")
