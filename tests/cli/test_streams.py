"""Runs whose output is lost: closed descriptors, a full disk, a closed pipe.

Their work and exit status are those of a run with output, and no output is written to another file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.forked import CLOSED, keytail
from tests.compact.test_command import CONFIG, KEYTAIL
from tests.log_dirs import random_records, snapshot, write_log_dir

NOW = ("--now", "1750000000000", "--unsafe-clock")
LOST = {
    "closed out": (">&-", True, False),
    "closed err": ("2>&-", False, True),
    "closed both": (">&- 2>&-", True, True),
    "closed all": ("<&- >&- 2>&-", True, True),
    "full out": (">/dev/full", True, False),
    "full err": ("2>/dev/full", False, True),
    "full both": (">/dev/full 2>/dev/full", True, True),
}


def run(redirection: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", str(KEYTAIL), *map(str, arguments)]
    return subprocess.run(shell, capture_output=True, text=True, timeout=800, check=False)


def streams_of(redirection: str) -> dict[int, int | str]:
    """Return the streams of a fork that correspond to a shell's redirection."""
    found = re.findall(r"(\d?)([<>])(&-|/dev/full)", redirection)
    return {int(fd or ">" in sign): CLOSED if target == "&-" else target for fd, sign, target in found}


def without_reader(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    nobody, out = os.pipe()
    os.close(nobody)
    try:
        return keytail(*arguments, streams={1: out})
    finally:
        os.close(out)


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    return write_logs(tmp_path / "logs")


def write_logs(path: Path) -> Path:
    return write_log_dir(path, {"orders-0": random_records(0, 400), "orders-1": random_records(1, 400)})


def damage(log_dir: Path) -> None:
    log = log_dir / "orders-1" / f"{100:020d}.log"
    data = bytearray(log.read_bytes())
    data[200] ^= 1
    log.write_bytes(data)


def contents(log_dir: Path) -> dict[str, bytes]:
    return {name: data for name, (data, _) in snapshot(log_dir).items()}


def rows_of(file: Path) -> list[tuple[str, int, str, int]]:
    rows = json.loads(file.read_text())
    return [(row["topic"], row["partition"], row["status"], row["bytes_after"]) for row in rows]


@pytest.mark.long
@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_without_output_has_the_same_files_and_status(damaged: bool, tmp_path: Path) -> None:
    """With each kind of lost output, and with rows as a table and as JSON, the files, rows and status are those of a
    run with output.
    """

    def compacted(name: str, output: str, redirection: str | None) -> tuple[int, dict[str, bytes], object, str]:
        """Return status, files, rows and errors of a run, in a new process if Python must start with closed streams."""
        log_dir = write_logs(tmp_path / name / "logs")
        if damaged:
            damage(log_dir)
        rows = tmp_path / name / "rows.json"
        flags = ("--log-dirs", log_dir, *CONFIG, *NOW, "--execute", "--output", output, "--rows-file", rows)
        if redirection is None:
            done = without_reader("compact", *flags)
        elif "closed" in name and not damaged:
            done = run(redirection, "compact", *flags)
        else:
            done = keytail("compact", *flags, streams=streams_of(redirection))
        return done.returncode, contents(log_dir), rows_of(rows), done.stderr

    status, files, rows, _ = compacted("plain", "json", "")
    assert status == (3 if damaged else 0)
    kinds: dict[str, tuple[str | None, bool, bool]] = {**LOST, "no reader": (None, True, False)}
    for number, (kind, (redirection, out_lost, err_lost)) in enumerate(kinds.items()):
        if damaged and kind not in ("full out", "closed both"):
            continue
        output = ("json", "table")[number % 2]
        got = compacted(kind.replace(" ", "-"), output, redirection)
        assert got[:3] == (status, files, rows), kind
        message = got[3]
        assert "Traceback" not in message and "Exception" not in message, message
        assert message.count("standard output cannot be written") == (out_lost and not err_lost), (kind, message)


@pytest.mark.long
def test_a_read_only_command_reports_lost_output(log_dir: Path) -> None:
    """The commands run in forks, whose streams are opened as Python opens them; the test above uses real processes."""
    flags = ("--log-dirs", log_dir, "--output", "json")
    full = "/dev/full"
    for arguments in (("verify", *flags), ("dump", log_dir / "orders-0" / f"{100:020d}.log"), ("--help",)):
        for streams, status in (({1: CLOSED}, 0), ({1: full}, 1), ({1: CLOSED, 2: CLOSED}, 0)):
            done = keytail(*arguments, streams=streams)
            assert done.returncode == status, (arguments, streams, done.stderr)
            assert "Traceback" not in done.stderr
            assert done.stderr.count("standard output cannot be written") == (2 not in streams)
            if status:
                assert "No space left on device" in done.stderr
        removed = without_reader(*arguments)
        assert removed.returncode == 141, removed.stderr
        assert not removed.stderr or arguments[0] == "verify"  # `verify` prints its progress to stderr
        assert "Traceback" not in removed.stderr
    damage(log_dir)
    for streams in ({1: CLOSED}, {1: full}, {2: CLOSED}):
        assert keytail("verify", *flags, streams=streams).returncode == 1, (
            "the status must report that something was found"
        )
    for streams in ({2: CLOSED}, {2: full}):
        assert keytail("verify", "--no-such-flag", streams=streams).returncode == 2
        assert keytail("verify", "--log-dirs", log_dir / "none", streams=streams).returncode == 2


# Runs the command line, and records each file that gets the descriptor of a standard stream.
OPENING = """
import os, sys
real, notes = os.open, sys.argv[1]

def noting(path, *args, **more):
    fd = real(path, *args, **more)
    if fd <= 2 and path != os.devnull:
        note = real(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(note, f"{fd} {path}\\n".encode())
        os.close(note)
    return fd

os.open = noting
from keytail.main.main import main
main(sys.argv[2:])
"""


@pytest.mark.long
@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_gets_the_number_of_a_standard_stream(redirection: str, log_dir: Path, tmp_path: Path) -> None:
    """If a file had such a number, output of Python, or of a library, would be written into a segment or a lock
    file."""
    notes = tmp_path / "notes"
    flags = ("compact", "--log-dirs", log_dir, *CONFIG, *NOW, "--execute")
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", OPENING, notes, *flags]
    done = subprocess.run(list(map(str, shell)), capture_output=True, text=True, timeout=800, check=False)
    assert not notes.exists(), notes.read_text()
    assert done.returncode == 0, done.stderr
    for log in log_dir.rglob("*.log"):
        assert b"keytail" not in log.read_bytes()
