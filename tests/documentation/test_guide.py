"""The guide and the README are worked as they stand: commands end as they say, and print what the page prints.

All commands of other pages are marked as not run, with the reason; or a test of their own holds the page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.documentation.pages import ROOT, Block, blocks, pages
from tests.documentation.prepared import place, unpacked
from tests.documentation.running import Host, run_block
from tests.run.shared import lend_session, shared_session

# Of these another test runs every command.
HELD_BY = {
    "lib/keytail/run/EXAMPLE.md": "tests/run/test_example.py",
    "lib/keytail/main/REFERENCE.md": "tests/documentation/test_help.py",
}


def _commands(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.is_commands]


def _worked(page: str) -> list[Block]:
    return [block for block in _commands(page) if block.mark("not run") is None]


WORKED = [page for page in pages() if page == "README.md" or (page.startswith("lib/keytail/guide/") and _worked(page))]
ON_SPARK = [page for page in WORKED if any(block.mark("spark") is not None for block in _worked(page))]
OTHERS = [page for page in pages() if page not in WORKED and page not in HELD_BY and _commands(page)]


@pytest.fixture(scope="module")
def spark() -> Any:
    return shared_session()


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("golden"))


def work(page: str, golden: Path, root: Path) -> None:
    host = Host(root, golden)
    first, *_ = _worked(page)
    assert first.mark("given"), f"{first.where}: on which host? A mark `given` says it"
    for block in _worked(page):
        if name := block.mark("given"):
            place(name, host.root, golden)
        run_block(block, host)


@pytest.mark.long
@pytest.mark.parametrize("page", sorted(set(WORKED) - set(ON_SPARK)))
def test_its_commands_do_what_it_says(page: str, golden: Path, tmp_path: Path) -> None:
    work(page, golden, tmp_path / "host")


@pytest.mark.spark
@pytest.mark.parametrize("page", ON_SPARK)
def test_its_commands_do_what_it_says_on_spark(
    page: str, spark: Any, golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lend_session(monkeypatch)
    work(page, golden, tmp_path / "host")


def test_there_are_pages_of_each_kind() -> None:
    assert len(WORKED) >= 10
    assert ON_SPARK
    assert len(OTHERS) >= 5


@pytest.mark.parametrize("page", OTHERS)
def test_what_is_not_run_says_why(page: str) -> None:
    assert [block.where for block in _worked(page)] == []


def test_reasons_are_reasons_and_name_tests_that_exist() -> None:
    marked = [block for page in pages() for block in _commands(page) if block.mark("not run") is not None]
    assert len(marked) >= 15
    for block in marked:
        why = block.mark("not run") or ""
        assert len(why.split()) >= 3, f"{block.where}: why not?"
        for path in re.findall(r"tests/[\w/]+\.py", why):
            assert "\ndef test_" in (ROOT / path).read_text(), f"{block.where}: {path} has no test"


@pytest.mark.parametrize("page", HELD_BY)
def test_a_page_with_a_test_of_its_own_is_named_there(page: str) -> None:
    assert Path(page).name in (ROOT / HELD_BY[page]).read_text()


def test_marks_are_known() -> None:
    """A misspelt one would be a comment, and its command run or believed without it."""
    for page in pages():
        for block in blocks(page):
            for mark in block.marks:
                known = r"(not run:|status \d+$|given: \w+$|spark$|made by )"
                assert re.match(known, " ".join(mark.split())), block.where
