"""Implements doctor's checks of the machine itself: Python, Java, Spark, Delta, kernels, limits."""

from __future__ import annotations

import glob
import os
import platform
import resource
import sys
from importlib import metadata
from pathlib import Path

from keytail.cli import rows as show
from keytail.doctor.command import FAIL, OK, WARN, CheckRow
from keytail.errors import UsageProblem
from keytail.extras import DELTA, EXTRAS, SPARK, Extra, installed
from keytail.run.kernels import expected_seconds
from keytail.run.memory import cores, map_memory_bytes, physical_bytes
from keytail.run.spark.delta import coordinates, in_sparks_jars, session_settings
from keytail.run.spark.java import java_version, require_java
from keytail.versions import JAVAS, OLDEST_JAVA, PYTHONS, either, numbers

# Recommended minimum number of file descriptors: for shuffles, which require thousands by Spark's documentation, and
# for the driver's locks and files of concurrent tasks.
_FEW_DESCRIPTORS = 4096


def python() -> CheckRow:
    found = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    here = sys.version_info[:2]
    if platform.python_implementation() != "CPython" or here < numbers(PYTHONS[0]):
        return CheckRow("Python", FAIL, found, f"Install keytail in CPython {either(PYTHONS)}")
    if here > numbers(PYTHONS[-1]):
        return CheckRow("Python", WARN, found, f"Use Python {either(PYTHONS)}: this version is not tested")
    return CheckRow("Python", OK, found)


def java() -> CheckRow:
    try:
        path = require_java()
    except UsageProblem as problem:
        if SPARK.missing():
            return CheckRow("Java", OK, f"{problem.what}; only Spark needs Java, and Spark is not installed")
        return CheckRow("Java", FAIL, problem.what, problem.remedy or "")
    version = java_version(path)
    if version is None:
        return CheckRow("Java", WARN, f"{path}, unknown version", f"Make sure that this is Java {either([*JAVAS])}")
    found = f"{path}, version {'.'.join(map(str, version))}"
    first_good = JAVAS.get(version[0])
    if first_good is None:
        remedy = f"Set JAVA_HOME, here and on every executor's host, to a Java that Spark supports: {either([*JAVAS])}"
        return CheckRow("Java", WARN, found, remedy)
    if version < numbers(first_good):
        remedy = (
            f"Install Java {first_good} or newer, or Java {OLDEST_JAVA}, here and on every executor's host: in this "
            "version the garbage collector G1 can damage data that is compressed (JDK-8377811)"
        )
        return CheckRow("Java", WARN, found, remedy)
    return CheckRow("Java", OK, found)


def spark() -> CheckRow:
    if SPARK.missing():
        return _of_extra("Spark", SPARK)
    versions = installed("pyspark", "pyspark-client")
    found = versions.get("pyspark", "of an unknown version")  # installed without pip, as under spark-submit
    if versions.get("pyspark-client"):
        return CheckRow(
            "Spark",
            FAIL,
            f"pyspark {found} and pyspark-client {versions['pyspark-client']}, which contain the same files",
            "Create this environment again without pyspark-client, and use a separate environment for programs that "
            "need it, such as Airflow",
        )
    required = (item.partition(";")[0].strip() for item in metadata.requires("keytail") or [])
    wanted = next((item for item in required if item.startswith("pyspark==")), "")
    if wanted and wanted != f"pyspark=={found}":
        return CheckRow("Spark", WARN, f"pyspark {found}; tested with {wanted}", f"pip install {wanted}")
    home = os.environ.get("SPARK_HOME")
    return CheckRow("Spark", OK, f"pyspark {found}" + (f", SPARK_HOME={home}" if home else ""))


