"""Compresses and decompresses gzip in Kafka's framing (COMPRESSION.md 2)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from isal import isal_zlib

from keytail.format.codecs.errors import Buffer, raise_too_large

_GZIP_HEADER = bytes.fromhex("1f8b08000000000000ff")  # no time, no extra flags, operating system unknown
_GZIP_FLAGS_OFF = 3
_GZIP_FHCRC, _GZIP_FEXTRA, _GZIP_FNAME, _GZIP_FCOMMENT = 2, 4, 8, 16
_GZIP_FIXED_BYTES = 10


def compress(data: Buffer, level: int) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    trailer = struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)
    return b"".join((_GZIP_HEADER, packer.compress(data), packer.flush(), trailer))


def decompress(data: Buffer, limit_bytes: int, _skip_header_checksum: bool) -> bytes:
    out, rest = _gunzip_member(data, limit_bytes)
    if not rest:
        return out
    parts, total = [out], len(out)
    # Bytes that follow are ignored, unless they begin with the complete, valid header of another member.
    while _is_gzip_header(rest):
        out, rest = _gunzip_member(rest, limit_bytes - total)
        parts.append(out)
        total += len(out)
    return b"".join(parts)


def _gunzip_member(data: Buffer, limit_bytes: int) -> tuple[bytes, bytes]:
    unpacker = isal_zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        out = unpacker.decompress(data, min(limit_bytes, 2**62) + 1)
    except isal_zlib.error as problem:  # type: ignore[misc]  # its stub declares an instance
        raise ValueError(f"gzip: {problem}") from problem
    if len(out) > limit_bytes:
        raise_too_large(limit_bytes)
    if not unpacker.eof:
        raise ValueError("gzip: data ends inside a member")
    return out, unpacker.unused_data


def _is_gzip_header(data: bytes) -> bool:
    if len(data) < _GZIP_FIXED_BYTES or data[:3] != _GZIP_HEADER[:3]:
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


def decompress_in_parts(data: Buffer, part_bytes: int) -> Iterator[Buffer]:
    rest = data
    while True:
        unpacker = isal_zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        source: Buffer = rest
        while not unpacker.eof:
            try:
                out = unpacker.decompress(source, part_bytes)
            except isal_zlib.error as problem:  # type: ignore[misc]  # as in _gunzip_member
                raise ValueError(f"gzip: {problem}") from problem
            left = unpacker.unconsumed_tail
            if not out and not unpacker.eof and len(left) in (0, len(source)):
                raise ValueError("gzip: data ends inside a member")
            source = left
            yield out
        rest = unpacker.unused_data
        if not _is_gzip_header(rest):
            return


class Compressor:
    def __init__(self, level: int) -> None:
        self._packer = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._head, self._crc, self._size = _GZIP_HEADER, 0, 0

    def compress(self, data: Buffer) -> bytes:
        self._crc, self._size = zlib.crc32(data, self._crc), self._size + len(data)
        head, self._head = self._head, b""
        return head + self._packer.compress(data)

    def flush(self) -> bytes:
        return self._head + self._packer.flush() + struct.pack("<II", self._crc, self._size & 0xFFFFFFFF)
