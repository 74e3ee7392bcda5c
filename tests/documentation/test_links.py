"""The targets of links and references exist: files, headings, modules to be run, make targets, and tests."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests import terms
from tests.documentation.pages import ROOT, pages, text_of

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def _prose(page: str) -> str:
    """Return the page without fenced blocks and code spans, in which brackets have other meanings."""
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "`", text)


def anchors(page: str) -> set[str]:
    """Return the anchors of the page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+?)\s*$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        number = sum(item == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", item) is not None for item in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


@pytest.mark.parametrize("page", pages())
def test_the_targets_of_links_exist(page: str) -> None:
    for link in _LINK.findall(_prose(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(str(target.resolve().relative_to(ROOT))), f"{page}: {link}"


def test_the_pages_have_links() -> None:
    links = [link for page in pages() for link in _LINK.findall(_prose(page))]
    assert len(links) > 100
    assert sum("#" in link for link in links) >= 8


# Pages that, as they state, name modules of earlier versions; and names in invented examples.
_OF_EARLIER_STATES = ("tests/MUTATION.md", "CHANGES.md")
_EXAMPLES = ("file.py", "broken.py", "query.py", "JOBS/compact.py")
_FILE = re.compile(r"(?<![\w./-])(?:\.\./)*([\w-][\w./-]*\.(?:py|md))\b(?![\w/])")


@pytest.mark.long
def test_files_that_code_and_pages_name_exist() -> None:
    """A name may omit leading folders. Of Python files, only comments, docstrings and messages are read."""
    files = terms.files()
    known = {"/".join(parts[start:]) for parts in (file.split("/") for file in files) for start in range(len(parts))}
    named = [
        (file, line, name)
        for file in files
        if file.endswith((".py", ".md")) and file not in _OF_EARLIER_STATES
        for line, text in terms.texts(file, (ROOT / file).read_text())
        for name in _FILE.findall(text)
    ]
    assert len(named) > 1000
    assert [where for where in named if where[2] not in known and where[2] not in _EXAMPLES] == []


@pytest.mark.parametrize("page", pages())
def test_named_modules_make_targets_and_tests_exist(page: str) -> None:
    text = text_of(page)
    for module in re.findall(r"python3? -m ((?:tests|keytail)[\w.]*\w)", text):
        assert importlib.util.find_spec(module), f"{page}: python -m {module}"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^    |^```sh\n)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: make {target}"
    for path, test in re.findall(r"\b((?:tests|jobs|airflow_dags)/[\w/]+\.py)(?:::(\w+))?", text):
        assert (ROOT / path).exists(), f"{page}: {path}"
        assert not test or f"def {test}" in (ROOT / path).read_text(), f"{page}: {path}::{test}"


def test_every_page_of_the_guide_is_in_the_readme() -> None:
    links = {Path(link.partition("#")[0]).name for link in _LINK.findall(_prose("README.md"))}
    guide = {Path(page).name for page in pages() if page.startswith("lib/keytail/guide/")}
    assert len(guide) >= 12
    assert guide <= links
