"""Compresses and decompresses data in Kafka's framing with its five codecs; accepts and refuses the same data as
Kafka's readers.

COMPRESSION.md beside this file specifies the bytes; `codecs/` implements the codecs. Framing and contents equal those
of Kafka, but compressed bytes may differ, as they do between versions of a library.
"""

from __future__ import annotations

from keytail.errors import UsageProblem
from keytail.format.codecs.errors import NO_LIMIT_BYTES, Buffer, too_long
from keytail.format.codecs.gzip import GZIP_LEVEL, gunzip, to_gzip
from keytail.format.codecs.lz4 import LZ4_LEVEL, to_lz4, unlz4
from keytail.format.codecs.snappy import to_snappy, unsnappy
from keytail.format.codecs.zstd import ZSTD_LEVEL, to_zstd, unzstd

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)


def decompress(
    codec_id: int, data: Buffer, limit_bytes: int = NO_LIMIT_BYTES, *, skip_header_checksum: bool = False
) -> Buffer:
    """Return the decompressed bytes of `data`, as an object that `np.frombuffer` accepts.

    Raises ValueError with the reason for data that Kafka's reader of that codec refuses; TooLarge for an output longer
    than `limit_bytes`, before more than that is in memory. `data` is contiguous. `skip_header_checksum` accepts any
    checksum of the lz4 header, since it is wrong in messages of magic 0 (LEGACY.md 3).
    """
    match codec_id:
        case 0:
            if len(data) > limit_bytes:
                too_long(limit_bytes)
            return data
        case 1:
            return gunzip(data, limit_bytes)
        case 2:
            return unsnappy(data, limit_bytes)
        case 3:
            return unlz4(data, limit_bytes, skip_header_checksum)
        case 4:
            return unzstd(data, limit_bytes)
    raise ValueError(f"unknown codec {codec_id}")


# The levels that Kafka's configuration allows, by codec. For gzip, it also allows the default -1.
LEVELS = {GZIP: range(1, 10), LZ4: range(1, 18), ZSTD: range(-131072, 23)}


def check_level(codec_id: int, level: int | None) -> None:
    """Raise UsageProblem for a codec or level that Kafka's configuration does not allow; None is the default level."""
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
    """Return `data` compressed in Kafka's framing; `level` None is the default of Kafka's codec (`check_level`)."""
    match codec_id:
        case 0:
            return bytes(data)
        case 1:
            return to_gzip(data, GZIP_LEVEL if level is None else level)
        case 2:
            return to_snappy(data)
        case 3:
            return to_lz4(data, LZ4_LEVEL if level is None else level)
        case 4:
            return to_zstd(data, ZSTD_LEVEL if level is None else level)
    raise ValueError(f"unknown codec {codec_id}")
