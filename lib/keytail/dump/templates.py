"""Defines templates of lines with named columns, and the writer that fills in the templates with a kernel.

A template refers to number columns and spans by name; the caller provides mappings with an array or a Span for each
name. The kernel and its operations are in `kernels/dump/lines.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from keytail.kernels.dump import lines as kernels

Sink: TypeAlias = Callable[[memoryview], object]

OUT_BYTES = 1 << 20
_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Span:
    """One span per row: its buffer (`where`, int8), start and size (-1: null; both int64)."""

    where: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray


@dataclass
class Rows:
    """`count` rows with columns by name: numbers (converted to int64) and spans."""

    count: int
    numbers: Mapping[str, np.ndarray] = field(default_factory=dict)
    spans: Mapping[str, Span] = field(default_factory=dict)


class Literals:
    """The fixed pieces of text of several templates."""

    def __init__(self) -> None:
        self._texts: list[bytes] = []

    def add(self, *texts: str) -> int:
        """Add texts; return the number of the first text."""
        first = len(self._texts)
        self._texts += [text.encode() for text in texts]
        return first

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        ends = np.cumsum([0, *(len(text) for text in self._texts)]).astype(np.int64)
        return np.frombuffer(b"".join(self._texts), np.uint8), ends


class Template:
    """The pieces of a line, in order. A piece is written only if the number column named by `when` is not 0."""

    def __init__(self, literals: Literals) -> None:
        self._literals = literals
        self._ops: list[tuple[int, int, int, int]] = []
        self._numbers: list[str] = []
        self._spans: list[str] = []

    def text(self, text: str, when: str = "") -> Template:
        return self._add(kernels.LITERAL, self._literals.add(text), 0, when)

    def number(self, label: str, name: str, when: str = "") -> Template:
        self.text(label, when)
        return self._add(kernels.NUMBER, self._column(self._numbers, name), 0, when)

    def word(self, label: str, name: str, words: Sequence[str], when: str = "") -> Template:
        if label:
            self.text(label, when)
        return self._add(kernels.WORD, self._column(self._numbers, name), self._literals.add(*words), when)

    def span(self, label: str, name: str, kind: int, when: str = "") -> Template:
        """Add a span, written by the operation `kind`: BYTES, TEXT, HEADER_KEYS, JSON_HEADERS or JSON_HEADER_KEYS."""
        if label:
            self.text(label, when)
        return self._add(kind, self._column(self._spans, name), 0, when)

    def json_value(self, name: str, span: str, when: str = "") -> Template:
        """Add `,"name":...` with the value of a span."""
        self.text(",", when)
        return self._add(kernels.JSON, self._column(self._spans, span), self._literals.add(f'"{name}"'), when)

    def operations(self) -> np.ndarray:
        return np.array(self._ops, np.int64).reshape(-1, 4)

    def columns(self, rows: Rows) -> tuple[list[np.ndarray], list[Span]]:
        """Return the number columns and spans of `rows` in the order to which the operations refer."""
        return [rows.numbers[name] for name in self._numbers], [rows.spans[name] for name in self._spans]

    def _add(self, kind: int, first: int, second: int, when: str) -> Template:
        guard = self._column(self._numbers, when) if when else -1
        self._ops.append((kind, first, second, guard))
        return self

    @staticmethod
    def _column(names: list[str], name: str) -> int:
        if name not in names:
            names.append(name)
        return names.index(name)


@dataclass(frozen=True)
class Buffers:
    """The buffers of spans: IN_RAW, IN_ARENA and IN_EXTRA."""

    raw: np.ndarray = field(default_factory=lambda: _NOTHING)
    arena: np.ndarray = field(default_factory=lambda: _NOTHING)
    extra: np.ndarray = field(default_factory=lambda: _NOTHING)


class LineWriter:
    """Writes lines to a sink, about 1 MiB at a time."""

    def __init__(self, sink: Sink, literals: Literals) -> None:
        self._sink = sink
        self._literals, self._literal_ends = literals.arrays()
        self._out = np.empty(OUT_BYTES, np.uint8)

    def write(
        self,
        template: Template,
        rows: Rows,
        children: tuple[Template, Rows] | None = None,
        first_child: np.ndarray | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        """Write a line for each row, followed by the lines of its children [first_child[i], first_child[i + 1])."""
        if not rows.count:
            return
        buffers = buffers or Buffers()
        table = self._table(template, rows, *(children or (Template(Literals()), Rows(0))))
        if first_child is None:
            first_child = np.zeros(rows.count + 1, np.int64)
        state = np.array([0, -1, 0, 0], np.int64)
        while True:
            kernels.write_lines(
                table.ops, table.layout, first_child, table.numbers, table.where, table.starts, table.sizes,
                (buffers.raw, buffers.arena, buffers.extra), self._literals, self._literal_ends, self._out, state,
            )  # fmt: skip
            used, needed = int(state[kernels.USED]), int(state[kernels.NEEDED])
            if used:
                self._sink(memoryview(self._out)[:used])
            if not needed:
                return
            if needed > len(self._out):
                self._out = np.empty(needed, np.uint8)

    def _table(self, template: Template, rows: Rows, below: Template, children: Rows) -> _Table:
        """Return the rows and their children in common arrays, as `kernels.write_lines` requires."""
        columns = [template.columns(rows), below.columns(children)]
        counts = [rows.count, children.count]
        numbers = np.empty(sum(len(c[0]) * n for c, n in zip(columns, counts, strict=True)), np.int64)
        spans = sum(len(c[1]) * n for c, n in zip(columns, counts, strict=True))
        where, starts, sizes = np.empty(spans, np.int8), np.empty(spans, np.int64), np.empty(spans, np.int64)
        layout = np.zeros((2, 6), np.int64)
        ops = [template.operations(), below.operations()]
        op_at = number_at = span_at = 0
        for i, (of_numbers, of_spans) in enumerate(columns):
            most = kernels.fixed_bytes(ops[i], self._literal_ends)
            layout[i] = op_at, op_at + len(ops[i]), number_at, span_at, counts[i], most
            op_at += len(ops[i])
            for column in of_numbers:
                numbers[number_at : number_at + counts[i]] = column
                number_at += counts[i]
            for span in of_spans:
                some = slice(span_at, span_at + counts[i])
                where[some], starts[some], sizes[some] = span.where, span.starts, span.sizes
                span_at += counts[i]
        return _Table(np.concatenate(ops), layout, numbers, where, starts, sizes)


@dataclass(frozen=True)
class _Table:
    ops: np.ndarray
    layout: np.ndarray
    numbers: np.ndarray
    where: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
