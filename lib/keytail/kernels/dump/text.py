"""Writes numbers, text and JSON as bytes into a buffer: the parts of lines (`lines.py`).

A function that writes begins at position `p` of `out` and returns the position after the written bytes; the caller has
ensured that there is room.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from keytail.kernels.native import copy_bytes

# LLVM inlines these functions whatever their size: a call with an array argument counts references, and a line has 20
# calls.
inlined = register_jitable(forceinline=True)

NUMBER_BYTES = 20
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_BASE64 = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8)
_PAIRS = np.frombuffer(b"".join(b"%02d" % i for i in range(100)), np.uint8)
_LOW_BITS = np.uint64(0x0101010101010101)
_HIGH_BITS = np.uint64(0x8080808080808080)
_UPPER_BITS = np.uint64(0xE0E0E0E0E0E0E0E0)  # bytes below 0x20 have none of these bits
_QUOTES = np.uint64(0x2222222222222222)
_BACKSLASHES = np.uint64(0x5C5C5C5C5C5C5C5C)
_NULL = np.frombuffer(b"null", np.uint8)
_AS_BASE64 = np.frombuffer(b'_base64"', np.uint8)


@inlined
def _append(out, p, text):
    copy_bytes(out, p, text, 0, len(text))
    return p + len(text)


@inlined
def put_number(out, p, value):
    if value < 0:
        out[p] = 45
        p += 1
    v = np.uint64(-value) if value < 0 else np.uint64(value)
    digits = 1
    bound = np.uint64(10)
    while digits < 19 and v >= bound:
        digits += 1
        bound *= np.uint64(10)
    q = p + digits
    while v >= np.uint64(100):
        rest = v % np.uint64(100)
        v //= np.uint64(100)
        q -= 2
        out[q] = _PAIRS[rest * np.uint64(2)]
        out[q + 1] = _PAIRS[rest * np.uint64(2) + np.uint64(1)]
    if v >= np.uint64(10):
        out[q - 2] = _PAIRS[v * np.uint64(2)]
        out[q - 1] = _PAIRS[v * np.uint64(2) + np.uint64(1)]
    else:
        out[q - 1] = np.uint8(np.uint64(48) + v)
    return p + digits


@inlined
def _continues(b):
    return b & 0xC0 == 0x80


@inlined
def _character(a, p, end):
    """Return (bytes, 0) of the UTF-8 character at `p` or, if it is malformed, (0, bytes to skip).

    Bytes that Java's String replaces by one replacement character are skipped together.
    """
    b1 = np.int64(a[p])
    left = end - p
    if b1 < 0x80:
        return 1, 0
    if b1 < 0xC2:
        return 0, 1
    if b1 < 0xE0:
        return (2, 0) if left > 1 and _continues(a[p + 1]) else (0, 1)
    b2 = np.int64(a[p + 1]) if left > 1 else np.int64(0)
    if b1 < 0xF0:
        bad_second = (b1 == 0xE0 and b2 & 0xE0 == 0x80) or not _continues(b2)
        if left < 3:
            return 0, (1 if left > 1 and bad_second else left)
        if bad_second:
            return 0, 1
        if not _continues(a[p + 2]):
            return 0, 2
        return (0, 3) if b1 == 0xED and b2 >= 0xA0 else (3, 0)
    if b1 > 0xF4:
        return 0, 1
    bad_second = (b1 == 0xF0 and b2 < 0x90) or (b1 == 0xF4 and b2 & 0xF0 != 0x80) or not _continues(b2)
    if left < 4:
        if left > 1 and bad_second:
            return 0, 1
        if left > 2 and not _continues(a[p + 2]):
            return 0, 2
        return 0, left
    if bad_second:
        return 0, 1
    if not _continues(a[p + 2]):
        return 0, 2
    return (4, 0) if _continues(a[p + 3]) else (0, 3)


@inlined
def _ascii_bytes(a, p, end):
    """Return how many bytes from `p` on are ASCII."""
    q = p
    while q < end and a[q] < 0x80:
        q += 1
    return q - p


@inlined
def _has_zero(word):
    """Return a number that is not 0 if a byte of `word` is 0: the high bits of such bytes, and of bytes of value 1
    above them."""
    return (word - _LOW_BITS) & ~word & _HIGH_BITS


@inlined
def _word(a, p):
    """Return the eight bytes from index `p` as a uint64. `p` must be uint64: a signed index is compared with 0."""
    return (
        np.uint64(a[p])
        | np.uint64(a[p + np.uint64(1)]) << np.uint64(8)
        | np.uint64(a[p + np.uint64(2)]) << np.uint64(16)
        | np.uint64(a[p + np.uint64(3)]) << np.uint64(24)
        | np.uint64(a[p + np.uint64(4)]) << np.uint64(32)
        | np.uint64(a[p + np.uint64(5)]) << np.uint64(40)
        | np.uint64(a[p + np.uint64(6)]) << np.uint64(48)
        | np.uint64(a[p + np.uint64(7)]) << np.uint64(56)
    )


@inlined
def _is_plain(a, start, end):
    """Return whether all bytes are ASCII that JSON need not escape; eight bytes are read at a time."""
    special = np.uint64(0)
    p, stop = np.uint64(start), np.uint64(end)
    while p + np.uint64(8) <= stop:
        word = _word(a, p)
        special |= word | _has_zero(word & _UPPER_BITS) | _has_zero(word ^ _QUOTES) | _has_zero(word ^ _BACKSLASHES)
        p += np.uint64(8)
    while p < stop:
        b = a[p]
        if b < 0x20 or b >= 0x80 or b == 34 or b == 92:  # noqa: PLR1714 (a tuple would be built)
            return False
        p += np.uint64(1)
    return special & _HIGH_BITS == 0


@inlined
def _is_ascii(a, start, end):
    bits = np.uint64(0)
    p, stop = np.uint64(start), np.uint64(end)
    while p + np.uint64(8) <= stop:
        bits |= _word(a, p)
        p += np.uint64(8)
    while p < stop:
        bits |= np.uint64(a[p])
        p += np.uint64(1)
    return bits & _HIGH_BITS == 0


@inlined
def put_text(out, p, a, start, end):
    if _is_ascii(a, start, end):
        copy_bytes(out, p, a, start, end - start)
        return p + end - start
    while start < end:
        n = _ascii_bytes(a, start, end)
        if n == 0:
            n, skipped = _character(a, start, end)
            if n == 0:
                out[p] = 0xEF
                out[p + 1] = 0xBF
                out[p + 2] = 0xBD
                p += 3
                start += skipped
                continue
        copy_bytes(out, p, a, start, n)
        p += n
        start += n
    return p


@inlined
def _json_string(out, p, a, start, end):
    """Write the bytes as a JSON string with quotes; return the position after the string, or -1 if the bytes are not
    UTF-8."""
    out[p] = 34
    p += 1
    if _is_plain(a, start, end):
        copy_bytes(out, p, a, start, end - start)
        p += end - start
        out[p] = 34
        return p + 1
    while start < end:
        q = start
        while q < end and a[q] < 0x80 and a[q] >= 0x20 and a[q] != 34 and a[q] != 92:
            q += 1
        if q > start:
            copy_bytes(out, p, a, start, q - start)
            p += q - start
            start = q
            continue
        b = a[start]
        if b >= 0x80:
            n, _ = _character(a, start, end)
            if n == 0:
                return np.int64(-1)
            copy_bytes(out, p, a, start, n)
            p += n
            start += n
            continue
        out[p] = 92
        if b in (34, 92):
            out[p + 1] = b
            p += 2
        elif b == 10:
            out[p + 1] = 110
            p += 2
        else:
            out[p + 1] = 117
            out[p + 2] = 48
            out[p + 3] = 48
            out[p + 4] = _HEX[b >> 4]
            out[p + 5] = _HEX[b & 15]
            p += 6
        start += 1
    out[p] = 34
    return p + 1


@inlined
def _base64(out, p, a, start, end):
    out[p] = 34
    p += 1
    while start < end:
        n = min(end - start, 3)
        bits = np.int64(a[start]) << 16
        if n > 1:
            bits |= np.int64(a[start + 1]) << 8
        if n > 2:
            bits |= np.int64(a[start + 2])
        for i in range(4):
            out[p + i] = _BASE64[(bits >> (18 - 6 * i)) & 63] if i <= n else 61
        p += 4
        start += n
    out[p] = 34
    return p + 1


@inlined
def put_json_value(out, p, names, name_start, name_bytes, a, start, size):
    """Write `"name":value`, or base64 under `"name_base64"` if the value is not UTF-8; the name includes its quotes."""
    copy_bytes(out, p, names, name_start, name_bytes)
    p += name_bytes
    at = p
    out[p] = 58
    p += 1
    if size < 0:
        return _append(out, p, _NULL)
    done = _json_string(out, p, a, start, start + size)
    if done >= 0:
        return done
    p = _append(out, at - 1, _AS_BASE64)
    out[p] = 58
    return _base64(out, p + 1, a, start, start + size)
