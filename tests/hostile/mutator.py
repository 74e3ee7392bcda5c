"""Damages valid bytes according to their format, by a seed and a number, which together determine the result.

The checksum of damaged bytes is often corrected, so that the damage is not found by the checksum, but by the parsers.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import crc32c as crc_wheel

from tests.hostile.bombs import bomb
from tests.reference import codecs
from tests.reference.varints import encode_varint, encode_varlong

MAX_BYTES = 48 << 10  # the largest size of a damaged log: small logs test as much in less time
LIMITS_8 = (0, 1, 2, 3, 4, 5, 6, 7, 127, 128, 255)
LIMITS_16 = (0, 1, -1, -2, 5, 6, 7, 8, 0x10, 0x20, 0x30, 0x40, 0x60, 0x7F, 2**15 - 1, -(2**15))
LIMITS_32 = (0, 1, -1, -2, 13, 14, 16, 17, 48, 49, 50, 63, 64, -64, -65, 8191, 8192, 1 << 20, 1 << 24, 1 << 28,
             2**30, 2**31 - 13, 2**31 - 12, 2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1)  # fmt: skip
LIMITS_64 = (*LIMITS_32, 2**31, 2**32 - 1, 2**32, 2**48, 2**62 - 1, 2**62, 2**62 + 1, 2**63 - 2**31 - 1, 2**63 - 2**31,
             2**63 - 2, 2**63 - 1, -(2**62), -(2**63), -(2**63) + 1)  # fmt: skip
ODD_VARINTS = (b"\x80", b"\x80\x00", b"\x81\x80\x80\x00", b"\xff" * 4 + b"\x0f", b"\xff" * 5, b"\xff" * 4 + b"\x7f",
               b"\xff" * 9 + b"\x01", b"\xff" * 9 + b"\x7f", b"\xff" * 10, b"\x80" * 12, b"")  # fmt: skip
# Offset and layout of the fields of a batch header (format/BATCH.md).
FIELDS = {
    "base_offset": (0, ">q"),
    "length": (8, ">i"),
    "leader_epoch": (12, ">i"),
    "magic": (16, ">b"),
    "crc": (17, ">i"),
    "attributes": (21, ">h"),
    "last_offset_delta": (23, ">i"),
    "base_timestamp": (27, ">q"),
    "max_timestamp": (35, ">q"),
    "producer_id": (43, ">q"),
    "producer_epoch": (51, ">h"),
    "base_sequence": (53, ">i"),
    "record_count": (57, ">i"),
}
_LIMITS = {1: LIMITS_8, 2: LIMITS_16, 4: LIMITS_32, 8: LIMITS_64}
HEADER_BYTES = 61


@dataclass(frozen=True)
class Spot:
    """A variable-length number in a block of records, and the position of the length of its record."""

    start: int
    end: int
    value: int
    what: str
    length_at: int


def split(log: bytes) -> list[bytes]:
    """Divide a log into batches, as far as their lengths are valid; the rest is the last item."""
    at, parts = 0, []
    while len(log) - at >= 17:
        size = struct.unpack_from(">i", log, at + 8)[0] + 12
        if size < 26 or size > len(log) - at:
            break
        parts.append(log[at : at + size])
        at += size
    return parts + ([log[at:]] if at < len(log) else [])


def with_checksum(batch: bytes) -> bytes:
    """Return the batch with a correct checksum and otherwise unchanged bytes."""
    if len(batch) > 21 and batch[16] >= 2:
        return batch[:17] + struct.pack(">I", crc_wheel.crc32c(batch[21:])) + batch[21:]
    if len(batch) > 17:
        return batch[:12] + struct.pack(">I", zlib.crc32(batch[16:])) + batch[16:]
    return batch


def resized(batch: bytes) -> bytes:
    """Return the batch with a correct length."""
    return batch[:8] + struct.pack(">i", len(batch) - 12) + batch[12:]


def spots_of(block: bytes) -> list[Spot]:
    """Return all variable-length numbers of a valid block of records."""
    found: list[Spot] = []
    at = 0
    while at < len(block):
        length_at = at
        length, at = _number(block, at)
        end = at + length
        if length < 1 or end > len(block):
            return found
        found.append(Spot(length_at, at, length, "length", length_at))
        at += 1
        for what in ("timestamp delta", "offset delta"):
            start = at
            value, at = _number(block, at)
            found.append(Spot(start, at, value, what, length_at))
        for what in ("key length", "value length"):
            start = at
            value, at = _number(block, at)
            found.append(Spot(start, at, value, what, length_at))
            at += max(value, 0)
        start = at
        count, at = _number(block, at)
        found.append(Spot(start, at, count, "header count", length_at))
        for _ in range(2 * count):
            start = at
            value, at = _number(block, at)
            found.append(Spot(start, at, value, "header length", length_at))
            at += max(value, 0)
        at = end
    return found


def _number(data: bytes, at: int) -> tuple[int, int]:
    raw, shift = 0, 0
    while True:
        byte = data[at]
        raw |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return (raw >> 1) ^ -(raw & 1), at


class Mutator:
    """Damages logs. Pieces of `sources`, valid logs, are inserted into damaged ones."""

    def __init__(self, sources: list[bytes]) -> None:
        self.sources = sources

    def log(self, rng: random.Random) -> bytes:
        """Return a damaged log or, in one case of fifty, a valid one."""
        log = rng.choice(self.sources)
        if rng.random() < 0.02:
            return log
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            log = self.spoil(rng, log)
        return log[:MAX_BYTES]

    def spoil(self, rng: random.Random, log: bytes) -> bytes:
        if rng.random() < 0.35:
            return rng.choice(_OF_THE_WHOLE)(rng, log, self.sources)
        parts = split(log)
        if not parts:
            return log
        at = rng.randrange(len(parts))
        strategy = rng.choice(_OF_A_BATCH)
        spoiled = strategy(rng, parts[at])
        if rng.random() < 0.75:
            spoiled = with_checksum(spoiled)
        parts[at] = spoiled
        return b"".join(parts)


# Mutations of one batch


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    """Flip bits of a log, an index, or any other file."""
    if not data:
        return data
    spoiled = bytearray(data)
    low = 0 if rng.random() < 0.5 else min(HEADER_BYTES, len(data) - 1)
    high = len(data) if low else min(HEADER_BYTES + 16, len(data))
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        spoiled[rng.randrange(low, high)] ^= 1 << rng.randrange(8)
    return bytes(spoiled)


def set_field(rng: random.Random, batch: bytes) -> bytes:
    at, layout = FIELDS[rng.choice(list(FIELDS))]
    size = struct.calcsize(layout)
    if at + size > len(batch):
        return batch
    (now,) = struct.unpack_from(layout, batch, at)
    value = now + rng.choice((-2, -1, 1, 2, 61, -61)) if rng.random() < 0.3 else rng.choice(_LIMITS[size])
    return batch[:at] + _fitting(value, size) + batch[at + size :]


def _fitting(value: int, size: int) -> bytes:
    return (value & (1 << 8 * size) - 1).to_bytes(size, "big")


def spoil_records(rng: random.Random, batch: bytes) -> bytes:
    """Damage a number inside a record, or bytes of the block, also in compressed batches."""
    if len(batch) < HEADER_BYTES or batch[16] != 2:
        return _spoil_message(rng, batch)
    codec = batch[22] & 7
    try:
        block = codecs.decompress(codec, batch[HEADER_BYTES:]) if codec <= 4 else batch[HEADER_BYTES:]
        block = _spoil_block(rng, block)
        packed = codecs.compress(codec, block) if codec <= 4 else block
    except Exception:  # libraries raise various exceptions for bytes that are already damaged
        return flip_bits(rng, batch)
    return resized(batch[:HEADER_BYTES] + packed)


def _spoil_block(rng: random.Random, block: bytes) -> bytes:
    try:
        spots = spots_of(block)
    except IndexError:
        spots = []
    if not spots or rng.random() < 0.15:
        return flip_bits(rng, block)
    spot = rng.choice(spots)
    if rng.random() < 0.25:
        new = rng.choice(ODD_VARINTS)
    elif spot.what == "timestamp delta":
        new = encode_varlong(rng.choice(LIMITS_64))
    else:
        left = len(block) - spot.end
        near = (spot.value - 1, spot.value + 1, left, left + 1, left - 1, *LIMITS_32)
        new = encode_varint(min(rng.choice(near), 2**31 - 1))
    spoiled = block[: spot.start] + new + block[spot.end :]
    if spot.what != "length" and rng.random() < 0.6:  # the length of the record is adapted
        length, behind = _number(block, spot.length_at)
        length += len(spoiled) - len(block)
        spoiled = spoiled[: spot.length_at] + encode_varint(length) + spoiled[behind:]
    return spoiled


def _spoil_message(rng: random.Random, message: bytes) -> bytes:
    """Damage the lengths of key and value in messages of magic 0 and 1, or those of the inner messages."""
    first = 26 if len(message) > 16 and message[16] == 1 else 18
    if len(message) < first + 8:
        return flip_bits(rng, message)
    codec = message[17] & 7
    if codec and rng.random() < 0.7:
        at = first + 4 + 4
        try:
            inner = codecs.decompress(codec, message[at:])
            inner_parts = split(inner)
            k = rng.randrange(len(inner_parts))
            inner_parts[k] = with_checksum(rng.choice((flip_bits, set_field, _spoil_message))(rng, inner_parts[k]))
            if rng.random() < 0.2:
                rng.shuffle(inner_parts)
            packed = codecs.compress(codec, b"".join(inner_parts))
        except Exception:  # the message may already be damaged
            return flip_bits(rng, message)
        return resized(message[: at - 4] + struct.pack(">i", len(packed)) + packed)
    at = first if rng.random() < 0.5 else first + 4 + max(struct.unpack_from(">i", message, first)[0], 0)
    if at + 4 > len(message):
        return flip_bits(rng, message)
    left = len(message) - at - 4
    return message[:at] + _fitting(rng.choice((left, left + 1, left - 1, *LIMITS_32)), 4) + message[at + 4 :]


def cut_batch(rng: random.Random, batch: bytes) -> bytes:
    spoiled = batch[: rng.choice((rng.randrange(len(batch) + 1), 12, 16, 17, 26, 60, 61, 62, len(batch) - 1))]
    return resized(spoiled) if len(spoiled) >= 12 and rng.random() < 0.6 else spoiled


def lengthen(rng: random.Random, batch: bytes) -> bytes:
    tail = rng.choice((b"\0", b"\0" * 61, rng.randbytes(rng.choice((1, 7, 64)))))
    return resized(batch + tail) if len(batch) >= 12 else batch + tail


def spoil_codec(rng: random.Random, batch: bytes) -> bytes:
    """Give the same block another codec, possibly one that does not exist."""
    if len(batch) < HEADER_BYTES:
        return batch
    at = 22 if batch[16] == 2 else 17
    return batch[:at] + bytes([batch[at] & ~7 | rng.randrange(8)]) + batch[at + 1 :]


def spoil_packed(rng: random.Random, batch: bytes) -> bytes:
    """Damage the bytes of a compressed block: frame headers, block sizes."""
    at = HEADER_BYTES if len(batch) > 16 and batch[16] == 2 else 34
    if len(batch) <= at:
        return batch
    end = min(len(batch), at + rng.choice((4, 12, 32, 1 << 20)))
    spot = rng.randrange(at, end)
    if rng.random() < 0.3 and spot + 4 <= len(batch):
        return (
            batch[:spot] + struct.pack(rng.choice((">I", "<I")), rng.choice(LIMITS_32) & 2**32 - 1) + batch[spot + 4 :]
        )
    return batch[:spot] + bytes([rng.randrange(256)]) + batch[spot + 1 :]


def put_bomb(rng: random.Random, batch: bytes) -> bytes:
    """Insert a block of a few KiB that decompresses to MiB; this is done rarely, because it is slow."""
    if len(batch) < HEADER_BYTES or batch[16] != 2 or rng.random() > 0.02:
        return batch
    codec = rng.randrange(1, 5)
    attributes = batch[22] & ~7 | codec
    return resized(batch[:22] + bytes([attributes]) + batch[23:HEADER_BYTES] + bomb(codec, 8 << 20))


_OF_A_BATCH: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    flip_bits, set_field, set_field, set_field, spoil_records, spoil_records, spoil_records, cut_batch, lengthen,
    spoil_codec, spoil_packed, put_bomb,
)  # fmt: skip


# Mutations of a whole log


def _cut(rng: random.Random, log: bytes, sources: list[bytes]) -> bytes:
    return log[: rng.randrange(len(log) + 1)]


def _duplicate(rng: random.Random, log: bytes, sources: list[bytes]) -> bytes:
    parts = split(log)
    if not parts:
        return log
    a = rng.randrange(len(parts))
    b = rng.randrange(a, len(parts)) + 1
    at = rng.randrange(len(parts) + 1)
    return b"".join(parts[:at] + parts[a:b] + parts[at:])


def _swap(rng: random.Random, log: bytes, sources: list[bytes]) -> bytes:
    parts = split(log)
    if len(parts) < 2:
        return log
    a, b = rng.sample(range(len(parts)), 2)
    parts[a], parts[b] = parts[b], parts[a]
    return b"".join(parts)


def _drop(rng: random.Random, log: bytes, sources: list[bytes]) -> bytes:
    parts = split(log)
    if parts:
        del parts[rng.randrange(len(parts))]
    return b"".join(parts)


def _splice(rng: random.Random, log: bytes, sources: list[bytes]) -> bytes:
    other = rng.choice(sources)
    return log[: rng.randrange(len(log) + 1)] + other[rng.randrange(len(other) + 1) :]


def _join(rng: random.Random, log: bytes, sources: list[bytes]) -> bytes:
    parts = split(log) + split(rng.choice(sources))
    at = rng.randrange(len(parts) + 1)
    return b"".join(parts[at:] + parts[:at])


def _ranges(rng: random.Random, log: bytes, sources: list[bytes]) -> bytes:
    """Move, delete or zero a range of bytes, regardless of batches."""
    a, b = sorted(rng.randrange(len(log) + 1) for _ in range(2))
    at = rng.randrange(len(log) + 1)
    return rng.choice((log[:at] + log[a:b] + log[at:], log[:a] + log[b:], log[:a] + bytes(b - a) + log[b:]))


def _tail(rng: random.Random, log: bytes, sources: list[bytes]) -> bytes:
    return log + rng.choice((bytes(rng.choice((1, 16, 17, 61, 4096))), rng.randbytes(rng.choice((1, 17, 61, 200)))))


def _far_offsets(rng: random.Random, log: bytes, sources: list[bytes]) -> bytes:
    """Move all offsets, from one batch on, to limits of number types. The checksum does not cover them."""
    parts = split(log)
    if not parts:
        return log
    first = rng.randrange(len(parts))
    now = struct.unpack_from(">q", parts[first].ljust(8, b"\0"))[0]
    to = rng.choice((2**31 - 2, 2**31 - 1, 2**31, 2**32, 2**62 - 1, 2**62, 2**63 - 2**31, 2**63 - 1, 2**63 - 2, -1, -2))
    for n in range(first, len(parts)):
        if len(parts[n]) >= 8:
            base = struct.unpack_from(">q", parts[n])[0]
            parts[n] = _fitting(base - now + to, 8) + parts[n][8:]
    return b"".join(parts)


_OF_THE_WHOLE: tuple[Callable[[random.Random, bytes, list[bytes]], bytes], ...] = (
    _cut, _cut, _duplicate, _swap, _drop, _splice, _join, _ranges, _tail, _far_offsets, _far_offsets,
)  # fmt: skip


# Mutations of files that are not logs


def spoil_entries(rng: random.Random, data: bytes, entry_bytes: int) -> bytes:
    """Damage an index: entries at every limit, truncated, repeated or swapped entries, or flipped bits."""
    n = len(data) // entry_bytes
    strategy = rng.randrange(6)
    if n == 0 or strategy == 0:
        return rng.choice((flip_bits(rng, data), data + rng.randbytes(rng.choice((1, 7, entry_bytes))), data[:-1], b""))
    at = rng.randrange(n) * entry_bytes
    entry = data[at : at + entry_bytes]
    if strategy == 1:
        size = 8 if entry_bytes >= 12 and rng.random() < 0.5 else 4
        spot = rng.randrange(0, entry_bytes - size + 1)
        entry = entry[:spot] + _fitting(rng.choice(_LIMITS[size]), size) + entry[spot + size :]
        return data[:at] + entry + data[at + entry_bytes :]
    if strategy == 2:
        return data[:at] + entry + data[at:]
    if strategy == 3:
        return data[:at] + data[at + entry_bytes :]
    if strategy == 4:
        other = rng.randrange(n) * entry_bytes
        parts = [data[i : i + entry_bytes] for i in range(0, n * entry_bytes, entry_bytes)]
        a, b = at // entry_bytes, other // entry_bytes
        parts[a], parts[b] = parts[b], parts[a]
        return b"".join(parts)
    return data[:at] + bytes(rng.choice((entry_bytes, 10 * entry_bytes, len(data) - at)))


def spoil_snapshot(rng: random.Random, data: bytes) -> bytes:
    """Damage a producer snapshot. Its checksum, which covers the bytes from 6 on, is often corrected."""
    strategy = rng.randrange(4)
    if strategy == 0 or len(data) < 10:
        data = flip_bits(rng, data)
    elif strategy == 1:
        data = data[:6] + _fitting(rng.choice(LIMITS_32), 4) + data[10:]
    elif strategy == 2:
        data = data[: rng.randrange(len(data) + 1)]
    elif len(data) >= 18:
        at = rng.randrange(10, len(data) - 7)
        data = data[:at] + _fitting(rng.choice(LIMITS_64), 8) + data[at + 8 :]
    if rng.random() < 0.7 and len(data) >= 6:
        data = data[:2] + struct.pack(">I", crc_wheel.crc32c(data[6:])) + data[6:]
    return data


_WORDS = (b"0", b"1", b"2", b"-1", b"+1", b"00", b"2147483647", b"2147483648", b"9223372036854775807",
          b"9223372036854775808", b"-9223372036854775808", b"99999999999999999999999", b"", b" ", b"\t", b"x", b"t-0",
          b"\xff\xfe", b"\xe2\x80\xa8", b"\xd9\xa3", b"\xef\xbb\xbf0", b"1_000", b"9" * 5000, b"\0",
          b"\r", b"\x0b", b"\x85")  # fmt: skip


def spoil_text(rng: random.Random, data: bytes) -> bytes:
    """Damage a checkpoint: words and lines, counts at every limit, or bytes that are not text."""
    lines = data.split(b"\n")
    strategy = rng.randrange(7)
    at = rng.randrange(len(lines))
    if strategy == 0:
        return flip_bits(rng, data)
    if strategy == 1:
        words = lines[at].split(b" ")
        words[rng.randrange(len(words))] = rng.choice(_WORDS)
        lines[at] = rng.choice((b" ", b" ", b"  ", b"\t")).join(words)
    elif strategy == 2:
        lines.insert(at, rng.choice((lines[rng.randrange(len(lines))], *_WORDS)))
    elif strategy == 3:
        del lines[at]
    elif strategy == 4:
        return data[: rng.randrange(len(data) + 1)]
    elif strategy == 5 and len(lines) > 1:
        lines[1] = rng.choice(_WORDS)
    else:
        return rng.choice(
            (b"", b"\n", b"\0" * 20, b"0", b"0\n", b"0\n0", b"0\n0\n", b"0\r\n0\r\n", rng.randbytes(30), data * 2)
        )
    return rng.choice((b"\n", b"\n", b"\n", b"\r\n", b"\r")).join(lines)


def spoil_message_bytes(rng: random.Random, data: bytes) -> bytes:
    """Damage Kafka's generated messages: numbers of every width, compact lengths, truncation."""
    if not data:
        return rng.randbytes(rng.randrange(8))
    at = rng.randrange(len(data))
    strategy = rng.randrange(5)
    if strategy == 0:
        return flip_bits(rng, data)
    if strategy == 1:
        return data[:at]
    if strategy == 2:
        size = rng.choice((1, 2, 4, 8))
        return data[:at] + _fitting(rng.choice(_LIMITS[size]), size) + data[at + size :]
    if strategy == 3:
        return data[:at] + rng.choice((b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\x7f", *ODD_VARINTS)) + data[at + 1 :]
    return data + data[at:]
