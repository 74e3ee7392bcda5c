"""Tries the wheel with each Python and each Java found here: `make versions`, `python -m tests.versions [PYTHON...]`.

For each Python of the table in keytail/versions.py that can be run as `python3.X` (or for each that is named), a new
environment is created with the wheel and the pinned versions. Golden logs are compacted there, first without Spark and
then with Spark on each supported Java that is found, and verified each time. This takes minutes, because each Python
compiles the kernels again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from keytail.errors import UsageProblem
from keytail.run.spark.java import java_version, require_java
from keytail.versions import JAVAS, PYTHONS
from tests import golden

ROOT = Path(__file__).parents[1]


def main(named: Sequence[str]) -> int:
    javas = dict(sorted(javas_here()))
    print("Java:", *(f"{major} in {home}" for major, home in javas.items()) or ["none"], sep="\n  ")
    failed = []
    with tempfile.TemporaryDirectory(prefix="keytail-versions-") as folder:
        wheel = build(Path(folder))
        for name in named or [f"python{version}" for version in PYTHONS]:
            version = version_of(name)
            if version is None:
                print(f"{name}: not tried, it cannot be run here")
                failed += [name] if named else []
                continue
            began_s = time.monotonic()
            try:
                done = smoke(name, wheel, Path(folder) / f"python{version}", javas)
                print(f"{name}: Python {version}: {'; '.join(done)} ({time.monotonic() - began_s:.0f} s)")
            except (AssertionError, subprocess.CalledProcessError) as problem:
                failed.append(name)
                print(f"{name}: Python {version}: FAILED: {problem}\n{getattr(problem, 'stderr', '')}")
    return 1 if failed else 0


def version_of(python: str) -> str | None:
    """Return the version of a Python; None if it cannot be run, as one that a version manager only lists."""
    code = "import platform; print(platform.python_version())"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def javas_here() -> Iterator[tuple[int, str]]:
    """Yield each supported version with its home. JAVA_HOME, or the Java on PATH, comes last, to take precedence."""
    found = [str(java) for java in sorted(Path("/usr/lib/jvm").glob("*/bin/java"))]
    try:
        found.append(os.path.realpath(require_java()))
    except UsageProblem:
        pass
    for java in found:
        version = java_version(java)
        if version is not None and version[0] in JAVAS:
            yield version[0], str(Path(java).parents[1])


def build(folder: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def smoke(python: str, wheel: Path, home: Path, javas: Mapping[int, str]) -> list[str]:
    """Return a description of the runs. Raises AssertionError or CalledProcessError."""
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables = kept | {"KEYTAIL_CACHE_DIR": str(home / "kernels")}

    def run(*command: str | Path, **more: str) -> str:
        return subprocess.run(
            command, cwd=home, env=variables | more, capture_output=True, text=True, timeout=900, check=True
        ).stdout

    run(python, "-m", "venv", home / "venv")
    pip = [home / "venv/bin/python", "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "-c", ROOT / "conf/constraints.txt", f"{wheel}[all]")
    run(*pip, "check")
    keytail, done = home / "venv/bin/keytail", []
    for java in (None, *javas):
        where = home / f"java{java}"
        where.mkdir()
        golden.unpack(where)
        config = ["--config", where / "server.properties", "--output", "json"]
        # Without Java, only the strategy without Spark is possible.
        with_java = {"JAVA_HOME": javas[java]} if java else {"JAVA_HOME": "", "PATH": "/nowhere"}
        master = ["--master", "local[2]"] if java else []
        rows = json.loads(run(keytail, "compact", *config, "--execute", *master, **with_java))
        compacted = sum(row["status"] == "compacted" for row in rows)
        assert compacted > 5, rows
        assert all(row["status"] in ("compacted", "clean", "skipped") for row in rows), rows
        verified: list[dict[str, Any]] = json.loads(run(keytail, "verify", *config, **with_java))
        assert {row["status"] for row in verified} == {"sound"}, verified
        if java:
            checks = {row["check"]: row for row in json.loads(run(keytail, "doctor", "--output", "json", **with_java))}
            assert (checks["Python"]["status"], checks["Java"]["status"]) == ("ok", "ok"), checks
            assert re.search(rf"version {java}\b", checks["Java"]["found"]), checks
        done.append(f"{compacted} partitions {f'with Spark on Java {java}' if java else 'without Spark'}")
    return done


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
