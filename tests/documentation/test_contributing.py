"""The worked change of the page CONTRIBUTING is in the files that the page names, and exceptions have their reasons."""

from __future__ import annotations

import re

from tests.documentation.pages import ROOT, text_of


def test_the_worked_change_is_in_the_files() -> None:
    text = text_of("lib/keytail/CONTRIBUTING.md")
    steps = re.findall(r"In `([\w/.]+)`.*?```diff\n(.*?)```", text, re.DOTALL)
    assert [path for path, _ in steps] == ["tests/main/test_suggestions.py", "lib/keytail/describe/command.py"]
    for path, diff in steps:
        source = (ROOT / path).read_text()
        for sign, line in re.findall(r"^ *([+-])(.*)$", diff, re.MULTILINE):
            assert (f"{line}\n" in source) == (sign == "+"), (path, line)


def test_the_named_limits_and_targets_exist() -> None:
    text = text_of("lib/keytail/CONTRIBUTING.md")
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`?make ([a-z]+)", text))
    assert {"check", "test", "release", "reference"} <= targets
    assert all(f"\n{target}:" in makefile for target in targets)


def test_each_exception_to_a_check_has_its_reason() -> None:
    without = re.compile(r"^.*# (?:noqa(?:: [A-Z0-9, ]+)?|type: ignore(?:\[[a-z, -]+\])?)$", re.MULTILINE)
    paths = [path for home in ("lib", "airflow_dags") for path in (ROOT / home).rglob("*.py")]
    assert [line for path in paths for line in without.findall(path.read_text())] == []
