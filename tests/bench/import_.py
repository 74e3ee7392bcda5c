"""Compares `import` with a Kafka producer on the same records. `python -m tests.bench.import_`; part of `make bench`.

Two programs alternate. A real producer sends all records from memory to a real broker on this machine, until flush
returns; the records may not be on disk then. `import` reads them from Parquet in a warm Spark session, until
checkpoints are written and all files are durable. Both use the same partitioner, codec and batch size. The third row is
a lower limit: as many bytes as keys and values have are written to one file, with an fsync. A run fails if a partition
has a wrong number of records.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from keytail.cli.configuration import read_configuration
from keytail.import_ import driver as import_
from keytail.import_.command import Request
from keytail.import_.driver import BATCH_BYTES, import_records
from keytail.import_.source import Source
from keytail.run.spark.engine import SparkEngine
from keytail.run.spark.session import local_session
from tests.bench.report import Figure, machine
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient

PARTITIONS = 6
TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAQ"


def write_records(home: Path, count: int) -> int:
    """Write the same records for both sides, and return the bytes of keys and values."""
    rng = random.Random(7)
    words = [bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz", k=rng.randrange(3, 9))) for _ in range(2000)]
    keys = [b"customer-%08d" % rng.randrange(count // 5 + 1) for _ in range(count)]
    values = [b'{"id":%d,"text":"%s"}' % (n, b" ".join(rng.choices(words, k=12))) for n in range(count)]
    times = [1_700_000_000_000 + n for n in range(count)]
    columns = {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary()), "timestamp": times}
    pq.write_table(pa.table(columns), home / "records.parquet", row_group_size=count // 8 + 1)
    with (home / "records.bin").open("wb") as file:
        file.write(struct.pack(">i", count))
        for at, key, value in zip(times, keys, values, strict=True):
            file.write(struct.pack(">qi", at, len(key)) + key + struct.pack(">i", len(value)) + value)
    return sum(map(len, keys)) + sum(map(len, values))


def timed_import(home: Path, codec: str) -> tuple[float, dict[int, int]]:
    logs = home / "imported"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    (logs / "meta.properties").write_text("version=1\nnode.id=1\n")
    (logs / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":-1}')
    request = Request(
        Source(str(home / "records.parquet"), "parquet"),
        "orders",
        (str(logs),),
        configuration=read_configuration(None, ("orders:cleanup.policy=delete",), topics_have_no_overrides=True),
        codec=codec,
        single_replica=True,
        topic_id=TOPIC_ID,
        partition_count=PARTITIONS,
        execute=True,
        master="local[2]",
    )
    started = time.perf_counter()
    rows = import_records(request)
    seconds = time.perf_counter() - started
    if {row.status for row in rows} != {"imported"}:
        raise RuntimeError(f"not imported: {rows}")
    return seconds, {row.partition: row.records for row in rows}


def timed_write(home: Path, size_bytes: int) -> float:
    """Write this number of bytes to one new file, sequentially, with an fsync."""
    block, path = memoryview(random.Random(7).randbytes(8 << 20)), home / "written"
    path.unlink(missing_ok=True)
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for at in range(0, size_bytes, len(block)):
            file.write(block[: min(len(block), size_bytes - at)])
        os.fsync(file.fileno())
    return time.perf_counter() - started


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.import_", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--codec", default="lz4", choices=("none", "gzip", "snappy", "lz4", "zstd"))
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    options = parser.parse_args(arguments)
    theirs, ours, disk = Figure("Kafka's producer"), Figure("import"), Figure("disk: write and fsync")
    same = True
    with tempfile.TemporaryDirectory(prefix="keytail-bench-") as folder:
        home = Path(folder)
        size = write_records(home, options.records)
        spark = local_session("local[*]", "import benchmark")
        real: Any = import_.session_of_run
        import_.session_of_run = lambda *_, **__: SparkEngine(spark)
        broker = Broker(home / "logs", home / "work", heap="1g")
        try:
            timed_import(home, options.codec)
            with BrokerClient(heap="3g") as client, broker:
                client.connect(broker)
                for number in range(options.runs + 1):
                    topic = f"produced-{number}"
                    client.create_topic(topic, PARTITIONS, {})
                    sent = home / "records.bin"
                    took = client.produce_file(topic, sent, codec=options.codec, batch_bytes=BATCH_BYTES)
                    theirs.seconds.append(took)
                    ends = client.offsets([(topic, n) for n in range(PARTITIONS)])
                    seconds, counts = timed_import(home, options.codec)
                    ours.seconds.append(seconds)
                    disk.seconds.append(timed_write(home, size))
                    same &= counts == {n: ends[f"{topic}-{n}"][1] for n in range(PARTITIONS)}
        finally:
            import_.session_of_run = real
            spark.stop()
    for figure in (theirs, ours, disk):
        figure.seconds = figure.seconds[1:]  # the first run is a warm-up
    for name, fact in machine().items():
        print(f"{name}: {fact}")
    what = f"{options.records} records of {size} bytes, {PARTITIONS} partitions"
    print(f"{what}, codec {options.codec}, batches of up to {BATCH_BYTES} bytes")
    for figure in (theirs, ours, disk):
        rate = size / figure.median_s / 1e6
        spread = f"{min(figure.seconds):.2f}..{max(figure.seconds):.2f} s"
        print(f"{figure.name:<22} {rate:6.0f} MB/s  {figure.ratio(theirs):5.1f} times the producer  ({spread})")
    print("partitions have the same records" if same else "PARTITIONS DIFFER FROM THE PRODUCER'S")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
