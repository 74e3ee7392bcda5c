"""Finds the Java executable that Spark starts, and its version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from keytail.acting_user import as_caller, give_back
from keytail.errors import UsageProblem
from keytail.versions import OLDEST_JAVA, numbers


@as_caller()
def require_java() -> str:
    """Return the path of the `java` that Spark starts. Raises UsageProblem if there is no Java, it cannot be run, or
    its version is too old."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if home and not os.access(java or "", os.X_OK):
        raise UsageProblem(
            f"JAVA_HOME is {home}, but there is no executable file {java}",
            remedy=f"Set JAVA_HOME to the directory of a JDK {OLDEST_JAVA} or newer, or unset it",
            slug="invalid-java-home",
        )
    if java is None:
        raise UsageProblem(
            "Java was not found: JAVA_HOME is not set, and there is no `java` on PATH",
            remedy=f"Install a JDK {OLDEST_JAVA} or newer, or set JAVA_HOME to the directory of such a JDK",
            slug="java-not-found",
        )
    version = java_version(java)
    if version is not None and version[0] < OLDEST_JAVA:
        raise UsageProblem(
            f"{java} is Java {version[0]}, but Spark needs {OLDEST_JAVA} or newer",
            remedy=f"Set JAVA_HOME to the directory of a JDK {OLDEST_JAVA} or newer",
            slug="unsupported-java-version",
        )
    return java


@as_caller()
def java_version(java: str) -> tuple[int, ...] | None:
    """Return the version of Java as numbers, such as (17, 0, 15); None if the version is not recognised. The version is
    read from the `release` file beside `bin/`, without a start of a JVM, or else from the output of `java -version`.
    Raises UsageProblem if this cannot be run."""
    release = Path(os.path.realpath(java)).parent.parent / "release"
    try:
        text = release.read_text(errors="replace")
    except OSError:
        try:
            command = [java, "-version"]
            answer = subprocess.run(
                command, capture_output=True, text=True, timeout=60, check=False, preexec_fn=give_back
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise UsageProblem(
                f"{java} cannot be run: {problem}", remedy="Check JAVA_HOME", slug="java-not-runnable"
            ) from problem
        text = answer.stderr + answer.stdout
    found = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+(?:\.\d+)*)', text)
    return numbers(found.group(1)) if found else None
