"""A kernel decompresses a block to the result of `format/compression.py`, or leaves the block to that
module.
"""

from __future__ import annotations

import random
import struct
import zlib

import cramjam
import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.format.codecs.table import GZIP, LZ4, SNAPPY, ZSTD
from keytail.format.compression import compress, decompress
from keytail.kernels import native
from keytail.kernels.jit import kernel
from keytail.kernels.opening import decoders as wheels
from keytail.kernels.opening import plain
from keytail.kernels.proof.snappy import decode_snappy
from tests.chance import chance, draws
from tests.kernels.guard import guarded
from tests.reference.codecs import XERIAL_HEADER

CODECS = [GZIP, SNAPPY, LZ4, ZSTD]
PROOF_SNAPPY = 102  # the id of the proof's own decoder
DECODERS = [*CODECS, PROOF_SNAPPY]
SLOP = 16  # the number of bytes that decoders of snappy may write after their result

decoders = wheels.Decoders()


def codec_of(decoder: int) -> int:
    return SNAPPY if decoder == PROOF_SNAPPY else decoder


@kernel
def _open_block(tools, codec, data, out):
    if codec == PROOF_SNAPPY:
        return decode_snappy(data, 0, data.shape[0], out)
    return plain.decompress_plain(tools, codec, data, 0, data.shape[0], out, 0)


def opened(decoder: int, packed: bytes, room: int) -> bytes | None:
    """Return a block as decompressed by the kernel, or None if it is not. Memory after each array is inaccessible."""
    out = guarded(bytes(room))
    n = int(_open_block(decoders.tools, decoder, guarded(packed), out))
    return None if n == wheels.NOT_PLAIN else out[:n].tobytes()


