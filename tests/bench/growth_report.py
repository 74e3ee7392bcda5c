"""One page of the measurements of `growth.py`: curves, and every number beside them.

`python -m tests.bench.growth_report FILE.json PAGE.html`. The page needs no other file and no network: drawings are SVG
that takes its colours from the page, in light and in dark mode.
"""

from __future__ import annotations

import html
import io
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter, NullFormatter

from tests.bench.growth import KAFKA, TASK

STYLE = (Path(__file__).parent / "growth_report.css").read_text()
# An exponent of the bytes this close to 1 counts as linear: caches and fixed costs bend any line.
NEARLY = 0.1
INK, FAINT = "#010203", "#010204"
# The page's style defines each colour.
COLOURS = ("#0a0001", "#0a0002", "#0a0003", "#0a0004")
MARKS = ("o", "s", "^", "D")
_NAMES = {INK: "var(--ink)", FAINT: "var(--faint)"} | {c: f"var(--side-{n})" for n, c in enumerate(COLOURS)}

mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "keytail", "font.size": 9, "font.family": "sans-serif"})


def page(found: dict[str, Any]) -> str:
    """Return the whole page, as HTML."""
    curves = found["curves"]
    parts = [_section(name, curves[name]) for name in SECTIONS if name in curves]
    machines = {json.dumps({**c["machine"], "load_at_start": ""}): c["machine"] for c in curves.values()}
    facts = "".join(
        f"<dt>{html.escape(name.replace('_', ' '))}</dt><dd>{html.escape(text)}</dd>"
        for one in machines.values()
        for name, text in one.items()
        if name != "load_at_start"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>keytail: how its cost grows</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"
        "<h1>How the cost of a compaction grows</h1>\n"
        f'<p class="lead">{_summary(curves)}</p>\n'
        "<p>Records are of 117 bytes, in batches of 100, uncompressed, of keys chosen at random. Both sides are warm "
        "and find the log in the page cache. keytail reads, checks, writes, syncs, proves what it wrote and replaces "
        "the segments; Kafka's Cleaner, on one thread of a warm JVM, does all of that but the proof. A point is the "
        "median of its runs, a bar goes from the least to the most.</p>\n"
        f'<details class="facts"><summary>The machine</summary><dl>{facts}</dl></details>\n'
        + "\n".join(parts)
        + '\n<section><h2>Raw numbers</h2><p>As <code>growth.json</code>, which this page is made from.</p>'
        f'<details><summary>JSON</summary><pre id="raw">{html.escape(json.dumps(found))}</pre></details></section>\n'
        "</main>\n</body>\n</html>\n"
    )


def cost_of_bytes(points: Sequence[dict[str, Any]], side: str, what: str = "seconds") -> tuple[float, float, float]:
    """Return seconds, seconds per GB, and the exponent of the bytes, each from the best fit through the points of one
    side.

    The exponent leaves out the points that the fixed cost of a run dominates: those below a tenth of the largest.
    """
    gigabytes = np.array([point["log_bytes"] / 1e9 for point in points])
    seconds = np.array([statistics.median(point["sides"][side][what]) for point in points])
    slope, fixed = np.polyfit(gigabytes, seconds, 1, w=1 / seconds)
    large = gigabytes >= gigabytes.max() / 10
    exponent = np.polyfit(np.log(gigabytes[large]), np.log(seconds[large]), 1)[0] if large.sum() > 1 else float("nan")
    return float(fixed), float(slope), float(exponent)


def _summary(curves: dict[str, Any]) -> str:
    if "records" not in curves:
        return "Of the curves, that over records was not measured."
    points = curves["records"]["points"]
    lines, linear = [], True
    for side in points[0]["sides"]:
        fixed, slope, exponent = cost_of_bytes(points, side)
        linear = linear and abs(exponent - 1) <= NEARLY
        lines.append(
            f"{html.escape(side)}: {fixed * 1000:.0f} ms and {slope:.2f} s a GB of log "
            f"(seconds grow as bytes<sup>{exponent:.2f}</sup>)"
        )
    return ("Linear in bytes. " if linear else "Not linear in bytes. ") + "; ".join(lines) + "."


# Drawings


