"""CONFORMANCE.md has every number once, names only tests that exist, and states what is missing if there is no test."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "tests/CONFORMANCE.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.+) \|$", PAGE, re.MULTILINE)
CITED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@functools.cache
def names_of_tests(path: Path) -> set[str]:
    return {*re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}


def test_every_number_has_its_row_in_order() -> None:
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 72))


def test_every_row_names_a_test_or_states_what_is_missing() -> None:
    silent = [
        number
        for number, _, held in ROWS
        if not CITED.search(held) and not re.search("(Not yet|Out of scope): .", held)
    ]
    assert not silent


def test_every_named_test_exists() -> None:
    cited = set(CITED.findall(PAGE))
    assert len(cited) > 50
    missing = {
        (file, name) for file, name in cited if not (ROOT / file).exists() or name not in names_of_tests(ROOT / file)
    }
    assert not missing
    assert PAGE.count(".py::") == len(CITED.findall(PAGE)), "a citation does not have the form `file.py::test`"


def test_numbers_in_docstrings_are_cited_back() -> None:
    """A test whose docstring begins with numbers must be cited in the rows with these numbers."""
    held = {int(number): text for number, _, text in ROWS}
    for path in (ROOT / "tests").rglob("test_conformance_*.py"):
        for node in ast.parse(path.read_text()).body:
            numbers = (
                re.match(r"([\d, ]+): ", ast.get_docstring(node) or "") if isinstance(node, ast.FunctionDef) else None
            )
            for number in numbers[1].split(",") if numbers else ():
                assert f"{path.relative_to(ROOT)}::{node.name}" in held[int(number)], (
                    f"{number} does not cite {node.name}"
                )
