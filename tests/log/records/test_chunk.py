"""Chunks: they cover the file, are verified, decompress blocks in parts of bounded size, and report damaged batches."""


import numpy as np
import pytest

from keytail.errors import CorruptLog, Refused
from keytail.format.compression import compress
from keytail.kernels.records import CLOSED, IN_RAW
from keytail.log.fs import LOCAL
from keytail.log.records.chunk import SegmentReader, refuse_unsupported
from keytail.log.records.scan import RecordScanner
from tests.chance import chance
from tests.in_pieces import read_in_pieces
from tests.log.invariants import check_chunk
from tests.reference.batches import Rec, decode_log, encode_batch, encode_marker
from tests.reference.legacy import encode_single


def batch(offset, n=3, codec=0, size=20):
    return encode_batch([Rec(offset + i, 1000 + i, b"k%d" % i, b"v" * size) for i in range(n)], codec=codec)


def write(tmp_path, data):
    path = str(tmp_path / f"{0:020d}.log")
    with open(path, "wb") as file:
        file.write(data)
    return path


@pytest.mark.parametrize("with_prefetch", [True, False])
@pytest.mark.parametrize("chunk_bytes", [100, 200, 1000, 1 << 20])
def test_chunks_cover_the_file_in_whole_batches(tmp_path, chunk_bytes, with_prefetch):
    data = b"".join(batch(10 * i, n=1 + i % 4) for i in range(40))
    path = write(tmp_path, data)
    seen = b""
    reader = SegmentReader(LOCAL, chunk_bytes)
    chunks = reader.chunks if with_prefetch else reader.chunks_without_prefetch
    for chunk in chunks(path, len(data)):
        check_chunk(chunk)
        assert chunk.position == len(seen)
        seen += chunk.raw.tobytes()
    assert seen == data


def test_a_batch_larger_than_a_chunk_is_read_whole(tmp_path):
    data = batch(0) + batch(10, size=50_000) + batch(20)
    chunks = [len(s.table) for s in SegmentReader(LOCAL, 1000).chunks(write(tmp_path, data), len(data))]
    assert sum(chunks) == 3


def test_an_empty_file_has_no_chunks(tmp_path):
    assert list(SegmentReader(LOCAL).chunks(write(tmp_path, b""), 0)) == []


@pytest.mark.parametrize("codecs", [(0,), (1, 2, 3, 4), (0, 3, 0, 1)])
@pytest.mark.parametrize("arena_bytes", [1, 300, 1 << 20])
def test_decompressed_parts_contain_every_requested_record_once_and_in_order(tmp_path, codecs, arena_bytes):
    rng = chance()
    data = b"".join(batch(10 * i, n=1 + i % 4, codec=rng.choice(codecs)) for i in range(30))
    path = write(tmp_path, data)
    batches = decode_log(data)
    reader, scanner = SegmentReader(LOCAL, 700, arena_bytes), RecordScanner(portion_records=5)
    wanted_bases = {b.base_offset for b in batches if rng.random() < 0.6}
    seen = []
    for chunk in reader.chunks(path, len(data)):
        wanted = np.isin(chunk.table["base_offset"], list(wanted_bases))
        rows = []
        for opened in reader.open_rows(chunk, wanted):
            for portion in scanner.portions(chunk, opened):
                rows += range(portion.first_row, portion.end_row)
                seen += portion.records["offset"].tolist()
                assert not (opened.where[portion.records["row"]] == CLOSED).any()
        assert rows == list(range(len(chunk.table)))
    assert seen == [r.offset for b in batches if b.base_offset in wanted_bases for r in b.records]


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("piece_bytes, records", [(1, 1), (64, 3), (1 << 20, 100)])
def test_a_large_batch_is_read_in_pieces_of_whole_records(tmp_path, monkeypatch, codec, piece_bytes, records):
    read_in_pieces(monkeypatch, records, piece_bytes)
    data = batch(0, n=1, codec=codec) + batch(10, n=9, codec=codec, size=50) + batch(30, n=2, codec=codec)
    reader, scanner = SegmentReader(LOCAL), RecordScanner(2)
    [chunk] = reader.chunks_without_prefetch(write(tmp_path, data), len(data))
    seen = []
    for opened in reader.open_rows(chunk, np.ones(3, bool)):
        for portion in scanner.portions(chunk, opened):
            offsets = portion.records["offset"].tolist()
            assert portion.chunk.table["record_count"][opened.first] == len(offsets)
            assert portion.chunk.table["last_offset"][opened.first] == offsets[-1]
            assert opened.from_here(np.array([0, 1, 10]))[opened.first] == len(seen)
            seen += offsets
    assert seen == [0, *range(10, 19), 30, 31]


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize(
    "fields, what",
    [
        ({"record_count": 8}, "bytes after its last record"),
        ({"record_count": 10}, "fewer records than it declares|more records than its bytes"),
        ({"last_offset": 17}, "is above the last offset"),
        ({"offsets": [0, 1, 2, 2, 4, 5, 6, 7, 8]}, "do not increase"),
        ({"offsets": [0, 1, 2, 3, 1, 5, 6, 7, 8]}, "do not increase"),
    ],
)
def test_damage_within_pieces_is_reported(tmp_path, monkeypatch, codec, fields, what):
    read_in_pieces(monkeypatch, 2)
    fields = dict(fields)
    offsets = fields.pop("offsets", range(9))
    records = [Rec(10 + offset, 1000, b"k", b"v" * 50) for offset in offsets]
    data = batch(0) + encode_batch(records, codec=codec, **fields)
    reader, scanner = SegmentReader(LOCAL), RecordScanner(2)
    [chunk] = reader.chunks_without_prefetch(write(tmp_path, data), len(data))
    with pytest.raises(CorruptLog, match=what) as caught:
        for opened in reader.open_rows(chunk, np.ones(2, bool)):
            list(scanner.portions(chunk, opened))
    assert (caught.value.byte_position, caught.value.offset) == (len(batch(0)), 10)