def _draw(name: str, curve: dict[str, Any], x_of: Callable[[Any], float], x_label: str, *, log_x: bool) -> str:
    drawing = Drawing(figsize=(4.2, 2.9), layout="constrained")
    axes = drawing.add_subplot()
    points = curve["points"]
    for side in _sides(points):
        number = _colour(side)
        having = [point for point in points if side in point["sides"]]
        xs = [x_of(point) for point in having]
        runs = [point["sides"][side]["seconds"] for point in having]
        middle = [statistics.median(seconds) for seconds in runs]
        spread = [[m - min(s) for m, s in zip(middle, runs, strict=True)],
                  [max(s) - m for m, s in zip(middle, runs, strict=True)]]  # fmt: skip
        line = "none" if name == "records" else "-"
        axes.errorbar(xs, middle, yerr=spread, color=COLOURS[number], marker=MARKS[number], markersize=4.5,
                      linewidth=1.6, elinewidth=1, capsize=2, linestyle=line)  # fmt: skip
        if name == "records":
            fixed, slope, _ = cost_of_bytes(having, side)
            axes.plot([0, max(xs)], [fixed, fixed + slope * max(xs)], color=COLOURS[number], linewidth=1.2)
        if name == "unique":
            _say_rounds(axes, having, side, xs, middle)
    if name == "cores":
        first = statistics.median(points[0]["sides"]["keytail on Spark"]["seconds"])
        counts = [point["x"] for point in points]
        axes.plot(counts, [first * counts[0] / n for n in counts], color=FAINT, linestyle="--", linewidth=1.2)
        axes.set_xticks(counts)
    if log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel("seconds")
    return _svg(drawing, axes, name, f"{curve['title']}: seconds")


def _say_rounds(axes: Any, points: Sequence[dict[str, Any]], side: str, xs: list[float], ys: list[float]) -> None:
    for point, x, y in zip(points, xs, ys, strict=True):
        rounds = point["sides"][side].get("rounds")
        if rounds and rounds[0] > 1:
            axes.annotate(f"{rounds[0]}", (x, y), xytext=(0, 5), textcoords="offset points", ha="center", color=INK,
                          fontsize=8)  # fmt: skip


def _memory(curve: dict[str, Any]) -> str:
    drawing = Drawing(figsize=(4.2, 2.9), layout="constrained")
    axes = drawing.add_subplot()
    having = [point for point in curve["points"] if "peak_bytes" in point["sides"].get(TASK, {})]
    keys = [point["sides"][TASK]["records_after"][0] / 1e6 for point in having]
    for number, name in enumerate(("peak_bytes", "before_bytes")):
        values = [statistics.median(point["sides"][TASK][name]) / 2**20 for point in having]
        axes.plot(keys, values, color=COLOURS[1] if number == 0 else FAINT, marker=MARKS[number], markersize=4.5,
                  linewidth=1.6, linestyle="-" if number == 0 else "--")  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("million keys that survive")
    axes.set_ylabel("MiB, private")
    return _svg(drawing, axes, "memory", "Peak private memory of the task's process, over keys")


