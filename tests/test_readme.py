"""The flags, row fields, statuses, make targets and files that the README, the guide and ROWS.md name exist.

The tests do not check the prose, only that nothing in it has been renamed or removed. tests/documentation checks that
commands do what the pages state.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import typer.main

from keytail.main.main import COMMANDS, app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDE = {path.name: path.read_text() for path in (ROOT / "lib/keytail/guide").glob("*.md")}
ROWS = (ROOT / "lib/keytail/cli/ROWS.md").read_text()
PAGES = "\n".join([README, ROWS, *GUIDE.values()])
# Flags of Kafka and other tools, in the prose and in commands beside those of keytail.
OF_OTHER_TOOLS = {"--conf", "--no-compile", "--partition", "--start-offset"}
OF_OTHER_TOOLS |= {"--bootstrap-server", "--describe", "--entity-type", "--zookeeper"}
OF_OTHER_TOOLS |= {"--build-arg", "--deploy-mode", "--jars", "--load-spark-defaults", "--packages"}
OF_OTHER_TOOLS |= {"--properties-file"}
OF_OTHER_TOOLS |= {"--follow", "--for", "--patch-file", "--timeout", "--type"}  # of kubectl; --force is keytail's, too
MISTYPED = {"--log-dir"}  # intentionally, in troubleshoot.md


def _flags(command_name: str) -> set[str]:
    command = typer.main.get_command(app).commands[command_name]  # type: ignore[attr-defined]
    return {name for parameter in command.params for name in parameter.opts}


def test_every_flag_belongs_to_a_command() -> None:
    known_commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = set().union(*map(_flags, known_commands)) | {"--help", "--install-completion"}
    reported = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGES))
    assert len(reported) > 40
    assert MISTYPED <= reported
    assert reported - OF_OTHER_TOOLS - MISTYPED <= known


@pytest.mark.parametrize("command_name", COMMANDS)
def test_every_command_is_in_the_table_of_the_readme(command_name: str) -> None:
    table = README[README.index("| Command |") :]
    assert f"`{command_name}`" in table[: table.index("\n\n")]


@pytest.mark.parametrize("command_name", ["plan", "compact", "verify", "lookup", "rebuild-index", "describe", "expire"])
def test_every_command_is_described(command_name: str) -> None:
    assert f"keytail {command_name} --config" in PAGES


@pytest.mark.parametrize("status", ["would-compact", "compacted", "clean", "skipped", "refused", "corrupt", "failed"])
def test_every_status_is_described(status: str) -> None:
    assert re.search(rf"^\| `{status}` \| .", ROWS, re.MULTILINE)


def test_make_targets_are_in_the_makefile() -> None:
    targets = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "test", "venv", "bench"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_named_files_exist() -> None:
    named = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"`?((?:lib|jobs|tests|conf)/[\w/.-]+\w)`?", README)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_code_of_log_by_hand_prints_the_output_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code block is run unchanged, and prints what the page shows."""
    [lines] = re.findall(r"^```python\n(.*?)^```$", GUIDE["log-by-hand.md"], re.MULTILINE | re.DOTALL)
    given = {"log_dir": str(tmp_path / "logs"), "now_ms": time.time_ns() // 1_000_000}
    exec(compile(lines, "log-by-hand.md", "exec"), given)
    record, counts = capsys.readouterr().out.splitlines()
    assert "key=b'pen', value=b'2'" in record
    assert counts == "6 -> 2"
    assert {path.name for path in (tmp_path / "logs" / "orders-0").glob("*.log")} == {
        "00000000000000000000.log", "00000000000000000006.log"
    }  # fmt: skip
