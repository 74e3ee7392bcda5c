"""The five codecs in Kafka's framing: data that its readers accept is read, data that they refuse is refused.

COMPRESSION.md beside this file specifies the bytes. Compressed output need not equal Kafka's byte for byte (library
versions differ); framing and contents do.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterator
from typing import NoReturn, TypeAlias

import cramjam
import lz4.frame
import zstandard
from isal import isal_zlib

from keytail.errors import Refused, UsageProblem

Buffer: TypeAlias = bytes | bytearray | memoryview

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)

NO_LIMIT_BYTES = 2**63 - 1
LARGER_REMEDY = (
    "The data are not damaged, and the partition was not changed. Raise --max-record-bytes if each task has about 5 "
    "times as much memory, or leave this partition to the broker's log cleaner"
)


_WINDOW_REMEDY = (
    "The compression window is larger than 128 MiB, which Kafka's own readers refuse too; no flag changes this limit. "
    "The partition was not changed: check the compression settings of the producer"
)


class TooLarge(Refused):
    """Data that a broker can read but that needs more memory than allowed; never reported as damage."""

    default_slug = "too-large"


def decompress(
    codec_id: int, data: Buffer, limit_bytes: int = NO_LIMIT_BYTES, *, skip_header_checksum: bool = False
) -> Buffer:
    """Return the decompressed bytes of `data`, as an object that `np.frombuffer` accepts.

    ValueError, with the reason, for data that Kafka's reader of that codec refuses; TooLarge for an output longer than
    `limit_bytes`, detected before more than that is held. `data` is contiguous. `skip_header_checksum` accepts any lz4
    header checksum: those of magic 0 are wrong (LEGACY.md 3).
    """
    match codec_id:
        case 0:
            if len(data) > limit_bytes:
                _too_long(limit_bytes)
            return data
        case 1:
            return _gunzip(data, limit_bytes)
        case 2:
            return _unsnappy(data, limit_bytes)
        case 3:
            return _unlz4(data, limit_bytes, skip_header_checksum)
        case 4:
            return _unzstd(data, limit_bytes)
    raise ValueError(f"unknown codec {codec_id}")


# The levels that Kafka's configuration allows, by codec. gzip also allows -1, its default.
LEVELS = {GZIP: range(1, 10), LZ4: range(1, 18), ZSTD: range(-131072, 23)}


def check_level(codec_id: int, level: int | None) -> None:
    """Raise UsageProblem for a codec or level that Kafka's configuration does not allow. None: the default."""
    if not 0 <= codec_id < len(CODECS):
        raise UsageProblem(f"unknown codec {codec_id}", slug="unknown-codec")
    if level is None or (codec_id == GZIP and level == GZIP_LEVEL):
        return
    levels = LEVELS.get(codec_id)
    if levels is None:
        what = f"invalid compression level {level}: {CODECS[codec_id]} has no levels"
        raise UsageProblem(what, slug="invalid-compression-level")
    if level not in levels:
        what = f"invalid compression level {level}: {CODECS[codec_id]} has levels {levels[0]} to {levels[-1]}"
        raise UsageProblem(what, slug="invalid-compression-level")


def compress(codec_id: int, data: Buffer, level: int | None = None) -> bytes:
    """Return `data` in Kafka's framing; `level` None is the default of Kafka's codec (`check_level`)."""
    match codec_id:
        case 0:
            return bytes(data)
        case 1:
            return _gzip(data, GZIP_LEVEL if level is None else level)
        case 2:
            return _snappy(data)
        case 3:
            return _lz4(data, _LZ4_LEVEL if level is None else level)
        case 4:
            return _zstd(data, ZSTD_LEVEL if level is None else level)
    raise ValueError(f"unknown codec {codec_id}")


def _too_long(limit_bytes: int) -> NoReturn:
    raise TooLarge(f"the data decompress to more than {limit_bytes} bytes", remedy=LARGER_REMEDY)


def of_library(codec: str, problem: Exception) -> Exception:
    """Return the exception to raise for an error of a codec's library: lack of memory does not mean bad data."""
    text = str(problem)
    if "not enough memory" in text or "llocation" in text:
        return MemoryError(f"{codec}: {text}")
    if "too much memory" in text:  # a window above 128 MiB, the limit of Kafka's reader
        return TooLarge(f"{codec}: {text}", remedy=_WINDOW_REMEDY)
    return ValueError(f"{codec}: {text}")


# gzip: COMPRESSION.md 2

GZIP_LEVEL = -1
GZIP_HEADER = bytes.fromhex("1f8b08000000000000ff")  # no time, no extra flags, operating system unknown
_GZIP_FLAGS_OFF = 3
_GZIP_FHCRC, _GZIP_FEXTRA, _GZIP_FNAME, _GZIP_FCOMMENT = 2, 4, 8, 16
_GZIP_FIXED_BYTES = 10


def _gzip(data: Buffer, level: int) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    trailer = struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)
    return b"".join((GZIP_HEADER, packer.compress(data), packer.flush(), trailer))