@pytest.mark.parametrize("codec", range(1, 5))
def test_a_record_that_exceeds_the_memory_is_refused_but_not_reported_as_damaged(tmp_path, monkeypatch, codec):
    read_in_pieces(monkeypatch)
    monkeypatch.setenv("KEYTAIL_MAX_RECORD_BYTES", "70")
    data = batch(0, codec=codec) + batch(10, n=3, size=90, codec=codec)
    reader, scanner = SegmentReader(LOCAL), RecordScanner(2)
    [chunk] = reader.chunks_without_prefetch(write(tmp_path, data), len(data))
    with pytest.raises(Refused, match=r"a record has 10. bytes, more than the limit of 70.*--max-record") as caught:
        for opened in reader.open_rows(chunk, np.ones(2, bool)):
            list(scanner.portions(chunk, opened))
    assert (caught.value.byte_position, caught.value.offset) == (len(batch(0, codec=codec)), 10)
    assert "fetch" not in str(caught.value)


def test_a_record_in_a_batch_that_is_not_read_in_pieces_is_read_with_any_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("KEYTAIL_MAX_RECORD_BYTES", "70")
    data = batch(0, n=3, size=90, codec=2)
    [chunk] = SegmentReader(LOCAL).chunks_without_prefetch(write(tmp_path, data), len(data))
    [opened] = SegmentReader(LOCAL).open_rows(chunk, np.ones(1, bool))
    assert [len(portion.records) for portion in RecordScanner(2).portions(chunk, opened)] == [3]


@pytest.mark.parametrize("arena_bytes", [300, 1 << 20])
@pytest.mark.parametrize("magic", [2, 1])
def test_the_memory_of_a_chunk_is_valid_while_the_next_chunk_is_made(tmp_path, arena_bytes, magic):
    """One thread makes the next portion while another one hashes the keys of this one."""
    rng = chance()
    data = b""
    for i in range(60):
        codec = rng.choice([0, 1, 2, 3])
        if magic == 1 and rng.random() < 0.3:
            data += encode_single(Rec(10 * i, 1000, b"k%d" % i, b"v" * 30))
        else:
            data += batch(10 * i, n=1 + i % 4, codec=codec)
    path = write(tmp_path, data)
    reader, scanner = SegmentReader(LOCAL, 700, arena_bytes), RecordScanner(portion_records=5)
    before = None
    portions = 0
    for chunk in reader.chunks_without_prefetch(path, len(data)):
        for opened in reader.open_rows(chunk, np.ones(len(chunk.table), bool)):
            for portion in scanner.portions(chunk, opened):
                if before is not None:
                    assert _content(before[0]) == before[1]
                before = (portion, _content(portion))
                portions += 1
    assert portions > 20


def _content(portion):
    where = portion.opened.where
    keys = []
    for record in portion.records:
        source = portion.chunk.raw if where[record["row"]] == IN_RAW else portion.opened.arena
        keys.append(source[record["body_start"] : record["body_start"] + record["body_bytes"]].tobytes())
    return keys, portion.chunk.table.tobytes(), portion.chunk.raw.tobytes()


