"""Extrapolates measured costs to a petabyte, for the tables of lib/keytail/run/PETABYTE.md. With measurements of
`growth.py`, `python -m tests.bench.petabyte FILE.json` prints the tables, and `--write` writes them to the page. Every
number is measured, assumed (`Assumed`), or a product of these.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keytail.compact.map_phase.offset_map import LOAD_FACTOR, SLOT_BYTES
from keytail.compact.running.bundles import MAX_BUNDLES
from tests.bench.growth import KAFKA, TASK
from tests.bench.growth_report import cost_of_bytes

PAGE = Path(__file__).parents[2] / "lib" / "keytail" / "run" / "PETABYTE.md"
BEGIN, END = "<!-- made by tests.bench.petabyte: begin -->", "<!-- end -->"
PETABYTE = 1e15


@dataclass(frozen=True)
class Assumed:
    """Assumptions about data and machines. To change them, edit these values and generate the tables again."""

    partition_bytes: float = 10e9
    segment_bytes: float = 1e9
    record_bytes: float = 117.0
    kept_share: float = 0.2  # the share of bytes and of records that is retained
    partitions_per_log_dir: int = 4_000
    cores: int = 32
    memory_bytes: float = 128 * 2**30
    disk_bytes_per_s: float = 3e9  # reads plus writes of one machine with local drives
    network_bytes_per_s: float = 25e9 / 8 * 0.9  # of one machine with remote storage
    machines: tuple[int, ...] = (10, 100, 1000)

    @property
    def partitions(self) -> float:
        return PETABYTE / self.partition_bytes

    @property
    def segments(self) -> float:
        return PETABYTE / self.segment_bytes

    @property
    def moved_bytes(self) -> float:
        """Return the bytes that are read and written. Map phase and write phase each read all sources; the retained
        share is written once. The proof reads both from the page cache (compact/proof/as_written.py).
        """
        return PETABYTE * (2 + self.kept_share)


@dataclass(frozen=True)
class Measured:
    """Measured costs, in seconds of one core unless noted. `commands` has the command for each curve."""

    cpu_s_a_gb: float
    cpu_s_a_gb_unique: float
    kafka_cpu_s_a_gb: float
    replace_s_per_segment: float
    survey_s_per_partition: float
    rest_s_per_partition: float
    checkpoint_s: float
    before_bytes: float
    commands: dict[str, str]
    dates: dict[str, str]
    machine: dict[str, str]

    @classmethod
    def of(cls, found: dict[str, Any], assumed: Assumed) -> Measured:
        curves = found["curves"]
        records, keys, segments, partitions = (
            curves[name]["points"] for name in ("records", "keys", "segments", "partitions")
        )
        unique, many = keys[-1], partitions[-1]["sides"]["keytail on local[1]"]
        return cls(
            cpu_s_a_gb=cost_of_bytes(records, TASK, "cpu_seconds")[1],
            cpu_s_a_gb_unique=_median(unique, "cpu_seconds") / unique["log_bytes"] * 1e9,
            kafka_cpu_s_a_gb=cost_of_bytes(records, KAFKA, "cpu_seconds")[1],
            replace_s_per_segment=_slope(segments, "segments", TASK, "replace_s"),
            survey_s_per_partition=statistics.median(many["survey_s"]) / partitions[-1]["x"],
            rest_s_per_partition=_slope(partitions, "x", "keytail on local[1]", "seconds"),
            checkpoint_s=_at(curves["checkpoint"]["points"], assumed.partitions_per_log_dir),
            before_bytes=_median(unique, "before_bytes"),
            commands={name: curve["command"] for name, curve in curves.items()},
            dates={name: curve["date"] for name, curve in curves.items()},
            machine=curves["records"]["machine"],
        )


def _median(point: dict[str, Any], what: str) -> float:
    return float(statistics.median(point["sides"][TASK][what]))


def _slope(points: Sequence[dict[str, Any]], over: str, side: str, what: str) -> float:
    """Return the cost of one more unit between the first and the last point."""
    first, last = (statistics.median(points[n]["sides"][side][what]) for n in (0, -1))
    return max(0.0, float(last - first) / (points[-1][over] - points[0][over]))


def _at(points: Sequence[dict[str, Any]], entries: int) -> float:
    """Return the seconds at this number of entries, interpolated between the adjacent points."""
    xs = [point["x"] for point in points]
    ys = [statistics.median(next(iter(point["sides"].values()))["seconds"]) for point in points]
    above = next((n for n, x in enumerate(xs) if x >= entries), len(xs) - 1)
    below = max(0, above - 1)
    if xs[above] == xs[below]:
        return float(ys[above])
    return float(ys[below] + (ys[above] - ys[below]) * (entries - xs[below]) / (xs[above] - xs[below]))


def tables(measured: Measured, assumed: Assumed) -> str:
    """Return the tables of the page as Markdown."""
    return "\n\n".join([_measured_table(measured), _assumed_table(assumed), _time_table(measured, assumed),
                        _driver_table(measured, assumed), _memory_table(measured, assumed)])  # fmt: skip


def _measured_table(m: Measured) -> str:
    rows = [
        ("CPU time of one task, if a tenth of the records have their own key",
         f"{m.cpu_s_a_gb:.2f} s per GB of log", "records"),
        ("CPU time of one task, if 98 % of the records have their own key",
         f"{m.cpu_s_a_gb_unique:.2f} s per GB", "keys"),
        ("CPU time of a process with Kafka's Cleaner", f"{m.kafka_cpu_s_a_gb:.2f} s per GB", "records"),
        ("time of the driver to replace one more segment", _ms(m.replace_s_per_segment), "segments"),
        ("time of the driver to list one more partition", _ms(m.survey_s_per_partition), "partitions"),
        ("all other time for one more partition on Spark", _ms(m.rest_s_per_partition), "partitions"),
        ("time to update one entry of a checkpoint file of the assumed log dir", _ms(m.checkpoint_s), "checkpoint"),
        ("memory of a worker before its first task", f"{m.before_bytes / 2**20:.0f} MiB", "keys"),
    ]  # fmt: skip
    body = [f"| {what} | {value} | `{name}` |" for what, value, name in rows]
    names = list(dict.fromkeys(name for _, _, name in rows))
    made = [f"| `{name}` | {m.dates[name]} | `{m.commands[name]} --json growth.json` |" for name in names]
    where = f"{m.machine['cpu']}, {m.machine['cores']} cores, {m.machine['memory']}, {m.machine['system']}"
    return "\n".join(["### Measured", "", f"On one machine ({where}):", "", "| What | Cost | Curve |", "|---|---|---|",
                      *body, "", "| Curve | Measured | By |", "|---|---|---|", *made])  # fmt: skip


def _assumed_table(a: Assumed) -> str:
    rows = [
        ("size of the logs, which are all dirty", f"1 PB = 10^15 bytes in {a.partitions:,.0f} partitions of "
         f"{a.partition_bytes / 1e9:.0f} GB and {a.segments:,.0f} segments of {a.segment_bytes / 1e9:.0f} GB"),
        ("records", f"uncompressed records of {a.record_bytes:.0f} bytes; {_percent(a.kept_share)} are retained"),
        ("log dirs", f"one log dir of {a.partitions_per_log_dir:,} partitions for each broker"),
        ("a machine", f"{a.cores} cores as fast as the measured one, {a.memory_bytes / 2**30:.0f} GiB"),
        ("drives of a machine", f"{a.disk_bytes_per_s / 1e9:.1f} GB/s, reading and writing together"),
        ("network of a machine to remote storage, instead of its drives",
         f"{a.network_bytes_per_s / 1e9:.1f} GB/s (nine tenths of 25 Gbit/s)"),
        ("bytes moved", f"{a.moved_bytes / 1e15:.1f} PB: each source is read twice (map, write), and the output is "
         "written once. Only what was just read or written is in the page cache, where the proof finds it"),
    ]  # fmt: skip
    return "\n".join(["### Assumed", "", "| What | Value |", "|---|---|", *(f"| {w} | {v} |" for w, v in rows)])


def _time_table(m: Measured, a: Assumed) -> str:
    head = "| Machines | CPU | CPU, unique keys | Drives | Network | Slower of CPU and drives |"
    rows = []
    for n in a.machines:
        cpu, unique = (PETABYTE / 1e9 * each / (n * a.cores) for each in (m.cpu_s_a_gb, m.cpu_s_a_gb_unique))
        drives, network = (a.moved_bytes / (n * each) for each in (a.disk_bytes_per_s, a.network_bytes_per_s))
        slowest = "drives" if drives > cpu else "CPU"
        rows.append(f"| {n:,} | {_hours(cpu)} | {_hours(unique)} | {_hours(drives)} | {_hours(network)} | {slowest} |")
    busy = a.moved_bytes / PETABYTE * 1e9 / a.disk_bytes_per_s
    needed = m.cpu_s_a_gb / busy
    return "\n".join(["### Time, if nothing else limits it", "", head, "|---|---|---|---|---|---|", *rows, "",
                      f"{needed:.1f} cores keep the drives of one machine busy."])  # fmt: skip


def _driver_table(m: Measured, a: Assumed) -> str:
    in_flight = MAX_BUNDLES
    rows = [
        ("listing all partitions, one after the other", a.partitions * m.survey_s_per_partition),
        ("replacing segments, one after the other", a.segments * a.kept_share * m.replace_s_per_segment),
        (f"replacing segments, {in_flight} at a time", a.segments * a.kept_share * m.replace_s_per_segment / in_flight),
        ("checkpoints, each entry by itself", a.partitions * m.checkpoint_s),
        (f"checkpoints, {in_flight} entries at a time", a.partitions * m.checkpoint_s / in_flight),
    ]  # fmt: skip
    body = [f"| {what} | {_hours(seconds)} |" for what, seconds in rows]
    return "\n".join(["### The driver", "", "| What | Time |", "|---|---|", *body])


def _memory_table(m: Measured, a: Assumed) -> str:
    records = a.partition_bytes / a.record_bytes
    kept = records * a.kept_share
    a_task = a.memory_bytes / 2 / a.cores
    slots = {"kept": kept, "all": records}
    maps = {name: 1.5 * n / LOAD_FACTOR * SLOT_BYTES for name, n in slots.items()}
    rows = [
        (f"map of a partition, {_percent(a.kept_share)} of its records with their own key", maps["kept"]),
        ("map of a partition, each record with its own key", maps["all"]),
        ("memory available to a task, all cores busy (half of the memory)", a_task),
        ("all workers of a machine, before their first tasks", m.before_bytes * a.cores),
    ]
    body = [f"| {what} | {size / 2**30:.1f} GiB |" for what, size in rows]
    return "\n".join(["### Memory", "", "| What | Size |", "|---|---|", *body])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} µs"


def _hours(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def written(page: str, text: str) -> str:
    """Return the page with `text` between its markers."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.petabyte", description=__doc__)
    parser.add_argument("json", type=Path, help="measurements of growth.py")
    parser.add_argument("--write", action="store_true", help=f"write the tables to {PAGE.name}")
    options = parser.parse_args(arguments)
    assumed = Assumed()
    text = tables(Measured.of(json.loads(options.json.read_text()), assumed), assumed)
    if options.write:
        PAGE.write_text(written(PAGE.read_text(), text))
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
