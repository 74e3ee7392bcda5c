"""Renders the report of a run as one HTML page that needs no other file and no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from keytail.cli.masking import masked, masked_arguments, shown
from keytail.cli.rows import change, human_bytes, human_time
from keytail.durations import duration_text
from keytail.report import drawings, keys, sums
from keytail.report.facts import Partition, Report

HERE = Path(__file__).parent
TOPICS_DRAWN = 20
MAPS_DRAWN = 6
MAX_ROWS = 500  # maximum number of rows in a table; the raw rows are complete
MAX_REASONS = 100  # maximum number of reasons on the page
MAX_NAMES = 2000  # maximum number of partition names that are listed for one reason
MAX_SLOWEST = 15


@dataclass(frozen=True)
class Table:
    """A table of the page. `numbers` are the indexes of numeric columns. A cell is a pair of its text and the value by
    which the cell is sorted; None sorts the cell by its text. `total` is the number of all rows; `rows` may have only
    the first rows."""

    name: str
    heads: tuple[str, ...]
    numbers: frozenset[int]
    rows: list[list[tuple[str, Any]]]
    total: int

    @property
    def more(self) -> int:
        return self.total - len(self.rows)


def page(report: Report) -> str:
    """Return the whole page as HTML. Names and error messages are escaped, and secrets are masked."""
    import jinja2  # noqa: PLC0415 (optional)
    from markupsafe import Markup  # noqa: PLC0415 (the same)

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else shown(value),
    )  # fmt: skip
    environment.filters |= {"ticks": lambda text: Markup(_with_code(text))}
    script = (HERE / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    level, sentence = sums.verdict(report)
    return environment.get_template("page.html").render(
        report=report,
        style=Markup((HERE / "page.css").read_text()),
        script=Markup(script),
        digest=digest,
        level=level,
        sentence=sentence,
        next_step=sums.next_step(report),
        tiles=_tiles(report),
        reasons=sums.reasons(report.partitions)[:MAX_REASONS],
        most_names=MAX_NAMES,
        drawn=_drawings(report, Markup),
        tables=_tables(report),
        times=_times(report),
        horizons=_horizons(report),
        keys=keys.about(report),
        command=shlex.join(masked_arguments(report.arguments)),
        raw=Markup(_raw(report.partitions)),
    )


def _with_code(text: str) -> str:
    """Return a sentence as HTML, with text between backticks in code elements."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(shown(text)))


# The first screen


def _tiles(report: Report) -> list[tuple[str, str]]:
    found = report.partitions
    statuses = Counter(item.status for item in found)
    tiles = [(status, f"{number:,}") for status, number in statuses.most_common()]
    changed = [item for item in found if item.reclaimed_bytes]
    if changed and report.execute:
        before, after = (sum(getattr(item, name) or 0 for item in changed) for name in ("bytes_before", "bytes_after"))
        tiles.insert(0, ("log bytes of changed partitions", change(human_bytes(before), human_bytes(after))))
    counted = [item for item in found if item.records_before is not None and item.records_after is not None]
    removed = sum((item.records_before or 0) - (item.records_after or 0) for item in counted)
    if removed:
        tiles.append(("records removed" if report.execute else "records to remove", f"{removed:,}"))
    if report.end_ms is not None:
        seconds = (report.end_ms - report.start_ms) / 1000
        tiles.append(("run time", human_time(seconds)))
    if known := [one.seconds for one in report.downtimes if one.seconds is not None]:
        name = f"downtime of {report.downtimes[0].broker}" if len(report.downtimes) == 1 else "longest downtime"
        tiles.append((name, human_time(max(known))))
    return tiles


def _times(report: Report) -> dict[str, str]:
    """Return the captions and values of the run's times; the value of `throughput` is a sentence."""
    times = {"started": _time(report.start_ms)}
    if report.end_ms is not None:
        times["ended"] = _time(report.end_ms)
    if len(report.downtimes) == 1:
        [down] = report.downtimes
        times["broker stopped"] = _time(down.down_at_ms)
        times["broker reachable"] = _time(down.reachable_at_ms) or "unknown"
        times["replicas in sync"] = _time(down.in_sync_at_ms) or "unknown"
    known = [
        partition for partition in report.partitions if partition.start_ms is not None and partition.end_ms is not None
    ]
    if known:
        first, last = min(item.start_ms or 0 for item in known), max(item.end_ms or 0 for item in known)
        size = sum(item.bytes_before or 0 for item in known)
        times["first partition started"], times["last partition ended"] = _time(first), _time(last)
        if last > first and size:
            per_second = human_bytes(int(size * 1000 / (last - first)))
            times["throughput"] = f"{human_bytes(size)} of logs in {human_time((last - first) / 1000)}: {per_second}/s"
    return times