@pytest.mark.parametrize("chunk_bytes", [150, 1 << 20])
@pytest.mark.parametrize(
    "tail, what",
    [
        (batch(100)[:-1], "does not fit into the"),
        (batch(100)[:10], "the last 10 bytes of the file are too few"),
        (bytes(200), "below the minimum"),
        (batch(0), "begins at or below the last offset"),
        (b"\0" * 8 + b"\x7f\xff\xff\xff" + b"\0" * 50, "invalid magic|does not fit"),
    ],
)
def test_damage_is_reported_with_its_position_after_the_valid_batches(tmp_path, chunk_bytes, tail, what):
    good = batch(10) + batch(20)
    path = write(tmp_path, good + tail)
    seen = []
    with pytest.raises(CorruptLog, match=what) as caught:
        for chunk in SegmentReader(LOCAL, chunk_bytes).chunks(path, len(good + tail)):
            seen += chunk.table["base_offset"].tolist()
    assert seen == [10, 20]
    assert (caught.value.path, caught.value.byte_position, caught.value.offset) == (path, len(good), 23)
    assert caught.value.remedy


def test_an_incomplete_batch_ends_the_log_at_the_byte_at_which_a_broker_truncates(tmp_path):
    good = batch(10) + batch(20)
    path = write(tmp_path, good + bytes(500))
    chunks = SegmentReader(LOCAL, 150).chunks(path, len(good) + 500, torn_tail=True)
    assert sum(len(s.raw) for s in chunks) == len(good)


def test_a_file_that_shrank_since_it_was_listed_is_an_error(tmp_path):
    path = write(tmp_path, batch(0))
    with pytest.raises(CorruptLog, match="shorter than when it was listed"):
        list(SegmentReader(LOCAL).chunks(path, 5000))


@pytest.mark.parametrize("codec", [1, 2, 3, 4, 5, 7])
def test_a_block_that_its_codec_refuses_is_damaged(tmp_path, codec):
    from tests.reference.varints import crc32c

    data = bytearray(batch(0) + batch(10))
    at = len(batch(0))
    data[at + 22] |= codec
    data[at + 17 : at + 21] = crc32c(bytes(data[at + 21 :])).to_bytes(4, "big")
    path = write(tmp_path, bytes(data))
    reader = SegmentReader(LOCAL)
    (chunk,) = reader.chunks(path, len(data))
    with pytest.raises(CorruptLog, match="records of the batch cannot be read") as caught:
        list(reader.open_rows(chunk, np.ones(2, bool)))
    assert (caught.value.byte_position, caught.value.offset) == (at, 10)


@pytest.mark.parametrize("codec", range(1, 5))
def test_a_record_length_beyond_the_block_is_damage_and_not_a_large_record(tmp_path, monkeypatch, codec):
    read_in_pieces(monkeypatch)
    from tests.reference.varints import crc32c

    block = compress(codec, b"\xfe\xff\xff\xff\x0f" + bytes(1 << 20))
    data = bytearray(encode_batch([], base_offset=0, last_offset=5, record_count=5)) + block
    data[22] |= codec
    data[8:12] = (len(data) - 12).to_bytes(4, "big")
    data[17:21] = crc32c(bytes(data[21:])).to_bytes(4, "big")
    reader = SegmentReader(LOCAL)
    (chunk,) = reader.chunks(write(tmp_path, bytes(data)), len(data))
    with pytest.raises(CorruptLog, match="a record's length does not match"):
        for opened in reader.open_rows(chunk, np.ones(1, bool)):
            list(RecordScanner(2).portions(chunk, opened))


@pytest.mark.parametrize("codec", range(1, 5))
def test_a_large_block_without_records_is_damaged(tmp_path, monkeypatch, codec):
    read_in_pieces(monkeypatch)
    from tests.reference.varints import crc32c

    block = compress(codec, bytes(1 << 20))
    data = bytearray(encode_batch([], base_offset=0, last_offset=5, record_count=5)) + block
    data[22] |= codec
    data[8:12] = (len(data) - 12).to_bytes(4, "big")
    data[17:21] = crc32c(bytes(data[21:])).to_bytes(4, "big")
    reader = SegmentReader(LOCAL)
    (chunk,) = reader.chunks(write(tmp_path, bytes(data)), len(data))
    with pytest.raises(CorruptLog, match="a record's length does not match"):
        for opened in reader.open_rows(chunk, np.ones(1, bool)):
            list(RecordScanner(2).portions(chunk, opened))


def test_a_control_batch_without_a_readable_type_is_refused_with_its_position(tmp_path):
    marker = encode_marker(10, 5, commit=True, producer_id=1, producer_epoch=0)
    odd = encode_batch([Rec(11, 5, b"\0", b"\0")], producer_id=1, producer_epoch=0, transactional=True, control=True)
    data = batch(0) + marker + odd
    path = write(tmp_path, data)
    (chunk,) = SegmentReader(LOCAL).chunks(path, len(data))
    with pytest.raises(Refused) as caught:
        refuse_unsupported(chunk)
    assert (caught.value.byte_position, caught.value.offset) == (len(batch(0) + marker), 11)
