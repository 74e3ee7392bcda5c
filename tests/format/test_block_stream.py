"""Blocks that are decompressed and compressed in parts give the same bytes, and the same errors, as whole blocks."""

from __future__ import annotations

import cramjam
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.format.codecs.errors import TooLarge, of_library
from keytail.format.codecs.table import SNAPPY, ZSTD
from keytail.format.compression import compress, compressor, decompress, decompress_in_parts
from keytail.limits import MAX_RECORD_VARIABLE
from tests.chance import draws
from tests.format.test_compression import ACCEPTED, REFUSED, TEXT, flipped


def joined(codec: int, data: bytes, part_bytes: int) -> bytes:
    parts = [bytes(part) for part in decompress_in_parts(codec, memoryview(data), part_bytes)]
    assert codec == SNAPPY or all(len(part) <= part_bytes for part in parts)
    return b"".join(parts)


@pytest.mark.parametrize("part_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize("what", ACCEPTED)
def test_blocks_accepted_as_a_whole_are_accepted_in_parts(what: str, part_bytes: int) -> None:
    codec, data, expected = ACCEPTED[what]
    assert joined(codec, data, max(part_bytes, len(expected) // 1000)) == expected


@pytest.mark.parametrize("what", REFUSED)
def test_blocks_refused_as_a_whole_are_refused_in_parts(what: str) -> None:
    codec, data, _ = REFUSED[what]
    with pytest.raises((ValueError, TooLarge)):
        joined(codec, data, 1 << 20)


def outcome(open_it: object) -> bytes | None:
    try:
        return bytes(open_it())
    except (ValueError, TooLarge):
        return None


@given(st.integers(1, 4), st.integers(0, 10**6), st.integers(0, 7), st.integers(0, 10**6))
@settings(deadline=None, max_examples=draws(300))
def test_damage_is_found_in_parts_as_in_a_whole_block(codec: int, position: int, bit: int, cut: int) -> None:
    data = flipped(compress(codec, TEXT), position % len(compress(codec, TEXT)), bit)
    data = data[: len(data) - cut % 7]
    whole = outcome(lambda: decompress(codec, data, limit_bytes=1 << 24))
    assert outcome(lambda: joined(codec, data, 4096)) == whole


@given(st.integers(0, 4), st.lists(st.binary(max_size=70_000), max_size=5))
@settings(deadline=None, max_examples=draws(60))
def test_a_block_compressed_in_parts_is_decompressed_as_a_whole(codec: int, parts: list[bytes]) -> None:
    packer = compressor(codec)
    packed = b"".join([*(packer.compress(part) for part in parts), packer.flush()])
    if codec == SNAPPY and not any(parts):
        return  # rewriting a batch never produces a framing without a block
    assert bytes(decompress(codec, packed)) == b"".join(parts)


def test_a_snappy_chunk_that_is_too_large_is_not_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_RECORD_VARIABLE, "1000")
    # the chunks of all producers fit
    assert joined(SNAPPY, compress(SNAPPY, bytes(5000)), 1) == bytes(5000)
    with pytest.raises(TooLarge, match="a snappy chunk decompresses to 5000000 bytes"):
        joined(SNAPPY, bytes(cramjam.snappy.compress_raw(bytes(5_000_000))), 1)
    with pytest.raises(ValueError, match="declares 4294967295"):
        joined(SNAPPY, b"\xff\xff\xff\xff\x0f" + b"\x00x", 1)


@pytest.mark.parametrize(
    "text, kind",
    [
        ("decompression error: Allocation error : not enough memory", MemoryError),
        ("LZ4F_decompress failed with code: ERROR_allocation_failed", MemoryError),
        ("zstd decompress error: Frame requires too much memory for decoding", TooLarge),
        ("zstd decompress error: Data corruption detected", ValueError),
    ],
)
def test_a_lack_of_memory_in_a_library_is_not_reported_as_damage(text: str, kind: type[Exception]) -> None:
    assert type(of_library("codec", RuntimeError(text))) is kind


def test_a_window_larger_than_that_of_kafka_is_not_damaged() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = stream.compress(bytes(1000)) + stream.flush()
    with pytest.raises(TooLarge, match="too much memory"):
        joined(ZSTD, data, 1000)
