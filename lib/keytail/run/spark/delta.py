"""Provides the jars and settings that a Spark session needs to read and write Delta tables.

The jars of the installed delta-spark are taken from Spark's own jars (an image may have them there), from a folder, or
from a Maven repository (Spark's Ivy downloads them at the first start and caches them). spark-submit starts its JVM
before keytail runs, so the flags or the conf of spark-submit must name the jars.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from typing import Any

from keytail.acting_user import as_caller
from keytail.errors import KeytailError, UsageProblem
from keytail.extras import DELTA, require
from keytail.run.spark.stores import Connector, connector_for, jars_of_spark, local_path

EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
SETTINGS = {
    "spark.sql.extensions": EXTENSION,
    "spark.sql.catalog.spark_catalog": CATALOG,
    # The number of tasks with which Delta rebuilds a table's state after every commit. The default of 50 tasks took 5 s
    # on two cores; one task takes 0.9 s. The state of a table with a million files still fits into one task.
    "spark.databricks.delta.snapshotPartitions": "1",
}
# Dependencies of Delta's jars that are not downloaded (66 of 80 MB): Spark has newer versions of them, or only Unity
# Catalog needs them, which is not used.
_SPARKS_OWN = (
    "com.fasterxml.jackson.core:jackson-annotations",
    "com.fasterxml.jackson.core:jackson-core",
    "com.fasterxml.jackson.core:jackson-databind",
    "com.fasterxml.jackson.datatype:jackson-datatype-jdk8",
    "org.apache.hadoop:hadoop-client-api",
    "org.apache.hadoop:hadoop-client-runtime",
    "org.apache.logging.log4j:log4j-api",
    "org.apache.logging.log4j:log4j-core",
    "org.apache.logging.log4j:log4j-slf4j2-impl",
    "org.apache.parquet:parquet-hadoop",
    "org.locationtech.jts:jts-core",
    "org.roaringbitmap:RoaringBitmap",
    "org.slf4j:slf4j-api",
    "io.delta:delta-kernel-unitycatalog",
    "io.unitycatalog:unitycatalog-client",
    "io.unitycatalog:unitycatalog-hadoop",
)
LOCK = ".keytail.lock"
_LONGEST_WAIT_S = 300  # maximum seconds to wait for the lock
_NEEDED = ("delta-spark_", "delta-storage-")
# Progress lines of Ivy, which resolves or downloads the packages.
IVY_NOISE = re.compile(
    rb"::|\t|\s+found |downloading |Ivy Default Cache set to|The jars for the packages stored in|"
    rb"\S+ added as a dependency|.* :: resolving|\s*$"
)


@as_caller()
def session_settings(jars: str | None, *, place: str | None = None) -> dict[str, str]:
    """Return the settings for a session that keytail starts itself, and that accesses tables at `place`. `jars` is a
    folder with Delta's jars and all others that Spark lacks; if it is None, they are among Spark's own or come from
    Maven. Raises UsageProblem if the folder lacks jars."""
    connector = connector_for(place)
    found = _from_folder(jars, connector) if jars else _from_maven(connector)
    return {**SETTINGS, **connector.settings, **found}


def in_sparks_jars() -> str | None:
    """Return the path of Delta's jar among Spark's own jars; None if the jar of the installed version is not there."""
    _, artifact, version = coordinates().split(":")
    found = jars_of_spark(f"*{artifact}-{version}.jar")
    return found[0] if found else None


def coordinates() -> str:
    """Return the Maven coordinates, `io.delta:NAME:VERSION`, of the installed delta-spark for the installed Spark."""
    require("Delta", DELTA)
    from delta import configure_spark_with_delta_pip  # noqa: PLC0415 (brings in pyspark.sql)
    from pyspark.sql import SparkSession  # noqa: PLC0415 (as the line above)

    builder = SparkSession.Builder()
    configure_spark_with_delta_pip(builder)
    return str(builder._options["spark.jars.packages"])


def _from_maven(connector: Connector) -> dict[str, str]:
    packages: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    if in_sparks_jars() is None:
        packages, excluded = (coordinates(),), _SPARKS_OWN
    if connector.packages and not jars_of_spark(f"*{connector.jar}-*.jar"):
        packages, excluded = (*packages, *connector.packages), (*excluded, *connector.excludes)
    wanted = {"spark.jars.packages": packages, "spark.jars.excludes": excluded}
    return {key: ",".join(names) for key, names in wanted.items() if names}


def _from_folder(folder: str, connector: Connector) -> dict[str, str]:
    jars = sorted(glob.glob(os.path.join(glob.escape(os.path.abspath(folder)), "*.jar")))
    of_delta = f"{coordinates()} and its dependencies (delta-storage, delta-kernel-api and -defaults)"
    needed = [(start, of_delta, "") for start in _NEEDED]
    if connector.packages and not jars_of_spark(f"*{connector.jar}-*.jar"):
        of_store = f"{', '.join(connector.packages)} and their dependencies"
        needed.append((f"{connector.jar}-", of_store, f" {connector.scheme}://"))
    for start, packages, scheme in needed:
        if not any(start in os.path.basename(jar) for jar in jars):
            raise UsageProblem(
                f"the directory of --delta-jars, {folder}, has no *{start}*.jar",
                remedy=f"Copy {packages} to this directory. `python -m keytail.run.delta_jars DIR{scheme}` downloads "
                "the jars on a host that can reach a Maven repository",
                slug="missing-delta-jars",
            )
    return {"spark.jars": ",".join(jars)}


def require_delta(spark: Any) -> None:
    """Raise UsageProblem if a session that spark-submit started cannot write Delta tables."""
    conf = spark.sparkContext.getConf()
    wanted = [key for key in ("spark.sql.extensions", "spark.sql.catalog.spark_catalog") if not conf.get(key)]
    try:
        spark.sparkContext._jvm.java.lang.Class.forName(
            EXTENSION, False, spark.sparkContext._jvm.java.lang.Thread.currentThread().getContextClassLoader()
        )
        has_jars = True
    except Exception:
        has_jars = False
    if has_jars and not wanted:
        return
    flags = [] if has_jars else [f"--packages {coordinates()} (or --jars with Delta's jars)"]
    flags += [f"--conf {key}={SETTINGS[key]}" for key in wanted]
    raise UsageProblem(
        "Delta tables are requested, but spark-submit started Spark without Delta's "
        + ("jars" if not has_jars else "settings"),
        remedy=f"Pass {' '.join(flags)} to spark-submit, or conf/spark-delta.conf as its --properties-file",
        slug="spark-without-delta",
    )


@contextlib.contextmanager
def changed_settings(spark: Any, wanted: Mapping[str, str]) -> Iterator[None]:
    """Set Spark settings of the session for the duration of the context, then restore them."""
    before = {key: spark.conf.get(key, None) for key in wanted}
    for key, value in wanted.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, old in before.items():
            spark.conf.unset(key) if old is None else spark.conf.set(key, old)


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """If `folder` is a path or a file URI, hold a lock that prevents other keytail processes from committing to tables
    below it while the context is open. For other URIs, do nothing.

    Delta commits by a rename that must not replace a file. Hadoop's rename on local file systems checks first and then
    renames: if two commits were concurrent, one or both would be lost. HDFS, Azure and GCS prevent such a loss, and
    `s3_commits.py` prevents it on S3. Raises KeytailError if the lock cannot be acquired within five minutes.
    """
    path = local_path(folder)
    if path is None:
        yield
        return
    with as_caller():
        os.makedirs(path, exist_ok=True)
        fd = _open_lock(os.path.join(path, LOCK))
    try:
        last_s = time.monotonic() + _LONGEST_WAIT_S
        while not _locked(fd):
            if time.monotonic() > last_s:
                raise KeytailError(
                    f"another run has held the lock of the Delta tables for {_LONGEST_WAIT_S} s",
                    path=os.path.join(path, LOCK),
                    remedy="Wait until the other run ends, or find out why it does not end; then run again",
                    slug="delta-tables-locked",
                )
            time.sleep(0.05)
        yield
    finally:
        os.close(fd)


def _open_lock(path: str) -> int:
    """Open the lock file, creating it if necessary, and return its descriptor. Raises KeytailError if the file is not a
    regular file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as problem:
        if problem.errno == errno.ELOOP:
            raise _no_lock_file(path) from problem
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _no_lock_file(path)
    return fd


def _no_lock_file(path: str) -> KeytailError:
    return KeytailError(
        "the lock file of the Delta tables is not a regular file",
        path=path,
        remedy="Find out which program created this file, remove the file, then run again",
        slug="delta-lock-not-regular",
    )


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def jars_problem(withheld: bytes) -> UsageProblem | None:
    """Return the error for a failed start of Spark if its output `withheld` shows that jars could not be resolved; None
    if it does not."""
    lines = [line.strip() for line in withheld.decode(errors="replace").splitlines()]
    lost = [line for line in lines if "UNRESOLVED" in line or ("not found" in line and ":: " in line)]
    if not lost:
        return None
    name = re.search(r"[\w.]+#[\w.-]+;[\w.-]+", " ".join(lost))
    what = f" ({name.group(0).replace('#', ':').replace(';', ':')})" if name else ""
    return UsageProblem(
        f"Delta's jars could not be downloaded from a Maven repository{what}",
        remedy="Give this host access to a Maven repository (spark.jars.repositories or spark.jars.ivySettings select "
        "one). Or download the jars on another host and pass their directory as --delta-jars. Or omit the flag that "
        "needs Delta",
        slug="delta-jars-not-downloaded",
    )
