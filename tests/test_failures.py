"""The command that is printed for a failure repeats it, with the same draws."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAILING = "tests/draws_that_fail.py"
# For temporary directories: when pytest ends, it removes the directories of earlier runs, which may take minutes.
ROOM = tempfile.TemporaryDirectory()


def output_of(command: list[str] | str, **environ: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KEYTAIL_", "PYTEST_"))}
    kept["PYTEST_DEBUG_TEMPROOT"] = ROOM.name
    done = subprocess.run(
        command, shell=isinstance(command, str), cwd=ROOT, env=kept | environ, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    return done.stdout


def drawn(output: str) -> set[str]:
    return set(re.findall(r"^E +AssertionError: (drawn .*)", output, re.MULTILINE))


@pytest.mark.long
def test_the_printed_command_repeats_a_failure() -> None:
    failing = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", FAILING]
    output = output_of([*failing, "-n", "2"], KEYTAIL_KILLS="3 or 4")
    [seed] = re.findall(r"^seed: KEYTAIL_SEED=(\d+)$", output, re.MULTILINE)
    lines = [line for line in output.splitlines() if line.startswith(f"KEYTAIL_SEED={seed} KEYTAIL_KILLS='3 or 4' ")]
    assert len(lines) == 2, output
    again = [drawn(output_of(line)) for line in lines]
    assert [len(draws) for draws in again] == [1, 1]
    assert set().union(*again) == drawn(output)
    assert drawn(output_of(failing)) != drawn(output), "each run must draw another seed"
