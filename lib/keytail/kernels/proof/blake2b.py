"""BLAKE2b with a 16-byte digest (RFC 7693, no key): the hash of the proof, unrelated to that of the offset map.

Eight inputs of up to 128 bytes (one block each) are compressed side by side in 512-bit vectors; longer inputs are
compressed one at a time. Equal to `hashlib.blake2b(data, digest_size=16)`; reads exactly the bytes it is given.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic, register_jitable

from keytail.kernels.jit import kernel

LANES = 8
BLOCK_BYTES = 128
_BLOCK_WORDS = 16
_ROUNDS = 12
_DIGEST_BYTES = 16

_IV = (
    0x6A09E667F3BCC908,
    0xBB67AE8584CAA73B,
    0x3C6EF372FE94F82B,
    0xA54FF53A5F1D36F1,
    0x510E527FADE682D1,
    0x9B05688C2B3E6C1F,
    0x1F83D9ABFB41BD6B,
    0x5BE0CD19137E2179,
)
_SIGMA = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
    (14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3),
    (11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4),
    (7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8),
    (9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13),
    (2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9),
    (12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11),
    (13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10),
    (6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5),
    (10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0),
)
# The four of the 16 state words that each of the eight mixings of a round uses: columns, then diagonals.
_MIXINGS = (
    (0, 4, 8, 12),
    (1, 5, 9, 13),
    (2, 6, 10, 14),
    (3, 7, 11, 15),
    (0, 5, 10, 15),
    (1, 6, 11, 12),
    (2, 7, 8, 13),
    (3, 4, 9, 14),
)
# The parameter block: digest length, no key, fan-out 1, depth 1.
_FIRST_WORD = _IV[0] ^ 0x01010000 ^ _DIGEST_BYTES

_SHORT_WORDS = 4

_WORD = ir.IntType(64)
_VECTOR = ir.VectorType(_WORD, LANES)


def _splat(value: int) -> ir.Constant:
    return ir.Constant(_VECTOR, [ir.Constant(_WORD, value)] * LANES)


def _mix(builder, rotate_right, v, at, x, y) -> None:
    """Apply RFC 7693's function G to four vectors of the state `v`."""
    a, b, c, d = at
    for word, first, second in ((x, 32, 24), (y, 16, 63)):
        v[a] = builder.add(builder.add(v[a], v[b]), word)
        v[d] = builder.xor(v[d], v[a])
        v[d] = builder.call(rotate_right, [v[d], v[d], _splat(first)])
        v[c] = builder.add(v[c], v[d])
        v[b] = builder.xor(v[b], v[c])
        v[b] = builder.call(rotate_right, [v[b], v[b], _splat(second)])


