"""Draws charts of bars and lines as SVG. Colours are variables of the page's style, so that charts follow the reader's
light or dark mode.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH = 317  # width of a chart in units of the SVG; text has a height of 10 units, and the page scales the chart
_TEXT, _GAP = 10, 4
_INK, _FAINT = "var(--ink)", "var(--faint)"
# The narrow and the wide characters of DejaVu Sans, one of the widest fonts that browsers use for system-ui.
_NARROW, _WIDE = frozenset("fijlrtI.,:;'|![]()-/ "), frozenset("mwMW@%")


@dataclass(frozen=True)
class Axis:
    """An axis from the value `first` (left or bottom) to `last`. `ticks` are pairs of a value and its caption. `scale`
    is a function that is applied to all values."""

    first: float
    last: float
    ticks: Sequence[tuple[float, str]]
    label: str = ""
    has_grid: bool = True
    scale: Callable[[float], float] = float

    def share(self, value: float) -> float:
        """Return where the value is on this axis: 0 at `first`, 1 at `last`."""
        first, last = self.scale(self.first), self.scale(self.last)
        return (self.scale(value) - first) / (last - first)


def numbers(largest: float, most: int, *, are_whole: bool = False) -> list[tuple[float, str]]:
    """Return at most `most` + 1 ticks (value, caption) at round numbers from 0 to `largest`; at whole numbers only if
    `are_whole`."""
    least = largest / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(n * power for n in ((1, 2, 5, 10) if are_whole else (1, 2, 2.5, 5, 10)) if n * power >= least)
    step = max(step, 1) if are_whole else step
    return [(n * step, f"{n * step:g}") for n in range(int(largest / step * (1 + 1e-9)) + 1)]


class Chart:
    """A chart with two axes. `bar` and `line` draw in the units of the axes; `svg` returns the chart as text."""

    def __init__(self, title: str, height: float, x: Axis, y: Axis) -> None:
        self._x, self._y = x, y
        self._left = max((_width(text) for _, text in y.ticks), default=0) + 2 * _GAP + (_TEXT + _GAP) * bool(y.label)
        self._right = WIDTH - max((_width(text) / 2 for _, text in x.ticks), default=0) - 1
        self._top, self._bottom = _TEXT, height - _TEXT - 2 * _GAP - (_TEXT + _GAP) * bool(x.label)
        self._svg = ET.Element("svg", {"role": "img", "aria-label": title, "viewBox": f"0 0 {WIDTH} {height:g}"})
        self._axes()

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the coordinates of a point in the units of the SVG."""
        return (
            self._left + self._x.share(x) * (self._right - self._left),
            self._bottom + self._y.share(y) * (self._top - self._bottom),
        )

    def add(self, tag: str, text: str = "", **attributes: str | float) -> None:
        """Add an SVG element. Numbers are in units of the SVG; underscores in names of attributes become hyphens."""
        known = {
            name.replace("_", "-"): value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
            for name, value in attributes.items()
        }
        ET.SubElement(self._svg, tag, known).text = text or None

    def bar(self, x: tuple[float, float], y: tuple[float, float], colour: str, edge: str = "none") -> None:
        """Draw a bar between two values on each axis."""
        (left, low), (right, high) = self.place(x[0], y[0]), self.place(x[1], y[1])
        self.add("rect", x=min(left, right), y=min(low, high), width=abs(right - left), height=abs(high - low),
                 style=f"fill:{colour};stroke:{edge};stroke-width:.5")  # fmt: skip

    def line(self, points: Sequence[tuple[float, float]], colour: str = _INK, *, is_dashed: bool = False) -> None:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.place(*point) for point in points))
        dashes = ";stroke-dasharray:4 2" if is_dashed else ""
        self.add("polyline", points=places, style=f"fill:none;stroke:{colour};stroke-width:1.4{dashes}")

    def svg(self) -> str:
        return ET.tostring(self._svg, encoding="unicode")

    def _axes(self) -> None:
        faint = f"stroke:{_FAINT};stroke-width:"
        for value, text in self._x.ticks:
            x, _ = self.place(value, self._y.first)
            if self._x.has_grid:
                self.add("line", x1=x, x2=x, y1=self._top, y2=self._bottom, style=f"{faint}.4;opacity:.5")
            self.add("text", text, x=x, y=self._bottom + _TEXT + _GAP, text_anchor="middle")
        for value, text in self._y.ticks:
            _, y = self.place(self._x.first, value)
            if self._y.has_grid:
                self.add("line", x1=self._left, x2=self._right, y1=y, y2=y, style=f"{faint}.4;opacity:.5")
            self.add("text", text, x=self._left - _GAP, y=y + 0.35 * _TEXT, text_anchor="end")
        self.add("path", d=f"M{self._left:.1f},{self._top}V{self._bottom:.1f}H{self._right:.1f}",
                 style=f"fill:none;{faint}.8")  # fmt: skip
        if self._x.label:
            x, y = (self._left + self._right) / 2, self._bottom + 2 * (_TEXT + _GAP)
            self.add("text", self._x.label, x=x, y=y, text_anchor="middle")
        if self._y.label:
            turned = f"translate({_TEXT} {(self._top + self._bottom) / 2:.1f}) rotate(-90)"
            self.add("text", self._y.label, text_anchor="middle", transform=turned)


def _width(text: str) -> float:
    """Return the approximate width of the text, in units of the SVG."""
    return sum(
        0.42 if item in _NARROW else 0.98 if item in _WIDE else 0.64 if item.islower() or item.isdigit() else
        0.78 if item.isascii() else 1
        for item in text
    ) * _TEXT  # fmt: skip
