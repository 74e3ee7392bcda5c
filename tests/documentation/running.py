"""Runs the commands of a page on a host that was prepared for it, and compares their output with the page.

`keytail` runs in this process, other commands in a shell. A path of the page such as /var/lib/kafka is below the
prepared folder. Values that differ between runs are not compared: times, rates, dates, ids of runs, and sizes in KiB.

`python -m tests.documentation.running PAGE` prints the output of the commands of a page, for its author.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from typer.testing import CliRunner

from keytail.main.main import app
from tests.documentation.pages import ROOT, Block, blocks, commands, find_in_order
from tests.documentation.prepared import place, unpacked

_PATHS = re.compile(r"(?<![\w/.-])/(?=(?:var|etc|backup|srv|mnt|snap|lake|tmp)/)")
_ID = re.compile(r"\b(?:\d{8}T\d{6}Z-)?[0-9a-f]{8}\b")
_VARIES = (
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z| UTC)?"), "DATE"),
    (_ID, "ID"),
    (re.compile(r"\b[\d.,]+ [KMGT]?i?B/s"), "RATE"),
    (re.compile(r"\b[\d.,]+ (?:ms|s|min|h|d)\b(?: [\d.,]+ (?:ms|s|min|h)\b)*"), "TIME"),
    (re.compile(r"\d+:\d\d:\d\d"), "TIME"),
    # Values of the machine in the totals of a plan: its disk, its cores, and whether kernels are compiled.
    (re.compile(r"\b[\d.,]+ [MGT]iB free"), "SIZE free"),
    (re.compile(r"\bon \d+ cores?:"), "on CORES:"),
    (re.compile(r"TIME to compile the kernels of both commands, "), ""),
    # In rewritten batches, the horizon of a tombstone depends on the time of the run, and so does the compressed size.
    (re.compile(r"\b[\d.,]+ KiB"), "SIZE"),
    (re.compile(r"-> \d{2,3}(?:,\d{3})+"), "-> BYTES"),
)
_COLUMNS = "300"  # no cell of a table is folded, so that the page may fold its lines anywhere


@dataclass
class Host:
    """A host, whose `root` stands for / on the page. `known` maps ids of runs on the page to those of actual runs."""

    root: Path
    golden: Path
    known: dict[str, str] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)

    def run(self, command: str) -> tuple[str, int]:
        """Run the command, and return the output on both streams, and the exit status."""
        for on_page, actual in self.known.items():
            command = command.replace(on_page, actual)
        command = _PATHS.sub(f"{self.root}/", command)
        words = shlex.split(command, comments=True)
        if words[0] == "keytail" and not re.search(r"(?<!\\)[|<>;&$]", re.sub(r"'[^']*'", "", command)):
            result = CliRunner().invoke(app, words[1:], env={"COLUMNS": _COLUMNS, "SPARK_LOCAL_IP": "127.0.0.1"})
            printed, status = result.output, result.exit_code
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                raise result.exception
        else:
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, env=dict(os.environ, PATH=path, COLUMNS=_COLUMNS),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
            printed, status = done.stdout, done.returncode
        return printed.replace(str(self.root), "").replace(socket.gethostname(), "broker-7"), status

    def map_ids(self, page: str, printed: str) -> None:
        """Assign the new ids of runs on the page to those in the output, in the order of their occurrence."""
        new = [item for item in dict.fromkeys(_ID.findall(printed)) if item not in self.seen]
        on_page = [item for item in dict.fromkeys(_ID.findall(page)) if item not in self.known]
        self.seen += new
        self.known |= dict(zip(on_page, new, strict=False))


def run_block(block: Block, host: Host) -> str:
    """Run the commands and return their output. Raises AssertionError if a command does not print or end as on the
    page.
    """
    printed, status = "", 0
    every = commands(block.text)
    for number, command in enumerate(every, 1):
        message, status = host.run(command)
        printed += message
        wanted = int(block.mark("status") or 0) if number == len(every) else 0
        assert status == wanted, f"{block.where}: {command}: status {status}, not {wanted}\n{message}"
    if block.printed is not None:
        host.map_ids(block.printed, printed)
        missing = missing_of(block.printed, printed)
        assert missing is None, f"{block.where}: missing, or not in this order:\n{missing}\nthe output was:\n{printed}"
    return printed


def missing_of(shown: str, printed: str) -> str | None:
    """Return the first part that the page shows and that was not printed; None if all were printed in this order."""
    return find_in_order([as_compared(part) for part in _parts(shown)], as_compared(printed))


def _parts(printed: str) -> list[str]:
    """Return the parts between lines of three dots, which stand for omitted output."""
    return [part for part in re.split(r"^\s*\.\.\.\s*$", printed, flags=re.MULTILINE) if part.strip()]


def as_compared(text: str) -> str:
    """Return the text without values that differ between runs, and with single blanks, so that lines may be folded
    anywhere.
    """
    for pattern, word in _VARIES:
        text = pattern.sub(word, text)
    return " ".join(text.split())


def main(page: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        golden = unpacked(Path(folder) / "golden")
        host = Host(Path(folder) / "host", golden)
        place("broker", host.root, golden)
        for block in blocks(page):
            if not block.is_commands or block.mark("not run") is not None:
                continue
            if name := block.mark("given"):
                place(name, host.root, golden)
            for command in commands(block.text):
                message, status = host.run(command)
                host.map_ids(block.printed or "", message)
                print(f"$ {command}\n{message}[{status}]\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
