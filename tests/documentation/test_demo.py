"""`make demo` prints the end that the README shows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.documentation.pages import ROOT, blocks
from tests.documentation.running import as_compared, missing_of


@pytest.mark.long
@pytest.mark.parametrize("flags", [[], pytest.param(["--master", "local[2]"], marks=pytest.mark.spark)])
def test_the_demo_ends_as_the_readme_shows(flags: list[str]) -> None:
    [shown] = [item.text for item in blocks("README.md") if "partitions compacted in" in item.text]
    done = subprocess.run(
        [sys.executable, "-m", "tests.demo", *flags],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert missing_of(shown, done.stdout) is None, as_compared(done.stdout)


def test_the_makefile_runs_the_demo() -> None:
    assert "\n\t$(BIN)/python -m tests.demo\n" in (ROOT / "Makefile").read_text()
