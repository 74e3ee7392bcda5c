"""Small blocks that decompress to many bytes, one per codec."""

from __future__ import annotations

import functools
import gzip
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence

import cramjam
import crc32c
import lz4.frame
import zstandard

from tests.reference.batches import AFTER_CRC
from tests.reference.codecs import GZIP, LZ4, SNAPPY, XERIAL_HEADER, ZSTD
from tests.reference.varints import encode_varint


@functools.cache
def bomb(codec: int, size_bytes: int) -> bytes:
    """Return about `size_bytes` compressed zeros in Kafka's framing; for snappy, with ratio 1 to 21, at most 64 MiB."""
    if codec == GZIP:
        return gzip.compress(bytes(size_bytes), 9, mtime=0)
    if codec == SNAPPY:
        block = bytes(cramjam.snappy.compress_raw(bytes(1 << 20)))
        return XERIAL_HEADER + (struct.pack(">i", len(block)) + block) * min(size_bytes >> 20, 64)
    if codec == LZ4:
        return bytes(
            lz4.frame.compress(
                bytes(size_bytes), block_size=lz4.frame.BLOCKSIZE_MAX4MB, block_linked=False, store_size=False
            )
        )
    if codec == ZSTD:
        stream = zstandard.ZstdCompressor(level=3).compressobj()  # a stream has no content size in its header
        return b"".join([*(stream.compress(bytes(1 << 20)) for _ in range(size_bytes >> 20)), stream.flush()])
    raise ValueError(f"codec {codec} has no bomb")


def bomb_batch(
    codec: int, parts: Iterable[bytes], *, records: int, base_offset: int, last_offset: int, timestamp_ms: int
) -> bytes:
    """Return a batch with the block `parts`, compressed as a stream, so that the uncompressed block is never in memory.
    """
    block = b"".join(_packed(codec, parts))
    covered = AFTER_CRC.pack(codec, last_offset - base_offset, timestamp_ms, timestamp_ms, -1, -1, -1, records) + block
    prefix = struct.pack(">qiib", base_offset, 9 + len(covered), 0, 2)
    return prefix + struct.pack(">I", int(crc32c.crc32c(covered))) + covered


def _packed(codec: int, parts: Iterable[bytes]) -> Iterator[bytes]:
    if codec == SNAPPY:
        yield XERIAL_HEADER
        for part in parts:
            block = bytes(cramjam.snappy.compress_raw(part))
            yield struct.pack(">i", len(block)) + block
        return
    if codec == LZ4:
        stream = lz4.frame.LZ4FrameCompressor(block_linked=False, block_size=lz4.frame.BLOCKSIZE_MAX64KB)
        yield stream.begin()
    else:
        stream = zlib.compressobj(9, zlib.DEFLATED, 31) if codec == GZIP else None
        stream = stream or zstandard.ZstdCompressor(level=3).compressobj()
    for part in parts:
        yield stream.compress(part)
    yield stream.flush()


def value_records(keys: Sequence[bytes], value_bytes: int) -> Iterator[bytes]:
    """Yield a record for each of these keys, with a value of `value_bytes` zeros; offset deltas ascend from 0."""
    for number, key in enumerate(keys):
        front = b"\0\0" + encode_varint(number) + encode_varint(len(key)) + key + encode_varint(value_bytes)
        yield encode_varint(len(front) + value_bytes + 1) + front
        for start in range(0, value_bytes, 1 << 20):
            yield bytes(min(1 << 20, value_bytes - start))
        yield b"\0"


def tiny_records(count: int, keys: int) -> Iterator[bytes]:
    """Yield `count` records of a few bytes with empty values, in which `keys` keys alternate."""
    for first in range(0, count, 1 << 14):
        yield b"".join(
            _tiny(number, encode_varint(len(key)) + key)
            for number in range(first, min(first + (1 << 14), count))
            for key in (b"%d" % (number % keys),)
        )


def _tiny(number: int, key: bytes) -> bytes:
    body = b"\0\0" + encode_varint(number) + key + b"\0\0"
    return encode_varint(len(body)) + body
