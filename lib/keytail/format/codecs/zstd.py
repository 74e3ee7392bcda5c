"""Compresses and decompresses zstd as Kafka does (COMPRESSION.md 5)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import zstandard

from keytail.format.codecs.errors import Buffer, of_library, raise_too_large

_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_SKIPPABLE, _ZSTD_SKIPPABLE_MASK = 0x184D2A50, 0xFFFFFFF0
_ZSTD_MAX_BLOCK_BYTES = 128 << 10
_ZSTD_RAW, _ZSTD_RLE, _ZSTD_COMPRESSED = range(3)
_ZSTD_SINGLE_SEGMENT, _ZSTD_CHECKSUM = 0x20, 0x04


class _Contexts(threading.local):
    """The working memory of zstd, allocated once per thread: this memory is large, and only one call at a time can use
    it."""

    def __init__(self) -> None:
        self.packers: dict[int, zstandard.ZstdCompressor] = {}
        self.unpacker = zstandard.ZstdDecompressor()

    def packer(self, level: int) -> zstandard.ZstdCompressor:
        if level not in self.packers:
            self.packers[level] = zstandard.ZstdCompressor(level=level)
        return self.packers[level]


_contexts = _Contexts()


def compress(data: Buffer, level: int) -> bytes:
    stream = _contexts.packer(level).compressobj()
    # Kafka flushes the stream before ending it, which adds an empty last block.
    parts = (stream.compress(data), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK), stream.flush())
    return b"".join(parts)


def decompress(data: Buffer, limit_bytes: int, _skip_header_checksum: bool) -> bytes:
    view = memoryview(data)
    parts, total = [], 0
    for start, end, most_bytes in _zstd_frames(view):
        out = _unzstd_frame(view[start:end], most_bytes, limit_bytes - total)
        parts.append(out)
        total += len(out)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _zstd_frames(view: memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield the start and the end of each frame, and the maximum number of bytes that its blocks can contain."""
    at = 0
    while at < len(view):
        word = int.from_bytes(view[at : at + 4], "little")
        if word & _ZSTD_SKIPPABLE_MASK == _ZSTD_SKIPPABLE:
            # A skippable frame that is truncated at the end of the data is accepted: no content is missing.
            at += 8 + int.from_bytes(view[at + 4 : at + 8], "little")
            continue
        end, most_bytes = _walk_zstd_frame(view, at)
        yield at, end, most_bytes
        at = end


def _unzstd_frame(frame: memoryview, most_bytes: int, limit_bytes: int) -> bytes:
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
    except zstandard.ZstdError as problem:
        raise ValueError(f"zstd: {problem}") from problem
    if declared != zstandard.CONTENTSIZE_UNKNOWN:
        if declared > most_bytes:
            raise ValueError(f"zstd: a frame of at most {most_bytes} bytes declares {declared} bytes")
        if declared > limit_bytes:
            raise_too_large(limit_bytes)
    try:
        # One byte more than allowed, to distinguish a frame of exactly `limit_bytes` from a longer frame.
        room = max(1, min(most_bytes, limit_bytes + 1))
        if declared == 0:
            # The library's shortcut for empty content checks neither blocks nor checksum.
            out = _contexts.unpacker.stream_reader(frame).read(1)
        else:
            out = _contexts.unpacker.decompress(frame, max_output_size=room)
    except zstandard.ZstdError as problem:
        if most_bytes > limit_bytes and "did not decompress full frame" in str(problem):
            raise_too_large(limit_bytes)
        raise of_library("zstd", problem) from problem
    if declared == 0 and out:
        raise ValueError("zstd: a frame that declares no content has content")
    if len(out) > limit_bytes:
        raise_too_large(limit_bytes)
    return out


def _walk_zstd_frame(view: memoryview, start: int) -> tuple[int, int]:
    """Return the end of the frame at `start`, and the maximum size of the contents of its blocks."""
    if start + 6 > len(view) or int.from_bytes(view[start : start + 4], "little") != _ZSTD_MAGIC:
        raise ValueError("zstd: no frame header" if not start else f"zstd: no frame at byte {start}")
    descriptor = view[start + 4]
    single = bool(descriptor & _ZSTD_SINGLE_SEGMENT)
    dictionary_id_bytes = (0, 1, 2, 4)[descriptor & 3]
    content_size_bytes = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    at = start + 5 + (not single) + dictionary_id_bytes + content_size_bytes
    most_bytes = 0
    while at + 3 <= len(view):
        word = int.from_bytes(view[at : at + 3], "little")
        kind, size = word >> 1 & 3, word >> 3
        at += 3 + (1 if kind == _ZSTD_RLE else size)
        most_bytes += _ZSTD_MAX_BLOCK_BYTES if kind == _ZSTD_COMPRESSED else min(size, _ZSTD_MAX_BLOCK_BYTES)
        if word & 1:
            at += 4 if descriptor & _ZSTD_CHECKSUM else 0
            if at > len(view):
                break
            return at, most_bytes
    raise ValueError("zstd: data ends inside a frame")


def decompress_in_parts(data: Buffer, part_bytes: int) -> Iterator[Buffer]:
    view = memoryview(data)
    unpacker = zstandard.ZstdDecompressor()
    for start, end, most_bytes in _zstd_frames(view):
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


class Compressor:
    def __init__(self, level: int) -> None:
        self._packer = zstandard.ZstdCompressor(level=level).compressobj()

    def compress(self, data: Buffer) -> bytes:
        return self._packer.compress(data)

    def flush(self) -> bytes:
        return self._packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) + self._packer.flush()
