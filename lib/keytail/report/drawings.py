"""Draws the charts of a report.

Each function that draws returns an `<svg>` element as text. Names in charts are shortened; the tables beside the charts
contain the full names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from keytail.cli.masking import shown
from keytail.cli.rows import human_bytes
from keytail.compact.detail import Part
from keytail.report.chart import Axis, Chart, numbers
from keytail.report.facts import Partition
from keytail.report.keys import Size
from keytail.report.sums import TopicSums

_NAME_LENGTH = 22
_MAX_SIZES_NAMED, _MIN_SIZES = 7, 6
_BAR, _SPACE = 19.5, 54  # height of one horizontal bar, and of the space above and below all bars, in SVG units
_UNITS_OF_AGE = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"))


def topics(sums: Sequence[TopicSums], *, is_plan: bool) -> str:
    """Draw one bar for each topic: its retained and reclaimed bytes or, for a plan, its dirty and all other bytes."""
    chart = _rows(
        "Bytes by topic", [_short(item.topic) for item in sums], _bytes(max(item.bytes_before for item in sums))
    )
    for n, item in enumerate(sums):
        removed = (item.dirty_bytes if is_plan else max(item.reclaimed_bytes or 0, 0)) or 0
        kept = item.bytes_before - removed
        chart.bar((0, kept), _row(n), "var(--kept)")
        chart.bar((kept, item.bytes_before), _row(n), "var(--gone)")
    return chart.svg()


def dirty_ratios(ratios: Sequence[float], minimum: float | None) -> str:
    """Draw the number of partitions by dirty ratio. A line marks `minimum`, the ratio above which a round is due."""
    bins = [0] * 10
    for ratio in ratios:
        bins[min(int(ratio * 10), 9)] += 1
    most = 1.05 * max(bins)
    across = Axis(0, 1, [(n / 5, f"{n / 5:.1f}") for n in range(6)], "dirty ratio", has_grid=False)
    chart = Chart(
        "Partitions by dirty ratio", 173, across, Axis(0, most, numbers(most, 5, are_whole=True), "partitions")
    )
    for n, number in enumerate(bins):
        chart.bar((n / 10, n / 10 + 0.094), (0, number), "var(--gone)")
    if minimum is not None:
        chart.line([(minimum, 0), (minimum, most)], is_dashed=True)
    return chart.svg()


def phases(found: Sequence[tuple[str, float, int]]) -> str:
    most = 1.05 * max(seconds for _, seconds, _ in found) or 1
    across = Axis(0, most, numbers(most, 5), "seconds of all tasks")
    chart = _rows("Seconds by phase", [name for name, _, _ in found], across)
    for n, (_, seconds, _) in enumerate(found):
        chart.bar((0, seconds), _row(n), "var(--kept)")
    return chart.svg()


def key_sizes(sizes: Sequence[Size]) -> str:
    """Draw two bars for each class of keys: the class's share of all keys, and its share of all records."""
    keys, records = sum(item.keys for item in sizes), sum(item.records for item in sizes)
    step = -(-len(sizes) // _MAX_SIZES_NAMED)
    names = [(n, _binary(item.most)) for n, item in enumerate(sizes)][::step]
    across = Axis(-0.6, max(len(sizes), _MIN_SIZES) - 0.4, names, "records per key, at most", has_grid=False)
    chart = Chart("Keys by number of records", 173, across, Axis(0, 100, numbers(100, 5), "%"))
    for n, item in enumerate(sizes):
        chart.bar((n - 0.39, n - 0.01), (0, 100 * item.keys / keys), "var(--kept)")
        chart.bar((n + 0.01, n + 0.39), (0, 100 * item.records / records), "var(--gone)")
    return chart.svg()


def _binary(number: int) -> str:
    """Return a power of two as text, for example `512` or `2 Ki`."""
    for unit, name in ((1 << 30, " Gi"), (1 << 20, " Mi"), (1 << 10, " Ki")):
        if number >= unit:
            return f"{number // unit}{name}"
    return str(number)


def segment_map(partition: Partition, now_ms: int) -> str:
    """Draw one bar for each part, which is one or more adjacent segments, in the order of offsets. The width of a bar
    is the size of the part's logs, its height the part's age, and its colour the share of retained records or, if
    unknown, whether the part is clean or dirty."""
    parts = [part for part in partition.detail.parts if part.log_bytes]
    ages = [max(now_ms - part.largest_timestamp_ms, 0) for part in parts]
    size, unit = next(((s, u) for s, u in _UNITS_OF_AGE if max(ages) >= 2 * s), _UNITS_OF_AGE[-1])
    heights = [max(age, max(ages) * 0.03, 1) / size for age in ages]
    starts = [sum(part.log_bytes for part in parts[:n]) for n in range(len(parts) + 1)]
    highest = 1.05 * max(heights)
    age = Axis(0, highest, numbers(highest, 4), f"age, {unit}")
    across = replace(_bytes(starts[-1]), last=starts[-1], has_grid=False)
    chart = Chart(f"Segments of {shown(partition.name)}", 144, across, age)
    for n, part in enumerate(parts):
        colour = f"var(--{_colour(partition, part)})"
        chart.bar((starts[n], starts[n + 1]), (0, heights[n]), colour, edge="var(--panel)")
    dirty = partition.detail.first_dirty_offset
    ahead = [start for start, part in zip(starts, parts, strict=False) if part.base_offset >= (dirty or 0)]
    if dirty is not None and (begin := min(ahead, default=starts[-1])):
        chart.line([(begin, 0), (begin, highest)], is_dashed=True)
    return chart.svg()


def live_class(part: Part) -> int | None:
    """Return the class, from 0 to 4, of the share of retained records; None if records were not counted."""
    if part.records is None or part.records_kept is None:
        return None
    if not part.records:
        return 0
    return min(int(5 * part.records_kept / part.records), 4)


def _colour(partition: Partition, part: Part) -> str:
    """Return the name of the colour for a part in the map, as in the page's style."""
    live = live_class(part)
    if live is not None:
        return f"live-{live}"
    detail = partition.detail
    if partition.status != "would-compact" or detail.first_dirty_offset is None or detail.end_dirty_offset is None:
        return "unknown"
    if part.base_offset >= detail.end_dirty_offset:
        return "unknown"
    return "gone" if part.base_offset >= detail.first_dirty_offset else "cleaned"


def legend(drawn: Sequence[Partition]) -> list[tuple[str, str]]:
    """Return the name and the meaning of each colour that is used in the maps of these partitions."""
    used = {_colour(item, part) for item in drawn for part in item.detail.parts if part.log_bytes}
    words = [(f"live-{n}", f"{20 * n} to {20 * n + 20} % live") for n in range(5)]
    words += [
        ("cleaned", "cleaned before"),
        ("gone", "dirty"),
        ("unknown", "not examined: active segment, or not cleanable"),
    ]
    return [(colour, text) for colour, text in words if colour in used]


def _short(name: str) -> str:
    name = shown(name)
    half = _NAME_LENGTH // 2
    return name if len(name) <= _NAME_LENGTH else f"{name[: half - 1]}…{name[-half:]}"


def _rows(title: str, names: Sequence[str], across: Axis) -> Chart:
    """Return an empty chart with room for one horizontal bar for each name, the first one at the top."""
    down = Axis(len(names), 0, [(n + 0.5, name) for n, name in enumerate(names)], has_grid=False)
    return Chart(title, _SPACE + _BAR * len(names), across, down)


def _row(number: int) -> tuple[float, float]:
    return number + 0.17, number + 0.83


def _bytes(largest: int) -> Axis:
    unit = next((u for u in (1 << 40, 1 << 30, 1 << 20, 1 << 10) if largest >= 2 * u), 1)
    ticks = [(value * unit, text) for value, text in numbers(max(largest, 1) / unit, 4)]
    return Axis(0, 1.05 * max(largest, 1), ticks, human_bytes(unit).split()[1])
