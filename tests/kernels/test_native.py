from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import crc32c as crc32c_wheel
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.kernels import fallback, native
from keytail.kernels.jit import kernel
from tests.chance import draws
from tests.kernels.guard import guarded, guarded_front
from tests.reference import hashing

LENGTHS = (0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 240, 241, 1000, 5000)
inputs = st.tuples(st.binary(max_size=400), st.integers(0, 40), st.integers(0, 2**64 - 1))


@kernel
def _crc(array, start, n):
    native.prefetch(array, start + n + 4096)
    return native.crc32c(array, start, n)


@kernel
def _hash(array, start, n, seed):
    return native.xxh3_128(array, start, n, seed)


@kernel
def _fallback_crc(array, start, n):
    return fallback.crc32c(array, start, n)


@kernel
def _fallback_hash(array, start, n, seed):
    return fallback.hash_128(array, start, n, seed)


def _words(pair) -> tuple[int, int]:
    return int(pair[0]), int(pair[1])


def _xxh3(data: bytes, seed: int) -> tuple[int, int]:
    value = xxhash.xxh3_128_intdigest(data, seed)
    return value & (2**64 - 1), value >> 64


def test_hashes_and_checksums_have_known_values():
    assert hashing.crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    # MurmurHash3_x64_128 of "hello" and of no bytes with seed 0, as printed by its author's program.
    assert hashing.fallback_128(b"hello", 0) == (0xCBD8A7B341BD9B02, 0x5B1E906A48AE1D19)
    assert hashing.fallback_128(b"", 0) == (0, 0)


def test_native_functions_are_used_unless_switched_off():
    wanted = os.environ.get("KEYTAIL_NATIVE", "1") != "0"
    assert native.NATIVE is wanted
    assert native.HASH_NAME == ("xxh3-128" if wanted else "keytail-fallback-128")


@pytest.mark.long
@settings(deadline=None, max_examples=draws(300))
@given(inputs)
def test_kernels_give_the_values_of_the_wheels_and_of_the_models(case):
    data, start, seed = case
    start = min(start, len(data))
    part = data[start:]
    array = np.frombuffer(data, dtype=np.uint8)  # read-only
    expected_crc = crc32c_wheel.crc32c(part)
    assert hashing.crc32c(part) == expected_crc
    assert _crc(array, start, len(part)) == expected_crc
    assert native.crc32c(array, start, len(part)) == expected_crc
    assert _fallback_crc(array, start, len(part)) == expected_crc
    model = hashing.fallback_128(part, seed)
    assert _words(_fallback_hash(array, start, len(part), np.uint64(seed))) == model
    assert fallback.hash_128_python(part, seed) == model
    expected = _xxh3(part, seed) if native.NATIVE else model
    assert _words(_hash(array, start, len(part), np.uint64(seed))) == expected
    assert native.xxh3_128(array, start, len(part), seed) == expected
    assert _words(_hash(array.copy(), start, len(part), np.uint64(seed))) == expected  # writable


@pytest.mark.parametrize("place", [guarded, guarded_front])
def test_no_byte_outside_the_range_is_read(place):
    for length in LENGTHS:
        data = bytes(i * 7 & 0xFF for i in range(length))
        array = place(data)
        for start in {0, min(1, length), min(3, length)}:
            part = data[start:]
            assert _crc(array, start, len(part)) == hashing.crc32c(part)
            assert _fallback_crc(array, start, len(part)) == hashing.crc32c(part)
            expected = hashing.fallback_128(part, 5)
            assert _words(_fallback_hash(array, start, len(part), np.uint64(5))) == expected
            if native.NATIVE:
                assert _words(_hash(array, start, len(part), np.uint64(5))) == _xxh3(part, 5)


