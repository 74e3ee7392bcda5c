"""Compresses and decompresses data in Kafka's framing with its five codecs; accepts and refuses the same data as
Kafka's readers.

COMPRESSION.md beside this file specifies the bytes; `codecs/` implements the codecs. Framing and contents equal those
of Kafka, but compressed bytes may differ, as they do between versions of a library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from keytail.errors import UsageProblem
from keytail.format.codecs import gzip, lz4, none, snappy, zstd
from keytail.format.codecs.errors import NO_LIMIT_BYTES, PART_BYTES, Buffer
from keytail.format.codecs.table import TABLE


class Compressor(Protocol):
    """Compresses a block in parts; the concatenated results of all calls are the block in Kafka's framing."""

    def compress(self, data: Buffer) -> bytes: ...

    def flush(self) -> bytes: ...


class Implementation(Protocol):
    """The interface of a codec's module. Codecs without levels ignore `level`; only lz4 uses `skip_header_checksum`."""

    def compress(self, data: Buffer, level: int, /) -> bytes: ...

    def decompress(self, data: Buffer, limit_bytes: int, skip_header_checksum: bool, /) -> Buffer: ...

    def decompress_in_parts(self, data: Buffer, part_bytes: int, /) -> Iterator[Buffer]: ...

    def Compressor(self, level: int, /) -> Compressor: ...  # noqa: N802 (a class)


_MODULES: tuple[Implementation, ...] = (none, gzip, snappy, lz4, zstd)
_IMPLEMENTATIONS = dict(zip(range(len(TABLE)), _MODULES, strict=True))


def _implementation(codec_id: int) -> Implementation:
    if codec_id not in _IMPLEMENTATIONS:
        raise ValueError(f"unknown codec {codec_id}")
    return _IMPLEMENTATIONS[codec_id]


def decompress(
    codec_id: int, data: Buffer, limit_bytes: int = NO_LIMIT_BYTES, *, skip_header_checksum: bool = False
) -> Buffer:
    """Return the decompressed bytes of `data`, as an object that `np.frombuffer` accepts.

    Raises ValueError with the reason for data that Kafka's reader of that codec refuses; TooLarge for an output longer
    than `limit_bytes`, before more than `limit_bytes` are in memory. `data` is contiguous. `skip_header_checksum`
    accepts any checksum of the lz4 header, since this checksum is wrong in messages of magic 0 (LEGACY.md 3).
    """
    return _implementation(codec_id).decompress(data, limit_bytes, skip_header_checksum)


def decompress_in_parts(codec_id: int, data: Buffer, part_bytes: int = PART_BYTES) -> Iterator[Buffer]:
    """Return an iterator over the decompressed bytes of `data`, in order, for blocks that are too large for memory.

    The same data is accepted, and refused for the same reasons, as by `decompress`; an error is raised when the
    iterator reaches it. `data` is contiguous. A part has at most `part_bytes`, except that uncompressed data is one
    part, and snappy is decompressed one chunk at a time, as in Kafka's own reader. Raises TooLarge for a snappy chunk
    of more than `max_record_bytes` (and more than PART_BYTES). Kafka's producers write 32 KiB chunks, but a block
    without the framing is one chunk.
    """
    return _implementation(codec_id).decompress_in_parts(data, part_bytes)


def check_level(codec_id: int, level: int | None) -> None:
    """Raise UsageProblem for a codec or level that Kafka's configuration does not allow; None is the default level."""
    if not 0 <= codec_id < len(TABLE):
        raise UsageProblem(f"unknown codec {codec_id}", slug="unknown-codec")
    codec = TABLE[codec_id]
    levels = codec.levels
    if level is None or level in levels or (levels and level == codec.default_level):
        return
    has = f"has levels {levels[0]} to {levels[-1]}" if levels else "has no levels"
    raise UsageProblem(
        f"invalid compression level {level}: {codec.name} {has}", slug="invalid-compression-level"
    )


def compress(codec_id: int, data: Buffer, level: int | None = None) -> bytes:
    """Return `data` compressed, in Kafka's framing; `level` None is the default level of Kafka's codec."""
    return _implementation(codec_id).compress(data, TABLE[codec_id].default_level if level is None else level)


def compressor(codec_id: int) -> Compressor:
    """Return a compressor for one block, at the default level of Kafka's codec."""
    return _implementation(codec_id).Compressor(TABLE[codec_id].default_level)
