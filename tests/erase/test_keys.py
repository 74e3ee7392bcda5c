from __future__ import annotations

import base64
import io
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.erase import keys as keys_file
from keytail.erase.keys import read_keys
from keytail.errors import UsageProblem
from keytail.kernels.erase import mark_erased
from keytail.kernels.proof.key_hash import coefficients_of, is_in
from tests.chance import draws

ENCODERS = {"utf8": bytes, "hex": lambda key: key.hex().encode(), "base64": base64.b64encode}


def found(keys: list[bytes], wanted: list[bytes], key_format: str) -> tuple[list[bool], list[bool]]:
    """Return which of `wanted` the two sets of `keys` contain."""
    read = read_keys(io.BytesIO(b"\n".join(map(ENCODERS[key_format], keys))), "F", key_format)
    hashes = [xxhash.xxh3_128_intdigest(key, read.seed) for key in wanted]
    low, high = (np.array([h >> shift & 2**64 - 1 for h in hashes], np.uint64) for shift in (0, 64))
    erased, by_key = np.zeros(len(wanted), np.uint8), np.zeros(read.count, bool)
    ordinals = np.arange(len(wanted))
    assert mark_erased(low, high, ordinals, read.table, erased, by_key) == erased.sum()
    assert by_key.sum() == len({*keys} & {*wanted})
    coefficients = coefficients_of(read.secret)
    by_proof = [is_in(np.frombuffer(bytearray(key), np.uint8), len(key), coefficients, read.hashes) for key in wanted]
    return erased.astype(bool).tolist(), [bool(is_there) for is_there in by_proof]


@pytest.mark.parametrize("key_format", ENCODERS)
def test_both_sets_have_exactly_the_keys(key_format):
    some = st.binary(min_size=1, max_size=300)
    if key_format == "utf8":
        some = st.text(min_size=1).map(str.encode).filter(lambda key: not {10, 13} & {*key})

    @settings(max_examples=draws(100), deadline=None)
    @given(st.lists(some, min_size=1, unique=True), st.lists(some))
    def check(keys, others):
        wanted = [*keys, *others, b""]
        expected = [key in keys for key in wanted]
        assert found(keys, wanted, key_format) == (expected, expected)

    check()


def test_a_file_is_read_in_blocks(monkeypatch):
    keys = [b"key-%d" % i for i in range(5000)]
    expected = [True] * 5000
    monkeypatch.setattr(keys_file, "_BLOCK_BYTES", 37)
    assert found(keys, keys, "utf8") == (expected, expected)


def test_many_keys_are_found():
    keys = [struct.pack(">q", i) for i in range(100_000)]
    expected = [True] * 100_000 + [False] * 1000
    wanted = keys + [struct.pack(">q", -i) for i in range(1, 1001)]
    assert found(keys, wanted, "hex") == (expected, expected)


@pytest.mark.parametrize(
    ("content", "key_format", "message"),
    [
        (b"", "utf8", "F has no keys"),
        (b"\n", "utf8", "line 1 of F is empty"),
        (b"secret\n\nb\n", "utf8", "line 2 of F is empty"),
        (b"a\nsecret\r\n", "utf8", "line 2 of F ends with a carriage return"),
        (b"a\nb\nsecret\xff\n", "utf8", "line 3 of F is not valid UTF-8"),
        (b"73656372657\n", "hex", "line 1 of F is not hexadecimal"),
        (b"aa\nsecret\n", "hex", "line 2 of F is not hexadecimal"),
        (b"aa\nbb\nAA\n", "hex", "line 3 of F has the same key as line 1"),
        (b"c2VjcmV0\nc2VjcmV\n", "base64", "line 2 of F is not base64"),
        (b"secret!\n", "base64", "line 1 of F is not base64"),
        (b"secret\nother\nsecret\n", "utf8", "line 3 of F has the same key as line 1"),
    ],
)
def test_errors_have_the_line_and_not_the_key(content, key_format, message):
    with pytest.raises(UsageProblem, match=message) as error:
        read_keys(io.BytesIO(content), "F", key_format)
    assert "secret" not in str(error.value) and "c2VjcmV" not in str(error.value)
    assert error.value.__cause__ is None or "secret" not in repr(error.value.__cause__)


def test_a_line_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setenv("KEYTAIL_MAX_RECORD_BYTES", "1000")
    monkeypatch.setattr(keys_file, "_BLOCK_BYTES", 100)
    with pytest.raises(UsageProblem, match="line 2 of F is longer than the largest possible record"):
        read_keys(io.BytesIO(b"a\n" + b"x" * 5000), "F", "utf8")
