"""Compresses and decompresses snappy in Kafka's framing (COMPRESSION.md 3)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import cramjam

from keytail.format.codecs.errors import LARGER_REMEDY, PART_BYTES, Buffer, TooLarge, raise_too_large
from keytail.limits import max_record_bytes

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_HEADER_BYTES = 16
_XERIAL_FIRST_WORD = int.from_bytes(_XERIAL_MAGIC[:4], "big")
_SNAPPY_BLOCK_BYTES = 32768
_SNAPPY_MAX_RATIO = 22  # three bytes decompress to at most 64 bytes


def compress(data: Buffer, _level: int) -> bytes:
    view, parts = memoryview(data), [_XERIAL_HEADER]
    for start in range(0, len(view), _SNAPPY_BLOCK_BYTES):
        block = cramjam.snappy.compress_raw(view[start : start + _SNAPPY_BLOCK_BYTES])
        parts += (len(block).to_bytes(4, "big"), bytes(block))
    return b"".join(parts)


def decompress(data: Buffer, limit_bytes: int, _skip_header_checksum: bool) -> Buffer:
    view = memoryview(data)
    if not view:
        raise ValueError("snappy: empty input")
    blocks = _snappy_chunks(view)
    try:
        sizes = [cramjam.snappy.decompress_raw_len(block) for block in blocks]
        total = sum(sizes)
        if total > limit_bytes:
            raise_too_large(limit_bytes)
        if len(blocks) == 1:
            return memoryview(cramjam.snappy.decompress_raw(blocks[0]))
        out = bytearray(total)
        window, at = memoryview(out), 0
        for block, size in zip(blocks, sizes, strict=True):
            if size:
                cramjam.snappy.decompress_raw_into(block, window[at : at + size])
            at += size
    except cramjam.DecompressionError as problem:
        raise ValueError(str(problem)) from problem
    return out


def _snappy_chunks(view: memoryview) -> list[memoryview]:
    """Return the raw snappy block of each chunk; data without Kafka's framing are returned as one block."""
    if len(view) < _XERIAL_HEADER_BYTES or view[:8] != _XERIAL_MAGIC:
        return [view]
    blocks, at, end = [], _XERIAL_HEADER_BYTES, len(view)
    while at + 4 <= end:  # an incomplete length at the end is ignored
        size = int.from_bytes(view[at : at + 4], "big")
        if size == _XERIAL_FIRST_WORD:  # an appended frame: only the first 4 bytes of its header are checked
            if at + _XERIAL_HEADER_BYTES > end:
                raise ValueError("snappy: data ends inside a second header")
            at += _XERIAL_HEADER_BYTES
            continue
        at += 4
        if not 0 < size <= end - at:
            raise ValueError(f"snappy: invalid chunk of {size} bytes with {end - at} bytes left")
        blocks.append(view[at : at + size])
        at += size
    return blocks


def decompress_in_parts(data: Buffer, _part_bytes: int) -> Iterator[Buffer]:
    for chunk in _snappy_chunks(memoryview(data)):
        try:
            size = cramjam.snappy.decompress_raw_len(chunk)
            if size > _SNAPPY_MAX_RATIO * len(chunk):
                raise ValueError(f"snappy: a chunk of {len(chunk)} bytes declares {size} bytes")
            if size > max(max_record_bytes(), PART_BYTES):
                raise TooLarge(f"a snappy chunk decompresses to {size} bytes", remedy=LARGER_REMEDY)
            yield memoryview(cramjam.snappy.decompress_raw(chunk))
        except cramjam.DecompressionError as problem:
            raise ValueError(str(problem)) from problem


class Compressor:
    def __init__(self, _level: int) -> None:
        self._head = _XERIAL_HEADER

    def compress(self, data: Buffer) -> bytes:
        framed = compress(data, 0)
        head, self._head = self._head, b""
        return head + framed[len(_XERIAL_HEADER) :]

    def flush(self) -> bytes:
        return self._head
