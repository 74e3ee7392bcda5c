"""Draw the pictures of a report: SVG that takes its colours from the page, so that it is readable in light and dark
mode.

Each function returns the text of one `<svg>`. Names in it are shortened; the tables beside it show them in full.
"""

from __future__ import annotations

import html
import io
import logging
import re
import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from keytail.cli.masking import shown
from keytail.cli.rows import human_bytes
from keytail.compact.detail import Part
from keytail.report.facts import Partition
from keytail.report.keys import Size
from keytail.report.sums import TopicSums

# Placeholders, which are replaced by the variables of the page's style.
_INK, _FAINT, _PAPER = "#010203", "#010204", "#010205"
_KEPT, _GONE, _MARK = "#0a0001", "#0a0002", "#0a0003"
_LIVE = tuple(f"#0b000{n}" for n in range(5))
_UNKNOWN, _CLEANED, _DIRTY = "#0c0001", "#0c0002", "#0c0003"
_NAMES = {
    _INK: "var(--ink)", _FAINT: "var(--faint)", _PAPER: "var(--panel)", _KEPT: "var(--kept)", _GONE: "var(--gone)",
    _MARK: "var(--mark)", _UNKNOWN: "var(--unknown)", _CLEANED: "var(--cleaned)", _DIRTY: "var(--gone)",
} | {colour: f"var(--live-{n})" for n, colour in enumerate(_LIVE)}  # fmt: skip
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "keytail", "font.size": 10, "font.family": "sans-serif",
    "text.parse_math": False, "axes.unicode_minus": False,
}  # fmt: skip
_WIDTH_IN = 4.4
_NAME_LENGTH = 22
_MOST_SIZES_NAMED, _LEAST_SIZES = 7, 6
_UNITS_OF_AGE = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"))


def topics(sums: Sequence[TopicSums], *, is_plan: bool) -> str:
    """Draw one bar per topic: its retained and reclaimed bytes; for a plan, its clean and dirty bytes."""
    names = [_short(one.topic) for one in sums]
    gone = [one.dirty_bytes or 0 for one in sums] if is_plan else [max(one.reclaimed_bytes or 0, 0) for one in sums]
    kept = [one.bytes_before - lost for one, lost in zip(sums, gone, strict=True)]
    with _styled():
        figure = Figure(figsize=(_WIDTH_IN, 0.75 + 0.27 * len(sums)), layout="constrained")
        axes = figure.add_subplot()
        at = range(len(sums))
        axes.barh(at, kept, color=_KEPT, height=0.66)
        axes.barh(at, gone, left=kept, color=_GONE, height=0.66)
        axes.set_yticks(list(at), names)
        axes.invert_yaxis()
        _bytes_axis(axes, max((one.bytes_before for one in sums), default=0))
        return _svg(figure, axes, "topics", "Bytes by topic", grid="x")


def dirty_ratios(ratios: Sequence[float], minimum: float | None) -> str:
    """Draw how many partitions have which dirty ratio; a line marks the ratio above which a round is due."""
    bins = [0] * 10
    for ratio in ratios:
        bins[min(int(ratio * 10), 9)] += 1
    with _styled():
        figure = Figure(figsize=(_WIDTH_IN, 2.4), layout="constrained")
        axes = figure.add_subplot()
        axes.bar([n / 10 for n in range(10)], bins, width=0.094, align="edge", color=_GONE)
        if minimum is not None:
            axes.axvline(minimum, color=_INK, linestyle="--", linewidth=1.2)
        axes.set_xlim(0, 1)
        axes.set_xlabel("dirty ratio")
        axes.set_ylabel("partitions")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        return _svg(figure, axes, "dirty", "Partitions by dirty ratio", grid="y")


def phases(found: Sequence[tuple[str, float, int]]) -> str:
    with _styled():
        figure = Figure(figsize=(_WIDTH_IN, 0.75 + 0.3 * len(found)), layout="constrained")
        axes = figure.add_subplot()
        at = range(len(found))
        axes.barh(at, [seconds for _, seconds, _ in found], color=_KEPT, height=0.66)
        axes.set_yticks(list(at), [name for name, _, _ in found])
        axes.invert_yaxis()
        axes.set_xlabel("seconds of all tasks")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        return _svg(figure, axes, "phases", "Seconds by phase", grid="x")