def _horizons(report: Report) -> dict[str, Any]:
    """Return the numbers of removed tombstones and markers, the number of batches with a delete horizon and of their
    partitions, and the first and the last of these horizons. `is_known` is True if horizons were counted."""
    found = [partition for partition in report.partitions if partition.detail.horizon_batches is not None]
    waiting = [item for item in found if item.detail.horizon_batches]
    firsts = [item.detail.first_horizon_ms for item in waiting if item.detail.first_horizon_ms is not None]
    lasts = [item.detail.last_horizon_ms for item in waiting if item.detail.last_horizon_ms is not None]
    removed = [partition for partition in report.partitions if partition.tombstones_removed is not None]
    return {
        "is_known": bool(found),
        "tombstones": sum(item.tombstones_removed or 0 for item in removed),
        "markers": sum(item.markers_removed or 0 for item in removed),
        "batches": sum(item.detail.horizon_batches or 0 for item in waiting),
        "partitions": len(waiting),
        "first": _time(min(firsts)) if firsts else "",
        "last": _time(max(lasts)) if lasts else "",
    }


# Tables


def _tables(report: Report) -> dict[str, Table]:
    found = report.partitions
    tables = {
        "topics": _topics(found),
        "dirty": _dirty(found),
        "phases": _phases(found),
        "slowest": _slowest(found),
        "horizons": _waiting(found),
        **{name: _table(name, *table) for name, table in keys.tables(found).items()},
        "partitions": _partitions(found),
    }
    return {name: table for name, table in tables.items() if table.rows}


def _table(name: str, heads: Sequence[str], words: int, rows: list[list[Any]], total: int | None = None) -> Table:
    """Return a table without empty columns. The first `words` columns are text, the others numeric. A cell in `rows` is
    its text, or a pair of its text and the number by which the cell is sorted."""
    cells = [[cell if isinstance(cell, tuple) else (cell, None) for cell in row] for row in rows[:MAX_ROWS]]
    having = [n for n in range(len(heads)) if any(row[n][0] for row in cells)]
    return Table(
        name,
        tuple(heads[n] for n in having),
        frozenset(at for at, n in enumerate(having) if n >= words),
        [[row[n] for n in having] for row in cells],
        len(rows) if total is None else total,
    )


def _size(number: int | None) -> tuple[str, Any]:
    return human_bytes(number), -1 if number is None else number


def _number(number: int | None) -> tuple[str, Any]:
    return ("", -1) if number is None else (f"{number:,}", number)


def _seconds(seconds: float | None) -> tuple[str, Any]:
    return ("", -1) if seconds is None else (_short_time(seconds), round(seconds, 3))


def _short_time(seconds: float) -> str:
    return human_time(seconds) if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _topics(found: Sequence[Partition]) -> Table:
    topics = sums.by_topic(found)
    is_changed = any(topic.reclaimed_bytes for topic in topics)
    heads = ("topic", "partitions", "not done", "log bytes", "after", "reclaimed", "dirty", "records", "after")
    rows = [
        [
            topic.topic,
            _number(topic.partitions),
            _number(topic.not_done or None),
            _size(topic.bytes_before),
            _size(topic.bytes_after if is_changed else None),
            _size(topic.reclaimed_bytes if is_changed else None),
            _size(topic.dirty_bytes),
            _number(topic.records_before),
            _number(topic.records_after),
        ]
        for topic in topics
    ]
    return _table("topics", heads, 1, rows)


def _dirty(found: Sequence[Partition]) -> Table:
    known = [(entry, ratio) for entry in found if (ratio := sums.dirty_ratio(entry)) is not None]
    known.sort(key=lambda item: -(item[0].detail.dirty_bytes or 0))
    heads = ("partition", "status", "dirty ratio", "due above", "dirty", "clean")
    rows = [
        [
            entry.name,
            entry.status,
            (f"{ratio:.2f}", ratio),
            "" if entry.detail.minimum_dirty_ratio is None else f"{entry.detail.minimum_dirty_ratio:g}",
            _size(entry.detail.dirty_bytes),
            _size(entry.detail.clean_bytes),
        ]
        for entry, ratio in known
    ]
    return _table("dirty", heads, 2, rows)


def _phases(found: Sequence[Partition]) -> Table:
    rows = []
    for phase, seconds, size in sums.phases(found):
        per_second = int(size / seconds) if seconds else None
        speed, number = _size(per_second)
        rows.append([phase, _seconds(seconds), _size(size), (f"{speed}/s" if speed else "", number)])
    return _table("phases", ("phase", "time of all tasks", "log bytes", "bytes per second of a task"), 1, rows)


def _slowest(found: Sequence[Partition]) -> Table:
    timed = sorted((item for item in found if item.seconds is not None), key=lambda item: -(item.seconds or 0))
    rows = []
    for item in timed[:MAX_SLOWEST]:
        phases = ", ".join(
            f"{name} {_short_time(took)}" for name, took in item.detail.phases_s.items() if took >= 0.001
        )
        speed = human_bytes(int((item.bytes_before or 0) / item.seconds)) + "/s" if item.seconds else ""
        rows.append([item.name, phases, _seconds(item.seconds), _size(item.bytes_before), speed])
    heads = ("partition", "time in tasks", "took", "log bytes", "speed")
    return _table("slowest", heads, 2, rows)


