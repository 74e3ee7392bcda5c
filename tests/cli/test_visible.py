"""Control characters in names are escaped on a terminal, whichever module prints them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import tty
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from keytail import console
from keytail.cli import rows as show
from keytail.cli.progress import Reporter
from keytail.compact.table import print_table
from keytail.dump.templates import OUT_BYTES
from keytail.errors import CorruptLog, in_words, visible
from keytail.run.rows import ResultRow
from tests.compact.test_command import KEYTAIL
from tests.reference.batches import Rec, encode_batch

EVIL = "/logs/t\x1b[2Jx\r\x07\x9b31m\x7f\u202eabc-0"
SEEN = r"/logs/t\x1b[2Jx\x0d\x07\x9b31m\x7f\u202eabc-0"


@pytest.mark.long
@given(st.text())
def test_every_control_character_is_escaped(text: str) -> None:
    assert not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u2066\u2028" for c in visible(text))
    if text.isprintable():
        assert visible(text) == text


def test_errors_tables_and_progress_escape_control_characters(capfd: pytest.CaptureFixture[str]) -> None:
    row = ResultRow(EVIL, 0, EVIL, "refused", error=f"no: {EVIL}")
    show.error_console().print(f"[bold red]keytail:[/] {in_words(CorruptLog('cut', path=EVIL))}", soft_wrap=True)
    print_table(EVIL, [row, ResultRow("b", 0, "/other", "refused")])
    with Reporter("compact", [("a-0", 1)]) as reporter:
        reporter.done(EVIL, "refused", 1, EVIL)
        reporter.note(EVIL)
    out, err = capfd.readouterr()
    both = out + err
    assert not set("\x1b\r\x07\x9b\x7f\u202e") & set(both)
    assert out.replace("\n", "").count(SEEN) >= 3
    assert err.count(SEEN) == 4


def test_a_terminal_gets_only_the_styles_of_keytail(capfd: pytest.CaptureFixture[str]) -> None:
    console = show.output_console()
    console._force_terminal = True
    table = Table()
    table.add_column("[bold]a[/]")
    table.add_row("\x1b]0;owned\x07")
    console.print(table)
    out = capfd.readouterr().out
    assert r"\x1b]0;owned\x07" in out
    assert "\x1b]0" not in out


def test_a_newline_in_a_path_does_not_begin_a_line() -> None:
    assert "\n" not in in_words(CorruptLog("cut", path="/logs/t\nkeytail: all done"))


# Keys, values and headers as a producer may send them; Kafka's tool prints their bytes unchanged.
SENT = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\r\u202eabc\u2066\u200b\U000e0041 \t\u00e9\u4e2d\U0001f600\\"
AS_TEXT = (
    r"\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\x0d\u202eabc\u2066\u200b\U000e0041" + " \t\u00e9\u4e2d\U0001f600\\"
)
CONTROL_CHARACTERS = set("\x1b\x07\x9b\x7f\u202e\u2066\u200b\U000e0041")


@pytest.fixture
def partition(tmp_path: Path) -> Path:
    """Write a partition with all kinds of text in records, in a file name, and in an entry of a checkpoint."""
    path = tmp_path / f"logs{SENT.replace('/', '')}" / "t-0"
    path.mkdir(parents=True)
    data = SENT.encode()
    # A batch for each byte at which a portion of output may end would be slow; instead, one record spans two portions.
    records = [Rec(0, 1, data, data, ((data, data),)), Rec(1, 1, b"k" * (OUT_BYTES - 100) + data, b"v")]
    (path / f"{0:020d}.log").write_bytes(b"".join(encode_batch([record]) for record in records))
    (path.parent / "replication-offset-checkpoint").write_text(f"0\n1\n{SENT.split(maxsplit=1)[0]} 0 2\n")
    return path


def dumped(partition: Path, *flags: str, terminal: bool) -> str:
    """Return what `dump` writes to standard output, a terminal or a pipe, as text."""
    files = [partition / f"{0:020d}.log", partition.parent / "replication-offset-checkpoint"]
    command = [str(KEYTAIL), "dump", *map(str, files), "--print-data-log", *flags]
    if not terminal:
        return subprocess.run(command, capture_output=True, timeout=120, check=False).stdout.decode()
    ours, theirs = os.openpty()
    tty.setraw(theirs)  # line ends are not translated
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL) as running:
        os.close(theirs)
        found = b""
        with contextlib.suppress(OSError):  # EIO: all descriptors of the terminal are closed
            while piece := os.read(ours, 65536):
                found += piece
        os.close(ours)
        assert running.wait(timeout=120) in (0, 1)
    return found.decode()


@pytest.mark.long
@pytest.mark.parametrize("output", ["table", "json"])
def test_a_producer_cannot_send_escapes_to_a_terminal(output: str, partition: Path) -> None:
    flags = ("--output", output)
    seen = dumped(partition, *flags, terminal=True)
    assert not CONTROL_CHARACTERS & set(seen)
    assert "\r" not in seen
    raw = dumped(partition, *flags, terminal=False)
    assert CONTROL_CHARACTERS & set(raw), "in a pipe the bytes must be unchanged, as Kafka's tool prints them"
    assert dumped(partition, *flags, "--escape", terminal=False) == seen
    assert dumped(partition, *flags, "--no-escape", terminal=True) == raw
    if output == "json":
        objects, plain = ([json.loads(line) for line in text.split("\n") if line] for text in (seen, raw))
        assert objects == plain
        assert SENT in [item.get("key") for item in objects]
    else:
        assert seen.count(AS_TEXT) == raw.count(SENT) == 6


def test_messages_are_divided_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "30")
    text = "keytail: one two three after 1,024 MiB, then `keytail verify` of /a/path/that/is/longer/than/a/line"
    console.print_message(text)
    first, *lines = terminal.getvalue().rstrip("\n").split("\n")
    assert all(re.match(r"  \S", line) for line in lines), "continued lines must be indented"
    lines = [first, *(line[2:] for line in lines)]
    assert " ".join(lines) == text
    assert all(len(line) <= (28 if number else 30) or " " not in line for number, line in enumerate(lines))
    assert any("`keytail verify`" in line for line in lines)
    assert any("1,024 MiB" in line for line in lines), "a number and its unit must not be divided"
    monkeypatch.setattr("sys.stderr", plain := io.StringIO())
    console.print_message(text)
    assert plain.getvalue() == text + "\n"
