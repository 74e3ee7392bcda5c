"""`python -m keytail.run.delta_jars` downloads the jars for --delta-jars, and a table can be written with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.interop]

_WRITE = """
import sys
from keytail.run.spark.delta import session_settings
from keytail.run.spark.session import local_session
spark = local_session("local[1]", extra=session_settings(sys.argv[1]))
spark.range(7).write.format("delta").save(sys.argv[2])
print(spark.read.format("delta").load(sys.argv[2]).count())
"""


def test_jars_are_downloaded_and_sufficient(tmp_path: Path) -> None:
    """The download and the use of the jars are separate processes, because each stops its JVM."""
    jars = tmp_path / "jars"
    reported = run("-m", "keytail.run.delta_jars", str(jars))
    assert reported.split() == sorted(path.name for path in jars.iterdir())
    assert run("-c", _WRITE, str(jars), str(tmp_path / "table")) == "7\n"


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
