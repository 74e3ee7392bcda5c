"""Decompresses and compresses record blocks in parts, for blocks that are too large for memory.

The same data is accepted, and refused for the same reasons, as in `format/compression.py` for a whole block. A part
is small, except that snappy is decompressed one chunk at a time, as in Kafka's own reader.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Protocol

import cramjam
import lz4.frame
import zstandard
from isal import isal_zlib

from keytail.format import compression
from keytail.format.codecs.errors import LARGER_REMEDY, Buffer, TooLarge, of_library
from keytail.format.codecs.gzip import GZIP_HEADER, GZIP_LEVEL, is_gzip_header
from keytail.format.codecs.lz4 import lz4_frame
from keytail.format.codecs.snappy import XERIAL_HEADER, snappy_chunks
from keytail.format.codecs.zstd import ZSTD_LEVEL, zstd_frames
from keytail.limits import max_record_bytes

PART_BYTES = 1 << 20
_SNAPPY_MOST_RATIO = 22  # maximum ratio of decompressed to compressed bytes: three bytes give at most 64


def decompressed(codec_id: int, data: Buffer, part_bytes: int = PART_BYTES) -> Iterator[Buffer]:
    """Return an iterator over the decompressed bytes of `data`, in order. `data` is contiguous.

    The iterator raises ValueError at data that Kafka's reader of that codec refuses, and TooLarge for a snappy chunk
    above both `max_record_bytes` and PART_BYTES. Kafka's producers write chunks of 32 KiB, but a block without the
    framing is one chunk.
    """
    match codec_id:
        case compression.NONE:
            return iter([data])
        case compression.GZIP:
            return _gunzip(data, part_bytes)
        case compression.SNAPPY:
            return _unsnappy(data)
        case compression.LZ4:
            return _unlz4(data, part_bytes)
        case compression.ZSTD:
            return _unzstd(data, part_bytes)
    raise ValueError(f"unknown codec {codec_id}")


def _gunzip(data: Buffer, part_bytes: int) -> Iterator[Buffer]:
    rest = data
    while True:
        unpacker = isal_zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        source: Buffer = rest
        while not unpacker.eof:
            try:
                out = unpacker.decompress(source, part_bytes)
            except isal_zlib.error as problem:  # type: ignore[misc]
                raise ValueError(f"gzip: {problem}") from problem
            left = unpacker.unconsumed_tail
            if not out and not unpacker.eof and len(left) in (0, len(source)):
                raise ValueError("gzip: data ends inside a member")
            source = left
            yield out
        rest = unpacker.unused_data
        if not is_gzip_header(rest):
            return


def _unsnappy(data: Buffer) -> Iterator[Buffer]:
    for chunk in snappy_chunks(memoryview(data)):
        try:
            size = cramjam.snappy.decompress_raw_len(chunk)
            if size > _SNAPPY_MOST_RATIO * len(chunk):
                raise ValueError(f"snappy: a chunk of {len(chunk)} bytes declares {size} bytes")
            if size > max(max_record_bytes(), PART_BYTES):
                raise TooLarge(f"a snappy chunk decompresses to {size} bytes", remedy=LARGER_REMEDY)
            yield memoryview(cramjam.snappy.decompress_raw(chunk))
        except cramjam.DecompressionError as problem:
            raise ValueError(str(problem)) from problem


def _unlz4(data: Buffer, part_bytes: int) -> Iterator[Buffer]:
    frame, _ = lz4_frame(data, skip_header_checksum=False)
    unpacker = lz4.frame.LZ4FrameDecompressor()
    source: Buffer = frame
    while not unpacker.eof:
        try:
            out = unpacker.decompress(source, part_bytes)
        except RuntimeError as problem:
            raise of_library("lz4", problem) from problem
        if not out and not unpacker.eof and unpacker.needs_input:
            raise ValueError("lz4: data ends inside a frame")
        source = b""
        yield out


def _unzstd(data: Buffer, part_bytes: int) -> Iterator[Buffer]:
    view = memoryview(data)
    unpacker = zstandard.ZstdDecompressor()
    for start, end, most_bytes in zstd_frames(view):
        frame = view[start:end]
        try:
            declared = zstandard.get_frame_parameters(frame).content_size
            if declared != zstandard.CONTENTSIZE_UNKNOWN and declared > most_bytes:
                raise ValueError(f"zstd: a frame of at most {most_bytes} bytes declares {declared} bytes")
            with unpacker.stream_reader(frame) as reader:
                while out := reader.read(part_bytes):
                    if declared == 0:
                        raise ValueError("zstd: a frame that declares no content has content")
                    yield out
        except zstandard.ZstdError as problem:
            raise of_library("zstd", problem) from problem


class Compressor(Protocol):
    """Compresses a block in parts; the concatenated results of all calls are the block in Kafka's framing."""

    def compress(self, data: Buffer) -> bytes: ...

    def flush(self) -> bytes: ...


def compressor(codec_id: int) -> Compressor:
    """Return a compressor for one block, at the default level of Kafka's codec."""
    match codec_id:
        case compression.NONE:
            return _Plain()
        case compression.GZIP:
            return _Gzip()
        case compression.SNAPPY:
            return _Snappy()
        case compression.LZ4:
            return _Lz4()
        case compression.ZSTD:
            return _Zstd()
    raise ValueError(f"unknown codec {codec_id}")


class _Plain:
    def compress(self, data: Buffer) -> bytes:
        return bytes(data)

    def flush(self) -> bytes:
        return b""


class _Gzip:
    def __init__(self) -> None:
        self._packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._head, self._crc, self._size = GZIP_HEADER, 0, 0

    def compress(self, data: Buffer) -> bytes:
        self._crc, self._size = zlib.crc32(data, self._crc), self._size + len(data)
        head, self._head = self._head, b""
        return head + self._packer.compress(data)

    def flush(self) -> bytes:
        return self._head + self._packer.flush() + struct.pack("<II", self._crc, self._size & 0xFFFFFFFF)


class _Snappy:
    def __init__(self) -> None:
        self._head = XERIAL_HEADER

    def compress(self, data: Buffer) -> bytes:
        framed = compression.compress(compression.SNAPPY, data)
        head, self._head = self._head, b""
        return head + framed[len(XERIAL_HEADER) :]

    def flush(self) -> bytes:
        return self._head


class _Lz4:
    def __init__(self) -> None:
        self._packer = lz4.frame.LZ4FrameCompressor(
            compression_level=0, block_size=lz4.frame.BLOCKSIZE_MAX64KB, block_linked=False, content_checksum=False
        )
        self._head = self._packer.begin()

    def compress(self, data: Buffer) -> bytes:
        head, self._head = self._head, b""
        return bytes(head + self._packer.compress(data))

    def flush(self) -> bytes:
        return bytes(self._head + self._packer.flush())


class _Zstd:
    def __init__(self) -> None:
        self._packer = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj()

    def compress(self, data: Buffer) -> bytes:
        return self._packer.compress(data)

    def flush(self) -> bytes:
        return self._packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) + self._packer.flush()