def _compress_lanes_of(typingctx, message_words, words, lengths, digests):
    """Return signature and code generator for blocks whose words from `message_words` on are zero."""
    for array in (words, lengths, digests):
        if not (isinstance(array, types.Array) and array.dtype == types.uint64 and array.layout == "C"):
            raise TypingError(f"a contiguous uint64 array is needed, not {array}")

    def codegen(context, builder, signature, args):
        def pointer(i, row):
            data = context.make_array(signature.args[i])(context, builder, args[i]).data
            moved = builder.gep(data, [ir.Constant(_WORD, row * LANES)])
            return builder.bitcast(moved, _VECTOR.as_pointer())

        rotate_type = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        rotate_right = cgutils.get_or_insert_function(builder.module, rotate_type, f"llvm.fshr.v{LANES}i64")
        message = [builder.load(pointer(0, i), align=8) for i in range(message_words)]
        message += [_splat(0)] * (_BLOCK_WORDS - message_words)  # LLVM removes the additions of zero
        start = [_FIRST_WORD, *_IV[1:]]
        v = [_splat(word) for word in (*start, *_IV)]
        v[12] = builder.xor(v[12], builder.load(pointer(1, 0), align=8))
        v[14] = _splat(_IV[6] ^ 0xFFFFFFFFFFFFFFFF)  # marks the last block
        for round_ in range(_ROUNDS):
            order = _SIGMA[round_ % len(_SIGMA)]
            for i, at in enumerate(_MIXINGS):
                _mix(builder, rotate_right, v, at, message[order[2 * i]], message[order[2 * i + 1]])
        for i in range(_DIGEST_BYTES // 8):
            word = builder.xor(_splat(start[i]), builder.xor(v[i], v[i + 8]))
            builder.store(word, pointer(2, i), align=8)
        return context.get_dummy_value()

    return types.none(words, lengths, digests), codegen


@intrinsic
def _compress_lanes(typingctx, words, lengths, digests):
    """Compress one final block in each of 8 lanes: `words[16, 8]` and `lengths[8]` into `digests[2, 8]`, all uint64."""
    return _compress_lanes_of(typingctx, _BLOCK_WORDS, words, lengths, digests)


@intrinsic
def _compress_short_lanes(typingctx, words, lengths, digests):
    """Do the same as `_compress_lanes` for inputs of at most `_SHORT_WORDS` words, which most keys are."""
    return _compress_lanes_of(typingctx, _SHORT_WORDS, words, lengths, digests)


@register_jitable
def _load_64(data, at):
    """Return eight bytes as a little-endian number; LLVM makes this one load."""
    return (
        np.uint64(data[at])
        | np.uint64(data[at + 1]) << np.uint64(8)
        | np.uint64(data[at + 2]) << np.uint64(16)
        | np.uint64(data[at + 3]) << np.uint64(24)
        | np.uint64(data[at + 4]) << np.uint64(32)
        | np.uint64(data[at + 5]) << np.uint64(40)
        | np.uint64(data[at + 6]) << np.uint64(48)
        | np.uint64(data[at + 7]) << np.uint64(56)
    )


@register_jitable
def _load_32(data, at):
    return (
        np.uint64(data[at])
        | np.uint64(data[at + 1]) << np.uint64(8)
        | np.uint64(data[at + 2]) << np.uint64(16)
        | np.uint64(data[at + 3]) << np.uint64(24)
    )


@register_jitable
def _load_short(data, at, n):
    """Return the `n` < 8 bytes from `at` as a little-endian number, in few reads (which may overlap)."""
    if n >= 4:
        return _load_32(data, at) | _load_32(data, at + n - 4) << np.uint64(8 * (n - 4))
    if n == 0:
        return np.uint64(0)
    half = n >> 1
    return (
        np.uint64(data[at])
        | np.uint64(data[at + half]) << np.uint64(8 * half)
        | np.uint64(data[at + n - 1]) << np.uint64(8 * (n - 1))
    )


_IV_WORDS = np.array(_IV, dtype=np.uint64)
_SIGMA_WORDS = np.array(_SIGMA, dtype=np.uint8)
_MIXING_WORDS = np.array(_MIXINGS, dtype=np.uint8)


@register_jitable
def _rotate_right(x, n):
    return x >> np.uint64(n) | x << np.uint64(64 - n)


@register_jitable
def _compress(h, message, counted, last):
    """Apply RFC 7693's function F to one input: update `h[8]` with the block `message[16]`."""
    v = np.empty(16, dtype=np.uint64)
    for i in range(8):
        v[i] = h[i]
        v[i + 8] = _IV_WORDS[i]
    v[12] ^= np.uint64(counted)
    if last:
        v[14] = ~v[14]
    for round_ in range(_ROUNDS):
        for i in range(8):
            a, b, c, d = _MIXING_WORDS[i, 0], _MIXING_WORDS[i, 1], _MIXING_WORDS[i, 2], _MIXING_WORDS[i, 3]
            v[a] += v[b] + message[_SIGMA_WORDS[round_ % 10, 2 * i]]
            v[d] = _rotate_right(v[d] ^ v[a], 32)
            v[c] += v[d]
            v[b] = _rotate_right(v[b] ^ v[c], 24)
            v[a] += v[b] + message[_SIGMA_WORDS[round_ % 10, 2 * i + 1]]
            v[d] = _rotate_right(v[d] ^ v[a], 16)
            v[c] += v[d]
            v[b] = _rotate_right(v[b] ^ v[c], 63)
    for i in range(8):
        h[i] ^= v[i] ^ v[i + 8]


@kernel(allocates=True)
def blake2b_128(data, start, n):
    """Return the digest of `data[start:start + n]` (uint8), of any length, as two little-endian uint64 words."""
    h = _IV_WORDS.copy()
    h[0] = np.uint64(_FIRST_WORD)
    message = np.zeros(_BLOCK_WORDS, dtype=np.uint64)
    done = 0
    while n - done > BLOCK_BYTES:
        for i in range(_BLOCK_WORDS):
            message[i] = _load_64(data, start + done + 8 * i)
        done += BLOCK_BYTES
        _compress(h, message, done, False)
    message[:] = 0
    rest = n - done
    whole = rest >> 3
    for i in range(whole):
        message[i] = _load_64(data, start + done + 8 * i)
    if rest & 7:
        message[whole] = _load_short(data, start + done + 8 * whole, rest & 7)
    _compress(h, message, n, True)
    return h[0], h[1]


@kernel(allocates=True)
def blake2b_128_many(data, starts, lengths, n, low, high):
    """Write the digests of the `n` inputs `data[starts[i]:starts[i] + lengths[i]]` to `low` and `high` (uint64)."""
    words = np.zeros((_BLOCK_WORDS, LANES), dtype=np.uint64)
    counted = np.zeros(LANES, dtype=np.uint64)
    digests = np.empty((2, LANES), dtype=np.uint64)
    used = 0  # rows of `words` that may be non-zero
    for first in range(0, n, LANES):
        for row in range(used):
            for lane in range(LANES):
                words[row, lane] = np.uint64(0)
        used = 0
        lanes = min(LANES, n - first)
        for lane in range(lanes):
            length = np.int64(lengths[first + lane])
            counted[lane] = np.uint64(length)
            if length <= BLOCK_BYTES:
                start = np.int64(starts[first + lane])
                whole = length >> 3
                for row in range(whole):
                    words[row, lane] = _load_64(data, start + 8 * row)
                rest = length & 7
                if rest:
                    if whole:  # the last bytes are read with seven before them, and shifted
                        words[whole, lane] = _load_64(data, start + length - 8) >> np.uint64(64 - 8 * rest)
                    else:
                        words[0, lane] = _load_short(data, start, rest)
                used = max(used, (length + 7) >> 3)
        if used <= _SHORT_WORDS:
            _compress_short_lanes(words, counted, digests)
        else:
            _compress_lanes(words, counted, digests)
        for lane in range(lanes):
            if lengths[first + lane] <= BLOCK_BYTES:
                low[first + lane] = digests[0, lane]
                high[first + lane] = digests[1, lane]
            else:
                digest = blake2b_128(data, starts[first + lane], lengths[first + lane])
                low[first + lane] = digest[0]
                high[first + lane] = digest[1]
