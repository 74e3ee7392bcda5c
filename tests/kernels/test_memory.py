"""Large tables are in private memory: shared memory gets no huge pages, and forked processes would write to it."""

import os

import numpy as np

from keytail.kernels.memory import zeros


def test_a_large_table_is_zeroed_and_private():
    table = zeros(1 << 20, np.dtype(np.uint64))
    assert table.nbytes == 8 << 20 and not table.any()
    child = os.fork()
    if child == 0:
        table[5] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert table[5] == 0
    table[5] = 8
    assert table[5] == 8


def test_a_small_table_is_zeroed():
    assert zeros(3, np.dtype(np.int64)).tolist() == [0, 0, 0]