def _svg(drawing: Any, axes: Any, name: str, title: str) -> str:
    drawing.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    axes.grid(color=FAINT, linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, which="both", width=0.6)
    for place, spine in axes.spines.items():
        spine.set_visible(place in ("left", "bottom"))
        spine.set_color(INK)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    out = io.StringIO()
    drawing.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()[out.getvalue().index("<svg") :]
    for colour, variable in _NAMES.items():
        svg = svg.replace(colour, variable)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"|<svg height="[^"]*" width="[^"]*"',
                  r"<svg \1", svg, count=1).replace(
        "<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)  # fmt: skip


def _short(value: float, _: Any = None) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


# Sections

# By curve: what the x of a point is, the title of the axis, whether it is logarithmic, and what the curve shows.
SECTIONS: dict[str, tuple[Callable[[Any], float], str, bool, str]] = {
    "records": (
        lambda point: point["log_bytes"] / 1e9,
        "GB of log",
        False,
        "A tenth as many keys as records. The straight lines are the best fits, by relative error.",
    ),
    "keys": (
        lambda point: point["x"],
        "keys that records are drawn from",
        True,
        "More keys are more records that stay, a larger map, and more cache misses.",
    ),
    "segments": (
        lambda point: point["x"],
        "segments",
        True,
        "The same bytes in more files: each is opened, and each group of them is made durable and replaced by itself.",
    ),
    "partitions": (
        lambda point: point["x"],
        "partitions",
        True,
        "The same bytes in more partitions, in a warm Spark session with one core and with all; Kafka's Cleaner one "
        "after the other. Starting Spark is not in it.",
    ),
    "cores": (
        lambda point: point["x"],
        "cores",
        False,
        "Partitions of equal size, in a warm Spark session. The broken line is what as many times the cores would "
        "give at best.",
    ),
    "unique": (
        lambda point: point["x"] / 1e6,
        "million records, nearly each with a key of its own",
        False,
        "With room in its map each side reads the log once. Where the map is small (32 MB in a full report), a round "
        "ends when it is full, and the next begins there and copies all that is in front of it once more: the number "
        "at a point is how many rounds it took.",
    ),
    "checkpoint": (
        lambda point: point["x"],
        "entries in the file",
        False,
        "The driver sets one entry of a log dir's cleaner checkpoint for each partition that is done: the file is "
        "read, rewritten and made durable. One at a time.",
    ),
}


def _sides(points: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(side for point in points for side in point["sides"]))


def _colour(side: str) -> int:
    """Kafka's colour is the same in all drawings, and so is keytail's."""
    if side.startswith("Kafka"):
        return 0 if side == KAFKA else 3
    return 1 if side in (TASK, "keytail on local[1]", "keytail on Spark", "keytail's driver") else 2


def _section(name: str, curve: dict[str, Any]) -> str:
    x_of, x_label, log_x, words = SECTIONS[name]
    legend = "".join(
        f'<li><span class="swatch mark-{_colour(side)}"></span>{html.escape(side)}</li>'
        for side in _sides(curve["points"])
    )
    if name == "cores":
        legend += '<li><span class="swatch ideal"></span>at best</li>'
    drawing = f'<figure>{_draw(name, curve, x_of, x_label, log_x=log_x)}<ul class="legend">{legend}</ul></figure>'
    if name == "keys":
        legend = (
            '<li><span class="swatch mark-1"></span>peak of the task\'s process</li>'
            '<li><span class="swatch ideal"></span>before the task began</li>'
        )
        drawing += f'<figure>{_memory(curve)}<ul class="legend">{legend}</ul></figure>'
    load = f"load {curve['machine']['load_at_start']} at start, {curve['load_at_end']} at end"
    return (
        f'<section id="{name}"><h2>{html.escape(curve["title"])}</h2>\n<p>{words}</p>\n'
        f'<div class="drawings">{drawing}</div>\n'
        f'<p class="source"><code>{html.escape(curve["command"])}</code><br>'
        f"{html.escape(curve['date'])}, seed {curve['seed']}, {curve['runs']} runs, {load}</p>\n"
        f"<details><summary>Numbers</summary>{_table(curve)}</details></section>"
    )


def _table(curve: dict[str, Any]) -> str:
    head = (curve["x"], "MB", "segments", "side", "median s", "least", "most", "CPU s", "MB/s", "rounds", "peak MiB")
    rows = []
    for point in curve["points"]:
        for side, of_side in point["sides"].items():
            seconds = of_side["seconds"]
            middle = statistics.median(seconds)
            rounds, cpu, peak = (of_side.get(key) for key in ("rounds", "cpu_seconds", "peak_bytes"))
            cells = (
                f"{point['x']:,}", f"{point['log_bytes'] / 1e6:,.1f}", f"{point['segments']:,}", html.escape(side),
                f"{middle:.3f}", f"{min(seconds):.3f}", f"{max(seconds):.3f}",
                f"{statistics.median(cpu):.3f}" if cpu else "", f"{point['log_bytes'] / middle / 1e6:,.0f}",
                str(rounds[0]) if rounds else "", f"{max(peak) / 2**20:,.0f}" if peak else "",
            )  # fmt: skip
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    header = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    return f'<div class="wide"><table><thead><tr>{header}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def main(arguments: list[str] | None = None) -> int:
    source, target = arguments or sys.argv[1:]
    Path(target).write_text(page(json.loads(Path(source).read_text())))
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
