"""Small blocks that decompress to many bytes, one a codec."""

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
