"""`decompress` accepts and refuses the same blocks as Kafka's reader of each codec (COMPRESSION.md), up to its limit.
"""

from __future__ import annotations

import gzip
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import cramjam
import lz4.frame
import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keytail.format.codecs.errors import TooLarge
from keytail.format.codecs.table import CODECS, GZIP, LZ4, SNAPPY, ZSTD
from keytail.format.compression import compress, decompress
from tests.chance import draws
from tests.reference import codecs

TEXT = b"the same words again and again, " * 40
XERIAL = bytes.fromhex("82534e4150505900 00000001 00000001")


def lz4_frame(data: bytes, **flags: object) -> bytes:
    kept = {"block_linked": False, "block_size": 4, "content_checksum": False, "store_size": False} | flags
    return lz4.frame.compress(data, **kept)


def zstd_frame(data: bytes, **flags: bool) -> bytes:
    return zstandard.ZstdCompressor(**flags).compress(data)


def chunk(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def flipped(data: bytes, position: int, bit: int = 0) -> bytes:
    out = bytearray(data)
    out[position] ^= 1 << bit
    return bytes(out)


RAW = bytes(cramjam.snappy.compress_raw(TEXT))
GZ, SN, LZ, ZS = (compress(codec, TEXT) for codec in (GZIP, SNAPPY, LZ4, ZSTD))
# A gzip header with all optional parts: extra field, name, comment, header checksum.
_FULL_HEADER = b"\x1f\x8b\x08\x1e" + bytes(6) + b"\x03\x00abc" + b"name\0" + b"comment\0"
FULL_GZ = _FULL_HEADER + struct.pack("<H", zlib.crc32(_FULL_HEADER) & 0xFFFF) + GZ[10:]
SKIPPABLE = struct.pack("<II", 0x184D2A57, 5) + b"xxxxx"

ACCEPTED = {
    "gzip of another library": (GZIP, gzip.compress(TEXT), TEXT),
    "gzip members one after the other": (GZIP, GZ + GZ + FULL_GZ, TEXT * 3),
    "gzip header with all parts": (GZIP, FULL_GZ, TEXT),
    "gzip and garbage": (GZIP, GZ + b"garbage", TEXT),
    "gzip and zeros": (GZIP, GZ + bytes(30), TEXT),
    "gzip and a truncated header": (GZIP, GZ + GZ[:9], TEXT),
    "gzip and a truncated name": (GZIP, GZ + FULL_GZ[:17], TEXT),
    "gzip and a header with a wrong checksum": (GZIP, GZ + flipped(FULL_GZ, 12), TEXT),
    "gzip members and garbage": (GZIP, GZ + GZ + b"\x1f\x8b", TEXT * 2),
    "snappy frames one after the other": (SNAPPY, SN + SN, TEXT * 2),
    "snappy with other versions": (SNAPPY, XERIAL[:8] + struct.pack(">ii", 77, -3) + SN[16:], TEXT),
    "snappy without framing": (SNAPPY, RAW, TEXT),
    "snappy without framing, short": (SNAPPY, b"\x01\x00x", b"x"),
    "snappy without framing, of zero bytes": (SNAPPY, b"\x00", b""),
    "snappy header alone": (SNAPPY, XERIAL, b""),
    "snappy and fewer bytes than a length": (SNAPPY, SN + b"\0\0\x01", TEXT),
    "snappy chunks of any size": (SNAPPY, XERIAL + chunk(RAW) + chunk(b"\x00") + chunk(RAW), TEXT * 2),
    "snappy and bytes that begin like a header": (SNAPPY, SN + XERIAL[:4] + bytes(12) + SN[16:], TEXT * 2),
    "lz4 with larger blocks": (LZ4, lz4_frame(TEXT * 9000, block_size=7), TEXT * 9000),
    "lz4 with block checksums": (LZ4, lz4_frame(TEXT, block_checksum=True), TEXT),
    "lz4 with size and checksum": (LZ4, lz4_frame(TEXT, store_size=True, content_checksum=True), TEXT),
    "lz4 with a wrong content checksum": (LZ4, flipped(lz4_frame(TEXT, content_checksum=True), -1), TEXT),
    "lz4 at a high level": (LZ4, lz4_frame(TEXT, compression_level=12), TEXT),
    "lz4 and garbage": (LZ4, LZ + b"garbage" * 9, TEXT),
    "lz4, two frames of which the first is read": (LZ4, LZ + LZ, TEXT),
    "lz4 with a stored end mark": (LZ4, LZ[:-4] + b"\0\0\0\x80", TEXT),
    "zstd frames": (ZSTD, ZS + zstd_frame(TEXT) + ZS, TEXT * 3),
    "zstd with size and checksum": (ZSTD, zstd_frame(TEXT, write_checksum=True), TEXT),
    "zstd without size": (ZSTD, zstd_frame(TEXT, write_content_size=False), TEXT),
    "zstd with skippable frames": (ZSTD, SKIPPABLE + ZS + SKIPPABLE, TEXT),
    "zstd and a truncated skippable frame": (ZSTD, ZS + SKIPPABLE[:-1], TEXT),
    "zstd and a truncated header of a skippable frame": (ZSTD, ZS + SKIPPABLE[:6], TEXT),
    "zstd of zero bytes": (ZSTD, zstd_frame(b"", write_checksum=True), b""),
    "zstd, empty block": (ZSTD, b"", b""),
    "zstd of a million zeros": (ZSTD, zstd_frame(bytes(10**6)), bytes(10**6)),
}

REFUSED = {
    "gzip, empty block": (GZIP, b"", "ends inside"),
    "gzip truncated in the trailer": (GZIP, GZ[:-1], "ends inside"),
    "gzip truncated in the data": (GZIP, GZ[:30], "ends inside"),
    "gzip truncated in the header": (GZIP, GZ[:5], "ends inside"),
    "gzip with a wrong checksum": (GZIP, flipped(GZ, -8), "gzip"),
    "gzip with a wrong length": (GZIP, flipped(GZ, -1), "gzip"),
    "gzip with another compression method": (GZIP, flipped(GZ, 2), "gzip"),
    "gzip, second member truncated": (GZIP, GZ + GZ[:-1], "ends inside"),
    "gzip, second member damaged": (GZIP, GZ + flipped(GZ, -8), "gzip"),
    "zlib stream": (GZIP, zlib.compress(TEXT), "gzip"),
    "snappy, empty block": (SNAPPY, b"", "empty"),
    "snappy with a truncated chunk": (SNAPPY, SN[:-1], "chunk of"),
    "snappy with a negative chunk": (SNAPPY, SN + struct.pack(">i", -1), "chunk of"),
    "snappy with an empty chunk": (SNAPPY, SN + chunk(b""), "chunk of 0"),
    "snappy with a truncated second header": (SNAPPY, SN + XERIAL[:12], "second header"),
    "snappy with a damaged chunk": (SNAPPY, XERIAL + chunk(RAW[:-3]), "snappy"),
    "snappy in the standard framing": (SNAPPY, bytes(cramjam.snappy.compress(TEXT)), "snappy"),
    "snappy with too short a header": (SNAPPY, XERIAL[:15], "snappy"),
    "lz4, empty block": (LZ4, b"", "no frame header"),
    "lz4 without end mark": (LZ4, LZ[:-4], "end mark"),
    "lz4 with half an end mark": (LZ4, LZ[:-2], "end mark"),
    "lz4 truncated in a block": (LZ4, LZ[:20], "end mark"),
    "lz4 with another version": (LZ4, flipped(LZ, 4, 7), "version"),
    "lz4 with dependent blocks": (LZ4, lz4_frame(TEXT * 99, block_linked=True), "depend"),
    "lz4 with a dictionary": (LZ4, flipped(LZ, 4, 0), "reserved"),
    "lz4 with a reserved bit": (LZ4, flipped(LZ, 4, 1), "reserved"),
    "lz4 with a reserved bit in BD": (LZ4, flipped(LZ, 5, 7), "reserved"),
    "lz4 with too small blocks": (LZ4, flipped(LZ, 5, 6), "block size"),
    "lz4 with a wrong header checksum": (LZ4, flipped(LZ, 6), "lz4"),
    "lz4 with a wrong header checksum and a size": (LZ4, flipped(lz4_frame(TEXT, store_size=True), 9), "lz4"),
    "lz4 with a wrong block checksum": (LZ4, flipped(lz4_frame(TEXT, block_checksum=True), -5), "lz4"),
    "lz4 with a block too large": (LZ4, LZ[:7] + struct.pack("<I", 65537) + LZ[11:], "block declares 65537 bytes"),
    "lz4 without its content checksum": (LZ4, lz4_frame(TEXT, content_checksum=True)[:-2], "content checksum"),
    "lz4 truncated in the header": (LZ4, lz4_frame(TEXT, store_size=True)[:12], "header"),
    "lz4 with another magic number": (LZ4, flipped(LZ, 0), "no frame header"),
    "zstd truncated in the last block": (ZSTD, ZS[:-1], "ends inside"),
    "zstd truncated in the header": (ZSTD, ZS[:5], "no frame header"),
    "zstd without its checksum": (ZSTD, zstd_frame(TEXT, write_checksum=True)[:-1], "ends inside"),
    "zstd with a wrong checksum": (ZSTD, flipped(zstd_frame(TEXT, write_checksum=True), -1), "zstd"),
    "zstd of zero bytes with a wrong checksum": (ZSTD, flipped(zstd_frame(b"", write_checksum=True), -1), "zstd"),
    "zstd and garbage": (ZSTD, ZS + b"garbage", "no frame at"),
    "zstd and zeros": (ZSTD, ZS + bytes(3), "no frame at"),
    "codec 5": (5, b"x", "unknown codec"),
    "codec 7": (7, b"x", "unknown codec"),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_blocks_that_kafka_accepts_are_accepted(what: str) -> None:
    codec, data, expected = ACCEPTED[what]
    assert bytes(decompress(codec, data)) == expected
    assert bytes(decompress(codec, memoryview(data), limit_bytes=len(expected))) == expected
    if expected:
        with pytest.raises(TooLarge, match="decompress to more than"):
            decompress(codec, data, limit_bytes=len(expected) - 1)


@pytest.mark.parametrize("what", REFUSED)
def test_blocks_that_kafka_refuses_are_refused(what: str) -> None:
    codec, data, reason = REFUSED[what]
    for limit in (2**62, 10**6):
        with pytest.raises(ValueError, match=reason):
            decompress(codec, data, limit_bytes=limit)


def test_zstd_with_an_invalid_size_is_refused() -> None:
    """Kafka reads nothing from such a block and then reports missing records; an error with the reason is more useful.
    """
    frame = bytes.fromhex("28b52ffd c0 58") + b"\xfe" * 8 + bytes.fromhex("010000")
    with pytest.raises(ValueError, match="declares"):
        decompress(ZSTD, frame)


payloads = st.one_of(
    st.binary(max_size=300),
    st.builds(lambda piece, times: piece * times, st.binary(min_size=1, max_size=40), st.integers(0, 9000)),
    st.builds(lambda seed, n: np.random.default_rng(seed).bytes(n), st.integers(0, 99), st.integers(0, 140000)),
)


@given(payloads, st.integers(0, 4))
@example(bytes(32768), 2)
@example(bytes(65537), 3)
@settings(deadline=None, max_examples=draws(150))
def test_compressed_data_is_read_back_by_our_reader_and_the_model(data: bytes, codec: int) -> None:
    packed = compress(codec, data)
    as_array = np.frombuffer(decompress(codec, packed, limit_bytes=len(data)), np.uint8)
    assert as_array.tobytes() == data
    assert codecs.decompress(codec, packed) == data
    assert bytes(decompress(codec, codecs.compress(codec, data))) == data
    if data:
        with pytest.raises(TooLarge, match="decompress to more"):
            decompress(codec, packed, limit_bytes=len(data) - 1)


@given(st.integers(1, 4), st.binary(max_size=200), st.sampled_from([b"", XERIAL, GZ[:10], LZ[:7], ZS[:6]]))
@settings(deadline=None, max_examples=draws(300))
def test_any_bytes_are_decompressed_or_refused(codec: int, data: bytes, header: bytes) -> None:
    try:
        assert len(memoryview(decompress(codec, header + data, limit_bytes=1 << 20))) <= 1 << 20
    except (ValueError, TooLarge) as reason:
        assert str(reason)


@given(st.integers(1, 4), st.integers(0, 10**6), st.integers(0, 7))
@settings(deadline=None, max_examples=draws(300))
def test_a_block_with_a_flipped_bit_is_decompressed_or_refused(codec: int, position: int, bit: int) -> None:
    packed = compress(codec, TEXT)
    try:
        decompress(codec, flipped(packed, position % len(packed), bit), limit_bytes=1 << 20)
    except (ValueError, TooLarge) as reason:
        assert str(reason)


@given(st.integers(1, 4), st.integers(1, 10**6))
@settings(deadline=None)
def test_a_truncated_stream_is_refused(codec: int, cut: int) -> None:
    packed = compress(codec, TEXT)
    try:
        out = decompress(codec, packed[: -1 - cut % len(packed)])
    except ValueError:
        return
    assert bytes(out) != TEXT


def _bomb(codec: int, size: int) -> bytes:
    if codec == SNAPPY:
        return XERIAL + chunk(bytes(cramjam.snappy.compress_raw(bytes(size))))
    return codecs.compress(codec, bytes(size))


_OPEN_BOMBS = """
import resource, sys
from keytail.format.codecs.errors import TooLarge
from keytail.format.compression import compress, decompress

bombs = [(int(path[-1]), open(path, "rb").read()) for path in sys.argv[1:]]
for codec in range(1, 5):
    decompress(codec, compress(codec, bytes(1 << 20)), limit_bytes=1 << 20)
before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for codec, bomb in bombs:
    try:
        decompress(codec, bomb, limit_bytes=1 << 20)
    except TooLarge as reason:
        assert "decompress to more than 1048576 bytes" in str(reason), reason
    else:
        raise AssertionError(codec)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib)
"""


@pytest.mark.long
def test_a_bomb_is_refused_without_allocating_its_memory(tmp_path: Path) -> None:
    """A separate process is used, because the codecs' own allocations appear only in the peak memory of the process."""
    bombs = {f"{CODECS[codec]}-{codec}": _bomb(codec, 200 << 20) for codec in range(1, 5)}
    bombs["zstd that declares its size-4"] = zstd_frame(bytes(200 << 20))
    paths = [tmp_path / name for name in bombs]
    for path, bomb in zip(paths, bombs.values(), strict=True):
        assert len(bomb) < 12 << 20
        path.write_bytes(bomb)
    run = subprocess.run(
        [sys.executable, "-c", _OPEN_BOMBS, *map(str, paths)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 32 << 10  # KiB


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_a_bomb_of_many_pieces_is_refused(codec: int) -> None:
    piece = compress(codec, bytes(600_000))
    if codec == LZ4:  # bytes after a frame are not checked
        assert len(memoryview(decompress(codec, piece * 5, limit_bytes=600_000))) == 600_000
        return
    with pytest.raises(TooLarge, match="decompress to more"):
        decompress(codec, piece * 5, limit_bytes=1 << 20)


def test_a_declared_size_is_checked_before_it_is_used() -> None:
    raw_snappy_of_4_gib = b"\xff\xff\xff\xff\x0f" + b"\x00x"
    with pytest.raises(TooLarge, match="decompress to more"):
        decompress(SNAPPY, raw_snappy_of_4_gib, limit_bytes=1 << 20)


@pytest.mark.parametrize("codec", range(5))
def test_any_contiguous_buffer_is_accepted(codec: int) -> None:
    array = np.frombuffer(b"--" + TEXT + b"--", np.uint8)[2:-2]
    packed = compress(codec, memoryview(array))
    around = np.frombuffer(b"--" + packed + b"--", np.uint8)
    for data in (bytearray(packed), memoryview(packed), memoryview(around)[2:-2]):
        assert bytes(decompress(codec, data, limit_bytes=1 << 20)) == TEXT


def test_threads_do_not_share_working_memory() -> None:
    rng = np.random.default_rng(5)
    inputs = [rng.integers(0, 4, 200_000, np.uint8).tobytes() for _ in range(4)]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(5):
            for codec in range(1, 5):
                if bytes(decompress(codec, compress(codec, inputs[number]))) != inputs[number]:
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_framing_is_that_of_kafka() -> None:
    assert CODECS == ("none", "gzip", "snappy", "lz4", "zstd")
    assert GZ[:10] == bytes.fromhex("1f8b08000000000000ff")
    assert SN[:16] == XERIAL
    assert LZ[:7] == bytes.fromhex("04224d18604082")
    assert ZS[:6] == bytes.fromhex("28b52ffd0058")
    assert ZS[-3:] == bytes.fromhex("010000")
    two_blocks = compress(SNAPPY, bytes(32769))
    first = struct.unpack(">i", two_blocks[16:20])[0]
    assert cramjam.snappy.decompress_raw_len(two_blocks[20 : 20 + first]) == 32768
