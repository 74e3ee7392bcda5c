from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.kernels.proof.blake2b import blake2b_128, blake2b_128_many
from tests.chance import draws
from tests.kernels.guard import guarded, guarded_front


def _expected(data: bytes) -> tuple[int, int]:
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _many(array: np.ndarray, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    starts = np.array([s for s, _ in spans], dtype=np.int64)
    lengths = np.array([n for _, n in spans], dtype=np.int64)
    low, high = np.zeros(len(spans), dtype=np.uint64), np.zeros(len(spans), dtype=np.uint64)
    blake2b_128_many(array, starts, lengths, len(spans), low, high)
    return list(zip(low.tolist(), high.tolist(), strict=True))


def test_the_digest_of_the_example_of_the_rfc_is_that_of_hashlib():
    data = np.frombuffer(b"abc", dtype=np.uint8)
    digest = bytes.fromhex("cf4ab791c62b8d2b2109c90275287816")
    assert hashlib.blake2b(b"abc", digest_size=16).digest() == digest
    low, high = blake2b_128(data, 0, 3)
    assert int(low).to_bytes(8, "little") + int(high).to_bytes(8, "little") == digest


def test_inputs_of_up_to_five_blocks_have_the_digests_of_hashlib():
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, 1000, dtype=np.uint8)
    spans = [(int(rng.integers(0, 300)), n) for n in range(641)]
    rng.shuffle(spans)
    expected = [_expected(data[s : s + n].tobytes()) for s, n in spans]
    assert _many(data, spans) == expected
    assert [tuple(map(int, blake2b_128(data, s, n))) for s, n in spans] == expected


@settings(deadline=None, max_examples=draws(200))
@given(st.lists(st.binary(max_size=200), max_size=40))
def test_many_inputs_of_mixed_lengths_have_the_digests_of_hashlib(keys):
    data = np.frombuffer(b"".join(keys), dtype=np.uint8)
    starts = np.cumsum([0, *map(len, keys)]).tolist()
    spans = [(starts[i], len(key)) for i, key in enumerate(keys)]
    assert _many(data, spans) == [_expected(key) for key in keys]


def test_no_byte_outside_an_input_is_read():
    for length in [*range(0, 140), 255, 256, 257, 300]:
        data = bytes(i * 5 & 0xFF for i in range(length))
        for place in (guarded, guarded_front):
            array = place(data)
            assert _many(array, [(0, length)] * 9) == [_expected(data)] * 9
            assert tuple(map(int, blake2b_128(array, 0, length))) == _expected(data)
