"""Runs command lines in this process and writes what they print as text, without what varies between runs.

While a command runs, the clock, the ids of runs, seeds, the name of the host, its file system and its free space are
fixed. Temporary paths, durations that a monotonic clock measures, times of log lines and the version are replaced by
placeholders, blanks at the ends of lines are removed, and adjacent progress lines, whose order varies, are sorted.
Everything else is recorded as printed.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.rich_utils
from click.testing import Result
from typer.testing import CliRunner

from keytail import __version__
from keytail.cli import progress
from keytail.compact import totals
from keytail.log.fs import FileSystem
from keytail.main.main import app
from tests.main.places import NOW_MS, place

HOST = "/HOST"  # stands for the directory of the place in a recorded command
FREE_BYTES = 64 << 30
# Tables are padded and folded by the lengths of paths, so the length of the root must not depend on where it is.
ROOT_LENGTH = 120
# The width of tables, in which no path is folded, and the width of other output.
WIDE, NARROW = 500, 100

_VARIES = (
    (re.compile(r"\(at (?:\d+ min )?[\d.]+ s\)"), "(at TIME)"),
    (re.compile(r", at (?:\d+ min )?[\d.]+ s\)"), ", at TIME)"),
    (re.compile(r'("seconds": )[\d.]+'), r"\1TIME"),
    (re.compile(r'("time": )"[^"]+"'), r'\1"TIME"'),
    (re.compile(rf"\bkeytail {re.escape(__version__)}\b"), "keytail VERSION"),
    (re.compile(rf'("keytail": )"{re.escape(__version__)}"'), r'\1"VERSION"'),
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
)
_PROGRESS = re.compile(r"(?:^keytail: \[\d+/\d+\] .*\n?)+", re.MULTILINE)
# Only in the output of commands with Spark, whose workers use the real clock, and of commands with Delta tables.
_VARIES_ON_SPARK = (
    (re.compile(r'("(?:start|end)_ms": )\d+'), r"\1TIME"),
    (re.compile(r" +(?:\d+\.\d s|\d+ min \d+ s)$", re.MULTILINE), "  TIME"),
    (re.compile(r" +took$", re.MULTILINE), "  took"),
    (re.compile(r'("(?:keytail|python|pyspark|delta-spark|deltalake|numba|numpy|pyarrow)": )"[^"]+"'), r'\1"VERSION"'),
    (re.compile(r"^versions: .*$", re.MULTILINE), "versions: VERSIONS"),
    (re.compile(r'("files_after": null,\s+"bytes_before": )\d+'), r"\1SIZE"),
    (re.compile(r"^(.* would-maintain .*?) +[\d.]+ \w+$", re.MULTILINE), r"\1  SIZE"),
    (re.compile(r'("oldest_day": )"[^"]+"'), r'\1"DAY"'),
    (re.compile(r"^(\w+ +)\d{4}-\d{2}-\d{2}(?= +would-maintain)", re.MULTILINE), r"\1DAY       "),
    (re.compile(r"(?<! log) +size$", re.MULTILINE), "  size"),
)


@dataclass(frozen=True)
class Case:
    """Command lines that run one after the other in a place. With `both`, they run a second time, in a new copy of the
    place, each with `--output json`.
    """

    name: str
    place: str
    commands: tuple[str, ...]
    both: bool = True
    columns: int = WIDE


def root_in(folder: Path) -> Path:
    """Return a directory in `folder` whose path has a fixed length."""
    missing = ROOT_LENGTH - len(str(folder)) - 1
    assert missing > 0, f"the path of the temporary directory is too long: {folder}"
    return folder / ("h" * missing)


def fix_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix what commands read from the machine. Processes that they fork inherit this."""
    numbers = itertools.count(1)
    host = os.uname()
    monkeypatch.setattr(time, "time_ns", lambda: NOW_MS * 1_000_000)
    monkeypatch.setattr(secrets, "token_hex", lambda size=4: f"{0xC0DE0000 + next(numbers):0{2 * size}x}")
    monkeypatch.setattr(secrets, "randbits", lambda _: 1)  # the seed of the hashes of an audit
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((host[0], "broker-7", *host[2:])))
    # one task at a time, so that lines always have the same order
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(FileSystem, "file_system_type", lambda *_: "ext4")
    monkeypatch.setattr(FileSystem, "free_bytes", lambda *_: FREE_BYTES)
    # the expected time to compile kernels that no test has compiled
    monkeypatch.setattr(totals, "expected_seconds", lambda _: 0.0)
    monkeypatch.setattr(progress, "PACE_S", 1e9)  # on a busy machine, a line would report that the run continues
    fix_terminal(monkeypatch)


