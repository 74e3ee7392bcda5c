"""Batches encoded from columns are read back unchanged by our readers and by the reference model, for every codec.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.errors import Refused, UsageProblem
from keytail.format.batch import BATCH_TABLE
from keytail.format.codecs.table import CODECS, GZIP, LZ4, NONE, SNAPPY, ZSTD
from keytail.format.columns import BytesColumn, HeadersColumn
from keytail.format.encode import MAX_BATCH_BYTES, Encoding, RecordColumns
from keytail.format.encode import encode_batches as encode
from keytail.kernels import batches as batch_kernels
from keytail.log.fs import LOCAL
from keytail.log.records.chunk import SegmentReader
from keytail.log.records.scan import RecordScanner
from tests.chance import draws
from tests.reference.batches import Rec, all_records, decode_log
from tests.reference.encode import bytes_arrays, headers_arrays
from tests.reference.encode import encode as reference_encode

field = st.none() | st.binary(max_size=5) | st.integers(60, 300).map(lambda n: b"ab" * n)
headers = st.lists(st.tuples(st.binary(max_size=4), field), max_size=3)
rows = st.lists(st.tuples(st.integers(-1, 10**13), field, field, headers), max_size=30)


def records_of(drawn: Sequence[tuple], base_offset: int = 0) -> list[Rec]:
    return [Rec(base_offset + i, t, k, v, tuple(h)) for i, (t, k, v, h) in enumerate(drawn)]


def columns_of(records: Sequence[Rec], width: type = np.int64) -> RecordColumns:
    def column(data: np.ndarray, offsets: np.ndarray, valid: np.ndarray) -> BytesColumn:
        return BytesColumn(data, offsets.astype(width), valid)

    times = np.array([rec.timestamp for rec in records], np.int64)
    keys, values = (bytes_arrays([getattr(rec, name) for rec in records]) for name in ("key", "value"))
    if not any(rec.headers for rec in records):
        return RecordColumns(times, column(*keys), column(*values))
    offsets, header_keys, header_values = headers_arrays(records)
    pairs = HeadersColumn(offsets.astype(width), column(*header_keys), column(*header_values))
    return RecordColumns(times, column(*keys), column(*values), pairs)


def encode_batches(columns: RecordColumns, *, base_offset: int, first_row: int = 0, **options: Any):
    return encode(columns, Encoding(**options), base_offset, first_row)


def encoded(records: Sequence[Rec], base_offset: int = 0, **options: Any) -> bytes:
    """Return all bytes, after checking that the rows of each step are those that the chunk reader parses from its
    bytes.
    """
    options = {"leader_epoch": 4} | options
    parts = []
    for data, table in encode_batches(columns_of(records), base_offset=base_offset, **options):
        parsed, out = np.zeros(len(table) + 1, BATCH_TABLE), np.zeros(4, np.int64)
        batch_kernels.index_batches(data, len(data), 0, -1, parsed, out)
        assert out[batch_kernels.CODE] == batch_kernels.OK
        assert out[batch_kernels.CONSUMED] == len(data)
        assert parsed[: out[batch_kernels.ROWS]].tolist() == table.tolist()
        parts.append(data.tobytes())
    return b"".join(parts)


@settings(max_examples=draws(60))
@given(rows, st.sampled_from(range(len(CODECS))), st.integers(1, 3000), st.integers(1, 5000), st.integers(0, 2**62))
def test_the_model_reads_the_encoded_records(drawn, codec, batch_bytes, part_bytes, base_offset):
    records = records_of(drawn, base_offset)
    data = encoded(records, base_offset, codec=codec, batch_bytes=batch_bytes, part_bytes=part_bytes)
    batches = decode_log(data)
    assert all_records(batches) == records
    plain = decode_log(b"".join(reference_encode(records, batch_bytes, leader_epoch=4)))
    for batch, like in zip(batches, plain, strict=True):
        assert (batch.codec, batch.attributes & ~7, batch.leader_epoch) == (codec, 0, 4)
        for name in ("base_offset", "last_offset", "base_timestamp", "max_timestamp", "record_count", "producer_id"):
            assert getattr(batch, name) == getattr(like, name), name
        assert (batch.producer_epoch, batch.base_sequence) == (-1, -1)
    if codec == NONE:
        assert data == b"".join(reference_encode(records, batch_bytes, leader_epoch=4))


@pytest.mark.parametrize("codec", range(len(CODECS)))
def test_our_readers_read_the_encoded_records(tmp_path, codec):
    records = records_of([
        (10**12 - i * 7, [None, b"", b"k%d" % i][i % 3], [b"v" * i, None, b""][i % 3 % 2], [(b"h", None)] * (i % 5))
        for i in range(500)
    ])  # fmt: skip
    data = encoded(records, codec=codec, batch_bytes=3000)
    path = tmp_path / f"{0:020d}.log"
    path.write_bytes(data)
    columns, batches = [], 0
    reader = SegmentReader(LOCAL)
    for chunk in reader.chunks(str(path), len(data)):
        batches += len(chunk.table)
        for opened in reader.open_rows(chunk, np.ones(len(chunk.table), bool)):
            for piece in RecordScanner(3).portions(chunk, opened):
                table = piece.record_table
                times = table.records["timestamp_ms"].copy()
                columns.append(RecordColumns(times, table.keys(), table.values(), table.headers()))
    assert batches > 10
    # Columns that were read from a log can be encoded again.
    offset, again = 0, b""
    for part in columns:
        for piece, _ in encode_batches(part, base_offset=offset, leader_epoch=4, batch_bytes=3000):
            again += piece.tobytes()
        offset += len(part)
    assert all_records(decode_log(again)) == records


def test_steps_have_about_the_requested_size():
    columns = columns_of(records_of([(5, b"k", b"v" * 100, [])] * 2000))
    whole = [(len(data), len(table)) for data, table in encode_batches(columns, base_offset=0, leader_epoch=0)]
    assert len(whole) == 1
    sizes = [
        len(data) for data, _ in encode_batches(columns, base_offset=0, leader_epoch=0, part_bytes=40_000)
    ]
    assert sum(sizes) == whole[0][0]
    assert all(40_000 <= size < 40_000 + 16384 for size in sizes[:-1])
    few = list(encode_batches(columns, base_offset=0, leader_epoch=0, batch_records=7))
    assert [int(table["record_count"].max()) for _, table in few] == [7]


def test_earlier_results_are_not_overwritten():
    columns = columns_of(records_of([(5, b"k%d" % i, b"v" * 100, []) for i in range(300)]))
    held, copies = [], []
    for data, table in encode_batches(columns, base_offset=0, leader_epoch=0, part_bytes=1):
        held.append((data, table))
        copies.append((data.tobytes(), table.tolist()))
    assert len(held) > 1
    assert [(data.tobytes(), table.tolist()) for data, table in held] == copies


def spread(column: BytesColumn) -> BytesColumn:
    return BytesColumn(*(np.repeat(array, 2)[::2] for array in (column.data, column.offsets, column.valid)))


def test_offsets_may_have_32_bits_and_arrays_may_be_read_only():
    records = records_of([(5, b"k", None, [(b"h", b"x")]), (4, None, b"v" * 70, []), (9, b"", b"", [(b"", None)])])
    expected = b"".join(reference_encode(records, 16384))
    for width in (np.int32, np.int64):
        columns = columns_of(records, width)
        for array in (columns.timestamps_ms, columns.keys.offsets, columns.values.valid):
            array.flags.writeable = False
        (step,) = encode_batches(columns, base_offset=0, leader_epoch=0)
        assert step[0].tobytes() == expected
    # Arrays need not be contiguous: here every second item of an array is used.
    apart = RecordColumns(columns.timestamps_ms, columns.keys, spread(columns.values), columns.headers)
    (step,) = encode_batches(apart, base_offset=0, leader_epoch=0)
    assert step[0].tobytes() == expected


@pytest.mark.long
@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string(), pa.large_string()])
def test_buffers_of_arrow_are_accepted_as_columns(kind):
    texts = [None, "", "a", "bcd" * 30, None, "e"] * 5
    values = texts if kind in (pa.string(), pa.large_string()) else [t if t is None else t.encode() for t in texts]
    array = pa.array(values, kind)
    wide = kind in (pa.large_binary(), pa.large_string())
    for start, stop in ((0, 30), (3, 30), (9, 11), (7, 7), (30, 30), (1, 2)):
        part = array[start:stop]
        column = BytesColumn.from_buffers(len(part), *part.buffers(), start=part.offset, wide=wide)
        assert column.to_list() == [t if t is None else t.encode() for t in texts[start:stop]]
        assert len(column) == len(part)
    full = pa.array(["x", "yz"], kind)
    assert BytesColumn.from_buffers(2, *full.buffers(), wide=wide).to_list() == [b"x", b"yz"]
    empty = pa.array([], kind)
    assert BytesColumn.from_buffers(0, *empty.buffers(), wide=wide).to_list() == []
    nulls = pa.array([None, None], kind)
    assert BytesColumn.from_buffers(2, *nulls.buffers(), wide=wide).to_list() == [None, None]


def test_buffers_that_are_too_short_are_refused():
    offsets = np.array([0, 1, 2], np.int32).tobytes()
    with pytest.raises(ValueError, match="offsets"):
        BytesColumn.from_buffers(3, None, offsets, b"ab")
    with pytest.raises(ValueError, match="validity"):
        BytesColumn.from_buffers(9, b"\xff", np.zeros(10, np.int32).tobytes(), b"")


GOOD = (5, b"k", b"v", [(b"h", b"x")])


def refusal(records: Sequence[Rec], **options: Any) -> str:
    with pytest.raises(Refused) as caught:
        encode_batches(columns_of(records), base_offset=70, leader_epoch=0, **options)
    return str(caught.value)


def test_rows_that_cannot_be_encoded_are_reported_before_any_output():
    assert "row 2 " in refusal(records_of([GOOD, GOOD, (-2, None, None, [])]))
    assert "row 1002 " in refusal(records_of([GOOD, GOOD, (-2, None, None, [])]), first_row=1000)
    assert "below -1" in refusal(records_of([(-2, None, None, [])]))
    null: Any = None
    assert "row 1 is not a valid record: a header's key is null" in refusal(
        records_of([GOOD, (5, b"k", b"v", [(b"h", b"x"), (null, b"x")])])
    )
    column = BytesColumn(np.zeros(3, np.uint8), np.array([0, 2, 1]), np.ones(2, bool))
    with pytest.raises(Refused, match=r"row 1 .* offsets of the values"):
        fine = BytesColumn(np.zeros(3, np.uint8), np.array([0, 1, 1]), np.ones(2, bool))
        encode_batches(RecordColumns(np.zeros(2, np.int64), fine, column), base_offset=0, leader_epoch=0)


def test_a_record_that_is_too_large_is_refused():
    drawn = [GOOD, GOOD, (5, b"k", b"a" * 1000, [])]
    (batch,) = reference_encode(records_of(drawn)[2:], 1)
    assert f"row 2 needs a batch of {len(batch)} bytes; the limit is {len(batch) - 1}" in refusal(
        records_of(drawn), max_message_bytes=len(batch) - 1
    )
    assert len(decode_log(encoded(records_of(drawn), max_message_bytes=len(batch)))) == 2
    # The limit applies to the stored size.
    for codec in (GZIP, SNAPPY, LZ4, ZSTD):
        assert len(decode_log(encoded(records_of(drawn), max_message_bytes=len(batch) - 1, codec=codec))) == 2


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_a_record_that_is_too_large_even_compressed_is_refused_after_earlier_batches(codec):
    noise = np.random.default_rng(7).bytes(1000)
    drawn = [GOOD, GOOD, (5, b"k", noise, [])]
    steps = encode_batches(
        columns_of(records_of(drawn)), base_offset=70, leader_epoch=0, codec=codec, max_message_bytes=900,
        first_row=10, part_bytes=1,
    )  # fmt: skip
    data, _ = next(steps)
    assert all_records(decode_log(data.tobytes())) == records_of(drawn[:2], 70)
    with pytest.raises(Refused, match=r"row 12 needs a batch of .* the limit is 900"):
        next(steps)


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_a_batch_that_exceeds_the_limit_only_if_compressed_is_not_compressed(codec):
    noise = np.random.default_rng(8).bytes(4000)
    records = records_of([(5, None, noise, []), (5, b"k", b"v" * 500, [])])
    (first, *_) = reference_encode(records[:-1], 10**6)
    limit = len(first)
    batches = decode_log(encoded(records, codec=codec, batch_bytes=10**6, max_message_bytes=limit))
    assert [batch.codec for batch in batches] == [NONE, codec]
    assert all_records(batches) == records
    assert max(batch.size for batch in batches) <= limit
    # A batch that fits exactly remains compressed.
    whole = encoded(records[1:], codec=codec)
    assert encoded(records[1:], codec=codec, max_message_bytes=len(whole)) == whole


def test_batches_never_exceed_the_largest_message():
    records = records_of([(5, b"k%d" % i, b"v" * 90, []) for i in range(100)])
    batches = decode_log(encoded(records, max_message_bytes=1000))
    assert max(batch.size for batch in batches) <= 1000
    assert all_records(batches) == records


def test_a_value_whose_length_takes_five_bytes_is_encoded():
    n = 1 << 27
    value = BytesColumn(np.zeros(n, np.uint8), np.array([0, 0, n]), np.ones(2, bool))
    key = BytesColumn(np.zeros(0, np.uint8), np.array([0, 0, 0]), np.zeros(2, bool))
    columns = RecordColumns(np.array([3, 4]), key, value)
    steps = list(encode_batches(columns, base_offset=0, leader_epoch=0))
    assert [(len(data), len(table)) for data, table in steps] == [(61 + 7 + 61 + 5 + 4 + 5 + n + 1, 2)]
    parsed, out = np.zeros(2, BATCH_TABLE), np.zeros(4, np.int64)
    batch_kernels.index_batches(steps[0][0], len(steps[0][0]), 0, -1, parsed, out)
    assert parsed.tolist() == steps[0][1].tolist()


@pytest.mark.parametrize("codec, levels", [(GZIP, (-1, 1, 9)), (LZ4, (1, 2, 9, 12, 17)), (ZSTD, (-131072, -1, 1, 12))])
def test_compression_levels_are_applied(codec, levels):
    rng = np.random.default_rng(3)
    words = [rng.bytes(6) for _ in range(300)]
    records = records_of([(5, None, b" ".join(words[j] for j in rng.integers(0, 300, 30)), []) for _ in range(400)])
    sizes = {}
    for level in levels:
        data = encoded(records, codec=codec, level=level, batch_bytes=10**6)
        assert all_records(decode_log(data)) == records
        sizes[level] = len(data)
    default = len(encoded(records, codec=codec, batch_bytes=10**6))
    assert default == {GZIP: sizes.get(-1), LZ4: sizes.get(9)}.get(codec, default)
    assert len(set(sizes.values())) > 1, sizes
    if codec == LZ4:  # level 9 uses the fast compressor
        assert sizes[9] > max(size for level, size in sizes.items() if level != 9)


@pytest.mark.parametrize(
    "options",
    [
        *({"codec": codec} for codec in (-1, 5)),
        *({"codec": codec, "level": 1} for codec in (NONE, SNAPPY)),
        *({"codec": GZIP, "level": level} for level in (-2, 0, 10)),
        *({"codec": LZ4, "level": level} for level in (-1, 0, 18)),
        *({"codec": ZSTD, "level": level} for level in (-131073, 23)),
        *({"batch_bytes": size} for size in (-1, 0, MAX_BATCH_BYTES + 1)),
        *({"batch_records": n} for n in (0, 2**31)),
        {"part_bytes": 0},
        *({"base_offset": offset} for offset in (-1, 2**63 - 1)),
    ],
)
def test_invalid_options_are_refused(options):
    with pytest.raises(UsageProblem):
        encode_batches(columns_of(records_of([GOOD])), **({"base_offset": 0, "leader_epoch": 0} | options))


def test_columns_of_different_lengths_are_refused():
    columns = columns_of(records_of([GOOD, GOOD]))
    short = columns_of(records_of([GOOD]))
    assert columns.headers is not None
    for wrong in (
        RecordColumns(columns.timestamps_ms, short.keys, columns.values),
        RecordColumns(columns.timestamps_ms, columns.keys, short.values),
        RecordColumns(short.timestamps_ms, columns.keys, columns.values),
        RecordColumns(columns.timestamps_ms, columns.keys, columns.values, short.headers),
        RecordColumns(
            columns.timestamps_ms, columns.keys, columns.values,
            HeadersColumn(columns.headers.offsets, columns.headers.keys, short.keys),
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"for [12] r"):
            encode_batches(wrong, base_offset=0, leader_epoch=0)


@pytest.mark.parametrize("codec", [NONE, LZ4])
def test_the_append_time_applies_to_all_records(codec):
    records = records_of([(77, b"k", b"v" * n, []) for n in range(30)], 5)
    batches = decode_log(encoded(records, 5, codec=codec, batch_bytes=300, log_append_time=True))
    assert len(batches) > 1
    assert {(batch.attributes, batch.base_timestamp, batch.max_timestamp) for batch in batches} == {(8 | codec, 77, 77)}
    assert all_records(batches) == records
    later = [*records[:-1], Rec(34, 78, None, None)]
    with pytest.raises(ValueError, match="append times of the records differ"):
        encode_batches(columns_of(later), base_offset=5, leader_epoch=0, log_append_time=True)
    assert encoded([], log_append_time=True) == b""


def test_no_records_give_no_batches():
    assert list(encode_batches(columns_of([]), base_offset=0, leader_epoch=0)) == []
    assert list(itertools.islice(encode_batches(columns_of([]), base_offset=0, leader_epoch=0, codec=ZSTD), 1)) == []