def delta(jars: str | None) -> CheckRow:
    """Return the row of the check of Delta's jars, which `export`, the import of Delta tables, and `--ledger` with
    Spark need. `jars`: the jars' folder."""
    if DELTA.missing():
        return _of_extra("Delta's jars", DELTA)
    name = coordinates()
    if jars is not None:
        try:
            session_settings(jars)
        except UsageProblem as problem:
            return CheckRow("Delta's jars", FAIL, problem.what, problem.remedy or "")
        return CheckRow("Delta's jars", OK, f"{name.split(':')[1]} in {jars}")
    if (jar := in_sparks_jars()) is not None:
        return CheckRow("Delta's jars", OK, jar)
    _, artifact, version = name.split(":")
    kept = glob.glob(str(Path.home() / ".ivy2*" / "jars" / f"*{artifact}-{version}.jar"))
    if kept:
        return CheckRow("Delta's jars", OK, kept[0])
    return CheckRow(
        "Delta's jars",
        WARN,
        f"{name} is not on this host yet: the first export or run with --ledger downloads it, which takes about 30 s",
        "Start an export once on a host that can reach a Maven repository, or use --delta-jars. Other runs need no "
        "jars",
    )


def extras() -> list[CheckRow]:
    """Return a row for each extra for which there is no other check."""
    return [_of_extra(f"keytail[{extra.name}]", extra) for extra in EXTRAS if extra not in (SPARK, DELTA)]


def _of_extra(check: str, extra: Extra) -> CheckRow:
    """Return the row of the check whether an extra is installed. Only a partial installation is a warning."""
    missing = extra.missing()
    if extra.packages[0] in missing:
        return CheckRow(check, OK, f"not installed; {extra.install} adds {extra.adds}")
    if missing:
        return CheckRow(
            check, WARN, f"{extra.packages[0]} needs {', '.join(missing)}, not installed", f"Run {extra.install}"
        )
    versions = installed(*extra.packages)
    return CheckRow(check, OK, ", ".join(f"{name} {version}" for name, version in versions.items()))


def native() -> CheckRow:
    from keytail.kernels import native as found_here  # noqa: PLC0415 (brings in the compiler)

    found = f"{found_here.CHOICE} ({found_here.CRC_FUNCTION or 'no C function'}, {found_here.HASH_NAME})"
    if platform.machine().lower() in ("aarch64", "arm64"):
        found += "; keytail has not been tested on ARM64"
    if found_here.NATIVE:
        return CheckRow("checksum and hash", OK, found)
    remedy = "Install the wheels of crc32c and xxhash for this machine: runs are then faster, with the same results"
    return CheckRow("checksum and hash", WARN, found, remedy)


def cache() -> CheckRow:
    from keytail.kernels import jit  # noqa: PLC0415 (brings in the compiler)

    if jit.CACHE_FOLDER is None:
        remedy = "Set KEYTAIL_CACHE_DIR to a directory to which only this user and root may write"
        if jit.UNTRUSTED:
            found = f"other users own {jit.UNTRUSTED[0]} or may write to it, so each process compiles its kernels"
            return CheckRow("compiled kernels", WARN, found, remedy)
        found = f"kernels cannot be stored ({jit.WHY_NOT_WRITABLE}), so each process compiles its kernels"
        return CheckRow("compiled kernels", WARN, found, remedy)
    found = f"{len(jit.names_in_cache())} in {jit.CACHE_FOLDER}"
    found += "" if jit.IS_WRITABLE else ", to which this user cannot write"
    seconds = expected_seconds()
    if not seconds:
        return CheckRow("compiled kernels", OK, found)
    remedy = f"Run keytail doctor --warm (about {seconds:.0f} s), or the first run of each command takes longer"
    return CheckRow("compiled kernels", WARN, f"not compiled for this user: {found}", remedy)


def descriptors() -> CheckRow:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} (at most {_limit(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= _FEW_DESCRIPTORS:
        return CheckRow("file descriptors", OK, found)
    remedy = f"Run ulimit -n {_FEW_DESCRIPTORS} before a run that divides large partitions among many tasks"
    return CheckRow("file descriptors", WARN, found, remedy)


def memory() -> CheckRow:
    share = show.human_bytes(map_memory_bytes(cores()))
    found = f"{show.human_bytes(physical_bytes())}, {cores()} cores: {share} for the map of one task (--map-memory)"
    return CheckRow("memory", OK, found)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)
