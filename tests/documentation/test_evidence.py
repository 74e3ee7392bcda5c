"""The tables of evidence: the figures are on the linked pages, and the commands and tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documentation.pages import ROOT, text_of

PAGE = "lib/keytail/EVIDENCE.md"
TEXT = text_of(PAGE)
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in TEXT.splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| What", "| Promise", "| Log"))
]
_FIGURE = re.compile(r"(?<![\w.=])\d+(?:,\d{3})*(?:\.\d+)?(?![\w.]*\w)")


@pytest.mark.parametrize("row", [row for row in ROWS if "](" in "".join(row) and re.search(r"\d", "".join(row[1:3]))])
def test_figures_are_on_the_linked_page(row: list[str]) -> None:
    [link] = re.findall(r"\]\(([^)#]+)", " ".join(row))
    page = " ".join(((ROOT / PAGE).parent / link).resolve().read_text().split())
    of_row = [figure for cell in row[1:3] for figure in _FIGURE.findall(re.sub(r"`[^`]*`|\([^)]*\)", "", cell))]
    assert of_row
    for figure in of_row:
        assert re.search(rf"(?<![\w.,]){re.escape(figure)}(?![\w,]|\.\d)", page), f"{figure} is not on {link}"


def test_ratios_are_those_of_the_page_of_benchmarks() -> None:
    reported = dict(re.findall(r"^\| (`\w+`) \| ([\d.]+) \|$", TEXT, re.MULTILINE))
    table = re.findall(
        r"^\| (`\w+`) \| \d+ \| [\d.]+ s \| [\d.]+ s \| ([\d.]+) \|", text_of("tests/bench/README.md"), re.MULTILINE
    )
    assert len(reported) == 8
    assert reported == dict(table)


def test_tests_and_commands_exist() -> None:
    tests = re.findall(r"`((?:tests|lib)/[\w/]+\.py)`", TEXT)
    assert len(tests) > 12
    for path in tests:
        assert (ROOT / path).exists(), path
    collected = re.findall(r"`pytest ([\w/.]+)`", TEXT)
    assert len(collected) > 8
    for path in collected:
        assert (ROOT / path).exists(), path
        found = [ROOT / path] if path.endswith(".py") else [*Path(ROOT / path).glob("test_*.py")]
        assert any("\ndef test_" in item.read_text() for item in found), path


def test_flags_of_modules_exist() -> None:
    """In `python -m tests.x --flag`, the flag must occur in the source of the module."""
    message = re.findall(r"`(?:\w+=\S+ )*python -m (tests[\w.]+)([^`]*)`", TEXT)
    assert len(message) > 6
    for module, words in message:
        path = ROOT / module.replace(".", "/")
        sources = [item.read_text() for item in (path.with_suffix(".py"), *path.parent.glob("*.py")) if item.exists()]
        for flag in re.findall(r"--[a-z-]+", words):
            assert any(f'"{flag}"' in source for source in sources), f"{module} {flag}"
