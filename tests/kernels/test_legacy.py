"""Messages of magic 0 and 1, written by the kernels into arrays that end at an inaccessible page."""

from __future__ import annotations

import pytest

from keytail.kernels import legacy as kernels
from tests.chance import chance, draws
from tests.kernels.guard import guarded
from tests.reference.codecs import GZIP
from tests.reference.legacy import encode_message
from tests.reference.varints import encode_varint

SIZES = (None, 0, 1, 63, 64, 8191, 8192, 70_000)


def body_of(*parts: bytes | None) -> bytes:
    """Return key and value as in a record of version 2, without headers."""
    fields = [encode_varint(-1 if part is None else len(part)) + (part or b"") for part in parts]
    return b"".join([*fields, b"\0"])


@pytest.mark.parametrize("key_bytes", SIZES)
@pytest.mark.parametrize("value_bytes", SIZES)
def test_a_message_fits_into_the_space_of_its_record(key_bytes: int | None, value_bytes: int | None) -> None:
    rng = chance()
    for _ in range(draws(8)):
        key, value = (None if n is None else rng.randbytes(n) for n in (key_bytes, value_bytes))
        magic, offset = rng.choice([0, 1]), rng.choice([0, 7, 2**62])
        timestamp, attributes = rng.choice([-1, 0, 2**62]), rng.choice([0, 8]) if magic else 0
        expected = encode_message(offset, key, value, magic=magic, timestamp=timestamp, attributes=attributes)
        body = body_of(key, value)
        source, target = guarded(body), guarded(bytes(len(body) + kernels.MAX_MESSAGE_GROWTH_BYTES))
        end = kernels.put_message(target, 0, offset, magic, attributes, timestamp, source, 0, len(body))
        assert target[:end].tobytes() == expected


@pytest.mark.parametrize("magic", [0, 1])
def test_a_wrapper_fills_its_space(magic: int) -> None:
    inner = encode_message(0, b"k", b"v", magic=magic)
    expected = encode_message(9, None, inner, magic=magic, timestamp=5, attributes=GZIP)
    header = kernels.wrapper_bytes(magic)
    target = guarded(bytes(header) + inner)
    crc = kernels.put_wrapper(target, 0, 9, len(target), magic, GZIP, 5)
    assert target.tobytes() == expected
    assert crc == int.from_bytes(expected[12:16], "big")