def _waiting(found: Sequence[Partition]) -> Table:
    waiting = [item for item in found if item.detail.horizon_batches]
    waiting.sort(key=lambda item: item.detail.first_horizon_ms or 0)
    rows = []
    for item in waiting:
        detail = item.detail
        kept = detail.delete_retention_ms
        rows.append(
            [
                item.name,
                item.held_by,
                _number(detail.horizon_batches),
                (_time(detail.first_horizon_ms), detail.first_horizon_ms),
                (_time(detail.last_horizon_ms), detail.last_horizon_ms),
                "" if kept is None else duration_text(kept),
            ]
        )
    heads = ("partition", "held back by", "batches", "first delete horizon", "last", "delete.retention.ms")
    return _table("horizons", heads, 2, rows)


def _partitions(found: Sequence[Partition]) -> Table:
    """Return the table of partitions. Those with errors are first, then those that may need attention; the further
    order is by reclaimed bytes and size, descending."""
    order = {"bad": 0, "left": 1, "good": 2}
    ranked = sorted(found, key=lambda item: (order[item.kind], -(item.reclaimed_bytes or 0), -(item.bytes_before or 0)))
    many_dirs = len({item.log_dir for item in found}) > 1
    heads = ("partition", "log dir", "status", "log bytes", "segments", "records", "keys mapped", "records per key",
             "expected", "took")  # fmt: skip
    rows = [
        [
            item.name,
            item.log_dir if many_dirs else "",
            item.status,
            (change(human_bytes(item.bytes_before), human_bytes(item.bytes_after)), item.bytes_before or 0),
            _change(item.segments_before, item.segments_after),
            _change(item.records_before, item.records_after),
            _number(item.detail.keys),
            _ratio(item.detail.dirty_records, item.detail.keys),
            _seconds(item.expected_s),
            _seconds(item.seconds),
        ]
        for item in ranked[:MAX_ROWS]
    ]
    return _table("partitions", heads, 3, rows, len(ranked))


def _ratio(number: int | None, of: int | None) -> tuple[str, Any]:
    return (f"{number / of:.1f}", number / of) if number is not None and of else ("", -1)


def _change(before: int | None, after: int | None) -> tuple[str, Any]:
    return change(_number(before)[0], _number(after)[0]), -1 if before is None else before


# Pictures


def _drawings(report: Report, markup: Any) -> dict[str, Any]:
    found = report.partitions
    drawn: dict[str, Any] = {"maps": []}
    topics = [item for item in sums.by_topic(found)[:TOPICS_DRAWN] if item.bytes_before]
    is_known = any((topic.bytes_after if report.execute else topic.dirty_bytes) is not None for topic in topics)
    if topics and is_known:
        drawn["is_plan"] = not report.execute
        drawn["topics"] = markup(drawings.topics(topics, is_plan=not report.execute))
    ratios = [ratio for item in found if (ratio := sums.dirty_ratio(item)) is not None]
    if ratios:
        minima = {item.detail.minimum_dirty_ratio for item in found if item.detail.minimum_dirty_ratio is not None}
        drawn["dirty"] = markup(drawings.dirty_ratios(ratios, minima.pop() if len(minima) == 1 else None))
    if phases := sums.phases(found):
        drawn["phases"] = markup(drawings.phases(phases))
    if sizes := keys.by_size(found):
        drawn["key_sizes"] = markup(drawings.key_sizes(sizes))
    mapped = sums.that_matter(found, MAPS_DRAWN)
    drawn["legend"] = drawings.legend(mapped)
    for item in mapped:
        drawn["maps"].append((item.name, _about_map(item), markup(drawings.segment_map(item, report.now_ms))))
    return drawn


def _about_map(partition: Partition) -> str:
    segments = sum(part.segments for part in partition.detail.parts)
    size = sum(part.log_bytes for part in partition.detail.parts)
    text = f"{human_bytes(size)} in {sums.count(segments, 'segment')}"
    counted = [part for part in partition.detail.parts if part.records is not None]
    if counted:
        records = sum(part.records or 0 for part in counted)
        kept = sum(part.records_kept or 0 for part in counted)
        if records:
            text += f"; of {records:,} records {kept:,} were live ({100 * kept / records:.0f}\u00a0%)"
    return text


# Raw rows


def _raw(found: Sequence[Partition]) -> str:
    """Return the rows as a JSON array with one row per line, without unknown and empty values, escaped for an HTML
    element."""
    lines = [json.dumps(_without_secrets(_known(item.row))) for item in found]
    return html.escape("[\n" + ",\n".join(lines) + "\n]", quote=False)


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value not in (None, "", (), {})}


def _without_secrets(value: Any) -> Any:
    """Return the value as a JSON value, with secrets in its texts masked."""
    if isinstance(value, str):
        return masked(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {masked(str(name)): _without_secrets(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_secrets(inner) for inner in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _without_secrets(asdict(value))
    return masked(str(value))


def _time(time_ms: int | None) -> str:
    if time_ms is None:
        return ""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    # A delete horizon may be far in the future, because delete.retention.ms may be 2^63 - 1.
    except (OverflowError, ValueError, OSError):
        return "never" if time_ms > 0 else ""
