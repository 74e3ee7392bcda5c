"""The proof's hash of keys equals that of its reference model, and collides no more often than random numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.kernels.jit import kernel
from keytail.kernels.native import multiply_add
from keytail.kernels.proof.key_hash import (
    BLOCK_BYTES,
    COEFFICIENTS,
    PRIME,
    SECRET_BYTES,
    coefficients_of,
    hash_key,
    hash_one,
)
from keytail.kernels.proof.table import FLAGS
from tests.chance import chance, draws
from tests.kernels.guard import guarded, guarded_front
from tests.reference.hashing import proof_128

words = st.integers(0, 2**64 - 1)
coefficient = st.one_of(st.sampled_from([0, 1, PRIME - 1]), st.integers(0, PRIME - 1))
some_coefficients = st.lists(
    st.lists(coefficient, min_size=COEFFICIENTS, max_size=COEFFICIENTS), min_size=2, max_size=2
)


@kernel
def _hash_all(data, starts, lengths, n, coefficients, hashes):
    for i in range(n):
        hashes[0, i], hashes[1, i] = hash_key(data, starts[i], lengths[i], coefficients)


@kernel
def _multiply_add(high, low, a, b):
    return multiply_add(high, low, a, b)


def _hashes(keys: list[bytes], coefficients: np.ndarray) -> np.ndarray:
    lengths = np.array([len(key) for key in keys], np.int64)
    data = np.frombuffer(bytearray(b"".join(keys)), np.uint8)
    hashes = np.zeros((2, len(keys)), np.uint64)
    _hash_all(data, np.cumsum(lengths) - lengths, lengths, len(keys), coefficients, hashes)
    return hashes


def _pairs(hashes: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(*hashes.tolist(), strict=True))


@given(words, words, words, words)
def test_multiply_add_adds_a_product_to_128_bits(high, low, a, b):
    total = ((high << 64 | low) + a * b) % 2**128
    given_words = [np.uint64(word) for word in (high, low, a, b)]
    for compute in (multiply_add, _multiply_add):
        assert tuple(map(int, compute(*given_words))) == (total >> 64, total % 2**64)


@settings(deadline=None, max_examples=draws(200))
@given(st.lists(st.binary(max_size=400), min_size=1, max_size=20), some_coefficients)
def test_hashes_are_those_of_the_reference_model(keys, coefficients):
    array = np.array(coefficients, np.uint64)
    expected = [proof_128(key, coefficients) for key in keys]
    assert _pairs(_hashes(keys, array)) == expected
    assert all(high & FLAGS == 0 for _, high in expected)


@pytest.mark.parametrize("value", [0, 255])
@pytest.mark.parametrize("of_each", [0, 1, PRIME - 1])
def test_hashes_of_every_length_are_those_of_the_model_at_extreme_sums(value, of_each):
    coefficients = np.full((2, COEFFICIENTS), of_each, np.uint64)
    keys = [bytes([value]) * n for n in range(5 * BLOCK_BYTES)]
    assert _pairs(_hashes(keys, coefficients)) == [proof_128(key, coefficients.tolist()) for key in keys]


def test_nothing_is_read_outside_a_key():
    coefficients = coefficients_of(chance().randbytes(SECRET_BYTES))
    for n in [*range(40), *range(BLOCK_BYTES - 2, BLOCK_BYTES + 12), 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 1]:
        key = bytes(i * 5 & 0xFF for i in range(n))
        for place in (guarded, guarded_front):
            found = hash_one(place(key), n, coefficients)
            assert tuple(map(int, found)) == proof_128(key, coefficients.tolist())


def test_a_secret_determines_all_coefficients():
    secret = chance().randbytes(SECRET_BYTES)
    coefficients = coefficients_of(secret)
    assert coefficients.shape == (2, COEFFICIENTS)
    assert coefficients.max() < PRIME
    assert len(set(coefficients.reshape(-1).tolist())) == 2 * COEFFICIENTS
    assert coefficients.tolist() == coefficients_of(secret).tolist()
    for at in range(SECRET_BYTES):
        other = bytearray(secret)
        other[at] ^= 1
        assert not set(coefficients.reshape(-1).tolist()) & set(coefficients_of(bytes(other)).reshape(-1).tolist())
    with pytest.raises(ValueError, match="32 bytes"):
        coefficients_of(secret[1:])


def _families(rng: random.Random, n: int) -> dict[str, list[bytes]]:
    """Return similar keys, by kind: most weak hashes have too many collisions for one of the kinds."""
    fixed = rng.randbytes(BLOCK_BYTES + 20)
    return {
        "decimal": [b"%d" % i for i in range(n)],
        "padded": [b"user-%016d" % i for i in range(n)],
        "little": [i.to_bytes(8, "little") for i in range(n)],
        "big": [i.to_bytes(16, "big") for i in range(n)],
        "zeros": [bytes(i) for i in range(n // 64)],
        "zeros at the end": [key + bytes(more) for key in (b"", b"k", b"key-456") for more in range(n // 256)],
        "multiples": [(i * 2**40).to_bytes(8, "little") for i in range(n)],
        "one bit": [bytes(128 * (i == at) for i in range(256)) for at in range(256)],
        "front": [i.to_bytes(4, "big") + fixed for i in range(n // 4)],
        "back": [fixed + i.to_bytes(4, "big") for i in range(n // 4)],
        "random": [rng.randbytes(16) for _ in range(n)],
    }


# Parts of a hash that select a slot of a table of 2**18 (`table.py`), or a shard.
_PARTS = {"low, upper half": (0, 46), "low, lower half": (0, 14), "high": (1, 46)}


@pytest.mark.parametrize("family", sorted(_families(random.Random(0), 256)))
def test_parts_of_hashes_collide_as_often_as_random_numbers(family):
    rng, bits = chance(), 18
    keys = _families(rng, 1 << 15)[family]
    hashes = _hashes(keys, coefficients_of(rng.randbytes(SECRET_BYTES)))
    assert len(set(_pairs(hashes))) == len(set(keys)) == len(keys)
    expected = len(keys) * (len(keys) - 1) / 2 / 2**bits
    for name, (row, shift) in _PARTS.items():
        parts = hashes[row] >> np.uint64(shift) & np.uint64(2**bits - 1)
        _, counts = np.unique(parts, return_counts=True)
        collisions = int((counts * (counts - 1) // 2).sum())
        # Seven standard deviations: one of 10**11 such tests fails. Fewer collisions are allowed.
        assert collisions <= expected + 7 * max(expected, 1) ** 0.5, (name, collisions, expected)


@pytest.mark.parametrize(
    "one, other",
    [(b"", b"\0"), (b"\0", b"\0\0"), (b"key", b"key\0"), (b"k" * 7, b"k" * 7 + b"\0"), (b"k" * 112, b"k" * 112 + b"\0"),
     (b"ab", b"ba"), (b"a" * 7 + b"b" * 7, b"b" * 7 + b"a" * 7), (b"a" * 112 + b"b" * 112, b"b" * 112 + b"a" * 112),
     (b"x" * 300, b"x" * 299 + b"y"), (bytes(112), bytes(224))],
)  # fmt: skip
def test_two_keys_share_eight_bits_of_a_sum_under_one_secret_in_256(one, other):
    rng, secrets, bits = chance(), 20_000, 8
    same = [0, 0]
    for _ in range(secrets):
        drawn = np.frombuffer(rng.randbytes(8 * 2 * COEFFICIENTS), np.uint64).reshape(2, COEFFICIENTS) % PRIME
        (low, high), (other_low, other_high) = _pairs(_hashes([one, other], drawn))
        assert (low, high) != (other_low, other_high)
        same[0] += (low ^ other_low) >> (64 - bits) == 0
        same[1] += (high ^ other_high) >> (64 - bits) == 0
    expected = secrets / 2**bits
    assert max(same) <= expected + 7 * expected**0.5
