"""The commands of the guide and of the README are run unchanged: they have the exit status and print the output that
the page shows.

The commands of other pages are all marked as not run, with the reason, or another test runs them.
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

# Pages whose commands are run by another test.
TESTED_BY = {
    "lib/keytail/run/EXAMPLE.md": "tests/run/test_example.py",
    "lib/keytail/main/REFERENCE.md": "tests/documentation/test_help.py",
}


def _commands(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.is_commands]


def _to_run(page: str) -> list[Block]:
    return [block for block in _commands(page) if block.mark("not run") is None]


TO_RUN = [page for page in pages() if page == "README.md" or (page.startswith("lib/keytail/guide/") and _to_run(page))]
ON_SPARK = [page for page in TO_RUN if any(block.mark("spark") is not None for block in _to_run(page))]
OTHERS = [page for page in pages() if page not in TO_RUN and page not in TESTED_BY and _commands(page)]


@pytest.fixture(scope="module")
def spark() -> Any:
    return shared_session()


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("golden"))


def run_page(page: str, golden: Path, root: Path) -> None:
    host = Host(root, golden)
    first, *_ = _to_run(page)
    assert first.mark("given"), f"{first.where}: a mark `given` must name the host"
    for block in _to_run(page):
        if name := block.mark("given"):
            place(name, host.root, golden)
        run_block(block, host)


@pytest.mark.long
@pytest.mark.parametrize("page", sorted(set(TO_RUN) - set(ON_SPARK)))
def test_commands_print_what_the_page_shows(page: str, golden: Path, tmp_path: Path) -> None:
    run_page(page, golden, tmp_path / "host")


@pytest.mark.spark
@pytest.mark.parametrize("page", ON_SPARK)
def test_commands_print_what_the_page_shows_on_spark(
    page: str, spark: Any, golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lend_session(monkeypatch)
    run_page(page, golden, tmp_path / "host")


def test_there_are_pages_of_each_kind() -> None:
    assert len(TO_RUN) >= 10
    assert ON_SPARK
    assert len(OTHERS) >= 5


@pytest.mark.parametrize("page", OTHERS)
def test_commands_that_are_not_run_have_a_reason(page: str) -> None:
    assert [block.where for block in _to_run(page)] == []


def test_reasons_have_three_words_and_name_existing_tests() -> None:
    marked = [block for page in pages() for block in _commands(page) if block.mark("not run") is not None]
    assert len(marked) >= 15
    for block in marked:
        why = block.mark("not run") or ""
        assert len(why.split()) >= 3, f"{block.where}: the mark has no reason"
        for path in re.findall(r"tests/[\w/]+\.py", why):
            assert "\ndef test_" in (ROOT / path).read_text(), f"{block.where}: {path} has no test"


@pytest.mark.parametrize("page", TESTED_BY)
def test_a_test_of_one_page_names_the_page(page: str) -> None:
    assert Path(page).name in (ROOT / TESTED_BY[page]).read_text()


def test_marks_are_known() -> None:
    """A misspelt mark would be an ordinary comment, and its command would be run, or its output not compared."""
    for page in pages():
        for block in blocks(page):
            for mark in block.marks:
                known = r"(not run:|status \d+$|given: \w+$|spark$|made by )"
                assert re.match(known, " ".join(mark.split())), block.where
