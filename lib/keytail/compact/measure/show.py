"""The columns and totals of `plan --measure` and `--estimate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from keytail.cli import rows as show
from keytail.cli.table import Column, print_line, print_rows
from keytail.run.rates import run_seconds
from keytail.run.rows import Measured, ResultRow


@dataclass(frozen=True)
class Topic:
    """The sums over the measured partitions of a topic, or of all topics. The seconds are for a run on all cores of
    this host.
    """

    topic: str
    partitions: int
    bytes_before: int
    bytes_after: int
    records_after: int
    measured: Measured


_SUMMED_OF_ROW = ("bytes_before", "bytes_after", "records_after")
_SUMMED = tuple(item.name for item in fields(Measured) if item.name not in ("method", "prepare_s", "commit_s"))


def topics_of(rows: Iterable[ResultRow], cores: int) -> list[Topic]:
    """Return the sums by topic, largest gain first."""
    by_topic: dict[str, list[ResultRow]] = {}
    for row in rows:
        if row.measured is not None:
            by_topic.setdefault(row.topic, []).append(row)
    found = [sum_of(topic, those, cores) for topic, those in by_topic.items()]
    return sorted(found, key=lambda topic: topic.measured.reclaimed_bytes, reverse=True)


def sum_of(name: str, rows: Sequence[ResultRow], cores: int) -> Topic:
    """Return the sums over the measured rows; at least one row must be measured."""
    known = [row.measured for row in rows if row.measured is not None]
    measured = Measured(
        method=known[0].method,
        prepare_s=round(run_seconds((item.prepare_s for item in known), cores), 1),
        commit_s=round(run_seconds((item.commit_s for item in known), cores), 1),
        **{name: sum(getattr(item, name) for item in known) for name in _SUMMED},
    )
    sums = {name: sum(getattr(row, name) or 0 for row in rows) for name in _SUMMED_OF_ROW}
    return Topic(topic=name, partitions=len(known), measured=measured, **sums)


def figures_of(topic: Topic) -> dict[str, object]:
    """Return the sums as fields of the JSON output."""
    of_topic = asdict(topic)
    of_topic |= of_topic.pop("measured")
    del of_topic["method"]
    return of_topic


def sentence_of(total: Topic, cores: int) -> str:
    """Return the sentence about what a compaction of all measured partitions would leave, and how long it takes."""
    found = total.measured
    size = _between(show.human_bytes, found.bytes_after_low, found.bytes_after_high)
    share = 100 * found.reclaimed_bytes / total.bytes_before if total.bytes_before else 0.0
    about = "about " if found.bytes_after_low != found.bytes_after_high else ""
    return (
        f"A compaction would leave {size} of {show.human_bytes(total.bytes_before)} ({about}{share:.0f} % less), "
        f"{_between(show.count, found.records_after_low, found.records_after_high)} records, of these "
        f"{_between(show.count, found.tombstones_after_low, found.tombstones_after_high)} tombstones in cleaned "
        f"segments. Expected on {cores} core{'s' if cores != 1 else ''}: {show.human_time(found.prepare_s)} to prepare "
        f"beside the broker, {show.human_time(found.commit_s)} to commit when it is stopped."
    )


def print_topics(topics: Sequence[Topic]) -> None:
    print_line("")
    print_rows("By topic", _TOPIC_COLUMNS, topics)
    print_line("")


def _between(text: Callable[[int], str], low: int, high: int) -> str:
    """Return both bounds as text, such as `1 to 2`, or once if their texts are equal."""
    low_text, high_text = text(low), text(high)
    return low_text if low_text == high_text else f"{low_text} to {high_text}"


def _found(text: Callable[[Measured], str]) -> Callable[[ResultRow | Topic], str]:
    return lambda row: "" if row.measured is None else text(row.measured)


def _size(row: ResultRow | Topic) -> str:
    found, before = row.measured, show.human_bytes(row.bytes_before)
    if found is None:
        return before
    return show.change(before, _between(show.human_bytes, found.bytes_after_low, found.bytes_after_high))


def _records_after(found: Measured) -> str:
    return _between(show.count, found.records_after_low, found.records_after_high)


def _records(row: ResultRow) -> str:
    return "" if row.measured is None else show.change(show.count(row.records_before), _records_after(row.measured))


def _tombstones(found: Measured) -> str:
    return _between(show.count, found.tombstones_after_low, found.tombstones_after_high)


_RECLAIMED = _found(lambda found: show.human_bytes(found.reclaimed_bytes))
_PREPARE = _found(lambda found: show.human_time(found.prepare_s))
_COMMIT = _found(lambda found: show.human_time(found.commit_s))
MEASURED_COLUMNS: tuple[Column[ResultRow], ...] = (
    Column("reclaimed", _RECLAIMED),
    Column("log size", _size),
    Column("segments", lambda row: show.change(show.count(row.segments_before), show.count(row.segments_after))),
    Column("records", _records),
    Column("tombstones", _found(_tombstones)),
    Column("prepare", _PREPARE),
    Column("commit", _COMMIT),
    Column("scratch", lambda row: show.human_bytes(row.expected_scratch_bytes)),
)
_TOPIC_COLUMNS: tuple[Column[Topic], ...] = (
    Column("topic", lambda topic: topic.topic, is_number=False),
    Column("partitions", lambda topic: show.count(topic.partitions)),
    Column("reclaimed", _RECLAIMED),
    Column("log size", _size),
    Column("records", _found(_records_after)),
    Column("tombstones", _found(_tombstones)),
    Column("prepare", _PREPARE),
    Column("commit", _COMMIT),
)
