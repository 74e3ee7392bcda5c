"""Writes a page with the curves and figures of `growth.py`: `python -m tests.bench.growth_report FILE.json PAGE.html`.
The page needs no other file and no network: the drawings are SVG with the colours of the page, in light and dark mode.
"""

from __future__ import annotations

import html
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keytail.report.chart import Axis, Chart, numbers
from tests.bench.growth import KAFKA, TASK

STYLE = (Path(__file__).parent / "growth_report.css").read_text()
# An exponent of the bytes this close to 1 counts as linear, because of caches and fixed costs.
NEARLY = 0.1
# The colours are defined by the style of the page.
COLOURS = tuple(f"var(--side-{n})" for n in range(4))
FAINT = "var(--faint)"
# Symbols of points: a circle, a square, a triangle, a diamond.
MARKS = (
    "m-3,0a3,3 0 1,0 6,0a3,3 0 1,0 -6,0z", "m-3,-3h6v6h-6z", "m0,-3.5l3.5,6.5h-7z", "m0,-4l4,4l-4,4l-4,-4z",
)  # fmt: skip
HEIGHT = 209


def page(found: dict[str, Any]) -> str:
    """Return the complete page as HTML."""
    curves = found["curves"]
    parts = [_section(name, curves[name]) for name in SECTIONS if name in curves]
    machines = {json.dumps({**c["machine"], "load_at_start": ""}): c["machine"] for c in curves.values()}
    facts = "".join(
        f"<dt>{html.escape(name.replace('_', ' '))}</dt><dd>{html.escape(text)}</dd>"
        for item in machines.values()
        for name, text in item.items()
        if name != "load_at_start"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>keytail: how its cost grows</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"
        "<h1>How the cost of a compaction grows</h1>\n"
        f'<p class="lead">{_summary(curves)}</p>\n'
        "<p>Records have 117 bytes and random keys, in uncompressed batches of 100. Both sides are warm, and the log "
        "is in the page cache. keytail reads, checks, writes, syncs, proves what it wrote, and replaces the segments; "
        "Kafka's Cleaner, on one thread of a warm JVM, does all of that except the proof. A point is the median of "
        "its runs; a bar extends from the minimum to the maximum.</p>\n"
        f'<details class="facts"><summary>The machine</summary><dl>{facts}</dl></details>\n'
        + "\n".join(parts)
        + "\n<section><h2>Raw numbers</h2><p>The file <code>growth.json</code>, from which this page was made.</p>"
        f'<details><summary>JSON</summary><pre id="raw">{html.escape(json.dumps(found))}</pre></details></section>\n'
        "</main>\n</body>\n</html>\n"
    )


def cost_of_bytes(points: Sequence[dict[str, Any]], side: str, what: str = "seconds") -> tuple[float, float, float]:
    """Return fixed seconds, seconds per GB, and the exponent of the bytes, by fits through the points of one side.
    Points with fewer bytes than a tenth of the largest are not used for the exponent, because fixed costs dominate
    them.
    """
    gigabytes = np.array([point["log_bytes"] / 1e9 for point in points])
    seconds = np.array([statistics.median(point["sides"][side][what]) for point in points])
    slope, fixed = np.polyfit(gigabytes, seconds, 1, w=1 / seconds)
    large = gigabytes >= gigabytes.max() / 10
    exponent = np.polyfit(np.log(gigabytes[large]), np.log(seconds[large]), 1)[0] if large.sum() > 1 else float("nan")
    return float(fixed), float(slope), float(exponent)


def _summary(curves: dict[str, Any]) -> str:
    if "records" not in curves:
        return "The curve over records was not measured."
    points = curves["records"]["points"]
    lines, linear = [], True
    for side in points[0]["sides"]:
        fixed, slope, exponent = cost_of_bytes(points, side)
        linear = linear and abs(exponent - 1) <= NEARLY
        lines.append(
            f"{html.escape(side)}: {fixed * 1000:.0f} ms and {slope:.2f} s per GB of log "
            f"(seconds grow as bytes<sup>{exponent:.2f}</sup>)"
        )
    return ("Linear in bytes. " if linear else "Not linear in bytes. ") + "; ".join(lines) + "."


# Drawings


