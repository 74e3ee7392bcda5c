"""The worked example: every block of EXAMPLE.md, in order, as it stands; what it prints is what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import keytail

pytestmark = pytest.mark.spark

PAGE = Path(keytail.__file__).parent / "spark/EXAMPLE.md"
ROOT = PAGE.parents[3]
BLOCK = re.compile(r"^```(sh|python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_block(tmp_path: Path) -> None:
    """Shell blocks are one shell, blocks of Python one program behind them: the page has them in that order, or the
    program has ended before the shell goes on."""
    blocks = BLOCK.findall(PAGE.read_text())
    assert {kind for kind, _ in blocks} == {"sh", "python", "text"}
    lines, program = ["set -e"], ""
    for kind, text in blocks:
        if kind == "sh":
            lines += _run(program, tmp_path, lines)
            program = ""
            lines.append(text)
        elif kind == "python":
            program += text
    lines += _run(program, tmp_path, lines)
    environment = dict(os.environ, WORK=str(tmp_path / "work"), PATH=_with_interpreter(), COLUMNS="120")
    environment["SPARK_LOCAL_IP"] = "127.0.0.1"
    run = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    printed = _squeezed(run.stdout)
    at = 0
    for expected in (_squeezed(text) for kind, text in blocks if kind == "text"):
        found = printed.find(expected, at)
        assert found >= 0, f"not printed, or not in this order:\n{expected}\nwhat was printed:\n{printed}"
        at = found + len(expected)


def _run(program: str, folder: Path, lines: list[str]) -> list[str]:
    if not program:
        return []
    path = folder / f"program-{len(lines)}.py"
    path.write_text(program)
    return [f"python {path}"]


def _with_interpreter() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def _squeezed(text: str) -> str:
    """Without blanks at ends of lines, empty lines, and the widths of columns."""
    lines = (re.sub(r"[ \t]+", " ", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)
