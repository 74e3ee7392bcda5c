"""Large tables are in private memory: shared memory gets no huge pages, and forked processes would write to it."""

import os

import numpy as np

from keytail.compact.table_memory import TableMemory, zeros

U64 = np.dtype(np.uint64)


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


def test_consecutive_tables_do_not_overlap_and_begin_with_zeros():
    memory = TableMemory(24 << 20)
    before = memory.zeros(1, U64)
    for n in (1 << 10, 1 << 17, 1 << 18, 1 << 19, 1 << 20, 2 << 20, 1 << 12):
        before[:] = n
        table = memory.zeros(n, U64)
        assert len(table) == n and not table.any()
        table[:] = 1
        assert (before == n).all(), n
        before = table


def test_a_table_too_large_for_its_memory_has_other_memory():
    memory = TableMemory(4 << 20)
    first = memory.zeros(1 << 18, U64)
    first[:] = 7
    second = memory.zeros(1 << 20, U64)
    second[:] = 8
    third = memory.zeros(1 << 18, U64)
    assert (second == 8).all() and not third.any()


def test_memory_is_used_again_when_no_array_refers_to_it():
    first = TableMemory(8 << 20)
    table = first.zeros(1 << 10, U64)
    address = table.ctypes.data
    del first
    other = TableMemory(8 << 20).zeros(1 << 10, U64)
    assert other.ctypes.data != address, "the array of the first memory is in use"
    view, address = other[5:], other.ctypes.data
    del other
    assert TableMemory(8 << 20).zeros(1 << 10, U64).ctypes.data != address, "a view of the array is in use"
    del view, table
    kept = TableMemory(8 << 20)
    address = kept.zeros(1 << 10, U64).ctypes.data
    del kept
    assert TableMemory(8 << 20).zeros(1 << 10, U64).ctypes.data == address


def test_tables_have_other_memory_if_the_system_refuses_all_of_it_at_once():
    table = TableMemory(1 << 62).zeros(1 << 20, U64)
    assert len(table) == 1 << 20 and not table.any()
