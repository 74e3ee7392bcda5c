"""Freed memory is reused: in a process that requested this, a large block causes no new page faults."""

import platform
import subprocess
import sys

import pytest

_FAULTS = """
import ctypes, resource, sys
from keytail.run.tasks import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
if sys.argv[1] == "keep":
    assert keep_freed_memory() and keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        block = libc.malloc(8 << 20)
        ctypes.memset(block, 1, 8 << 20)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
libc.malloc(ctypes.c_size_t(33 << 20))  # larger than any block that is kept, so the threshold does not change
faults()
print(faults())
"""


def test_freed_blocks_are_reused():
    if "glibc" not in " ".join(platform.libc_ver()):
        pytest.skip("the C library is not glibc")
    command = [sys.executable, "-c", _FAULTS, "keep"]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) < 100