def _draw(name: str, curve: dict[str, Any], x_of: Callable[[Any], float], x_label: str, *, log_x: bool) -> str:
    points = curve["points"]
    places = [x_of(point) for point in points]
    most = max(max(of_side["seconds"]) for point in points for of_side in point["sides"].values())
    if log_x:
        powers = range(math.floor(math.log10(min(places))), math.ceil(math.log10(max(places))) + 1)
        first, last = min(places) / 1.5, max(places) * 1.5
        ticks = [(10.0**n, _short(10.0**n)) for n in powers if first <= 10.0**n <= last]
        across = Axis(first, last, ticks, x_label, scale=math.log)
    else:
        ticks = [(x, f"{x:g}") for x in places] if name == "cores" else numbers(max(places), 5)
        across = Axis(0, 1.05 * max(places), ticks, x_label)
    chart = Chart(f"{curve['title']}: seconds", HEIGHT, across, Axis(0, 1.08 * most, numbers(most, 5), "seconds"))
    if name == "cores":
        first = statistics.median(points[0]["sides"]["keytail on Spark"]["seconds"])
        chart.line([(x, first * places[0] / x) for x in places], FAINT, is_dashed=True)
    for side in _sides(points):
        having = [point for point in points if side in point["sides"]]
        runs = [(x_of(point), point["sides"][side]["seconds"]) for point in having]
        number = _colour(side)
        for x, seconds in runs:
            chart.line([(x, min(seconds)), (x, max(seconds))], COLOURS[number])
        line = [(x, statistics.median(seconds)) for x, seconds in runs]
        _mark(chart, line, MARKS[number], COLOURS[number])
        if name == "records":
            fixed, slope, _ = cost_of_bytes(having, side)
            line = [(x, fixed + slope * x) for x in (0, max(places))]
        chart.line(line, COLOURS[number])
        if name == "unique":
            _draw_rounds(chart, having, side, line)
    return chart.svg()


def _mark(chart: Chart, points: Sequence[tuple[float, float]], mark: str, colour: str) -> None:
    for x, y in (chart.place(*point) for point in points):
        chart.add("path", d=f"M{x:.1f},{y:.1f}{mark}", style=f"fill:{colour}")


def _draw_rounds(chart: Chart, points: Sequence[dict[str, Any]], side: str, line: list[tuple[float, float]]) -> None:
    for point, place in zip(points, line, strict=True):
        rounds = point["sides"][side].get("rounds")
        if rounds and rounds[0] > 1:
            x, y = chart.place(*place)
            chart.add("text", str(rounds[0]), x=x, y=y - 6, text_anchor="middle")


def _memory(curve: dict[str, Any]) -> str:
    of_task = [point["sides"][TASK] for point in curve["points"] if "peak_bytes" in point["sides"].get(TASK, {})]
    keys = [item["records_after"][0] / 1e6 for item in of_task]
    peak, before = (
        [statistics.median(item[name]) / 2**20 for item in of_task] for name in ("peak_bytes", "before_bytes")
    )
    across = Axis(0, 1.05 * max(keys), numbers(max(keys), 5), "million keys that survive")
    up = Axis(0, 1.08 * max(peak), numbers(max(peak), 5), "MiB, private")
    chart = Chart("Peak private memory of the task's process, over keys", HEIGHT, across, up)
    for number, (values, colour) in enumerate(((peak, COLOURS[1]), (before, FAINT))):
        line = list(zip(keys, values, strict=True))
        chart.line(line, colour, is_dashed=number == 1)
        _mark(chart, line, MARKS[number], colour)
    return chart.svg()


def _short(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


# Sections

# By curve: the x of a point, the title of the axis, whether it is logarithmic, and a description.
SECTIONS: dict[str, tuple[Callable[[Any], float], str, bool, str]] = {
    "records": (
        lambda point: point["log_bytes"] / 1e9,
        "GB of log",
        False,
        "There are a tenth as many keys as records. The straight lines are the best fits by relative error.",
    ),
    "keys": (
        lambda point: point["x"],
        "keys that records are drawn from",
        True,
        "With more keys, more records are retained, the map is larger, and there are more cache misses.",
    ),
    "segments": (
        lambda point: point["x"],
        "segments",
        True,
        "The same bytes in more files: each is opened, and each group of them is made durable and replaced separately.",
    ),
    "partitions": (
        lambda point: point["x"],
        "partitions",
        True,
        "The same bytes in more partitions, in a warm Spark session with one core and with all; Kafka's Cleaner cleans "
        "one after the other. The start of Spark is not included.",
    ),
    "cores": (
        lambda point: point["x"],
        "cores",
        False,
        "Partitions of equal size, in a warm Spark session. The dashed line is the ideal: as many times as fast as "
        "there are cores.",
    ),
    "unique": (
        lambda point: point["x"] / 1e6,
        "million records, almost all with distinct keys",
        False,
        "With room for all keys in its map, each side reads the log once. With a small map (32 MB in a full report), a "
        "round ends when the map is full, and the next round begins there and copies all earlier data once more. The "
        "number at a point is the number of rounds.",
    ),
    "checkpoint": (
        lambda point: point["x"],
        "entries in the file",
        False,
        "The driver sets one entry of a log dir's cleaner checkpoint for each completed partition, one at a time: the "
        "file is read, rewritten and made durable.",
    ),
}


def _sides(points: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(side for point in points for side in point["sides"]))


def _colour(side: str) -> int:
    """Return the number of the colour of a side, which is the same in all drawings."""
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
    head = (curve["x"], "MB", "segments", "side", "median s", "min s", "max s", "CPU s", "MB/s", "rounds", "peak MiB")
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