def _gunzip(data: Buffer, limit_bytes: int) -> bytes:
    out, rest = _gunzip_member(data, limit_bytes)
    if not rest:
        return out
    parts, total = [out], len(out)
    # Bytes that follow are another member only if they begin with a complete, valid header; else they are ignored.
    while is_gzip_header(rest):
        out, rest = _gunzip_member(rest, limit_bytes - total)
        parts.append(out)
        total += len(out)
    return b"".join(parts)


def _gunzip_member(data: Buffer, limit_bytes: int) -> tuple[bytes, bytes]:
    unpacker = isal_zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        out = unpacker.decompress(data, min(limit_bytes, 2**62) + 1)
    except isal_zlib.error as problem:  # type: ignore[misc]
        raise ValueError(f"gzip: {problem}") from problem
    if len(out) > limit_bytes:
        _too_long(limit_bytes)
    if not unpacker.eof:
        raise ValueError("gzip: data ends inside a member")
    return out, unpacker.unused_data


def is_gzip_header(data: bytes) -> bool:
    if len(data) < _GZIP_FIXED_BYTES or data[:3] != GZIP_HEADER[:3]:
        return False
    flags, at = data[_GZIP_FLAGS_OFF], _GZIP_FIXED_BYTES
    if flags & _GZIP_FEXTRA:
        at += 2 + int.from_bytes(data[at : at + 2], "little")
    for flag in (_GZIP_FNAME, _GZIP_FCOMMENT):
        if flags & flag:
            at = data.find(b"\0", at) + 1
            if not at:
                return False
    if flags & _GZIP_FHCRC:
        if int.from_bytes(data[at : at + 2], "little") != zlib.crc32(data[:at]) & 0xFFFF:
            return False
        at += 2
    return at <= len(data)


# snappy: COMPRESSION.md 3

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_HEADER_BYTES = 16
_XERIAL_FIRST_WORD = int.from_bytes(_XERIAL_MAGIC[:4], "big")
_SNAPPY_BLOCK_BYTES = 32768


def _snappy(data: Buffer) -> bytes:
    view, parts = memoryview(data), [XERIAL_HEADER]
    for start in range(0, len(view), _SNAPPY_BLOCK_BYTES):
        block = cramjam.snappy.compress_raw(view[start : start + _SNAPPY_BLOCK_BYTES])
        parts += (len(block).to_bytes(4, "big"), bytes(block))
    return b"".join(parts)


def _unsnappy(data: Buffer, limit_bytes: int) -> Buffer:
    view = memoryview(data)
    if not view:
        raise ValueError("snappy: empty input")
    chunks = snappy_chunks(view)
    try:
        sizes = [cramjam.snappy.decompress_raw_len(chunk) for chunk in chunks]
        total = sum(sizes)
        if total > limit_bytes:
            _too_long(limit_bytes)
        if len(chunks) == 1:
            return memoryview(cramjam.snappy.decompress_raw(chunks[0]))
        out = bytearray(total)
        window, at = memoryview(out), 0
        for chunk, size in zip(chunks, sizes, strict=True):
            if size:
                cramjam.snappy.decompress_raw_into(chunk, window[at : at + size])
            at += size
    except cramjam.DecompressionError as problem:
        raise ValueError(str(problem)) from problem
    return out


def snappy_chunks(view: memoryview) -> list[memoryview]:
    """Return the raw blocks in the framing, or all of `view` if there is no framing."""
    if len(view) < _XERIAL_HEADER_BYTES or view[:8] != _XERIAL_MAGIC:
        return [view]
    chunks, at, end = [], _XERIAL_HEADER_BYTES, len(view)
    while at + 4 <= end:  # an incomplete length at the end is ignored
        size = int.from_bytes(view[at : at + 4], "big")
        if size == _XERIAL_FIRST_WORD:  # an appended frame: only these 4 bytes of its header are checked
            if at + _XERIAL_HEADER_BYTES > end:
                raise ValueError("snappy: data ends inside a second header")
            at += _XERIAL_HEADER_BYTES
            continue
        at += 4
        if not 0 < size <= end - at:
            raise ValueError(f"snappy: invalid chunk of {size} bytes with {end - at} bytes left")
        chunks.append(view[at : at + size])
        at += size
    return chunks


# lz4: COMPRESSION.md 4

_LZ4_MAGIC = bytes.fromhex("04224d18")
_LZ4_VERSION, _LZ4_VERSION_MASK = 0x40, 0xC0
_LZ4_INDEPENDENT, _LZ4_BLOCK_CHECKSUM, _LZ4_CONTENT_SIZE, _LZ4_CONTENT_CHECKSUM = 0x20, 0x10, 0x08, 0x04
_LZ4_RESERVED = 0x03
_LZ4_STORED = 0x80000000
_LZ4_END_MARK = bytes(4)
_LZ4_LEVEL = 9  # Kafka then uses the fast compressor, for any other level the slow one
_LZ4_LEAST_SLOW_LEVEL = 3  # below it the library uses the fast one
_LZ4_FIRST_SIZE_CODE = 4  # 64 KiB; each following code is four times as large, up to 7


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