def records(rng: random.Random, size: int) -> bytes:
    """Return bytes that compress like records: some are random, some are repeated at all distances."""
    data = bytearray()
    while len(data) < size:
        kind = rng.randrange(4)
        if kind == 0 or not data:
            data += rng.randbytes(rng.choice([1, 3, 20, 61, 70, 300, 70_000 if rng.random() < 0.02 else 5]))
        elif kind == 1:
            data += bytes([rng.randrange(256)]) * rng.randrange(1, 200)
        else:
            back = rng.randrange(1, min(len(data), rng.choice([8, 40, 3000, 40_000])) + 1)
            n = rng.randrange(1, 90)
            data += (bytes(data[-back:]) * (n // back + 1))[:n]
    return bytes(data[:size])


def test_the_wheels_are_used_unless_switched_off(monkeypatch):
    assert (decoders.tools != 0).all() == native.NATIVE
    monkeypatch.setenv("KEYTAIL_NATIVE", "0")
    nothing = wheels._wheels.__wrapped__()
    assert (nothing.zstd, nothing.lz4, nothing.inflate) == (None, None, None)


@pytest.mark.long
@pytest.mark.parametrize("decoder", DECODERS)
def test_blocks_as_compressed_by_kafka_are_decompressed_in_the_kernel(decoder):
    rng, codec = chance(), codec_of(decoder)
    sizes = [1, 2, 15, 16, 17, 100, 5000, 32768, 32769, 65536, 65537, 200_000]
    for size in sizes + [rng.randrange(1, 9000) for _ in range(40)]:
        data = records(rng, size)
        packed = compress(codec, data)
        want = data if native.NATIVE or codec == SNAPPY else None
        assert opened(decoder, packed, size + SLOP) == want
        assert opened(decoder, packed, size - 1) is None
        if codec == SNAPPY:
            assert opened(decoder, packed, size + SLOP - 1) is None
        else:
            assert opened(decoder, packed, size) == want


@settings(deadline=None, max_examples=draws(150))
@given(st.sampled_from(DECODERS), st.integers(1, 700), st.integers(0, 2**32 - 1))
def test_damaged_blocks_are_decompressed_as_by_the_reader_or_left_to_it(decoder, size, seed):
    rng, codec = random.Random(seed), codec_of(decoder)
    packed = bytearray(compress(codec, records(rng, size)))
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(min(len(packed), rng.choice([8, 30, 900])))
        packed[at] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
    if rng.random() < 0.3:
        del packed[rng.randrange(len(packed)) :]
    elif rng.random() < 0.2:
        packed += rng.randbytes(rng.randrange(1, 20))
    found = opened(decoder, bytes(packed), 4096)
    if found is not None:
        assert found == bytes(decompress(codec, bytes(packed), limit_bytes=4096))


def test_other_framings_are_decompressed_as_by_the_reader_or_left_to_it():
    rng = random.Random(5)
    data = records(rng, 3000)
    member = compress(GZIP, data)
    frame = zstandard.ZstdCompressor(write_content_size=True, write_checksum=True).compress(data)
    lz4_options = [{"content_checksum": True}, {"block_linked": True}, {"store_size": True}, {"block_checksum": True}]
    cases = [
        (GZIP, member + member),
        (GZIP, member[:3] + b"\x08" + member[4:10] + b"name\0" + member[10:]),
        (GZIP, zlib.compress(data)),
        (SNAPPY, bytes(cramjam.snappy.compress_raw(data))),
        (SNAPPY, compress(SNAPPY, data) + compress(SNAPPY, data)),
        (ZSTD, frame),
        (ZSTD, frame + frame),
        (ZSTD, b"\x50\x2a\x4d\x18\x03\0\0\0abc" + frame),
        (ZSTD, zstandard.ZstdCompressor().compress(b"")),
        *((LZ4, lz4.frame.compress(data, **{"block_linked": False, **options})) for options in lz4_options),
        (LZ4, lz4.frame.compress(data, block_size=7, block_linked=False, store_size=False)),
        *((codec, compress(codec, b"")) for codec in CODECS),
    ]
    cases += [(PROOF_SNAPPY, packed) for codec, packed in cases if codec == SNAPPY]
    for decoder, packed in cases:
        found = opened(decoder, packed, 1 << 16)
        assert found is None or found == bytes(decompress(codec_of(decoder), packed))
    assert opened(ZSTD, frame, 1 << 16) == (data if native.NATIVE else None)


@pytest.mark.parametrize("decoder", [SNAPPY, PROOF_SNAPPY])
def test_snappy_blocks_that_no_library_writes_are_decompressed(decoder):
    """The blocks have long lengths, four-byte distances, and copies that overlap their source."""
    literal = b"\xf4" + (299).to_bytes(2, "little") + bytes(i % 251 for i in range(300))  # its length takes two bytes
    copies = b"\x03" + (300).to_bytes(4, "little") + b"".join(b"\xfe" + bytes([back, 0]) for back in (1, 3, 16, 15))
    block = b"\xad\x04" + literal + copies  # 300 + 1 + 4 * 64
    framed = b"\x82SNAPPY\x00" + bytes(8) + len(block).to_bytes(4, "big") + block
    found = opened(decoder, framed, 1000)
    assert found is not None
    assert found == bytes(cramjam.snappy.decompress_raw(block))
    for damaged in (b"\xac\x04", b"\xae\x04", b"\xff\xff\xff\xff\x7f"):
        bad = damaged + literal + copies
        assert opened(decoder, framed[:16] + len(bad).to_bytes(4, "big") + bad, 1000) is None


@pytest.mark.parametrize("decoder", [SNAPPY, PROOF_SNAPPY])
@pytest.mark.parametrize("kind", [1, 2, 3])
@pytest.mark.parametrize("distance, want", [(0, None), (1, b"abbbbb"), (2, b"ababab"), (3, None), (255, None)])
def test_a_copy_in_a_snappy_block_begins_at_bytes_that_exist(decoder, kind, distance, want):
    """A literal of two bytes, and a copy of four."""
    copied = {
        1: bytes([1, distance]),
        2: bytes([3 << 2 | 2]) + struct.pack("<H", distance),
        3: bytes([3 << 2 | 3]) + struct.pack("<I", distance),
    }[kind]
    raw = b"\x06\x04ab" + copied
    framed = XERIAL_HEADER + len(raw).to_bytes(4, "big") + raw
    assert opened(decoder, framed, 6 + SLOP) == want