def key_sizes(sizes: Sequence[Size]) -> str:
    """Draw two bars for each size: its share of all keys, and of all records."""
    keys, records = sum(one.keys for one in sizes), sum(one.records for one in sizes)
    with _styled():
        figure = Figure(figsize=(_WIDTH_IN, 2.4), layout="constrained")
        axes = figure.add_subplot()
        at = range(len(sizes))
        axes.bar([n - 0.2 for n in at], [100 * one.keys / keys for one in sizes], color=_KEPT, width=0.38)
        axes.bar([n + 0.2 for n in at], [100 * one.records / records for one in sizes], color=_GONE, width=0.38)
        step = -(-len(sizes) // _MOST_SIZES_NAMED)
        axes.set_xticks(list(at)[::step], [_binary(one.most) for one in sizes[::step]])
        axes.set_xlim(-0.6, max(len(sizes), _LEAST_SIZES) - 0.4)
        axes.set_xlabel("records per key, at most")
        axes.set_ylabel("%")
        axes.set_ylim(0, 100)
        return _svg(figure, axes, "key-sizes", "Keys by number of records", grid="y")


def _binary(number: int) -> str:
    """Return a power of two as text: `512`, `2 Ki`."""
    for unit, name in ((1 << 30, " Gi"), (1 << 20, " Mi"), (1 << 10, " Ki")):
        if number >= unit:
            return f"{number // unit}{name}"
    return str(number)


def segment_map(one: Partition, number: int, now_ms: int) -> str:
    """Draw one bar per segment, in the order of offsets: its width is the segment's bytes, its height the age, and its
    colour the share of live records."""
    parts = [part for part in one.detail.parts if part.log_bytes]
    ages = [max(now_ms - part.largest_timestamp_ms, 0) for part in parts]
    size, unit = next(((s, u) for s, u in _UNITS_OF_AGE if max(ages) >= 2 * s), _UNITS_OF_AGE[-1])
    heights = [max(age, max(ages) * 0.03, 1) / size for age in ages]
    starts = [sum(part.log_bytes for part in parts[:n]) for n in range(len(parts))]
    total = starts[-1] + parts[-1].log_bytes
    with _styled():
        figure = Figure(figsize=(_WIDTH_IN, 2.0), layout="constrained")
        axes = figure.add_subplot()
        axes.bar(starts, heights, width=[part.log_bytes for part in parts], align="edge",
                 color=[_colour(one, part) for part in parts], edgecolor=_PAPER, linewidth=0.5)  # fmt: skip
        dirty = one.detail.first_dirty_offset
        ahead = [start for start, part in zip(starts, parts, strict=True) if part.base_offset >= (dirty or 0)]
        if dirty is not None and (begin := min(ahead, default=total)):
            axes.axvline(begin, color=_INK, linestyle="--", linewidth=1.6)
        _bytes_axis(axes, total)
        axes.set_xlim(0, total)
        axes.set_ylabel(f"age, {unit}")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
        return _svg(figure, axes, f"map-{number}", f"Segments of {shown(one.name)}", grid="y")


def live_class(part: Part) -> int | None:
    """Return one of five classes, by the share of records that are retained; None if they were not counted."""
    if part.records is None or part.records_kept is None:
        return None
    if not part.records:
        return 0
    return min(int(5 * part.records_kept / part.records), 4)


def _colour(one: Partition, part: Part) -> str:
    live = live_class(part)
    if live is not None:
        return _LIVE[live]
    detail = one.detail
    if one.status != "would-compact" or detail.first_dirty_offset is None or detail.end_dirty_offset is None:
        return _UNKNOWN
    if part.base_offset >= detail.end_dirty_offset:
        return _UNKNOWN
    return _DIRTY if part.base_offset >= detail.first_dirty_offset else _CLEANED


def legend(drawn: Sequence[Partition]) -> list[tuple[str, str]]:
    """Return the swatch's class and a text for each colour that these maps use."""
    used = {_colour(one, part) for one in drawn for part in one.detail.parts if part.log_bytes}
    words = [(_LIVE[n], f"live-{n}", f"{20 * n} to {20 * n + 20} % live") for n in range(5)]
    words += [
        (_CLEANED, "cleaned", "cleaned before"),
        (_DIRTY, "gone", "dirty"),
        (_UNKNOWN, "unknown", "not examined: active, or not cleanable"),
    ]
    return [(swatch, text) for colour, swatch, text in words if colour in used]


def _short(name: str) -> str:
    name = shown(name)
    half = _NAME_LENGTH // 2
    return name if len(name) <= _NAME_LENGTH else f"{name[: half - 1]}…{name[-half:]}"


def _bytes_axis(axes: Any, largest: int) -> None:
    unit = next((u for u in (1 << 40, 1 << 30, 1 << 20, 1 << 10) if largest >= 2 * u), 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    ticks = MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]).tick_values(0, max(largest, 1) / unit)
    axes.set_xticks([tick * unit for tick in ticks if tick * unit <= largest * 1.05])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:g}"))
    axes.set_xlabel(human_bytes(unit).split()[1])


class _Styled:
    """Apply settings and suppress output of matplotlib in this process, only while it draws."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("matplotlib")
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)
        self._settings = mpl.rc_context(_SETTINGS)
        self._warnings = warnings.catch_warnings()
        self._settings.__enter__()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")  # about a font that lacks a name's letters: the reader's has them

    def __exit__(self, *problem: Any) -> None:
        self._warnings.__exit__(*problem)
        self._settings.__exit__(*problem)
        self._logger.setLevel(self._level)


def _styled() -> _Styled:
    return _Styled()


def _svg(figure: Any, axes: Any, name: str, title: str, grid: Any) -> str:
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    axes.grid(axis=grid, color=_FAINT, linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, which="both", width=0.6)
    for place, spine in axes.spines.items():
        spine.set_visible(place in ("left", "bottom"))
        spine.set_color(_FAINT)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = out.getvalue()[out.getvalue().index("<svg") :]
    for colour, variable in _NAMES.items():
        svg = svg.replace(colour, variable)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*pt"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*pt"', r"\1", svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)