def fix_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix what the width and the colours of output depend on, except COLUMNS."""
    monkeypatch.setattr(typer.rich_utils, "FORCE_TERMINAL", False)
    monkeypatch.setattr(typer.rich_utils, "MAX_WIDTH", None)
    for name in ("FORCE_COLOR", "PY_COLORS", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "LINES", "TERMINAL_WIDTH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


def invoke(words: list[str], columns: int) -> Result:
    result = CliRunner().invoke(app, words, env={"COLUMNS": str(columns)}, prog_name="keytail")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def text_of(case: Case, root: Path, cache: Path, *, on_spark: bool = False) -> str:
    """Run the commands of the case, and return their recording."""

    def normalized(text: str) -> str:
        return _normalized(text, root, on_spark)

    place(case.place, root, cache)
    runs = [_run(case, root, ())]
    if case.both:
        if any("--execute" in command for command in case.commands):
            place(case.place, root, cache)
        runs.append(_run(case, root, ("--output", "json")))
    lines = [f"==== {case.name} (place: {case.place})"]
    for number, command in enumerate(case.commands):
        statuses, outputs, errors = zip(
            *((item.exit_code, normalized(item.stdout), normalized(item.stderr))
              for item in (run[number] for run in runs)),
            strict=True,
        )  # fmt: skip
        lines += ["", f"$ keytail {command}", f"exit status {statuses[0]}"]
        if len(set(statuses)) > 1:
            lines.append(f"exit status with --output json {statuses[1]}")
        lines += _stream("standard output", outputs[0])
        lines += _stream("standard output with --output json", outputs[1]) if case.both else []
        lines += _stream("standard error", errors[0])
        if len(set(errors)) > 1:
            lines += _stream("standard error with --output json", errors[1] or "(nothing)")
    return "\n".join(lines) + "\n"


def _run(case: Case, root: Path, more: tuple[str, ...]) -> list[Result]:
    results = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        fix_machine(monkeypatch)
        for command in case.commands:
            words = [*shlex.split(command.replace(HOST, str(root))), *more]
            monkeypatch.setattr(sys, "argv", ["keytail", *words])  # a ledger records these arguments
            results.append(invoke(words, case.columns))
            _age(root)
    return results


def _age(root: Path) -> None:
    """Set the times of files that a command has just written to those of its clock."""
    for path in root.rglob("*"):
        if path.stat().st_mtime_ns > NOW_MS * 1_000_000:
            os.utime(path, ns=(NOW_MS * 1_000_000,) * 2)


def printed(words: list[str], columns: int) -> str:
    """Run a command line that reads no log dir, and return its recording."""
    done = invoke(words, columns)
    lines = [" ".join(["$ keytail", *words]), f"exit status {done.exit_code}"]
    lines += _stream("standard output", _normalized(done.stdout))
    lines += _stream("standard error", _normalized(done.stderr))
    return "\n".join(lines) + "\n"


def _normalized(text: str, root: Path | None = None, on_spark: bool = False) -> str:
    if root is not None:  # also replaces a path that a table has divided into lines
        text = re.sub(r"(?:\n *)?".join(map(re.escape, str(root))), HOST, text)
    for pattern, word in (*_VARIES, *(_VARIES_ON_SPARK if on_spark else ())):
        text = pattern.sub(word, text)
    return _PROGRESS.sub(lambda found: _sorted(found[0]), text)


def _sorted(lines: str) -> str:
    return "".join(sorted(re.sub(r"\[\d+/", "[N/", line.rstrip("\n")) + "\n" for line in lines.splitlines()))


def _stream(title: str, text: str) -> list[str]:
    return [f"---- {title}", text.rstrip("\n")] if text.strip() else []
