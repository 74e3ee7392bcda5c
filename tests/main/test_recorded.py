"""Each command prints what was recorded in `recorded/`: helps, tables, JSON, errors, exit statuses.

With `KEYTAIL_RECORD=1` the tests write the recordings again, and are skipped; see tests/README.md.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from keytail.doctor import machine
from keytail.doctor.command import OK, WARN, CheckRow
from keytail.main.main import COMMANDS
from keytail.run.kernels import compile_kernels
from tests.main.recorded_cases import ON_SPARK, cases_of
from tests.main.recording import fix_terminal, printed, root_in, text_of

RECORDED = Path(__file__).with_name("recorded")
WIDTHS = (80, 120)
LINES = ([], ["--version"], ["compat"], ["--nosuch"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the root of the places, and the directory from which they are copied, after compiling the kernels: a run
    that compiles them would print it.
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


def test_command_lines_without_a_command_are_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_terminal(monkeypatch)
    check("keytail", "\n".join(printed(words, 100) for words in LINES))


@pytest.mark.parametrize("command", COMMANDS)
def test_output_is_as_recorded(command: str, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    if command == "doctor":
        fix_checks(monkeypatch)
    if command == "jobs-dir":  # elsewhere it prints a path of this machine
        monkeypatch.setattr("keytail.__file__", "/HOST/lib/keytail/__init__.py")
    check(command, "\n".join(text_of(case, *folders) for case in cases_of(command)))


@pytest.mark.spark
@pytest.mark.parametrize("name", ON_SPARK)
def test_output_with_spark_is_as_recorded(name: str, folders: tuple[Path, Path], on_spark: None) -> None:
    check(f"{name}.spark", "\n".join(text_of(case, *folders, on_spark=True) for case in ON_SPARK[name]))


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
