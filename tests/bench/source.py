"""Compares `kafka-log` with Spark's own Kafka source on the same topic. `python -m tests.bench.source`.

Both alternate in one Spark session while the broker runs, after one run of each to warm up: all columns with headers,
read_committed, written to Spark's `noop`; then only offset and timestamp, for which Spark's source also fetches whole
records. A run fails if the number of records by partition, or a hash over all columns, differs. Rates are of the bytes
of keys and values.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keytail.run.spark.session import local_session
from tests.bench.export import BATCH_BYTES, TOPIC, committed
from tests.bench.import_ import PARTITIONS, write_records
from tests.bench.report import Figure, machine
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient
from tests.interop.kafka_source import add_kafka_source

_HEADERS = "transform(headers, h -> concat(h.key, '=', coalesce(hex(h.value), 'null')))"


def from_log(spark: Any, home: Path, columns: str | None = None) -> Any:
    reader = spark.read.format("kafka-log").option("logDirs", str(home / "logs")).option("topic", TOPIC)
    reader = reader.option("isolationLevel", "read_committed").option("highWatermark", "log-end")
    if columns is not None:
        return reader.option("columns", columns).load()
    return reader.option("includeHeaders", "true").load()


def drain(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def digest(frame: Any) -> list[tuple[int, int, int]]:
    """Return, by partition, the number of records and the sum of the hashes of all their columns."""
    hashed = frame.selectExpr(
        "partition", f"xxhash64(key, value, topic, offset, timestamp, timestampType, {_HEADERS}) % 1000000007 AS hash"
    )
    rows = hashed.groupBy("partition").agg({"*": "count", "hash": "sum"}).orderBy("partition").collect()
    return [tuple(row) for row in rows]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.source", description=__doc__)
    parser.add_argument("--records", type=int, default=2_000_000, metavar="N")
    parser.add_argument("--codec", default="lz4", choices=("none", "gzip", "snappy", "lz4", "zstd"))
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    options = parser.parse_args(arguments)
    few = ("offset", "timestamp")
    with tempfile.TemporaryDirectory(prefix="keytail-bench-") as folder:
        home = Path(folder)
        size = write_records(home, options.records)
        spark = local_session("local[*]", "source benchmark", {}, rows_in_jvm=True)
        add_kafka_source(spark)
        broker = Broker(home / "logs", home / "work", heap="1g")
        runs: dict[str, Callable[[], Any]] = {
            "kafka-log, all": lambda: from_log(spark, home),
            "Kafka source, all": lambda: committed(spark, broker),
            "kafka-log, offset, time": lambda: from_log(spark, home, ",".join(few)),
            "Kafka source, the same": lambda: committed(spark, broker).select(*few),
        }
        figures = {name: Figure(name) for name in runs}
        try:
            with BrokerClient(heap="3g") as client, broker:
                client.connect(broker)
                client.create_topic(TOPIC, PARTITIONS, {})
                client.produce_file(TOPIC, home / "records.bin", codec=options.codec, batch_bytes=BATCH_BYTES)
                for run in range(options.runs + 1):
                    for name, frame in runs.items():
                        started = time.perf_counter()
                        drain(frame())
                        if run:  # the first run is a warm-up
                            figures[name].seconds.append(time.perf_counter() - started)
                digests = [digest(frame()) for name, frame in runs.items() if name.endswith("all")]
        finally:
            spark.stop()
    for name, fact in machine().items():
        print(f"{name}: {fact}")
    print(f"{options.records} records of {size} bytes, {PARTITIONS} partitions, {options.codec}")
    names = list(figures)
    for name, figure in figures.items():
        theirs = figures[names[names.index(name) | 1]]
        spread = f"{min(figure.seconds):.2f}..{max(figure.seconds):.2f} s"
        rate, records = size / figure.median_s / 1e6, options.records / figure.median_s / 1e6
        times = f"{figure.ratio(theirs):5.1f} times Spark's"
        print(f"{name:<24} {rate:6.0f} MB/s  {records:5.2f} million records/s  {times}  ({spread})")
    same = digests[0] == digests[1]
    print("both gave the same records" if same else f"THE SOURCES DIFFER: {digests}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
