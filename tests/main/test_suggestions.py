"""Suggestions for an unknown command or flag, by its meaning and then by its spelling."""

from __future__ import annotations

import pytest
import typer

from keytail.cli.options import FLAGS_MEANT
from keytail.main.main import COMMANDS, app
from keytail.main.suggestions import about_flag, commands_meant
from tests.command_line import Run

ALSO_CALLED = {name: command.also_called for name, command in COMMANDS.items()}
GROUP = typer.main.get_command(app)
FLAGS = {
    name: {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    for name, command in GROUP.commands.items()  # type: ignore[attr-defined]
}


@pytest.mark.parametrize(
    ("word", "commands"),
    [
        ("repair", ["rebuild-index", "salvage"]), ("clean", ["compact"]), ("compaction", ["compact"]),
        ("fsck", ["verify"]), ("check", ["verify", "doctor"]), ("Retention", ["expire"]), ("diff", ["audit"]),
        ("compat", ["compact"]), ("verfy", ["verify"]), ("repiar", ["rebuild-index", "salvage"]), ("xyzzy", []),
        ("size", ["describe"]),
    ],
)  # fmt: skip
def test_commands_are_suggested_for_a_word_with_their_meaning(word: str, commands: list[str]) -> None:
    assert commands_meant(word, ALSO_CALLED) == commands


def test_no_synonym_is_the_name_of_a_command() -> None:
    for name, words in ALSO_CALLED.items():
        assert name not in words
        assert not set(words) & set(COMMANDS)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "jobs-dir"])
@pytest.mark.parametrize("flag", ["--dry-run", "-n"])
def test_a_dry_run_is_the_default_or_not_needed(command: str, flag: str, run: Run) -> None:
    result = run(command, flag)
    assert result.exit_code == 2
    expected = "A dry run is the default: omit --execute" if "--execute" in FLAGS[command] else "changes nothing"
    assert f"No such option: {flag}. " in result.stderr
    assert expected in result.stderr


@pytest.mark.parametrize(
    ("command", "flag", "text"),
    [
        ("expire", "--retention-bytes", "--topic-config TOPIC:retention.bytes=VALUE"),
        ("compact", "--min.cleanable.dirty.ratio", "--topic-config TOPIC:min.cleanable.dirty.ratio=VALUE"),
        ("verify", "--retention-bytes", "retention.bytes is a topic setting; this command uses no topic settings"),
        ("expire", "--log-retention-hours", "which is read from the file that --config names"),
        ("plan", "--bootstrap-server", "Give --config or --log-dirs"),
        ("compact", "--yes", "Did you mean --execute?"),
        ("compact", "--excute", "Did you mean --execute?"),
        ("lookup", "--json", "Did you mean --output json?"),
        ("plan", "--output-dir", "--output-dir is a flag of compact and cut"),
        ("compact", "--threads", "Did you mean --master 'local[N]'?"),
        ("verify", "--fix", "keytail salvage saves the intact batches of a damaged log"),
        ("compact", "--xyzzy", ""),
    ],
)
def test_a_flag_is_suggested_for_another_one_with_its_meaning(command: str, flag: str, text: str, run: Run) -> None:
    assert about_flag(flag, FLAGS[command], FLAGS).endswith(text)
    for arguments in ([flag], [f"{flag}=1"]):
        result = run(command, *arguments)
        assert result.exit_code == 2
        assert f"No such option: {flag}" in result.stderr
        assert text in result.stderr


def test_every_suggested_flag_exists() -> None:
    every = set().union(*FLAGS.values())
    for flag, meant in FLAGS_MEANT.items():
        assert {name.split()[0] for name in meant} <= every, flag


def test_an_unknown_command_is_reported_with_suggestions(run: Run) -> None:
    result = run("repair")
    assert result.exit_code == 2
    assert "No such command 'repair'. Did you mean rebuild-index or salvage?" in result.stderr
    for word in ("help", "version"):
        assert f"No such command '{word}'. Did you mean keytail --{word}?" in run(word).stderr
    assert "(gzip). To select topics, give --topic-list TOPIC[,TOPIC]" in run("plan", "gzip").stderr
    assert "No such command 'xyzzy'." in run("xyzzy").stderr


def test_a_job_under_spark_submit_prints_suggestions() -> None:
    """The job is run without the group of all commands."""
    command = GROUP.commands["compact"]  # type: ignore[attr-defined]
    with pytest.raises(Exception, match=r"No such option: --log-dirz. Did you mean --log-dirs\b"):
        command.main(["--log-dirz", "X"], prog_name="compact.py", standalone_mode=False)
