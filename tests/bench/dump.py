"""Compares `dump` with Kafka's DumpLogSegments on the same segment. `python -m tests.bench.dump`; part of `make bench`.

Both alternate, and print every record with key and payload to /dev/null: Kafka's tool in a warm JVM
(`--print-data-log`; it has no JSON), keytail as text and as JSON in this process. A run fails if the text differs from
Kafka's.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import sys
import tempfile
import time
from pathlib import Path

from keytail.dump.files import DumpOptions, dump
from keytail.dump.report import Report
from keytail.log.fs import LOCAL
from tests.bench.report import Figure, machine
from tests.interop.kafka import Kafka

NOWHERE = Path("/dev/null")


def timed_dump(segment: Path, out: Path, *, as_json: bool) -> float:
    """Return the seconds of keytail's dump of one segment."""
    started = time.perf_counter()
    with out.open("wb") as sink:
        report = Report(sink.write, lambda text: None, as_json=as_json)
        dump(LOCAL, [str(segment)], DumpOptions(print_data_log=True), report)
    if report.wrong:
        raise RuntimeError(f"{segment} is not sound")
    return time.perf_counter() - started


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.dump", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--batch-records", type=int, default=100, metavar="N")
    parser.add_argument("--codec", default="none", choices=("none", "gzip", "snappy", "lz4", "zstd"))
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    options = parser.parse_args(arguments)
    kafka = Kafka(heap="1g", compiler="full")
    theirs, text, as_json = (Figure(name) for name in ("Kafka's DumpLogSegments", "dump", "dump --output json"))
    try:
        with tempfile.TemporaryDirectory(prefix="keytail-bench-") as home:
            partition = Path(home, "bench-0")
            partition.mkdir()
            kafka.bench_generate(
                partition, records=options.records, batch_records=options.batch_records, codec=options.codec
            )
            segment = max(partition.glob("*.log"), key=os.path.getsize)
            size = segment.stat().st_size
            kafka.dump("--files", segment, "--print-data-log", out=Path(home, "theirs"))
            timed_dump(segment, Path(home, "ours"), as_json=False)
            same = filecmp.cmp(Path(home, "theirs"), Path(home, "ours"), shallow=False)
            timed_dump(segment, NOWHERE, as_json=True)
            for _ in range(options.runs):
                theirs.seconds.append(kafka.dump("--files", segment, "--print-data-log", out=NOWHERE).seconds)
                text.seconds.append(timed_dump(segment, NOWHERE, as_json=False))
                as_json.seconds.append(timed_dump(segment, NOWHERE, as_json=True))
    finally:
        kafka.close()
    for name, fact in machine().items():
        print(f"{name}: {fact}")
    print(f"a segment of {size} bytes, batches of {options.batch_records}, codec {options.codec}; all records printed")
    for figure in (theirs, text, as_json):
        rate = size / figure.median_s / 1e6
        spread = f"{min(figure.seconds):.2f}..{max(figure.seconds):.2f} s"
        print(f"{figure.name:<24} {rate:6.0f} MB/s  {figure.ratio(theirs):5.1f} times Kafka  ({spread})")
    print("the text is Kafka's, byte for byte" if same else "DIFFERS FROM KAFKA'S TEXT")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
