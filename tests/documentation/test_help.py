"""The examples of `--help`, which REFERENCE.md contains too: each command has some, all of them parse, and those that a
test can run are run. The commands of all other pages parse as well, whether they are run or not.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from keytail.main.main import COMMANDS, app
from tests.documentation.pages import blocks, commands, pages, text_of
from tests.documentation.prepared import place, unpacked
from tests.documentation.running import Host

JOBS = {"rebuild_indexes": "rebuild-index", "import_logs": "import"}
PARSERS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def parses(name: str, words: list[str]) -> None:
    """Raise a usage error of click if the command has no such flag, or if a value is invalid for it."""
    PARSERS[name].make_context(name, words)


def _of_keytail(command: str) -> tuple[str, list[str]] | None:
    """Return the command and its arguments for `keytail COMMAND ...`, or for a job under spark-submit; None otherwise.
    """
    if " ..." in command or not re.search(r"keytail|jobs/", command):
        return None
    words = shlex.split(re.split(r" \|(?: |$)", command)[0], comments=True)
    for at, word in enumerate(words):
        if word.rpartition("/")[2] == "keytail" and at + 1 < len(words) and words[at + 1] in COMMANDS:
            return words[at + 1], words[at + 2 :]
        if job := re.fullmatch(r".*jobs/(\w+)\.py", word):
            return JOBS.get(job[1], job[1]), words[at + 1 :]
    return None


SAID = [
    (block.where, *found)
    for page in pages()
    for block in blocks(page)
    if block.is_commands and block.mark("status") != "2"
    for command in commands(block.text)
    if (found := _of_keytail(command))
]


def test_commands_of_all_pages_parse() -> None:
    assert len(SAID) > 70
    for where, name, words in SAID:
        try:
            parses(name, words)
        except Exception as problem:
            raise AssertionError(f"{where}: {name} {words}: {problem}") from problem


def test_every_command_has_an_example_on_a_page() -> None:
    assert {name for _, name, _ in SAID} == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_parse_and_are_shown(name: str) -> None:
    assert COMMANDS[name].examples
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "160"})
    lines = [line.strip() for line in shown.output.splitlines()]
    after = lines[lines.index("Examples:") :]
    section = text_of("lib/keytail/main/REFERENCE.md").partition(f"\n## `keytail {name}`\n")[2].partition("\n## ")[0]
    for example in COMMANDS[name].examples:
        command, words = _of_keytail(example) or ("", [])
        assert command == name
        parses(name, words)
        assert example in after
        assert example in " ".join(section.replace("\\\n", "").split())


# For each example that is not run here, the reason, and the test that runs a similar one.
NOT_RUN = {
    "cut": "needs the log dirs of a cluster: tests/cut/test_command.py",
    "erase": "needs a file of keys: tests/documentation/test_guide.py runs it, from erase-keys.md",
    "import": "needs a table: tests/documentation/test_guide.py runs it, from bulk-load.md",
    "export": "starts Spark with Delta's jars: tests/export/test_driver.py",
    "history": "needs a ledger: tests/ledger/test_command.py",
    "downtime": "needs a ledger: tests/downtime/test_downtime.py",
    "report": "needs a ledger: tests/report/test_command.py",
    "undo": "needs a backup: tests/documentation/test_guide.py runs it, from undo-and-salvage.md",
    "audit --erased": "needs a file of keys: tests/audit/test_erased.py",
    "doctor --warm": "takes a minute: tests/doctor/test_command.py",
    "doctor --master": "needs a cluster: tests/doctor/test_command.py",
}
# Topics of the sample log dir that replace the topics of the examples.
TOPICS = {"orders": "gzip", "users": "zstd"}
RUN = [
    example
    for name in COMMANDS
    for example in COMMANDS[name].examples
    if not any(example.startswith(f"keytail {item}") for item in NOT_RUN)
]


def test_most_examples_are_run() -> None:
    assert len(RUN) >= 18
    for why in NOT_RUN.values():
        [path] = re.findall(r"tests/[\w/]+\.py", why)
        assert "\ndef test_" in (Path(__file__).parents[2] / path).read_text()


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("example", RUN)
def test_an_example_succeeds_and_prints_something(example: str, golden: Path, tmp_path: Path) -> None:
    host = Host(tmp_path / "host", golden)
    place("replicas" if " audit " in example else "broker", host.root, golden)
    for theirs, ours in TOPICS.items():
        example = re.sub(rf"\b{theirs}\b", ours, example)
    printed, status = host.run(example)
    assert status in ((0, 1, 3) if " audit " in example else (0,)), printed  # one of the replicas is damaged
    assert printed
