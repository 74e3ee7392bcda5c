"""Pages as a real browser shows them: on a phone and on a screen, in light and dark mode, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report import browser
from tests.report.case import pages_to_inspect

WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return pages_to_inspect()


@pytest.mark.long
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_have_no_errors_in_a_browser(theme: browser.Theme, pages: dict[str, str]) -> None:
    examined = browser.inspect_pages(list(pages.values()), WIDTHS, theme)
    assert examined.console == []
    assert len(examined.found) == len(pages) * len(WIDTHS)
    names = list(pages)
    for item in examined.found:
        about = (names[item["page"]], item["width"])
        assert item["scroll"] <= item["width"], (about, item["wide"])
        assert item["wide"] == [], about
        assert item["loaded"] == [], about
        assert item["cut"] == [], about
        assert item["least_text"] >= 10, about
        assert item["dark"] == (theme == "dark"), about
        assert item["first_screen"] < 800 or about[0] == "evil", (
            "the verdict and the next step must fit on the screen of a phone"
        )
        assert item["headline"], about
        if about[0] != "nothing":
            assert item["sorted"], about
        if about[0] in ("small", "large"):
            assert item["filtered"] == 1, about
    papers = {item["paper"] for item in examined.found}
    assert papers == {"rgb(251, 251, 249)" if theme == "light" else "rgb(20, 22, 26)"}


def test_the_browser_would_have_reported_errors(tmp_path: Path) -> None:
    """A page with errors has the results for which the test above fails."""
    wrong = (
        "<!doctype html><title>t</title><header></header><h1>h</h1><div style='width: 2000px'>w</div>"
        "<script src='http://127.0.0.1:9/x.js'></script><script>throw new Error('told')</script>"
    )
    examined = browser.inspect_pages([wrong], [390], "light")
    assert examined.found[0]["scroll"] > 390
    assert examined.found[0]["wide"]
    assert examined.found[0]["loaded"]
    assert any("told" in line for line in examined.console)
