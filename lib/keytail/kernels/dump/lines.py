"""Writes rows of columns as lines of text, with one template per kind of row, for output of millions of lines.

A template is an array of operations, each of which appends something to the line: a literal, a number of a column, or
the bytes of a span unchanged, as text, or as JSON. Rows have two levels: parents and children, such as batches and
their records.
"""

from __future__ import annotations

import numpy as np

from keytail.kernels.dump.text import NUMBER_BYTES, inlined, put_json_value, put_number, put_text
from keytail.kernels.jit import kernel
from keytail.kernels.native import copy_bytes
from keytail.kernels.records import read_varint

# Operations, int64[4] each: one of these codes, arguments a and b, and the number column that must not be 0 (-1: none).
LITERAL = 0  # literal a
NUMBER = 1  # number column a
WORD = 2  # literal b + number column a
BYTES = 3  # span a unchanged
TEXT = 4  # span a, decoded as UTF-8 as Java does it: malformed bytes become U+FFFD
JSON = 5  # name (literal b) and value of span a: null, a string, or base64 under <name>_base64
HEADER_KEYS = 6  # span a, a block of headers: [k1,k2]
JSON_HEADERS = 7  # span a, a block of headers: objects of `key` and `value`, as with JSON
JSON_HEADER_KEYS = 8  # like JSON_HEADERS, but without the values

# The array that contains a span.
IN_RAW, IN_ARENA, IN_EXTRA = 0, 1, 2

PARENT, CHILD, USED, NEEDED = 0, 1, 2, 3

_NAMES = np.frombuffer(b'"key""value"', np.uint8)
_KEY_BYTES, _VALUE_BYTES = 5, 7


@inlined
def _header_keys(out, p, a, q, end):
    out[p] = 91
    p += 1
    count, q = read_varint(a, q, end)
    for i in range(count):
        if i:
            out[p] = 44
            p += 1
        n, q = read_varint(a, q, end)
        p = put_text(out, p, a, q, q + n)
        q += n
        n, q = read_varint(a, q, end)
        q += max(n, np.int64(0))
    out[p] = 93
    return p + 1


@inlined
def _json_headers(out, p, a, q, end, with_values):
    out[p] = 91
    p += 1
    count, q = read_varint(a, q, end)
    for i in range(count):
        if i:
            out[p] = 44
            p += 1
        out[p] = 123
        n, q = read_varint(a, q, end)
        p = put_json_value(out, p + 1, _NAMES, 0, _KEY_BYTES, a, q, n)
        q += n
        n, q = read_varint(a, q, end)
        if with_values:
            out[p] = 44
            p = put_json_value(out, p + 1, _NAMES, _KEY_BYTES, _VALUE_BYTES, a, q, n)
        q += max(n, np.int64(0))
        out[p] = 125
        p += 1
    out[p] = 93
    return p + 1


@inlined
def _span(out, p, kind, a, start, size, literals, name_start, name_bytes):
    end = start + max(size, 0)
    if kind == BYTES:
        copy_bytes(out, p, a, start, end - start)
        return p + end - start
    if kind == TEXT:
        return put_text(out, p, a, start, end)
    if kind == JSON:
        return put_json_value(out, p, literals, name_start, name_bytes, a, start, size)
    if kind == HEADER_KEYS:
        return _header_keys(out, p, a, start, end)
    return _json_headers(out, p, a, start, end, kind == JSON_HEADERS)


@kernel
def write_lines(ops, layout, first_child, numbers, where, starts, sizes, buffers, literals, literal_ends, out, state):
    """Append a line for each parent row, followed by the lines of its children, to `out` while they fit.

    `layout` (int64[2, 6]: parents, children) contains for each kind of row: the first and the end of its operations in
    `ops` (int64[k, 4]); where its number columns begin in `numbers` (int64), and its span columns in `where` (int8),
    `starts` and `sizes` (int64); the number of rows, which is the length of each column; and the maximum size of a
    line without spans. `first_child` is int64[parents + 1]; `buffers` are the arrays that contain the spans. `state` is
    int64[4]: the next parent row, its next child (-1: the parent's own line), bytes used, and, if the next line might
    not fit, the bytes it may need (call again, with `out` empty), else 0. `literal_ends` (int64) has one more item than
    there are literals.

    Parent and child rows share one loop, and frequent operations are inlined: Numba counts references to each array
    that is passed to a function, which takes as long as writing a literal.
    """
    raw, arena, extra = buffers
    parents = len(first_child) - 1
    parent = state[PARENT]
    child = state[CHILD]
    p = np.int64(0)
    needed = np.int64(0)
    while parent < parents:
        kind_of_row = 0 if child < 0 else 1
        row = parent if child < 0 else child
        if child >= first_child[parent + 1]:
            parent += 1
            child = -1
            continue
        ops_from, ops_to = layout[kind_of_row, 0], layout[kind_of_row, 1]
        number_base, span_base = layout[kind_of_row, 2], layout[kind_of_row, 3]
        rows = layout[kind_of_row, 4]
        needed = layout[kind_of_row, 5]
        for i in range(ops_from, ops_to):
            # The factor leaves room for the names and quotes of the smallest header, which has two bytes.
            if ops[i, 0] > WORD:
                size = max(sizes[span_base + ops[i, 1] * rows + row], np.int64(0))
                needed += size * (32 if ops[i, 0] >= JSON_HEADERS else 6)
        if needed > len(out) - p:
            break
        for i in range(ops_from, ops_to):
            guard = ops[i, 3]
            if guard >= 0 and numbers[number_base + guard * rows + row] == 0:
                continue
            kind = ops[i, 0]
            column = ops[i, 1]
            if kind == NUMBER:
                p = put_number(out, p, numbers[number_base + column * rows + row])
            elif kind <= WORD:
                k = column if kind == LITERAL else ops[i, 2] + numbers[number_base + column * rows + row]
                first = literal_ends[k]
                n = literal_ends[k + 1] - first
                copy_bytes(out, p, literals, first, n)
                p += n
            else:
                at = span_base + column * rows + row
                start, size = starts[at], sizes[at]
                name = literal_ends[ops[i, 2]]
                n = literal_ends[ops[i, 2] + 1] - name
                if where[at] == IN_RAW:
                    p = _span(out, p, kind, raw, start, size, literals, name, n)
                elif where[at] == IN_ARENA:
                    p = _span(out, p, kind, arena, start, size, literals, name, n)
                else:
                    p = _span(out, p, kind, extra, start, size, literals, name, n)
        needed = 0
        child = first_child[parent] if child < 0 else child + 1
    state[PARENT] = parent
    state[CHILD] = child
    state[USED] = p
    state[NEEDED] = needed


def fixed_bytes(ops: np.ndarray, literal_ends: np.ndarray) -> int:
    """Return the maximum number of bytes that the operations `ops` write in a line, without the line's spans."""
    lengths = np.diff(literal_ends)
    longest = int(lengths.max(initial=0))
    most = 0
    for kind, number, _, _ in ops.tolist():
        most += int(lengths[number]) if kind == LITERAL else max(NUMBER_BYTES, longest + 64)
    return most