_LZ4_HEADER = bytes.fromhex("04224d18604082")  # of all frames written here
_OLD_LZ4_HEADER = bytes.fromhex("04224d1860401a")


def _lz4(data: Buffer, level: int) -> bytes:
    return lz4.frame.compress(
        data,
        compression_level=0 if level == _LZ4_LEVEL else max(level, _LZ4_LEAST_SLOW_LEVEL),
        block_size=lz4.frame.BLOCKSIZE_MAX64KB,
        block_linked=False,
        content_checksum=False,
        store_size=False,
    )


def with_old_lz4_checksum(frame: bytes) -> bytes:
    """Return an lz4 frame made by `compress`, with the header checksum of messages of magic 0 (LEGACY.md 3)."""
    assert frame.startswith(_LZ4_HEADER)
    return _OLD_LZ4_HEADER + frame[len(_LZ4_HEADER) :]


def _unlz4(data: Buffer, limit_bytes: int, skip_header_checksum: bool) -> bytes:
    frame, most_bytes = lz4_frame(data, skip_header_checksum)
    try:
        if most_bytes <= limit_bytes:
            return lz4.frame.decompress(frame)
        unpacker = lz4.frame.LZ4FrameDecompressor()
        out = unpacker.decompress(frame, min(limit_bytes, 2**62) + 1)
    except RuntimeError as problem:
        raise of_library("lz4", problem) from problem
    if len(out) > limit_bytes:
        _too_long(limit_bytes)
    return out


def lz4_frame(data: Buffer, skip_header_checksum: bool) -> tuple[Buffer, int]:
    """Return the first frame of `data`, as the library accepts it, and the most bytes that its blocks can hold."""
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
    """Check a frame header that is not one of the plain ones; return its size and FLG byte."""
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
        lz4.frame.get_frame_info(view[:header_bytes])  # verifies the header's checksum
    except RuntimeError as problem:
        raise ValueError(f"lz4: {problem}") from problem
    return header_bytes, flags


def _walk_lz4_blocks(view: memoryview, start: int, flags: int, block_bytes: int) -> tuple[int, int]:
    """Return the position of the end mark after the blocks, and the most bytes that the blocks can hold."""
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


# zstd: COMPRESSION.md 5

_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_SKIPPABLE, _ZSTD_SKIPPABLE_MASK = 0x184D2A50, 0xFFFFFFF0
ZSTD_LEVEL = 3
_ZSTD_MAX_BLOCK_BYTES = 128 << 10
_ZSTD_RAW, _ZSTD_RLE, _ZSTD_COMPRESSED = range(3)
_ZSTD_SINGLE_SEGMENT, _ZSTD_CHECKSUM = 0x20, 0x04


class _Contexts(threading.local):
    """zstd's working memory, allocated once per thread: it is large, and can serve only one call at a time."""

    def __init__(self) -> None:
        self.packers: dict[int, zstandard.ZstdCompressor] = {}
        self.unpacker = zstandard.ZstdDecompressor()

    def packer(self, level: int) -> zstandard.ZstdCompressor:
        if level not in self.packers:
            self.packers[level] = zstandard.ZstdCompressor(level=level)
        return self.packers[level]


_contexts = _Contexts()


def _zstd(data: Buffer, level: int) -> bytes:
    stream = _contexts.packer(level).compressobj()
    # Kafka flushes the stream before ending it, which adds an empty last block.
    parts = (stream.compress(data), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK), stream.flush())
    return b"".join(parts)


def _unzstd(data: Buffer, limit_bytes: int) -> bytes:
    view = memoryview(data)
    parts, total = [], 0
    for start, end, most_bytes in zstd_frames(view):
        out = _unzstd_frame(view[start:end], most_bytes, limit_bytes - total)
        parts.append(out)
        total += len(out)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def zstd_frames(view: memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield start and end of each frame, and the most bytes that its blocks can hold."""
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
            _too_long(limit_bytes)
    try:
        # One byte more than allowed, to distinguish a frame of exactly `limit_bytes` from a longer one.
        room = max(1, min(most_bytes, limit_bytes + 1))
        if declared == 0:
            # The library's shortcut for empty content checks neither blocks nor checksum.
            out = _contexts.unpacker.stream_reader(frame).read(1)
        else:
            out = _contexts.unpacker.decompress(frame, max_output_size=room)
    except zstandard.ZstdError as problem:
        if most_bytes > limit_bytes and "did not decompress full frame" in str(problem):
            _too_long(limit_bytes)
        raise of_library("zstd", problem) from problem
    if declared == 0 and out:
        raise ValueError("zstd: a frame that declares no content has content")
    if len(out) > limit_bytes:
        _too_long(limit_bytes)
    return out


def _walk_zstd_frame(view: memoryview, start: int) -> tuple[int, int]:
    """Return the end of the frame at `start`, and the most bytes that its blocks can hold."""
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