def _run(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize(("place", "index"), [("guarded", "64"), ("guarded_front", "-1")])
def test_access_to_the_guard_page_ends_the_process(place, index):
    code = f"""
        import ctypes
        from tests.kernels.guard import {place}
        array = {place}(bytes(64))
        print(int(array[0]), int(array[63]), flush=True)
        ctypes.string_at(array.ctypes.data + {index}, 1)
    """
    result = _run(code)
    assert result.stdout == "0 0\n", result.stderr
    assert result.returncode == -signal.SIGSEGV


@pytest.mark.long
def test_a_hash_of_one_byte_too_many_ends_the_process():
    result = _run("""
        import numpy as np
        from tests.kernels.guard import guarded
        from tests.kernels.test_native import _crc
        _crc(np.zeros(9, dtype=np.uint8), 0, 9)
        array = guarded(bytes(64))
        _crc(array, 0, 64)
        print("alive", flush=True)
        _crc(array, 0, 65)
    """)
    assert result.stdout == "alive\n", result.stderr
    assert result.returncode == -signal.SIGSEGV


_PRINT_BOTH = """
    import numpy as np
    from keytail.kernels import native
    from tests.kernels.test_native import _crc, _hash
    array = np.frombuffer(bytes(range(200)), dtype=np.uint8)
    print(native.CHOICE, native.NATIVE, native.HASH_NAME)
    print(int(_crc(array, 3, 100)), *map(int, _hash(array, 3, 100, np.uint64(9))))
    print(sum(_crc.stats.cache_hits.values()) + sum(_hash.stats.cache_hits.values()))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return a folder that tests share, because compiling the functions again takes seconds."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.long
def test_native_functions_and_the_fallback_use_separate_caches(tmp_path):
    """Cached code that calls native functions works in the next process, even after a process without them."""
    part = bytes(range(3, 103))
    native_hash, fallback_hash = _xxh3(part, 9), hashing.fallback_128(part, 9)
    runs = (("1", native_hash, "0"), ("0", fallback_hash, "0"), ("1", native_hash, "2"))
    for switch, hashed, expected_hits in runs:
        result = _run(_PRINT_BOTH, KEYTAIL_NATIVE=switch, KEYTAIL_CACHE_DIR=str(tmp_path))
        assert result.returncode == 0, result.stderr
        choice, values, hits = result.stdout.splitlines()
        assert choice.endswith("True xxh3-128" if switch == "1" else "False keytail-fallback-128")
        assert values == f"{crc32c_wheel.crc32c(part)} {hashed[0]} {hashed[1]}"
        assert hits == expected_hits
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.long
def test_with_a_wheel_without_the_symbols_the_fallback_is_used(cache):
    result = _run(
        """
        import ctypes, sys
        class Bare(ctypes.CDLL):
            def __getattr__(self, name):
                if name.startswith(("XXH", "crc32c", "_crc32c")):
                    raise AttributeError(name)
                return super().__getattr__(name)
        ctypes.CDLL = Bare
        """
        + _PRINT_BOTH.replace("\n    ", "\n        "),
        KEYTAIL_CACHE_DIR=cache,
        KEYTAIL_NATIVE="1",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("crc=fallback hash=fallback False keytail-fallback-128\n")


@pytest.mark.long
def test_with_a_wheel_whose_function_gives_other_values_the_fallback_is_used(cache):
    result = _run(
        """
        import xxhash, crc32c
        xxhash.xxh3_128_intdigest = lambda data, seed: 1
        crc32c.crc32c = lambda data: 1
        """
        + _PRINT_BOTH.replace("\n    ", "\n        "),
        KEYTAIL_CACHE_DIR=cache,
        KEYTAIL_NATIVE="1",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("crc=fallback hash=fallback False keytail-fallback-128\n")


def test_the_instructions_of_arm64_are_used_if_the_wheel_has_them(monkeypatch):
    """The names are those of the wheel for aarch64, where no test runs."""
    kind = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    right = kind(lambda crc, data, n: crc32c_wheel.crc32c(ctypes.string_at(data, n), crc ^ 0xFFFFFFFF) ^ 0xFFFFFFFF)
    wrong = kind(lambda crc, data, n: 0)
    names = {"_crc32c_arm64_probe": lambda: 1, "_crc32c_hw_arm64": right, "_crc32c_sw_slicing_by_8": right}
    monkeypatch.setattr(native, "_library", lambda *_: SimpleNamespace(**names))
    assert native._native_crc()[0] == "_crc32c_hw_arm64"
    for other in ({"_crc32c_arm64_probe": lambda: 0}, {"_crc32c_hw_arm64": wrong}):
        monkeypatch.setattr(native, "_library", lambda *_, other=other: SimpleNamespace(**names | other))
        assert native._native_crc()[0] == "_crc32c_sw_slicing_by_8"


def test_arrays_of_other_types_are_refused_at_compile_time():
    with pytest.raises(Exception, match="contiguous uint8"):
        _crc(np.zeros(8, dtype=np.int64), 0, 8)
    with pytest.raises(Exception, match="contiguous uint8"):
        _hash(np.zeros(16, dtype=np.uint8)[::2], 0, 8, np.uint64(0))
