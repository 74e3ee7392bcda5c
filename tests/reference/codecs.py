"""The five codecs in Kafka's framing, with other libraries and calls than `keytail.format.compression`.

Each of the two modules must read what the other writes. The snappy reader is plain Python.
"""

from __future__ import annotations

import gzip
import struct

import cramjam
import lz4.frame
import zstandard

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
XERIAL_HEADER = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
SNAPPY_BLOCK_BYTES = 32768


def compress(codec: int, data: bytes) -> bytes:
    data = bytes(data)
    if codec == NONE:
        return data
    if codec == GZIP:
        return gzip.compress(data, 6, mtime=0)
    if codec == SNAPPY:
        blocks = [data[i : i + SNAPPY_BLOCK_BYTES] for i in range(0, len(data), SNAPPY_BLOCK_BYTES)]
        packed = [bytes(cramjam.snappy.compress_raw(block)) for block in blocks]
        return XERIAL_HEADER + b"".join(struct.pack(">i", len(block)) + block for block in packed)
    if codec == LZ4:
        return lz4.frame.compress(
            data,
            block_linked=False,
            block_size=lz4.frame.BLOCKSIZE_MAX64KB,
            content_checksum=False,
            store_size=False,
        )
    if codec == ZSTD:
        stream = zstandard.ZstdCompressor(level=3).compressobj()
        return stream.compress(data) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) + stream.flush()
    raise ValueError(f"unknown codec {codec}")


def decompress(codec: int, data: bytes) -> bytes:
    data = bytes(data)
    if codec == NONE:
        return data
    if codec == GZIP:
        return gzip.decompress(data)
    if codec == SNAPPY:
        return _unsnappy(data)
    if codec == LZ4:
        return lz4.frame.decompress(data)
    if codec == ZSTD:
        return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    raise ValueError(f"unknown codec {codec}")


def _unsnappy(data: bytes) -> bytes:
    if not data.startswith(XERIAL_HEADER[:8]):
        return unsnappy_raw(data)
    out, at = b"", 16
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at)
        out += unsnappy_raw(data[at + 4 : at + 4 + size])
        at += 4 + size
    return out


def unsnappy_raw(data: bytes) -> bytes:
    """Decompress a raw snappy block: a length, followed by literals and back-references."""
    total = shift = at = 0
    while True:
        total |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            break
    out = bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        if tag & 3 == 0:
            size = tag >> 2
            if size >= 60:
                width = size - 59
                size = int.from_bytes(data[at : at + width], "little")
                at += width
            out += data[at : at + size + 1]
            at += size + 1
            continue
        if tag & 3 == 1:
            size, back = (tag >> 2 & 7) + 4, (tag >> 5) << 8 | data[at]
            at += 1
        else:
            width = 2 if tag & 3 == 2 else 4
            size, back = (tag >> 2) + 1, int.from_bytes(data[at : at + width], "little")
            at += width
        for _ in range(size):
            out.append(out[-back])
    if len(out) != total:
        raise ValueError(f"snappy block has {len(out)} bytes, but declares {total}")
    return bytes(out)
