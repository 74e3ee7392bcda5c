"""Class data archives for the JVMs of the tests, which map them instead of reading and verifying jars.

    python -m tests.class_archives    write the missing ones: about a minute

A JVM writes an archive when it exits (-XX:ArchiveClassesAtExit), after a sample of the tests' work. Spark's JVM then
needs 6 s of CPU to start instead of 13. A JVM with another class path or other jars ignores the archive silently.
Without archives the tests are the same, but slower.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyspark

from tests.interop.kafka import VERSION, jar_folder

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "interop" / "target" / "archives"
SPARK_JARS = Path(pyspark.__file__).parent / "jars"
# Options of a session on one machine: a JVM of the tests only distributes ids and collects small cells. With one
# compiler, a JVM has only 48 MB for compiled code, which Spark fills, so that the JVM removes and compiles code again.
# Hadoop starts `chmod` and `readlink` for files, thousands of times in a run: with vfork, a tenth less CPU time.
LEAN_JAVA = (
    "-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=240m", "-XX:+UseSerialGC",
    "-Djdk.lang.Process.launchMechanism=VFORK",
)  # fmt: skip
# Settings of a driver, as in the shared session (tests/run/shared.py): for a few rows, compiling a query takes longer
# than interpreting it.
_INTERPRETED = (
    "-Dspark.sql.codegen.wholeStage=false", "-Dspark.sql.codegen.factoryMode=NO_CODEGEN",
    "-Dspark.sql.shuffle.partitions=2", "-Dspark.ui.enabled=false",
)  # fmt: skip
_QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off")

_SPARK = """
import sys
from keytail.run.spark import delta
from keytail.run.spark.session import local_session
from tests.class_archives import same
try:
    # The jars of the shared session, fetched once before several test processes need them: Ivy's cache has no lock.
    settings = delta.session_settings(None, place="s3a://")
    spark = local_session("local[2]", "classes of Spark", settings)
except Exception:  # Delta's jars are not available
    settings = {}
    spark = local_session("local[2]", "classes of Spark")
jvm = spark.sparkContext._gateway.proc
frame = spark.range(10).selectExpr("id", "cast(id AS string) key").mapInArrow(same, "id long, key string")
for kind in ("parquet", "json", *(["delta"] if settings else [])):
    frame.write.format(kind).save(f"{sys.argv[1]}/{kind}")
    spark.read.format(kind).load(f"{sys.argv[1]}/{kind}").groupBy("key").count().orderBy("key").collect()
spark.sparkContext.parallelize([1, 2], 2).map(str).collect()
spark.stop()
jvm.stdin.close()  # this ends the JVM
sys.exit(jvm.wait())
"""


def same(batches: Iterator[object]) -> Iterator[object]:
    yield from batches


def options(name: str) -> tuple[str, ...]:
    """Return the options of a JVM that uses the archive, or none if it is missing."""
    path = path_of(name)
    return (f"-XX:SharedArchiveFile={path}", *_QUIET) if path.exists() else ()


def java_options() -> str:
    """Return options that let any JVM of Spark start faster."""
    return " ".join([*LEAN_JAVA, *options("spark")])


def submit_options() -> str:
    """Return a value for SPARK_SUBMIT_OPTS that lets the JVM of a driver start faster."""
    return " ".join([java_options(), *_INTERPRETED])


def use_for_spark() -> None:
    """Set the options for Spark sessions of this process and its children; only the driver's JVM receives them."""
    os.environ["SPARK_SUBMIT_OPTS"] = " ".join([os.environ.get("SPARK_SUBMIT_OPTS", ""), submit_options()]).strip()


def path_of(name: str) -> Path:
    """Return the path of the archive for this Java and the present state of the jars."""
    java = os.path.realpath(shutil.which("java", path=_path()) or "")
    folder = SPARK_JARS if name == "spark" else jar_folder(VERSION if name == "kafka" else name.removeprefix("kafka-"))
    facts = [java, os.path.getmtime(java) if java else 0, str(folder)]
    with contextlib.suppress(OSError):
        facts += sorted((entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(folder))
    return FOLDER / f"{name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.jsa"


def write(name: str, run: Callable[[str], object]) -> None:
    """Write a missing archive. `run` must start a JVM with the given option, let it do its work, and end it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = path_of(name)
        if path.exists():
            return
        for old in FOLDER.glob(f"{name}-*"):
            old.unlink()
        part = path.with_suffix(".part")
        run(" ".join((f"-XX:ArchiveClassesAtExit={part}", *_QUIET)))
        part.rename(path)


def _path() -> str:
    home = os.environ.get("JAVA_HOME")
    return os.path.join(home, "bin") if home else os.environ.get("PATH", "")


def run_spark(option: str) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYSPARK_", "SPARK_"))}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-c", _SPARK, work]
        environment = clean | {"SPARK_SUBMIT_OPTS": option, "PYTHONPATH": path}
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr, timeout=600)


def run_kafka(option: str) -> None:
    """Format the log dir of a broker, write to it, also in transactions, and read from it."""
    from tests.interop.broker import Broker
    from tests.interop.broker_client import BrokerClient

    with tempfile.TemporaryDirectory() as work, BrokerClient() as client:
        broker = Broker(Path(work, "logs"), Path(work, "work"), java_options=option.split())
        with broker:
            client.connect(broker)
            client.create_topic("t", 1, {"cleanup.policy": "compact"})
            for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
                client.produce(f"plain-{codec}", "t", 0, [(1, b"k", b"v")], codec=codec)
            client.transaction("txn", "begin", "txn")
            client.produce("txn", "t", 0, [(1, b"k", b"v")], transactional_id="txn")
            client.transaction("txn", "commit")
            client.wait_until_decided([("t", 0)])
            client.consume([("t", 0)], isolation="read_committed")
            client.offsets_for_times("t", 0, [0])


if __name__ == "__main__":
    write("spark", run_spark)
    from tests.interop.kafka import KafkaUnavailable, class_path

    try:
        class_path()
        write("kafka", run_kafka)
    except KafkaUnavailable as reason:
        print(f"no archive of Kafka's classes: {reason}", file=sys.stderr)
