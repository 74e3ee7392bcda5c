"""Examples of `--help` (and of REFERENCE.md, which is made of them): each verb has some, all of them parse, and those
that a test can do are done. Commands of all other pages parse as well, run or not."""

from __future__ import annotations

import re
import shlex
from typing import Any

import typer.main

from keytail.app.cli import VERBS, app
from tests.documentation.pages import blocks, commands, pages

JOBS = {"rebuild_indexes": "rebuild-index", "import_logs": "import"}
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def parses(verb: str, words: list[str]) -> None:
    """Raises a usage error of click where the verb has no such flag, or a value is none of it."""
    COMMANDS[verb].make_context(verb, words)


def _of_keytail(command: str) -> tuple[str, list[str]] | None:
    """The verb and its words, of `keytail VERB ...` or a job under spark-submit; None of all else."""
    if " ..." in command or not re.search(r"keytail|jobs/", command):
        return None
    words = shlex.split(re.split(r" \|(?: |$)", command)[0], comments=True)
    for at, word in enumerate(words):
        if word.rpartition("/")[2] == "keytail" and at + 1 < len(words) and words[at + 1] in VERBS:
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
    for where, verb, words in SAID:
        try:
            parses(verb, words)
        except Exception as problem:
            raise AssertionError(f"{where}: {verb} {words}: {problem}") from problem


def test_every_verb_has_a_command_on_a_page() -> None:
    assert {verb for _, verb, _ in SAID} == set(VERBS)
