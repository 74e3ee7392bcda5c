"""Small blocks that decompress to many bytes, one a codec, and such that lie about their size."""

from __future__ import annotations

import functools
import gzip
import struct

import cramjam
import lz4.frame
import zstandard

from tests.reference.codecs import GZIP, LZ4, SNAPPY, XERIAL_HEADER, ZSTD


@functools.cache
def bomb(codec: int, size_bytes: int) -> bytes:
    """About `size_bytes` zeros, in Kafka's framing; of snappy, whose ratio is 1 to 21, no more than 64 MiB."""
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
        stream = zstandard.ZstdCompressor(level=3).compressobj()  # without the size in its header
        return b"".join([*(stream.compress(bytes(1 << 20)) for _ in range(size_bytes >> 20)), stream.flush()])
    raise ValueError(f"no bombs of codec {codec}")


def lying_snappy(stated_bytes: int) -> bytes:
    """A raw block whose own header states so many bytes, with hardly any behind it."""
    header = bytearray()
    while stated_bytes > 0x7F:
        header.append(stated_bytes & 0x7F | 0x80)
        stated_bytes >>= 7
    header.append(stated_bytes)
    return bytes(header) + b"\x00a"


def lying_zstd(stated_bytes: int) -> bytes:
    """A frame whose header declares so many bytes of content, and one block of a repeated byte."""
    block = 1 | 1 << 1 | (128 << 10) << 3  # last, repeated, 128 KiB
    return struct.pack("<IBQ", 0xFD2FB528, 0xE0, stated_bytes) + block.to_bytes(3, "little") + b"\0"
