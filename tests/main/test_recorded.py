"""Each command prints what was recorded in `recorded/`: helps, tables, JSON, errors, exit statuses.

With `KEYTAIL_RECORD=1` the tests write the recordings again, and are skipped; see tests/README.md.
"""

from __future__ import annotations

import difflib
import fcntl
import os
import re
import shlex
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from rich.cells import cell_len

from keytail.doctor import machine
from keytail.doctor.command import OK, WARN, CheckRow
from keytail.main.main import COMMANDS
from keytail.run.kernels import compile_kernels
from tests.chance import chance
from tests.cli import forked
from tests.main.places import place
from tests.main.recorded_cases import ON_SPARK, cases_of
from tests.main.recording import HOST, fix_terminal, printed, root_in, text_of

RECORDED = Path(__file__).with_name("recorded")
WIDTHS = (80, 120)
# `dump` prints lines as Kafka's tool does; deltalake's runtime, which the others need, does not survive a fork.
NOT_ON_A_TERMINAL = {"dump", "history", "report", "downtime"}
LINES = ([], ["--version"], ["compat"], ["--nosuch"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the root of the places, and the directory from which they are copied, after compiling the kernels: a run
    that compiles kernels would print messages about that.
    """
    compile_kernels(None, lambda line: None)
    return root_in(tmp_path_factory.mktemp("recorded")), tmp_path_factory.mktemp("places")


def check(name: str, text: str) -> None:
    """Compare the text with the recording of this name, or write the recording."""
    path = RECORDED / f"{name}.txt"
    if os.environ.get("KEYTAIL_RECORD") == "1":
        path.write_bytes(text.encode())
        pytest.skip(f"wrote {path}")
    assert path.exists(), f"there is no recording {path}"
    before = path.read_bytes().decode()
    if text != before:
        changed = difflib.unified_diff(before.splitlines(), text.splitlines(), str(path), "printed now", lineterm="")
        pytest.fail("\n".join(changed), pytrace=False)


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("command", ["keytail", *COMMANDS])
def test_help_is_as_recorded(command: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fix_terminal(monkeypatch)
    check(f"{command}.help-{columns}", printed([*([] if command == "keytail" else [command]), "--help"], columns))


@pytest.mark.parametrize("columns", (60, *WIDTHS))
@pytest.mark.parametrize("command", ["keytail", *COMMANDS])
def test_help_is_complete_and_fits_any_width(command: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only examples, which a reader may copy, may be wider than the terminal."""
    fix_terminal(monkeypatch)
    shown, _, _ = printed([*([] if command == "keytail" else [command]), "--help"], columns).partition(" Examples:")
    assert "\u2026" not in shown
    assert max(map(cell_len, shown.splitlines())) <= columns


def test_command_lines_without_a_command_are_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_terminal(monkeypatch)
    check("keytail", "\n".join(printed(words, 100) for words in LINES))


@pytest.mark.parametrize("command", COMMANDS)
def test_output_is_as_recorded(command: str, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    if command == "doctor":
        fix_checks(monkeypatch)
    if command == "jobs-dir":  # the printed path depends on the installation
        monkeypatch.setattr("keytail.__file__", "/HOST/lib/keytail/__init__.py")
    check(command, "\n".join(text_of(case, *folders) for case in cases_of(command)))


@pytest.mark.spark
@pytest.mark.parametrize("name", ON_SPARK)
def test_output_with_spark_is_as_recorded(name: str, folders: tuple[Path, Path], on_spark: None) -> None:
    check(f"{name}.spark", "\n".join(text_of(case, *folders, on_spark=True) for case in ON_SPARK[name]))


@pytest.mark.long
@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - NOT_ON_A_TERMINAL))
def test_only_single_words_are_wider_than_a_terminal(command: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Each run draws one of the recorded cases and a width of the terminal."""
    draw = chance()
    width = draw.choice((60, 80, 120))
    case = draw.choice([case for case in cases_of(command) if "json" not in " ".join(case.commands)])
    print(case.name, width)
    root, cache = folders
    place(case.place, root, cache)
    for line in case.commands:
        for text in on_terminal(shlex.split(line.replace(HOST, str(root))), width, tmp_path / "screen"):
            shown = text.rsplit("\r", 1)[-1]  # the part that a live view has not overwritten
            name = re.sub(r"^(/\S+): [a-z ]+$", r"\1", shown.removesuffix(" (in use)"))  # a check of a log dir
            words = re.findall(r"(?:`[^`]*`|\S)+", name)
            assert cell_len(shown) <= width or len(words) == 1, f"{line}: {shown}"
            assert "\u2026" not in shown or shown.startswith("  slowest: "), f"{line}: {shown}"


def on_terminal(words: list[str], columns: int, screen: Path) -> list[str]:
    """Run a command line on a terminal of this width; return the lines that it has written, without styles."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    with screen.open("wb") as file:
        reader = subprocess.Popen(["cat"], stdin=ours, stdout=file, stderr=subprocess.DEVNULL)  # `cat` ends with EIO
        os.close(ours)
        forked.keytail(*words, streams=dict.fromkeys(range(3), theirs), COLUMNS="", TERM="xterm")
        os.close(theirs)
        reader.wait(60)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.read_text())
    return text.replace("\r\n", "\n").split("\n")


def test_each_recording_is_compared() -> None:
    names = {"keytail", *COMMANDS, *(f"{name}.spark" for name in ON_SPARK)}
    names |= {f"{command}.help-{columns}" for command in ["keytail", *COMMANDS] for columns in WIDTHS}
    assert {path.name for path in RECORDED.iterdir()} == {f"{name}.txt" for name in names}


def fix_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what `doctor` finds on this machine, but not the names of the checks."""
    for number, name in enumerate(("python", "java", "spark", "delta", "native", "cache", "descriptors", "memory")):
        check_name = getattr(machine, name)(*([None] if name == "delta" else [])).check
        row = CheckRow(check_name, WARN, "FOUND", "REMEDY") if number == 1 else CheckRow(check_name, OK, "FOUND")
        monkeypatch.setattr(machine, name, lambda *_, row=row: row)
    rows = [CheckRow(row.check, OK, "FOUND") for row in machine.extras()]
    monkeypatch.setattr(machine, "extras", lambda: rows)
