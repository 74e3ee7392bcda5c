"""Lines made from a template equal those that plain Python makes from the same rows."""

from __future__ import annotations

import base64
import json

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keytail.dump.templates import Buffers, LineWriter, Literals, Rows, Span, Template
from keytail.kernels.dump import lines as kernels
from tests.chance import draws
from tests.reference.varints import encode_varint


def written(template, literals, rows, buffers=None, **more):
    out = bytearray()
    LineWriter(out.extend, literals).write(template, rows, buffers=buffers, **more)
    return bytes(out)


def one_span(kind, data, *, json_name=""):
    literals = Literals()
    line = Template(literals)
    line = line.json_value(json_name, "x") if json_name else line.span("", "x", kind)
    extra = np.frombuffer(b"." + (data or b""), np.uint8)
    size = -1 if data is None else len(data)
    span = Span(np.array([kernels.IN_EXTRA]), np.array([1]), np.array([size]))
    return written(line, literals, Rows(1, {}, {"x": span}), Buffers(extra=extra))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50))
@example([0, -1, 9, 10, 99, 100, 2**63 - 1, -(2**63), 10**18, 10**18 - 1])
def test_numbers_equal_those_of_python(values):
    literals = Literals()
    line = Template(literals).number("n: ", "n").text("\n")
    expected = "".join(f"n: {value}\n" for value in values).encode()
    assert written(line, literals, Rows(len(values), {"n": np.array(values, np.int64)})) == expected


@settings(max_examples=draws(400))
@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
@example("aé鍵🔑".encode() * 4)
@example(b'"\\\n\x00\x1f\x7f "' * 3)
def test_strings_equal_the_json_of_python(data):
    text = one_span(kernels.JSON, data, json_name="key")
    found = json.loads(b"{" + text[1:] + b"}")
    try:
        assert found == {"key": data.decode()}
    except UnicodeDecodeError:
        assert found == {"key_base64": base64.b64encode(data).decode()}
    assert text[:1] == b","


def test_a_null_is_json_null():
    assert one_span(kernels.JSON, None, json_name="key") == b',"key":null'


@settings(max_examples=draws(400))
@given(st.text(max_size=30))
def test_valid_utf_8_is_unchanged(text):
    assert one_span(kernels.TEXT, text.encode()) == text.encode()


def test_malformed_text_is_replaced_as_in_java():
    for data, expected in [
        (b"a\xffb", "a\ufffdb"),
        (b"\xe9\x8d", "\ufffd"),  # truncated within a character: one replacement
        (b"\xf0\x9f\x94", "\ufffd"),
        (b"\xed\xa0\x80", "\ufffd"),  # a surrogate: one replacement (three in Python)
        (b"\xc0\x80", "\ufffd\ufffd"),
        (b"\xe0\x80\x80", "\ufffd\ufffd\ufffd"),
        (b"\xf5\x80\x80\x80", "\ufffd" * 4),
    ]:
        assert one_span(kernels.TEXT, data).decode() == expected, data


header = st.tuples(st.text(max_size=4), st.none() | st.binary(max_size=4))


@given(st.lists(header, max_size=4))
def test_headers_are_printed(headers):
    block = encode_varint(len(headers))
    for key, value in headers:
        block += encode_varint(len(key.encode())) + key.encode()
        block += encode_varint(-1) if value is None else encode_varint(len(value)) + value
    keys = ",".join(key for key, _ in headers)
    assert one_span(kernels.HEADER_KEYS, block).decode() == f"[{keys}]"
    assert json.loads(one_span(kernels.JSON_HEADER_KEYS, block)) == [{"key": key} for key, _ in headers]
    found = json.loads(one_span(kernels.JSON_HEADERS, block))
    assert [item["key"] for item in found] == [key for key, _ in headers]
    values = [
        item["value"].encode() if item.get("value") is not None else
        base64.b64decode(item["value_base64"]) if "value_base64" in item else None
        for item in found
    ]  # fmt: skip
    assert values == [value for _, value in headers]


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 60))
def test_children_follow_their_parents_in_any_amount_of_space(counts, room):
    literals = Literals()
    parent = Template(literals).number("p ", "n").text("\n")
    child = Template(literals).number("  c ", "n").text(" odd", "odd").text("\n")
    first = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    total = int(first[-1])
    numbers = np.arange(total)
    out = bytearray()
    writer = LineWriter(out.extend, literals)
    writer._out = np.empty(room, np.uint8)
    writer.write(
        parent,
        Rows(len(counts), {"n": np.arange(len(counts))}),
        (child, Rows(total, {"n": numbers, "odd": numbers % 2})),
        first,
    )
    expected = ""
    for i in range(len(counts)):
        expected += f"p {i}\n"
        expected += "".join(f"  c {n}{' odd' if n % 2 else ''}\n" for n in range(first[i], first[i + 1]))
    assert out.decode() == expected
