"""The worked example: all blocks of EXAMPLE.md, in order and unchanged, print what the page shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.class_archives import submit_options
from tests.documentation.pages import ROOT, blocks, find_in_order, squeezed

pytestmark = pytest.mark.spark

PAGE = "lib/keytail/run/EXAMPLE.md"


def test_every_block_of_the_example_prints_what_the_page_shows(tmp_path: Path) -> None:
    """Shell blocks run in one shell. The Python blocks between two of them run as one program, which ends before the
    shell continues.
    """
    found = [(item.kind, item.text, item.printed) for item in blocks(PAGE)]
    assert {kind for kind, _, _ in found} == {"sh", "python", "text"}
    lines, program = ["set -e"], ""
    for kind, text, _ in found:
        if kind == "sh":
            lines += _run(program, tmp_path, lines)
            program = ""
            lines.append(text)
        elif kind == "python":
            program += text
    lines += _run(program, tmp_path, lines)
    environment = dict(os.environ, WORK=str(tmp_path / "work"), PATH=_with_interpreter(), COLUMNS="120")
    environment["SPARK_LOCAL_IP"] = "127.0.0.1"
    # This saves time and does not change the output.
    environment["PYSPARK_SUBMIT_ARGS"] = "--conf spark.sql.shuffle.partitions=2 pyspark-shell"
    environment["SPARK_SUBMIT_OPTS"] = submit_options()
    run = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    shown = [text if kind == "text" else printed for kind, text, printed in found if kind == "text" or printed]
    missing = find_in_order([squeezed(text or "") for text in shown], squeezed(run.stdout))
    assert missing is None, f"missing, or not in this order:\n{missing}\nthe output was:\n{run.stdout}"


def _run(program: str, folder: Path, lines: list[str]) -> list[str]:
    if not program:
        return []
    path = folder / f"program-{len(lines)}.py"
    path.write_text(program)
    return [f"python {path}"]


def _with_interpreter() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

