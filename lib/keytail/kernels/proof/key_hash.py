"""The hash of the proof's keys: two sums modulo the prime 2**61 - 1, with coefficients that are drawn for each task.

The bytes of a key are little-endian words of 7 bytes, the last one filled up with zero bytes. Each of the 16 words of a
block is multiplied by a coefficient of its own, and the products are added; before each further block, the sum is
multiplied by another coefficient. At the end the length, multiplied by a coefficient of its own, is added. The hash is
two such sums, with independent coefficients, each mixed so that its bits can select a slot.

The probability of a collision: two different keys of the same length differ in a word. Given all other coefficients,
their sums are equal for one value of that word's coefficient, or for all values if the coefficient by which sums are
multiplied is a root of a polynomial, which has fewer roots than the key has blocks. The sums of keys of different
lengths are equal for one value of the length's coefficient. So two different keys of up to 112 bytes (one block) have
the same hash with a probability of 2**-122, and keys of B blocks with at most B**2 times that probability. The
probability does not depend on the keys: nobody can choose keys that collide, because the secret is drawn later. The
probability that at least two of a thousand million keys of one block collide is 2**-63.

The effect of a collision: the table treats two keys as one, whose latest record is the later one. If another fault has
removed the latest record of one key, a retained record of the other key hides this. A correct output is refused if a
tombstone of one key was removed and an older record of the other key is retained.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numba.extending import register_jitable

from keytail.kernels.jit import kernel
from keytail.kernels.native import multiply_add
from keytail.kernels.walk import byte_at

SECRET_BYTES = 32
PRIME = (1 << 61) - 1
WORD_BYTES = 7
BLOCK_WORDS = 16
BLOCK_BYTES = WORD_BYTES * BLOCK_WORDS
# Columns of the coefficients, after the column for each word of a block.
_OF_LENGTH, _OF_SUM = BLOCK_WORDS, BLOCK_WORDS + 1
COEFFICIENTS = BLOCK_WORDS + 2
# Odd numbers without a pattern: the first digits of pi and of e.
_MIXES = (0x243F6A8885A308D3, 0xB7E151628AED2A6B)

_inlined = register_jitable(forceinline=True)


def coefficients_of(secret: bytes) -> np.ndarray:
    """Return the coefficients of both sums (uint64[2, COEFFICIENTS], each below the prime) that a secret determines."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    # 128 bits for each coefficient, so that there is almost no bias
    drawn = hashlib.shake_256(secret).digest(16 * 2 * COEFFICIENTS)
    values = [int.from_bytes(drawn[at : at + 16], "little") % PRIME for at in range(0, len(drawn), 16)]
    return np.array(values, np.uint64).reshape(2, COEFFICIENTS)


@_inlined
def _load_32(data, at):
    """Return four bytes as a little-endian number."""
    return (
        byte_at(data, at)
        | byte_at(data, at + 1) << np.uint64(8)
        | byte_at(data, at + 2) << np.uint64(16)
        | byte_at(data, at + 3) << np.uint64(24)
    )


@_inlined
def _load_64(data, at):
    return _load_32(data, at) | _load_32(data, at + 4) << np.uint64(32)


@_inlined
def _load_short(data, at, n):
    """Return the `n` < 8 bytes from `at` as a little-endian number, in few reads (which may overlap)."""
    if n >= 4:
        return _load_32(data, at) | _load_32(data, at + n - 4) << np.uint64(8 * (n - 4))
    if n == 0:
        return np.uint64(0)
    half = n >> 1
    last = byte_at(data, at + n - 1) << np.uint64(8 * (n - 1))
    return byte_at(data, at) | byte_at(data, at + half) << np.uint64(8 * half) | last


@_inlined
def _remainder(high, low):
    """Return `high << 64 | low`, a number below 2**123, modulo the prime."""
    prime = np.uint64(PRIME)
    folded = (low & prime) + (low >> np.uint64(61) | high << np.uint64(3))
    folded = (folded & prime) + (folded >> np.uint64(61))
    return folded - prime if folded >= prime else folded


@_inlined
def _product(a, b):
    return multiply_add(np.uint64(0), np.uint64(0), a, b)


@_inlined
def _mixed(remainder, shift, mix):
    """Return a word whose upper half depends on all bits of the remainder; different remainders give different
    words."""
    return _product((remainder ^ remainder >> np.uint64(31)) << np.uint64(shift), np.uint64(mix))[1]


@_inlined
def hash_key(data, start, n, coefficients):
    """Return the hash of `data[start:start + n]` (uint8) as (low, high) uint64; the low three bits of `high` are 0.

    Exactly these bytes are read. The upper half of each word, and the lower half of `low`, can be used to select a
    slot.
    """
    end = start + n
    a_high, a_low, b_high, b_low = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    for number in range((n + WORD_BYTES - 1) // WORD_BYTES):
        column = number % BLOCK_WORDS
        if column == 0 and number > 0:
            a_high, a_low = _product(_remainder(a_high, a_low), coefficients[0, _OF_SUM])
            b_high, b_low = _product(_remainder(b_high, b_low), coefficients[1, _OF_SUM])
        at = start + WORD_BYTES * number
        if end - at > WORD_BYTES:
            word = _load_64(data, at) & np.uint64((1 << 8 * WORD_BYTES) - 1)
        elif n > WORD_BYTES:
            word = _load_64(data, end - 8) >> np.uint64(64 - 8 * (end - at))
        else:
            word = _load_short(data, at, n)
        a_high, a_low = multiply_add(a_high, a_low, word, coefficients[0, column])
        b_high, b_low = multiply_add(b_high, b_low, word, coefficients[1, column])
    a_high, a_low = multiply_add(a_high, a_low, np.uint64(n), coefficients[0, _OF_LENGTH])
    b_high, b_low = multiply_add(b_high, b_low, np.uint64(n), coefficients[1, _OF_LENGTH])
    low = _mixed(_remainder(a_high, a_low), 0, _MIXES[0])
    return low ^ low >> np.uint64(32), _mixed(_remainder(b_high, b_low), 3, _MIXES[1])


@register_jitable
def has_hash(hashes, low, high):
    """Return whether `hashes` (uint64[2, n], sorted by the low word) contain a hash."""
    first, end = np.int64(0), np.int64(hashes.shape[1])
    while first < end:
        middle = (first + end) // 2
        if hashes[0, middle] < low:
            first = middle + 1
        else:
            end = middle
    while first < hashes.shape[1] and hashes[0, first] == low:
        if hashes[1, first] == high:
            return True
        first += 1
    return False


@kernel
def hash_all(data, ends, coefficients, hashes):
    """Write to `hashes` (uint64[2, n]) the hashes of n byte strings, which are consecutive in `data` (uint8) and end at
    `ends` (int64[n])."""
    start = np.int64(0)
    for i in range(ends.shape[0]):
        hashes[0, i], hashes[1, i] = hash_key(data, start, ends[i] - start, coefficients)
        start = ends[i]


@kernel
def is_in(data, n, coefficients, hashes):
    """Return whether `hashes` contain the hash of the first `n` bytes of `data`, for Python."""
    low, high = hash_key(data, np.int64(0), n, coefficients)
    return has_hash(hashes, low, high)


@kernel
def hash_one(data, n, coefficients):
    """Return `hash_key` of the first `n` bytes of `data`, for Python."""
    return hash_key(data, np.int64(0), n, coefficients)
