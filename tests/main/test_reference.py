"""The page of commands, flags and settings agrees with the program, shells complete command lines, and the nearest
command or flag is suggested for a misspelt one.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from keytail.cli.rows import NOT_IN_JSON
from keytail.config.keys import KEYS
from keytail.main import main
from keytail.main.main import COMMANDS, app
from tests.main import reference, reference_errors, reference_rows, reference_schemas

PAGE = Path(main.__file__).with_name("REFERENCE.md")


ROWS = PAGE.parents[1] / "cli" / "ROWS.md"


def test_the_page_is_generated_from_the_program() -> None:
    assert PAGE.read_text() == reference.page(), "run `make reference`"


def test_the_page_of_rows_is_generated_from_the_program() -> None:
    assert ROWS.read_text() == reference_rows.page(), "run `make reference`"


def test_the_schemas_are_generated_from_the_program() -> None:
    found = {path.name: path.read_text() for path in reference_schemas.FOLDER.iterdir()}
    assert found == reference_schemas.files(), "run `make reference`"


def test_words_in_brackets_are_not_lost_from_help_texts() -> None:
    """Styles are markup; other words in brackets, as in keytail[report], are text."""
    group = typer.main.get_command(app)
    helps = [help for command in group.commands.values()  # type: ignore[attr-defined]
             for help in (command.help, *(parameter.help for parameter in command.params)) if help]  # fmt: skip
    assert any("keytail\\[report]" in help for help in helps)
    for help in helps:
        assert set(re.findall(r"(?<!\\)\[[a-z#/@][^\[\]]*\]", help)) <= {"[bold]", "[/]"}, help


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.rows])
def test_every_field_of_a_row_is_documented(name: str) -> None:
    """Fields of NOT_IN_JSON, which no output has, are not documented."""
    [section] = [item for item in ROWS.read_text().split("\n## ") if f"`{name}`" in item.partition("\n")[0]]
    for row in COMMANDS[name].rows.values():
        listed = set(re.findall(r"^\| `([\w.\[\]]+)` \|", section, re.MULTILINE))
        assert {field.name for field in dataclasses.fields(row)} - set(NOT_IN_JSON) <= listed


def test_every_command_and_flag_has_a_help_text() -> None:
    page = PAGE.read_text()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command in COMMANDS:
        assert f"## `keytail {command}`\n" in page
        for parameter in commands[command].params:
            assert parameter.help, f"{command} {parameter.opts} has no help"
            assert parameter.param_type_name == "argument" or all(f"`{name}`" in page for name in parameter.opts)
    for key in KEYS:
        assert f"| `{key}` |" in page


def test_every_command_has_an_example() -> None:
    sections = PAGE.read_text().split("\n## ")
    for command in COMMANDS:
        [section] = [item for item in sections if item.startswith(f"`keytail {command}`\n")]
        assert f"\n    keytail {command}" in section


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["co"], {"compact"}),
        (["compact", "--max"], {"--max-record-bytes", "--max-scratch-bytes"}),
        (["compact", "--grouping", ""], {"measured", "kafka"}),
        (["verify", "--log-f"], {"--log-format"}),
    ],
)
def test_shells_complete_command_lines(words: list[str], expected: set[str]) -> None:
    line = {"_KEYTAIL_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["keytail", *words])}
    keytail = Path(sys.executable).with_name("keytail")
    line |= {**os.environ, "COMP_CWORD": str(len(words))}
    done = subprocess.run([keytail], env=line, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == expected


@pytest.mark.parametrize(
    ("words", "nearest"),
    [(["compat"], "compact"), (["compact", "--log-dir", "x"], "--log-dirs"), (["plan", "--topik", "x"], "--topic")],
)
def test_the_nearest_name_is_suggested_for_a_misspelt_one(words: list[str], nearest: str) -> None:
    keytail = Path(sys.executable).with_name("keytail")
    done = subprocess.run([keytail, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert nearest in done.stderr.replace(" ".join(words), "")


ERRORS = PAGE.with_name("ERRORS.md")
# Messages without a remedy: it is in the row or in the lines above, or the message is sufficient.
WITHOUT_REMEDY = 9


@pytest.mark.long
def test_the_page_of_errors_is_generated_from_the_program() -> None:
    assert ERRORS.read_text() == reference_errors.page(), "run `make reference`"


@pytest.mark.long
def test_reported_errors_are_found_on_the_page() -> None:
    page = ERRORS.read_text()
    for words in ("no high watermark", "stray: …", "the log dir is in use", "segment changed since it was planned"):
        assert words in page
    found = set(reference_errors.errors())
    assert len(found) > 250
    assert {item.kind for item in found} == {"Refused", "CorruptLog", "UsageProblem", "KeytailError"}


@pytest.mark.long
def test_few_errors_have_no_remedy() -> None:
    raised = [error for error in reference_errors.errors() if error.is_raised and error.kind != "UsageProblem"]
    without = {item.text for item in raised if not item.remedy}
    assert len(without) <= WITHOUT_REMEDY, without


@pytest.mark.long
def test_each_error_has_a_slug_of_words_in_lower_case() -> None:
    slugs = {error.slug for error in reference_errors.errors() if "…" not in error.slug}
    assert len(slugs) > 150
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", slug) for slug in slugs), slugs


@pytest.mark.parametrize("call", ['kind("damaged", slug="damaged-file")', 'kind("damaged")', 'Refused("damaged")'])
def test_an_error_without_a_visible_class_or_slug_ends_the_generator(tmp_path: Path, call: str) -> None:
    (tmp_path / "broken.py").write_text(f"def fail(kind):\n    raise {call}\n")
    with pytest.raises(ValueError, match=r"broken.py:2: show the class and the slug"):
        reference_errors.errors(tmp_path)


def test_errors_are_found_by_the_variables_that_have_their_text_and_slug(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(
        """
class Torn(CorruptLog):
    default_slug = "torn-file"

def fail(size, path):
    what = f"size {size}" if size else "no size"
    if path:
        raise Torn(what, path=path)
    what, slug = 1, 2
    what = "a second text"
    raise Refused(what, slug="first-slug" if size else "second-slug")
"""
    )
    found = [(item.kind, item.slug, item.text) for item in reference_errors.errors(tmp_path)]
    assert [item for item in found if "-file" in item[1] and item[0] == "CorruptLog"] == [
        ("CorruptLog", "torn-file", "size …"), ("CorruptLog", "torn-file", "no size"),
    ]  # fmt: skip
    assert [item for item in found if item[0] == "Refused"] == [
        ("Refused", "first-slug", "…"), ("Refused", "second-slug", "…"),
    ]  # fmt: skip
