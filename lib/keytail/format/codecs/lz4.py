"""Compresses and decompresses lz4 in Kafka's framing (COMPRESSION.md 4)."""

from __future__ import annotations

from collections.abc import Iterator

import lz4.frame

from keytail.format.codecs.errors import Buffer, of_library, raise_too_large

_LZ4_MAGIC = bytes.fromhex("04224d18")
_LZ4_VERSION, _LZ4_VERSION_MASK = 0x40, 0xC0
_LZ4_INDEPENDENT, _LZ4_BLOCK_CHECKSUM, _LZ4_CONTENT_SIZE, _LZ4_CONTENT_CHECKSUM = 0x20, 0x10, 0x08, 0x04
_LZ4_RESERVED = 0x03
_LZ4_STORED = 0x80000000
_LZ4_END_MARK = bytes(4)
_LZ4_FAST_LEVEL = 9  # for this level Kafka uses the fast compressor, for other levels the slow compressor
_LZ4_MIN_SLOW_LEVEL = 3  # below this level, the library uses its fast compressor
_LZ4_FIRST_SIZE_CODE = 4  # the code of block size 64 KiB; each following code, up to 7, means four times the size


def _plain_lz4_headers() -> dict[tuple[int, int], bytes]:
    """Return the frame headers without content size and content checksum, by FLG and BD bytes."""
    headers = {}
    for size_code in range(_LZ4_FIRST_SIZE_CODE, 8):
        for block_checksum in (False, True):
            header = lz4.frame.compress_begin(
                lz4.frame.create_compression_context(),
                block_size=size_code,
                block_linked=False,
                block_checksum=block_checksum,
                content_checksum=False,
            )
            headers[header[4], header[5]] = bytes(header)
    return headers


_LZ4_HEADERS = _plain_lz4_headers()
_LZ4_HEADER = bytes.fromhex("04224d18604082")  # the header of all frames that are written here
_OLD_LZ4_HEADER = bytes.fromhex("04224d1860401a")


def _library_level(level: int) -> int:
    return 0 if level == _LZ4_FAST_LEVEL else max(level, _LZ4_MIN_SLOW_LEVEL)


def compress(data: Buffer, level: int) -> bytes:
    return lz4.frame.compress(
        data,
        compression_level=_library_level(level),
        block_size=lz4.frame.BLOCKSIZE_MAX64KB,
        block_linked=False,
        content_checksum=False,
        store_size=False,
    )


def with_old_lz4_checksum(frame: bytes) -> bytes:
    """Return an lz4 frame made by `compress`, with the header checksum that messages of magic 0 have (LEGACY.md 3)."""
    assert frame.startswith(_LZ4_HEADER)
    return _OLD_LZ4_HEADER + frame[len(_LZ4_HEADER) :]


def decompress(data: Buffer, limit_bytes: int, skip_header_checksum: bool) -> bytes:
    frame, most_bytes = _lz4_frame(data, skip_header_checksum)
    try:
        if most_bytes <= limit_bytes:
            return lz4.frame.decompress(frame)
        unpacker = lz4.frame.LZ4FrameDecompressor()
        out = unpacker.decompress(frame, min(limit_bytes, 2**62) + 1)
    except RuntimeError as problem:
        raise of_library("lz4", problem) from problem
    if len(out) > limit_bytes:
        raise_too_large(limit_bytes)
    return out


def _lz4_frame(data: Buffer, skip_header_checksum: bool) -> tuple[Buffer, int]:
    """Return the first frame of `data`, in a form that the library accepts, and the maximum number of bytes that it can
    contain."""
    view = memoryview(data)
    header = bytes(view[:7])
    plain_header = _LZ4_HEADERS.get((header[4], header[5])) if len(header) == 7 else None
    if header == plain_header:
        header_bytes, flags = len(header), header[4]
    else:
        header_bytes, flags = _check_lz4_header(view, skip_header_checksum)
        plain_header = _LZ4_HEADERS[flags & ~(_LZ4_CONTENT_SIZE | _LZ4_CONTENT_CHECKSUM), view[5]]
    block_bytes = 1 << (8 + 2 * (view[5] >> 4))
    end, most_bytes = _walk_lz4_blocks(view, header_bytes, flags, block_bytes)
    frame: Buffer = view[: end + 4]
    if header != plain_header or frame[end:] != _LZ4_END_MARK:
        # Kafka verifies neither content size nor content checksum: give the library a frame without them.
        frame = plain_header + bytes(view[header_bytes:end]) + _LZ4_END_MARK
    return frame, most_bytes


def _check_lz4_header(view: memoryview, skip_checksum: bool) -> tuple[int, int]:
    """Check a frame header that is not one of `_plain_lz4_headers`; return its size and FLG byte."""
    if len(view) < 7 or view[:4] != _LZ4_MAGIC:
        raise ValueError("lz4: no frame header")
    flags, block = view[4], view[5]
    if flags & _LZ4_VERSION_MASK != _LZ4_VERSION:
        raise ValueError(f"lz4: unsupported version {flags >> 6}")
    if not flags & _LZ4_INDEPENDENT:
        raise ValueError("lz4: dependent blocks are not supported")
    if flags & _LZ4_RESERVED or block & 0x8F or block >> 4 < _LZ4_FIRST_SIZE_CODE:
        raise ValueError(f"lz4: reserved bits or invalid block size in {flags:02x} {block:02x}")
    header_bytes = 15 if flags & _LZ4_CONTENT_SIZE else 7
    if len(view) < header_bytes:
        raise ValueError("lz4: data ends inside the frame header")
    if skip_checksum:
        return header_bytes, flags
    try:
        lz4.frame.get_frame_info(view[:header_bytes])  # this verifies the header's checksum
    except RuntimeError as problem:
        raise ValueError(f"lz4: {problem}") from problem
    return header_bytes, flags


def _walk_lz4_blocks(view: memoryview, start: int, flags: int, block_bytes: int) -> tuple[int, int]:
    """Return the position of the end mark after the blocks, and the maximum size of their contents."""
    at, end, most_bytes = start, len(view), 0
    checksum_bytes = 4 if flags & _LZ4_BLOCK_CHECKSUM else 0
    while at + 4 <= end:
        word = int.from_bytes(view[at : at + 4], "little")
        size = word & ~_LZ4_STORED
        if size == 0:
            if flags & _LZ4_CONTENT_CHECKSUM and at + 8 > end:
                raise ValueError("lz4: data ends inside the content checksum")
            return at, most_bytes
        if size > block_bytes:
            raise ValueError(f"lz4: a block declares {size} bytes, but the frame allows {block_bytes}")
        most_bytes += size if word & _LZ4_STORED else block_bytes
        at += 4 + size + checksum_bytes
    raise ValueError("lz4: data ends before the end mark")


def decompress_in_parts(data: Buffer, part_bytes: int) -> Iterator[Buffer]:
    frame, _ = _lz4_frame(data, skip_header_checksum=False)
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


class Compressor:
    def __init__(self, level: int) -> None:
        self._packer = lz4.frame.LZ4FrameCompressor(
            compression_level=_library_level(level),
            block_size=lz4.frame.BLOCKSIZE_MAX64KB,
            block_linked=False,
            content_checksum=False,
        )
        self._head = self._packer.begin()

    def compress(self, data: Buffer) -> bytes:
        head, self._head = self._head, b""
        return bytes(head + self._packer.compress(data))

    def flush(self) -> bytes:
        return bytes(self._head + self._packer.flush())
