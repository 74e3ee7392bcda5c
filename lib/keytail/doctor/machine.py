"""The checks of `doctor` of the machine itself: interpreter, Java, Spark, Delta, kernels, limits."""

from __future__ import annotations

import glob
import os
import platform
import resource
import sys
from importlib import metadata
from pathlib import Path

from keytail.cli import rows as show
from keytail.doctor.row import FAIL, OK, WARN, CheckRow
from keytail.errors import UsageProblem
from keytail.run.java import java_version, require_java
from keytail.run.memory import map_memory_bytes, physical_bytes
from keytail.run.workers import cores
from keytail.versions import JAVAS, OLDEST_JAVA, PYTHONS, either, numbers

# For Spark's shuffle, and the driver's locks and files of concurrent tasks; Spark's documentation requires thousands.
_FEW_DESCRIPTORS = 4096


def python() -> CheckRow:
    found = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    here = sys.version_info[:2]
    if platform.python_implementation() != "CPython" or here < numbers(PYTHONS[0]):
        return CheckRow("Python", FAIL, found, f"Install keytail into a CPython {either(PYTHONS)}")
    if here > numbers(PYTHONS[-1]):
        return CheckRow("Python", WARN, found, f"Not tried yet. Tried are {either(PYTHONS)}")
    return CheckRow("Python", OK, found)


def java() -> CheckRow:
    try:
        path = require_java()
    except UsageProblem as problem:
        return CheckRow("Java", FAIL, problem.what, problem.remedy or "")
    version = java_version(path)
    if version is None:
        return CheckRow("Java", WARN, f"{path}, which does not say its version", f"Spark needs Java {either([*JAVAS])}")
    found = f"{path}, version {'.'.join(map(str, version))}"
    first_good = JAVAS.get(version[0])
    if first_good is None:
        remedy = f"Spark supports Java {either([*JAVAS])}: point JAVA_HOME to one, there and on every executor's host"
        return CheckRow("Java", WARN, found, remedy)
    if version < numbers(first_good):
        remedy = (
            f"Its garbage collector G1 can damage data that is compressed (JDK-8377811): install {first_good} or "
            f"newer, or Java {OLDEST_JAVA}, there and on every executor's host"
        )
        return CheckRow("Java", WARN, found, remedy)
    return CheckRow("Java", OK, found)


def spark() -> CheckRow:
    try:
        found = metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        return CheckRow("Spark", FAIL, "pyspark is not installed", "Install keytail with what it depends on")
    if _version("pyspark-client"):
        return CheckRow(
            "Spark",
            FAIL,
            f"pyspark {found} and pyspark-client {_version('pyspark-client')}, which have the same files",
            "Use an environment of its own for what needs pyspark-client, such as Airflow, and make this one anew",
        )
    wanted = next((one for one in metadata.requires("keytail") or [] if one.startswith("pyspark==")), "")
    if wanted and wanted != f"pyspark=={found}":
        return CheckRow("Spark", WARN, f"pyspark {found}; tested is {wanted}", f"pip install {wanted}")
    home = os.environ.get("SPARK_HOME")
    return CheckRow("Spark", OK, f"pyspark {found}" + (f", SPARK_HOME={home}" if home else ""))


def delta(jars: str | None) -> CheckRow:
    """Check the jars that `export` and `--ledger` need; `jars` is a folder that replaces Maven."""
    from keytail.run.delta import coordinates, in_sparks_jars, session_settings  # noqa: PLC0415 (brings in Spark)

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
        f"{name} is not here yet: the first run with --ledger, or of export, fetches it (about 30 s)",
        "Run it once where a Maven repository can be reached, or give --delta-jars; other runs do not need it",
    )


def native() -> CheckRow:
    from keytail.kernels import native as found_here  # noqa: PLC0415 (brings in the compiler)

    found = f"{found_here.CHOICE} ({found_here.CRC_FUNCTION or 'no C function'}, {found_here.HASH_NAME})"
    if found_here.NATIVE:
        return CheckRow("checksum and hash", OK, found)
    remedy = "Slower, with the same results. Install the wheels of crc32c and xxhash for this machine"
    return CheckRow("checksum and hash", WARN, found, remedy)


def cache() -> CheckRow:
    from keytail.kernels import jit  # noqa: PLC0415 (brings in the compiler)

    if jit.CACHE_FOLDER is None:
        remedy = "Set KEYTAIL_CACHE_DIR to a folder that this user, and nobody but root, may write to"
        if jit.UNTRUSTED:
            found = f"others may write to {jit.UNTRUSTED[0]}, or it is another user's: each process compiles its own"
            return CheckRow("compiled kernels", WARN, found, remedy)
        return CheckRow("compiled kernels", WARN, "no folder to keep them in: each process compiles anew", remedy)
    kept = sum(name.endswith(".nbi") for _, _, names in os.walk(jit.CACHE_FOLDER) for name in names)
    found = f"{kept} in {jit.CACHE_FOLDER}" + ("" if jit.IS_WRITABLE else ", to which this user adds nothing")
    if kept:
        return CheckRow("compiled kernels", OK, found)
    return CheckRow("compiled kernels", WARN, found, "keytail doctor --warm compiles them ahead, in about a minute")


def descriptors() -> CheckRow:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} (at most {_limit(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= _FEW_DESCRIPTORS:
        return CheckRow("file descriptors", OK, found)
    remedy = f"ulimit -n {_FEW_DESCRIPTORS} before a run that shares large partitions among many tasks"
    return CheckRow("file descriptors", WARN, found, remedy)


def memory() -> CheckRow:
    share = show.human_bytes(map_memory_bytes(cores()))
    found = f"{show.human_bytes(physical_bytes())}, {cores()} cores: {share} for the map of one task (--map-memory)"
    return CheckRow("memory", OK, found)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)
