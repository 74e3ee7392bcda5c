"""The selection of topics and partitions: one meaning of --topic in all commands, checked before anything is done."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from keytail.cli.flags import flags_of
from keytail.main.main import COMMANDS
from tests.command_line import Run, rows_of
from tests.log_dirs import snapshot

# Arguments besides --log-dirs that commands require; {} is the log dir, {tmp} the directory above it.
_REQUIRED = {
    "lookup": ("--offset", "0"),
    "erase": ("--keys-file", "{tmp}/keys.txt"),
    "export": ("--to", "{tmp}/lake"),
    "salvage": ("--to", "{tmp}/salvaged"),
    "audit": ("--replica", "a={}", "--replica", "b={tmp}/replica"),
}
_SELECTING = [name for name, command in COMMANDS.items() if {"topic", "topic_list"} <= {*flags_of(command.request)}]


def _arguments(command: str, log_dir: Path) -> list[str]:
    (log_dir.parent / "keys.txt").write_text("key-1\n")
    if command == "audit":
        shutil.copytree(log_dir, log_dir.parent / "replica")
    log_dirs = () if command == "audit" else ("--log-dirs", "{}")
    required = (*log_dirs, *_REQUIRED.get(command, ()))
    return [command, *(item.format(log_dir, tmp=log_dir.parent) for item in required)]


def test_every_command_with_topics_is_tested() -> None:
    with_topics = {name for name, command in COMMANDS.items() if "topic" in flags_of(command.request)}
    assert with_topics == {*_SELECTING, "import"}
    assert len(_SELECTING) >= 11


@pytest.mark.parametrize("command", _SELECTING)
@pytest.mark.parametrize(
    "wrong", [("--topic", "nosuch.*"), ("--topic-list", "users,nosuch"), ("--partitions", "users-0,nosuch-0")]
)
def test_a_name_or_pattern_without_a_match_is_refused(
    command: str, wrong: tuple[str, str], run: Run, log_dir: Path
) -> None:
    before = snapshot(log_dir)
    result = run(*_arguments(command, log_dir), "--topic", "orders", *wrong)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nosuch" in result.stderr
    assert "[unknown-topic-or-partition]" in result.stderr
    assert snapshot(log_dir) == before


@pytest.mark.parametrize("pattern, question", [("order", "Did you mean orders?"), ("userz", "Did you mean users?")])
def test_similar_topics_are_named(pattern: str, question: str, run: Run, log_dir: Path) -> None:
    result = run("describe", "--log-dirs", log_dir, "--topic", pattern)
    assert result.exit_code == 2
    assert question in result.stderr.replace("\n", " ")
    assert "Select from these topics: orders, users" in result.stderr.replace("\n", " ")


def test_a_pattern_is_refused_in_empty_log_dirs(run: Run, tmp_path: Path) -> None:
    (tmp_path / "meta.properties").write_text("version=1\nnode.id=1\n")
    assert run("describe", "--log-dirs", tmp_path).exit_code == 0
    result = run("describe", "--log-dirs", tmp_path, "--topic", ".*")
    assert result.exit_code == 2
    assert "contain no partition" in result.stderr
    assert "[unknown-topic-or-partition]" in result.stderr


def test_a_pattern_matches_the_whole_name(run: Run, log_dir: Path) -> None:
    def found(*flags: str) -> set[str]:
        return rows_of(run("describe", "--log-dirs", log_dir, *flags, "--output", "json")).keys()

    assert found("--topic", "orders") == {"orders-0", "orders-1"}
    assert found("--topic", "u.*", "--topic-list", "orders") == {"orders-0", "orders-1", "users-0"}
    assert found("--topic", "orders|users", "--partitions", "orders-1") == {"orders-1"}


@pytest.mark.parametrize("topic", ["orders.*", "orders|users", "(orders)", "^orders$", ""])
def test_import_refuses_a_pattern(topic: str, run: Run, log_dir: Path) -> None:
    result = run("import", "source.parquet", "--log-dirs", log_dir, "--topic", topic)
    assert result.exit_code == 2
    assert "[invalid-topic-name]" in result.stderr
