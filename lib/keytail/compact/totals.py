"""The totals of all due partitions of a plan: bytes to read, needed and free scratch space, and the downtime of the
broker. The totals are printed below the table of a plan or a dry run, or added to its JSON output.

The seconds are sums of the rough estimates in run/rates.py and run/kernels.py.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from keytail.cli.command import Below
from keytail.cli.rows import human_bytes, human_time
from keytail.compact.command import Request
from keytail.compact.measure.show import Topic, figures_of, sentence_of, sum_of, topics_of
from keytail.compact.planned_rows import FOR_EXECUTE
from keytail.compact.prepared.scratch import bytes_of, is_prepared
from keytail.errors import slugs_of
from keytail.extras import SPARK
from keytail.format import names
from keytail.log.fs import LOCAL, FileSystem
from keytail.run.kernels import expected_seconds, is_on_this_host
from keytail.run.memory import cores
from keytail.run.rates import COMMAND_S, SPARK_START_S, VERIFIED_BYTES_PER_S, run_seconds
from keytail.run.rows import ResultRow
from keytail.run.workers import starts_spark


@dataclass(frozen=True)
class Downtime:
    """The seconds from the stop of the broker to its next start, by step."""

    compile_s: float
    start_spark_s: float
    compact_s: float
    verify_s: float

    @property
    def total_s(self) -> float:
        return self.compile_s + self.start_spark_s + self.compact_s + self.verify_s


@dataclass(frozen=True)
class Scratch:
    """The space on the file system of `directory`: the maximum bytes of the new files of all due partitions, the free
    bytes, the number of partitions that do not fit even alone, and the bytes of prepared files.
    """

    directory: str
    needed_bytes: int
    free_bytes: int
    without_room: int = 0
    prepared_bytes: int = 0


@dataclass(frozen=True)
class Totals:
    """The totals of a plan. `downtime` is None on a Spark cluster, where it is unknown."""

    read_bytes: int
    scratch: tuple[Scratch, ...]
    cores: int
    downtime: Downtime | None
    topics: tuple[Topic, ...] = ()  # sums over the measured partitions, by topic
    measured: Topic | None = None  # the sum over all measured partitions


def totals_of(rows: Sequence[ResultRow], request: Request, fs: FileSystem = LOCAL) -> Totals | None:
    """Return the totals of the due partitions of a plan; None if no partition is due, or if the plan is out of place,
    for which no broker needs to be stopped.
    """
    due = [row for row in rows if row.status == "would-compact"]
    if not due or request.is_out_of_place:
        return None
    is_here = not request.submitted and is_on_this_host(request.master)
    topics = topics_of(due, cores())
    return Totals(
        read_bytes=sum(row.bytes_before or 0 for row in due),
        scratch=_scratch(rows, fs),
        cores=cores(),
        downtime=_downtime(rows, due, request) if is_here else None,
        topics=tuple(topics),
        measured=sum_of("", [row for row in due if row.measured is not None], cores()) if topics else None,
    )


def _downtime(rows: Iterable[ResultRow], due: Collection[ResultRow], request: Request) -> Downtime:
    each_s = [row.expected_s or 0.0 for row in due]
    verified_s = [(row.bytes_before or 0) / VERIFIED_BYTES_PER_S for row in rows]
    may_fan_out = any(row.strategy == "maybe fan-out" for row in due) and not SPARK.missing()
    is_asked = request.master is not None or request.fan_out == "always" or (request.fan_out == "auto" and may_fan_out)
    starts = starts_spark(each_s, is_asked=is_asked) + starts_spark(verified_s, is_asked=request.master is not None)
    return Downtime(
        compile_s=expected_seconds(["compact", "verify"]),
        start_spark_s=SPARK_START_S * starts,
        compact_s=COMMAND_S + run_seconds(each_s, cores()),
        verify_s=COMMAND_S + run_seconds(verified_s, cores()),
    )


def _scratch(rows: Iterable[ResultRow], fs: FileSystem) -> tuple[Scratch, ...]:
    """Return the file systems of the partitions that are due or lack space, in the order of the rows."""
    found: dict[int, Scratch] = {}
    for row in rows:
        lacks_room = "not-enough-space" in slugs_of(row.error)
        if row.status == "would-compact" or lacks_room:
            device = fs.stat(row.log_dir).device
            before = found.get(device) or Scratch(row.log_dir, 0, fs.free_bytes(row.log_dir))
            found[device] = replace(
                before,
                needed_bytes=before.needed_bytes + (row.expected_scratch_bytes or 0),
                without_room=before.without_room + lacks_room,
                prepared_bytes=before.prepared_bytes + (_prepared_bytes(row, fs) if row.prepared == FOR_EXECUTE else 0),
            )
    return tuple(found.values())


def _prepared_bytes(row: ResultRow, fs: FileSystem) -> int:
    path = os.path.join(row.log_dir, names.partition_dir(row.topic, row.partition))
    return bytes_of(fs, path, [entry.name for entry in fs.scan(path) if is_prepared(entry.name)])


def below_plan(rows: Sequence[ResultRow], request: Request) -> Below:
    """Return the lines below the table of a plan, and the numbers of these lines as fields; no lines if there are no
    totals."""
    totals = totals_of(rows, request)
    return Below() if totals is None else Below(tuple(sentences(totals)), figures(totals))


def sentences(totals: Totals) -> list[str]:
    found = [] if totals.measured is None else [sentence_of(totals.measured, totals.cores)]
    for item in totals.scratch:
        text = f"Scratch space: up to {human_bytes(item.needed_bytes)}, of {human_bytes(item.free_bytes)} free on the "
        text += f"file system of {item.directory}"
        if item.needed_bytes > item.free_bytes // 2:
            text += ". At most half of that is used at a time, so some partitions wait or are written in passes"
        if item.without_room:
            text += f". {item.without_room:,} partitions without room are tried again when others have freed space"
        if item.prepared_bytes:
            text += f". Prepared files already occupy {human_bytes(item.prepared_bytes)}; `keytail prepared` lists them"
        found.append(text + ".")
    if totals.downtime is not None:
        down = totals.downtime
        parts = (
            ("compile the kernels of both commands", down.compile_s), ("start Spark", down.start_spark_s),
            ("compact", down.compact_s), ("verify", down.verify_s),
        )  # fmt: skip
        each = ", ".join(f"{human_time(seconds)} to {what}" for what, seconds in parts if seconds)
        found.append(
            f"Downtime: about {human_time(down.total_s)} from the stop of the broker to its start, on "
            f"{totals.cores} core{'s' if totals.cores != 1 else ''}: {each}."
        )
    return found


def figures(totals: Totals) -> dict[str, object]:
    """Return the numbers in `sentences` as fields of a message for programs."""
    down = totals.downtime
    seconds = {} if down is None else {
        "downtime_s": round(down.total_s, 1),
        "compile_s": round(down.compile_s, 1),
        "start_spark_s": round(down.start_spark_s, 1),
        "compact_s": round(down.compact_s, 1),
        "verify_s": round(down.verify_s, 1),
    }  # fmt: skip
    scratch = [
        {
            "directory": item.directory, "needed_bytes": item.needed_bytes, "free_bytes": item.free_bytes,
            "without_room": item.without_room, "prepared_bytes": item.prepared_bytes,
        }
        for item in totals.scratch
    ]  # fmt: skip
    topics = {"topics": [figures_of(topic) for topic in totals.topics]} if totals.topics else {}
    return {
        "event": "totals", "read_bytes": totals.read_bytes, "cores": totals.cores, "scratch": scratch, **seconds,
        **topics,
    }  # fmt: skip
