"""Compares `export` with Spark's own Kafka source on the same topic (`python -m tests.bench.export`, `make bench`).

Three programs alternate in one Spark session, after one run of each to warm up: `export` reads the log of a running
broker and writes a new Delta table of the latest record of each key; Spark's Kafka source reads the topic from that
broker and writes all records into a new Delta table; the same source aggregates the latest record of each key. A run
fails if the table of `export` differs from the aggregated one. Rates are of the bytes of keys and values of all records
in the topic.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

from keytail.cli.selection import PartitionFilter
from keytail.export import driver
from keytail.export.command import Request
from keytail.export.driver import export
from keytail.export.formats import Formats
from keytail.run.spark import delta
from keytail.run.spark.engine import SparkEngine
from keytail.run.spark.session import local_session
from tests.bench.import_ import PARTITIONS, write_records
from tests.bench.report import Figure, machine
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient
from tests.interop.kafka_source import add_kafka_source, from_kafka

TOPIC = "customers"
BATCH_BYTES = 16 << 10  # the producer's batch.size


def exported(home: Path, to: Path) -> None:
    partition_filter = PartitionFilter(log_dirs=(str(home / "logs"),), topics=(TOPIC,))
    rows = export(Request(partition_filter, str(to), Formats(), high_watermark="log-end", execute=True))
    if {row.status for row in rows} != {"exported"}:
        raise RuntimeError(f"not exported: {rows}")


def committed(spark: Any, broker: Broker) -> Any:
    return from_kafka(spark, broker, TOPIC).option("kafka.isolation.level", "read_committed").load()


def all_versions(spark: Any, broker: Broker, to: Path) -> None:
    rows = committed(spark, broker).select("partition", "key", "value", "headers", "timestamp", "offset")
    rows.write.format("delta").partitionBy("partition").save(str(to / TOPIC))


def newest(spark: Any, broker: Broker, to: Path) -> None:
    last = F.max_by(F.struct("value", "headers", "timestamp", "offset"), "offset").alias("last")
    rows = committed(spark, broker).groupBy("partition", "key").agg(last).where("last.value IS NOT NULL")
    rows.select("partition", "key", "last.*").write.format("delta").partitionBy("partition").save(str(to / TOPIC))


def digest(spark: Any, to: Path) -> tuple[int, int]:
    """Return the number of rows in a table, and the sum of their hashes."""
    rows = spark.read.format("delta").load(str(to / TOPIC)).selectExpr(
        "xxhash64(partition, key, value, timestamp, offset) % 1000000007 AS hash"
    )
    [found] = rows.selectExpr("count(*) AS n", "sum(hash) AS hashes").collect()
    return found["n"], found["hashes"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.export", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--codec", default="lz4", choices=("none", "gzip", "snappy", "lz4", "zstd"))
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    options = parser.parse_args(arguments)
    ours, theirs, folded = Figure("export"), Figure("Kafka source, all"), Figure("Kafka source, newest")
    with tempfile.TemporaryDirectory(prefix="keytail-bench-") as folder:
        home = Path(folder)
        size = write_records(home, options.records)
        spark = local_session("local[*]", "export benchmark", delta.session_settings(None), rows_in_jvm=True)
        add_kafka_source(spark)
        spark.conf.set("spark.sql.shuffle.partitions", str(spark.sparkContext.defaultParallelism))
        real: Any = driver.session_of_run
        driver.session_of_run = lambda *_, **__: SparkEngine(spark)
        broker = Broker(home / "logs", home / "work", heap="1g")
        try:
            with BrokerClient(heap="3g") as client, broker:
                client.connect(broker)
                client.create_topic(TOPIC, PARTITIONS, {"cleanup.policy": "compact"})
                client.produce_file(TOPIC, home / "records.bin", codec=options.codec, batch_bytes=BATCH_BYTES)
                runs: list[tuple[Figure, Callable[[Path], None]]] = [
                    (ours, lambda to: exported(home, to)),
                    (theirs, lambda to: all_versions(spark, broker, to)),
                    (folded, lambda to: newest(spark, broker, to)),
                ]
                for _ in range(options.runs + 1):
                    digests = []
                    for figure, run in runs:
                        to = home / "lake"
                        shutil.rmtree(to, ignore_errors=True)
                        started = time.perf_counter()
                        run(to)
                        figure.seconds.append(time.perf_counter() - started)
                        digests.append(digest(spark, to))
        finally:
            driver.session_of_run = real
            spark.stop()
    for figure in (ours, theirs, folded):
        figure.seconds = figure.seconds[1:]  # the first run is a warm-up
    for name, fact in machine().items():
        print(f"{name}: {fact}")
    print(f"{options.records} records of {size} bytes, {digests[0][0]} keys, {PARTITIONS} partitions, {options.codec}")
    for figure in (ours, theirs, folded):
        spread = f"{min(figure.seconds):.2f}..{max(figure.seconds):.2f} s"
        rate, records = size / figure.median_s / 1e6, options.records / figure.median_s / 1e6
        times = f"{figure.ratio(theirs):5.1f} times the source"
        print(f"{figure.name:<22} {rate:6.0f} MB/s  {records:5.2f} million records/s  {times}  ({spread})")
    same = digests[0] == digests[2]
    print("the tables have the same rows" if same else "THE TABLE OF EXPORT DIFFERS FROM THE AGGREGATED ONE")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
