"""Implements the codec of blocks that are not compressed."""

from __future__ import annotations

from collections.abc import Iterator

from keytail.format.codecs.errors import Buffer, raise_too_large


def compress(data: Buffer, _level: int) -> bytes:
    return bytes(data)


def decompress(data: Buffer, limit_bytes: int, _skip_header_checksum: bool) -> Buffer:
    if len(data) > limit_bytes:
        raise_too_large(limit_bytes)
    return data


def decompress_in_parts(data: Buffer, _part_bytes: int) -> Iterator[Buffer]:
    return iter([data])


class Compressor:
    def __init__(self, _level: int) -> None:
        pass

    def compress(self, data: Buffer) -> bytes:
        return bytes(data)

    def flush(self) -> bytes:
        return b""
